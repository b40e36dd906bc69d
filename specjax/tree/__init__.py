"""Relations between the nodes of a draft tree, and between the tokens of a block.

A block is a group of tokens after the committed text: the pending token and the draft nodes in a
round of the target. ``parents`` is i32[B,P] with -1 for a token that follows the committed text and
``parents[i] < i``; ``None`` means a chain and needs no computation. What a model computed for the
tokens of a block is a pytree of arrays [B,P,...]; ``join``, ``put`` and ``take`` work on any of
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import checks
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, Array, Draft, Drafter

# None: ``widths`` chooses them, the same for every batch size. Otherwise the numbers of tokens that
# a round may verify, the pending token included; ``widths`` says which of them are used.
Widths = tuple[int, ...] | None


class Layout(struct.PyTreeNode):
    """What the newest T tokens of a block of P attend to inside the block, and their positions."""

    visible: Array  # bool[B,T,P] an own token's column is its place in the block
    depth: Array  # i32[B,P] position of a token, counted from the first uncommitted one
    # Static: the newest tokens continue a chain. A token attends to all positions below its own.
    chain: bool = struct.field(pytree_node=False, default=False)


class Columns(struct.PyTreeNode):
    """What P tokens attend to that continue, side by side, P prefixes of one text of T tokens.

    The block is the T tokens of the text, then P tokens for each further step. Token p of the
    newest step attends to the text as ``visible`` defines it, to token p of each step before, and
    to itself. For training: what a draft computes at places of a text. There is no committed text.
    """

    visible: Array  # bool[B,P,T]
    depth: Array  # i32[B,P] positions of the newest tokens


def layout(parents: Array, new: int | None = None) -> Layout:
    """The layout of a tree whose newest ``new`` tokens are fed (None: all of them).

    ``parents`` i32[B,P]: every token attends to its ancestors, to itself and to the committed text.
    """
    inside = ancestors(parents)
    depth = inside.sum(-1).astype(jnp.int32) - 1
    return Layout(inside if new is None else inside[:, parents.shape[1] - new :], depth)


def chain_layout(batch: int, new: int, fed: int = 0) -> Layout:
    """The layout of ``new`` tokens that continue a chain of ``fed`` tokens."""
    place = jnp.arange(fed + new)
    visible = jnp.broadcast_to(place <= place[fed:, None], (batch, new, fed + new))
    return Layout(visible, jnp.broadcast_to(place, (batch, fed + new)), chain=True)


def segments(numbers: Array) -> Layout:
    """The layout of several documents in sequence: i32[B,T], the number of each token's document.

    A token attends to the tokens of its own document before it. Positions start at each document.
    """
    place = jnp.arange(numbers.shape[1])
    begins = jnp.pad(numbers[:, 1:] != numbers[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    return Layout((place <= place[:, None]) & (place >= start[..., None]), place - start)


def columns(text: Layout, step: int, places: Array | None = None) -> Columns:
    """The layout of step ``step``, from 1, after the prefixes of a text with its own layout.

    ``places`` i32[B,P] are the last tokens of the prefixes; None: one for each token.
    """
    if places is None:
        return Columns(text.visible, text.depth + step)
    visible = jnp.take_along_axis(text.visible, places[..., None], 1)
    return Columns(visible, jnp.take_along_axis(text.depth, places, 1) + step)


def join(*parts: Any) -> Any:
    """The parts of a block as one: pytrees of arrays [B,n,...], joined along axis 1."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)


def put(block: Any, part: Any, at: Array | int) -> Any:
    """A preallocated block with ``part`` at the places from ``at`` on.

    ``at`` is a number that all rows share, or i32[B].
    """
    write = jax.lax.dynamic_update_slice_in_dim

    def one(whole: Array, new: Array) -> Array:
        new = new.astype(whole.dtype)
        if jnp.ndim(at):
            return jax.vmap(functools.partial(write, axis=0))(whole, new, at)
        return write(whole, new, at, axis=1)

    return jax.tree.map(one, block, part)


def of_type(value: Any, kind: type) -> list[Any]:
    """The parts of a pytree that are of this type, in order."""
    leaves = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def take(block: Any, places: Array, kept: Array) -> Any:
    """The tokens at ``places`` i32[B,M] of a block; zeros where ``kept`` bool[B,M] is False."""
    inside = jnp.where(kept, places, 0)
    pick = jax.vmap(lambda row, index: jnp.take(row, index, axis=0, mode="clip"))
    return mask(jax.tree.map(lambda array: pick(array, inside), block), kept)


def accepted(block: Any, count: Array, path: Array | None = None) -> tuple[Any, Array]:
    """The tokens at ``path[:count]`` of a block, [B,M,...], and which of the M exist: bool[B,M].

    ``count`` i32[B]; ``path`` i32[B,M] are places in the block, None = 0, 1, 2, ... Beyond
    ``count`` are zeros: what a model computed for a rejected token may be NaN.
    """
    size = jax.tree.leaves(block)[0].shape[1] if path is None else path.shape[1]
    inside = jnp.arange(size) < count[:, None]
    return mask(block, inside) if path is None else take(block, path, inside), inside


def mask(block: Any, kept: Array) -> Any:
    """The block with zeros where ``kept`` bool[B,P] is False."""
    return jax.tree.map(lambda x: jnp.where(aligned(kept, x), x, jnp.zeros((), x.dtype)), block)


def where_rows(rows: Array, new: Any, old: Any) -> Any:
    """Arrays [B,...]: ``new`` in the rows bool[B], ``old`` in the others."""
    return jax.tree.map(lambda a, b: jnp.where(aligned(rows, a), a, b), new, old)


def aligned(values: Array, array: Array) -> Array:
    """``values`` of the first axes of an array, with an axis of size 1 for each of its others."""
    return values.reshape(*values.shape, *(1,) * (array.ndim - values.ndim))


def shapes(function: Callable[..., Any], *args: Any) -> Any:
    """The shapes and dtypes of what ``function(*args)`` returns, which is not computed."""
    with jax.disable_jit(False):
        return jax.eval_shape(function, *args)


def shown(value: Any) -> dict[str, str]:
    """The dtype and the shape of each leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {jax.tree_util.keystr(path): checks.shown(leaf) for path, leaf in leaves}


def zeros(function: Callable[..., Any], *args: Any) -> Any:
    """Zeros in the shapes of what ``function(*args)`` returns, which is not computed."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes(function, *args))


def sized(block: Any, size: int) -> Any:
    """The first ``size`` tokens of a block, padded with zeros if it has fewer."""

    def one(array: Array) -> Array:
        more = max(size - array.shape[1], 0)
        return jnp.pad(array[:, :size], [(0, 0), (0, more), *[(0, 0)] * (array.ndim - 2)])

    return jax.tree.map(one, block)


def ancestors(parents: Array) -> Array:
    """bool[B,T,T]: whether node j is i or an ancestor of i (by repeated squaring: log2 T steps)."""
    size = parents.shape[-1]
    step = jax.nn.one_hot(parents, size, dtype=jnp.float32)  # -1 gives a zero row
    reach = jnp.minimum(step + jnp.eye(size, dtype=jnp.float32), 1)
    for _ in range(max(size - 1, 1).bit_length()):
        reach = jnp.minimum(reach @ reach, 1)
    return reach > 0.5


def depths(parents: Array | None, batch: int, size: int) -> Array:
    """i32[B,T] distance from the root of the block."""
    return (chain_layout(batch, size) if parents is None else layout(parents)).depth


def exists(valid: Array, parents: Array | None) -> Array:
    """bool[B,N]: nodes that are valid and have only valid ancestors."""
    if parents is None:
        return jnp.cumprod(valid.astype(jnp.int32), axis=-1) > 0
    return ~(ancestors(parents) & ~valid[:, None]).any(-1)


def path_to(node: Array, parents: Array, depth: int) -> Array:
    """i32[B,depth], -1 padded: the nodes from a child of the root down to ``node`` i32[B].

    ``node`` -1 is the root itself: its path is empty.
    """
    inside = ancestors(parents)
    level = inside.sum(-1) - 1  # 0 for a child of the root
    on_path = jnp.take_along_axis(inside, jnp.maximum(node, 0)[:, None, None], 1)[:, 0]
    on_path &= (node >= 0)[:, None]
    here = on_path[:, None] & (level[:, None] == jnp.arange(depth)[:, None])  # bool[B,depth,N]
    return jnp.where(here, jnp.arange(parents.shape[1]), -1).max(-1).astype(jnp.int32)


def of_parents(numbers: Array, parents: Array) -> Array:
    """i32[B,N]: the number of each node's parent, of ``numbers`` i32[B,N]; -1: the root."""
    above = jnp.take_along_axis(numbers, jnp.maximum(parents, 0), 1)
    return jnp.where(parents < 0, -1, above)


def reordered(draft: Draft, order: Array) -> Draft:
    """The draft of a tree with node ``order[:, i]`` at place i; ``order`` i32[B,N]."""
    assert draft.parents is not None
    nodes = draft.tokens, draft.valid, draft.parents
    tokens, valid, above = (jnp.take_along_axis(x, order, 1) for x in nodes)
    place = jnp.argsort(order, 1).astype(jnp.int32)
    probs = jax.tree.map(lambda x: jnp.take_along_axis(x, order[..., None], 1), draft.probs)
    parents = of_parents(place, above)
    return draft.replace(tokens=tokens, valid=valid, parents=parents, probs=probs)


def nodes_at(prefix: Array, count: Array, tokens: Array, exist: Array, parents: Array) -> Array:
    """bool[B,N+1]: the nodes whose path has the tokens ``prefix[:, :count]``; column 0 is the root.

    ``prefix`` i32[B,M], ``count`` i32[B]; ``tokens`` i32[B,N], ``exist`` bool[B,N] and ``parents``
    i32[B,N] are the tree. Independent siblings may have the same token, so there may be several.
    """
    rows, nodes = tokens.shape
    here = jnp.broadcast_to(jnp.arange(nodes + 1) == 0, (rows, nodes + 1))
    for depth in range(prefix.shape[1]):
        inside = exist & jnp.take_along_axis(here, parents + 1, 1)
        below = inside & (tokens == prefix[:, depth, None])
        here = jnp.where((depth < count)[:, None], jnp.pad(below, ((0, 0), (1, 0))), here)
    return here


def first_nodes(draft: Draft, count: int) -> Draft:
    """The draft without the nodes from number ``count`` on; a draft of 0 nodes is a chain."""
    if count == draft.tokens.shape[1]:
        return draft
    depth = None if draft.depth is None else min(draft.depth, count)
    nodes = draft.replace(finite=None, fed=None)
    if count == 0:
        nodes, depth = nodes.replace(parents=None), None
    nodes = jax.tree.map(lambda x: x[:, :count], nodes)
    return nodes.replace(finite=draft.finite, fed=draft.fed, depth=depth)


def block_layout(draft: Draft) -> Layout | None:
    """The layout of the block that the target scores: place 0 is the pending token."""
    if draft.parents is None:
        return None
    return layout(jnp.pad(draft.parents + 1, ((0, 0), (1, 0)), constant_values=-1))


def fed_nodes(draft: Draft, done: Array) -> Array:
    """i32[B]: how many of the first nodes the target must be fed."""
    fed = jnp.where(draft.valid, jnp.arange(1, draft.valid.shape[1] + 1), 0).max(-1, initial=0)
    if draft.fed is not None:
        fed = jnp.maximum(fed, draft.fed)
    return jnp.where(done, 0, fed)


def block_visible(draft: Draft) -> Array:
    """bool[B,N+1,N+1]: what each token of that block attends to inside it, for chains too."""
    batch, nodes = draft.tokens.shape
    return (block_layout(draft) or chain_layout(batch, nodes + 1)).visible


def proposed(drafter: Drafter, proposal: Any, batch: int, vocab: int) -> tuple[Draft, Any]:
    """The draft and the state that ``propose`` returned for so many rows.

    Raises UserError unless it is such a pair, and the draft has the arrays and the form that the
    drafter declares.
    """
    parts = proposal if isinstance(proposal, tuple | list) else ()
    if len(parts) != 2 or not isinstance(parts[0], Draft):
        kinds = [type(part).__name__ for part in parts]
        shown = f"({', '.join(kinds)})" if parts else type(proposal).__name__
        raise UserError(f"propose of {drafter.name} returned {shown}; it must be (Draft, state)")
    draft, state = parts
    _check_arrays(drafter, draft, batch, vocab)
    _check_form(drafter, draft)
    return draft, state


# Fields of a draft -> the kind of their dtype and its name.
_KINDS = {
    **dict.fromkeys(("tokens", "parents", "fed"), (jnp.integer, "an integer")),
    **dict.fromkeys(("valid", "finite"), (jnp.bool_, "bool")),
    "probs": (jnp.floating, "a float"),
}


def _check_arrays(drafter: Drafter, draft: Draft, batch: int, vocab: int) -> None:
    """Raises UserError for a field that is no array, or of another shape or kind of dtype."""
    returned, nodes = f"propose of {drafter.name} returned", (batch, drafter.nodes)
    shapes = {"probs": (*nodes, vocab), "finite": (batch,), "fed": (batch,)}
    for name in [n for n in _KINDS if n in ("tokens", "valid") or getattr(draft, n) is not None]:
        array, shape, (kind, right) = getattr(draft, name), shapes.get(name, nodes), _KINDS[name]
        if not hasattr(array, "dtype"):
            raise UserError(
                f"{returned} {name} of type {type(array).__name__}; it must be an array {shape}"
            )
        if array.shape != shape:
            raise UserError(
                f"{returned} {name} of shape {array.shape}; "
                f"with {drafter.nodes} nodes it must be {shape}"
            )
        if not jnp.issubdtype(array.dtype, kind):
            raise UserError(f"{returned} {name} of dtype {array.dtype}; it must be {right}")


def _check_form(drafter: Drafter, draft: Draft) -> None:
    """Raises UserError for another depth, and parents or probs that its siblings do not have."""
    if draft.longest != drafter.longest:
        raise UserError(
            f"propose of {drafter.name} returned a draft of depth {draft.longest}; "
            f"it declares depth {drafter.longest}"
        )
    if (draft.parents is None) != (drafter.siblings == CHAIN):
        gave = "no parents" if draft.parents is None else "parents"
        raise UserError(
            f"drafter {drafter.name} declares siblings {drafter.siblings!r} and gave {gave}; "
            f"a draft has no parents exactly if its siblings are {CHAIN!r}"
        )
    if drafter.siblings == DETERMINISTIC and draft.probs is not None:
        raise UserError(
            f"drafter {drafter.name} declares siblings {DETERMINISTIC!r} and gave probs; "
            "probs must be None"
        )


def lengths_between(nodes: int) -> tuple[int, int]:
    """Two numbers of nodes between none and all: drafts that are often not whole verify them."""
    shares = (1 / nodes, 0.4) if 0 < nodes <= 16 else (1 / 16, 1 / 4)
    return round(shares[0] * nodes), round(shares[1] * nodes)


def widths(drafter: Drafter, chosen: Widths = None) -> tuple[int, ...]:
    """The numbers of tokens that a round may verify, ascending; the last one covers every draft.

    One width, nodes + 1, if every draft is whole and no nodes are merged. For chains whose usual
    lengths are known (``Rare.lengths``), and trees whose usual sizes are (``Rare.sizes``), 1 and
    one more than each of them. Otherwise 1 (nothing was proposed), nodes + 1 and two sizes between
    them. With several rows the longest draft decides. With merged nodes the sizes between are the
    number of nodes if all models agree, and the middle between that and all nodes. Of the widths in
    ``chosen`` those below nodes + 1 are used, so that one choice serves several drafters.

    Raises:
        UserError: widths that are not whole numbers of at least 1.
    """
    most = drafter.nodes + 1
    if drafter.whole and not drafter.adaptive and drafter.rare.merges <= 1:
        return (most,)
    if chosen is not None:
        if not all(isinstance(width, int) and width >= 1 for width in chosen):
            raise UserError(
                f"the widths to verify are {list(chosen)}; they must be whole numbers >= 1"
            )
        return tuple(sorted({most, *(width for width in chosen if width < most)}))
    is_chain = drafter.siblings == CHAIN and drafter.longest == drafter.nodes
    sizes = (drafter.rare.lengths if is_chain else ()) or drafter.rare.sizes
    if not sizes and drafter.rare.merges > 1:
        agreed = drafter.nodes / drafter.rare.merges
        sizes = round(agreed), round((agreed + drafter.nodes) / 2), drafter.nodes
    elif not sizes:
        sizes = *lengths_between(drafter.nodes), drafter.nodes
    return tuple(sorted({1, *(min(1 + size, most) for size in sizes)}))
