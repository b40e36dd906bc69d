"""Keys of methods: types, ranges, signatures, and what stored parameters show of them."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest

from specjax import config, control, declare, drafters
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.heads.multi import medusa
from specjax.errors import UserError
from specjax.run import settings
from specjax.run.settings import GridKeys

pytestmark = pytest.mark.fast


class Shared(declare.Keys):
    """Keys of several methods."""

    seed: int = key(0, "the seed")


class Keys(Shared):
    """Keys of one method."""

    gamma: int = key(4, "tokens", least=1, size=lambda params: len(params["heads"]))
    passes: int = key(2, "passes", least=1, most=2)
    rate: float | None = key(None, "a rate", above=0, below=1, fact="rate", missing=0.5)
    scale: float = key(1.0, "a scale", least=0)
    mode: str = key("", "the mode", choices=("", "a", "b"), fact="mode")
    tied: bool = key(False, "whether it is tied", part="tied")
    anchor: bool = key(False, "what files may not state", fact="anchor", override=True)
    taps: str | tuple = key((), "layers", parse=lambda value: tuple(map(int, value)), fact="taps")
    model: str = key(help="a directory")
    params: dict | None = key(None, "parameters", python=True)
    dtype: str | None = key(None, "their dtype", python=True)

    def check(self) -> None:
        if self.mode == "b" and self.gamma > 4:
            raise UserError("mode b drafts at most 4 tokens")


@declare.method(Keys)
def make(target, keys: Keys) -> tuple:
    """Makes a pair."""
    return target, keys


def test_a_method_has_a_real_signature_and_checked_keys():
    target, keys = make("target", model="dir", gamma=np.int64(3), taps="12")
    assert target == "target" and (keys.gamma, keys.seed, keys.taps) == (3, 0, (1, 2))
    assert type(keys.gamma) is int
    names = list(inspect.signature(make).parameters)
    assert names == ["target", *(field.name for field in dataclasses.fields(Keys)[1:]), "seed"]
    assert inspect.signature(make).parameters["gamma"].default == 4
    assert inspect.signature(medusa.make).parameters["layers"].default == 0
    assert make.__doc__ == "Makes a pair."
    own = declare.of(make)
    assert own["model"].required and not own["gamma"].required
    types = {name: each.type for name, each in own.items()}
    assert (types["gamma"], types["rate"], types["tied"], types["taps"]) == (int, float, bool, str)


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"gamma": 2.5}, "gamma is 2.5; it must be a whole number >= 1"),
        ({"passes": 3}, "passes is 3; it must be a number from 1 to 2"),
        ({"rate": 1.0}, "rate is 1.0; it must be a number in (0, 1)"),
        ({"scale": -1.0}, "scale is -1.0; it must be a number >= 0"),
        ({"scale": float("nan")}, "scale is nan; it must be a number >= 0"),
        ({"mode": "c"}, "mode is 'c'; it must be one of a, b"),
        ({"tied": 1}, "tied is 1; it must be True or False"),
        ({"mode": "b", "gamma": 5}, "mode b drafts at most 4 tokens"),
    ],
)
def test_a_wrong_value_is_one_line(keys, message):
    with pytest.raises(UserError) as caught:
        make("target", model="dir", **keys)
    assert str(caught.value) == message


def given(params, config):
    return files.Given(None, params, config)


def test_stored_parameters_decide_and_a_key_that_differs_is_refused():
    stored = {"heads": [0] * 7, "tied": {}}
    config = {"mode": "a", "anchor": True, "taps": [1, 2]}
    keys = given(stored, config).agree("mine", Keys(model="dir"))
    assert (keys.gamma, keys.tied, keys.rate, keys.mode) == (7, True, 0.5, "a")
    assert keys.anchor and keys.taps == (1, 2)
    # Without a config.json only the tensors show something.
    keys = given(stored, {}).agree("mine", Keys(model="dir", mode="a", rate=0.1, gamma=4))
    assert (keys.gamma, keys.rate, keys.mode) == (7, 0.1, "a")
    new = Keys(model="dir", gamma=3)
    assert given(None, {}).agree("mine", new) is new
    assert given(stored, {}).agree("mine", Keys(model="dir"), seed=5).seed == 5
    for asked, message in (
        ({"gamma": 3}, "gamma is 3, and the given mine has 7; leave it out"),
        ({"mode": "b"}, "mode is 'b', and the given mine has 'a'; leave it out"),
        ({"taps": "2"}, "taps is (2,), and the given mine has (1, 2); leave it out"),
    ):
        with pytest.raises(UserError) as caught:
            given(stored, config).agree("mine", Keys(model="dir", **asked))
        assert str(caught.value) == message
    with pytest.raises(UserError, match="tied is True, and the given mine has False"):
        given({"heads": [0]}, {}).agree("mine", Keys(model="dir", tied=True))


def test_a_key_that_overrides_warns():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keys = given({}, {"anchor": False}).agree("mine", Keys(model="dir", anchor=True))
    assert keys.anchor and "anchor is True, and the given mine has False by its" in str(
        seen[0].message
    )


def test_a_class_of_keys_is_a_dataclass():
    class Plain(declare.Keys):
        start: int = key(1, "the start", least=1)

    class Decorated(Plain):
        more: int = key(2, "more", least=0)

    class Both(Decorated):
        last: int = key(help="the last", least=0)

    assert [each.name for each in declare.keys_of(Both)] == ["last", "more", "start"]
    keys = Both(last=3)
    assert dataclasses.asdict(keys) == {"start": 1, "more": 2, "last": 3}
    assert keys == Both(last=3) and hash(keys) == hash(Both(last=3)) and keys != Both(last=4)
    assert pickle.loads(pickle.dumps(Block(block=3))) == Block(block=3)
    assert dataclasses.replace(keys, start=4) == Both(start=4, last=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        keys.start = 2
    with pytest.raises(UserError, match="start is 0; it must be a whole number >= 1"):
        Plain(start=0)
    with pytest.raises(TypeError, match="last"):
        Both()


def test_what_is_refused_comes_before_a_model_is_read():
    """``drafters.check`` knows ranges and choices, and so does ``control.load``."""
    with pytest.raises(UserError, match="siblings is 'x'; it must be one of"):
        drafters.check("draft_model", model="no such directory", siblings="x")
    with pytest.raises(UserError, match="bass's up is 0; it must be a whole number >= 1"):
        control.parse("bass:up=0")


def test_a_module_without_postponed_annotations_is_checked_too():
    space: dict = {"declare": declare, "key": key, "dataclasses": dataclasses}
    exec(
        "class Plain(declare.Keys):\n"
        "    gamma: int = key(4, 'tokens', least=1)\n"
        "    flag: bool = key(False, 'a flag')\n"
        "    mode: str = key('a', 'the mode', choices=('a', 'b'))\n",
        space,
    )
    for wrong in ({"gamma": -3}, {"flag": "no"}, {"mode": "z"}):
        with pytest.raises(UserError):
            space["Plain"](**wrong)
    assert declare.keys_of(space["Plain"])[0].annotation == "int"


def test_fractions_zeros_and_names():
    with pytest.raises(UserError, match=r"passes is 1.5; it must be a whole number >= 1"):
        make("target", model="dir", passes=1.5)
    assert make(target="target", model="dir")[0] == "target"
    with pytest.raises(UserError, match=r"seed is 0.5; it must be a whole number$"):
        make("target", model="dir", seed=0.5)
    with pytest.raises(UserError, match="goodput's rows is 'x'"):
        control.parse("goodput:rows=x")


class Block(declare.Keys):
    """A size that only config.json shows; 0: not given."""

    block: int = key(0, "tokens", least=0, fact="block_size")


@pytest.mark.parametrize("value", [0, 2.0, "2"])
def test_a_stored_size_that_is_none_is_refused(value):
    with pytest.raises(UserError, match="block_size of the given parameters is .* whole number"):
        given({}, {"block_size": value}).agree("mine", Block())
    assert given({}, {"block_size": 3}).agree("mine", Block()).block == 3


class Group(declare.Keys):
    """A group of keys, with a group inside."""

    OWNER = "config."

    names: tuple[str, ...] = key((), "names", once=True)
    rates: tuple[float, ...] = key((), "rates", least=0, once=True)
    label: str = key("", "a text")
    drafter: dict = declare.free("what a method chooses")
    inner: GridKeys = declare.group(GridKeys)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"names": 1.5}, "config.names is 1.5; it must be a tuple of values"),
        ({"names": "abc"}, "config.names is 'abc'; it must be a tuple of values"),
        ({"names": (1,)}, "a value of config.names is 1; it must be a text"),
        ({"names": ("a", "a")}, "config.names is ('a', 'a'); give each value once"),
        ({"rates": (1, 1.0)}, "config.rates is (1, 1.0); give each value once"),
        ({"label": [1, 2]}, "config.label is [1, 2]; it must be a text"),
        ({"drafter": "abc"}, "config.drafter is 'abc'; it must hold keys"),
        ({"inner": 1}, "config.inner is 1; it must hold keys"),
        ({"inner": {"models": 1.5}}, "config.grid.models is 1.5; it must be a tuple of values"),
    ],
)
def test_values_of_another_kind_are_one_line(values, message):
    with pytest.raises(UserError) as error:
        config.read(Group, values)
    assert str(error.value) == message


def test_keys_without_a_value_have_their_default():
    read = config.read(Group, {"names": None, "label": "b", "inner": {"models": ["m"]}})
    assert (read.names, read.label, read.inner.models) == ((), "b", ("m",))
    assert config.given({"a": {"b": None}, "c": 1, "d": {"e": 0}}) == {"c": 1, "d": {"e": 0}}
    bench = settings.decoding("bench", target="t", sampling={"temperature": 0.7})
    assert settings.read(bench).temperatures == (0.7,)


def test_reading_a_configuration_starts_no_backend():
    """A program that connects processes must be able to read its configuration first."""
    code = (
        "from specjax.run import settings; import jax._src.xla_bridge as bridge; "
        "settings.read(settings.decoding('bench', target='t')); "
        "raise SystemExit(bridge.backends_are_initialized())"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
