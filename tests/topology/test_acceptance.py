"""Measured acceptance by rank: from observations, and from the rounds of a decode loop."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tree_search.study import accepted_ranks
from specjax import accept, decode, rng
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.testing.models import tabular
from specjax.topology import search
from specjax.types import Draft, ModelParams, StepInfo

pytestmark = pytest.mark.fast


def test_acceptance_vector():
    got = search.acceptance_vector(np.array([[0, 0, -1, 2], [0, -1, 1, 0]]), 4)
    assert got.dtype == np.float64 and got.tolist() == [0.5, 0.125, 0.125, 0]
    assert search.acceptance_vector(np.array([-1, -1]), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search.acceptance_vector(np.array([], int), 2), "no observation"),
        (lambda: search.acceptance_vector(np.array([0, 2]), 2), "from -1 .* to 1"),
        (lambda: search.acceptance_vector(np.array([-2]), 2), "from -1"),
        (lambda: search.acceptance_vector(np.array([0.0]), 2), "whole numbers"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message):
        call()


def level_info(tokens, accepted, emitted, drafted, valid=None, depth=1):
    drafted = jnp.asarray(drafted, jnp.int32)
    valid = jnp.ones_like(drafted, bool) if valid is None else jnp.asarray(valid)
    draft = Draft(drafted, valid, jnp.full_like(drafted, -1), depth=depth)
    accepted, zeros = jnp.asarray(accepted), jnp.zeros((len(accepted),), jnp.int32)
    return StepInfo(draft, jnp.asarray(tokens), jnp.asarray(emitted), accepted, zeros, zeros, zeros)


def test_accepted_ranks():
    drafted = [[5, 3, 5], [5, 3, 4], [5, 3, 4], [5, 3, 4], [7, 7, 2]]
    info = level_info(
        # The second; none, although the target drew a sibling's token; a finished row; the third,
        # cut to one token; equal siblings.
        tokens=[[3, 9], [3, -1], [-1, -1], [4, -1], [7, 1]],
        accepted=[1, 0, 0, 1, 1],
        emitted=[2, 1, 0, 1, 2],
        drafted=drafted,
    )
    assert accepted_ranks(info).tolist() == [1, -1, 2, 0]
    # An invalid node has no token.
    invalid = level_info([[7, 1]], [1], [2], [[7, 3, 7]], valid=[[False, True, True]])
    assert accepted_ranks(invalid).tolist() == [2]
    with pytest.raises(UserError, match="has 2 levels; count ranks on trees of one level"):
        accepted_ranks(level_info([[7, 1]], [1], [2], [[7, 3, 7]], depth=2))


def ranks_by_enumeration(target, draft):
    """P(rank accepted) f64[3], over every order in which three of four tokens can be drawn."""
    total = np.zeros(3)
    for order in itertools.permutations(range(4), 3):
        chance, left, residual, tried = 1.0, draft.copy(), target.copy(), 1.0
        branches = []
        for token in order:
            probs = left / left.sum()
            chance *= probs[token]
            accepted = min(1.0, residual[token] / probs[token])
            branches.append(tried * accepted)
            tried *= 1 - accepted
            rest = np.maximum(residual - probs, 0)
            residual = rest / rest.sum() if rest.sum() > 0 else residual
            left[token] = 0
        total += chance * np.array(branches)
    return total


def test_accepted_ranks_of_a_run_are_those_of_the_closed_form():
    """One level, constant distributions: P[0] is sum(min), the others follow from the residuals."""
    target, draft, rows = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4]), 2000
    model = tabular(4)
    tables = [
        jnp.broadcast_to(jnp.log(jnp.asarray(probs, jnp.float32)), (5, 4, 4))
        for probs in (target, draft)
    ]
    drafter = draft_tree.make(
        model, model=model, params=tables[1], tree="3", siblings="without_replacement"
    )
    params, rule = ModelParams(*tables), accept.load("recursive")
    prompts = jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32)
    state = decode.prefill(model, drafter, params, *prompts, rng.row_keys(0, rows), max_len=2)
    (_, info), *more = decode.stream(model, drafter, rule, params, state)
    assert not more
    seen = search.acceptance_vector(accepted_ranks(info), 3)
    expected = ranks_by_enumeration(target, draft)
    assert expected[0] == pytest.approx(np.minimum(target, draft).sum())
    assert np.abs(seen - expected).max() < 4 * np.sqrt(0.25 / rows)
