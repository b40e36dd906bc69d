"""A bench from Python: objects in, results.json and the report out."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax import files
from specjax.bench import methods as methods_lib
from specjax.bench import proofs, provenance, results
from specjax.bench.methods import Given, Text
from specjax.data import progress
from specjax.data.prompts import PromptSet
from specjax.errors import UserError
from specjax.models import hf
from specjax.report import terminal
from specjax.run import cells, workdirs
from specjax.run.settings import GridKeys, SamplingKeys, Settings
from specjax.types import LM

# The keys of ``Settings`` that ``measure`` takes beside its own arguments.
OPTIONS = ("max_new_tokens", "seed", "ignore_eos", "trace_prompts", "report")


def measure(
    target: hf.Loaded | tuple[LM, Any],
    methods: Mapping[str, Given],
    prompts: Sequence[Text] | Mapping[str, Sequence[Text]],
    *,
    workdir: str | os.PathLike,
    temperatures: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int] = (1,),
    sampling: Mapping[str, Any] | None = None,
    repeats: int = 3,
    trace_tokens: int = 96,
    proof: Sequence[proofs.Report | str | os.PathLike] = (),
    show: bool = True,
    **keys: Any,
) -> dict[str, Any]:
    """Measures methods against plain decoding; writes results.json and the report.

        target = hf.load("DIR")
        drafter = drafters.make("suffix", target.lm)
        run.measure(target, {"suffix": (drafter, accept.load("traversal"))},
            ["Once upon a time", "The little dog"], workdir="runs/mine")

    Args:
        target: what ``hf.load`` returns, or (LM, its parameters).
        methods: name -> (drafter, rule) or (drafter, rule, params); ``params`` are the drafter's
            parameters, or ``ModelParams``; without them ``Drafter.init_params`` gives them.
        prompts: texts, or lists of token ids; a mapping has them by category.
        workdir: is created; gets results.json, trace.jsonl, plots/ and report.html.
        temperatures, batch_sizes: every pair of both is measured.
        sampling: further arguments of ``sampling.make_sampling``, such as top_p.
        repeats: interleaved passes, of which the median counts.
        trace_tokens: new tokens of a traced text; at least ``max_new_tokens``.
        proof: reports of ``testing.check_drafter`` and ``testing.check_accept``, or files that
            ``bench.proofs.write`` made of them: tables call the class of these drafters and rules
            "proven", and not only "declared".
        show: whether progress and the table are printed.
        keys: those of ``OPTIONS``: see ``Settings``.

    Returns:
        The object of results.json, for ``specjax.report.to_frame``. Its "overlap" needs a report.

    Raises:
        UserError: objects and numbers that do not fit, a workdir that cannot be written or that
            holds a training run; nothing is written then.
        NonFiniteLogits: of a model; nothing is written.
        NotLossless (``specjax.run``): a lossless method failed its check; everything is written.
    """
    if other := [name for name in keys if name not in OPTIONS]:
        raise UserError(f"measure has no option {other[0]!r}; it takes {', '.join(OPTIONS)}")
    grid = GridKeys(temperatures=tuple(temperatures), batch_sizes=tuple(batch_sizes))
    keys |= {"repeats": repeats, "trace_tokens": trace_tokens}
    settings = _settings(dict(sampling or {}), grid, keys)
    proven, model = [_proof(each) for each in proof], methods_lib.model_of(target)
    source = model.directory or None
    facts = {"mode": "bench", "target": source, "methods": list(methods), "proof": proof}
    settings = dataclasses.replace(settings, config_json=_text(settings, facts))
    own = terminal.console() if show else Console(quiet=True), progress.Progress()
    bench = cells.Bench(settings, *own, proven, cells.Parts())
    chosen, folder = methods_lib.prompts_of(model, prompts), Path(workdir).expanduser()
    return _measured(bench, model, chosen, methods, folder)


def _measured(
    bench: cells.Bench,
    model: hf.Loaded,
    chosen: PromptSet,
    methods: Mapping[str, Given],
    workdir: Path,
) -> dict[str, Any]:
    """``measure``, with what it made of its arguments."""
    settings = bench.settings
    if not isinstance(methods, Mapping) or not methods:
        raise UserError("methods must be a mapping with at least one name -> (drafter, rule)")
    options = {"seed": settings.seed, "temperatures": settings.temperatures}
    built = [
        methods_lib.method_of(model, given, name=str(name), **options)
        for name, given in methods.items()
    ]
    results.check_no_training(workdir)
    with workdirs.made(workdir), workdirs.locked(workdir):
        grid = cells.grid(settings, model, built, chosen)
        cells.note_proofs(bench, built)
        measured = cells.measure(grid, bench)
        name = "" if model.directory else model.lm.name
        about = provenance.target(model.params, name=name, directory=model.directory)
        path = cells.write(bench, workdir, measured, target=about, inputs_sha256=None)
        cells.check_lossless(measured.rows)
        return files.parsed(path.read_text(encoding="utf-8"))


def _settings(sampling: dict[str, Any], grid: GridKeys, keys: dict[str, Any]) -> Settings:
    for name in ("temperatures", "batch_sizes"):
        if not getattr(grid, name):
            raise UserError(f"{name} is empty; it must have values")
    if "temperature" in sampling:
        raise UserError("sampling has a temperature; give temperatures instead")
    return Settings(mode="bench", grid=grid, sampling=SamplingKeys(**sampling), **keys)


def _proof(given: Any) -> proofs.Proof:
    if isinstance(given, str | os.PathLike):
        return proofs.read(Path(given))
    if isinstance(given, proofs.Report):
        return proofs.of_report(given)
    raise UserError(
        f"proof has an object of type {type(given).__name__}; it must have reports of "
        "testing.check_drafter or testing.check_accept, or files of them"
    )


def _text(settings: Settings, facts: Mapping[str, Any]) -> str:
    """config.json: what was asked for."""
    names = (*OPTIONS, "repeats", "trace_tokens", "temperatures", "batch_sizes")
    own = {name: getattr(settings, name) for name in names}
    own["sampling"] = dataclasses.asdict(settings.sampling)
    proof = [each if isinstance(each, str | os.PathLike) else each.name for each in facts["proof"]]
    return json.dumps({**facts, **own, "proof": proof}, indent=2, default=str) + "\n"
