"""Heads along a text: what they are trained by, and how well they would have guessed what the text says.

Position s of the T features guesses, at depth d from 0, tokens[s+2+d]: tokens[s+1] is the pending token, drawn from f[s].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import number, one_of
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import LM, Batch, ModelParams, Output

if TYPE_CHECKING:
    from specjax.drafters.heads._shared import Heads

SLOTS = ("all", "one")


def loss(
    heads: Heads,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    ce: float = 1.0,
    teacher: float = 0.0,
    decay: float = 1.0,
    slots: str = "all",
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum over depths d of decay^d (ce * cross-entropy with the text + teacher * KL(target || head)), per labelled position.

    Every depth is divided by the number of labels of the first, so that micro-batches add up. ``slots`` "one" draws a single
    depth a batch, uniformly: the mean over depths in expectation, in the memory of one head (Stern et al. 2018, 1811.03115,
    section 6). The metrics ``agreement_<d>``, d from 1, say how often a head prefers the token that the target does. The
    target's own logits are constants; its features are not, if somebody differentiates ``target_params``. Raises UserError for
    weights out of range.
    """
    for name, value in (("ce", ce), ("teacher", teacher), ("decay", decay)):
        number(f"loss.{name}", value, ">= 0", lambda x: x >= 0)
    one_of("loss.slots", slots, SLOTS)
    if not ce and not teacher:
        raise UserError("loss.ce and loss.teacher are both 0; there is nothing to learn from")
    if slots == "one" and not heads.independent:
        raise UserError(
            f"each head of {heads.name} goes on from the one before; loss.slots must be 'all'"
        )
    if batch.tokens.shape[1] < 3:
        raise UserError("heads look two tokens ahead at least; raise train.length to 2 or more")
    pair = ModelParams(target_params, params)
    out, state = begin(heads, target, pair, batch)
    teachers = jax.lax.stop_gradient(out.logits)
    labels = _label(batch, 2)[1].sum()
    first, weight = (
        jnp.maximum(labels, 1),
        labels.astype(jnp.float32),
    )  # of a part without labels: 0
    size = out.hidden.shape[1]

    def term(pair, state, depth):
        logits, state = heads.step(pair, state, depth, _ahead(batch.tokens, depth + 1, size))
        labels, counted = _label(batch, depth + 2)
        theirs = _ahead(teachers, depth + 1, size)
        log_probs = jax.nn.log_softmax(logits)
        value = jnp.zeros(labels.shape, logits.dtype)
        if ce:
            value -= ce * jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
        if teacher:
            law = jax.nn.log_softmax(theirs)
            value += teacher * jnp.where(
                jnp.isneginf(law), 0, jnp.exp(law) * (law - log_probs)
            ).sum(-1)
        same = counted & (sampling.argmax(logits) == sampling.argmax(theirs))
        agreement = same.sum() / jnp.maximum(counted.sum(), 1)
        return jnp.where(counted, value, 0).sum() / first, agreement, state

    if slots == "one":
        depth = jax.random.randint(key, (), 0, heads.depth)
        value, _, _ = jax.checkpoint(term)(pair, state, depth)
        return decay**depth * value, {"weight": weight}
    total, metrics = jnp.zeros(()), {}
    for depth in range(heads.depth):
        # The logits of one depth at a time.
        # The logits of one depth at a time are kept, and computed again when their turn comes in the backward pass.
        value, agreement, state = jax.checkpoint(term, static_argnums=2)(pair, state, depth)
        total += decay**depth * value
        metrics[f"agreement_{depth + 1}"] = agreement
    return total, {**metrics, "weight": weight}


def begin(heads: Heads, target: LM, params: ModelParams, batch: Batch) -> tuple[Output, Any]:
    """What the target says along the text, and the state that every feature's heads begin with."""
    segments = None if batch.segments is None else batch.segments[:, :-1]
    out = lm.forward(target, params.target, batch.tokens[:, :-1], segments)
    features = out.hidden
    if heads.prefix is not None:
        cache = heads.prefix.init_cache(*features.shape[:2])
        features, _ = heads.prefix.apply(
            params, features, cache, None if segments is None else lm.documents(segments)
        )
    return out, heads.begin(params, features)


def along(
    heads: Heads, target: LM, params: ModelParams, batch: Batch, depth: int
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
    """For each depth: labels i32[B,T], the head's logits f[B,T,V], the target's; entry s belongs to feature s."""
    out, state = begin(heads, target, params, batch)
    size = out.hidden.shape[1]
    for d in range(depth):
        logits, state = heads.step(params, state, d, _ahead(batch.tokens, d + 1, size))
        yield _label(batch, d + 2)[0], logits, _ahead(out.logits, d + 1, size)


def _ahead(x: jax.Array, by: Any, size: int) -> jax.Array:
    """x[:, s + by] for s below ``size``; beyond the end, the last one (no label is counted there)."""
    return jnp.take(x, jnp.minimum(jnp.arange(size) + by, x.shape[1] - 1), axis=1)


def _label(batch: Batch, by: Any) -> tuple[jax.Array, jax.Array]:
    """Label i32[B,T] of each feature ``by`` tokens ahead, and whether it is one: inside the text and the document."""
    size = batch.tokens.shape[1] - 1
    counted = jnp.broadcast_to(jnp.arange(size) + by <= size, (batch.tokens.shape[0], size))
    if batch.labelled is not None:
        counted &= _ahead(batch.labelled, by, size)
    if batch.segments is not None:
        counted &= _ahead(batch.segments, by, size) == batch.segments[:, :-1]
    return _ahead(batch.tokens, by, size), counted
