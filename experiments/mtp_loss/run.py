"""Whether pretraining with heads for multi-token prediction changes a small target's own loss.

    PYTHONPATH=. python experiments/mtp_loss/run.py --workdir=runs/mtp_loss    (25 minutes)

Targets of one shape (5 layers, 128 wide, 1024 tokens) learn the embedded corpus three ways: alone
(configs/pretrain.py), with three further last layers (configs/mtp_pretrain.py, n = 4, equal
weights), and with one module (configs/mtp_pretrain.py:mtp_module, weight 0.3, later 0.1). The
targets of one seed begin with the same parameters and see the same text in the same order, so their
held-out losses are compared in pairs. Tokens per round at temperature 0 are decoded on held-out
prompts, with chains of three tokens; the module continues from its own output after the first.

A finished training run in the workdir is not repeated. Writes ``results.json`` beside this file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from configs import mtp_pretrain, pretrain
from experiments.common import Stopwatch, checked, options, record, without_folder
from specjax.config import Config
from specjax.files import write_json
from specjax.train import recipes

TIMES = frozenset({"seconds"})
METHODS = ("alone", "mtp", "mtp_module")
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_positions": 256,
}
QUICK = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2}


def config_of(method: str, seed: int, args: argparse.Namespace) -> Config:
    """The configuration of one training run."""
    config = pretrain.get_config() if method == "alone" else mtp_pretrain.get_config(method)
    keys: dict[str, Any] = {f"model.{key}": value for key, value in SHAPE.items()}
    keys |= {
        "seed": seed,
        "data.files": args.text,
        "train.steps": args.steps,
        "train.batch_size": 8,
        "train.length": 64,
        "train.eval_every": args.steps,
        "train.eval_batches": 40,
        "train.checkpoint_every": args.steps,
        "examine.every": args.steps,
        "examine.temperatures": (0.0,),
        "examine.prompts": 0 if method == "alone" else 32,
    }
    if not args.text:
        keys["data.dir"] = str(args.workdir / "data")
    if args.quick:
        keys |= {f"model.{key}": value for key, value in QUICK.items()}
        keys |= {"train.eval_batches": 2, "examine.new_tokens": 8}
        keys |= {"examine.prompt_tokens": 8, "examine.prompts": keys["examine.prompts"] // 16}
    config.update_from_flattened_dict(keys)
    return config


def train(method: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row: a training run of the target, by itself or with heads."""
    config, own = config_of(method, seed, args), args.workdir / f"{method}-{seed}"
    first = args.workdir / f"{METHODS[0]}-{args.seeds[0]}"
    if own != first:
        # One tokenizer for all targets; it may have fewer tokens than asked for.
        config.tokenizer, config.model.vocab_size = str(first), 0
    began = time.perf_counter()
    summary = recipes.run(config, own)
    print(f"{own.name}: {time.perf_counter() - began:.0f} s", flush=True)
    return {
        "method": method,
        "seed": seed,
        "loss": summary["heldout_loss"],
        "bits_per_byte": summary["heldout_bits_per_byte"],
        "tau_t0": summary.get("heldout_decoded_tau_t0"),
        "parameters": summary["parameters"],
        "seconds": summary["seconds"],
    }


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each method: the means over seeds, and the difference of losses in pairs of one seed."""
    alone = {row["seed"]: row["loss"] for row in rows if row["method"] == METHODS[0]}
    result = []
    for method in METHODS:
        own = [row for row in rows if row["method"] == method]
        losses = [row["loss"] for row in own]
        differences = [row["loss"] - alone[row["seed"]] for row in own]
        taus = [row["tau_t0"] for row in own if row["tau_t0"] is not None]
        result.append(
            {
                "method": method,
                "parameters": own[0]["parameters"],
                "loss": statistics.mean(losses),
                "loss_sd": statistics.stdev(losses),
                "difference": statistics.mean(differences),
                "difference_sd": statistics.stdev(differences),
                "differences": differences,
                "tau_t0": statistics.mean(taus) if taus else None,
                "tau_t0_sd": statistics.stdev(taus) if taus else None,
            }
        )
    return result


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--workdir", type=Path, required=True, help="of the training runs")
    add("--text", default="", help="text files; by default the embedded corpus")
    add("--steps", type=int, default=300, help="of every run, 8 x 64 tokens each")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="two or more")
    add("--quick", action="store_true", help="a tiny model, for a test")
    args = parser.parse_args(argv)
    stopwatch = Stopwatch(keep=args.busy == "keep")
    if len(set(args.seeds)) < 2:
        raise SystemExit("--seeds has fewer than two different seeds; the spread needs two or more")
    rows = [train(method, seed, args) for seed in args.seeds for method in METHODS]
    result = {"steps": args.steps, "seeds": args.seeds, "shape": SHAPE, "methods": compared(rows)}
    result |= {"rows": rows} | record(__file__, list(map(without_folder, argv)), stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))
    for row in result["methods"]:
        print(f"{row['method']:12} loss {row['loss']:.4f}, {row['difference']:+.4f} to alone")


if __name__ == "__main__":
    main(sys.argv[1:])
