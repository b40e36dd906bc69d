"""What training minimises, and what it measures, as pure functions of logits; then the two losses of the training loop.

A loss is ``loss(params, target_params, batch i32[B,T+1], key) -> (scalar, metrics)``; ``target_params`` is never
differentiated. A new objective is a new function of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.models import lm
from specjax.types import LM

Loss = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean negative log-likelihood, nats a token: logits f32[B,T,V], labels i32[B,T], mask bool[B,T] -> f32[]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return _mean(jax.nn.logsumexp(logits, axis=-1) - picked, mask)


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean KL(target || draft), nats a token: two f32[B,T,V], mask bool[B,T] -> f32[].

    The supervised objective of DistillSpec (Zhou et al. 2023, arXiv:2310.08461, section 3.1).
    """
    target, draft = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits)
    # exp(-inf) * (-inf - x) is nan where it should be 0: the target may rule tokens out.
    terms = jnp.where(jnp.isneginf(target), 0.0, jnp.exp(target) * (target - draft))
    return _mean(terms.sum(-1), mask)


def overlap(target_logits: jax.Array, draft_logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean of sum_x min(target(x), draft(x)), the acceptance rate (alpha) at temperature 1: two f32[B,T,V] -> f32[].

    Leviathan et al. 2022, arXiv:2211.17192, section 3.2 (corollary 3.6).
    """
    target, draft = jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)
    return _mean(jnp.minimum(target, draft).sum(-1), mask)


def agreement(target_logits: jax.Array, draft_logits: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """How often both prefer the same token, the acceptance rate at temperature 0: two f32[B,T,V] -> f32[]."""
    same = jnp.argmax(target_logits, axis=-1) == jnp.argmax(draft_logits, axis=-1)
    return _mean(same.astype(jnp.float32), mask)


def pretrain_loss(model: LM) -> Loss:
    """Next-token cross-entropy of ``model``; ``target_params`` are ignored."""

    def loss(params, target_params, batch, key):
        del target_params, key
        return cross_entropy(lm.forward(model, params, batch[:, :-1]).logits, batch[:, 1:]), {}

    return loss


def distill_loss(target: LM, draft: LM) -> Loss:
    """Forward KL from ``target`` to ``draft`` along the batch's text; metrics: alpha and agreement.

    The text is the corpus, not the target's own: sampling it is a later objective, with this loss on top.
    """

    def loss(params, target_params, batch, key):
        del key
        tokens = batch[:, :-1]
        target_logits = jax.lax.stop_gradient(lm.forward(target, target_params, tokens).logits)
        draft_logits = lm.forward(draft, params, tokens).logits
        metrics = {"alpha": overlap(target_logits, draft_logits), "agreement": agreement(target_logits, draft_logits)}
        return forward_kl(target_logits, draft_logits), metrics

    return loss


def _mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return values.mean()
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)
