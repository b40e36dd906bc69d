"""Models of other libraries as an ``LM``: their parameters or their forward pass.

``mapped`` computes with a decoder of this package whose parameters stay in the tree of another
library. ``from_call`` decodes with the forward pass of another library itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.types import LM, Array, Output, Params


def mapped(lm: LM, rename: Callable[[Params], Params]) -> LM:
    """``lm`` with parameters of another form, of which ``rename`` makes its own.

    Args:
        lm: a model, such as ``models.lm.from_config`` makes.
        rename: a function of arrays that can be traced, applied inside of every function of the
            model: reshaping and transposing cost nothing, or one copy, in the compiled program.
            Nothing is kept between calls, so new parameters of equal shapes compile nothing.

    Equal arguments give equal functions.
    """

    def whole(function: Callable | None) -> Any:
        return function and Bound(_renamed, function, rename)

    def pair(function: Callable | None) -> Any:
        return function and Bound(_renamed, function, Bound(_first_of, rename))

    lm = lm.changed(whole, pair)
    inside, encoder = lm.inside, lm.encoder
    part = inside.part
    return lm._replace(
        embed=whole(lm.embed),
        unembed=whole(lm.unembed),
        inside=inside._replace(
            part=part and functools.cache(lambda some: mapped(part(some), rename)),
            queries=whole(inside.queries),
            last_norm=whole(inside.last_norm),
            some_logits=whole(inside.some_logits),
        ),
        encoder=encoder and encoder._replace(read=whole(encoder.read)),
    )


def _renamed(function: Callable, rename: Callable, params: Params, *args: Any, **more: Any) -> Any:
    return function(rename(params), *args, **more)


def _first_of(rename: Callable, pair: tuple) -> tuple:
    return (rename(pair[0]), *pair[1:])


class Buffers(struct.PyTreeNode):
    """The cache of a foreign model, without room for a block."""

    leaves: tuple[Array, ...]  # [B,S,...] each: those with slots, in the order of the tree
    length: Array  # i32[B]


class Block(struct.PyTreeNode):
    """What a foreign model wrote for P tokens."""

    leaves: tuple[Array, ...]  # [B,P,...] each
    output: Array  # [B,P] as in ``cache.KVBlock``


NONE = -1


class _Axes(NamedTuple):
    """Where a leaf of a foreign cache has its rows and its slots."""

    rows: int  # NONE: of an index that all rows share
    slots: int  # NONE: the leaf is an index


class _Foreign(NamedTuple):
    """What is static in the functions of ``from_call``."""

    call: Callable
    init_cache: Callable
    width: int
    chains_only: bool
    window: int | None
    treedef: Any
    axes: tuple[_Axes, ...]  # of the leaves of ``treedef``

    def with_slots(self, leaves: list[Array]) -> list[tuple[Array, _Axes]]:
        """Those leaves of a cache that have slots, with their axes."""
        return [each for each in zip(leaves, self.axes, strict=True) if each[1].slots != NONE]


def from_call(
    call: Callable[..., tuple],
    init_cache: Callable[[int, int], Any],
    *,
    vocab_size: int,
    chains_only: bool = False,
    window: int | None = None,
    width: int | None = None,
    max_positions: int | None = None,
    name: str = "lm",
) -> LM:
    """An ``LM`` that decodes with the forward pass of another library.

    A block is written behind the slots of all committed tokens, so that rows of different lengths
    share one index and a tree is a mask. Each pass copies every buffer of the cache once (with
    ``chains_only`` perhaps twice), and it computes the logits of all tokens of a prompt.

    Args:
        call: (params, tokens i32[B,T], positions i32[B,T], cache, mask bool[B,T,S]) -> (logits
            [B,T,V], cache), or (logits, cache, hidden [B,T,E]). It writes what it computes for the
            tokens into T slots of its cache from the index on, attends to the slots of the mask,
            and rotates by ``positions``. Sliding windows must count positions, not slots.
        init_cache: (batch, slots) -> an empty cache of ``call``: a pytree whose arrays have an axis
            of ``batch`` and one of ``slots``. Integers without slots are the index of the first
            slot that is written.
        vocab_size: V.
        chains_only: ``call`` takes no mask, and attends to all slots up to the token's own. The
            index is then the length of each row; without an axis of rows there is one row only.
            Trees are refused; a draft model may draft chains.
        window: the sliding window of all layers, for the mask; of a model with other layers too,
            None, and ``call`` must apply it.
        width: E, if ``call`` returns the hidden state that its LM head multiplies.
        max_positions: the longest text; None: unbounded.
        name: for messages.

    Float32 and float64 logits keep their dtype, others become float32. Heads need ``embed`` and
    ``unembed``, which such a model does not have; ``LM._replace`` adds them.

    Raises UserError for a cache of another form.
    """
    foreign = _Foreign(call, init_cache, width or 0, chains_only, window, *_axes(init_cache))
    return LM(
        Bound(_init, foreign),
        Bound(_apply, foreign),
        Bound(_commit, foreign),
        vocab_size,
        max_positions=max_positions,
        name=name,
        width=width,
        window=window,
        chains_only=chains_only,
    )


def _axes(init_cache: Callable[[int, int], Any]) -> tuple[Any, tuple[_Axes, ...]]:
    """The tree of a foreign cache, and the axes of its leaves. Raises UserError."""
    trees = [jax.eval_shape(Bound(init_cache, *each)) for each in ((2, 5), (2, 7), (3, 5))]
    (treedef, *others) = map(jax.tree.structure, trees)
    if any(other != treedef for other in others):
        raise UserError("init_cache gives other trees for other sizes; give one form of cache")
    result = []
    leaves = zip(jax.tree.leaves_with_path(trees[0]), *map(jax.tree.leaves, trees), strict=True)
    for (path, leaf), *same in leaves:
        shape, longer, wider = (each.shape for each in same)
        slots = [i for i, pair in enumerate(zip(shape, longer, strict=False)) if pair == (5, 7)]
        rows = [i for i, pair in enumerate(zip(shape, wider, strict=False)) if pair == (2, 3)]
        index = shape == longer and jnp.issubdtype(leaf.dtype, jnp.integer)
        if not (index and len(rows) <= 1) and not len(slots) == len(rows) == 1:
            where = jax.tree_util.keystr(path) or "its root"
            raise UserError(
                f"init_cache(2, 5) gives {leaf.dtype}{list(shape)} at {where}; an array of a cache "
                "has an axis of 2 rows and one of 5 slots, or is an integer index"
            )
        result.append(_Axes(rows[0] if rows else NONE, NONE if index else slots[0]))
    if not any(axes.slots != NONE for axes in result):
        raise UserError("init_cache gives no array with slots; give the cache of the model")
    return treedef, tuple(result)


def _empty(foreign: _Foreign, batch: int, slots: int) -> list[Array]:
    """The leaves of an empty cache with so many slots, at least one."""
    return jax.tree.leaves(foreign.init_cache(batch, max(slots, 1)))


def _init(foreign: _Foreign, batch: int, slots: int) -> Buffers:
    leaves = foreign.with_slots(_empty(foreign, batch, slots))
    buffers = tuple(jnp.moveaxis(leaf, axes, (0, 1))[:, :slots] for leaf, axes in leaves)
    return Buffers(buffers, jnp.zeros((batch,), jnp.int32))


def _apply(
    foreign: _Foreign,
    params: Params,
    tokens: Array,
    cache: Buffers,
    layout: tree.Layout | None = None,
    block: Block | None = None,
) -> tuple[Output, Block]:
    batch, new = tokens.shape
    fed = 0 if block is None else block.output.shape[1]
    if foreign.chains_only and layout is not None and not layout.chain:
        raise UserError(
            "a model that takes no mask (chains_only) cannot verify or grow a tree; take a drafter "
            "of chains"
        )
    layout = tree.chain_layout(batch, new, fed) if layout is None else layout
    slots = cache.leaves[0].shape[1]
    # The slots, of each row or of all, where the block and its newest tokens begin.
    begin, place = slots, slots + fed
    if foreign.chains_only:
        # A chain may have room for tokens that were not fed yet: the depth of a token counts.
        begin = cache.length.astype(jnp.result_type(int))
        place = begin + layout.depth[:, fed]
    room = _empty(foreign, batch, fed + new)
    leaves = iter(_with_block(foreign, cache, room, block, begin))
    given = zip(room, foreign.axes, strict=True)
    whole = [_index(*each, place) if each[1].slots == NONE else next(leaves) for each in given]
    depth = cache.length[:, None] + layout.depth
    mask = _mask(foreign, cache.length, slots, depth, layout.visible)
    whole = jax.tree.unflatten(foreign.treedef, whole)
    logits, after, *hidden = foreign.call(params, tokens, depth[:, fed:], whole, mask)
    held = foreign.with_slots(jax.tree.leaves(after))
    written = tuple(_slots(leaf, axes, place, new) for leaf, axes in held)
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    states = hidden[0] if hidden else jnp.zeros((batch, new, 0), logits.dtype)
    _check_width(foreign.width, states.shape[-1])
    return Output(logits, states), Block(written, logits[..., 0].astype(jnp.float32))


def _check_width(width: int, returned: int) -> None:
    """Raises UserError where ``call`` does not return hidden states of this width; 0: none."""
    if width and width != returned:
        states = "no hidden states; return them, or leave width out"
        states = f"hidden states of {returned}; give width={returned}" if returned else states
        raise UserError(f"width is {width}, and call returns {states}")


def _with_block(
    foreign: _Foreign, cache: Buffers, room: list[Array], block: Block | None, begin: Array | int
) -> list[Array]:
    """The foreign buffers: the slots of a cache and of ``room``, with ``block`` from a slot on."""
    result, free = [], foreign.with_slots(room)
    for i, (held, (leaf, axes)) in enumerate(zip(cache.leaves, free, strict=True)):
        buffer = jnp.concatenate([held, jnp.moveaxis(leaf, axes, (0, 1))], 1)
        buffer = buffer if block is None else tree.put(buffer, block.leaves[i], begin)
        result.append(jnp.moveaxis(buffer, (0, 1), axes))
    return result


def _mask(foreign: _Foreign, length: Array, slots: int, depth: Array, visible: Array) -> Array:
    """bool[B,T,S+P]: the committed text, then the block, for the newest T tokens.

    ``depth`` i32[B,P]: the positions of the tokens of the block.
    """
    batch, new, size = visible.shape
    own = depth[:, size - new :, None]
    place = jnp.arange(slots + size)
    if foreign.chains_only:
        where = jnp.broadcast_to(place, (batch, slots + size))
        seen = where[:, None] <= own
    else:
        where = jnp.concatenate([jnp.broadcast_to(place[:slots], (batch, slots)), depth], 1)
        text = jnp.broadcast_to((place[:slots] < length[:, None])[:, None], (batch, new, slots))
        seen = jnp.concatenate([text, visible], 2)
    return seen if foreign.window is None else seen & (own - where[:, None] < foreign.window)


def _index(leaf: Array, axes: _Axes, start: Array | int) -> Array:
    """An index of a foreign cache: the slot that it writes next. Raises UserError."""
    if isinstance(start, int):
        return jnp.full_like(leaf, start)
    if axes.rows == NONE and start.shape[0] > 1:
        raise UserError(
            f"the cache of the target has one index for all rows, and the batch {start.shape[0]} "
            "rows; take rows one by one, or a model that takes a mask"
        )
    shape = [1] * leaf.ndim
    if axes.rows != NONE:
        shape[axes.rows] = start.shape[0]
    return jnp.broadcast_to(start.reshape(shape).astype(leaf.dtype), leaf.shape)


def _slots(buffer: Array, axes: _Axes, start: Array | int, count: int) -> Array:
    """[B,M,...]: ``count`` slots from ``start`` on."""
    rows, inner = axes.rows, axes.slots - (axes.rows < axes.slots)
    if isinstance(start, int):
        some = jax.lax.slice_in_dim(buffer, start, start + count, axis=axes.slots)
        return jnp.moveaxis(some, axes, (0, 1))

    def row(held: Array, at: Array) -> Array:
        return jnp.moveaxis(jax.lax.dynamic_slice_in_dim(held, at, count, inner), inner, 0)

    return jax.vmap(row, (rows, 0))(buffer, start)


def _commit(
    foreign: _Foreign, cache: Buffers, block: Block, count: Array, path: Array | None = None
) -> Buffers:
    kept, _ = tree.accepted(block, count, path)
    # With 64-bit types enabled, all indices of an update must have one type.
    start = kv.write_after(cache.length, kept.output).astype(jnp.result_type(int))
    return Buffers(tree.put(cache.leaves, kept.leaves, start), cache.length + count)
