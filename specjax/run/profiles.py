"""The cost profiles that controllers of a bench read: measured before it, stored in its workdir."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax import control
from specjax.bench import profile
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method
from specjax.control import Controller
from specjax.control.costs import ACCEPTANCE, Costs, Profile, device
from specjax.data.progress import Progress
from specjax.files import write_json
from specjax.models import hf
from specjax.run import build
from specjax.run.cells import Cell
from specjax.run.settings import Settings

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
    methods, found = list(cells[0].methods), {}
    # A length of config.grid.gammas that a method does not have was left out.
    places = {method.name: index for index, method in enumerate(methods)}
    for label, choice in settings.methods.items():
        text = choice.drafter.get("control")
        if label not in places or not control.wants_profile(text):
            continue
        key = _without_control(choice)
        if key not in found:
            found[key] = _measured(settings, target, cells, label, done, report)
        # A comma would end the value of the controller's key.
        path = workdir / FOLDER / f"{label.replace(', ', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found[key])
        joint = "," if ":" in str(text) else ":"
        methods[places[label]] = _method(settings, target, label, f"{text}{joint}profile={path}")
    return [cell._replace(methods=methods) for cell in cells]


def _without_control(choice: MethodChoice) -> str:
    """What a profile depends on: the same drafter with any controller has the same."""
    keys = {key: str(value) for key, value in choice.drafter.items() if key != "control"}
    return json.dumps([keys, str(choice._replace(drafter={}))], sort_keys=True)


def _measured(
    settings: Settings,
    target: hf.Loaded,
    cells: Sequence[Cell],
    label: str,
    done: Progress,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The profile of all methods that differ from this one in their controller only."""
    name = f"profile of {label}"
    if (known := done.get(name)) is not None:
        return known
    choice = settings.methods[label]
    own = [
        control.read(str(each.drafter["control"]))[0]
        for each in settings.methods.values()
        if each.drafter.get("control") and _without_control(each) == _without_control(choice)
    ]
    make = functools.partial(_method, settings, target, label)
    jobs, others = _jobs(cells)
    # Without other prompts the temperatures would be fitted to the measured ones.
    fitted = others and "calibrated" in own
    costs = profile.measure(
        jobs, make, lambda message: report(f"{label}: {message}"), confidences=fitted
    )
    if not others:
        costs = {size: _without_acceptance(each) for size, each in costs.items()}
    model = Path(target.directory).name
    measured = Profile(device(), model, str(choice.drafter["name"]), costs).to_json()
    done.put(name, measured)
    return measured


def _method(settings: Settings, target: hf.Loaded, label: str, text: str | Controller) -> Method:
    """The method with another controller."""
    choice = settings.methods[label]
    own = choice._replace(drafter=choice.drafter | {"control": text})
    return build.methods(settings, target, {label: own})[0]


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
    """The costs, with what is assumed of drafts without a measurement."""
    assumed: dict[str, Any] = {"acceptance": (ACCEPTANCE,) * costs.longest, "finds": 1.0}
    kinds: dict[str, Any] = {
        kind: getattr(costs, kind)._replace(**assumed) for kind in ("greedy", "sampled")
    }
    return costs._replace(**kinds)
