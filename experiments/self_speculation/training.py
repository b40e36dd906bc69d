"""What training adds to early exits: adapters on a frozen target, and targets that learn exits."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from configs import early_exit as early_exit_config
from configs import layer_skip, pretrain
from specjax.config import Config
from specjax.data import text_files
from specjax.drafters.self_speculation import early_exit
from specjax.models import hf
from specjax.train import recipes

# Label -> keys of the adapter. The first one is not trained: its norm begins as the target's.
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {"adapter": "norm"},
    "norm": {"adapter": "norm"},
    "linear": {"adapter": "linear"},
    "linear, own head": {"adapter": "linear", "head": "own"},
    "layer": {"adapter": "layer"},
}
# Label -> configuration and its keys.
TARGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "pretraining": (pretrain, {}),
    "LayerSkip, rotational": (layer_skip, {"loss.rotation": 2}),
    "LayerSkip, gradual": (layer_skip, {"loss.curriculum": "gradual", "loss.rotation": 8}),
    "early-exit loss alone": (layer_skip, {"loss.dropout": 0.0, "loss.rotation": 2}),
}
# The shape of the targets that are trained here.
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
}
# Tokens of the held-out pieces by which exits are compared, and of their beginnings.
PIECE, BEGINNING = 128, 16


def _run(config: Config, keys: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """The summary of a training run."""
    config.update_from_flattened_dict(keys)
    began = time.perf_counter()
    summary = recipes.run(config, workdir)
    print(f"{workdir.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return summary


def adapters(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per exit layer and adapter, trained for ``args.steps`` steps on --text."""
    rows = []
    for layer in args.adapter_exits:
        for label, own in ADAPTERS.items():
            keys = {f"drafter.{key}": value for key, value in own.items()}
            keys |= {
                "target": str(args.small),
                "data.files": str(args.text),
                "drafter.exit_layer": layer,
                "drafter.gamma": args.gamma,
                "train.steps": args.steps if label != "none" else 1,
                "train.length": 128,
                "train.eval_every": args.steps,
                "optimiser.learning_rate": 3e-3 if label != "none" else 1e-9,
                "examine.prompts": 32,
            }
            name = f"exit{layer}-{label.replace(', ', '-').replace(' ', '-')}"
            summary = _run(early_exit_config.get_config(), keys, args.workdir / name)
            row = {"exit_layer": layer, "adapter": label, "gamma": args.gamma}
            row |= {"parameters": summary["parameters"] if label != "none" else 0}
            for key in ("agreement", "alpha", "tau_t0", "tau_t1"):
                row[key] = summary[f"heldout_{key}"]
            rows.append(row)
    return rows


def targets(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per way to train a target: its loss, and the acceptance of its exits."""
    rows = []
    for label, (config, own) in TARGETS.items():
        keys = {f"model.{key}": value for key, value in SHAPE.items()} | own
        keys |= {"data.files": str(args.text), "train.steps": args.steps, "train.length": 128}
        keys |= {"train.eval_every": args.steps}
        workdir = args.workdir / label.replace(", ", "-").replace(" ", "-")
        summary = _run(config.get_config(), keys, workdir)
        target = hf.load(workdir)
        assert target.tokenizer is not None
        held_out = "\n".join(text for _, text in text_files.load_files(str(args.text), "valid"))
        ids = target.tokenizer.encode(held_out[: 64 * PIECE]).ids
        pieces = [ids[at : at + PIECE] for at in range(0, len(ids) - PIECE, PIECE)][:8]
        row: dict[str, Any] = {"target": label, "loss": summary["heldout_loss"]}
        for temperature in (0.0, 1.0):
            values = early_exit.acceptance_by_layer(
                target.lm,
                target.params,
                [piece[:BEGINNING] for piece in pieces],
                [piece[BEGINNING:] for piece in pieces],
                {"temperature": temperature},
            )
            row[f"acceptance_t{temperature:g}"] = values.mean(-1).tolist()
        rows.append(row)
    return rows
