"""Trains the drafters of experiments/trained_drafters, each in its own process."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.trained_drafters.trained import DRAFT_MODELS, TRAINED, Trained
from specjax import drafters
from specjax.config import given
from specjax.models import hf

CONFIGS = Path(__file__).parents[2] / "configs"
TIMED_STEPS = 5  # of a sample
# The metrics of training that are kept: their last values.
KEPT = (
    "heldout_loss",
    "heldout_tau_t0",
    "heldout_decoded_tau_t0",
    "heldout_tau_t1",
    "heldout_decoded_tau_t1",
)


def run_config(
    config: str | Path, workdir: Path, keys: Mapping[str, Any], env: dict[str, str] | None = None
) -> None:
    """Runs a configuration with these keys in its own process."""
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "specjax.run", f"--config={config}", f"--workdir={workdir}"]
    print(f"\n{workdir.name}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, *flags], stdout=subprocess.DEVNULL, env=env)
    if done.returncode:
        raise SystemExit(done.returncode)


def corpus_dir(args: argparse.Namespace) -> Path:
    """The directory of the embedded corpus: the one that the target's run built, or a new one."""
    target = Path(args.target)
    built = (target / "data", target.parent / "data")
    return next((each for each in built if each.is_dir()), args.workdir / "data")


def text_keys(args: argparse.Namespace) -> dict[str, Any]:
    """The keys of the target and the text that all runs have."""
    if args.text:
        return {"target": args.target, "data.files": args.text}
    return {"target": args.target, "data.dir": corpus_dir(args)}


def generate(args: argparse.Namespace, share: float = 1.0) -> Path:
    """Lets the target generate text to train on, from a share of the prompts; its directory."""
    if args.answers and share == 1:
        return Path(args.answers)
    count = max(round(args.generated * share), 1)
    keys = {"generation.num_prompts": count, "generation.batch_size": args.rows}
    keys |= {"generation.prompt_tokens": args.start, "generation.new_tokens": args.continued}
    keys["generation.temperatures"] = f"({args.temperatures},)"
    if args.questions:
        keys |= {"target": args.target, "generation.prompts": args.questions}
        keys |= {"generation.chat": "own", "generation.shard_prompts": 64}
    else:
        keys |= text_keys(args)
    workdir = args.workdir / ("generated" if share == 1 else f"generated-{count}")
    run_config(CONFIGS / "self_generate.py", workdir, keys)
    return workdir


def held_out_prompts(args: argparse.Namespace, chosen: Trained) -> int:
    """How many prompts a training run is examined on; a small share of the text has few."""
    if not chosen.generated:
        return args.examined
    # One of 20 prompts is in the valid split (train/recipes/generated.py).
    return min(args.examined, max(round(args.generated * chosen.share) // 20, 1))


def store(args: argparse.Namespace, generated: Path, chosen: Trained) -> Path:
    """Stores the target's features of text that it generated; their directory."""
    keys = {
        "target": args.target,
        "data.generated": generated,
        "features.taps": taps(args),
        "features.dtype": args.features,
        "train.length": args.length,
        "train.eval_batches": args.eval_batches,
        "examine.prompts": held_out_prompts(args, chosen),
    }
    name = "features" if args.answers else generated.name.replace("generated", "features")
    workdir = args.workdir / name
    run_config(CONFIGS / "features.py", workdir, keys)
    return workdir


def taps(args: argparse.Namespace) -> tuple[int, ...]:
    """The target's layers that the networks to train read, sorted; stored once for all of them."""
    target, layers = hf.load(args.target).lm, set()
    for chosen in map(TRAINED.__getitem__, args.names):
        name, _, form = chosen.config.partition(":")
        if chosen.generated and name not in DRAFT_MODELS:
            module = importlib.import_module(f"configs.{name}")
            config = module.get_config(form) if form else module.get_config()
            config.update_from_flattened_dict(chosen.keys)
            layers.update(drafters.make(target=target, **given(config.drafter)).taps)
    return tuple(sorted(layers))


def train(name: str, args: argparse.Namespace) -> Path:
    """Trains one drafter, after the drafter that it starts from; returns its workdir."""
    chosen = TRAINED[name]
    keys = training_keys(name, args)
    if chosen.init:
        keys["init"] = train(chosen.init, args)
    workdir = args.workdir / folder(name)
    run_config(config_of(chosen), workdir, keys | args.own.get(name, {}))
    return workdir


def folder(name: str) -> str:
    """The name of a drafter's workdir."""
    return name.replace(", ", "-").replace(" ", "_").replace("/", "_of_")


def config_of(chosen: Trained) -> str:
    """The configuration, with what follows its colon."""
    config, colon, form = chosen.config.partition(":")
    return f"{CONFIGS / config}.py{colon}{form}"


def time_steps(name: str, args: argparse.Namespace) -> float:
    """Tokens per second of training steps: the median of a few, without evaluation."""
    keys = training_keys(name, args) | args.own.get(name, {})
    steps = 12 * TIMED_STEPS
    keys |= {
        "train.steps": steps,
        "train.log_every": TIMED_STEPS,
        "train.eval_every": steps,
        "train.eval_batches": 1,
        "train.checkpoint_every": steps,
        "examine.prompts": 0,
    }
    if TRAINED[name].init:
        keys["init"] = args.workdir / folder(TRAINED[name].init)
    workdir = args.workdir / "timed" / folder(name)
    run_config(config_of(TRAINED[name]), workdir, keys)
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    # The first record has the compilation.
    return statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])


def training_keys(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The keys of a drafter's configuration, but where it starts from; generates its text."""
    chosen = TRAINED[name]
    config = chosen.config.partition(":")[0]
    keys: dict[str, Any] = text_keys(args)
    if chosen.generated:
        keys = {"target": args.target, "data.generated": generate(args, chosen.share)}
        if args.features and config not in DRAFT_MODELS:
            keys["data.features"] = store(args, keys.pop("data.generated"), chosen)
    keys |= chosen.keys
    if config in DRAFT_MODELS:
        keys |= {
            "model.hidden_size": args.width,
            "model.intermediate_size": 3 * args.width,
            "model.num_layers": 1,
            "model.num_heads": max(args.width // 64, 2),
            "model.num_kv_heads": 2,
            "model.vocab_size": 0,
        }
    else:
        keys["optimiser.learning_rate"] = args.rate / chosen.rate_divisor
    return keys | {
        "seed": args.seed,
        "train.steps": args.steps,
        "train.batch_size": args.batch,
        "train.eval_every": max(args.steps // args.evaluations, 1),
        "train.eval_batches": args.eval_batches,
        "train.checkpoint_every": max(args.steps // 4, 1),
        "train.length": args.length,
        "examine.prompts": held_out_prompts(args, chosen),
        "examine.every": max(args.steps // args.evaluations, 1),
    }


def metrics(workdir: Path) -> dict[str, Any]:
    """The last metrics of a training run, its held-out curve, what it saw, its times and waits."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    examined = [record for record in records if "heldout_loss" in record]
    summary = json.loads((workdir / "summary.json").read_text())
    config = json.loads((workdir / "config.json").read_text())
    kept: dict[str, Any] = {name: examined[-1].get(name) for name in KEPT}
    kept["learning_rate"] = config["optimiser"]["learning_rate"]
    for name in ("labels", "flops"):  # of an update, on average
        if each := [record[name] for record in records if name in record]:
            kept[name] = statistics.mean(each) * records[-1]["step"]
    curve = [
        [record["step"], record["heldout_loss"], record.get("heldout_tau_t0")]
        for record in examined
    ]
    for alphas in ("heldout_alpha_t0", "heldout_alpha_t1"):
        of_depth = re.compile(alphas + r"_depth\d+")
        kept[alphas] = [value for name, value in examined[-1].items() if of_depth.fullmatch(name)]
    # The mean of the records, which are a fixed number of steps apart; the first has no time.
    waits = [record["time_share"]["data"] for record in records if record.get("time_share")]
    share = {"data_share": sum(waits) / len(waits)} if waits else {}
    # Records of steps alone: the first has the compilation, others the evaluations.
    rates = [record["tokens_per_second"] for record in records[1:] if record not in examined]
    rate = {"tokens_per_second": statistics.median(rates)} if rates else {}
    return kept | {"curve": curve, "seconds": summary["seconds"]} | rate | share
