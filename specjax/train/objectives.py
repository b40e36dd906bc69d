"""What training minimises and measures: functions of logits, and the losses of the training loop.

A loss is ``loss(params, target_params, Batch, key) -> (scalar, metrics)``; the metric "weight" is
the number of labels in its mean. A new objective is a new function with this signature; heads
define their own (``Training.loss``). If metrics have other labels than the loss, "weight" is a
dict: the number of labels of "loss" and of every metric. So each is averaged over its own labels,
however a batch is divided.

A loss that is a sum of means over different labels has them in the metric "terms", {name: f32[]},
whose sum is the scalar; "weight" is then a dict too, which has the number of labels of every term.

Two metrics explain the size of a loss. "uniform" is the loss of a guess that gives all tokens the
same probability (log V for a cross-entropy, V tokens in the vocabulary). "scale" is what the loss
is divided by to be a mean per predicted token; without it the loss is one already. The loss of
heads adds up several tokens per position. In a joint loss both belong to its metric "heads".
``evaluate.mean`` makes "loss_per_token" and "uniform_per_token" of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import declare, divergences
from specjax.declare import key
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import LM, Batch, Drafter, Output

Loss = Callable[[Any, Any, Batch, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


# Keys of the losses of heads that change what is read at random, with the values for text that is
# read as it is.
QUIET = {"noise": 0.0, "dropout": 0.0, "glancing": 0.0, "fall": None, "base": 0.0}
# Arguments of these losses that are no keys of config.loss: the number of all steps, of a loss that
# changes during training, and config.train.remat.
RUN_STEPS, REMAT = "run_steps", "remat"

# --- functions of logits: two distributions, target first ---------------------------------------


def cross_entropy(logits: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean negative log-likelihood in nats per token -> f32[].

    logits f32[B,T,V], labels i32[B,T], mask bool[B,T].
    """
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return _mean(jax.nn.logsumexp(logits, axis=-1) - picked, mask)


def _averaged(values: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The mean of a function of ``specjax.divergences``, with its name and documentation."""

    @functools.wraps(values)
    def mean(target_logits, draft_logits, mask=None, **keys):
        return _mean(values(target_logits, draft_logits, **keys), mask)

    return mean


# Name -> mean of the divergence over positions: (target f32[B,T,V], draft f32[B,T,V], mask
# bool[B,T] or None, **keys) -> f32[].
DIVERGENCES = {name: _averaged(values) for name, values in divergences.DIVERGENCES.items()}
overlap = _averaged(divergences.overlap)
agreement = _averaged(divergences.agreement)


# --- losses of a batch --------------------------------------------------------------------------


def pretrain_loss(model: LM) -> Loss:
    """Next-token cross-entropy of ``model``; ``target_params`` are ignored."""

    def loss(params, target_params, batch, key):
        labels, mask = labels_of(batch)
        logits = output_of(model, params, batch).logits
        value = cross_entropy(logits, labels, mask)
        uniform = jnp.log(jnp.float32(logits.shape[-1]))
        return value, {"uniform": uniform, "weight": count_of(mask, labels)}

    return loss


class DistillKeys(declare.Keys, owner="loss."):
    """The keys of the loss of draft models."""

    divergence: str = key(
        "forward_kl",
        f"from the target's distribution, one of {divergences.NAMES}",
        choices=tuple(DIVERGENCES),
    )
    beta: float = key(0.5, "of jensen_shannon", above=0, below=1)
    temperature: float = key(
        1.0,
        "of both models' probs, and of text written by the draft; online: that of decoding",
        above=0,
    )

    def check(self) -> None:
        """Raises UserError for a key without effect."""
        if self.divergence != "jensen_shannon" and self.beta != 0.5:
            raise UserError(
                f"loss.beta is {self.beta}, but only jensen_shannon has it; leave it out with "
                f"{self.divergence}"
            )


@declare.method(DistillKeys)
def distill_loss(target: LM, draft: LM, keys: DistillKeys) -> Loss:
    """A divergence from ``target`` to ``draft`` along the text of the batch.

    Metrics: alpha and agreement. ``temperature`` divides the logits of both first: give the one of
    later decoding. The text, from any source, is a constant: no gradient passes through its
    sampling. DistillSpec, Zhou et al. 2023 (2310.08461), algorithm 1. Raises UserError.
    """
    temperature = keys.temperature
    more = {"beta": keys.beta} if keys.divergence == "jensen_shannon" else {}
    measure = functools.partial(DIVERGENCES[keys.divergence], **more)

    def loss(params, target_params, batch, key):
        labels, mask = labels_of(batch)
        theirs = output_of(target, target_params, batch).logits
        theirs = jax.lax.stop_gradient(theirs) / temperature
        ours = output_of(draft, params, batch).logits / temperature
        metrics = {
            "alpha": overlap(theirs, ours, mask),
            "agreement": agreement(theirs, ours, mask),
            # [V] only: XLA would fold a constant of the whole shape, slowly.
            "uniform": measure(theirs, jnp.zeros(ours.shape[-1]), mask),
        }
        return measure(theirs, ours, mask), {**metrics, "weight": count_of(mask, labels)}

    return loss


class JointKeys(declare.Keys, owner="loss."):
    """The keys of a joint loss beside those of the heads' loss."""

    heads: float = key(0.2, "weight of the heads' loss", above=0)
    language: str = key(
        "ce", 'loss of the target: on the text, or "kl" from its start', choices=("ce", "kl")
    )


def joint_loss(
    target: LM,
    drafter: Drafter,
    *,
    heads: float = JointKeys.heads,
    language: str = JointKeys.language,
    **weights: Any,
) -> Loss:
    """Language loss of the target plus ``heads`` times the loss of its heads, both trained.

    For Medusa-2 and fine-tuned blockwise parallel decoding. ``params`` is {"target", "draft"};
    gradients of the heads' loss reach the target. ``language`` "ce" is next-token cross-entropy,
    "kl" the divergence from the target before training (``target_params``), for text that it wrote
    itself. Each of the two is a mean over its own labels. ``weights`` are keys of the heads' loss.
    Cai et al. 2024 (2401.10774), sections 2.2.2 and 2.3.2. Raises UserError.
    """
    JointKeys(heads=heads, language=language)  # checks them
    assert drafter.training is not None and drafter.training.loss is not None
    heads_loss = drafter.training.loss

    def loss(params, target_params, batch, key):
        labels, mask = labels_of(batch)
        ours = output_of(target, params["target"], batch).logits
        if language == "ce":
            own = cross_entropy(ours, labels, mask)
        else:
            before = output_of(target, target_params, batch).logits
            own = DIVERGENCES["forward_kl"](jax.lax.stop_gradient(before), ours, mask)
        value, metrics = heads_loss(params["draft"], params["target"], batch, key, **weights)
        return with_language(value, metrics, heads, own, count_of(mask, labels))

    return loss


def with_language(
    value: jax.Array, metrics: dict, factor: Any, own: jax.Array, labels: jax.Array
) -> tuple[jax.Array, dict]:
    """A language loss ``own`` over so many labels, plus ``factor`` times the loss of heads."""
    counts = metrics.pop("weight", jnp.float32(1))
    if not isinstance(counts, dict):
        counts = dict.fromkeys(("loss", *metrics), counts)
    counts |= {"heads": counts["loss"], "language": labels}
    terms = {"language": own, "heads": factor * value}
    more = {"heads": value, "language": own, "terms": terms, "weight": counts}
    return terms["language"] + terms["heads"], {**metrics, **more}


def keywords(function: Callable) -> dict[str, inspect.Parameter]:
    """The arguments of a loss that are given by name alone: its keys."""
    parameters = inspect.signature(function).parameters.items()
    return {name: each for name, each in parameters if each.kind is each.KEYWORD_ONLY}


def check_loss_keys(keys: Mapping[str, Any], known: Any, what: str) -> None:
    """Raises UserError for a key of ``config.loss`` that is not in ``known``."""
    for name in keys:
        if name not in known:
            raise UserError(f"config.loss.{name} is not a key of the loss of {what}; leave it out")


def output_of(model: LM, params: Any, batch: Batch) -> Output:
    """What ``model`` gives for all tokens but the last, each inside its document."""
    segments = None if batch.segments is None else batch.segments[:, :-1]
    return lm.forward(model, params, batch.tokens[:, :-1], segments)


def labels_of(batch: Batch) -> tuple[jax.Array, jax.Array | None]:
    """i32[B,T], and which of them count, bool[B,T] or None for all.

    Those count that may be labels and follow a token of their own document.
    """
    mask = None if batch.labelled is None else batch.labelled[:, 1:]
    if batch.segments is not None:
        same = batch.segments[:, 1:] == batch.segments[:, :-1]
        mask = same if mask is None else mask & same
    return batch.tokens[:, 1:], mask


def count_of(mask: jax.Array | None, labels: jax.Array) -> jax.Array:
    """f32[]: how many labels count; arguments as ``labels_of`` returns them."""
    return jnp.float32(labels.size) if mask is None else mask.sum().astype(jnp.float32)


def _mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return values.mean()
    return jnp.where(mask, values, 0).sum() / jnp.maximum(mask.sum(), 1)


def boosted(loss: Loss, earlier: Sequence[LM]) -> Loss:
    """The loss over the labels that no earlier model predicts: boost-tuning.

    SpecInfer (Miao et al. 2024, 2305.09781, section 3): several small models are trained one after
    the other, each on the tokens that none of the models before it predicts, so that together they
    cover more of the target than copies of one model.

    ``target_params`` are {"target": those of the loss, "earlier": those of the models}. A model
    predicts a label if it gives it the highest probability. Further metric: "missed", the share of
    labels that are left.
    """

    def left(params: Any, target_params: Any, batch: Batch, key: jax.Array):
        known = predicted(earlier, target_params["earlier"], batch)
        labelled = jnp.ones(batch.tokens.shape, bool) if batch.labelled is None else batch.labelled
        # The first token is never a label.
        open_ = labelled.at[:, 1:].set(labelled[:, 1:] & ~known)
        value, metrics = loss(params, target_params["target"], batch.replace(labelled=open_), key)
        total = labelled[:, 1:].sum().astype(jnp.float32)
        labels = metrics.pop("weight")
        weight = dict.fromkeys(("loss", *metrics), labels) | {"missed": total}
        missed = open_[:, 1:].sum() / jnp.maximum(total, 1)
        return value, {**metrics, "missed": missed, "weight": weight}

    return left


def predicted(models: Sequence[LM], params: Sequence[Any], batch: Batch) -> jax.Array:
    """bool[B,T]: labels to which one of the models gives the highest probability."""
    found = jnp.zeros(batch.tokens[:, 1:].shape, bool)
    for model, own in zip(models, params, strict=True):
        found |= jnp.argmax(output_of(model, own, batch).logits, -1) == batch.tokens[:, 1:]
    return jax.lax.stop_gradient(found)
