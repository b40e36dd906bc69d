"""Tree search: the dynamic program against all trees, the positional model against simulations."""

from __future__ import annotations

import functools
import heapq
import itertools

import numpy as np
import pytest

from specjax import topology
from specjax.errors import UserError
from specjax.topology import search

pytestmark = pytest.mark.fast
P = (0.6, 0.2, 0.1)


@functools.cache
def forests(nodes):
    """Every ordered forest with this number of nodes, as nested tuples."""
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
    """The best value of all trees within the limits, or None if there are no such trees."""
    shapes = [shape(forest) for forest in forests(nodes)]
    return max(
        (1 + value(table) for value, d, b in shapes if d <= depth and b <= branching), default=None
    )


def test_number_of_forests():
    """The Catalan numbers."""
    assert [len(set(forests(nodes))) for nodes in range(8)] == [1, 1, 2, 5, 14, 42, 132, 429]


def test_expected_tokens():
    assert search.expected_tokens(topology.chain(3), P) == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert search.expected_tokens(topology.full((3,)), P) == pytest.approx(1.9)
    assert search.expected_tokens(topology.full((2, 1)), P) == pytest.approx(1 + 0.8 * 1.6)
    # The last row holds for level 3 too.
    deep = [[0.5, 0.2], [0.4, 0.0]]
    assert search.expected_tokens(topology.chain(3), deep) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
    assert search.expected_tokens(topology.full((2, 1)), deep) == pytest.approx(1 + 0.7 * 1.4)
    assert search.expected_tokens(topology.Topology(()), P) == 1


@pytest.mark.parametrize("acceptance", [P, [[0.5, 0.3, 0.1], [0.2, 0.5, 0.1]]])
def test_positional_model(acceptance):
    """A simulation: draws the accepted child of each node on the way down, and counts."""
    tree, rounds = topology.check([-1, -1, 0, 0, 1, 2, 2, 5, 7]), 40_000
    rng, table = np.random.default_rng(0), np.atleast_2d(acceptance)
    at, tokens = np.full(rounds, -1), np.ones(rounds)
    # -2: the child does not exist, or (last column) no child was accepted.
    children = np.full((tree.nodes + 1, 4), -2)
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
        # Not monotone: a later sibling may be more probable. Some entries are 0.
        table = rng.dirichlet(np.ones(4), rows)[:, :3]
        table *= rng.random(table.shape) < 0.9
        expected = brute_force(table, nodes, depth, branching)
        acceptance = table[0] if rows == 1 else table
        if expected is None:
            refused += 1
            with pytest.raises(UserError, match=f"no tree of {nodes} nodes"):
                search.optimal(acceptance, nodes, depth, branching)
            continue
        compared += 1
        tree, value = search.optimal(acceptance, nodes, depth, branching)
        assert value == pytest.approx(expected, abs=1e-12)
        assert search.expected_tokens(tree, acceptance) == pytest.approx(expected, abs=1e-12)
        assert tree == topology.check(tree.parents)
        # Breadth first.
        assert list(tree.parents) == sorted(tree.parents)
        assert tree.nodes == nodes and tree.depth <= depth and tree.branching <= branching
    assert compared > 60 and refused > 20


@pytest.mark.parametrize("depth", [3, 10, 200])
def test_optimal_of_many_nodes(depth):
    """Where earlier siblings are always more probable, the greedy tree is optimal too."""
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
    # All trees have the same value: the one with the fewest children is taken.
    assert search.optimal((0.0, 0.0), 3, 3)[0] == topology.chain(3)
    # Deeper than the recursion limit.
    tree, value = search.optimal((0.9,), 1200, 5000)
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
    # The choice is not at an end of the range.
    assert 1 < choice.nodes < 10 and choice.topology.branching <= 2


GOOD = {2: 1.0, 4: 1.1}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search.expected_tokens(topology.full((4,)), P), "4 siblings and acceptance 3"),
        (lambda: search.expected_tokens(topology.chain(2), (0.7, 0.4)), "sum to at most 1"),
        (lambda: search.expected_tokens(topology.chain(2), (0.7, -0.1)), "must be >= 0"),
        (
            lambda: search.expected_tokens(topology.chain(2), (np.nan,)),
            "does not hold probabilities",
        ),
        (lambda: search.expected_tokens(topology.chain(2), ()), "acceptance has shape"),
        (lambda: search.optimal(np.zeros((1, 1, 1)), 2, 2), "acceptance has shape"),
        (lambda: search.optimal(0.5, 2, 2), "acceptance has shape"),
        (lambda: search.optimal([[0.1, 0.2], [0.1]], 2, 2), "acceptance is not a table"),  # type: ignore[list-item]
        (lambda: search.optimal(P, 0, 2), "nodes is 0"),
        (lambda: search.optimal(P, 2, 0), "depth is 0"),
        (lambda: search.optimal(P, 2, 2, 0), "branching is 0"),
        (
            lambda: search.optimal(P, 2, 2, 4),
            "branching is 4 and acceptance has 3 entries; give at most 3",
        ),
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
    ],
)
def test_errors(call, message):
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
