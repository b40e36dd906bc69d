"""Runs a configuration: checks its keys, runs its stages, then its mode."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
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
from specjax.run.settings import read
from specjax.run.train import train

DECODING = {mode.__name__: mode for mode in (generate, chat, bench, replay, online)}
MODES = ("train", *DECODING)


def run(config: Config, workdir: Path, command: str | None = None) -> None:
    """Runs one configuration; ``command`` is written to results.json. Raises UserError."""
    mode = _check_keys(config)
    workdirs.check(workdir)
    _fill(config, str(workdir))
    stages, skipped = stages_lib.planned(config, workdir)
    settings = None
    if mode != "train":
        settings = read(config)
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
    console = terminal.console()
    for name, _, result in skipped:
        console.print(Text.assemble((name, "bold"), f": skipped, no setting uses {result}"))
    for name, stage, result in stages:
        console.print(Text.assemble((name, "bold"), f": {stage.mode}, {result}"))
        run(stage, Path(result))
    if settings is None:
        train(config, workdir)
    elif settings.beams.count:
        beams.generate(settings, workdir, command)
    else:
        DECODING[config.mode](settings, workdir, command)


def _check_keys(config: Config) -> str:
    """The mode of a configuration. Raises UserError."""
    mode = config.get("mode")
    if mode not in MODES:
        raise UserError(f"config.mode is {mode!r}; it must be one of {', '.join(MODES)}")
    return mode


def _fill(config: Config, workdir: str) -> None:
    """Replaces "{workdir}" in every text of the configuration."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            _fill(value, workdir)
        elif isinstance(value, str | tuple) and "{workdir}" in str(value):
            config[key] = jax.tree.map(functools.partial(_filled, workdir), value)


def _filled(workdir: str, value: Any) -> Any:
    return value.replace("{workdir}", workdir) if isinstance(value, str) else value
