"""The drafters that experiments/trained_drafters trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# The configurations that train a draft model, not heads.
DRAFT_MODELS = ("pretrain", "distill", "pard")
HEADS = {"drafter.heads": 4}
# Drafters whose configurations have other names.
METHODS = {"mtp": "mtp_module", "mtp_heads": "mtp", "p_eagle": "eagle3"}


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

# Drafts of 7 tokens, as in the papers of drafters that draft several tokens in one pass.
LENGTH = 7
_CHAIN = {"drafter.gamma": LENGTH}
_UNROLLED = _CHAIN | {"loss.steps": LENGTH}
LONG: dict[str, Trained] = {
    "eagle, 7": Trained("eagle", _CHAIN, generated=True),
    "eagle3, 7": Trained("eagle3", _UNROLLED, generated=True),
    "p_eagle": Trained("p_eagle", {"drafter.parallel": LENGTH}, generated=True),
    # Blocks of two tokens, so six and not seven.
    "falcon": Trained("falcon", {"drafter.gamma": LENGTH - 1}, generated=True),
    "medusa, 7": Trained("medusa", {"drafter.heads": LENGTH}, generated=True),
    "hydra, 7": Trained("hydra", {"drafter.heads": LENGTH}, generated=True),
    "mtp": Trained("mtp_heads", {"drafter.heads": LENGTH}, generated=True),
    "mtp_module": Trained("mtp", _UNROLLED, generated=True),
    "mtp_module, one step": Trained("mtp", _CHAIN | {"loss.steps": 1}, generated=True),
    "mtp_module, two modules": Trained("mtp:2", _CHAIN, generated=True),
    **{
        name: Trained(f"block_head:{name}", generated=True)
        for name in ("dflash", "dspark", "jetspec", "domino", "dflare", "dflash2", "xpress")
    },
    "forward_kl, 7": Trained("distill", generated=True),
    "pard": Trained("pard", {"drafter.gamma": LENGTH}, generated=True, init="forward_kl, 7"),
}
TRAINED |= LONG
# The configurations of drafters whose probs of a depth do not depend on the tokens before it.
MARGINAL = ("block_head", "pard", "p_eagle", "medusa", "mtp_heads")
# Forms of ``block_head`` whose logits depend on the draft's tokens before them. Their trees
# are dynamic: for "dspark" that is PCTree (2608.02123).
CORRECTED = ("dspark", "domino", "dflash2", "xpress")


def _drafts(config: str, form: str = "", gamma: int = 4) -> dict[str, dict[str, Any]]:
    """What follows the name in a label -> the keys of the drafter."""
    sampled = {"siblings": "without_replacement"}
    tree = {"nodes": 12, "accept": "deterministic"}
    if config == "redrafter":
        beam = {"tree": "beam", "top_k": 4, "depth": 4, "accept": "deterministic"}
        chain = {"tree": "chain:4"}
        return {"": chain, ", sampled": chain | sampled, ", beam": beam}
    if gamma > 4:
        marginal = config in MARGINAL and form not in CORRECTED
        shape = {"tree": "best_first" if marginal else "dynamic", "depth": gamma}
        tree = {"nodes": 16, "accept": "deterministic", **shape}
        if not marginal:
            tree["top_k"] = 4
        # Heads draft a chain of all of them.
        chain = {} if config in ("medusa", "hydra", "mtp_heads") else {"gamma": gamma}
        first = chain | ({"siblings": "top_k"} if chain else {})
        return {"": first, ", sampled": chain | sampled, ", tree": tree}
    if config in ("eagle", "eagle3"):
        dynamic = {**tree, "tree": "dynamic", "depth": 4, "top_k": 4}
        return {
            "": {"gamma": 4},
            ", sampled": {"gamma": 4, **sampled},
            ", fixed tree": {"tree": "search", **tree},
            ", dynamic tree": dynamic,
        }
    plain = {"": {}, ", sampled": sampled}
    return plain | ({", tree": tree} if config in ("medusa", "hydra") else {})


def _length(name: str) -> int:
    """Tokens of a drafter's chains."""
    return 4 if name not in LONG else LENGTH - 1 if name == "falcon" else LENGTH


def methods(workdirs: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Label -> drafter keys of the bench, for drafters with these workdirs, and prompt lookup."""
    result: dict[str, dict[str, Any]] = {
        "prompt_lookup": {"name": "prompt_lookup", "gamma": 4, "accept": "chain"}
    }
    for name, workdir in workdirs.items():
        config, _, form = TRAINED[name].config.partition(":")
        gamma = _length(name)
        keys = {"model": str(workdir), "accept": "chain"}
        if config in ("pretrain", "distill"):
            result[name] = {"name": "draft_model", "gamma": gamma, **keys}
            continue
        drafter = METHODS.get(config, config)
        for label, own in _drafts(config, form, gamma).items():
            result[f"{name}{label}"] = {"name": drafter, **keys, **own}
    return result
