"""The loss that draft networks over features are trained with: EAGLE-1, HASS and EAGLE-3.

They differ in the numbers below: how many steps of the draft are unrolled (``_columns``), and what
each step is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.bound import Bound
from specjax.divergences import DIVERGENCES
from specjax.drafters.heads import _columns, _rollout_checks, _text
from specjax.drafters.heads._network import Network
from specjax.drafters.heads._vocabulary import gather, place_of
from specjax.types import LM, Batch, ModelParams, Output

# Li et al. 2024 (2401.15077), section 4.2. The amplitude of the noise is that of the paper; the
# authors' code multiplies it by 512 / T.
EAGLE: dict[str, Any] = {"steps": 1, "feature": 1.0, "weight": 0.1, "noise": 0.1}
# Zhang et al. 2024 (2408.15766), sections 3.1 and 3.2.
HASS = EAGLE | {"steps": 3, "detach": True, "top_k_weight": 1.0}
# Li et al. 2025 (2503.01840), section 3, and the authors' code.
EAGLE3: dict[str, Any] = {"steps": 7, "decay": 0.8, "feature": 0.0, "weight": 1.0, "noise": 0.0}
# DeepSeek-AI 2024 (2412.19437), section 2.2, with the target's probs for labels: a step for each
# module.
MTP: dict[str, Any] = {"steps": 1, "feature": 0.0, "weight": 1.0, "noise": 0.0}


class _Terms(NamedTuple):
    """The weights of the loss, see ``loss``."""

    feature: float
    divergence: Callable[..., jax.Array]
    weight: float
    ce: float
    top_k: int
    top_k_weight: float
    detach: bool


class _Labels(NamedTuple):
    """What the steps are compared with; entry t belongs to feature t. All are constants."""

    first: jax.Array  # ``_text.number_of_labels``, at least 1
    features: jax.Array  # [B,T,E] the target's
    logits: jax.Array  # f[B,T,V_d] the target's, of the draft vocabulary
    inside: jax.Array  # f[B,T] the target's probability of the draft vocabulary
    best: jax.Array  # i32[B,T] place of the target's preferred token in the draft vocabulary, or -1
    kept: jax.Array  # bool[B,T] whether ``logits`` are to be learnt
    top: tuple[jax.Array, jax.Array]  # f[B,T,K], i32[B,T,K]: the target's best probs, their places
    uniform: tuple[jax.Array, jax.Array]  # f[B,T] each: both parts of the loss of a uniform guess


def loss(
    network: Network,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: jax.Array,
    *,
    steps: int = 1,
    decay: float = 1.0,
    detach: bool = False,
    feature: float = 1.0,
    divergence: str = "forward_kl",
    weight: float = 0.1,
    ce: float = 0.0,
    top_k: int = 10,
    top_k_weight: float = 0.0,
    noise: float = 0.1,
    in_vocabulary: bool = True,
) -> tuple[jax.Array, dict[str, Any]]:
    """Loss f32[] per labelled position, and metrics.

    The sum over steps j of decay^j times

        feature * smooth L1 (beta 1, mean over the width) from the target's feature
        + weight * divergence from the target's distribution (``divergences.DIVERGENCES``; forward
          KL has the gradient of the cross-entropy with soft labels)
        + ce * cross-entropy with the text
        + top_k_weight * -sum p(x) log q(x) over the ``top_k`` best tokens x of the target.

    Distributions are those over the draft vocabulary: ``ce`` leaves out labels outside it, and with
    ``in_vocabulary`` the divergence and the last term positions at which the target prefers a token
    outside it. Every step is divided by the number of labels of the first (with ``Batch.depths``:
    of all), so that micro-batches add up. ``noise``: uniform in [-noise, noise], added to the
    target's features that step 0 reads, independent of the length of the text. ``detach``: steps
    pass no gradient to the one before.
    Metrics for each depth d from 1: ``agreement_<d>`` and ``alpha_<d>``, the acceptance rates at
    temperature 0 and 1. ``scale`` and ``uniform`` as in ``heads._loss``; the uniform guess has the
    feature 0. As labels the target's logits and features are constants, as inputs they are not.
    Raises UserError for values out of range or without effect, and a text that is too short.
    """
    _rollout_checks.check(network, target, batch, locals())
    pair, batch = ModelParams(target_params, params), _text.of_output(target, batch)
    out, text = _text.output(target, target_params, batch), _columns.text(batch)
    count = _text.number_of_labels(batch, steps)
    terms = _Terms(feature, DIVERGENCES[divergence], weight, ce, top_k, top_k_weight, detach)
    labels = _labels(network, terms, in_vocabulary, jax.lax.stop_gradient(out), count)
    features, before = network.read(pair, _noisy(network, out, noise, key)), ()
    total, metrics = jnp.zeros(()), {"scale": jnp.zeros(()), "uniform": jnp.zeros(())}
    for j in range(steps):
        of_text = _of_text(network, out, batch, j)
        one = Bound(_step, network, text, labels, terms, of_text, j)
        # The logits of one step at a time: the backward pass computes them again.
        one = jax.checkpoint(one) if steps > 1 else one
        value, sizes, features, own = one(pair, features, before)
        before = (*before, own)
        total += decay**j * value
        metrics |= {f"{name}_{j + 1}": sizes.pop(name) for name in ("agreement", "alpha")}
        metrics |= {name: metrics[name] + decay**j * size for name, size in sizes.items()}
    return total, {**metrics, "weight": _weights(batch, steps)}


def _of_text(network: Network, out: Output, batch: Batch, j: int) -> tuple[jax.Array, jax.Array]:
    """``text_labels`` of ``_step``."""
    tokens, counted = _text.label(batch, j + 2, j)
    return place_of(network.ids, tokens, out.logits.shape[-1]), counted


def _weights(batch: Batch, steps: int) -> dict[str, jax.Array]:
    """f32[] each: the number of labels of the loss, and of every metric of ``loss``."""
    counts = [_text.label(batch, j + 2, j)[1].sum().astype(jnp.float32) for j in range(steps)]
    whole = _text.number_of_labels(batch, steps).astype(jnp.float32)
    weights: dict[str, jax.Array] = dict.fromkeys(("loss", "scale", "uniform"), whole)
    for depth, count in enumerate(counts, 1):
        weights |= {f"agreement_{depth}": count, f"alpha_{depth}": count}
    return weights


def _noisy(network: Network, out: Output, noise: float, key: jax.Array) -> Output:
    """The target's output with noise on the features that the network reads."""
    if not noise:
        return out

    def add(place: int, x: jax.Array) -> jax.Array:
        own = jax.random.fold_in(key, place)
        return x + jax.random.uniform(own, x.shape, x.dtype, -noise, noise)

    if not network.taps:
        return out._replace(hidden=add(0, out.hidden))
    return out._replace(taps=tuple(add(place, x) for place, x in enumerate(out.taps)))


def _labels(
    network: Network, terms: _Terms, in_vocabulary: bool, out: Output, count: jax.Array
) -> _Labels:
    logits, best, ids = gather(network.ids, out.logits), sampling.argmax(out.logits), network.ids
    inside = jnp.exp(jax.nn.logsumexp(logits, -1) - jax.nn.logsumexp(out.logits, -1))
    best = place_of(ids, best, out.logits.shape[-1])
    kept = best >= 0 if in_vocabulary else jnp.ones_like(best, bool)
    top = (jnp.zeros((*best.shape, 0)), jnp.zeros((*best.shape, 0), jnp.int32))
    if terms.top_k_weight:
        values, places = sampling.top(logits, terms.top_k)
        top = jnp.exp(values - jax.nn.logsumexp(logits, -1, keepdims=True)), places
    guess = terms.top_k_weight * top[0].sum(-1) * jnp.log(logits.shape[-1])
    if terms.weight:
        # [V_d] only: XLA would fold a constant of the whole shape, slowly.
        guess += terms.weight * terms.divergence(logits, jnp.zeros(logits.shape[-1]))
    zero = jnp.zeros_like(guess)
    if terms.feature:
        zero += terms.feature * _smooth_l1(out.hidden)
    return _Labels(
        jnp.maximum(count, 1), out.hidden, logits, inside, best, kept, top, (zero, guess)
    )


def _step(
    network: Network,
    text: _columns.Text,
    labels: _Labels,
    terms: _Terms,
    text_labels: tuple[jax.Array, jax.Array],
    j: int,
    params: ModelParams,
    features: jax.Array,
    before: tuple,
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array, Any]:
    """(loss of step j; its agreement, alpha, scale and uniform; the next feature; its block).

    ``text_labels`` are the places of the text's tokens in the draft vocabulary i32[B,T], -1 for
    others, and the columns that have a label bool[B,T].
    """
    tokens, counted = text_labels
    size = features.shape[1]
    at = Bound(_text.ahead, by=j + 1, size=size)
    fed, own = _columns.step(network, text, j, params, features, before)
    logits, target_logits = network.logits(params, fed.hidden), at(labels.logits)
    kept = counted & at(labels.kept)
    value = _weighted(terms, logits, target_logits, (at(labels.top[0]), at(labels.top[1])))
    value = jnp.where(kept, value, 0)
    if terms.feature:
        difference = fed.feature - at(labels.features)
        value += jnp.where(counted, terms.feature * _smooth_l1(difference), 0)
    known = counted & (tokens >= 0)
    if terms.ce:
        value += jnp.where(known, terms.ce * _cross_entropy(logits, tokens), 0)
    number = jnp.maximum(counted.sum(), 1)
    shared = jnp.minimum(
        jax.nn.softmax(target_logits) * at(labels.inside)[..., None], jax.nn.softmax(logits)
    ).sum(-1)
    uniform = [at(part) for part in labels.uniform]
    rest = (terms.weight + terms.top_k_weight) * kept.sum()
    sizes = {
        "agreement": (counted & (sampling.argmax(logits) == at(labels.best))).sum() / number,
        "alpha": jnp.where(counted, shared, 0).sum() / number,
        "scale": (terms.feature * counted.sum() + rest + terms.ce * known.sum()) / labels.first,
        "uniform": (
            (jnp.where(counted, uniform[0], 0) + jnp.where(kept, uniform[1], 0)).sum()
            + terms.ce * jnp.log(logits.shape[-1]) * known.sum()
        )
        / labels.first,
    }
    feature = jax.lax.stop_gradient(fed.feature) if terms.detach else fed.feature
    return value.sum() / labels.first, sizes, feature, own


def _weighted(
    terms: _Terms, logits: jax.Array, target_logits: jax.Array, top: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """f[B,T]: both terms that compare distributions."""
    value = jnp.zeros(logits.shape[:-1], logits.dtype)
    if terms.weight:
        value += terms.weight * terms.divergence(target_logits, logits)
    if terms.top_k_weight:
        probs, places = top
        log_probs = jnp.take_along_axis(logits, places, -1)
        log_probs -= jax.nn.logsumexp(logits, -1, keepdims=True)
        value -= terms.top_k_weight * (probs * log_probs).sum(-1)
    return value


def _cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """f[B,T]: of the tokens at these places; 0 and more."""
    own = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - own


def _smooth_l1(x: jax.Array) -> jax.Array:
    """[B,T,E] -> f[B,T]: the mean over the width, in float32 at least."""
    size = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return jnp.where(size < 1, size * size / 2, size - 0.5).mean(-1)
