"""The shape of a draft, from the keys that all drafters share (``drafters._keys.TreeKeys``)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from specjax.checks import counts, one_of, whole
from specjax.control import Controller, parse
from specjax.drafters._growth.siblings import KINDS
from specjax.drafters._keys import TreeKeys
from specjax.errors import UserError
from specjax.topology import dynamic, shapes
from specjax.topology import search as tree_search
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, DETERMINISTIC

SEARCHES = {"optimal": tree_search.optimal, "greedy": tree_search.greedy}
# The values of the key "tree" for trees whose shape depends on the context.
DYNAMIC, BEST_FIRST = "dynamic", "best_first"
# EAGLE-2's values for trees with a small draft model.
NODES, DEPTH, TOP_K = 32, 5, 6


class Fixed(NamedTuple):
    """A shape that is the same for every context."""

    shape: Topology
    how: str  # one of KINDS: how siblings are chosen

    @property
    def nodes(self) -> int:
        """N."""
        return self.shape.nodes

    @property
    def depth(self) -> int:
        """M."""
        return self.shape.depth

    @property
    def siblings(self) -> str:
        """``Drafter.siblings``."""
        return CHAIN if self.shape.branching == 1 else KINDS[self.how]


class Pooled(NamedTuple):
    """The ``nodes`` best of a pool of candidates."""

    nodes: int
    # For each level: how many of its candidates get children (0: the last level), and the number of
    # children of each node above.
    levels: tuple[tuple[int, int], ...]
    # Best-first: children that cannot be among so many best ones are left out. None: EAGLE-2.
    most: int | None = None

    @property
    def depth(self) -> int:
        """M."""
        return min(len(self.levels), self.nodes)

    @property
    def siblings(self) -> str:
        """``Drafter.siblings``."""
        return DETERMINISTIC


class Plan(NamedTuple):
    """How a drafter grows its drafts."""

    growth: Fixed | Pooled
    controller: Controller | None


class Method(NamedTuple):
    """What a method determines of its drafts."""

    name: str
    tree: Topology | str  # the shape without keys
    siblings: str  # how siblings are chosen without a key
    vocab_size: int
    heads: int | None = None  # the largest depth; None: any
    independent: bool = False  # as ``Stepper.independent``
    accuracy: Any = None  # f64[K,W] how often the token at depth d was the choice of rank r


def read(method: Method, keys: TreeKeys) -> Plan:
    """The plan of these keys.

    Raises:
        UserError: a value out of range, a shape that does not fit, a key that has no effect, a
            search without measured accuracies.
    """
    one_of("search", keys.search, tuple(SEARCHES))
    for key in ("nodes", "depth", "top_k"):
        whole(key, getattr(keys, key), 0)
    controller = parse(keys.control)
    if keys.tree in (DYNAMIC, BEST_FIRST):
        return Plan(_pooled(method, keys), controller)
    if isinstance(keys.tree, str) and keys.tree.isidentifier():
        raise UserError(
            f'the tree is {keys.tree!r}; give "{DYNAMIC}", "{BEST_FIRST}", {shapes.FORMS}'
        )
    for key in ("depth", "top_k"):
        if getattr(keys, key):
            raise UserError(
                f"{key} is {getattr(keys, key)} and has no effect on a tree of a fixed shape; "
                f"leave it out, or give tree={DYNAMIC!r}"
            )
    how = keys.siblings or method.siblings
    one_of("siblings", how, tuple(KINDS))
    return Plan(Fixed(_shape(method, keys), how), controller)


def _shape(method: Method, keys: TreeKeys) -> Topology:
    name = method.name
    if keys.tree and keys.nodes:
        raise UserError(f"{name} was given a tree and nodes={keys.nodes}; give one of them")
    if keys.search != "optimal" and not keys.nodes:
        raise UserError(
            f"search is {keys.search!r}, and no tree is searched for; give nodes, the size of a "
            "tree, or leave search out"
        )
    if keys.nodes:
        if method.accuracy is None or method.heads is None:
            raise UserError(
                f"{name} has no measured accuracies to search a tree of {keys.nodes} nodes with; "
                "give tree, or train the heads with specjax"
            )
        branching = tree_search.acceptance_table(method.accuracy).shape[1]
        branching = min(branching, method.vocab_size)
        shape, _ = SEARCHES[keys.search](method.accuracy, keys.nodes, method.heads, branching)
    else:
        shape = shapes.parse(keys.tree or method.tree)
    shape = shapes.check(shape.parents, method.vocab_size)
    _check_depth(method, shape.depth)
    return shape


def _check_depth(method: Method, depth: int) -> None:
    if method.heads is not None and depth > method.heads:
        raise UserError(
            f"the tree is {depth} levels deep and {method.name} has {method.heads} heads; "
            "take a flatter one"
        )


def _pooled(method: Method, keys: TreeKeys) -> Pooled:
    for key, usual in (("siblings", "top_k"), ("search", "optimal")):
        if getattr(keys, key) not in ("", usual):
            raise UserError(
                f"{key} is {getattr(keys, key)!r} and has no effect on the tree {keys.tree!r}, "
                "which has the most probable tokens; leave it out"
            )
    depth = keys.depth or method.heads or DEPTH
    _check_depth(method, depth)
    if keys.tree == BEST_FIRST:
        return _best_first(method, keys, depth)
    return eagle2(method.vocab_size, keys.nodes, depth, keys.top_k)


def eagle2(vocab_size: int, nodes: int, depth: int, top_k: int) -> Pooled:
    """The dynamic tree of EAGLE-2; 0 nodes or top_k: the default, or fewer if these do not fit."""
    top_k = top_k or min(TOP_K, vocab_size)
    counts(depth=depth, top_k=top_k)
    size = top_k + (depth - 1) * top_k**2
    nodes = nodes or min(NODES, size)
    counts(nodes=nodes)
    _check_children(vocab_size, top_k)
    _check_nodes(nodes, depth, top_k, size)
    return Pooled(nodes, ((top_k, top_k),) * (depth - 1) + ((0, top_k),))


def _best_first(method: Method, keys: TreeKeys, depth: int) -> Pooled:
    if not method.independent:
        raise UserError(
            f"{method.name} reads the tokens of its draft, so a node's probabilities depend on its "
            f"path, and tree={BEST_FIRST!r} needs one list per depth; take {DYNAMIC!r}"
        )
    _check_children(method.vocab_size, keys.top_k)
    top_k = keys.top_k or method.vocab_size
    # As many as there are; the sum is cut where it exceeds the default.
    total = itertools.accumulate(top_k**level for level in range(1, depth + 1))
    possible = next((size for size in total if size >= (keys.nodes or NODES)), None)
    if possible is None:
        possible = sum(top_k**level for level in range(1, depth + 1))
    nodes = keys.nodes or min(NODES, possible)
    _check_nodes(nodes, depth, top_k, possible)
    top_k = min(top_k, nodes)
    levels, width = [], 1
    for level in range(depth):
        size = len(dynamic.candidates(width, top_k, nodes))
        width = min(nodes, size)
        levels.append((width if level + 1 < depth else 0, top_k))
    return Pooled(nodes, tuple(levels), nodes)


def _check_children(vocab_size: int, top_k: int) -> None:
    if top_k > vocab_size:
        raise UserError(
            f"top_k is {top_k} and the vocabulary has {vocab_size} tokens; "
            f"it must be at most {vocab_size}"
        )


def _check_nodes(nodes: int, depth: int, top_k: int, size: int) -> None:
    if nodes > size:
        raise UserError(
            f"nodes is {nodes}, and depth {depth} with top_k {top_k} gives {size} candidates; "
            f"ask for at most {size} nodes, or raise depth or top_k"
        )
