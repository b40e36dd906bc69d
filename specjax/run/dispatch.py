"""Runs a configuration: checks its keys, runs its stages, then its mode."""

from __future__ import annotations

from pathlib import Path

from ml_collections import ConfigDict
from rich.text import Text

from specjax.bench import results
from specjax.config import Config
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import beams, workdirs
from specjax.run import stages as stages_lib
from specjax.run.bench import bench
from specjax.run.chat import chat
from specjax.run.generate import generate
from specjax.run.online import online
from specjax.run.replay import replay
from specjax.run.resolve import resolve
from specjax.run.train import train

DECODING = {
    "generate": generate,
    "chat": chat,
    "bench": bench,
    "replay": replay,
    "online": online,
}
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
    "train features": ("target", "data", "features", "train", "examine", "seed"),
    "train datastore": ("target", "data", "reach"),
    "train ngram": (
        *("target", "data", "from_target", "generation", "seed"),
        *("successors", "contexts", "smoothing"),
    ),
    "generate": (*_DECODES, "prompt", "prompts"),
    "chat": (*_DECODES, "prompt", "prompts", "chat"),
    "bench": (*_DECODES, "prompt", "prompts", "grid", "repeats"),
    "replay": (*_DECODES, "traces", "skip_bad", "vocab_size", "num_traces", "grid"),
    "online": (*_DECODES, "prompt", "prompts", "online", "loss", "optimiser"),
}


def run(config: Config, workdir: Path, command: str | None = None) -> None:
    """Runs one configuration; ``command`` is written to results.json. Raises UserError."""
    mode = _check_keys(config)
    workdirs.check(workdir)
    _fill(config, str(workdir))
    stages, skipped = stages_lib.planned(config, workdir)
    settings = None
    if mode != "train":
        settings = resolve(config)
        if mode != "online":  # it has checkpoints itself, and checks whose they are
            results.check_no_training(workdir)
        if mode == "bench" and not settings.again and workdirs.is_finished(settings, workdir):
            workdirs.show_finished(workdir)
            return
    # From now on others see that the run has begun.
    with workdirs.made(workdir):
        _run(config, workdir, command, settings, stages, skipped)


def _run(config: Config, workdir: Path, command: str | None, settings, stages, skipped) -> None:
    """``run`` of a checked configuration: its stages, then its mode."""
    if stages or skipped:
        for stage in stages:
            _check_keys(stage.config)
        decodes = config.mode in ("generate", "chat", "bench", "online")
        stages_lib.check(settings if decodes else None, stages)
    for name, _, result in skipped:
        line = Text.assemble((name, "bold"), f": skipped, no setting uses {result}")
        terminal.console().print(line)
    for name, stage, result in stages:
        line = Text.assemble((name, "bold"), f": {stage.mode}, {result}")
        terminal.console().print(line)
        run(stage, Path(result))
    if settings is None:
        train(config, workdir)
    elif settings.beams is not None:
        beams.generate(settings, workdir, command)
    else:
        DECODING[config.mode](settings, workdir, command)


def _check_keys(config: Config) -> str:
    """The mode of a configuration that has the keys of its mode. Raises UserError."""
    mode = config.get("mode")
    if mode not in MODES:
        raise UserError(f"config.mode is {mode!r}; it must be one of {', '.join(MODES)}")
    needs = NEEDS.get(f"{mode} {config.get('objective')}", NEEDS[mode])
    if missing := [key for key in needs if key not in config]:
        raise UserError(
            f"mode {mode} needs the key {missing[0]!r}; "
            "start from a configuration made for it, see configs/"
        )
    return mode


def _fill(config: Config, workdir: str) -> None:
    """Replaces "{workdir}" in every text of the configuration."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            _fill(value, workdir)
        elif isinstance(value, str) and "{workdir}" in value:
            config[key] = value.replace("{workdir}", workdir)
        elif isinstance(value, tuple) and any("{workdir}" in str(each) for each in value):
            config[key] = tuple(
                each.replace("{workdir}", workdir) if isinstance(each, str) else each
                for each in value
            )
