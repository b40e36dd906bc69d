"""Nodes with equal paths are scored once, and decided as if each had been scored."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling
from specjax.testing import tiny
from specjax.tree import duplicates
from specjax.types import Draft, ModelParams

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3]]
NEW = [20, 3, 20, 11]


def random_draft(seed: int) -> Draft:
    """Eight rows of 12 nodes over three tokens; a tenth of the nodes is not valid."""
    random = np.random.default_rng(seed)
    rows, nodes = 8, 12
    parents = np.stack([random.integers(-1, i, rows) for i in range(nodes)], 1)
    tokens, valid = random.integers(0, 3, (rows, nodes)), random.random((rows, nodes)) > 0.1
    depth = max(len(chain(row, i)) for row in parents for i in range(nodes))
    return Draft(
        *(jnp.asarray(x) for x in (tokens, valid, parents)),
        finite=jnp.ones(rows, bool),
        depth=depth,
    )


def chain(parents, node) -> list[int]:
    """The nodes from a child of the root to ``node``."""
    nodes = []
    while node >= 0:
        nodes.insert(0, int(node))
        node = parents[node]
    return nodes


@pytest.mark.fast
@pytest.mark.parametrize("seed", range(4))
def test_unique_paths(seed):
    """Every existing path is there once, before all others, below its own parent."""
    draft = random_draft(seed)
    found = jax.jit(duplicates.unique)(draft)
    few, place = found.draft, found.place
    merged = 0
    for row in range(len(draft.tokens)):
        whole, own = (jax.tree.map(lambda x, row=row: np.asarray(x)[row], x) for x in (draft, few))

        def path(x, node):
            nodes = chain(x.parents, node)
            return tuple(int(x.tokens[i]) for i in nodes) if x.valid[nodes].all() else None

        paths = [path(whole, i) for i in range(12)]
        known = [each for each in paths if each is not None]
        kept = [path(own, i) for i in range(int(own.valid.sum()))]
        assert kept == list(dict.fromkeys(known))
        assert not own.valid[len(kept) :].any() and (own.parents < np.arange(12)).all()
        for i, each in enumerate(paths):
            if each is not None:
                assert path(own, int(place[row, i])) == each
        merged += len(known) - len(kept)
    assert merged > 5


@pytest.mark.fast
def test_what_was_computed_is_spread():
    """The pending token keeps its own; each node has what was computed for its path."""
    tokens = jnp.asarray([[5, 5, 6, 7, 7]])
    parents = jnp.asarray([[-1, -1, 0, 1, 0]])
    draft = Draft(tokens, jnp.ones((1, 5), bool), parents, depth=2)
    unique = jax.jit(duplicates.unique)(draft)
    np.testing.assert_array_equal(unique.draft.tokens[0, :3], [5, 6, 7])
    few = unique.first(3)
    assert few.draft.tokens.shape == (1, 3)
    numbers = jnp.asarray([[10, 11, 12, 13]])
    np.testing.assert_array_equal(few.spread(numbers), [[10, 11, 11, 12, 13, 13]])
    np.testing.assert_array_equal(unique.first(0).spread(numbers[:, :1]), [[10] * 6])


@functools.cache
def models():
    """A target and two noisy copies of it, which agree often."""
    target, params = tiny("llama", 0, 20.0, layers=1)
    noise = np.random.default_rng(5)

    def noisy(scale):
        return jax.tree.map(
            lambda x: x + scale * np.std(x) * noise.normal(size=x.shape).astype(np.float32), params
        )

    return target, ModelParams(params, (noisy(0.02), noisy(0.05)))


def decoded(drafter, temperature, widths=None):
    target, params = models()
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=packed.shape[1] + 20,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature, repetition_penalty=1.2),
    )
    state, records = decode.generate(
        target, drafter, accept.load("recursive"), params, state, max_steps=20, verify_widths=widths
    )
    decode.check(state)
    return decode.outputs(state, [len(p) for p in PROMPTS]), jax.device_get(records)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["models", "random"])
def test_text_and_rounds_do_not_change(order):
    """A model with attention: positions, visible nodes and committed keys must be right.

    Ragged rows that end early, a penalty that depends on each node's path, greedy and sampled.
    """
    target, _ = models()
    twice = [target._replace(name="a"), target._replace(name="b")]
    drafter = drafters.make("specinfer", target, models=twice, tree="2x1", sibling_order=order)
    assert drafter.rare.merges == 2 and drafter.whole
    alone = drafter._replace(rare=drafter.rare._replace(merges=1))
    for temperature in (0.0, 1.0):
        text, records = decoded(drafter, temperature)
        expected, every = decoded(alone, temperature)
        assert text == expected
        for name in ("emitted", "accepted", "drafted", "tested"):
            np.testing.assert_array_equal(getattr(records, name), getattr(every, name))
        assert (every.verified[every.verified > 0] == drafter.nodes + 1).all()
        # Sampled, the row with the most paths has too many for the next smaller width.
        saved = every.verified.sum() - records.verified.sum()
        assert saved > 0 if temperature == 0 else saved >= 0
        # As few tokens as there are paths, and no fewer.
        narrow, least = decoded(drafter, temperature, tuple(range(1, drafter.nodes + 2)))
        assert narrow == text and least.verified.sum() <= records.verified.sum()
        assert least.verified.sum() < every.verified.sum()
        np.testing.assert_array_equal(least.emitted, records.emitted)


def test_one_model_merges_nothing():
    assert drafters.make("specinfer", models()[0], models=[models()[0]]).rare.merges == 1
