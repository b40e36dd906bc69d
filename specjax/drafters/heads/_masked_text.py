"""Masks after the entries of a text: a loss, and which drafts would have been accepted.

An entry of the text is a token (PARD) or a slot with a token and the feature before it (P-EAGLE).
After entry t, masks have the positions t + 1, t + 2, ...; mask d, from 1, sees the text up to t
and the masks before it, and predicts tokens[t + d + ahead]. Depth 0 is the entry's own output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.declare import key
from specjax.drafters.heads import _along_text, _depth_loss
from specjax.drafters.heads._along_text import PLACES, Drafts, Texts
from specjax.drafters.heads._depth_loss import DepthKeys
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Params


class Masks(NamedTuple):
    """R masks of a row, ordered by depth."""

    places: Array  # i32[B,R] the entry that each is after
    depths: np.ndarray  # i32[R] from 1
    columns: np.ndarray  # i32[R] a mask attends to those before it in its own column


class Read(NamedTuple):
    """The drafter's pass over a text of T entries."""

    logits: Array  # f[B,T,V_d]
    layout: Layout
    block: Any  # its keys and values
    teacher: Array  # f[B,T,V] the target's logits


class Reader(NamedTuple):
    """How a drafter reads a text and the masks in it; ``params`` is the pair ``ModelParams``."""

    text: Callable[[ModelParams, Batch], Read]
    # (params, Read, the layout of R masks) -> f[B,R,V_d]
    masked: Callable[[ModelParams, Read, Layout], Array]
    ahead: int  # how many tokens ahead an entry predicts
    ids: np.ndarray | None = None  # i32[V_d] the token of each logit; None: all tokens
    target: LM | None = None  # whose features are read; None: the entries are tokens


class LossKeys(DepthKeys):
    """The keys of the loss.

    Masks of depth d follow a share max(keep^d, floor) of the entries: conditional drop of deeper
    masks (PARD, section 3.2). An entry that is left out at one depth is left out at all deeper
    ones.
    """

    keep: float = key(0.7, "share of the entries with a mask of the next depth", least=0, most=1)
    floor: float = key(0.2, "the least share", least=0, most=1)


@declare.method(LossKeys)
def loss(
    reader: Reader,
    depth: int,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first depth (with ``Batch.depths``: of all), and metrics.

    ``_depth_loss.loss`` over all entries at depth 0 and over a share of them at the others.

    Raises:
        UserError: weights or shares out of range, a text that is too short.
    """
    beyond = "the last token of a draft is beyond the text"
    _along_text.check_length(batch, depth + reader.ahead - 1, beyond)
    pair, batch = ModelParams(target_params, params), _along_text.of_output(reader.target, batch)
    read = reader.text(pair, batch)
    shares = [max(keys.keep**d, keys.floor) for d in range(1, depth)]
    masks = random_masks(key, batch, reader.ahead, shares)
    logits = _masked(reader, pair, read, masks)
    # The masks of each depth from 1.
    here = [np.flatnonzero(masks.depths == d) for d in range(1, depth)]
    every = _drafts(reader, batch, read, [read.logits, *(logits[:, each] for each in here)])
    drafts = every._replace(places=(None, *(masks.places[:, each] for each in here)))
    return _depth_loss.loss(drafts, keys, depth, every.number_of_labels(depth))


def _drafts(reader: Reader, batch: Batch, read: Read, logits: list[Array]) -> Drafts:
    """Drafts with these logits f[B,P,V_d] of each depth."""

    def step(state: Any, depth: int) -> tuple[Array, Any]:
        return logits[depth], state

    return Drafts(batch, read.teacher, step, ids=reader.ids, ahead=reader.ahead)


def random_masks(key: Array, batch: Batch, ahead: int, shares: list[float]) -> Masks:
    """Masks of each depth from 1, after a share of the entries that have a label, at random.

    A share of 1 is all entries. There are as many masks as if all T entries had a label. What is
    left over is after the last entry, where no label is.
    """
    size, depths = batch.tokens.shape[1] - 1, 1 + len(shares)
    order = _along_text.random_places(key, batch, ahead, depths, size)
    number = _along_text.labelled(batch, ahead, depths).sum(1)
    counts = np.minimum.accumulate([max(round(share * size), 1) for share in shares] or [0])
    columns = np.concatenate([np.arange(count) for count in counts])
    depth = np.repeat(np.arange(1, depths), counts[: depths - 1])
    share = np.minimum.accumulate([*shares, 0.0])[depth - 1]
    kept = (share >= 1) | (columns < jnp.maximum(jnp.round(share * number[:, None]), 1))
    return Masks(jnp.where(kept, order[:, columns], size - 1), depth, columns)


def layout_of_masks(text: Layout, masks: Masks) -> Layout:
    """What the masks attend to: T entries of the text, then the R masks; their positions."""
    same = masks.columns == masks.columns[:, None]
    among = jnp.asarray(same & (masks.depths <= masks.depths[:, None]))
    return _along_text.layout_behind(text, masks.places, jnp.asarray(masks.depths), among)


def layout_of_draft(missing: Array, width: int, masks: int) -> Layout:
    """The layout of ``width`` places, of which missing[b] have entries, and masks after these."""
    batch, place = len(missing), jnp.arange(width + masks)
    is_mask = place >= width
    token = ~is_mask & (place < missing[:, None])
    # A mask attends to all entries and to the masks before it.
    of_masks = token[:, None] | (is_mask & (place <= place[:, None]))
    of_tokens = jnp.broadcast_to(~is_mask & (place <= place[:, None]), of_masks.shape)
    depth = jnp.where(is_mask, missing[:, None] + place - width, place)
    visible = jnp.where(is_mask[None, :, None], of_masks, of_tokens)
    return Layout(visible, jnp.broadcast_to(depth, (batch, width + masks)).astype(jnp.int32))


def of_draft(values: Array, missing: Array, width: int) -> Array:
    """[B,1+masks,...]: the values [B,width+masks,...] at the newest entry and at the masks."""
    batch, masks = len(values), values.shape[1] - width
    last = jnp.maximum(missing - 1, 0)[:, None]
    behind = jnp.broadcast_to(width + jnp.arange(masks), (batch, masks))
    return _along_text.at(values, jnp.concatenate([last, behind], 1))


def along(reader: Reader, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along``: at every entry."""
    read, logits = reader.text(params, batch), []
    rows, size = read.logits.shape[:2]
    if depth > 1:
        depths, columns = np.divmod(np.arange((depth - 1) * PLACES), PLACES)

        def piece(places: Array) -> Array:
            tiled = jnp.broadcast_to(jnp.tile(places, depth - 1), (rows, len(depths)))
            found = _masked(reader, params, read, Masks(tiled, depths + 1, columns))
            return found.reshape(rows, depth - 1, PLACES, -1).swapaxes(1, 2)

        logits = list(jnp.moveaxis(_along_text.in_pieces(piece, size), 2, 0))
    yield from _drafts(reader, batch, read, [read.logits, *logits]).along(depth)


def _masked(reader: Reader, params: ModelParams, read: Read, masks: Masks) -> Array:
    """f[B,R,V_d]: the outputs at the masks."""
    rows, count = masks.places.shape
    if not count:
        return jnp.zeros((rows, 0, read.logits.shape[-1]), read.logits.dtype)
    return reader.masked(params, read, layout_of_masks(read.layout, masks))
