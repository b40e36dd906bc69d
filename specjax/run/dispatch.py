"""Runs a configuration: checks its keys, runs its stages, then its mode."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict
from rich.text import Text

from specjax.bench import results
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run.bench import bench
from specjax.run.generate import generate
from specjax.run.replay import replay
from specjax.run.resolve import resolve
from specjax.run.train import train

DECODING = {"generate": generate, "bench": bench, "replay": replay}
MODES = ("train", *DECODING)
_DECODES = ("target", "drafter", "accept", "sampling", "batch_size", "max_new_tokens", "seed")
_TRAINS = ("objective", "target", "init", "data", "loss", "train", "optimiser", "examine", "seed")
# The keys that a configuration of a mode must have; for mode train, those of its objective.
NEEDS = {
    "train": ("objective",),
    "train pretrain": (*_TRAINS, "model", "tokenizer"),
    "train distill": (*_TRAINS, "model", "pruned"),
    "train heads": (*_TRAINS, "drafter", "joint"),
    "train generate": ("target", "data", "generation", "drafter", "seed"),
    "train datastore": ("target", "data", "reach"),
    "train ngram": (
        *("target", "data", "from_target", "generation", "seed"),
        *("successors", "contexts", "smoothing"),
    ),
    "generate": (*_DECODES, "prompt", "prompts"),
    "bench": (*_DECODES, "prompt", "prompts", "grid", "repeats"),
    "replay": (*_DECODES, "traces", "skip_bad", "vocab_size", "num_traces", "grid"),
}


def run(config: Config, workdir: Path, command: str | None = None) -> None:
    """Runs one configuration; ``command`` is written to results.json. Raises UserError."""
    mode = config.get("mode")
    if mode not in MODES:
        raise UserError(f"config.mode is {mode!r}; it must be one of {', '.join(MODES)}")
    needs = NEEDS.get(f"{mode} {config.get('objective')}", NEEDS[mode])
    if missing := [key for key in needs if key not in config]:
        raise UserError(
            f"mode {mode} needs the key {missing[0]!r}; "
            "start from a configuration made for it, see configs/"
        )
    results.check_workdir(workdir)
    _fill(config, str(workdir))
    stages = [(name, config.get("stages", {}).get(name)) for name in config.get("prepare") or ()]
    for name, stage in stages:
        if stage is None:
            raise UserError(
                f"config.prepare names {name!r}, and config.stages has no such configuration"
            )
    settings = None
    if mode != "train":
        settings = resolve(config)
        if any((workdir / name).exists() for name in ("model", "checkpoints")):
            raise UserError(
                f"{workdir} holds a training run, which this would overwrite; "
                "choose another --workdir"
            )
    for name, stage in stages:
        line = Text.assemble((name, "bold"), f": {stage.mode}, {workdir / name}")
        terminal.console().print(line)
        run(stage, workdir / name)
    if settings is None:
        train(config, workdir)
    else:
        DECODING[mode](settings, workdir, command)


def _fill(config: Config, workdir: str) -> None:
    """Replaces "{workdir}" in every text of the configuration."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            _fill(value, workdir)
        elif isinstance(value, str) and "{workdir}" in value:
            config[key] = value.replace("{workdir}", workdir)
