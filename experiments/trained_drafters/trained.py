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
    share: float = 1.0  # of the prompts that the target continues, for text that it generated


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

# Draft networks over the target's features: the methods, each without one of its parts, and with
# less text.
CHAIN = {"drafter.gamma": 4}  # of the forecasts in training
NETWORKS: dict[str, Trained] = {
    "redrafter": Trained("redrafter", generated=True),
    "eagle": Trained("eagle", CHAIN, generated=True),
    "eagle, no shift": Trained("eagle", CHAIN | {"drafter.shift": 0}, generated=True),
    "eagle, no noise": Trained("eagle", CHAIN | {"loss.noise": 0.0}, generated=True),
    "hass": Trained("eagle:hass", CHAIN, generated=True),
    "eagle3": Trained("eagle3", CHAIN, generated=True),
    "eagle3, one step": Trained("eagle3", CHAIN | {"loss.steps": 1}, generated=True),
    **{
        f"{name}, {label} of the text": Trained(name, CHAIN, generated=True, share=share)
        for name in ("eagle", "eagle3")
        for label, share in (("1/16", 1 / 16), ("1/4", 1 / 4))
    },
}
TRAINED |= NETWORKS


def _drafts(config: str) -> dict[str, dict[str, Any]]:
    """What follows the name in a label -> the keys of the drafter."""
    sampled = {"siblings": "without_replacement"}
    if config == "redrafter":
        beam = {"tree": "beam", "top_k": 4, "depth": 4, "accept": "deterministic"}
        chain = {"tree": "chain:4"}
        return {"": chain, ", sampled": chain | sampled, ", beam": beam}
    tree = {"nodes": 12, "accept": "deterministic"}
    if config in ("eagle", "eagle3"):
        dynamic = {"tree": "dynamic", "nodes": 12, "depth": 4, "top_k": 4}
        return {
            "": {"gamma": 4},
            ", sampled": {"gamma": 4, **sampled},
            ", fixed tree": {"tree": "search", **tree},
            ", dynamic tree": {**dynamic, "accept": "deterministic"},
        }
    plain = {"": {}, ", sampled": sampled}
    return plain | ({", tree": tree} if config in ("medusa", "hydra") else {})


def methods(workdirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Label -> drafter keys of the bench, for drafters with these workdirs, and prompt lookup."""
    result: dict[str, dict[str, Any]] = {
        "prompt_lookup": {"name": "prompt_lookup", "gamma": 4, "accept": "chain"}
    }
    for name, workdir in workdirs.items():
        config = TRAINED[name].config.partition(":")[0]
        keys = {"model": str(workdir), "accept": "chain"}
        if config in DRAFT_MODELS:
            result[name] = {"name": "draft_model", "gamma": 4, **keys}
            continue
        for label, own in _drafts(config).items():
            result[f"{name}{label}"] = {"name": config, **keys, **own}
    return result
