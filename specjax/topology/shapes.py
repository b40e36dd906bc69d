"""The shapes of token trees: templates, and their files.

Nodes are numbered as in ``Draft``: the pending token is not a node, a parent comes before its
children, and the parent -1 is the pending token. The constructors number breadth first. A shape is
a tuple, so that it can be a static argument of jit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax import files
from specjax.checks import whole
from specjax.errors import UserError, on_disk
from specjax.files import buckets

# The largest number of nodes: a mistake such as "64x64x64" must not fill the memory.
LARGEST = 1 << 16


class Topology(NamedTuple):
    """A tree of draft nodes. Siblings are ordered by number; the rank is the index among them."""

    parents: tuple[int, ...]  # [N], -1 = child of the pending token; parents[i] < i

    @property
    def nodes(self) -> int:
        """N, without the pending token."""
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """[N] distance from the pending token; its children have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The length of the longest path; 0 if there is no node."""
        return max(self.depths, default=0)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[N+1] children of the pending token (entry 0) and of node i (entry i + 1)."""
        return _grouped((parent + 1 for parent in self.parents), self.nodes + 1)

    @property
    def branching(self) -> int:
        """The largest number of siblings; 0 if there is no node."""
        return max(map(len, self.children))

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """[depth] the nodes of depth 1, of depth 2, ..."""
        return _grouped((depth - 1 for depth in self.depths), self.depth)

    @property
    def ranks(self) -> tuple[int, ...]:
        """[N] index of each node among its siblings, from 0."""
        ranks = {node: rank for nodes in self.children for rank, node in enumerate(nodes)}
        return tuple(ranks[node] for node in range(self.nodes))


def _grouped(places: Iterable[int], count: int) -> tuple[tuple[int, ...], ...]:
    """The nodes at each of ``count`` places; ``places`` has that of each node."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for node, place in enumerate(places):
        groups[place].append(node)
    return tuple(map(tuple, groups))


def check(parents: Iterable[int], vocab_size: int | None = None) -> Topology:
    """The tree of these parents.

    Raises:
        UserError: parents that are empty or not ordered, or more siblings than tokens.
    """
    tree = Topology(
        tuple(whole(f"parents[{node}]", parent, -1) for node, parent in enumerate(parents))
    )
    if not tree.parents:
        raise UserError("the tree is empty; give it at least one node")
    for node, parent in enumerate(tree.parents):
        if parent >= node:
            raise UserError(
                f"parents[{node}] is {parent}; "
                f"a parent comes before its child, so it must be below {node}"
            )
    if vocab_size is not None and tree.branching > vocab_size:
        raise UserError(
            f"the tree has {tree.branching} siblings and the vocabulary {vocab_size} tokens; "
            "take a narrower tree"
        )
    return tree


def chain(gamma: int) -> Topology:
    """``gamma`` nodes, each the only child of the one before."""
    return chains(1, gamma)


def chains(k: int, gamma: int) -> Topology:
    """``k`` chains of ``gamma`` nodes after the pending token: node ``depth * k + chain``."""
    k, gamma = whole("chains", k, 1), whole("gamma", gamma, 1)
    _check_size(k * gamma)
    return Topology(tuple(max(node - k, -1) for node in range(k * gamma)))


def full(branching: Sequence[int]) -> Topology:
    """The tree with ``branching[d]`` children of every node of level d (0: the pending token)."""
    counts = [whole(f"branching[{level}]", count, 1) for level, count in enumerate(branching)]
    if not counts:
        raise UserError(
            "the branching is empty; give the number of children for at least one level"
        )
    parents: list[int] = []
    above = [-1]
    for count in counts:
        start = len(parents)
        # Before the level is made, because it may be extremely large.
        _check_size(start + len(above) * count)
        parents += [parent for parent in above for _ in range(count)]
        above = list(range(start, len(parents)))
    return Topology(tuple(parents))


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise UserError(f"the tree would have {size} nodes or more; at most {LARGEST} are possible")


def from_ranks(choices: Sequence[Sequence[int]]) -> Topology:
    """The tree with nodes named by the ranks along their path, (0,), (0, 0), (1,), in any order.

    Medusa, Cai et al. 2024 (2401.10774), tree attention.

    Raises:
        UserError: a name that occurs twice, or without its parent or its earlier sibling.
    """
    names = [
        tuple(whole(f"a rank of choice {at}", rank, 0) for rank in name)
        for at, name in enumerate(choices)
    ]
    names.sort(key=lambda name: (len(name), name))
    if not names:
        raise UserError("the list of choices is empty; give at least (0,)")
    place: dict[tuple[int, ...], int] = {(): -1}
    for node, name in enumerate(names):
        if name in place:
            what = "occurs twice" if name else "is empty, and the pending token is not a node"
            raise UserError(f"choice {name} {what}; leave it out")
        if name[:-1] not in place:
            raise UserError(
                f"choice {name} is there without its parent {name[:-1]}; "
                "add the parent, or leave the choice out"
            )
        earlier = (*name[:-1], name[-1] - 1)
        if name[-1] and earlier not in place:
            raise UserError(
                f"choice {name} is there without its sibling {earlier}; "
                "ranks below one parent must be 0, 1, 2, ..."
            )
        place[name] = node
    return Topology(tuple(place[name[:-1]] for name in names))


FORMS = (
    '"4x2x1" (children at each level), "chain:5", "chains:4x5" (how many x how long), '
    "or a .json file"
)


def parse(spec: Topology | Sequence[int] | str | os.PathLike[str]) -> Topology:
    """The tree that a user specified: a Topology, branching numbers, or one of ``FORMS``.

    Raises:
        UserError: another form, or a file that cannot be read.
    """
    if isinstance(spec, Topology):
        return check(spec.parents)
    if isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.endswith(".json")):
        return _load(buckets.local(spec))
    if not isinstance(spec, str):
        try:
            return full(list(spec))
        except TypeError:  # not a sequence
            raise UserError(f"the tree is {spec!r}; give {FORMS}") from None
    kind, colon, numbers = spec.rpartition(":")
    parts = numbers.split("x")
    arity = {"": None, "chain": 1, "chains": 2}
    digits = all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts)
    known = kind in arity and bool(colon) == bool(kind) and arity[kind] in (None, len(parts))
    if not digits or not known:
        raise UserError(f"the tree is {spec!r}; give {FORMS}")
    counts = [int(part) for part in parts]
    return {"": full, "chain": lambda c: chain(*c), "chains": lambda c: chains(*c)}[kind](counts)


def _load(path: Path) -> Topology:
    """The tree in a file. Raises UserError that names it."""
    right = 'it must hold {"parents": [-1, ...]}'
    try:
        content = files.parsed(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or not isinstance(content.get("parents"), list):
            raise UserError(f'no list "parents"; {right}')
        return check(content["parents"])
    except OSError as error:
        wrong = f"{error.strerror or error}; give a file that can be read"
    except UserError as error:
        wrong = str(error)
    except ValueError:  # not UTF-8, not JSON, or nested too deeply
        wrong = f"not JSON; {right}"
    raise UserError(f"tree file {path}: {wrong}")


def save(path: str | os.PathLike[str], topology: Topology, **extra: Any) -> None:
    """Writes the JSON that ``parse`` reads, with the ``extra`` keys (for example its source).

    Raises:
        UserError: an extra key ``parents``, or a path that cannot be written.
    """
    if "parents" in extra:
        raise UserError("the key parents holds the tree; give the extra key another name")
    text = json.dumps({"parents": list(topology.parents), **extra}) + "\n"
    with on_disk(f"tree file {path} cannot be written", "give a path that can be written"):
        Path(path).write_text(text, encoding="utf-8")


# Tries of candidate sequences: one tree of several token sequences with common prefixes.


if TYPE_CHECKING:
    from specjax.types import Array


def merge_batched(tokens: Array, valid: Array) -> tuple[Array, Array, Array]:
    """The trie of K sequences per row, on the device.

    For deterministic candidates only: merging siblings that were *sampled* independently changes
    the output law, unless the acceptance rule keeps the multiplicities.

    Args:
        tokens: i32[B,K,L]. Node ``depth * K + k`` is the token of sequence k at that depth.
        valid: bool[B,K,L]. A False ends its sequence.

    Returns:
        tokens: i32[B,K*L].
        parents: i32[B,K*L], topologically ordered. They always point at a kept node.
        kept: bool[B,K*L]. The first sequence with a given prefix keeps its node; later ones do not.
    """
    import jax.numpy as jnp

    batch, k, length = tokens.shape
    alive = jnp.cumprod(valid, axis=-1).astype(bool)
    # same[b,i,j,d]: sequence j has d + 1 tokens, and sequence i the same ones. Where sequence i is
    # shorter, the entry is not used.
    same = (tokens[:, :, None] == tokens[:, None]) & alive[:, None]
    same = jnp.cumprod(same, axis=-1).astype(bool)
    first = jnp.argmax(same, axis=2).astype(jnp.int32)  # [b,i,d] the earliest sequence that agrees
    kept = alive & (first == jnp.arange(k)[:, None])
    parents = first[..., :-1] + k * jnp.arange(length - 1, dtype=jnp.int32)
    roots = jnp.full((batch, k, 1), -1, jnp.int32)
    parents = jnp.concatenate([roots, parents], axis=-1)[..., :length]

    def breadth_first(x: Array) -> Array:
        return x.swapaxes(1, 2).reshape(batch, length * k)

    return breadth_first(tokens), breadth_first(parents), breadth_first(kept)
