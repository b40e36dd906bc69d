"""Searching for trees: the dynamic program against all trees, the positional model against coins, pools against NumPy."""

from __future__ import annotations

import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, rng, topology
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.testing.models import tabular
from specjax.topology import dynamic, search
from specjax.types import Draft, ModelParams, StepInfo

pytestmark = pytest.mark.fast
P = (0.6, 0.2, 0.1)


@functools.cache
def forests(nodes):
    """Every ordered forest of so many nodes, as nested tuples."""
    if not nodes:
        return [()]
    return [
        (first, *rest)
        for size in range(nodes)
        for first in forests(size)
        for rest in forests(nodes - 1 - size)
    ]


def shape(forest):
    """(value(table), depth, branching) of a nested tuple, without the functions under test."""

    def value(table, below=forest, depth=0):
        row = table[min(depth, len(table) - 1)]
        return sum(
            row[rank] * (1 + value(table, child, depth + 1)) for rank, child in enumerate(below)
        )

    def depth(below):
        return max((1 + depth(child) for child in below), default=0)

    def branching(below):
        return max([len(below), *map(branching, below)])

    return value, depth(forest), branching(forest)


def brute_force(table, nodes, depth, branching):
    """The best value of all trees, None if there is none."""
    shapes = [shape(forest) for forest in forests(nodes)]
    return max(
        (1 + value(table) for value, d, b in shapes if d <= depth and b <= branching), default=None
    )


def test_all_trees_are_there():
    assert [len(set(forests(nodes))) for nodes in range(8)] == [
        1,
        1,
        2,
        5,
        14,
        42,
        132,
        429,
    ]  # Catalan


def test_expected_tokens():
    assert search.expected_tokens(topology.chain(3), P) == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert search.expected_tokens(topology.full((3,)), P) == pytest.approx(1.9)
    assert search.expected_tokens(topology.full((2, 1)), P) == pytest.approx(1 + 0.8 * 1.6)
    deep = [[0.5, 0.2], [0.4, 0.0]]  # the last row serves level 3
    assert search.expected_tokens(topology.chain(3), deep) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
    assert search.expected_tokens(topology.full((2, 1)), deep) == pytest.approx(1 + 0.7 * 1.4)
    assert search.expected_tokens(topology.Topology(()), P) == 1


@pytest.mark.parametrize("acceptance", [P, [[0.5, 0.3, 0.1], [0.2, 0.5, 0.1]]])
def test_positional_model(acceptance):
    """Draws which child is accepted, walks down, and counts."""
    tree, rounds = topology.check([-1, -1, 0, 0, 1, 2, 2, 5, 7]), 40_000
    rng, table = np.random.default_rng(0), np.atleast_2d(acceptance)
    at, tokens = np.full(rounds, -1), np.ones(rounds)
    children = np.full(
        (tree.nodes + 1, 4), -2
    )  # -2: no such child, and the last column: none was accepted
    for node, below in enumerate(tree.children):
        children[node, : len(below)] = below
    for level in range(tree.depth):
        row = table[min(level, len(table) - 1)]
        rank = rng.choice(4, rounds, p=[*row, 1 - row.sum()])
        at = np.where(at == -2, -2, children[at + 1, rank])
        tokens += at != -2
    error = tokens.std() / np.sqrt(rounds)
    assert 0.001 < error < 0.01
    assert abs(tokens.mean() - search.expected_tokens(tree, acceptance)) < 5 * error


@pytest.mark.parametrize(
    ("n", "d", "value"),
    [(4, 4, 2.176), (6, 4, 2.496), (8, 4, 2.716), (8, 8, 2.7456), (12, 5, 3.0616)],
)
def test_known_values(n, d, value):
    """G(n, D) counts the pending token as a node and as a level."""
    tree, got = search.optimal(P, n - 1, d - 1)
    assert got == pytest.approx(value, abs=1e-12)
    assert search.expected_tokens(tree, P) == pytest.approx(value, abs=1e-12)
    assert tree.nodes == n - 1 and tree.depth <= d - 1
    assert search.optimal(P, n - 1, d)[1] >= got


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_optimal_against_all_trees(rows):
    rng, compared, refused = np.random.default_rng(rows), 0, 0
    for nodes, depth, branching in itertools.product(range(1, 8), (1, 2, 3, 4, 9), (1, 2, 3)):
        table = rng.dirichlet(np.ones(4), rows)[
            :, :3
        ]  # not monotone: a later sibling may be the likelier one
        table *= rng.random(table.shape) < 0.9  # zeros, too
        want = brute_force(table, nodes, depth, branching)
        acceptance = table[0] if rows == 1 else table
        if want is None:
            refused += 1
            with pytest.raises(UserError, match=f"no tree of {nodes} nodes"):
                search.optimal(acceptance, nodes, depth, branching)
            continue
        compared += 1
        tree, value = search.optimal(acceptance, nodes, depth, branching)
        assert value == pytest.approx(want, abs=1e-12)
        assert search.expected_tokens(tree, acceptance) == pytest.approx(want, abs=1e-12)
        assert tree == topology.check(tree.parents) and list(tree.parents) == sorted(
            tree.parents
        )  # breadth first
        assert tree.nodes == nodes and tree.depth <= depth and tree.branching <= branching
    assert compared > 60 and refused > 20


@pytest.mark.parametrize("depth", [3, 10, 200])
def test_optimal_of_many_nodes(depth):
    """Where earlier siblings are likelier everywhere, taking the most reachable node each time is optimal too."""
    table = 0.8 * np.sort(np.random.default_rng(0).dirichlet(np.ones(9), 4), axis=1)[:, ::-1]
    heap, total = [(-table[0, 0], 1, 0, 1.0)], 1.0
    for _ in range(200):
        minus, level, rank, above = heapq.heappop(heap)
        total -= minus
        if rank + 1 < table.shape[1]:
            heapq.heappush(
                heap, (-above * table[min(level, 4) - 1, rank + 1], level, rank + 1, above)
            )
        if level < depth:
            heapq.heappush(heap, (minus * table[min(level + 1, 4) - 1, 0], level + 1, 0, -minus))
    tree, value = search.optimal(table, 200, depth)
    assert value == pytest.approx(total, abs=1e-9)
    assert search.expected_tokens(tree, table) == pytest.approx(total, abs=1e-9)
    assert tree.nodes == 200 and tree.depth <= depth


def test_optimal_is_deterministic_and_deep():
    assert search.optimal((0.5, 0.5), 6, 6) == search.optimal((0.5, 0.5), 6, 6)
    assert search.optimal((0.0, 0.0), 3, 3)[0] == topology.chain(
        3
    )  # all trees tie: fewest children
    tree, value = search.optimal((0.9,), 1200, 5000)  # deeper than Python's stack
    assert tree == topology.chain(1200) and value == pytest.approx(10)


def test_best_size():
    sizes = [1, 2, 4, 8, 16, 64]
    flat = search.best_size(P, dict.fromkeys(sizes, 1.0), 1e-6, range(1, 9))
    linear = search.best_size(P, {n: float(n) for n in sizes}, 0.01, range(1, 9))
    assert flat.nodes == 63 and flat.depth == 8
    assert linear.nodes == 1 and linear.depth == 1 and linear.speedup < 1
    for choice, time in ((flat, 1 + 8e-6), (linear, 2.01)):
        assert choice.topology.nodes == choice.nodes and choice.topology.depth <= choice.depth
        assert choice.expected == pytest.approx(search.expected_tokens(choice.topology, P))
        assert choice.speedup == pytest.approx(choice.expected / time)


@pytest.mark.parametrize("acceptance", [P, [[0.4, 0.3, 0.1], [0.6, 0.1, 0.0], [0.1, 0.1, 0.1]]])
def test_best_size_against_every_size(acceptance):
    verify, draft = {n: 0.94 + 0.06 * n for n in range(1, 12)}, 0.07
    speedups = {}
    for n, d in itertools.product(range(2, 12), (1, 2, 4, 6)):
        if n - 1 <= sum(2**level for level in range(1, d + 1)):
            speedups[n - 1, d] = search.optimal(acceptance, n - 1, d, 2)[1] / (
                verify[n] + d * draft
            )
    choice = search.best_size(acceptance, verify, draft, (4, 1, 6, 2), branching=2)
    assert choice.speedup == pytest.approx(max(speedups.values()))
    assert speedups[choice.nodes, choice.depth] == pytest.approx(choice.speedup)
    assert (
        1 < choice.nodes < 10 and choice.topology.branching <= 2
    )  # the choice is not at an end of the range


def test_acceptance_vector():
    got = search.acceptance_vector(np.array([[0, 0, -1, 2], [0, -1, 1, 0]]), 4)
    assert got.dtype == np.float64 and got.tolist() == [0.5, 0.125, 0.125, 0]
    assert search.acceptance_vector(np.array([-1, -1]), 2).tolist() == [0, 0]


GOOD = {2: 1.0, 4: 1.1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search.expected_tokens(topology.full((4,)), P), "4 siblings and acceptance 3"),
        (lambda: search.expected_tokens(topology.chain(2), (0.7, 0.4)), "sum to at most 1"),
        (lambda: search.expected_tokens(topology.chain(2), (0.7, -0.1)), "must be >= 0"),
        (lambda: search.expected_tokens(topology.chain(2), (np.nan,)), "no probability"),
        (lambda: search.expected_tokens(topology.chain(2), ()), "acceptance has shape"),
        (lambda: search.optimal(np.zeros((1, 1, 1)), 2, 2), "acceptance has shape"),
        (lambda: search.optimal(0.5, 2, 2), "acceptance has shape"),
        (lambda: search.optimal([[0.1, 0.2], [0.1]], 2, 2), "acceptance is no table"),  # type: ignore[list-item]
        (lambda: search.optimal(P, 0, 2), "nodes is 0"),
        (lambda: search.optimal(P, 2, 0), "depth is 0"),
        (lambda: search.optimal(P, 2, 2, 0), "branching is 0"),
        (lambda: search.optimal(P, 2, 2, 4), "branching is 4 and acceptance has 3"),
        (lambda: search.optimal(P, 13, 2), "ask for at most 12 nodes"),
        (lambda: search.optimal(P, 100_000, 2), "too large to search"),
        (lambda: search.best_size(P, {}, 0.1, [1]), "no size to choose from"),
        (lambda: search.best_size(P, {1: 1.0}, 0.1, [1]), "verify needs a key >= 2"),
        (lambda: search.best_size(P, GOOD, 0.1, []), "no size to choose from"),
        (lambda: search.best_size(P, {0: 1.0}, 0.1, [1]), "a key of verify is 0"),
        (lambda: search.best_size(P, {2: 0.0}, 0.1, [1]), r"verify\[2\] is 0"),
        (lambda: search.best_size(P, {2: float("inf")}, 0.1, [1]), r"verify\[2\] is inf"),
        (lambda: search.best_size(P, GOOD, 0.0, [1]), "draft is 0"),
        (lambda: search.best_size(P, GOOD, float("nan"), [1]), "draft is nan"),
        (lambda: search.best_size(P, GOOD, 0.1, [0]), "a depth is 0"),
        (lambda: search.best_size(P, {9: 1.0}, 0.1, [1]), "no tree of 8 nodes has depth 1"),
        (lambda: search.acceptance_vector(np.array([], int), 2), "no observation"),
        (lambda: search.acceptance_vector(np.array([0, 2]), 2), "from -1 .* to 1"),
        (lambda: search.acceptance_vector(np.array([-2]), 2), "from -1"),
        (lambda: search.acceptance_vector(np.array([0.0]), 2), "whole numbers"),
        (lambda: dynamic.expand(jnp.zeros((1, 1)), jnp.zeros((1, 1, 3)), 4), "top_k is 4"),
        (lambda: dynamic.frontier(jnp.zeros((1, 3)), 4), "k is 4"),
        (lambda: dynamic.rerank(jnp.zeros((1, 3)), jnp.zeros((1, 3), jnp.int32), 4), "nodes is 4"),
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_expand():
    rng = np.random.default_rng(0)
    scores = -rng.exponential(size=(3, 4)).astype(np.float32)
    scores[0, 1] = -np.inf
    log_probs = np.log(rng.dirichlet(np.ones(9), (3, 4))).astype(np.float32)
    tokens, total, parent = jax.jit(dynamic.expand, static_argnums=2)(scores, log_probs, 5)
    assert tokens.dtype == parent.dtype == jnp.int32 and total.dtype == jnp.float32
    assert tokens.shape == total.shape == parent.shape == (3, 20)
    order = np.argsort(-log_probs, axis=-1)[..., :5]
    np.testing.assert_array_equal(tokens, order.reshape(3, 20))
    want = scores[..., None] + np.take_along_axis(log_probs, order, -1)
    np.testing.assert_array_equal(total, want.reshape(3, 20))
    np.testing.assert_array_equal(parent, np.tile(np.repeat(np.arange(4), 5), (3, 1)))


def test_frontier():
    total = jnp.asarray([[-2.0, -1.0, -1.0, -np.inf], [-0.0, 0.0, np.nan, -0.0]])
    np.testing.assert_array_equal(dynamic.frontier(total, 3), [[1, 2, 0], [0, 1, 3]])
    got = jax.jit(dynamic.frontier, static_argnums=1)(jnp.full((2, 6), -jnp.inf), 4)
    np.testing.assert_array_equal(got, [[0, 1, 2, 3]] * 2)
    assert got.dtype == jnp.int32


def pool(rng, size, kind):
    """A random tree with non-increasing scores; ``kind`` says what is hard about them."""
    parents = [int(rng.integers(-1, node)) for node in range(size)]
    steps = {
        "plain": lambda: -rng.exponential(),
        "ties": lambda: -float(rng.integers(0, 2)),
        "all equal": lambda: 0.0,
        "signed zeros": lambda: float(rng.choice([-0.0, 0.0])),
        "-inf": lambda: -np.inf if rng.random() < 0.4 else -float(rng.integers(0, 2)),
        "nan": lambda: np.nan if rng.random() < 0.2 else -float(rng.integers(0, 2)),
    }
    total = np.zeros(size, np.float32)
    for node, parent in enumerate(parents):
        total[node] = np.float32(steps[kind]()) + (
            total[parent] if parent >= 0 else np.float32(-0.0)
        )
    return total, parents


@pytest.mark.parametrize("kind", ["plain", "ties", "all equal", "signed zeros", "-inf", "nan"])
def test_rerank(kind):
    rng = np.random.default_rng(1)
    rerank = jax.jit(dynamic.rerank, static_argnums=2)
    for nodes in (1, 7, 24):
        rows = [pool(rng, 24, kind) for _ in range(40)]
        total, parents = (
            np.stack([row[0] for row in rows]),
            np.array([row[1] for row in rows], np.int32),
        )
        chosen, remapped = rerank(total, parents, nodes)
        assert chosen.dtype == remapped.dtype == jnp.int32 and chosen.shape == remapped.shape == (
            40,
            nodes,
        )
        for row in range(40):
            scores = [-np.inf if np.isnan(x) else float(x) for x in total[row]]
            want = sorted(sorted(range(24), key=lambda node: (-scores[node], node))[:nodes])
            assert chosen[row].tolist() == want
            assert all(parents[row][node] in (-1, *want) for node in want)  # closed under ancestors
            places = [
                want.index(parents[row][node]) if parents[row][node] >= 0 else -1 for node in want
            ]
            assert remapped[row].tolist() == places
            assert all(place < node for node, place in enumerate(places))


def test_expand_and_rerank_make_a_tree():
    """Two levels as a drafter runs them, at confidences of exactly one and zero: everything ties."""
    log_probs = jnp.where(jnp.arange(8) < 1, 0.0, -jnp.inf)
    tokens, total, _ = dynamic.expand(jnp.zeros((1, 1)), jnp.broadcast_to(log_probs, (1, 1, 8)), 3)
    best = dynamic.frontier(total, 3)
    scores = jnp.take_along_axis(total, best, 1)
    below, more, parent = dynamic.expand(scores, jnp.broadcast_to(log_probs, (1, 3, 8)), 3)
    parents = jnp.concatenate([jnp.full((1, 3), -1), jnp.take_along_axis(best, parent, 1)], 1)
    chosen, remapped = dynamic.rerank(jnp.concatenate([total, more], 1), parents, 4)
    assert chosen.tolist() == [[0, 1, 2, 3]] and remapped.tolist() == [[-1, -1, -1, 0]]
    assert jnp.concatenate([tokens, below], 1)[0, chosen[0]].tolist() == [0, 1, 2, 0]


def level_info(tokens, accepted, emitted, drafted, valid=None, depth=1):
    drafted = jnp.asarray(drafted, jnp.int32)
    valid = jnp.ones_like(drafted, bool) if valid is None else jnp.asarray(valid)
    draft = Draft(drafted, valid, jnp.full_like(drafted, -1), depth=depth)
    accepted, zeros = jnp.asarray(accepted), jnp.zeros((len(accepted),), jnp.int32)
    return StepInfo(draft, jnp.asarray(tokens), jnp.asarray(emitted), accepted, zeros, zeros)


def test_accepted_ranks():
    drafted = [[5, 3, 5], [5, 3, 4], [5, 3, 4], [5, 3, 4], [7, 7, 2]]
    info = level_info(
        # The second; none, though the target itself drew a sibling; a finished row; the third, cut to one token; equal ones.
        tokens=[[3, 9], [3, -1], [-1, -1], [4, -1], [7, 1]],
        accepted=[1, 0, 0, 1, 1],
        emitted=[2, 1, 0, 1, 2],
        drafted=drafted,
    )
    assert search.accepted_ranks(info).tolist() == [1, -1, 2, 0]
    hidden = level_info([[7, 1]], [1], [2], [[7, 3, 7]], valid=[[False, True, True]])
    assert search.accepted_ranks(hidden).tolist() == [2]  # what is invalid has no token
    with pytest.raises(
        UserError, match="the draft has 2 levels; count ranks on trees of one level"
    ):
        search.accepted_ranks(level_info([[7, 1]], [1], [2], [[7, 3, 7]], depth=2))


def test_accepted_ranks_of_a_run_are_those_of_the_closed_form():
    """One level, laws that depend on nothing: P[0] is sum(min), and the others follow from the residuals."""
    target_law, draft_law = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.1, 0.2, 0.3, 0.4])
    model = tabular(4)
    table = lambda law: jnp.broadcast_to(jnp.log(jnp.asarray(law, jnp.float32)), (5, 4, 4))  # noqa: E731
    drafter = draft_tree.make(
        model, model=model, params=table(draft_law), tree="3", siblings="without_replacement"
    )
    params, rule = ModelParams(table(target_law), table(draft_law)), accept.load("recursive")
    rows = 2000
    state = decode.prefill(
        model, drafter, params, jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32), rng.row_keys(0, rows), max_len=2
    )  # fmt: skip
    (_, info), *more = decode.stream(model, drafter, rule, params, state)
    assert not more
    seen = search.acceptance_vector(search.accepted_ranks(info), 3)

    want = np.zeros(3)  # over every order in which three tokens can be drawn
    for order in itertools.permutations(range(4), 3):
        chance, left, owed, tried = 1.0, draft_law.copy(), target_law.copy(), 1.0
        branches = []
        for token in order:
            law = left / left.sum()
            chance *= law[token]
            stands = min(1.0, owed[token] / law[token])
            branches.append(tried * stands)
            tried *= 1 - stands
            rest = np.maximum(owed - law, 0)
            owed = rest / rest.sum() if rest.sum() > 0 else owed
            left[token] = 0
        want += chance * np.array(branches)
    assert want[0] == pytest.approx(np.minimum(target_law, draft_law).sum())
    assert np.abs(seen - want).max() < 4 * np.sqrt(0.25 / rows)
