"""The objectives of ``config.mode = "train"``: from a configuration to a model, heads or data.

``run`` is the entry. A killed run is resumed by the same command, and a finished one is left
unchanged: ``<workdir>/model`` is written last, all at once.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import jax

from specjax import files, sharding
from specjax.bench import results
from specjax.config import Config
from specjax.errors import UserError
from specjax.train import loop, optimise
from specjax.train.checkpoint import check_same
from specjax.train.display import report
from specjax.train.recipes import (
    checks,
    common,
    distill,
    features,
    generated,
    heads,
    lookup_data,
    pretrain,
)

_PREPARE = {"pretrain": pretrain.prepare, "distill": distill.prepare, "heads": heads.prepare}
# Objectives that write data.
_WRITE = {"generate": generated.run, "features": features.run}
_WRITE |= dict.fromkeys(lookup_data.OBJECTIVES, lookup_data.run)
# Group -> its keys that may differ between a run and its resumption.
_FREE = {
    "train": ("log_every", "eval_every", "checkpoint_every", "resume_changed"),
    "examine": ("every",),
}


def run(config: Config, workdir: str | Path) -> dict:
    """Runs ``config.objective`` in ``workdir``; returns its summary. Resumes an unfinished run.

    A run with fewer ``config.train.steps`` in ``workdir``, finished or not, is lengthened: it goes
    on from its last state, with the learning rates of the longer schedule.

    Raises UserError for a mistake in the configuration; then nothing is written.
    """
    config, workdir = checks.complete(config), Path(workdir).expanduser()
    checks.check(config)
    return _WRITE.get(config.objective, _train)(config, workdir)


def _train(config: Config, workdir: Path) -> dict:
    """Writes config.json, checkpoints and metrics.jsonl, summary.json, and the model directory."""
    began, resolved = time.monotonic(), common.as_json(config)
    optimiser = optimise.optimiser(**config.optimiser, steps=config.train.steps)
    if _is_finished(config, resolved, workdir):
        return files.read_json(workdir / "summary.json")
    prepared = _PREPARE[config.objective](config, workdir)
    # Nothing is written before the whole configuration is checked.
    with common.writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        common.write_json(workdir / "config.json", resolved)
    # A resumed run must also have the same text and the same target.
    same = {"corpus": prepared.material.digest, "target_sha256": prepared.target}
    keys = checks.loop_keys(config)
    _announce(config, keys.eval_interval)
    lasting = _lasting(resolved) | same
    params = loop.train(prepared.task, optimiser, keys, workdir, keys, lasting)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    summary = {}
    if sharding.is_first():
        summary = _summary(config, workdir, size, prepared.material.tokens_per_byte)
        summary["seconds"] = time.monotonic() - began
    with common.writing(workdir):
        prepared.save(params, summary)
    return sharding.of_first(summary)


def _is_finished(config: Config, resolved: dict, workdir: Path) -> bool:
    """Whether the run in ``workdir`` is finished with these steps.

    Raises UserError if ``workdir`` holds something else, or a run with another configuration.
    """
    stored = _stored_config(workdir, config.objective)
    if stored is None:
        return False
    before = stored["train"]["steps"]
    longer = config.train.steps > before
    # While a finished run is being lengthened, the shorter one's model and summary are still there.
    summary = workdir / "summary.json"
    finished = (workdir / "model").exists() and summary.exists() and not longer
    finished = finished and files.read_json(summary)["steps"] == before
    allowed = config.train.resume_changed and not finished
    check_same(_lasting(stored), _lasting(resolved), workdir, report if allowed else None)
    if longer:
        _report_lengthened(config, before, workdir)
    return finished


def _report_lengthened(config: Config, before: int, workdir: Path) -> None:
    """One line: what more steps mean for the learning rate."""
    rates = [
        float(optimise.optimiser(**config.optimiser, steps=steps).schedule(before))
        for steps in (before, config.train.steps)
    ]
    report(
        f"the run of {before} steps in {workdir} is lengthened to {config.train.steps}: the "
        f"learning rate is that of the longer {config.optimiser.schedule} schedule "
        f"({rates[1]:.2g} at step {before + 1}; the shorter one had come to {rates[0]:.2g})"
    )


def _announce(config: Config, eval_interval: int) -> None:
    train = config.train
    what = config.drafter.name if config.objective == "heads" else config.objective
    when = "after the last step"
    if eval_interval < train.steps:
        when = f"every {eval_interval} steps and {when}"
    size = f"{train.steps} steps of {train.batch_size} x {train.length} tokens"
    report(f"{what}: {size}, evaluated {when}")


def _stored_config(workdir: Path, objective: str) -> dict | None:
    """The configuration of the run in ``workdir``; None if there is no run.

    Raises UserError if there is something else.
    """
    others = [path.name for path in workdir.glob("*.safetensors")]
    others += [name for name in results.DATA if (workdir / name).exists()]
    path = workdir / "config.json"
    stored = files.read_json(path) if path.exists() else None
    if stored is not None and (stored.get("mode"), stored.get("objective")) != ("train", objective):
        others.append("a config.json of another kind of run")
    if others:
        raise UserError(
            f"{workdir} holds {others[0]}, which is not of this run; choose another --workdir"
        )
    begun = any((workdir / name).exists() for name in ("checkpoints", "model"))
    return stored if begun else None


def _lasting(config: dict) -> dict:
    """The configuration without the keys that may differ when a run is resumed."""
    result = common.lasting(config)
    for group, free in _FREE.items():
        result[group] = {key: value for key, value in config[group].items() if key not in free}
    return result


def _summary(config: Config, workdir: Path, size: int, tokens_per_byte: float | None) -> dict:
    """The held-out values of the parameters that are kept, from metrics.jsonl."""
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    best = records[-1].get("best_step") if config.train.keep == "best" else None
    kept = next((record for record in records if record["step"] == best), records[-1])
    names = [name for name in kept if name.startswith("heldout_") or name == "best_step"]
    summary = {name: kept[name] for name in names}
    summary |= {"steps": config.train.steps, "parameters": size}
    if config.objective == "pretrain" and tokens_per_byte:
        summary["heldout_bits_per_byte"] = kept["heldout_loss"] / math.log(2) * tokens_per_byte
    return summary
