"""Blocks along a text: their loss, and which drafts would have been accepted.

Feature s of a text is that of token s; the block behind it has tokens[s+1] pending, sees the text
up to s, and at depth d (from 0) predicts tokens[s+2+d], after the text's own tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.checks import number, whole
from specjax.divergences import DIVERGENCES, overlap
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _block_network as network
from specjax.drafters.heads import _compared, _text
from specjax.drafters.heads._block_corrections import Given as Before
from specjax.drafters.heads._block_network import Net
from specjax.drafters.heads._vocabulary import spread
from specjax.errors import UserError
from specjax.types import LM, Array, Batch, ModelParams, Output, Params, Training

# Blocks of a row in one step of training, and in one piece of a forecast.
PLACES = 32


class Blocks(NamedTuple):
    """Blocks behind P places of a text."""

    places: Array  # i32[B,P]
    hidden: Array  # [B,P,K,D]


class Depth(NamedTuple):
    """One depth of the blocks."""

    logits: Array  # f[B,P,V_d] corrected
    labels: Array  # i32[B,P]
    counted: Array  # bool[B,P]
    teacher: Array  # f[B,P,V] the target's logits
    confidence: Array | None  # f[B,P] before the sigmoid


def training(net: Net, plan: Plan, *, target: LM, facts: tuple[tuple[str, Any], ...]) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    target = target.with_taps(net.shape.taps)
    texts = Bound(along, net, target)
    depth = plan.growth.depth
    return Training(
        loss=Bound(loss, net, target),
        start=Bound(network.start, net.shape),
        foresee=_text.foresee(texts, plan),
        ranks=Bound(_text.ranks, texts, depth),
        facts=facts,
    )


def loss(
    net: Net,
    target: LM,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    *,
    ce: float = 1.0,
    teacher: float = 0.0,
    decay: float = 1.0,
    confidence: float = 0.0,
    places: int = PLACES,
    divergence: str = "forward_kl",
    pace: float | None = None,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first depth, and metrics.

    The blocks are behind ``places`` random features of each row, or all of them where there are
    fewer. The loss is the sum over depths d of decay^d (ce * cross-entropy with the text + teacher
    * divergence from the target, one of ``divergences.DIVERGENCES``, + confidence * cross-entropy
    of the confidence with the overlap of both distributions). It is divided by the number of labels
    of the first depth (with ``Batch.depths``: of all). ``pace`` in [0, 1] gives the first two terms
    the weights of D-PACE instead of ``decay`` (``_compared.Pace``). Metrics for each depth d from
    1: ``agreement_<d>`` and ``alpha_<d>``, the acceptance rates at temperature 0 and 1; ``scale``
    and ``uniform`` as in the loss of heads. The target's logits are constants, its hidden states
    not.

    Raises:
        UserError: weights out of range or without effect, a batch of fewer than 3 tokens.
    """
    _compared.check(ce, teacher, decay, divergence, pace)
    _check(net, batch, confidence, places)
    pair, count = ModelParams(target_params, params), net.shape.positions
    batch = _text.of_output(target, batch)
    out = _text.output(target, target_params, batch)
    teachers = jax.lax.stop_gradient(out.logits)
    text = _read(net, pair, out, batch)
    rows, size = out.hidden.shape[:2]
    chosen = random_places(key, rows, size, places)
    blocks = Blocks(chosen, _run(net, pair, batch, text, chosen, count))
    first = jnp.maximum(_number_of_labels(batch, chosen, count), 1)
    terms = _compared.Terms(first, ce, teacher, DIVERGENCES[divergence], pace)
    one = jax.checkpoint(Bound(_term, net, terms, confidence), static_argnums=6)
    before = _compared.begin(terms, chosen.shape, teachers.dtype)
    total, state = jnp.zeros(()), network.no_state(net, pair, *chosen.shape)
    metrics: dict[str, Array] = {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    weights = dict.fromkeys(("loss", *metrics), first)
    for depth in range(count):
        value, sizes, state, before = one(pair, batch, teachers, blocks, state, before, depth)
        total += decay**depth * value
        labels = sizes.pop("labels")
        for name in ("agreement", "alpha"):
            metrics[f"{name}_{depth + 1}"] = sizes.pop(name)
            weights[f"{name}_{depth + 1}"] = labels
        metrics |= {name: metrics[name] + decay**depth * each for name, each in sizes.items()}
    return total, {**metrics, "weight": jax.tree.map(jnp.float32, weights)}


def random_places(key: Array, rows: int, size: int, most: int) -> Array:
    """i32[B,P]: different places of each row, at random."""
    order = jax.vmap(lambda own: jax.random.permutation(own, size))(jax.random.split(key, rows))
    return order[:, : min(most, size)].astype(jnp.int32)


def _number_of_labels(batch: Batch, places: Array, depths: int) -> Array:
    """i32[]: as ``_text.number_of_labels``, of blocks behind the places."""
    every = range(1 if batch.depths is None else depths)
    counts = (_at(_text.label(batch, d + 2, d)[1], places).sum() for d in every)
    return functools.reduce(jnp.add, counts)


def _term(
    net: Net,
    terms: _compared.Terms,
    confidence: float,
    params: ModelParams,
    batch: Batch,
    teachers: Array,
    blocks: Blocks,
    state: Array,
    before: _compared.Pace | None,
    depth: int,
) -> tuple[Array, dict[str, Array], Array, _compared.Pace | None]:
    """(loss of one depth, its metrics, the next state, the next ``Pace``)."""
    own, state = _depth(net, params, batch, teachers, blocks, state, depth)
    value, sizes, pace = _compared.compare_in(
        net.ids, terms, own.logits, own.teacher, own.labels, own.counted, before
    )
    logits = spread(net.ids, own.logits, net.shape.vocab)
    shared = jax.lax.stop_gradient(overlap(own.teacher, logits))
    sizes["alpha"] = jnp.where(own.counted, shared, 0).sum() / jnp.maximum(sizes["labels"], 1)
    if confidence and own.confidence is not None:
        # Cross-entropy of sigmoid(x) with the share c: log(1 + e^x) - c x.
        wrong = jax.nn.softplus(own.confidence) - shared * own.confidence
        value += confidence * jnp.where(own.counted, wrong, 0).sum() / terms.first
        sizes["scale"] += confidence * own.counted.sum() / terms.first
        sizes["uniform"] += confidence * jnp.log(2.0) * own.counted.sum() / terms.first
    return value, sizes, state, pace


def _depth(
    net: Net,
    params: ModelParams,
    batch: Batch,
    teachers: Array,
    blocks: Blocks,
    state: Array,
    depth: int,
) -> tuple[Depth, Array]:
    """One depth of blocks behind places, and the correction's state."""
    places, size = blocks.places, teachers.shape[1]
    hidden = blocks.hidden[:, :, depth]
    before = _at(_text.ahead(batch.tokens, depth + 1, size), places)
    given = Before(before, hidden, network.logits(net, params, hidden), depth)
    after = network.correct(net, params, state, given)
    labels, counted = (_at(each, places) for each in _text.label(batch, depth + 2, depth))
    own = jnp.minimum(places + depth + 1, size - 1)
    teacher = jnp.take_along_axis(teachers, own[..., None], 1)
    return Depth(after.logits, labels, counted, teacher, after.confidence), after.state


def _read(net: Net, params: ModelParams, out: Output, batch: Batch):
    """(layout of the text, its keys and values)."""
    rows, size = out.hidden.shape[:2]
    if batch.segments is None:
        layout = tree.chain_layout(rows, size)
    else:
        layout = tree.segments(batch.segments[:, :-1])
    return layout, network.read(net, params, out.taps, layout.depth)


def _run(net: Net, params: ModelParams, batch: Batch, text, places: Array, depth: int) -> Array:
    """[B,P,K,D]: blocks of ``depth`` tokens behind ``places`` i32[B,P]."""
    own, block = text
    rows, count = places.shape
    inside, fed = network.inside(net, depth), net.shape.fed(depth)
    each = jnp.repeat(places, fed, 1)
    group, step = jnp.divmod(jnp.arange(count * fed), fed)
    among = (group[:, None] == group) & inside[step[:, None], step]
    visible = jnp.concatenate(
        [
            jnp.take_along_axis(own.visible, each[..., None], 1),
            jnp.broadcast_to(among, (rows, *among.shape)),
        ],
        2,
    )
    behind = jnp.take_along_axis(own.depth, each, 1) + 1 + step
    layout = tree.Layout(visible, jnp.concatenate([own.depth, behind], 1).astype(jnp.int32))
    pending = _at(batch.tokens, places + 1)
    cache = network.init_cache(net, rows, 0)
    return network.run(net, params, pending, depth, cache, layout, block)


def along(
    net: Net, target: LM, params: ModelParams, batch: Batch, depth: int
) -> Iterator[tuple[Array, Array, Array]]:
    """``_text.Along``: blocks of ``depth`` tokens behind every feature, ``PLACES`` at a time."""
    out = _text.output(target, params.target, batch)
    rows, size = out.hidden.shape[:2]
    text, pieces = _read(net, params, out, batch), -(-size // PLACES)
    every = jnp.minimum(jnp.arange(pieces * PLACES), size - 1).reshape(pieces, 1, PLACES)

    def piece(places: Array) -> Array:
        places = jnp.broadcast_to(places, (rows, PLACES))
        return _run(net, params, batch, text, places, depth)

    hidden = jnp.moveaxis(jax.lax.map(piece, every), 0, 1)
    hidden = hidden.reshape(rows, pieces * PLACES, *hidden.shape[3:])[:, :size]
    blocks = Blocks(jnp.broadcast_to(jnp.arange(size), (rows, size)), hidden)
    state = network.no_state(net, params, rows, size)
    for d in range(depth):
        own, state = _depth(net, params, batch, out.logits, blocks, state, d)
        yield own.labels, spread(net.ids, own.logits, net.shape.vocab), own.teacher


def _at(values: Array, places: Array) -> Array:
    """values [B,T] at ``places`` i32[B,P]."""
    return jnp.take_along_axis(values, places, 1)


def _check(net: Net, batch: Batch, confidence: float, places: int) -> None:
    number("loss.confidence", confidence, ">= 0", lambda x: x >= 0)
    whole("loss.places", places, 1)
    if confidence and not net.shape.confidence:
        raise UserError(
            f"loss.confidence is {confidence}, and the network has no confidence; set "
            "drafter.confidence, or leave loss.confidence out"
        )
    if batch.tokens.shape[1] < 3:
        raise UserError("blocks predict two tokens ahead; raise train.length to 2 or more")
