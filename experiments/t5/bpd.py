"""Blockwise parallel decoding (1811.03115) on the T5 target: slots with one joint layer.

Exact, and with the paper's top-k rule, with which a token passes that is among the best ``TOP``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from experiments.trained_drafters.training import CONFIGS, run_config

NAME = "BPD, joint layer"
SLOTS = 7  # besides the target's own
TOP = 3
LOSSY = f"{NAME}, top {TOP}"


def train(
    args: argparse.Namespace, keys: dict[str, Any], target: Path, generated: Path, workdir: Path
) -> None:
    """Trains the slots on what the target wrote; ``keys`` are those of all training runs."""
    keys = {
        **keys,
        "target": target,
        "data.pairs": "",
        "data.generated": generated,
        "drafter.heads": SLOTS,
        "drafter.layer": "joint",
        "examine.prompts": 4 if args.quick else 16,
    }
    run_config(CONFIGS / "bpd.py", workdir, keys)


def methods(path: Path) -> dict[str, dict[str, Any]]:
    """Label -> keys of a bench; ``tree`` has a place for the length."""
    keys = {"name": "bpd", "model": str(path), "tree": "chain:{}"}
    lossy = {**keys, "accept": "tolerance", "accept_keys": {"top": TOP}}
    return {NAME: {**keys, "accept": "chain"}, LOSSY: lossy}
