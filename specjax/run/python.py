"""A bench from Python: objects in, results.json and the report out."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax import sampling as sampling_lib
from specjax.bench import objects, passes, progress, proofs, provenance, results, uncertainty
from specjax.bench.objects import Given, Model, Text
from specjax.checks import number, whole
from specjax.data.prompts import PromptSet
from specjax.errors import UserError
from specjax.models import hf
from specjax.report import terminal
from specjax.run import cells, workdirs
from specjax.types import LM


@dataclasses.dataclass(frozen=True)
class Options:
    """The optional arguments of ``measure``."""

    max_new_tokens: int = 128  # of every prompt
    # Every pair of a temperature and a batch size is measured.
    temperatures: Sequence[float] = (0.0,)
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3  # interleaved passes, of which the median counts
    seed: int = 0  # of the noise, and of parameters that are drawn at random
    # Further arguments of ``sampling.make_sampling``, such as top_p.
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignore_eos: bool = False  # whether texts go on after an end-of-sequence token
    # Reports of ``testing.check_drafter`` and ``testing.check_accept``, or files that
    # ``bench.proofs.write`` made of them: tables call the class of these drafters and rules
    # "proven", and not only "declared".
    proof: Sequence[proofs.Report | str | os.PathLike] = ()
    # Prompts to trace, with every temperature and method; None: one, and none without a report.
    trace_prompts: int | None = None
    trace_tokens: int = 96  # new tokens of a traced text; at least ``max_new_tokens``
    # Whether plots and the report are written; without it no overlap is computed.
    report: bool = True
    show: bool = True  # whether progress and the table are printed

    def __post_init__(self):
        least = {"max_new_tokens": 1, "repeats": 1, "seed": 0, "trace_tokens": 0}
        for name, smallest in least.items():
            whole(name, getattr(self, name), smallest)
        if self.trace_prompts is not None:
            whole("trace_prompts", self.trace_prompts, 0)
        for name in ("temperatures", "batch_sizes"):
            values = list(getattr(self, name))
            if not values or len(set(values)) != len(values):
                raise UserError(f"{name} is {values}; it must have values, each of them once")
        for batch_size in self.batch_sizes:
            whole("a batch size", batch_size, 1)
        if "temperature" in self.sampling:
            raise UserError("sampling has a temperature; give temperatures instead")
        for temperature in self.temperatures:
            number("a temperature", temperature, ">= 0 (0 = greedy)", lambda x: x >= 0)
            sampling_lib.make_sampling(1, temperature, **self.sampling)


def measure(
    target: hf.Loaded | tuple[LM, Any],
    methods: Mapping[str, Given],
    prompts: Sequence[Text] | Mapping[str, Sequence[Text]],
    *,
    workdir: str | os.PathLike,
    **options: Any,
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
        options: the fields of ``Options``.

    Returns:
        The object of results.json; ``specjax.report.to_frame`` makes a table of it.

    Raises:
        UserError: objects and numbers that do not fit, a workdir that cannot be written or that
            holds a training run; nothing is written then.
        NonFiniteLogits: of a model; nothing is written.
        NotLossless (``specjax.run``): a method that claims to be lossless failed its check; after
            everything is written.
    """
    how, workdir, model = Options(**options), Path(workdir).expanduser(), objects.model_of(target)
    console = terminal.console() if how.show else Console(quiet=True)
    chosen = objects.prompts_of(model, prompts)
    results.check_no_training(workdir)
    with workdirs.made(workdir):
        return _measured(model, methods, how, chosen, workdir, console)


def _measured(
    model: Model,
    methods: Mapping[str, Given],
    how: Options,
    chosen: PromptSet,
    workdir: Path,
    console: Console,
) -> dict[str, Any]:
    """``measure``, in a workdir that exists."""
    proven = [_proof(each) for each in how.proof]
    grid = _grid(model, _job(model, chosen, how), methods, how, chosen)
    cells.note_proofs(console, proven, grid[0].methods)
    asked = cells.Asked(how.report, how.trace_prompts, how.trace_tokens)
    measured = cells.measure(grid, asked, progress.Progress(), console, proven)
    path = _write(workdir, model, list(methods), how, measured)
    cells.show(console, measured.rows, how.repeats)
    cells.write_report(console, path, measured.rows, draw=how.report)
    cells.check_lossless(measured.rows)
    return json.loads(path.read_text(encoding="utf-8"))


def _proof(given: Any) -> proofs.Proof:
    if isinstance(given, str | os.PathLike):
        return proofs.read(Path(given))
    if all(hasattr(given, name) for name in ("name", "findings", "passed")):
        return proofs.of_report(given)
    raise UserError(
        f"proof has an object of type {type(given).__name__}; it must have reports of "
        "testing.check_drafter or testing.check_accept, or files of them"
    )


def _job(model: Model, chosen: PromptSet, how: Options) -> passes.Job:
    """What is decoded; ``_grid`` sets temperature and batch size. Raises UserError."""
    objects.check_length(model, chosen.prompts, how.max_new_tokens)
    return passes.Job(
        target=model.lm,
        params=model.params,
        prompts=[prompt.ids for prompt in chosen.prompts],
        settings=dict(how.sampling),
        batch_size=1,
        max_new_tokens=how.max_new_tokens,
        eos_id=() if how.ignore_eos else model.eos_id,
        seed=how.seed,
        repeats=how.repeats,
        categories=[prompt.category for prompt in chosen.prompts],
        spell=model.spell,
    )


def _grid(
    model: Model,
    job: passes.Job,
    methods: Mapping[str, Given],
    how: Options,
    chosen: PromptSet,
) -> list[cells.Cell]:
    """A cell for each temperature and batch size. Raises UserError."""
    if not isinstance(methods, Mapping) or not methods:
        raise UserError("methods must be a mapping with at least one name -> (drafter, rule)")
    built = [
        objects.method_of(
            model, given, name=str(name), seed=how.seed, temperatures=how.temperatures
        )
        for name, given in methods.items()
    ]
    if max(how.batch_sizes) > len(chosen.prompts):
        raise UserError(
            f"the batch size is {max(how.batch_sizes)} and there are {len(chosen.prompts)} "
            "prompts; give more, or lower it"
        )
    return [
        cells.Cell(
            job._replace(
                settings={**job.settings, "temperature": float(temperature)}, batch_size=batch_size
            ),
            chosen,
            built,
            f"temperature {temperature:g}, batch {batch_size}",
            uncut=True,
        )
        for temperature in how.temperatures
        for batch_size in how.batch_sizes
    ]


def _write(
    workdir: Path, model: Model, names: list[str], how: Options, measured: cells.Results
) -> Path:
    """Writes results.json and what is beside it; returns its path. Raises UserError."""
    own = dataclasses.asdict(dataclasses.replace(how, proof=()))
    own["proof"] = [
        str(each) if isinstance(each, str | os.PathLike) else each.name for each in how.proof
    ]
    facts = {"mode": "bench", "target": model.directory, "methods": names}
    directory = model.directory
    return results.write(
        json.dumps(facts | own, indent=2, default=str) + "\n",
        workdir,
        measured.rows,
        cells.trace_file(measured.traces),
        target=provenance.target(
            model.params, name="" if directory else model.lm.name, directory=directory
        ),
        max_new_tokens=how.max_new_tokens,
        seed=how.seed,
        repeats=how.repeats,
        uncertainty=uncertainty.ABOUT,
    )
