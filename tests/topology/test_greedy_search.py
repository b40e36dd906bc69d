"""Greedy tree search: optimal for decreasing acceptance; impossible trees."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.errors import UserError
from specjax.topology import search

pytestmark = pytest.mark.fast


def test_greedy_search_is_optimal_for_decreasing_acceptance():
    rng = np.random.default_rng(0)
    for _ in range(30):
        table = np.sort(rng.dirichlet(np.ones(5), size=rng.integers(1, 5))[:, :4], axis=1)[:, ::-1]
        nodes, depth = int(rng.integers(1, 12)), int(rng.integers(2, 5))
        tree, tokens = search.greedy(table, nodes, depth)
        assert tree.nodes == nodes and tree.depth <= depth
        assert tokens == pytest.approx(search.optimal(table, nodes, depth)[1])
        assert tokens == pytest.approx(search.expected_tokens(tree, table))
    # The better child is the second. Greedy takes the first one first, and so does optimal.
    assert search.greedy([[0.0, 0.9]], 2, 1)[1] == pytest.approx(1.9)


def test_impossible_trees():
    with pytest.raises(
        UserError, match="no tree of 9 nodes has depth 2 and branching 2; ask for at most 6"
    ):
        search.greedy([[0.5, 0.3]], 9, 2)
