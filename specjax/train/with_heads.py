"""The loss of a target that is trained together with heads for multi-token prediction.

    L = L_main + (weight / D) * (L_1 + ... + L_D)

L_main is the cross-entropy of the target with the next token, and L_k that of head or module k with
the token k further. DeepSeek-V3 (2412.19437, equations 24 and 25): weight 0.3, later 0.1. Gloeckle
et al. 2024 (2404.19737, equation 2): all losses have the same weight, so the weight is D.

The parameters are {"target", "draft"}. Embeddings, last norm and LM head are the target's, and get
gradients from all terms. The logits of one head at a time are in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import lm
from specjax.train import objectives, stages
from specjax.train.objectives import Loss
from specjax.train.stages import Stages
from specjax.types import LM, Drafter, Features


def joint(
    target: LM,
    drafter: Drafter,
    heads: int,
    weight: Stages,
    steps: int,
    keys: Mapping[str, Any] | None = None,
) -> Loss:
    """L, per label of the first depth; metrics as in ``objectives.joint_loss``.

    Each L_k is divided by the number of labels of L_1.

    Args:
        target: the model.
        drafter: its heads or modules, ``Drafter.training``.
        heads: D, how many losses the heads' one is the sum of.
        weight: of the mean over heads; batches without a number have its last value.
        steps: of the run.
        keys: of the heads' loss.
    """
    assert drafter.training is not None and drafter.training.loss is not None
    heads_loss, tapped = drafter.training.loss, drafter.tapped(target)

    def loss(params, target_params, batch, key):
        del target_params
        segments = None if batch.segments is None else batch.segments[:, :-1]
        out = lm.forward(tapped, params["target"], batch.tokens[:, :-1], segments)
        labels, mask = objectives.labels_of(batch)
        own = objectives.cross_entropy(out.logits, labels, mask)
        # The heads read this pass, so there is one gradient of it.
        given = batch.replace(features=Features(out.hidden, tuple(out.taps)))
        value, metrics = heads_loss(params["draft"], params["target"], given, key, **(keys or {}))
        counts = metrics.pop("weight")
        if not isinstance(counts, dict):
            counts = dict.fromkeys(("loss", *metrics), counts)
        counts |= {"heads": counts["loss"], "language": objectives.count_of(mask, labels)}
        now = stages.last(weight)
        if batch.step is not None:
            now = stages.at(weight, batch.step[0], steps)
        terms = {"language": own, "heads": now / heads * value}
        more = {"heads": value, "language": own, "terms": terms, "weight": counts}
        return terms["language"] + terms["heads"], {**metrics, **more}

    return loss


def of_target(loss: Loss) -> Loss:
    """L_main alone as the value of a joint loss, with its metrics: for held-out text."""

    def own(params, target_params, batch, key):
        metrics: dict[str, Any] = dict(loss(params, target_params, batch, key)[1])
        del metrics["terms"]
        counts = metrics.pop("weight")
        value = metrics.pop("language")
        return value, {**metrics, "weight": counts | {"loss": counts["language"]}}

    return own
