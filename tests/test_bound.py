"""Methods that are made twice are equal, and nothing is compiled again for the second one."""

from __future__ import annotations

import operator

import cases
import jax
import jax.monitoring
import ml_dtypes
import numpy as np
import pytest
import sized_cases

from specjax import accept, control, decode, drafters, testing
from specjax.bound import Bound
from specjax.testing import loop

pytestmark = pytest.mark.fast


def add(*numbers, **named):
    return sum(numbers) + sum(named.values())


def test_values():
    assert Bound(add, 1, b=2) == Bound(add, 1, b=2)
    assert hash(Bound(add, 1, b=2)) == hash(Bound(add, 1, b=2))
    assert Bound(add, 1, b=2)(3) == 6
    assert Bound(add, np.arange(3)) == Bound(add, np.arange(3))
    assert Bound(add, np.zeros((0, 2))) == Bound(add, np.zeros((0, 2)))
    assert Bound(add, np.float32(1)) == Bound(add, np.float32(1))
    assert Bound(add, np.arange(6)[::2]) == Bound(add, np.array([0, 2, 4]))
    assert Bound(add, np.ones(2, ml_dtypes.bfloat16)) == Bound(add, np.ones(2, ml_dtypes.bfloat16))
    assert Bound(Bound(add, [1, 2]), {"a": (3,)}) == Bound(Bound(add, [1, 2]), {"a": (3,)})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Bound(add, 1), Bound(add, 2)),
        (Bound(add, 1), Bound(add, 1.0)),
        (Bound(add, 1), Bound(add, True)),
        (Bound(add, (1,)), Bound(add, (True,))),
        (Bound(add, (1,)), Bound(add, [1])),
        (Bound(add, a=1), Bound(add, b=1)),
        (Bound(add, 1), Bound(max, 1)),
        (Bound(add, np.arange(3)), Bound(add, np.arange(3.0))),
        (Bound(add, np.zeros(3)), Bound(add, np.zeros((3, 1)))),
        # Their dtypes have one ``str``.
        (
            Bound(add, np.zeros(3, ml_dtypes.float8_e4m3fn)),
            Bound(add, np.zeros(3, ml_dtypes.float8_e5m2)),
        ),
        # The contents of an array of objects are addresses.
        (Bound(add, np.array([{}], object)), Bound(add, np.array([{}], object))),
        # Arrays on a device are not read.
        (Bound(add, jax.numpy.ones(2)), Bound(add, jax.numpy.ones(2))),
    ],
)
def test_other_values(one, other):
    assert one != other


def test_repr():
    drafter = drafters.make("prompt_lookup", testing.tabular(3), gamma=2)
    assert repr(Bound(add, 1, np.zeros((2, 3)), name="x")) == "add(1, float64[2, 3], name='x', ...)"
    assert " at 0x" not in repr(drafter.propose)


@pytest.mark.parametrize("name", cases.NAMES)
def test_equal_drafters(name):
    one, other = (cases._drafter.__wrapped__(name, cases.VOCAB) for _ in "ab")
    # A tuple has a != of its own.
    assert one == other and operator.ne(one, other) is False
    assert hash(one) == hash(other)
    changed = other._replace(nodes=other.nodes + 1)
    assert one != changed and operator.eq(one, changed) is False


def test_parameters_are_not_compared():
    """They are arguments of a program, and no part of it."""
    target, params = cases.models()[0], cases.table(0)
    one, other = (cases.random_heads("medusa", target, params, seed) for seed in (0, 1))
    assert one == other
    leaves = [jax.tree.leaves(each.init_params(jax.random.key(0)))[0] for each in (one, other)]
    assert (np.asarray(leaves[0]) != np.asarray(leaves[1])).any()


@pytest.mark.parametrize("name", control.names())
def test_controllers(name, tmp_path):
    target, draft, _ = cases.models()
    specs = {"fixed": "fixed:2", "threshold": "threshold:0.3", "calibrated": None, "pending": None}
    spec = (specs | {"batch_size": "batch_size:2:3"}).get(name, name)
    if spec is None:
        pytest.skip("its key is a file")
    if name == "ltd":
        spec = sized_cases.written(tmp_path, 4)[0]
    # A chain has no nodes to choose from.
    sizes = name in ("budget", "ltd")
    shape = {"tree": "2x1", "siblings": "top_k"} if sizes else {"gamma": 3}
    one, other = (
        drafters.make("draft_model", target, model=draft, control=spec, **shape) for _ in "ab"
    )
    assert one == other


def compilations(function) -> int:
    """How many programs a call compiles."""
    count = 0

    def listen(event: str, seconds: float, **_) -> None:
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    function()
    jax.monitoring.unregister_event_duration_listener(listen)
    return count


@pytest.mark.parametrize("name", ["chain", "medusa", "suffix", "eagle", "cascade", "tli"])
def test_nothing_is_compiled_for_an_equal_drafter(name):
    case = cases.case(name)

    def run(drafter):
        state = loop.begin(case.target, drafter, case.params, [cases.REPEATED], 7, 0)
        rule = accept.load(accept.default_rule(drafter))
        return decode.generate(case.target, drafter, rule, case.params, state, max_steps=7)[0]

    first = run(case.drafter)
    again = cases._drafter.__wrapped__(name, cases.VOCAB)
    assert again is not case.drafter
    texts = []
    assert compilations(lambda: texts.append(run(again))) == 0
    assert (np.asarray(texts[0].tokens) == np.asarray(first.tokens)).all()
