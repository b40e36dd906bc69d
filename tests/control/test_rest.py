"""Rounds without drafts: the decode loop leaves the drafter out, and nothing else changes."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from marks import by_default

from specjax import accept, decode, drafters, registry, rng, sampling, step
from specjax import control as control_lib
from specjax.control import Controller
from specjax.errors import UserError
from specjax.types import Context, Draft, ModelParams, Rest, Verdict


class Place(struct.PyTreeNode):
    """Where a row is in its list of limits."""

    index: jax.Array  # i32[B]


def listed(*rows: tuple[int, ...]) -> Controller:
    """Limits from lists, one list per row in turns, whatever happens."""
    table = np.array(rows, np.int32)

    def init(context: Context) -> Place:
        return Place(jnp.zeros(context.length.shape, jnp.int32))

    def update(state: Place, draft: Draft, verdict: Verdict) -> Place:
        return Place(state.index + 1)

    def limit(state: Place) -> jax.Array:
        row = jnp.arange(len(state.index)) % len(table)
        return jnp.asarray(table)[row, state.index % table.shape[1]]

    return Controller("listed", init=init, update=update, limit=limit)


# Rests of 3 and of 20 rounds for all rows together, and limits that differ by row.
TOGETHER = listed((3, 0, 0, 0, 2) + (0,) * 20 + (1, 3))
APART = listed((3, 0, 2, 1), (0, 2, 0, 3), (1, 0, 0, 0))


def begun(target, drafter, params, temperature):
    """The state of three ragged rows, and their lengths."""
    prompts = [[1, 2, 0, 1, 2], [1], [2, 1, 0, 2, 1, 0, 2]]
    packed, lengths = decode.pack_prompts(prompts)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(3, 3),
        max_len=47,
        limit=lengths + jnp.asarray([40, 25, 33]),
        sampling=sampling.make_sampling(3, temperature),
    )
    return state, lengths


def decoded(target, drafter, rule, params, temperature, *, rests: bool):
    """The texts of three ragged rows, and the drafts of every round."""
    state, _ = begun(target, drafter, params, temperature)
    rule, texts = accept.load(rule), []
    if rests:
        infos = [info for state, info in decode.stream(target, drafter, rule, params, state)]
    else:
        infos = []
        while not bool(state.done.all()):
            state, info = _step(target, drafter, rule, params, state)
            infos.append(info)
    for row in range(3):
        texts.append([int(t) for i in infos for t in i.tokens[row] if t >= 0])
    return texts, infos


_step = jax.jit(step.speculative_step, static_argnums=(0, 1, 2))

DRAFTERS = {
    "draft_model": {"gamma": 3},
    "draft_model tree": {"tree": "2x1x1", "siblings": "iid"},
    "prompt_lookup": {"gamma": 3, "min_ngram": 1},
    "sam": {"gamma": 3, "min_match": 1},
    "suffix": {"nodes": 6, "depth": 3},
    "token_recycling": {"tree": "2x1x1", "top_k": 2},
    "early_exit": {"gamma": 3, "exit_layer": 1},
}


def built(name: str, control: Controller):
    """(target, drafter, rule, params) of a small real model."""
    case = cases.real("prompt_lookup")
    if name == "specinfer":
        models = [
            cases.tiny("gpt2", seed, layers=1, vocab_size=cases.VOCAB, width=16) for seed in (1, 2)
        ]
        drafter = drafters.make(
            "specinfer",
            case.target,
            models=[model for model, _ in models],
            params=[params for _, params in models],
            tree="chain:3",
            control=control,
        )
        pair = ModelParams(case.params.target, drafter.init_params(jax.random.key(0)))
        return case.target, drafter, accept.default_rule(drafter), pair
    keys = dict(DRAFTERS[name])
    if name.startswith("draft_model"):
        model, params = cases.tiny("gpt2", 1, layers=1, vocab_size=cases.VOCAB, width=16)
        pair = ModelParams(case.params.target, params)
        drafter = drafters.make(
            "draft_model" if "tree" not in keys else "draft_tree",
            case.target,
            model=model,
            control=control,
            **keys,
        )
    else:
        drafter = drafters.make(name, case.target, control=control, **keys)
        pair = ModelParams(case.params.target, drafter.init_params(jax.random.key(0)))
    return case.target, drafter, accept.default_rule(drafter), pair


CASES = [
    (name, temperature, control)
    for name in DRAFTERS
    for temperature in (0.0, 1.0)
    for control in ("together", "apart")
]
# The default case of a pause compares the same loops for a draft model.
DEFAULT = [("token_recycling", 0.0, "together")]


@pytest.mark.parametrize(("name", "temperature", "control"), by_default(CASES, DEFAULT))
def test_a_rest_changes_no_token(name, temperature, control):
    """The loop that leaves out ``propose`` against full rounds; then the compiled loop."""
    control = TOGETHER if control == "together" else APART
    system = built(name, control)
    texts, infos = decoded(*system, temperature, rests=True)
    expected, full = decoded(*system, temperature, rests=False)
    assert texts == expected
    assert [info.drafted.tolist() for info in infos] == [info.drafted.tolist() for info in full]
    widths = {int(info.verified.max()) for info in infos}
    if control is TOGETHER:
        assert 1 in widths and max(widths) > 1


# Cases of the kit that take no controller.
UNCONTROLLED = (
    *("none", "jacobi", "lookahead", "escalate", "controlled", "cascade", "cascade in parts"),
    *("staged", "triforce", "bild"),
    # They are made of another module, and have the same functions as "chain" and "dynamic".
    *("iid", "without_replacement", "deterministic", "irregular", "ragged"),
)
CONTROLLED = [name for name in cases.NAMES if name not in UNCONTROLLED]


@pytest.mark.parametrize("name", by_default(CONTROLLED, ["pass merged"]))
def test_rounds_of_other_limits_change_no_token(name, monkeypatch):
    """Every drafter of the kit with limits that change from round to round, 0 among them.

    A state that was made of what a round did not compute gives NaN, or other drafts.
    """
    make = drafters.make

    def controlled(method, target, **keys):
        if "control" in registry.keys_of(drafters.load(method)):
            keys["control"] = TOGETHER
        return make(method, target, **keys)

    monkeypatch.setattr(drafters, "make", controlled)
    _, target, drafter, params = cases.real.__wrapped__(name)
    assert drafter.adaptive
    system = target, drafter, accept.default_rule(drafter), params
    texts, infos = decoded(*system, 1.0, rests=True)
    drafted = np.array([info.drafted for info in infos])
    if drafter.rare.rest is not None:
        expected, full = decoded(*system, 1.0, rests=False)
        assert texts == expected
        assert drafted.tolist() == [info.drafted.tolist() for info in full]
        # No other test uses these programs; those of all cases need too many memory maps.
        jax.clear_caches()
    assert not drafted[1:4].any() and drafted.any()


@pytest.mark.fast
def test_a_rest_of_a_drafter_whose_nodes_are_always_fed_is_refused():
    """The target would be fed the pending tokens alone."""
    _, target, drafter, params = cases.case("pass merged")
    rest = Rest(lambda state: jnp.ones(3, bool), lambda params, keys, context, state: state)
    wrong = drafter._replace(rare=drafter.rare._replace(rest=rest))
    state, _ = begun(target, wrong, params, 0.0)
    with pytest.raises(UserError, match="nodes that the target is always fed"):
        next(decode.stream(target, wrong, accept.load("recursive"), params, state))


# goodput pauses for a few rounds, tries a draft, and chooses anew where a row has ended.
PAUSES = {
    "fixed": lambda: control_lib.load("fixed", length=0),
    "goodput": lambda: control_lib.load(
        "goodput", most=3, draft=0.2, verify=0.1, acceptance=0.05, explore=0.06, weight=8.0
    ),
}
PAUSED = [
    (name, temperature, pause)
    for name in ("draft_model", "draft_model tree", "prompt_lookup", "sam", "specinfer")
    for temperature in (0.0, 1.0)
    for pause in PAUSES
]
DEFAULT_PAUSED = [("draft_model", 1.0, "goodput")]


@pytest.mark.parametrize(("name", "temperature", "pause"), by_default(PAUSED, DEFAULT_PAUSED))
def test_a_pause_in_the_compiled_loop_is_its_rounds(name, temperature, pause):
    """One change of the drafter's state for many rounds against a change in each."""
    target, drafter, rule, params = built(name, PAUSES[pause]())
    assert drafter.rare.rest is not None and drafter.rare.rest.lasting is not None
    _, infos = decoded(target, drafter, rule, params, temperature, rests=True)
    texts, full = decoded(target, drafter, rule, params, temperature, rests=False)
    state, lengths = begun(target, drafter, params, temperature)
    pair = (target, drafter, accept.load(rule), params)
    # Each call has fewer rounds than it takes, so that a pause is cut off.
    calls = []
    for _ in range(7):
        state, records = decode.generate(*pair, state, max_steps=7)
        calls.append(records)
    assert decode.outputs(state, lengths) == texts
    size = len(infos)
    for field in ("emitted", "accepted", "drafted", "tested", "verified"):
        each = [np.asarray(getattr(records, field))[:7] for records in calls]
        found = np.concatenate(each)
        assert found[:size].tolist() == [getattr(info, field).tolist() for info in infos], field
        assert not found[size:].any()
    drafted = np.array([info.drafted.tolist() for info in full])
    assert drafted.tolist() == [info.drafted.tolist() for info in infos]
    if pause == "goodput":
        rests = ~drafted.any(1)
        assert rests.sum() > 4 and drafted.any()
