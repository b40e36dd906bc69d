"""Runs a configuration: checks its keys, runs its stages, then its mode.

A stage writes into ``<workdir>/<its name>``. One whose result no setting uses is skipped, for
example because a target was given. Everything is checked before the first stage starts: settings,
files, and every drafter with its rule, made for stand-ins of the models that are not trained yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from ml_collections import ConfigDict
from rich.text import Text

from specjax import drafters, sharding
from specjax.bench import methods as methods_lib
from specjax.bench import results
from specjax.checks import one_of
from specjax.config import Config, given
from specjax.data import prompts as prompts_lib
from specjax.data import recordings, text_files
from specjax.errors import TooLong, UserError
from specjax.files import buckets
from specjax.generation import auto
from specjax.models import hf
from specjax.report import terminal
from specjax.run import build, stand_ins, workdirs
from specjax.run.bench import bench
from specjax.run.chat import chat
from specjax.run.generate import beams, generate
from specjax.run.online import online
from specjax.run.replay import replay
from specjax.run.settings import Settings, read
from specjax.types import LM

DECODING = {mode.__name__: mode for mode in (generate, chat, bench, replay, online)}
MODES = ("train", *DECODING)


def train(config: Config, workdir: Path) -> None:
    """Mode train: runs a training recipe, or builds text, datastores and tables.

    The recipe is that of ``config.objective``. One that was interrupted is resumed.
    """
    # Imported here because TFDS and Orbax take seconds to import.
    from specjax.train import recipes

    lines = [str(workdir)]
    for key, value in recipes.run(config, workdir).items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"  {key}: {text}")
    terminal.console().print(Text("\n".join(lines), "dim"))


def run(config: Config, workdir: Path, command: str | None = None) -> None:
    """Runs one configuration; ``command`` is written to results.json. Raises UserError."""
    mode = _check_keys(config)
    workdirs.check(workdir)
    _fill(config, str(workdir))
    stages, skipped = planned(config, workdir)
    settings = None
    if mode != "train":
        _take_kept(config)
        settings = read(config)
        if mode != "online":  # it has checkpoints itself, and checks whose they are
            results.check_no_training(workdir)
        finished = mode == "bench" and not settings.again
        finished = finished and sharding.is_first() and workdirs.is_finished(settings, workdir)
        if sharding.of_first(finished):  # the first process writes
            workdirs.show_finished(workdir)
            return
    # From now on others see that the run has begun.
    with workdirs.made(workdir), workdirs.locked(workdir):
        _run(config, workdir, command, settings, stages, skipped)


def _run(config: Config, workdir: Path, command: str | None, settings, stages, skipped) -> None:
    """``run`` of a checked configuration: its stages, then its mode."""
    if stages or skipped:
        for stage in stages:
            _check_keys(stage.config)
        decodes = config.mode in ("generate", "chat", "bench", "online")
        check_stages(settings if decodes else None, stages)
    console = terminal.console()
    for name, _, result in skipped:
        console.print(Text.assemble((name, "bold"), f": skipped, no setting uses {result}"))
    for name, stage, result in stages:
        console.print(Text.assemble((name, "bold"), f": {stage.mode}, {result}"))
        run(stage, Path(result))
    if settings is None:
        sharding.check_shared(workdir)
        train(config, workdir)
        return
    if settings.record:
        recordings.check_record(settings.record, workdir, settings.source.names[0])
    mode = beams if settings.beams.count else DECODING[config.mode]
    mode(settings, workdir, command)


def _check_keys(config: Config) -> str:
    """The mode of a configuration. Raises UserError."""
    mode = config.get("mode")
    one_of("config.mode", mode, MODES)
    return mode


def _fill(config: Config, workdir: str) -> None:
    """Replaces "{workdir}" in every text of the configuration."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            _fill(value, workdir)
        elif isinstance(value, str | tuple) and "{workdir}" in str(value):
            config[key] = jax.tree.map(
                lambda leaf: leaf.replace("{workdir}", workdir) if isinstance(leaf, str) else leaf,
                value,
            )


def _take_kept(config: Config) -> None:
    """Replaces the drafter "auto" by what was kept for the model, and says what that is.

    Raises UserError for a mode that measures, for other keys, and for what it is not for.
    """
    keys = config.get("drafter")
    if keys is None or keys.name != auto.AUTO:
        return
    if config.mode not in ("generate", "chat"):
        raise UserError(
            f"config.drafter.name is auto, which is for modes generate and chat; mode "
            f"{config.mode} measures drafters, and configs/auto.py keeps the fastest"
        )
    others = given(keys).keys() - {"name", "model"} | given(config.accept_keys).keys()
    if others:
        raise UserError(f"config.drafter.name is auto, which has no {min(others)}; leave it out")
    if config.get("mesh") or ("beams" in config and config.beams.count):
        raise UserError(
            "config.drafter.name is auto, which is for one device, without beams; name a drafter"
        )
    draft = keys.get("model") or ""
    target, model = (str(hf.resolve(each)) if each else "" for each in (config.target, draft))
    rows, sampled = config.get("batch_size", 1), config.sampling.temperature > 0
    dtype = build.computes(config.dtype, config.weights)
    kept = auto.known(target, model, rows, sampled, dtype)
    chosen: dict[str, Any] = {"name": drafters.PLAIN, "model": None}
    text = f"plain decoding; nothing was measured in batches of {rows}, see configs/auto.py"
    if kept is not None:
        named = auto.needs_model(kept.drafter["name"])
        text, chosen = kept.text, {"model": draft if named else None} | kept.drafter
        config.accept = config.accept or kept.accept
    with keys.unlocked():  # a drafter of one's own has other keys
        keys.update(chosen)
    terminal.console().print(Text(f"auto: {text}", "dim"))


TRAINED = ("pretrain", "distill")  # objectives that make a model


class Stage(NamedTuple):
    """A configuration that runs first."""

    name: str
    config: Config
    result: str  # the directory that it writes into


def planned(config: Config, workdir: Path) -> tuple[list[Stage], list[Stage]]:
    """(the stages of ``config.prepare`` that are needed, the others).

    If ``config.target`` is not the result of a stage, the other stages get this target in place of
    that result. Raises UserError for a name without a configuration.
    """
    stages = []
    for name in config.get("prepare") or ():
        stage = config.get("stages", {}).get(name)
        if stage is None:
            raise UserError(
                f"config.prepare names {name!r}, and config.stages has no such configuration"
            )
        stages.append(Stage(name, stage, str(workdir / name)))
    if config.get("mode") != "train":
        _use_given_target(config, stages)
    rest = {key: config[key] for key in config if key not in ("stages", "prepare")}
    used = _texts(ConfigDict(rest))
    needed: list[Stage] = []
    for stage in reversed(stages):  # a stage uses results of earlier ones
        # The result of another mode may be more than the directory.
        if stage.config.get("mode") != "train" or _uses(used, stage.result):
            needed.insert(0, stage)
            used += _texts(stage.config)
    return needed, [stage for stage in stages if stage not in needed]


def _use_given_target(config: Config, stages: Sequence[Stage]) -> None:
    results = {stage.result for stage in stages}
    if not config.get("target") or config.target in results:
        return
    targets = {stage.config.get("target") for stage in stages} & results
    for stage in stages:
        if stage.config.get("target") in targets:
            old, stage.config.target = stage.config.target, config.target
            data = stage.config.get("data")
            if data is not None and _is_in(data.get("dir") or "", old):
                beside = Path(hf.resolve(config.target)).parent / "data"
                data.dir = str(beside) if beside.is_dir() else ""


def _texts(config: Config) -> list[str]:
    """All texts in a configuration."""
    return [leaf for leaf in jax.tree.leaves(config.to_dict()) if isinstance(leaf, str)]


def _uses(texts: Sequence[str], result: str) -> bool:
    return any(_is_in(part.strip(), result) for text in texts for part in text.split(","))


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


# Checks before the first stage -------------------------------------------------------------------


def check_stages(settings: Settings | None, stages: Sequence[Stage]) -> None:
    """Raises UserError for a mistake that a run after these stages would report.

    ``settings`` are those of the run in mode generate or bench; None: another mode.
    """
    results = {stage.result: stage.config for stage in stages}
    for stage in stages:
        if stage.config.get("mode") == "train":
            _check_training(stage, results)
        else:
            read(stage.config)
    if settings is None:
        return
    target = _target(settings, results)
    model = target.lm if isinstance(target, hf.Loaded) else target
    for choice in settings.methods.values():
        # Files are probed where the method is built.
        drafter = {key: value for key, value in choice.drafter.items() if key != "probe"}
        keys = _with_stand_ins(drafter, results, model.vocab_size)
        # A model that exists fits the trained target or not: nothing is known before.
        if keys is not None and (isinstance(target, hf.Loaded) or not _names_files(keys)):
            try:
                methods_lib.objects(model, choice._replace(drafter=keys), settings.temperatures)
            except TooLong:
                if not choice.of_gammas:  # a bench leaves such a length out
                    raise
    _check_prompts(settings, target)


def _check_training(stage: Stage, results: Mapping[str, Config]) -> None:
    """The settings of a training stage, its target if that exists, and its files of text."""
    # Imported here because Orbax takes seconds to import.
    from specjax.train.recipes import checks

    try:
        config = checks.complete(stage.config)
        checks.check(config)
        _check_loss(config)
        if config.objective == "heads":
            drafters.check(**given(config.drafter))
        if config.target and config.target not in results:
            hf.resolve(config.target)
        for name in text_files.split_names(config.data.files):
            text_files.pieces(buckets.local(name))
    except UserError as error:
        raise UserError(f"{error} (stage {stage.name}: config.stages.{stage.name})") from None


def _check_loss(config: Config) -> None:
    """Raises UserError for a key that the loss of a model does not have."""
    from specjax.train import layer_skip, objectives
    from specjax.train.recipes import common

    if given(config.get("drafter")):
        return  # the loss is that of the method
    if config.objective == "pretrain":
        common.loss_keys(layer_skip.layer_skip_loss, config.loss, "pretrain")
    elif config.objective == "distill":
        models = stand_ins.target(), stand_ins.target()
        common.make_loss(objectives.distill_loss, config.loss, "distill", *models)


def _target(settings: Settings, results: Mapping[str, Config]) -> hf.Loaded | LM:
    """The target, or a stand-in of its shape for one that a stage trains."""
    if (stage := results.get(settings.target)) is None:
        return build.target(settings)
    shape = stage.get("model")
    if shape is None or not shape.get("vocab_size"):
        return stand_ins.target()
    return stand_ins.target(vocab_size=shape.vocab_size, max_positions=shape.max_positions)


def _with_stand_ins(
    keys: Mapping[str, Any], results: Mapping[str, Config], vocab_size: int
) -> dict | None:
    """The keys of a drafter, with objects in place of results of stages; None: one has no object.

    Heads have none: they are made for the features of one target.
    """
    changed: dict[Any, Any] = flatten_dict(keys, keep_empty_nodes=True)
    for path, value in changed.items():
        if isinstance(value, str) and any(_uses([value], each) for each in results):
            made = results.get(value)
            if made is None or made.get("objective") not in (*TRAINED, "datastore", "ngram"):
                return None
            changed[path] = stand_ins.value(path[-1], vocab_size)
    return unflatten_dict(changed)


def _names_files(keys: Mapping[str, Any]) -> bool:
    """Whether a key of a drafter, or of one inside it, names a model or a table on disk."""
    own = flatten_dict(keys).items()
    return any(path[-1] in auto.FILES and isinstance(value, str) for path, value in own)


def _check_prompts(settings: Settings, target: hf.Loaded | LM) -> None:
    """Reads the prompts. Without a target, their number and their form are checked."""
    sizes = settings.batch_sizes
    for name in settings.source.names:
        if not isinstance(target, hf.Loaded):
            prompts_lib.check(settings.source, name, max(sizes))
            continue
        for context in settings.grid.contexts or (0,):
            # With empty answers later turns of conversations are as short as they can be.
            answer = lambda prompts: [[] for _ in prompts]  # noqa: E731
            how = {"name": name, "context": context}
            chosen = prompts_lib.read(settings.source, target, answer, **how)
            for size in sizes:
                build.job(settings, target, chosen, 0.0, size, max(settings.new_tokens))
