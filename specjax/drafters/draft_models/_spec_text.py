"""Spec-Drafter along a text: its loss, and which drafts would have been accepted.

A text is a source, the start token, and an output. Entry t of a text is the draft that begins with
tokens[t] pending: mask d, from 0, predicts tokens[t + 1 + d].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.bound import Bound
from specjax.checks import number, whole
from specjax.drafters import _foresee, _glancing
from specjax.drafters._growth import Plan
from specjax.drafters.draft_models import _spec_network as network
from specjax.drafters.draft_models._spec_network import Net, Source
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import LM, Array, Batch, ModelParams, Params, Training

# The share of the rate of glancing that is gone at the end.
FALL = 0.4


def training(net: Net, target: LM, plan: Plan, facts: tuple[tuple[str, Any], ...]) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    texts = Bound(along, net, target)
    return Training(
        loss=Bound(loss, net),
        start=Bound(network.start, net),
        foresee=_foresee.of_plan(texts, plan),
        ranks=Bound(_foresee.ranks_along, texts, plan.growth.depth),
        facts=facts,
    )


def loss(
    net: Net,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    *,
    places: int = 1,
    smoothing: float = 0.1,
    glancing: float = 0.5,
    fall: float | None = None,
    run_steps: int = 0,
    remat: bool = False,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label, and metrics.

    Of each row a random beginning of its output is read, and the tokens of the block after it are
    predicted: ``places`` different beginnings, or all where there are fewer (the paper has one).
    The loss is the cross-entropy with the text, of which ``smoothing`` is spread over all tokens.
    ``glancing``: answers that are given per wrong token at the first step; at step e of
    ``run_steps`` it is glancing * (1 - fall * e / run_steps). ``fall`` None: 0.4, so with the
    defaults the rate falls from 0.5 to 0.3. Numbers of answers are rounded down. What was given is
    not in the loss. ``remat``: recompute each layer in the backward pass.

    Metrics: ``glanced``, the share of labels that were given; ``agreement_<d>`` for each depth d
    from 1, how often the most probable token is that of the text, of the labels in the loss;
    ``scale`` and ``uniform`` as in the loss of heads.

    Raises:
        UserError: values out of range or without effect, a text that is too short, labels of single
            depths.
    """
    del target_params
    fall = _checked_fall(net, batch, places, smoothing, glancing, fall)
    pair, keys = ModelParams({}, params), jax.random.split(key)
    source = network.read(net, pair, batch.tokens, remat)
    pending, known = random_places(keys[0], batch, places)
    answers, counted = _labels(net, batch, pending, known)
    # Each beginning is a row of its own; the sources were read once.
    repeated = jax.tree.map(lambda x: jnp.repeat(x, pending.shape[1], 0), source)
    tokens = jnp.repeat(
        network.written(batch.tokens, source, batch.tokens.shape[1]), pending.shape[1], 0
    )
    read = jnp.maximum((pending - source.count[:, None]).reshape(-1) + 1, 1)
    given = jnp.zeros_like(counted)
    if glancing:
        seen, source_seen = jax.lax.stop_gradient((pair, repeated))
        guess = sampling.argmax(network.logits(net, seen, tokens, read, source_seen))
        rate = glancing * (1 - fall * _glancing.progress(batch, run_steps))
        order = jax.random.uniform(keys[1], counted.shape)
        given = _glancing.first(counted, order, _glancing.count(counted & (guess != answers), rate))
    logits = network.logits(net, pair, tokens, read, repeated, answers, given, remat)
    return _compare(logits, answers, counted & ~given, given, smoothing)


def random_places(key: Array, batch: Batch, places: int) -> tuple[Array, Array]:
    """Pending tokens: their places i32[B,P] in the text, different ones, and whether they are so.

    The token after a pending one is a label. False: the row has fewer.
    """
    labelled = batch.labelled
    can = jnp.ones(batch.tokens.shape, bool) if labelled is None else labelled
    can = can[:, 1:]
    turn = jnp.where(can, jax.random.uniform(key, can.shape), 2.0)
    chosen = jnp.argsort(turn, 1)[:, :places]
    return chosen, jnp.take_along_axis(can, chosen, 1)


def _labels(net: Net, batch: Batch, pending: Array, known: Array) -> tuple[Array, Array]:
    """The tokens i32[B*P,K] after the pending ones, and whether they are labels."""
    place = pending[..., None] + 1 + jnp.arange(net.shape.block)
    inside = known[..., None] & (place < batch.tokens.shape[1])
    at = jax.vmap(lambda row, index: row[index])
    place = jnp.minimum(place, batch.tokens.shape[1] - 1)
    if batch.labelled is not None:
        inside &= at(batch.labelled, place)
    flat = (-1, net.shape.block)
    return at(batch.tokens, place).reshape(flat), inside.reshape(flat)


def _compare(
    logits: Array, labels: Array, counted: Array, given: Array, smoothing: float
) -> tuple[Array, dict[str, Any]]:
    """The loss and its metrics, of R blocks."""
    whole_count = counted.sum().astype(jnp.float32)

    def mean(values: Array, over: Array = counted) -> Array:
        return jnp.where(over, values, 0).sum() / jnp.maximum(over.sum(), 1)

    log_probs = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    values = -(1 - smoothing) * own - smoothing * log_probs.mean(-1)
    metrics: dict[str, Any] = {
        "scale": jnp.float32(1),
        "uniform": jnp.log(jnp.float32(logits.shape[-1])),
        "glanced": mean(given.astype(jnp.float32), counted | given),
    }
    weights = dict.fromkeys(("loss", *metrics), whole_count)
    weights["glanced"] = (counted | given).sum().astype(jnp.float32)
    same = sampling.argmax(logits) == labels
    for d in range(labels.shape[1]):
        metrics[f"agreement_{d + 1}"] = mean(same[:, d], counted[:, d])
        weights[f"agreement_{d + 1}"] = counted[:, d].sum().astype(jnp.float32)
    return mean(values), {**metrics, "weight": weights}


def along(
    net: Net, target: LM, params: ModelParams, batch: Batch, depth: int
) -> Iterator[tuple[Array, Array, Array]]:
    """For each depth the labels, the draft's logits, and the target's, at every entry.

    Each entry is a pass of its own. Entries in a source have no meaning.
    """
    text = batch.tokens[:, :-1]
    size = text.shape[1]
    theirs = lm.forward(target, params.target, text).logits
    source: Source = network.read(net, params, text)
    tokens = network.written(text, source, size)

    def one(place: Array) -> Array:
        read = jnp.maximum(place + 1 - source.count, 1)
        return network.logits(net, params, tokens, read, source)[:, :depth]

    every = jax.lax.map(one, jnp.arange(size))  # [T,B,K,V]
    for d in range(depth):
        ahead = jnp.minimum(jnp.arange(size) + d, size - 1)
        labels = batch.tokens[:, jnp.minimum(jnp.arange(size) + d + 1, size)]
        yield labels, jnp.moveaxis(every[:, :, d], 0, 1), theirs[:, ahead]


def _checked_fall(
    net: Net, batch: Batch, places: int, smoothing: float, glancing: float, fall: float | None
) -> float:
    """``fall`` or its default. Raises UserError for values of the loss that do not fit."""
    whole("loss.places", places, 1)
    number("loss.smoothing", smoothing, "in [0, 1)", lambda x: 0 <= x < 1)
    for name, value in (("glancing", glancing), ("fall", FALL if fall is None else fall)):
        number(f"loss.{name}", value, "in [0, 1]", lambda x: 0 <= x <= 1)
    if fall is not None and not glancing:
        raise UserError(
            f"loss.fall is {fall} and loss.glancing is 0, so no rate falls; give loss.glancing, or "
            "leave loss.fall out"
        )
    if batch.depths is not None:
        raise UserError(
            "spec_drafter learns whole blocks, not the depths of single tokens; give "
            "online.positions='emitted'"
        )
    if batch.tokens.shape[1] < net.shape.block + 1:
        raise UserError(
            f"a block has {net.shape.block} tokens; raise train.length to {net.shape.block} or "
            "more, or lower drafter.block"
        )
    return FALL if fall is None else fall
