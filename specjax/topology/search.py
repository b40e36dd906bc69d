"""The best static tree for a measured acceptance, on the host: Sequoia, Chen et al. 2024 (2402.12374).

Acceptance is positional: P[b] is the probability that, of the children of an accepted node, the b-th (from 0) is the accepted
one, whatever the node; P sums to at most 1, and the rest is the probability of a rejection. Acceptance may be a vector, or a
table P[depth, b] whose last row serves all deeper levels.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from specjax.checks import whole
from specjax.errors import UserError
from specjax.topology.shapes import Topology, from_ranks

if TYPE_CHECKING:
    from specjax.types import StepInfo


def _table(acceptance: npt.ArrayLike) -> np.ndarray:
    """Acceptance as f64[levels, branching]; UserError if it is no table of probabilities."""
    try:
        table = np.asarray(acceptance, np.float64)
    except (ValueError, TypeError):
        raise UserError(
            "acceptance is no table of numbers; give P[branch] or P[depth, branch]"
        ) from None
    table = table[None] if table.ndim == 1 else table
    if table.ndim != 2 or not table.size:
        raise UserError(
            f"acceptance has shape {np.shape(acceptance)}; give P[branch] or P[depth, branch], not empty"
        )
    if not (np.isfinite(table).all() and (table >= 0).all() and (table.sum(1) <= 1 + 1e-6).all()):
        raise UserError(
            "acceptance is no probability; its entries must be >= 0 and sum to at most 1 at each depth"
        )
    return table


def expected_tokens(topology: Topology, acceptance: npt.ArrayLike) -> float:
    """Tokens per round of a tree, the target's own included: 1 + the sum over nodes of the acceptance of their path.

    UserError if the tree has more siblings than acceptance was measured for.
    """
    table = _table(acceptance)
    if topology.branching > table.shape[1]:
        told = f"the tree has {topology.branching} siblings and acceptance {table.shape[1]} entries"
        raise UserError(f"{told}; measure acceptance for as many")
    reach: list[float] = []
    for parent, depth, rank in zip(topology.parents, topology.depths, topology.ranks, strict=True):
        above = 1.0 if parent < 0 else reach[parent]
        reach.append(above * float(table[min(depth, len(table)) - 1, rank]))
    return 1 + math.fsum(reach)


class _Forest(NamedTuple):
    """The best that m nodes below one node can do, for every m in 0..N, if so many levels are left."""

    value: np.ndarray  # f64[N+1] expected accepted nodes; -inf where m nodes do not fit
    width: np.ndarray  # i64[N+1] children of the best
    youngest: (
        np.ndarray
    )  # i64[branching+1,N+1] nodes of the last child's subtree, by number of children


Forests = Callable[[int, int], _Forest]  # of (row of the acceptance table, levels left)

LARGEST = 4096  # nodes that a search takes on: it holds a few N x N arrays


def _forests(table: np.ndarray, nodes: int, depth: int, branching: int) -> Forests:
    """Sequoia's dynamic program; forests are shared between all depths below the last row of the table."""
    if nodes > LARGEST:
        raise UserError(
            f"a tree of {nodes} nodes is too large to search for; ask for at most {LARGEST}"
        )
    nothing = np.full(nodes + 1, -np.inf)
    nothing[0] = 0

    @functools.cache
    def forest(row: int, levels: int) -> _Forest:
        values, youngest = [nothing], [np.zeros(nodes + 1, np.int64)]
        if levels:
            below = forest(min(row + 1, len(table) - 1), levels - 1).value
            fits = np.isfinite(below[:-1])
            gain = np.full(
                nodes + 1, -np.inf
            )  # of one more child that heads a subtree of j nodes, j >= 1
            for chance in table[row, :branching]:
                gain[1:][fits] = chance * (1 + below[:-1][fits])
                # total[m, j]: elder children share m - j nodes (a sliding window, read backwards), the new one has j.
                padded = np.concatenate([np.full(nodes, -np.inf), values[-1]])
                total = np.lib.stride_tricks.sliding_window_view(padded, nodes + 1)[:, ::-1] + gain
                best = total.argmax(1)
                youngest.append(best)
                values.append(np.take_along_axis(total, best[:, None], 1)[:, 0])
        stacked = np.stack(values)
        width = stacked.argmax(0)
        return _Forest(np.take_along_axis(stacked, width[None], 0)[0], width, np.stack(youngest))

    for left in range(depth - len(table) + 2):
        forest(len(table) - 1, left)  # from below, so that a deep tree is no deep recursion
    return forest


def _reconstruct(forests: Forests, table: np.ndarray, nodes: int, depth: int) -> Topology:
    """The tree behind ``forests(0, depth).value[nodes]``, breadth first."""
    parents: list[int] = []
    queue = [
        (-1, nodes)
    ]  # a node, and how many nodes are below it; the queue's order is the numbering
    depths = [0]
    for place, (parent, size) in enumerate(queue):
        level = depths[place]
        best = forests(min(level, len(table) - 1), depth - level)
        sizes: list[int] = []
        for child in range(int(best.width[size]), 0, -1):
            sizes.append(int(best.youngest[child, size]))
            size -= sizes[-1]
        for below in reversed(sizes):
            queue.append((len(parents), below - 1))
            depths.append(level + 1)
            parents.append(parent)
    return Topology(tuple(parents))


def _branching(table: np.ndarray, branching: int | None) -> int:
    if branching is None:
        return table.shape[1]
    if whole("branching", branching, 1) > table.shape[1]:
        raise UserError(
            f"branching is {branching} and acceptance has {table.shape[1]} entries; at most as many"
        )
    return int(branching)


def optimal(
    acceptance: npt.ArrayLike, nodes: int, depth: int, branching: int | None = None
) -> tuple[Topology, float]:
    """The tree of exactly ``nodes`` draft nodes and at most ``depth`` draft levels that emits most tokens, and how many.

    ``branching`` bounds the siblings (default: as many as acceptance has entries). The pending token counts neither as a
    node nor as a level: the paper's G(n, D) counts it in both, so it is ``optimal(P, n - 1, D - 1)``; with P = (.6, .2,
    .1), G(6, 4) = 2.496. Siblings take ranks 0, 1, 2, ... even where a later one is likelier. Among trees of equal value
    the one with fewer children, then with the smaller last subtree, is taken at each node from the top.

    Time N^2 * depth * branching, and once for each row of an acceptance table. UserError if no tree has so many nodes.
    Sequoia (2402.12374), tree construction.
    """
    table, nodes, depth = _table(acceptance), whole("nodes", nodes, 1), whole("depth", depth, 1)
    branching = _branching(table, branching)
    levels = min(depth, nodes)
    forests = _forests(table, nodes, levels, branching)
    value = float(forests(0, levels).value[nodes])
    if not math.isfinite(value):
        most = sum(branching**level for level in range(1, levels + 1))
        told = f"no tree of {nodes} nodes has depth {depth} and branching {branching}"
        raise UserError(f"{told}; ask for at most {most} nodes, or for a larger tree")
    return _reconstruct(forests, table, nodes, levels), 1 + value


def greedy(
    acceptance: npt.ArrayLike, nodes: int, depth: int, branching: int | None = None
) -> tuple[Topology, float]:
    """The tree that grows by the likeliest next node, a first child or a next sibling, and the tokens that it emits.

    Arguments, ties and errors as in ``optimal``. Where acceptance falls with the rank it is as good as ``optimal``, for a
    node is never likelier than its parent or its elder sibling; where it does not, it may be worse. Cai et al. 2024
    (2401.10774), section 2.3.3.
    """
    table, nodes, depth = _table(acceptance), whole("nodes", nodes, 1), whole("depth", depth, 1)
    branching = _branching(table, branching)

    def entry(path: tuple[int, ...]) -> tuple[float, int, tuple[int, ...]]:
        chances = [
            float(table[min(level, len(table) - 1), rank]) for level, rank in enumerate(path)
        ]
        return -math.prod(chances), len(path), path

    heap, names = [entry((0,))], []
    while heap and len(names) < nodes:
        _, _, path = heapq.heappop(heap)
        names.append(path)
        if path[-1] + 1 < branching:
            heapq.heappush(heap, entry((*path[:-1], path[-1] + 1)))
        if len(path) < depth:
            heapq.heappush(heap, entry((*path, 0)))
    if len(names) < nodes:
        told = f"no tree of {nodes} nodes has depth {depth} and branching {branching}"
        raise UserError(f"{told}; ask for at most {len(names)} nodes, or for a larger tree")
    tree = from_ranks(names)
    return tree, expected_tokens(tree, table)


class Choice(NamedTuple):
    """A tree and what it promises."""

    topology: Topology
    nodes: int  # draft nodes: one less than the tokens verified
    depth: int  # draft levels paid for; the tree may need fewer
    expected: float  # tokens per round
    speedup: float  # over decoding one token at a time; below 1, do not speculate


def best_size(
    acceptance: npt.ArrayLike,
    verify: Mapping[int, float],
    draft: float,
    depths: Iterable[int],
    branching: int | None = None,
) -> Choice:
    """The optimal tree of the size that is fastest on this machine: maximises tokens / (verify[n] + depth * draft).

    ``verify`` maps a number of verified tokens n (draft nodes + 1) to the measured time of such a target pass, and
    ``draft`` is the time of drafting one level, both as multiples of a one-token target pass. Sizes that no tree of a given
    depth has, and n = 1, are left out; among equals the shallower, then the smaller tree is taken. UserError if nothing is
    left, or if a time is not positive. Sequoia (2402.12374), hardware-aware optimiser.
    """
    table = _table(acceptance)
    branching = _branching(table, branching)
    times = {whole("a key of verify", n, 1): float(time) for n, time in verify.items()}
    levels = sorted({whole("a depth", depth, 1) for depth in depths})
    for name, time in [(f"verify[{n}]", time) for n, time in times.items()] + [
        ("draft", float(draft))
    ]:
        if not (math.isfinite(time) and time > 0):
            raise UserError(
                f"{name} is {time:g}; it must be a positive time, as a multiple of a one-token pass"
            )
    sizes = sorted(n - 1 for n in times if n > 1)
    if not sizes or not levels:
        raise UserError(
            "there is no size to choose from; verify needs a key >= 2, and depths an entry"
        )
    forests = _forests(table, sizes[-1], min(levels[-1], sizes[-1]), branching)
    best: tuple[float, int, int, float] | None = None
    for depth in levels:
        value = forests(0, min(depth, sizes[-1])).value
        for nodes in sizes:
            expected = 1 + float(value[nodes])
            speedup = expected / (times[nodes + 1] + depth * draft)
            if math.isfinite(expected) and (best is None or speedup > best[0]):
                best = speedup, nodes, depth, expected
    if best is None:
        told = f"no tree of {sizes[0]} nodes has depth {levels[-1]} and branching {branching}"
        raise UserError(f"{told}; measure verify for smaller trees, or allow deeper ones")
    speedup, nodes, depth, expected = best
    return Choice(
        _reconstruct(forests, table, nodes, min(depth, sizes[-1])), nodes, depth, expected, speedup
    )


def acceptance_vector(ranks: npt.ArrayLike, width: int) -> np.ndarray:
    """P f64[width]: how often each rank was the accepted one, from observations of it (-1: none of the siblings was).

    Unconditional, as ``optimal`` needs it: rejections count in the denominator. Observe sets of ``width`` siblings whose
    parent was accepted. UserError for no observation, or one outside -1..width-1.
    """
    seen, width = np.asarray(ranks), whole("width", width, 1)
    if not seen.size:
        raise UserError("there is no observation of an accepted rank; give at least one")
    if not np.issubdtype(seen.dtype, np.integer) or seen.min() < -1 or seen.max() >= width:
        raise UserError(
            f"accepted ranks must be whole numbers from -1 (none) to {width - 1}, the last of {width}"
        )
    return np.bincount(seen.ravel() + 1, minlength=width + 1)[1:] / seen.size


def accepted_ranks(info: StepInfo) -> np.ndarray:
    """i64[R]: which child of the pending token a round accepted, -1 for none, in the rows that were not finished.

    For ``acceptance_vector``. ``info`` is what ``decode.stream`` gives, of a draft of one level. Of equal siblings the first
    counts: ``recursive`` never accepts another, for a rejected token has no mass left. UserError for more levels.
    """
    if info.draft.longest != 1:
        raise UserError(
            f"the draft has {info.draft.longest} levels; count ranks on trees of one level"
        )
    stood = (np.asarray(info.draft.tokens) == np.asarray(info.tokens)[:, :1]) & np.asarray(
        info.draft.valid
    )
    ranks = np.where(np.asarray(info.accepted) > 0, stood.argmax(1), -1)
    return ranks[np.asarray(info.emitted) > 0]
