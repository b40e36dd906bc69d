"""How far a draft's distribution is from the target's, per position, as functions of logits.

Each takes two arrays f[...,V] that broadcast, the target's logits first, and gives f[...].
``DIVERGENCES`` is the registry of those that training can minimise. A token may have the logit -inf
in the target; a draft with -inf where the target has none makes ``forward_kl`` infinite.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import sampling

# Weights of the two directions of KL in ``jeffreys``, the target's first.
JEFFREYS = (0.9, 0.1)
# Exponent of the weight of KL in ``lk_hybrid``.
ETA = 3.0


def forward_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(target || draft) in nats -> f[...].

    The supervised objective of DistillSpec (Zhou et al. 2023, arXiv:2310.08461, section 3.1).
    """
    return _kl(jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits))


def reverse_kl(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """KL(draft || target) in nats -> f[...].

    Infinite where the target has probability 0 and the draft has not. DistillSpec, section 3.1.
    """
    return _kl(jax.nn.log_softmax(draft_logits), jax.nn.log_softmax(target_logits))


def jensen_shannon(
    target_logits: jax.Array, draft_logits: jax.Array, *, beta: float = 0.5
) -> jax.Array:
    """Generalised Jensen-Shannon divergence JSD_beta in nats -> f[...].

    beta KL(target || m) + (1 - beta) KL(draft || m) with m = beta target + (1 - beta) draft,
    0 < beta < 1 (Agarwal et al. 2023, arXiv:2306.13649, section 2; DistillSpec, section 3.1).
    """
    target, draft = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits)
    mixed = jnp.logaddexp(target + jnp.log(beta), draft + jnp.log1p(-beta))
    return beta * _kl(target, mixed) + (1 - beta) * _kl(draft, mixed)


def jeffreys(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """0.9 KL(target || draft) + 0.1 KL(draft || target) in nats -> f[...].

    A weighted Jeffreys divergence; infinite where ``reverse_kl`` is. The authors' code of online
    speculative decoding (Liu et al. 2023, arXiv:2310.07177) has it under the name JSD, which it is
    not: see ``jensen_shannon``.
    """
    target, draft = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits)
    return JEFFREYS[0] * _kl(target, draft) + JEFFREYS[1] * _kl(draft, target)


def total_variation(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Half the L1 distance -> f[...].

    It is 1 - alpha at temperature 1. Its gradient vanishes where the distributions hardly overlap:
    start with another divergence. DistillSpec, section 3.1.
    """
    return jnp.abs(jax.nn.softmax(target_logits) - jax.nn.softmax(draft_logits)).sum(-1) / 2


def lk(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """-log alpha, with alpha = sum_x min(target(x), draft(x)), in nats -> f[...].

    Its gradient is that of ``total_variation`` divided by alpha, so it does not vanish where the
    distributions hardly overlap. "LK losses" (2026, arXiv:2602.23881).
    """
    target, draft = jax.nn.log_softmax(target_logits), jax.nn.log_softmax(draft_logits)
    # In logarithms: probabilities may be too small for float32.
    return -jax.nn.logsumexp(jnp.minimum(target, draft), axis=-1)


def lk_hybrid(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """w KL(target || draft) + (1 - w) total variation, with w = exp(-3 alpha) -> f[...].

    w is a constant for the gradient; alpha is that of the position. KL leads where the
    distributions hardly overlap, total variation where they are close. "LK losses" (2026,
    arXiv:2602.23881).
    """
    distance = total_variation(target_logits, draft_logits)
    weight = jax.lax.stop_gradient(jnp.exp(-ETA * (1 - distance)))
    return weight * forward_kl(target_logits, draft_logits) + (1 - weight) * distance


_ALL = (forward_kl, reverse_kl, jensen_shannon, jeffreys, total_variation, lk, lk_hybrid)
DIVERGENCES: dict[str, Callable[..., jax.Array]] = {each.__name__: each for each in _ALL}
NAMES = ", ".join(DIVERGENCES)


def overlap(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """sum_x min(target(x), draft(x)) -> f[...].

    It is the acceptance rate (alpha) at temperature 1. Leviathan et al. 2022, arXiv:2211.17192,
    section 3.2 (corollary 3.6).
    """
    target, draft = jax.nn.softmax(target_logits), jax.nn.softmax(draft_logits)
    return jnp.minimum(target, draft).sum(-1)


def agreement(target_logits: jax.Array, draft_logits: jax.Array) -> jax.Array:
    """Whether both prefer the same token -> bool[...]; the acceptance rate at temperature 0."""
    return sampling.argmax(target_logits) == sampling.argmax(draft_logits)


def _kl(first: jax.Array, second: jax.Array) -> jax.Array:
    """KL(first || second) f[...] of log-probabilities f[...,V]."""
    # exp(-inf) * (-inf - x) is nan where it should be 0: a token may have probability 0.
    zero = jnp.isneginf(first)
    terms = jnp.exp(first) * (jnp.where(zero, 0.0, first) - second)
    return jnp.where(zero, 0.0, terms).sum(-1)
