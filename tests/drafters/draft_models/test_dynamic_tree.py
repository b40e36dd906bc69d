"""Trees of a small model: the dynamic tree in plain Python, exact output laws, draft caches."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import NonFiniteLogits, UserError
from specjax.models import lm
from specjax.topology.shapes import Topology
from specjax.types import ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "dynamic": (
        "dynamic_tree",
        {"model": "@draft", "nodes": 5, "depth": 2, "top_k": 2},
        ("deterministic",),
    ),
}

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3]]
NEW = [20, 3, 20, 11]  # rows end at different times, also inside an accepted path
# Probabilities that are neither flat nor one-hot, and a draft model that is often right.
SCALE, NOISE = 20.0, 0.05
TREES = {
    "without_replacement": ("draft_tree", {"tree": "3x2x1x1", "siblings": "without_replacement"}),
    # Node 0 is a leaf, and often has the same token as node 1, which is no leaf.
    "iid, irregular": ("draft_tree", {"tree": Topology((-1, -1, 1, 2, 3, 1)), "siblings": "iid"}),
    "top_k": ("draft_tree", {"tree": "3x2x1x1", "siblings": "top_k"}),
    "dynamic": ("dynamic_tree", {"nodes": 12, "depth": 4, "top_k": 3}),
    "dynamic, one path": ("dynamic_tree", {"nodes": 2, "depth": 2, "top_k": 1}),
}


def family_of(name):
    return "gpt2" if name == "dynamic, one path" else "llama"


@functools.cache
def models(family):
    """A target, and as the draft model the target with noise: some drafts are rejected."""
    target, params = testing.tiny(family, 0, SCALE)
    noise = np.random.default_rng(5)
    noisy = jax.tree.map(
        lambda x: x + NOISE * np.std(x) * noise.normal(size=x.shape).astype(np.float32), params
    )
    return target, target._replace(name="draft"), ModelParams(params, noisy)


@functools.cache
def made(name):
    target, draft, _ = models(family_of(name))
    method, keys = TREES[name]
    return drafters.make(method, target, model=draft, **keys)


def begin(drafter, target, params, temperature=0.0):
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(PROMPTS)),
        max_len=packed.shape[1] + 20,
        limit=lengths + jnp.asarray(NEW),
        sampling=sampling.make_sampling(len(PROMPTS), temperature),
    )


def some_rounds(drafter, target, params, state, count=3):
    """(state after ``count`` rounds, StepInfo of each). One rule: tests share compiled rounds."""
    stream = decode.stream(target, drafter, accept.load("recursive"), params, state)
    states, infos = zip(*itertools.islice(stream, count), strict=True)
    return states[-1], infos


def outputs(state):
    return decode.outputs(state, [len(p) for p in PROMPTS])


@functools.cache
def plain(family):
    target, _, params = models(family)
    state = begin(drafters.make("none", target), target, params)
    return outputs(decode.autoregressive(target, params, state, max_steps=20))


@functools.partial(jax.jit, static_argnums=0)
def one_pass(model, params, tokens):
    cache = model.init_cache(*tokens.shape)
    _, block = model.apply(params, jnp.maximum(tokens, 0), cache)
    return model.commit(cache, block, jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32))


def assert_holds_the_text(model, params, cache, state, behind):
    """The cache is that of one pass over the committed text, without at most ``behind`` tokens."""
    expected = one_pass(model, params, state.tokens)
    for row, kept in enumerate(cache.length.tolist()):
        assert kept <= int(state.length[row])
        assert bool(state.done[row]) or 1 <= int(state.length[row]) - kept <= behind
        for ours, right in zip(
            *(jax.device_get(x.k + x.v) for x in (cache, expected)), strict=True
        ):
            np.testing.assert_allclose(
                ours[row, :, :kept], right[row, :, :kept], atol=1e-4, rtol=1e-3
            )


@pytest.mark.parametrize("name", by_default(TREES, ("dynamic",)))
def test_greedy_identity_and_the_draft_cache(name):
    """Three rounds at a time the draft cache holds the committed text.

    At temperature 0 the final text is that of plain decoding.
    """
    target, draft, params = models(family_of(name))
    drafter, accepted = made(name), 0
    for temperature in (0.0, 1.0):
        state = begin(drafter, target, params, temperature)
        while not bool(state.done.all()):
            state, infos = some_rounds(drafter, target, params, state)
            accepted += sum(int(info.accepted.sum()) for info in infos)
            assert_holds_the_text(draft, params.draft, state.draft.kept, state, behind=2)
        decode.check(state)
        assert [len(row) for row in outputs(state)] == NEW
        if not temperature:
            assert outputs(state) == plain(family_of(name))
    assert accepted > 20


def test_a_leaf_with_the_token_of_its_sibling():
    """The accepted path may pass from a leaf to the children of a sibling with the same token.

    The draft cache then keeps the sibling's path, and no token is missing.
    """
    target = testing.tabular(7)
    drafter = drafters.make("draft_tree", target, model=target, **TREES["iid, irregular"][1])
    one_hot = 60 * jax.nn.one_hot(jnp.arange(1, 8) % 7, 7)
    table = jnp.broadcast_to(one_hot, (8, 7, 7))  # always predicts the next number
    params = ModelParams(table, table)
    prompt, lengths, keys = jnp.asarray([[2, 3]]), jnp.asarray([2]), rng.row_keys(0, 1)
    state = decode.prefill(target, drafter, params, prompt, lengths, keys, max_len=20)
    for _ in range(3):
        state, (info,) = some_rounds(drafter, target, params, state, 1)
        assert info.emitted.tolist() == [5]
        cache = state.draft.kept
        held = int(cache.length[0])
        assert held == int(state.length[0]) - 2
        assert cache.entries[0, :held].tolist() == state.tokens[0, :held].tolist()


def eagle2(log_probs, nodes, depth, top_k):
    """The dynamic tree from lists: (tokens, parents).

    ``log_probs(paths)`` gives the log-probabilities after each path.
    """
    pool, frontier = [], [((), 0.0)]
    for _ in range(depth):
        level = []
        after = log_probs([path for path, _ in frontier])
        for (path, score), scores in zip(frontier, after, strict=True):
            ranked = sorted((-value, token) for token, value in enumerate(scores))
            level += [((*path, token), score - value) for value, token in ranked[:top_k]]
        pool += level
        frontier = sorted(level, key=lambda node: -node[1])[:top_k]
    chosen = sorted(sorted(range(len(pool)), key=lambda i: -pool[i][1])[:nodes])
    paths = [pool[i][0] for i in chosen]
    return [path[-1] for path in paths], [
        paths.index(path[:-1]) if path[:-1] else -1 for path in paths
    ]


def test_the_tree_is_that_of_eagle2():
    """Ragged rows at any temperature, over several rounds: the tree is that of full forwards."""
    target, draft, params = models("llama")
    nodes, depth, top_k = (TREES["dynamic"][1][key] for key in ("nodes", "depth", "top_k"))
    forward = jax.jit(functools.partial(lm.forward, draft))
    state = begin(made("dynamic"), target, params, [0.0, 0.7, 1.0, 2.0])
    shapes, checked = set(), 0
    for _ in range(4):
        texts = [
            row[:n].tolist()
            for row, n in zip(np.asarray(state.tokens), state.length.tolist(), strict=True)
        ]
        done = np.asarray(state.done)
        state, (info,) = some_rounds(made("dynamic"), target, params, state, 1)
        for row in np.flatnonzero(~done):

            def log_probs(paths, text=texts[row]):
                block = np.zeros((top_k, 40), np.int32)
                for i, path in enumerate(paths):
                    block[i, : len(text) + len(path)] = [*text, *path]
                logits = forward(params.draft, jnp.asarray(block)).logits
                after = np.asarray(jax.nn.log_softmax(logits))
                last = len(text) - 1
                return [after[i, last + len(path)].tolist() for i, path in enumerate(paths)]

            tokens, parents = eagle2(log_probs, nodes, depth, top_k)
            assert info.draft.tokens[row].tolist() == tokens
            assert info.draft.parents[row].tolist() == parents
            shapes.add(tuple(parents))
            checked += 1
    assert len(shapes) > 3 and checked > 10


def test_a_broken_draft_model_is_reported():
    target, _, params = models("llama")
    params = params._replace(draft=jax.tree.map(lambda x: x * jnp.nan, params.draft))
    state = begin(made("dynamic"), target, params, [0.0, 0.7, 1.0, 2.0])
    with pytest.raises(NonFiniteLogits, match="row 0, round 0"):
        some_rounds(made("dynamic"), target, params, state)


V = 3


def exact_error(drafter, rule, draft_tables, steps, rounds, **settings):
    """Total variation between the output law and the target's, by enumeration."""
    target, table = testing.tabular(V), testing.random_table(0, V)
    params = ModelParams(table, draft_tables)
    settings = settings or {"temperature": 1.0}
    law = testing.exact_law(
        target, drafter, accept.load(rule), params, [1, 2], steps, rounds=rounds, **settings
    )
    assert abs(law.sum() - 1) < 1e-12
    target_law = testing.sequence_law(target, table, [1, 2], steps, **settings)
    return testing.total_variation(law, target_law)


@pytest.mark.slow
@pytest.mark.fast
def test_exact_law():
    with jax.enable_x64(True):
        table = testing.random_table(1, V)
        target, draft = testing.tabular(V), testing.tabular(V, "draft")
        drafter = drafters.make("dynamic_tree", target, model=draft, nodes=5, depth=3, top_k=2)
        for rule in ("deterministic", "recursive", "match", "traversal"):
            assert exact_error(drafter, rule, table, 4, 1) < 1e-12, rule
        cut = {"temperature": 0.7, "top_p": 0.8}
        assert exact_error(drafter, "deterministic", table, 4, 1, **cut) < 1e-12
        assert exact_error(drafter, "deterministic", table, 4, None) < 1e-12


@pytest.mark.fast
def test_errors():
    target, draft, _ = models("llama")
    make = functools.partial(drafters.make, "dynamic_tree", target, model=draft)
    for key, value in itertools.product(("nodes", "depth", "top_k"), (0, -1, 2.5, True)):
        message = f"{key} is {value}; it must be a whole number >= 1"
        with pytest.raises(UserError, match=message):
            make(**{key: value})
    with pytest.raises(
        UserError,
        match="nodes is 13, and depth 2 with top_k 3 gives 12 candidates; ask for at most 12 nodes",
    ):
        make(nodes=13, depth=2, top_k=3)
    assert make(nodes=12, depth=2, top_k=3).nodes == 12
    with pytest.raises(UserError, match="top_k is 33 and the vocabulary has 32 tokens"):
        make(top_k=33)
    with pytest.raises(UserError, match="vocabulary of 40 and the target of 32"):
        make(model=testing.tiny("llama", vocab_size=40)[0])
    with pytest.raises(UserError, match="without params"):
        make().init_params(jax.random.key(0))
    short = make(model=draft._replace(max_positions=16))
    with pytest.raises(UserError, match="the draft model has 16"):
        begin(short, target, models("llama")[2])
    message = "the rule chain takes drafts with siblings chain, and dynamic_tree drafts"
    with pytest.raises(UserError, match=message):
        accept.check_pair(make(), accept.load("chain"))
    assert made("dynamic, one path").longest == 2
