"""The search for sublayers to skip: acceptance and cost of a set, trials, resumption, errors."""

from __future__ import annotations

import functools
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import self_speculation_skip_sets
from internals import self_speculation_skip_text as _skip_text

from specjax import drafters, testing, theory
from specjax.data import recordings
from specjax.drafters.self_speculation import skip_search
from specjax.errors import UserError
from specjax.types import Sublayers

LAYERS = 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox", "olmo2", "qwen3_moe"])
def test_zeros_leave_a_sublayer_out(family):
    """Zeros in the last map give what the part of the model gives."""
    target, params = testing.tiny(family, 0, layers=LAYERS)
    every = Sublayers(tuple(range(LAYERS)), tuple(range(LAYERS)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 8)), jnp.int32)
    block = target.apply(params, tokens, target.init_cache(1, 0))[1]
    for skips in (
        self_speculation_skip_sets.Skips((), ()),
        self_speculation_skip_sets.Skips((0, 2), (1,)),
        self_speculation_skip_sets.Skips((), (0, 1, 2)),
        self_speculation_skip_sets.Skips((0, 1, 2), (2,)),
    ):
        masks = np.ones((2, LAYERS), np.float32)
        masks[0, [*skips.attention]], masks[1, [*skips.mlp]] = 0, 0
        own = skip_search.without(params, *jnp.asarray(masks))
        zeros = _skip_text.draft(target, every, own, tokens, block).logits
        part = _skip_text.draft(target, skips.left(LAYERS), params, tokens, block).logits
        np.testing.assert_allclose(zeros, part, rtol=1e-4, atol=1e-4)


def test_acceptance_and_cost_of_a_set():
    target, params = testing.tiny("llama", 0, layers=LAYERS)
    draw = np.random.default_rng(0)
    prompts, outputs = ([draw.integers(0, 32, n).tolist() for n in (3, 5)] for _ in range(2))
    rows = skip_search.texts(prompts, outputs, 8)
    assert rows.counted.sum(1).tolist() == [3, 5] and rows.tokens.shape == (2, 8)
    assert rows.counted[0].tolist() == [False, False, True, True, True, False, False, False]
    skips = self_speculation_skip_sets.Skips((1,), (0,))
    for temperature in (0.0, 0.7):
        rate = skip_search.acceptance(target, params, rows, temperature)
        assert rate(self_speculation_skip_sets.Skips((), ())) == pytest.approx(1, abs=1e-5)
        tokens = jnp.asarray(rows.tokens)
        outputs = jax.jit(functools.partial(_skip_text.outputs, target, skips.left(LAYERS)))
        ours, theirs = (
            np.asarray(out.logits, np.float64)[rows.counted] for out in outputs(params, tokens)
        )
        if temperature:
            own = [np.asarray(jax.nn.softmax(x / temperature)) for x in (ours, theirs)]
            expected = theory.acceptance_rate(*own)
        else:
            expected = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
        assert rate(skips) == pytest.approx(expected, abs=1e-5)
    parts = skip_search.shares(params)
    assert parts.attention.sum() + parts.mlp.sum() + parts.rest == pytest.approx(1)
    assert parts.cost(self_speculation_skip_sets.Skips((), ())) == pytest.approx(1)
    assert parts.cost(skips) == pytest.approx(1 - parts.attention[1] - parts.mlp[0])
    sizes = {key: sum(x.size for x in jax.tree.leaves(params["layers"][1][key]))
             for key in ("attention", "mlp")}  # fmt: skip
    assert parts.attention[1] / parts.mlp[1] == pytest.approx(sizes["attention"] / sizes["mlp"])


@pytest.mark.fast
def test_predicted():
    assert skip_search.predicted(1.0, 0.5, 4) == (pytest.approx(5 / 3), 4)
    assert skip_search.predicted(0.0, 0.5, 4) == (pytest.approx(1 / 1.5), 1)
    with pytest.raises(UserError, match="the target's parameters are not those of a decoder"):
        skip_search.shares({"layers": {0: {}}})


def loaded(idle=1):
    """A decoder whose layer ``idle`` changes nothing, as ``hf.load`` gives it."""
    config = testing.tiny_config("llama", layers=LAYERS)
    target, params = testing.tiny("llama", 0, layers=LAYERS)
    for kind, last in skip_search.LAST.items():
        layer = params["layers"][idle][kind]
        params["layers"][idle][kind] = layer | {last: jax.tree.map(jnp.zeros_like, layer[last])}
    return SimpleNamespace(lm=target, params=params, config=config, directory="nowhere/model")


def texts():
    draw = np.random.default_rng(1)
    return [
        recordings.Trace(draw.integers(0, 32, 3).tolist(), draw.integers(0, 32, 9).tolist())
        for _ in range(2)
    ]


class Guess:
    """In the place of the library: random points from the seed and the number of points."""

    def __init__(self, f, pbounds, random_state, verbose, allow_duplicate_points):
        self.names, self.seed, self.points = list(pbounds), random_state, []

    def set_gp_params(self, alpha):
        assert alpha == skip_search.NOISE

    def register(self, params, target):
        self.points.append((tuple(params.values()), target))

    def suggest(self):
        draw = np.random.default_rng([self.seed, len(self.points)])
        return dict(zip(self.names, draw.random(len(self.names)), strict=True))


def searched(directory, monkeypatch, guess=Guess, stop=None, **settings):
    """(skips.json, the sets that were evaluated in this run)."""
    package = SimpleNamespace(BayesianOptimization=guess)
    monkeypatch.setattr(skip_search, "bayesian_package", lambda: package)
    evaluation, seen = skip_search._evaluation, []

    def counting(*args):
        evaluate = evaluation(*args)

        def counted(skips):
            if len(seen) == stop:
                raise KeyboardInterrupt
            seen.append(skips)
            return evaluate(skips)

        return counted

    with monkeypatch.context() as patch:
        patch.setattr(skip_search, "_evaluation", counting)
        own = skip_search.Settings(**{"trials": 12, "gamma": 4, "width": 12, **settings})
        try:
            return skip_search.search(loaded(), texts(), directory, own, lambda line: None), seen
        except KeyboardInterrupt:
            return None, seen


def test_a_search_finds_what_is_idle_and_continues_after_a_kill(tmp_path, monkeypatch):
    whole, every = searched(tmp_path / "whole", monkeypatch)
    assert 1 in whole["skip_attention"] and 1 in whole["skip_mlp"]
    assert whole["alpha"] > 0.3 and whole["predicted"] > 1 and whole["cost"] < 1
    assert whole["trials"] == skip_search.count(LAYERS, 12)
    assert json.loads((tmp_path / "whole/skips.json").read_text()) == json.loads(json.dumps(whole))
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["skips.json"]
    killed, first = searched(tmp_path / "killed", monkeypatch, stop=len(every) - 3)
    assert killed is None and not (tmp_path / "killed/skips.json").exists()
    again, rest = searched(tmp_path / "killed", monkeypatch)
    assert again == whole and first + rest == every
    # The drafter takes the file.
    own = {"skip_attention": tmp_path / "whole", "skip_mlp": tmp_path / "whole"}
    assert drafters.make("layer_skip", loaded().lm, **own).nodes == 8


@pytest.mark.slow
def test_the_library_makes_the_same_search_from_the_same_seed(tmp_path, monkeypatch):
    package = pytest.importorskip("bayes_opt")
    runs = [
        searched(tmp_path / name, monkeypatch, package.BayesianOptimization, trials=4, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]
    stopped = searched(
        tmp_path / "d", monkeypatch, package.BayesianOptimization, len(runs[0][1]) - 2, trials=4
    )
    again = searched(tmp_path / "d", monkeypatch, package.BayesianOptimization, trials=4)
    assert again[0] == runs[0][0] and stopped[1] + again[1] == runs[0][1]


@pytest.mark.slow
def test_measured_speed(tmp_path, monkeypatch):
    result, _ = searched(tmp_path, monkeypatch, trials=0, objective="measured")
    assert result["measured"] > 0 and result["settings"]["objective"] == "measured"


@pytest.mark.fast
def test_errors(tmp_path, monkeypatch, capsys):
    def refused(match, *argv):
        assert skip_search.main(argv) == 2
        err = capsys.readouterr().err
        assert err.startswith("specjax: ") and err.count("\n") == 1 and match in err, err

    refused(
        "required: target, directory, --texts; usage: python -m specjax.drafters.self_speculation."
    )
    given = ("nowhere", str(tmp_path / "out"), "--texts=none.jsonl")
    refused("gamma is 0; it must be a whole number >= 1", *given, "--gamma=0")
    refused("temperature is -1.0; it must be a number >= 0", *given, "--temperature=-1")
    refused("verify is '1,x'; give times in steps", *given, "--verify=1,x")
    refused("give 9 times", *given, "--verify=1,1.1")
    refused("invalid choice: 'speed'", *given, "--objective=speed")
    (tmp_path / "file").write_text("")
    refused("is a file; name a directory", "nowhere", str(tmp_path / "file"), "--texts=none.jsonl")
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    refused("the search needs bayesian-optimization: pip install 'specjax[search]'", *given)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no token that follows another one"):
        skip_search.texts([[1]], [[2]], 1)
