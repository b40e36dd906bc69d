"""The training of draft networks over features: EAGLE-1, HASS, EAGLE-3 and modules in sequence.

A draft begins at every place of the text, and all drafts are computed in one pass. Column t is
the draft that begins with token t + 1 pending, where each drafted token is the text's own. Step 0
feeds slot t with the target's feature of token t. Step j, j from 1, feeds the position t + j with
token t + j + 1 and what the network computed for the same column in step j - 1. It attends to the
slots up to t of step 0 and to the steps 1..j of its own column, which is what a drafter has in its
cache and its block after j draft tokens. Step j predicts token t + j + 2.

So one pass over T slots for each step serves all places: the training-time test of EAGLE-3 (Li et
al. 2025, 2503.01840, section 3.2) and the harmonised context alignment of HASS (Zhang et al. 2024,
2408.15766, section 3.2), which writes the same drafts with shifted columns and without gradients
between the steps. EAGLE-1 has step 0 only.

With ``LossKeys.places`` the drafts of a step behind the last module are those of some columns only.
The text's own slots are always computed, because later columns attend to them.

A network of n modules in sequence has one for each of the steps 0..n-1: module k reads at slot t
what module k - 1 computed there, and its own slots up to t. The last one then continues as above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import declare, sampling, tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.declare import key
from specjax.divergences import DIVERGENCES, NAMES
from specjax.drafters.growth import Plan
from specjax.drafters.heads import _along_text, _depth_loss
from specjax.drafters.heads._along_text import Drafts, Texts
from specjax.drafters.heads._vocabulary import gather, place_of
from specjax.drafters.heads.eagle._network import Fed, Network
from specjax.errors import UserError
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Output, Training

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


def training(network: Network, target: LM, plan: Plan, defaults: Mapping[str, Any]) -> Training:
    """The training part of a drafter that grows this network in the way of ``plan``.

    ``defaults`` are the method's values for ``LossKeys``.
    """
    if network.shape.taps:
        target = target.with_taps(network.shape.taps)
    modules = network.shape.modules
    early = Bound(_along_text.among_first, modules - 2) if modules > 2 else None
    return _along_text.training(
        Bound(loss, network, target, **defaults),
        Bound(type(network).start, network),
        Bound(along, network, target),
        plan,
        network.facts,
        early=early,
    )


# The output of the newest step, and the keys and values of all.
State = tuple[Array, tuple[KVBlock, ...]]


class Text(NamedTuple):
    """What all steps read."""

    tokens: Array  # i32[B,T+1]
    layout: Layout  # of the T slots of step 0
    places: Array | None = None  # i32[B,P] the columns that are drafted; None: all T


def text(batch: Batch, places: Array | None = None) -> Text:
    """The tokens of a batch, and how its slots attend inside their documents."""
    return Text(batch.tokens, _along_text.layout_of(batch), places)


def step(
    network: Network,
    text: Text,
    number: int,
    params: ModelParams,
    features: Array,
    before: tuple[KVBlock, ...],
) -> tuple[Fed, KVBlock]:
    """Step ``number`` of all columns: what the network computes, and its keys and values.

    ``features`` [B,T,D] are the target's (``Network.read``) for step 0, then ``Fed.feature`` of the
    step before. ``before`` has the keys and values of all steps before. The first step of each
    module computes all T slots, the steps behind the last module P columns.
    """
    rows, size = text.layout.depth.shape
    tokens = _along_text.ahead(text.tokens, number + network.shape.shift, size)
    module = min(number, network.shape.modules - 1)
    again = number - module  # steps of this module that are in ``before``
    layout = text.layout
    if again:
        layout = tree.columns(text.layout, again, text.places)
        tokens, features = (_at_columns(text, x) for x in (tokens, features))
    block, cache = tree.join(*before[module:]) if again else None, network.init_cache(rows, 0)
    return network.apply(params, tokens, features, cache, layout, block, module=module)


def _at_columns(text: Text, values: Array) -> Array:
    """Values [B,T,...] of all slots at the columns that are drafted; those of columns unchanged."""
    if text.places is None or values.shape[1] != text.layout.depth.shape[1]:
        return values
    return _along_text.at(values, text.places)


def along(network: Network, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """With ``network`` and ``target`` bound, an ``_along_text.Along``."""
    out = _along_text.output(target, params.target, batch)
    return _drafts(network, params, batch, out, network.read(params, out)).along(depth)


def _drafts(
    network: Network,
    params: ModelParams,
    batch: Batch,
    out: Output,
    features: Array,
    places: tuple[Array, ...] | None = None,
) -> Drafts:
    """The drafts of the columns ``places``, one entry per step; None: of all columns.

    ``features`` [B,T,D] are those that step 0 reads.
    """
    columns = Bound(_logits, network, text(batch, None if places is None else places[0]), params)
    return Drafts(batch, out.logits, columns, (features, ()), places, network.ids)


def _logits(
    network: Network, text: Text, params: ModelParams, state: State, number: int
) -> tuple[Array, State]:
    fed, block = step(network, text, number, params, *state)
    return network.logits(params, _at_columns(text, fed.hidden)), (fed.feature, (*state[1], block))


class LossKeys(declare.Keys, owner="loss."):
    """The keys of the loss."""

    steps: int = key(1, "steps of the draft that are unrolled", least=1)
    decay: float = key(1.0, "factor on the loss from each step to the next", least=0)
    detach: bool = key(False, "whether steps pass no gradient to the one before")
    feature: float = key(
        1.0, "weight of smooth L1 (beta 1, mean over the width) from the target's feature", least=0
    )
    divergence: str = _depth_loss.divergence_key(
        "weight",
        f"from the target's distribution, one of {NAMES}; forward KL has the gradient of the "
        "cross-entropy with soft labels",
    )
    weight: float = key(0.1, "weight of the divergence", least=0)
    ce: float = key(0.0, "weight of the cross-entropy with the text", least=0)
    top_k: int = key(
        10,
        "how many of the target's best tokens the next term is about",
        least=1,
        needs="top_k_weight",
    )
    top_k_weight: float = key(0.0, "weight of -sum p(x) log q(x) over the best tokens x", least=0)
    places: int = key(
        0,
        "columns of each row that are drafted: first those with a label, at random; 0: all",
        least=0,
    )
    noise: float = key(
        0.1,
        "uniform in [-noise, noise], added to the target's features that step 0 reads, independent "
        "of the length of the text",
        least=0,
    )
    remat: bool = key(False, "recompute each step in the backward pass")
    in_vocabulary: bool = key(
        True,
        "whether the divergence and the term of the best tokens leave out positions at which the "
        "target prefers a token outside the draft vocabulary",
    )

    def check(self) -> None:
        """Raises UserError for values without effect."""
        if not (self.feature or self.weight or self.ce or self.top_k_weight):
            raise UserError(
                "loss.feature, loss.weight, loss.ce and loss.top_k_weight are all 0; make one of "
                "them positive"
            )
        if self.steps == 1:
            self.refuse(("detach",), "on one step", "raise loss.steps, or leave it out")


class _Labels(NamedTuple):
    """What the steps are compared with; entry t belongs to feature t. All are constants."""

    features: Array  # [B,T,E] the target's
    logits: Array  # f[B,T,V_d] the target's, of the draft vocabulary
    inside: Array  # f[B,T] the target's probability of the draft vocabulary
    best: Array  # i32[B,T] place of the target's preferred token in the draft vocabulary, or -1
    kept: Array  # bool[B,T] whether ``logits`` are to be learnt
    guess: Array | None  # f[B,T] the divergence of a uniform guess
    top: tuple[Array, Array] | None  # f[B,T,K], i32[B,T,K]: the best probs, their places


@declare.method(LossKeys)
def loss(
    network: Network,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per labelled position, and metrics.

    The sum over steps j of decay^j times

        feature * smooth L1 + weight * divergence + ce * cross-entropy
        + top_k_weight * -sum p(x) log q(x) over the best tokens x

    of ``LossKeys``. Distributions are those over the draft vocabulary: ``ce`` leaves out labels
    outside it. Every step is divided by the number of labels of the first (with ``Batch.depths``:
    of all), so that micro-batches add up. Metrics for each depth d from 1: ``agreement_<d>`` and
    ``alpha_<d>``, the acceptance rates at temperature 0 and 1. ``scale`` and ``uniform`` as in
    ``_depth_loss``; the uniform guess has the feature 0. The labels get no gradient
    (``stop_gradient``); the same features as inputs of the network do.

    Raises:
        UserError: values out of range or without effect, a text that is too short.
    """
    _check(network, target, batch, keys)
    pair, batch = ModelParams(target_params, params), _along_text.of_output(target, batch)
    out = _along_text.output(target, target_params, batch)
    places = None
    if 0 < keys.places < batch.tokens.shape[1] - 1:
        own, key = jax.random.split(key)
        places = (_along_text.random_places(own, batch, 2, keys.steps, keys.places),) * keys.steps
    features = network.read(pair, _noisy(network, out, keys.noise, key))
    drafts = _drafts(network, pair, batch, out, features, places)
    number = drafts.number_of_labels(keys.steps)
    teacher = jax.lax.stop_gradient(_teacher(network, target, target_params, batch, out))
    labels = _labels(network, keys, jax.lax.stop_gradient(out.hidden), teacher)
    first, size = jnp.maximum(number, 1), features.shape[1]

    def term(state: Any, j: int) -> tuple[Array, dict[str, Array], Any]:
        logits, (feature, blocks) = drafts.step(state, j)
        tokens, counted = drafts.labels(j)
        tokens = place_of(network.ids, tokens, out.logits.shape[-1])
        now = jax.tree.map(Bound(drafts.later, j + 1, j), labels)
        own = drafts.at(feature, j) if feature.shape[1] == size else feature
        value, sizes = _compare(keys, now, first, logits, own, tokens, counted)
        feature = jax.lax.stop_gradient(feature) if keys.detach else feature
        return value, sizes, (feature, blocks)

    # The scores of a place: those of all heads.
    scores = network.shape.config.num_heads * features.shape[1]
    again = _depth_loss.recomputes(drafts, keys.steps, keys.remat, scores)
    return _depth_loss.fold(term, drafts.state, keys.steps, keys.decay, number, again)


def _check(network: Network, target: LM, batch: Batch, keys: LossKeys) -> None:
    """Raises UserError for keys that do not fit the network, and for a text that is too short."""
    if not keys.in_vocabulary and network.ids is None:
        raise UserError(
            "loss.in_vocabulary is False, and all tokens can be drafted; give "
            "drafter.draft_vocab, or leave loss.in_vocabulary out"
        )
    if keys.feature and (network.shape.taps or network.width != target.width):
        raise UserError(
            f"loss.feature is {keys.feature}, and {network.name} does not predict the "
            "target's features; leave it 0"
        )
    if keys.steps < network.shape.modules:
        raise UserError(
            f"loss.steps is {keys.steps}, and {network.name} has {network.shape.modules} modules; "
            "give one step for each, or more"
        )
    width = target.vocab_size if network.ids is None else len(network.ids)
    if keys.top_k_weight and keys.top_k > width:
        raise UserError(
            f"loss.top_k is {keys.top_k} and the draft vocabulary has {width} tokens; it must "
            f"be at most {width}"
        )
    least = keys.steps + 1
    why = f"step {keys.steps} of a draft predicts {least} tokens ahead"
    _along_text.check_length(batch, least, why, ", or lower loss.steps")


def _noisy(network: Network, out: Output, noise: float, key: Array) -> Output:
    """The target's output with noise on the features that the network reads."""
    if not noise:
        return out

    def add(place: int, x: Array) -> Array:
        own = jax.random.fold_in(key, place)
        return x + jax.random.uniform(own, x.shape, x.dtype, -noise, noise)

    if not network.shape.taps:
        return out._replace(hidden=add(0, out.hidden))
    return out._replace(taps=tuple(add(place, x) for place, x in enumerate(out.taps)))


def _teacher(
    network: Network, target: LM, params: Any, batch: Batch, out: Output
) -> tuple[Array, Array, Array]:
    """The target's logits f[B,T,V_d], the log-sum-exp of all, and the place of the best of all.

    The place is that in the draft vocabulary, or -1.
    """
    stored, some = batch.features, target.inside.some_logits
    if stored is None or stored.total is None or network.ids is None or some is None:
        total, best = jax.nn.logsumexp(out.logits, -1), sampling.argmax(out.logits)
        logits = gather(network.ids, out.logits)
        return logits, total, place_of(network.ids, best, target.vocab_size)
    best = place_of(network.ids, jnp.asarray(stored.best), target.vocab_size)
    return some(params, out.hidden, network.ids), stored.total, best


def _labels(
    network: Network, keys: LossKeys, features: Array, teacher: tuple[Array, ...]
) -> _Labels:
    """``teacher`` as of ``_teacher``."""
    logits, every, best = teacher
    total = jax.nn.logsumexp(logits, -1)
    # Stored numbers are of features before they were rounded.
    inside = jnp.exp(jnp.minimum(total - every, 0))
    kept = best >= 0 if keys.in_vocabulary else jnp.ones_like(best, bool)
    guess, top = None, None
    if keys.weight:
        # [V_d] only: XLA would fold a constant of the whole shape, slowly.
        guess = DIVERGENCES[keys.divergence](logits, jnp.zeros(logits.shape[-1]))
    if keys.top_k_weight:
        values, places = sampling.top(logits, keys.top_k)
        top = jnp.exp(values - total[..., None]), places
    return _Labels(features, logits, inside, best, kept, guess, top)


def _terms(
    keys: LossKeys, labels: _Labels, logits: Array, feature: Array, tokens: Array, counted: Array
) -> Iterator[tuple[float, Array, Array, Any]]:
    """Of each term: weight, where it counts bool[B,T], value and that of a uniform guess f[B,T]."""
    kept, log_probs = counted & labels.kept, jax.nn.log_softmax(logits)
    uniform = jnp.log(logits.shape[-1])
    if keys.feature:
        value, guess = smooth_l1(feature - labels.features), smooth_l1(labels.features)
        yield keys.feature, counted, value, guess
    if keys.weight:
        yield keys.weight, kept, DIVERGENCES[keys.divergence](labels.logits, logits), labels.guess
    if labels.top is not None:
        probs, places = labels.top
        drafted = jnp.take_along_axis(log_probs, places, -1)
        yield keys.top_k_weight, kept, -(probs * drafted).sum(-1), uniform * probs.sum(-1)
    if keys.ce:
        drafted = jnp.take_along_axis(log_probs, jnp.maximum(tokens, 0)[..., None], -1)[..., 0]
        yield keys.ce, counted & (tokens >= 0), -drafted, uniform


def _compare(
    keys: LossKeys,
    labels: _Labels,
    first: Array,
    logits: Array,
    feature: Array,
    tokens: Array,
    counted: Array,
) -> tuple[Array, dict[str, Array]]:
    """(loss of a step, divided by ``first``; its agreement, alpha, labels, scale and uniform).

    ``tokens`` are the places of the text's tokens in the draft vocabulary i32[B,T], -1 for others;
    ``counted`` bool[B,T] the columns that have a label. ``labels`` are those of the step.
    """
    total = jnp.zeros(3)
    for weight, where, value, guess in _terms(keys, labels, logits, feature, tokens, counted):
        parts = jnp.stack(jnp.broadcast_arrays(value, 1.0, guess), -1)
        total += weight * jnp.where(where[..., None], parts, 0).sum((0, 1)) / first
    inside = jax.nn.softmax(labels.logits) * labels.inside[..., None]
    shared = jnp.minimum(inside, jax.nn.softmax(logits)).sum(-1)
    return total[0], {
        "agreement": _depth_loss.mean(sampling.argmax(logits) == labels.best, counted),
        "alpha": _depth_loss.mean(shared, counted),
        "labels": counted.sum(),
        "scale": total[1],
        "uniform": total[2],
    }


def smooth_l1(x: Array) -> Array:
    """[B,T,E] -> f[B,T]: the mean over the width, in float32 at least."""
    size = jnp.abs(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    return jnp.where(size < 1, size * size / 2, size - 0.5).mean(-1)
