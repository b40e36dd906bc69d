"""Cases of drafters with trained networks on the target's hidden states."""

from __future__ import annotations

from typing import Any

# Name of the case -> (name of the drafter, its keys); their parameters are random.
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "early_exit layer": ("early_exit", {"exit_layer": 1, "adapter": "layer", "gamma": 2}),
    "early_exit linear": (
        "early_exit",
        {"exit_layer": 1, "adapter": "linear", "head": "own", "nodes": 4, "tree": "dynamic"}
        | {"depth": 2},
    ),
    "medusa": ("medusa", {"heads": 2, "tree": "2x1"}),
    "hydra": (
        "hydra",
        {"heads": 2, "layers": 2, "tree": "2x1", "siblings": "without_replacement"},
    ),
    "mlp_speculator": ("mlp_speculator", {"heads": 2, "inner": 4, "siblings": "iid"}),
    "bpd": ("bpd", {"heads": 2}),
    "redrafter": ("redrafter", {"heads": 2, "layers": 1, "top_k": 2}),
    "redrafter chain": ("redrafter", {"layers": 1, "tree": "chain:2", "siblings": "iid"}),
    "eagle": ("eagle", {"tree": "2x1", "siblings": "without_replacement"}),
    "eagle chain": ("eagle", {"gamma": 2, "siblings": "iid"}),
    "eagle dynamic": ("eagle", {"nodes": 5, "depth": 2, "top_k": 2}),
    "eagle3": ("eagle3", {"nodes": 4, "depth": 2, "top_k": 2, "draft_ids": (0, 2)}),
    "eagle3 chain": (
        "eagle3",
        {"gamma": 2, "siblings": "iid", "control": "threshold:0.4", "norm_output": True},
    ),
    "eagle3 tree": (
        "eagle3",
        {"tree": "2x1", "siblings": "iid", "draft_ids": (0, 2), "fc_norm": True, "layers": 2},
    ),
    "p_eagle": ("eagle3", {"parallel": 2, "layers": 2, "draft_ids": (0, 2), "fc_norm": True}),
    "p_eagle tree": (
        "eagle3",
        {"parallel": 2, "layers": 1, "tree": "best_parents", "nodes": 4, "top_k": 2},
    ),
    "block_head": ("block_head", {"block": 3}),
    # The logits are corrected by the draft's tokens.
    "block_head markov": (
        "block_head",
        {"block": 2, "anchor": True, "correction": "rnn", "rank": 4, "confidence": True}
        | {"tree": "2x1", "siblings": "iid", "control": "calibrated"},
    ),
    "block_head tree": (
        "block_head",
        {"causal": True, "tree": "best_parents", "nodes": 4, "top_k": 2},
    ),
    "mtp_module": (
        "mtp_module",
        {"modules": 2, "tree": "2x1", "siblings": "without_replacement"},
    ),
    "mtp_module chain": (
        "mtp_module",
        {"gamma": 2, "siblings": "iid", "hidden": "raw", "control": "threshold:0.4"},
    ),
    "mtp_module dynamic": (
        "mtp_module",
        {"modules": 2, "tree": "dynamic", "nodes": 5, "depth": 2, "top_k": 2},
    ),
    "mtp": ("mtp", {"heads": 2, "siblings": "iid", "control": "threshold:0.4"}),
    "mtp tree": ("mtp", {"heads": 2, "tree": "best_first", "nodes": 4}),
    "mtp fixed": ("mtp", {"heads": 2, "tree": "2x1", "siblings": "without_replacement"}),
    # Two blocks in each.
    "falcon": ("falcon", {"block": 1, "gamma": 2, "siblings": "iid"}),
    "falcon blocks": ("falcon", {"gamma": 4, "siblings": "iid"}),
    "falcon tree": (
        "falcon",
        {"block": 1, "tree": "2x1", "siblings": "without_replacement", "control": "threshold:0.4"},
    ),
    "falcon dynamic": ("falcon", {"nodes": 6, "depth": 4, "top_k": 2}),
    "pass": ("pass", {"heads": 2}),
    "pass tree": ("pass", {"heads": 2, "tree": "best_first", "nodes": 5}),
    "pass merged": (
        "pass",
        {"heads": 2, "calls": 1, "tree": "2x1", "siblings": "without_replacement"},
    ),
}
