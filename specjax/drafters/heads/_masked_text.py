"""Masks after the entries of a text: a loss, and which drafts would have been accepted.

An entry of the text is a token (PARD) or a slot with a token and the feature before it (P-EAGLE).
After entry t, masks have the positions t + 1, t + 2, ...; mask d, from 1, sees the text up to t
and the masks before it, and predicts tokens[t + d + ahead]. Depth 0 is the entry's own output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import number
from specjax.divergences import DIVERGENCES
from specjax.drafters.heads import _compared, _text
from specjax.drafters.heads._vocabulary import spread
from specjax.errors import UserError
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Params

# Entries after which masks are computed at once, in a forecast.
PLACES = 32


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


def loss(
    reader: Reader,
    depth: int,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    *,
    ce: float = 1.0,
    teacher: float = 0.0,
    decay: float = 1.0,
    keep: float = 0.7,
    floor: float = 0.2,
    divergence: str = "forward_kl",
    pace: float | None = None,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first depth (with ``Batch.depths``: of all), and metrics.

    The sum over depths d, from 0, of decay^d (ce * cross-entropy with the text + teacher *
    divergence from the target, one of ``divergences.DIVERGENCES``), over all entries at depth 0 and
    over a share max(keep^d, floor) of them at depth d: conditional drop of deeper masks (PARD,
    section 3.2). An entry that is left out at one depth is left out at all deeper ones. ``pace`` in
    [0, 1] gives the depths of every draft the weights of D-PACE instead of ``decay``. With a draft
    vocabulary both distributions are those over it; places at which the text (with ``ce``) or the
    target's preferred token (with ``teacher``) is outside of it are left out. Metrics for each
    depth d from 1: ``agreement_<d>``; ``scale`` and ``uniform`` as in the loss of heads.

    Raises:
        UserError: weights or shares out of range, a text that is too short.
    """
    _compared.check(ce, teacher, decay, divergence, pace)
    _check(batch, depth + reader.ahead, keep, floor)
    pair, batch = ModelParams(target_params, params), _text.of_output(reader.target, batch)
    read = reader.text(pair, batch)
    read = read._replace(teacher=jax.lax.stop_gradient(read.teacher))
    rows, size = read.logits.shape[:2]
    masks = random_masks(key, rows, size, [max(keep**d, floor) for d in range(1, depth)])
    logits, every = _masked(reader, pair, read, masks), _every(rows, size)
    first = jnp.maximum(_number_of_labels(reader, batch, depth), 1)
    terms = _compared.Terms(first, ce, teacher, DIVERGENCES[divergence], pace)
    before = _compared.begin(terms, (rows, size), read.logits.dtype)
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights: dict[str, Array] = dict.fromkeys(("loss", *metrics), first)
    for d in range(depth):
        own, places = read.logits, every
        if d:
            here = np.flatnonzero(masks.depths == d)
            own, places = logits[:, here], masks.places[:, here]
            # Entries at depth 1 are in random order, and each later depth has the first of them.
            taken = places if d == 1 else every[:, : len(here)]
            before = jax.tree.map(lambda x, at=taken: _rows_at(x, at), before)
        labels, counted = (_at(x, places) for x in _text.label(batch, d + reader.ahead, d))
        right = _teacher(reader, read.teacher, places, d)
        entries = own, right, labels, counted
        value, sizes, before = _compared.compare_in(reader.ids, terms, *entries, before)
        total += decay**d * value
        metrics[f"agreement_{d + 1}"] = sizes.pop("agreement")
        weights[f"agreement_{d + 1}"] = sizes.pop("labels")
        metrics |= {name: metrics[name] + decay**d * each for name, each in sizes.items()}
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def _check(batch: Batch, least: int, keep: float, floor: float) -> None:
    for name, value in (("keep", keep), ("floor", floor)):
        number(f"loss.{name}", value, "in [0, 1]", lambda x: 0 <= x <= 1)
    if batch.tokens.shape[1] < least:
        raise UserError(
            f"the last token of a draft is beyond the text; raise train.length to {least - 1} or "
            "more"
        )


def _number_of_labels(reader: Reader, batch: Batch, depth: int) -> Array:
    """i32[]: as ``_text.number_of_labels``, of all entries."""
    every = range(1 if batch.depths is None else depth)
    counts = (_text.label(batch, d + reader.ahead, d)[1].sum() for d in every)
    return functools.reduce(jnp.add, counts)


def random_masks(key: Array, rows: int, size: int, shares: list[float]) -> Masks:
    """Masks after random entries of T, of each depth from 1 after so large a share of them."""
    order = jax.vmap(lambda own: jax.random.permutation(own, size))(jax.random.split(key, rows))
    counts = [max(round(share * size), 1) for share in shares]
    parts = [order[:, :count] for count in np.minimum.accumulate(counts)] if counts else []
    depths = np.repeat(np.arange(1, len(counts) + 1), [part.shape[1] for part in parts])
    columns = np.concatenate([np.arange(0), *(np.arange(part.shape[1]) for part in parts)])
    empty = jnp.zeros((rows, 0), jnp.int32)
    return Masks(jnp.concatenate([empty, *parts], 1).astype(jnp.int32), depths, columns)


def layout_of_masks(text: Layout, masks: Masks) -> Layout:
    """What the masks attend to: T entries of the text, then the R masks; their positions."""
    rows, count = masks.places.shape
    before = jnp.take_along_axis(text.visible, masks.places[..., None], 1)
    same = masks.columns == masks.columns[:, None]
    among = jnp.asarray(same & (masks.depths <= masks.depths[:, None]))
    own = jnp.take_along_axis(text.depth, masks.places, 1) + jnp.asarray(masks.depths)
    return Layout(
        jnp.concatenate([before, jnp.broadcast_to(among, (rows, count, count))], 2),
        jnp.concatenate([text.depth, own], 1).astype(jnp.int32),
    )


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


def along(
    reader: Reader, params: ModelParams, batch: Batch, depth: int
) -> Iterator[tuple[Array, Array, Array]]:
    """For each depth the labels, the draft's logits, and the target's, at every entry."""
    read = reader.text(params, batch)
    rows, size, vocab = read.teacher.shape
    every = _every(rows, size)
    for d, logits in enumerate(_at_all_places(reader, params, read, depth)):
        labels = _text.label(batch, d + reader.ahead)[0]
        yield labels, spread(reader.ids, logits, vocab), _teacher(reader, read.teacher, every, d)


def _at_all_places(reader: Reader, params: ModelParams, read: Read, depth: int) -> Iterator[Array]:
    """f[B,T,V_d] of each depth."""
    yield read.logits
    if depth == 1:
        return
    rows, size, width = read.logits.shape
    pieces = -(-size // PLACES)
    places = jnp.minimum(jnp.arange(pieces * PLACES), size - 1).reshape(pieces, PLACES)
    depths, columns = np.divmod(np.arange((depth - 1) * PLACES), PLACES)

    def piece(own: Array) -> Array:
        own = jnp.broadcast_to(jnp.tile(own, depth - 1), (rows, len(depths)))
        return _masked(reader, params, read, Masks(own, depths + 1, columns))

    logits = jax.lax.map(piece, places).reshape(pieces, rows, depth - 1, PLACES, width)
    yield from logits.transpose(2, 1, 0, 3, 4).reshape(depth - 1, rows, -1, width)[:, :, :size]


def _masked(reader: Reader, params: ModelParams, read: Read, masks: Masks) -> Array:
    """f[B,R,V_d]: the outputs at the masks."""
    rows, count = masks.places.shape
    if not count:
        return jnp.zeros((rows, 0, read.logits.shape[-1]), read.logits.dtype)
    return reader.masked(params, read, layout_of_masks(read.layout, masks))


def _teacher(reader: Reader, logits: Array, places: Array, depth: int) -> Array:
    """The target's logits f[B,P,V] of the tokens that masks after ``places`` i32[B,P] predict."""
    own = jnp.minimum(places + depth + reader.ahead - 1, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, own[..., None], 1)


def _every(rows: int, size: int) -> Array:
    return jnp.broadcast_to(jnp.arange(size), (rows, size))


def _at(values: Array, places: Array) -> Array:
    """values [B,T] at ``places`` i32[B,P]."""
    return jnp.take_along_axis(values, places, 1)


def _rows_at(values: Array, places: Array) -> Array:
    """values [B,T,...] at ``places`` i32[B,P]."""
    return jax.vmap(lambda own, at: own[at])(values, places)
