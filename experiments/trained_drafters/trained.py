"""The drafters that experiments/trained_drafters trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

DRAFT_MODELS = ("pretrain", "distill")  # the configurations that train a draft model, not heads
HEADS = {"drafter.heads": 4}


class Trained(NamedTuple):
    """How one drafter is trained."""

    config: str  # configs/<config>.py
    keys: Mapping[str, Any] = {}  # never changed
    # Whether it trains on text that the target generated, not on the corpus.
    generated: bool = False
    init: str = ""  # the drafter that it starts from
    rate_divisor: float = 1.0  # of the learning rate of heads


def _distilled(divergence: str) -> dict[str, Trained]:
    """Distillation with one divergence, on text of the corpus, the target, the draft, or both."""
    # The default of configs/distill.py is forward_kl.
    loss = {} if divergence == "forward_kl" else {"loss.divergence": divergence}
    return {
        f"{divergence}, fixed": Trained("distill", loss),
        f"{divergence}, target": Trained("distill", loss, generated=True),
        f"{divergence}, draft": Trained("distill", loss | {"data.on_policy": 1.0}),
        f"{divergence}, mixed": Trained("distill", loss | {"data.on_policy": 0.5}, generated=True),
    }


TRAINED: dict[str, Trained] = {
    "pretrained": Trained("pretrain"),
    **_distilled("forward_kl"),
    **_distilled("reverse_kl"),
    **_distilled("jensen_shannon"),
    **_distilled("total_variation"),
    "bpd": Trained("bpd", HEADS, generated=True),
    "medusa": Trained("medusa", HEADS, generated=True),
    "medusa, fixed": Trained("medusa", HEADS),
    "hydra": Trained("hydra", HEADS, generated=True),
    "mlp_speculator, phase 1": Trained("mlp_speculator", HEADS),
    "mlp_speculator": Trained(
        "mlp_speculator", HEADS, generated=True, init="mlp_speculator, phase 1", rate_divisor=10.0
    ),
}


def methods(workdirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Label -> drafter keys of the bench, for drafters with these workdirs, and prompt lookup."""
    result: dict[str, dict[str, Any]] = {
        "prompt_lookup": {"name": "prompt_lookup", "gamma": 4, "accept": "chain"}
    }
    for name, workdir in workdirs.items():
        config = TRAINED[name].config
        keys = {"model": str(workdir), "accept": "chain"}
        if config in DRAFT_MODELS:
            result[name] = {"name": "draft_model", "gamma": 4, **keys}
            continue
        heads = {"name": config, **keys}
        result[name] = heads
        result[f"{name}, sampled"] = heads | {"siblings": "without_replacement"}
        if config in ("medusa", "hydra"):
            result[f"{name}, tree"] = heads | {"nodes": 12, "accept": "deterministic"}
    return result
