"""Beam search as a tree: the growth against a plain beam search with lists, state, errors."""

from __future__ import annotations

import functools

import cases
import growth_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import drafters_growth_plans, drafters_keys

from specjax import drafters, rng, sampling, testing
from specjax.drafters import growth
from specjax.errors import UserError
from specjax.topology import dynamic
from specjax.types import Context, ModelParams

WIDTH, VOCAB, ROWS = 6, 11, 5


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@functools.cache
def weights():
    """(w [E,E], embeddings [V,E], head [E,V], one state per row [B,E])."""
    random = np.random.default_rng(0)
    shapes = ((WIDTH, WIDTH), (VOCAB, WIDTH), (WIDTH, VOCAB), (ROWS, WIDTH))
    w, embedding, head, start = (random.normal(size=s).astype(np.float32) for s in shapes)
    # Peaked in the first rows, so that paths have common prefixes; nearly flat in the last ones.
    return w, embedding, head, start * np.float32([[4.0], [3.0], [1.0], [0.4], [0.1]])


def recurrent() -> growth.Stepper:
    """A node's state is tanh(state above @ w + its embedding); its logits are state @ head."""
    w, embedding, head, start = map(jnp.asarray, weights())

    def step(params, kept, nodes, block):
        above = jnp.broadcast_to(start[:, None], (*nodes.tokens.shape, WIDTH))
        if block is not None:
            inside = growth.at(block, jnp.maximum(jnp.asarray(nodes.parents), 0))
            above = jnp.where(jnp.asarray(nodes.parents)[..., None] < 0, above, inside)
        state = jnp.tanh(above @ w + embedding[nodes.tokens])
        return state @ head, state

    return growth.Stepper(
        init=lambda params, context, out, slots: start,
        begin=lambda params, context, kept: growth.Begun(kept @ head, kept),
        step=step,
        commit=lambda params, kept, drafted, verdict, out: kept,
    )


def drafted(**keys):
    """The draft of ``recurrent`` with tree="beam"."""
    method = drafters_growth_plans.Method("recurrent", "chain:2", "top_k", VOCAB)
    plan = growth.read(method, drafters_keys.TreeKeys(tree="beam", **keys))
    drafter = growth.build("recurrent", recurrent(), plan, lambda key: {})
    one = jnp.ones((ROWS,), jnp.int32)
    context = Context(jnp.zeros((ROWS, 4), jnp.int32), one, sampling.make_sampling(ROWS))
    state = drafter.init(None, context, None, 8)
    keys = rng.RowKeys(rng.row_keys(0, ROWS), jnp.zeros((), jnp.int32), one)
    draft = jax.jit(drafter.propose)(None, keys, context, state)[0]
    assert draft.tokens.shape == (ROWS, drafter.nodes) and draft.probs is None
    assert drafter.siblings == "deterministic" and not drafter.whole
    return draft


def plain_beams(row, beams, depth, least=0.0):
    """Beam search with lists: [(path, score)], best first, and the beams of every level."""
    w, embedding, head, start = weights()

    def after(path):
        state = start[row]
        for token in path:
            state = np.tanh(state @ w + embedding[token])
        return log_softmax(state @ head)

    levels, now = [], [((), np.float32(0))]
    for _ in range(depth):
        each = [after(path) for path, _ in now]
        if max(np.exp(scores).max() for scores in each) < least:
            break
        below = [
            ((*path, int(token)), score + scores[token])
            for (path, score), scores in zip(now, each, strict=True)
            for token in np.argsort(-scores, kind="stable")
        ]
        now = sorted(below, key=lambda beam: -beam[1])[:beams]
        levels.append([path for path, _ in now])
    return now if levels else [], levels


def plain_tree(row, beams, depth, nodes, least=0.0):
    """The paths of the tree's nodes in order: every prefix of the beams, once."""
    last, levels = plain_beams(row, beams, depth, least)
    while True:
        prefixes = {path[: i + 1] for path, _ in last for i in range(len(path))}
        if len(prefixes) <= nodes:
            return [path for level in levels for path in level if path in prefixes]
        last = last[:-1]


@pytest.mark.parametrize(
    "keys",
    [
        {"top_k": 4, "depth": 4},
        {"top_k": 4, "depth": 4, "nodes": 9},
        {"top_k": 3, "depth": 4, "control": "threshold:0.5"},
        {"top_k": 1, "depth": 3},
        {"top_k": VOCAB, "depth": 2, "nodes": 2},
        {"top_k": 5, "depth": 1},
    ],
    ids=str,
)
def test_the_tree_is_that_of_a_plain_beam_search(keys):
    """In every row: the tokens, the parents, and padding at the end."""
    beams, depth = keys["top_k"], keys["depth"]
    nodes = keys.get("nodes", beams * depth)
    least = 0.5 if "control" in keys else 0.0
    draft, sizes = drafted(**keys), set()
    for row in range(ROWS):
        expected = plain_tree(row, beams, depth, nodes, least)
        assert shared.paths_of(draft, row) == expected
        valid = np.asarray(draft.valid)[row]
        assert valid.tolist() == [i < len(expected) for i in range(nodes)]
        parents = np.asarray(draft.parents)[row]
        assert (parents < np.arange(nodes)).all()
        sizes.add(len(expected))
    if beams > 1 and depth > 2:
        # Common prefixes in some rows, more than in others.
        assert len(sizes) > 1 and min(sizes) < nodes, sizes


def test_equal_scores_go_to_the_lower_index():
    """The pool's parents come before their children also if all scores are equal."""
    parents = jnp.asarray([[-1, -1, 0, 0, 2, 2], [-1, -1, 0, 1, 3, 2]])
    valid = jnp.ones((2, 6), bool).at[1, 4:].set(False)
    chosen, above, kept = jax.jit(dynamic.paths, static_argnums=(2, 3))(parents, valid, 2, 4)
    np.testing.assert_array_equal(kept, [[1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(chosen, [[0, 2, 4, 5], [0, 1, 2, 3]])
    np.testing.assert_array_equal(above, [[-1, 0, 1, 1], [-1, -1, 0, 1]])
    for nodes in (2, 7):
        with pytest.raises(UserError, match=f"nodes is {nodes}; give at least 3 and at most 6"):
            dynamic.paths(parents, valid, 2, nodes)


LAWS = (
    ("draft_model", {}, "deterministic", ""),
    ("draft_model", {}, "recursive", shared.CONTROL),
    ("medusa", {"heads": 3}, "match", ""),
    ("hydra", {"heads": 3}, "traversal", shared.CONTROL),
)


@pytest.mark.parametrize(
    ("name", "own", "rule", "control"),
    LAWS,
)
@pytest.mark.slow
def test_exact_law(name, own, rule, control):
    target, draft, _ = cases.models(3)
    keys = {"tree": "beam", "top_k": 2, "depth": 3, "nodes": 5, "control": control, **own}
    with jax.enable_x64(True):
        table = cases.table(0)
        if name == "draft_model":
            drafter = drafters.make(name, target, model=draft, **keys)
            params = ModelParams(table, cases.table(1))
        else:
            drafter = cases.random_heads(name, target, table, **keys)
            params = ModelParams(table, drafter.init_params(None))
        assert shared.law_error(drafter, rule, target, params) < shared.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("control", ["threshold:0.6", ""])
def test_state_follows_text(control):
    """The draft model's cache after rounds with common prefixes, cut paths and padding."""
    target, params = testing.tiny("llama", 0, 20.0, vocab_size=12)
    params = ModelParams(params, shared.noisy_copy(params))
    model = target._replace(name="draft")
    drafter = drafters.make(
        "draft_model", target, model=model, tree="beam", top_k=3, depth=4, nodes=8, control=control
    )
    sizes = set()
    for temperature in (0.0, 1.0):
        for each in shared.assert_state_follows_text(
            drafter, "recursive", target, params, temperature
        ):
            sizes |= set(np.asarray(each.valid).sum(-1).tolist())
    assert len(sizes) > 2, sizes


@pytest.mark.fast
def test_keys():
    def shape(default, keys=drafters_keys.TreeKeys, **more):
        default = drafters_growth_plans.Method("m", default, "top_k", 11)
        return growth.read(default, keys(**more)).growth

    assert drafters_growth_plans.POOLED == ("dynamic", "beam", "best_first", "best_parents")
    beam = shape("beam")
    assert (beam.nodes, beam.depth, beam.siblings) == (30, 5, "deterministic")
    assert shape("beam", nodes=3).depth == 3 and shape("beam", top_k=2, depth=2).nodes == 4
    # Keys without a tree belong to the method's default tree.
    dynamic_tree = shape("dynamic", nodes=9, top_k=3, depth=2)
    assert dynamic_tree == shape("chain:2", tree="dynamic", nodes=9, top_k=3, depth=2)
    assert shape("dynamic").nodes == 32 and shape("dynamic", tree="2x1").nodes == 4
    assert shape("beam", tree="dynamic") == shape("dynamic")
    chain = shape("dynamic", drafters_keys.EagleKeys, gamma=3)
    assert chain.siblings == "chain" and chain.depth == 3 and chain.how == "top_k"
    assert shape("dynamic", drafters_keys.EagleKeys) == shape("dynamic")
    refused = [
        ({"tree": "beam", "depth": 4, "nodes": 3}, "nodes is 3 and depth is 4, so no path of 4"),
        ({"tree": "dynamic", "depth": 4, "nodes": 3}, "give at least 4 nodes, or a depth of at"),
        ({"tree": "beam", "top_k": 12}, "top_k is 12 and the vocabulary has 11 tokens"),
        ({"tree": "beam", "top_k": 2, "depth": 2, "nodes": 5}, "ask for at most 4 nodes"),
        ({"tree": "beam", "siblings": "iid"}, "siblings is 'iid' and has no effect on the tree"),
        (
            {"tree": "bean"},
            'the tree is \'bean\'; give "dynamic", "beam", .*"best_parents", "search"',
        ),
        ({"gamma": 3, "tree": "2x1"}, "m was given gamma=3, a chain, and tree='2x1'; give one"),
        ({"gamma": 3, "nodes": 9}, "m was given gamma=3, a chain, and nodes=9; give one of them"),
        ({"gamma": 3, "top_k": 2}, "top_k is 2 and has no effect on a tree of a fixed shape"),
        ({"gamma": -1}, "gamma is -1; it must be a whole number >= 1"),
    ]
    for keys, message in refused:
        with pytest.raises(UserError, match=message) as caught:
            shape("dynamic", drafters_keys.EagleKeys, **keys)
        assert "\n" not in str(caught.value)
