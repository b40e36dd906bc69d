"""The cost profiles that controllers of a bench read: measured before it, stored in its workdir."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax import control
from specjax.bench import profile
from specjax.bench.passes import Job, Method
from specjax.bench.progress import Progress
from specjax.control import Controller
from specjax.control.costs import ACCEPTANCE, Costs, Profile, device
from specjax.files import write_json
from specjax.models import hf
from specjax.run import build
from specjax.run.cells import Cell
from specjax.run.resolve import Settings

FOLDER = "profiles"


def with_profiles(
    settings: Settings,
    target: hf.Loaded,
    cells: Sequence[Cell],
    workdir: Path,
    done: Progress,
    report: Callable[[str], None],
) -> list[Cell]:
    """The cells, with a measured profile for each method whose controller wants one.

    The profile of a method covers the batch sizes and temperatures of the cells. Costs are measured
    on the prompts that warm drafters learn from (config.warm_prompts), or else on the first ones
    of the bench; acceptance only on the former, so that no measured text is known before.
    """
    methods = list(cells[0].methods)
    for index, (label, choice) in enumerate(settings.methods.items()):
        text = choice.drafter.get("control")
        if not control.wants_profile(text):
            continue
        name = f"profile of {label}"
        measured = done.get(name)
        if measured is None:
            make = functools.partial(_method, settings, target, label)
            jobs, known = _jobs(cells)
            own = functools.partial(_report, report, label)
            # Without other prompts the temperatures would be fitted to the measured ones.
            fitted = known and control.read(str(text))[0] == "calibrated"
            costs = profile.measure(jobs, make, own, confidences=fitted)
            if not known:
                costs = {size: _without_acceptance(each) for size, each in costs.items()}
            model = Path(target.directory).name
            measured = Profile(device(), model, str(choice.drafter["name"]), costs).to_json()
            done.put(name, measured)
        path = workdir / FOLDER / f"{label}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measured)
        joint = "," if ":" in str(text) else ":"
        methods[index] = _method(settings, target, label, f"{text}{joint}profile={path}")
    return [cell._replace(methods=methods) for cell in cells]


def _method(settings: Settings, target: hf.Loaded, label: str, text: str | Controller) -> Method:
    """The method with another controller."""
    choice = settings.methods[label]
    own = choice._replace(drafter=choice.drafter | {"control": text})
    return build.methods(settings, target, settings.bench.temperatures, {label: own})[0]


def _report(report: Callable[[str], None], label: str, message: str) -> None:
    report(f"{label}: {message}")


def _jobs(cells: Sequence[Cell]) -> tuple[list[Job], bool]:
    """One job for each batch size and kind of sampling, and whether no measured prompt is in them.

    Prompts are repeated to fill a batch.
    """
    jobs: dict[tuple[int, bool], Job] = {}
    others = [prompt.ids for prompt in cells[0].prompts.others]
    for cell in cells:
        key = cell.job.batch_size, not cell.job.settings["temperature"]
        chosen = others or list(cell.job.prompts)
        filled = (chosen * -(-key[0] // len(chosen)))[: max(key[0], len(others))]
        jobs.setdefault(key, cell.job._replace(prompts=filled, eos_id=()))
    return list(jobs.values()), bool(others)


def _without_acceptance(costs: Costs) -> Costs:
    """The costs, with the acceptance that is assumed without a measurement."""
    kinds: dict[str, Any] = {
        kind: getattr(costs, kind)._replace(acceptance=(ACCEPTANCE,) * costs.longest)
        for kind in ("greedy", "sampled")
    }
    return costs._replace(**kinds)
