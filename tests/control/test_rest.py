"""Rounds without drafts: the decode loop leaves the drafter out, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, step
from specjax.control import Controller
from specjax.testing import cases
from specjax.types import Context, Draft, ModelParams, Verdict


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


def decoded(target, drafter, rule, params, temperature, *, rests: bool):
    """The texts of three ragged rows, and the drafts of every round."""
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
DEFAULT = [("draft_model", 1.0, "together"), ("token_recycling", 0.0, "together")]


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
