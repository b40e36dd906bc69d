"""What is proven, tested, measured and compiled for each drafter: from tests and studies."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax import accept, drafters
from specjax.testing import pair_checks

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

import cases  # noqa: E402  (of the tests)

RULES = {name: accept.load(name) for name in accept.names()}
# The loops of experiments/programs that are not named after their drafter.
COMPILED = {"chain": "draft_model", "tree": "draft_tree", "nested": "escalate"}
# (greedy, one row) of the columns of the measured cells.
CELLS = ((True, True), (True, False), (False, True), (False, False))


def parts() -> dict[str, str]:
    """Name of a part -> its MyST text."""
    return {"support_rules": rules_table(), "support_runs": runs_table()}


def pairs() -> dict[tuple[str, str], bool]:
    """(drafter, rule) -> whether one of its cases runs by default, of every pair that fits."""
    found: dict[tuple[str, str], bool] = {}
    for case, rule, by_default in cases.pairs():
        name = cases.drafter_of(case)
        found[name, rule] = found.get((name, rule), False) or by_default
    return found | {(cases.drafter_of(case), rule): False for case, rule in cases.ENCODER_PAIRS}


def rules_table() -> str:
    """Drafters x rules."""
    known = pairs()
    heads = [f"`{name}`<br>{rule.lossless_class}" for name, rule in RULES.items()]
    lines = [["drafter", *heads], ["---", *[":-:"] * len(heads)]]
    for name in drafters.names():
        lines.append([f"[](#drafter-{name})", *(_mark(known, name, rule) for rule in RULES)])
    settings = " and ".join(
        ", ".join(f"{key} {value:g}" for key, value in each.items())
        for each in pair_checks.SETTINGS
    )
    note = (
        f"Every pair runs greedily and sampled ({settings}), with ragged rows in one batch, rows "
        "of temperature 0 among sampled ones, ends of text and limits."
    )
    return f"{_table(lines)}\n\n{note}"


def _mark(known: dict[tuple[str, str], bool], name: str, rule: str) -> str:
    if (by_default := known.get((name, rule))) is None:
        return ""
    kind = "proven" if RULES[rule].lossless_class == "L1" else "tested"
    return f"**{kind}**" if by_default else kind


def runs_table() -> str:
    """Drafters x where they were measured and compiled."""
    heads = ["T 0, one row", "T 0, batch", "T > 0, one row", "T > 0, batch", "GPU", "compiled"]
    lines = [["drafter", *heads], ["---"] * (len(heads) + 1)]
    measured, compiled = _measured(), _compiled()
    for name in drafters.names():
        own = measured.get(name, {})
        cells = [", ".join(sorted(own.get(("cpu", *cell), ()))) for cell in CELLS]
        gpu = {study for key, names in own.items() if key[0] != "cpu" for study in names}
        chips = ", ".join(sorted(compiled.get(name, ())))
        lines.append([f"[](#drafter-{name})", *cells, ", ".join(sorted(gpu)), chips])
    return _table(lines)


def _measured() -> dict[str, dict[tuple[str, bool, bool], set[str]]]:
    """Drafter -> (backend, greedy, one row) -> the studies with such rows."""
    found: dict[str, dict[tuple[str, bool, bool], set[str]]] = {}
    for path in sorted((ROOT / "experiments").glob("*/*.json")):
        study = path.parent.name
        for row, backend in _rows(json.loads(path.read_text(encoding="utf-8")), "cpu"):
            key = backend, not row["temperature"], row.get("batch_size", 1) == 1
            found.setdefault(_drafter(row), {}).setdefault(key, set()).add(study)
    # All of this study's rounds are those of controlled drafts at temperature 0.
    path = ROOT / "experiments" / "accelerator" / "results.json"
    accelerator = json.loads(path.read_text(encoding="utf-8"))
    for row in accelerator["controlled"]:
        key = accelerator["versions"]["backend"], True, row["batch_size"] == 1
        found.setdefault("controlled", {}).setdefault(key, set()).add("accelerator")
    return found


def _rows(value: Any, backend: str) -> Iterator[tuple[dict, str]]:
    """The measured rows inside of a result, and the backend of each."""
    if isinstance(value, list):
        for each in value:
            yield from _rows(each, backend)
    if not isinstance(value, dict):
        return
    versions = value.get("versions")
    backend = versions.get("backend", backend) if isinstance(versions, dict) else backend
    if _drafter(value) and "temperature" in value and {"speedup", "tokens_per_second"} & set(value):
        yield value, backend
    for each in value.values():
        yield from _rows(each, backend)


def _drafter(row: dict) -> str:
    """The drafter of a row, which its label begins with if the row does not name it; "": none."""
    for text in (str(row.get("drafter") or ""), str(row.get("method") or "")):
        word = re.match(r"\w*", text)
        if word and word[0] in drafters.names():
            return word[0]
    return ""


def _compiled() -> dict[str, set[str]]:
    """Drafter -> the chips for which its loop was compiled without one."""
    path = ROOT / "experiments" / "programs" / "results.json"
    results, found = json.loads(path.read_text(encoding="utf-8")), {}
    for row in (*results["rows"], *results["gpus"]["rows"]):
        name, _, what = row["program"].partition(" ")
        name = COMPILED.get(name, name)
        if what == "loop" and name in drafters.names():
            found.setdefault(name, set()).add(row["chip"].split("_")[0])
    return found


def _table(lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
