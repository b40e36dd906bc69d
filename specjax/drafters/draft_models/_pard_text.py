"""Masks after the tokens of a text: the loss of PARD, and which drafts would have been accepted.

After the token at place t, masks stand at the positions t + 1, t + 2, ...; mask d, from 1, sees the
text up to t and the masks before it, and predicts tokens[t+d+1]. Depth 0 is the token's own output.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import tree
from specjax.checks import number
from specjax.divergences import DIVERGENCES
from specjax.drafters import _foresee
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _compared, _text
from specjax.errors import UserError
from specjax.models import lm
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Params, Training

# Places after which masks are computed at once, in a forecast.
PLACES = 32


class Masks(NamedTuple):
    """R masks of a row, ordered by depth."""

    places: Array  # i32[B,R] the token that each is after
    depths: np.ndarray  # i32[R] from 1
    columns: np.ndarray  # i32[R] a mask attends to those before it in its own column


class _Read(NamedTuple):
    """The draft model's pass over the text."""

    logits: Array  # f[B,T,V]
    layout: Layout
    block: Any


def training(target: LM, model: LM, mask_id: int, plan: Plan) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    texts = functools.partial(along, target, model, mask_id)
    depth = plan.growth.depth
    return Training(
        loss=functools.partial(loss, target, model, mask_id, depth),
        foresee=_foresee.of_plan(texts, plan),
        ranks=functools.partial(_foresee.ranks_along, texts, depth),
    )


def loss(
    target: LM,
    model: LM,
    mask_id: int,
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
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the text, and metrics.

    The sum over depths d, from 0, of decay^d (ce * cross-entropy with the text + teacher *
    divergence from the target, one of ``divergences.DIVERGENCES``), over all places at depth 0 and
    over a share max(keep^d, floor) of them at depth d: conditional drop of deeper masks (PARD,
    section 3.2). A place that is left out at one depth is left out at all deeper ones, so every
    mask that is kept has those before it. All depths are divided by the number of labels of the
    first. Metrics for each depth d from 1: ``agreement_<d>``; ``scale`` and ``uniform`` as in the
    loss of heads.

    Raises:
        UserError: weights or shares out of range, a text that is too short.
    """
    _check(batch, depth, ce, teacher, decay, keep, floor, divergence)
    teachers = lm.forward(target, target_params, batch.tokens[:, :-1], _segments(batch)).logits
    teachers = jax.lax.stop_gradient(teachers)
    read = _read(model, params, batch)
    shares = [max(keep**d, floor) for d in range(1, depth)]
    rows, size = read.logits.shape[:2]
    masks = _random(key, rows, size, shares)
    logits = _masked(model, mask_id, params, read, masks)
    labels, counted = _text.label(batch, 1)
    first = jnp.maximum(counted.sum(), 1)
    terms = _compared.Terms(first, ce, teacher, DIVERGENCES[divergence])
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights: dict[str, Array] = dict.fromkeys(("loss", *metrics), first)
    for d in range(depth):
        own, right = read.logits, teachers
        if d:
            rows = np.flatnonzero(masks.depths == d)
            places = masks.places[:, rows]
            labels, counted = (_at(each, places) for each in _text.label(batch, d + 1))
            own = logits[:, rows]
            right = _teacher(teachers, places, d)
        value, sizes = _compared.compare(terms, own, right, labels, counted)
        total += decay**d * value
        metrics[f"agreement_{d + 1}"] = sizes.pop("agreement")
        weights[f"agreement_{d + 1}"] = sizes.pop("labels")
        metrics |= {name: metrics[name] + decay**d * each for name, each in sizes.items()}
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def _check(
    batch: Batch,
    depth: int,
    ce: float,
    teacher: float,
    decay: float,
    keep: float,
    floor: float,
    divergence: str,
) -> None:
    _compared.check(ce, teacher, decay, divergence)
    for name, value in (("keep", keep), ("floor", floor)):
        number(f"loss.{name}", value, "in [0, 1]", lambda x: 0 <= x <= 1)
    if batch.depths is not None:
        raise UserError("pard is trained on whole texts; take other data than drafts of one depth")
    if batch.tokens.shape[1] < depth + 1:
        raise UserError(
            f"a draft of {depth} tokens looks beyond the text; raise train.length to {depth} or "
            "more"
        )


def _segments(batch: Batch) -> Array | None:
    return None if batch.segments is None else batch.segments[:, :-1]


def _read(model: LM, params: Params, batch: Batch) -> _Read:
    text = batch.tokens[:, :-1]
    rows, size = text.shape
    segments = _segments(batch)
    layout = tree.chain_layout(rows, size) if segments is None else tree.segments(segments)
    out, block = model.apply(params, text, model.init_cache(rows, 0), layout)
    return _Read(out.logits, layout, block)


def _random(key: Array, rows: int, size: int, shares: list[float]) -> Masks:
    """Masks after random places of T, of each depth from 1 after so large a share of them."""
    order = jax.vmap(lambda own: jax.random.permutation(own, size))(jax.random.split(key, rows))
    counts = [max(round(share * size), 1) for share in shares]
    parts = [order[:, :count] for count in np.minimum.accumulate(counts)] if counts else []
    depths = np.repeat(np.arange(1, len(counts) + 1), [part.shape[1] for part in parts])
    columns = np.concatenate([np.arange(0), *(np.arange(part.shape[1]) for part in parts)])
    empty = jnp.zeros((rows, 0), jnp.int32)
    return Masks(jnp.concatenate([empty, *parts], 1).astype(jnp.int32), depths, columns)


def _masked(model: LM, mask_id: int, params: Params, read: _Read, masks: Masks) -> Array:
    """f[B,R,V]: the outputs at the masks."""
    rows, count = masks.places.shape
    if not count:
        return jnp.zeros((rows, 0, read.logits.shape[-1]), read.logits.dtype)
    before = jnp.take_along_axis(read.layout.visible, masks.places[..., None], 1)
    same = masks.columns == masks.columns[:, None]
    among = jnp.asarray(same & (masks.depths <= masks.depths[:, None]))
    own = jnp.take_along_axis(read.layout.depth, masks.places, 1) + jnp.asarray(masks.depths)
    layout = Layout(
        jnp.concatenate([before, jnp.broadcast_to(among, (rows, *among.shape))], 2),
        jnp.concatenate([read.layout.depth, own], 1).astype(jnp.int32),
    )
    tokens = jnp.full((rows, count), mask_id, jnp.int32)
    cache = model.init_cache(rows, 0)
    return model.apply(params, tokens, cache, layout, read.block)[0].logits


def along(
    target: LM, model: LM, mask_id: int, params: ModelParams, batch: Batch, depth: int
) -> Iterator[tuple[Array, Array, Array]]:
    """For each depth the labels, the draft's logits, and the target's, at every pending token."""
    right = lm.forward(target, params.target, batch.tokens[:, :-1], _segments(batch)).logits
    read = _read(model, params.draft, batch)
    rows, size, vocab = right.shape
    every = jnp.broadcast_to(jnp.arange(size), (rows, size))
    yield _text.label(batch, 1)[0], read.logits, right
    if depth == 1:
        return
    pieces = -(-size // PLACES)
    places = jnp.minimum(jnp.arange(pieces * PLACES), size - 1).reshape(pieces, PLACES)
    depths, columns = np.divmod(np.arange((depth - 1) * PLACES), PLACES)

    def piece(own: Array) -> Array:
        own = jnp.broadcast_to(jnp.tile(own, depth - 1), (rows, len(depths)))
        return _masked(model, mask_id, params.draft, read, Masks(own, depths + 1, columns))

    logits = jax.lax.map(piece, places).reshape(pieces, rows, depth - 1, PLACES, vocab)
    logits = logits.transpose(2, 1, 0, 3, 4).reshape(depth - 1, rows, -1, vocab)[:, :, :size]
    for d in range(1, depth):
        yield _text.label(batch, d + 1)[0], logits[d - 1], _teacher(right, every, d)


def _teacher(logits: Array, places: Array, depth: int) -> Array:
    """The target's logits f[B,P,V] of the tokens that masks after ``places`` i32[B,P] predict."""
    own = jnp.minimum(places + depth, logits.shape[1] - 1)
    return jnp.take_along_axis(logits, own[..., None], 1)


def _at(values: Array, places: Array) -> Array:
    """values [B,T] at ``places`` i32[B,P]."""
    return jnp.take_along_axis(values, places, 1)
