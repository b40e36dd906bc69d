"""The best static tree for a measured acceptance: Sequoia, Chen et al. 2024 (2402.12374).

Acceptance is positional: P[b] is the probability that, of the children of an accepted node, child b
(from 0) is the accepted one. It is the same for every node. P sums to at most 1; the rest is the
probability of a rejection. Acceptance is a vector, or a table P[depth, b] in which the last row
holds for all deeper levels too.

The accuracies of heads (``train.examine.accuracy``) are such a table only approximately: they count
every position of a text, not only those at which the parent was accepted.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specjax.checks import cost, whole
from specjax.errors import UserError
from specjax.topology.shapes import Topology, from_ranks

# Acceptance of siblings by rank, as the search for a tree needs it.


def acceptance_table(acceptance: npt.ArrayLike) -> np.ndarray:
    """Acceptance as f64[levels, branching]. Raises UserError for other than probabilities."""
    try:
        table = np.asarray(acceptance, np.float64)
    except (ValueError, TypeError):
        raise UserError(
            "acceptance is not a table of numbers; give P[branch] or P[depth, branch]"
        ) from None
    table = table[None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size:
        right = "give P[branch] or P[depth, branch], not empty"
        raise UserError(f"acceptance has shape {np.shape(acceptance)}; {right}")
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(1) <= 1 + 1e-6).all()):
        right = "its entries must be >= 0 and sum to at most 1 at each depth"
        raise UserError(f"acceptance does not hold probabilities; {right}")
    return table


def acceptance_vector(ranks: npt.ArrayLike, width: int) -> np.ndarray:
    """P f64[width]: how often each rank was the accepted one, from observed ranks (-1: none).

    Unconditional, as ``optimal`` needs it: rejections count in the denominator. Observe sets of
    ``width`` siblings with an accepted parent. Raises UserError for no observation, or one outside
    -1..width-1.
    """
    seen, width = np.asarray(ranks), whole("width", width, 1)
    if not seen.size:
        raise UserError("there is no observation of an accepted rank; give at least one")
    if not np.issubdtype(seen.dtype, np.integer) or seen.min() < -1 or seen.max() >= width:
        raise UserError(f"ranks must be whole numbers from -1 (none) to {width - 1} (width - 1)")
    return np.bincount(seen.ravel() + 1, minlength=width + 1)[1:] / seen.size


REFERENCE = "chen2024sequoia"


def _arguments(
    acceptance: npt.ArrayLike, nodes: int, depth: int, branching: int | None
) -> tuple[np.ndarray, int]:
    """The table of a search, and its branching (None: the entries of the table). UserError."""
    table = acceptance_table(acceptance)
    whole("nodes", nodes, 1)
    whole("depth", depth, 1)
    most = table.shape[1]
    if branching is None:
        return table, most
    if whole("branching", branching, 1) > most:
        wrong = f"branching is {branching} and acceptance has {most} entries"
        raise UserError(f"{wrong}; give at most {most}")
    return table, int(branching)


def expected_tokens(topology: Topology, acceptance: npt.ArrayLike) -> float:
    """Tokens per round: 1 + the sum over nodes of the acceptance of their path.

    Raises UserError if the tree has more siblings than acceptance was measured for.
    """
    table = acceptance_table(acceptance)
    if topology.branching > table.shape[1]:
        raise UserError(
            f"the tree has {topology.branching} siblings and acceptance {table.shape[1]} entries; "
            f"measure acceptance for {topology.branching} siblings"
        )
    reach: list[float] = []
    for parent, depth, rank in zip(topology.parents, topology.depths, topology.ranks, strict=True):
        above = 1.0 if parent < 0 else reach[parent]
        reach.append(above * float(table[min(depth, len(table)) - 1, rank]))
    return 1 + math.fsum(reach)


class _Forest(NamedTuple):
    """The best forests of m nodes below one node, for every m in 0..N, with limited levels."""

    value: np.ndarray  # f64[N+1] expected accepted nodes; -inf where m nodes do not fit
    width: np.ndarray  # i64[N+1] children in the best forest
    # i64[branching+1,N+1] nodes in the last child's subtree, by the number of children
    last: np.ndarray


Forests = Callable[[int, int], _Forest]  # of (row of the acceptance table, levels left)

LARGEST = 4096  # nodes; a search holds a few N x N arrays


def _forests(table: np.ndarray, nodes: int, depth: int, branching: int) -> Forests:
    """Sequoia's dynamic program; all depths below the last row of the table share forests."""
    if nodes > LARGEST:
        raise UserError(
            f"a tree of {nodes} nodes is too large to search for; ask for at most {LARGEST}"
        )
    empty = np.full(nodes + 1, -np.inf)
    empty[0] = 0

    @functools.cache
    def forest(row: int, levels: int) -> _Forest:
        values, last = [empty], [np.zeros(nodes + 1, np.int64)]
        if levels:
            below = forest(min(row + 1, len(table) - 1), levels - 1).value
            fits = np.isfinite(below[:-1])
            # The gain of one more child with a subtree of j nodes, j >= 1.
            gain = np.full(nodes + 1, -np.inf)
            for chance in table[row, :branching]:
                gain[1:][fits] = chance * (1 + below[:-1][fits])
                # total[m, j]: the earlier children share m - j nodes (a sliding window, read
                # backwards), the new one has j.
                padded = np.concatenate([np.full(nodes, -np.inf), values[-1]])
                total = np.lib.stride_tricks.sliding_window_view(padded, nodes + 1)[:, ::-1] + gain
                best = total.argmax(1)
                last.append(best)
                values.append(np.take_along_axis(total, best[:, None], 1)[:, 0])
        stacked = np.stack(values)
        width = stacked.argmax(0)
        return _Forest(np.take_along_axis(stacked, width[None], 0)[0], width, np.stack(last))

    # Fill the cache from the leaves up, so that a deep tree does not exceed the recursion limit.
    for left in range(depth - len(table) + 2):
        forest(len(table) - 1, left)
    return forest


def _reconstruct(forests: Forests, table: np.ndarray, nodes: int, depth: int) -> Topology:
    """The tree with the value ``forests(0, depth).value[nodes]``, breadth first."""
    parents: list[int] = []
    # (parent of the subtree, nodes below its root); the order of the queue is the numbering.
    queue = [(-1, nodes)]
    depths = [0]
    for place, (parent, size) in enumerate(queue):
        level = depths[place]
        best = forests(min(level, len(table) - 1), depth - level)
        sizes: list[int] = []
        for child in range(int(best.width[size]), 0, -1):
            sizes.append(int(best.last[child, size]))
            size -= sizes[-1]
        for below in reversed(sizes):
            queue.append((len(parents), below - 1))
            depths.append(level + 1)
            parents.append(parent)
    return Topology(tuple(parents))


def _no_tree(nodes: int, depth: int, width: int, hint: str) -> UserError:
    return UserError(f"no tree of {nodes} nodes has depth {depth} and branching {width}; {hint}")


def optimal(
    acceptance: npt.ArrayLike, nodes: int, depth: int, branching: int | None = None
) -> tuple[Topology, float]:
    """The tree of ``nodes`` draft nodes that emits most tokens per round, and how many.

    It has at most ``depth`` draft levels and at most ``branching`` siblings (default: the entries
    of acceptance). The pending token counts neither as a node nor as a level. The paper's G(n, D)
    counts it in both: G(n, D) is ``optimal(P, n - 1, D - 1)``, and G(6, 4) = 2.496 with P = (.6,
    .2, .1). Siblings take ranks 0, 1, 2, ... even where a later rank is more probable. Trees of
    equal value are compared node by node from the root: fewer children first, then the smaller
    subtree under the last child.

    Time N^2 * depth * branching, and once for each row of an acceptance table. Raises UserError if
    no tree has so many nodes. Sequoia (2402.12374), tree construction.
    """
    table, branching = _arguments(acceptance, nodes, depth, branching)
    levels = min(depth, nodes)
    forests = _forests(table, nodes, levels, branching)
    value = float(forests(0, levels).value[nodes])
    if not math.isfinite(value):
        most = sum(branching**level for level in range(1, levels + 1))
        hint = f"ask for at most {most} nodes, or for a larger tree"
        raise _no_tree(nodes, depth, branching, hint)
    return _reconstruct(forests, table, nodes, levels), 1 + value


def greedy(
    acceptance: npt.ArrayLike, nodes: int, depth: int, branching: int | None = None
) -> tuple[Topology, float]:
    """A tree grown by the most probable next node, and the tokens per round that it emits.

    The next node is a first child or a next sibling. Arguments, ties and errors as in ``optimal``.
    Where acceptance decreases with the rank, the result has the value of ``optimal``, because no
    node is more probable than its parent or its earlier sibling; elsewhere it may be lower.
    Cai et al. 2024 (2401.10774), section 2.3.3.
    """
    table, branching = _arguments(acceptance, nodes, depth, branching)

    def entry(path: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        levels = np.minimum(range(len(path)), len(table) - 1)
        return -math.prod(table[levels, path].tolist()), len(path), path

    heap, names = [entry((0,))], []
    while heap and len(names) < nodes:
        _, _, path = heapq.heappop(heap)
        names.append(path)
        if path[-1] + 1 < branching:
            heapq.heappush(heap, entry((*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(heap, entry((*path, 0)))
    if len(names) < nodes:
        hint = f"ask for at most {len(names)} nodes, or for a larger tree"
        raise _no_tree(nodes, depth, branching, hint)
    tree = from_ranks(names)
    return tree, expected_tokens(tree, table)


class Choice(NamedTuple):
    """A tree and its predicted values."""

    topology: Topology
    nodes: int  # draft nodes: one less than the tokens verified
    depth: int  # draft levels that the time includes; the tree may need fewer
    expected: float  # tokens per round
    speedup: float  # over decoding one token per pass; below 1, speculation is slower


def best_size(
    acceptance: npt.ArrayLike,
    verify: Mapping[int, float],
    draft: float,
    depths: Iterable[int],
    branching: int | None = None,
) -> Choice:
    """The optimal tree of the fastest size: maximises tokens / (verify[n] + depth * draft).

    ``verify`` maps a number of verified tokens n (draft nodes + 1) to the measured time of such a
    target pass, and ``draft`` is the time of drafting one level, both as multiples of a one-token
    target pass. Sizes that no tree of a given depth has, and n = 1, are left out. Among equals the
    shallower tree is taken, then the smaller one. Sequoia (2402.12374), hardware-aware optimiser.

    Raises:
        UserError: no size remains, or a time is not positive.
    """
    table, branching = _arguments(acceptance, 1, 1, branching)
    times = {
        whole("a key of verify", n, 1): cost(f"verify[{n}]", time, positive=True)
        for n, time in verify.items()
    }
    levels = sorted({whole("a depth", depth, 1) for depth in depths})
    draft = cost("draft", draft, positive=True)
    sizes = sorted(n - 1 for n in times if n > 1)
    if not sizes or not levels:
        raise UserError(
            "there is no size to choose from; verify needs a key >= 2, and depths an entry"
        )
    forests = _forests(table, sizes[-1], min(levels[-1], sizes[-1]), branching)
    found = []
    for depth in levels:
        value = forests(0, min(depth, sizes[-1])).value
        for nodes in sizes:
            expected = 1 + float(value[nodes])
            if math.isfinite(expected):
                speedup = expected / (times[nodes + 1] + depth * draft)
                found.append((speedup, nodes, depth, expected))
    if not found:
        hint = "measure verify for smaller trees, or allow deeper ones"
        raise _no_tree(sizes[0], levels[-1], branching, hint)
    speedup, nodes, depth, expected = max(found, key=lambda each: each[0])
    tree = _reconstruct(forests, table, nodes, min(depth, sizes[-1]))
    return Choice(tree, nodes, depth, expected, speedup)
