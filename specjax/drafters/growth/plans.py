"""The shape of a draft, from the keys that drafters share (``drafters.shared_keys.TreeKeys``)."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

from specjax.control import Controller, parse
from specjax.drafters.growth.siblings import KINDS
from specjax.drafters.shared_keys import TreeKeys
from specjax.errors import TooLong, UserError
from specjax.topology import dynamic, shapes
from specjax.topology import search as tree_search
from specjax.topology.shapes import Topology
from specjax.types import CHAIN, COUPLED, DETERMINISTIC

SEARCHES = {"optimal": tree_search.optimal, "greedy": tree_search.greedy}
# The values of the key "tree" for trees whose shape depends on the context.
DYNAMIC, BEAM, BEST_FIRST, BEST_PARENTS = "dynamic", "beam", "best_first", "best_parents"
POOLED = (DYNAMIC, BEAM, BEST_FIRST, BEST_PARENTS)
# The value for the best tree of a fixed shape, which is also what ``nodes`` alone asks for where
# the default is a fixed shape.
SEARCHED = "search"
# EAGLE-2's values for trees with a small draft model; TOP_K is also the width of a beam search.
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
        kind = KINDS[self.how]
        return CHAIN if self.shape.branching == 1 and kind != COUPLED else kind


class Pooled(NamedTuple):
    """A tree that is chosen from a pool of candidates: the ``nodes`` best, or the best paths."""

    nodes: int
    # For each level: how many of its candidates get children (0: the last level), and the number of
    # children of each node above.
    levels: tuple[tuple[int, int], ...]
    # Best-first: children that cannot be among so many best ones are left out. None: EAGLE-2.
    most: int | None = None
    # Beam search: how many candidates of a level are kept; the draft has the paths to those of the
    # last level. None: all are kept.
    beams: int | None = None
    # Best parents: a candidate's score is that of its parent, so all children of a node are chosen
    # together.
    families: bool = False

    siblings = DETERMINISTIC  # of the drafter

    @property
    def depth(self) -> int:
        """M."""
        return min(len(self.levels), self.nodes)


class Plan(NamedTuple):
    """How a drafter grows its drafts."""

    growth: Fixed | Pooled
    controller: Controller | None


class Method(NamedTuple):
    """What a method determines of its drafts."""

    name: str
    # The shape without keys. If it is one of POOLED, ``nodes``, ``depth`` and ``top_k`` without
    # ``tree`` belong to it.
    tree: Topology | str
    siblings: str  # how siblings are chosen without a key
    vocab_size: int  # of the draft
    heads: int | None = None  # the largest depth; None: any
    independent: bool = False  # as ``Stepper.independent``
    accuracy: Any = None  # f64[K,W] how often the token at depth d was the choice of rank r
    steps: int | None = None  # the depth of a pooled tree without a key; None: ``heads``, or 5


def read(method: Method, keys: TreeKeys) -> Plan:
    """The plan of these keys.

    Raises:
        UserError: a value out of range, a shape that does not fit, a key that has no effect, a
            search without measured accuracies.
    """
    controller, keys = parse(keys.control), _with_chain(method, keys)
    if not keys.tree and method.tree in POOLED:
        keys = dataclasses.replace(keys, tree=method.tree)
    if keys.tree in POOLED:
        return Plan(_pooled(method, keys), controller)
    if keys.tree == SEARCHED:
        if not keys.nodes:
            raise UserError(f"the tree is {SEARCHED!r}, and nodes, its size, is 0; give nodes")
        keys = dataclasses.replace(keys, tree="")
    if isinstance(keys.tree, str) and keys.tree.isidentifier():
        names = ", ".join(f'"{name}"' for name in (*POOLED, SEARCHED))
        raise UserError(f"the tree is {keys.tree!r}; give {names}, {shapes.FORMS}")
    right = f"leave it out, or give tree={DYNAMIC!r}"
    keys.refuse(("depth", "top_k"), "on a tree of a fixed shape", right)
    return Plan(Fixed(_shape_of(method, keys), keys.siblings or method.siblings), controller)


def _with_chain(method: Method, keys: TreeKeys) -> TreeKeys:
    """The keys with the chain that ``gamma`` asks for. Raises UserError."""
    gamma = keys.gamma
    if gamma is None:
        return keys
    if method.heads is not None and gamma > method.heads:
        raise TooLong(
            f"gamma is {gamma}, and {method.name} drafts at most {method.heads} tokens ahead; "
            f"give at most {method.heads}"
        )
    for key in ("tree", "nodes"):
        if getattr(keys, key):
            raise UserError(
                f"{method.name} was given gamma={gamma}, a chain, and {key}="
                f"{getattr(keys, key)!r}; give one of them"
            )
    return dataclasses.replace(keys, tree=shapes.chain(gamma))


def _shape_of(method: Method, keys: TreeKeys) -> Topology:
    name = method.name
    if keys.tree and keys.nodes:
        raise UserError(f"{name} was given a tree and nodes={keys.nodes}; give one of them")
    if keys.search != "optimal" and not keys.nodes:
        raise UserError(
            f"search is {keys.search!r}, and no tree is searched for; give nodes, the size of a "
            "tree, or leave search out"
        )
    if keys.nodes:
        if method.accuracy is None:
            raise UserError(
                f"{name} has no measured accuracies to search a tree of {keys.nodes} nodes with; "
                "give tree, or train the heads with specjax"
            )
        measured, ranks = tree_search.acceptance_table(method.accuracy).shape
        depth, branching = method.heads or measured, min(ranks, method.vocab_size)
        shape, _ = SEARCHES[keys.search](method.accuracy, keys.nodes, depth, branching)
    else:
        shape = shapes.parse(keys.tree or method.tree)
    shape = shapes.check(shape.parents, method.vocab_size)
    _check_depth(method, shape.depth)
    return shape


def _check_depth(method: Method, depth: int) -> None:
    if method.heads is not None and depth > method.heads:
        raise UserError(
            f"the tree is {depth} levels deep and {method.name} drafts at most {method.heads} "
            "tokens ahead; take a flatter one"
        )


def _pooled(method: Method, keys: TreeKeys) -> Pooled:
    """One of the trees ``POOLED``.

    - "dynamic", of EAGLE-2: the ``top_k`` best nodes of each level get as many children.
    - "beam": the paths of a beam search of width ``top_k`` (ReDrafter, 2403.09919, section 3.2).
      Paths share their prefixes, so a draft has at most ``top_k`` nodes in each level. If more than
      ``nodes`` remain, the paths with the lowest scores are left out.
    - "best_first" and "best_parents": see ``topology.dynamic``.
    """
    names = ("search",) if keys.siblings == "top_k" else ("search", "siblings")
    keys.refuse(names, f"on the tree {keys.tree!r}, which has the most probable tokens")
    depth = keys.depth or method.steps or method.heads or DEPTH
    _check_depth(method, depth)
    marginal, vocab_size = keys.tree in (BEST_FIRST, BEST_PARENTS), method.vocab_size
    if marginal and not method.independent:
        raise UserError(
            f"{method.name} reads the tokens of its draft, so a node's probabilities depend on its "
            f"path, and tree={keys.tree!r} needs one list per depth; take {DYNAMIC!r}"
        )
    if keys.top_k > vocab_size:
        raise UserError(
            f"top_k is {keys.top_k} and the vocabulary has {vocab_size} tokens; "
            f"it must be at most {vocab_size}"
        )
    top_k = keys.top_k or (vocab_size if keys.tree == BEST_FIRST else min(TOP_K, vocab_size))
    if keys.nodes and not (keys.depth or marginal):
        depth = min(depth, keys.nodes)
    size, usual = _sizes(keys, depth, top_k)
    nodes = keys.nodes or usual
    if nodes > size:
        raise UserError(
            f"nodes is {nodes}, and depth {depth} with top_k {top_k} gives {size} candidates; "
            f"ask for at most {size} nodes, or raise depth or top_k"
        )
    if marginal:
        top_k, families = min(top_k, nodes), keys.tree == BEST_PARENTS
        of_levels = dynamic.best_parents_levels if families else dynamic.best_first_levels
        most = None if families else nodes
        return Pooled(nodes, of_levels(nodes, depth, top_k), most, families=families)
    if nodes < depth:
        raise UserError(
            f"nodes is {nodes} and depth is {depth}, so no path of {depth} tokens fits; give at "
            f"least {depth} nodes, or a depth of at most {nodes}"
        )
    levels = ((top_k, top_k),) * (depth - 1) + ((0, top_k),)
    return Pooled(nodes, levels, beams=top_k if keys.tree == BEAM else None)


def _sizes(keys: TreeKeys, depth: int, top_k: int) -> tuple[int, int]:
    """The number of candidates, and of nodes where the keys give none."""
    if keys.tree == BEAM:
        return depth * top_k, depth * top_k
    if keys.tree == DYNAMIC:
        size = top_k + (depth - 1) * top_k**2
        return size, min(max(NODES, depth), size)
    # As many as there are; the sum is cut where it exceeds the default.
    sizes = list(itertools.accumulate(top_k**level for level in range(1, depth + 1)))
    size = next((size for size in sizes if size >= (keys.nodes or NODES)), sizes[-1])
    return size, min(NODES, size)
