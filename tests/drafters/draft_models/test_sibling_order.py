"""SpecInfer's random order of siblings: the law, that it is uniform, and the draft caches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.types import ModelParams

V = 3


def two(tree, **keys):
    """The target, the drafter of two models, and random parameters."""
    target = testing.tabular(V)
    models = [testing.tabular(V, "first"), testing.tabular(V, "second")]
    drafter = drafters.make(
        "specinfer", target, models=models, tree=tree, sibling_order="random", **keys
    )
    tables = [testing.random_table(i, V) for i in range(3)]
    return target, drafter, ModelParams(tables[0], tuple(tables[1:]))


@pytest.mark.parametrize(
    ("tree", "rounds"), [("chain:1", None), pytest.param("2", 1, marks=pytest.mark.slow)]
)
def test_exact_law(tree, rounds):
    """Every order is enumerated, with its probability."""
    with jax.enable_x64(True):
        target, drafter, params = two(tree)
        law = testing.exact_law(
            target,
            drafter,
            accept.load("recursive"),
            params,
            [1, 2],
            2,
            rounds=rounds,
            temperature=1.0,
        )
        truth = testing.sequence_law(target, params.target, [1, 2], 2, temperature=1.0)
        assert testing.total_variation(law, truth) < 1e-12


def test_each_order_is_equally_frequent_and_parents_stay_parents():
    """The places of the nodes of a level, and the path above each node."""
    target, drafter, params = two("2x1")
    rows = 512
    packed, lengths = decode.pack_prompts([[1, 2]] * rows)
    state = decode.prefill(
        *(target, drafter, params, packed, lengths, rng.row_keys(0, rows)),
        max_len=8,
        sampling=sampling.make_sampling(rows, 1.0),
    )
    state, info = next(decode.stream(target, drafter, accept.load("recursive"), params, state))
    order, parents = np.asarray(state.draft.order), np.asarray(info.draft.parents)
    own = [-1, -1, 0, 1, -1, -1, 4, 5]  # of the two models' trees, one after the other
    for row in range(rows):
        above = [-1 if p < 0 else order[row, p] for p in parents[row]]
        assert above == [own[node] for node in order[row]]
    assert (np.sort(order[:, :4], 1) == [0, 1, 4, 5]).all()
    for place in range(4):
        share = np.array([(order[:, place] == node).mean() for node in (0, 1, 4, 5)])
        # Five standard deviations.
        assert (abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / rows)).all()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_caches_hold_the_text(temperature):
    """The text of each model's cache is that of the row, whatever the order was."""
    target, drafter, params = two("2x1")
    prompts = [[1, 2], [0], [2, 2, 1]]
    packed, lengths = decode.pack_prompts(prompts)
    state = decode.prefill(
        *(target, drafter, params, packed, lengths, rng.row_keys(1, 3)),
        max_len=30,
        sampling=sampling.make_sampling(3, temperature),
    )
    rule = accept.load("recursive")
    for after, _ in decode.stream(target, drafter, rule, params, state):
        for part in after.draft.parts:
            for row in range(3):
                held = int(part.kept.length[row])
                assert jnp.array_equal(part.kept.entries[row, :held], after.tokens[row, :held])


@pytest.mark.fast
def test_unknown_order():
    with pytest.raises(UserError, match="sibling_order is 'any'; it must be one of"):
        drafters.make(
            "specinfer", testing.tabular(V), models=[testing.tabular(V)], sibling_order="any"
        )
