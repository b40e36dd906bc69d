"""The costs that controllers of experiments/real_model read, measured on other questions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.real_model import methods
from specjax import control
from specjax.bench import profile
from specjax.bench.passes import Job, Method
from specjax.control import Controller
from specjax.control.costs import read
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf

# New tokens of a row: more than the rounds of a sample emit.
NEW = 200


def wanted(names: Sequence[str]) -> dict[str, Any] | None:
    """The keys of the methods that want a profile, without the controller; None: none does.

    Stops the program if they are different drafters: a profile is of one.
    """
    found = []
    for name in names:
        keys = methods.spelled(name) if "=" in name else {}
        if control.wants_profile(keys.pop("control", None)):
            found.append(keys)
    if any(keys != found[0] for keys in found):
        raise SystemExit("controllers of different drafters want a profile; measure one at a time")
    return found[0] if found else None


def measure(
    path: Path,
    target: hf.Loaded,
    keys: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
) -> None:
    """Measures the profile of a drafter and writes it to ``path``, unless it is there.

    Stops the program if the one that is there does not have these batch sizes.
    """
    if path.exists():
        _check(path, batch_sizes)
        return
    make = functools.partial(_with, target, keys, temperatures)
    jobs = [
        Job(
            target.lm,
            target.params,
            (list(prompts) * batch)[: max(batch, len(prompts))],
            {"temperature": temperature},
            batch,
            NEW,
            (),
            seed=0,
            repeats=1,
        )
        for batch in batch_sizes
        for temperature in temperatures
    ]
    names = Path(target.directory).name, keys["name"]
    measured = profile.measure(jobs, make, functools.partial(print, flush=True), names=names)
    write_json(path, measured.to_json())


def _check(path: Path, batch_sizes: Sequence[int]) -> None:
    try:
        stored = read(path)
        for batch in batch_sizes:
            stored.check(batch)
    except UserError as error:
        raise SystemExit(f"{path}: {error}; remove the file to measure it anew") from None


def _with(
    target: hf.Loaded, keys: dict[str, Any], temperatures: Sequence, text: str | Controller
) -> Method:
    return methods.make(target, keys["name"], keys | {"control": text}, temperatures)
