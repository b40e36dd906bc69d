"""Reads what a bench wrote: results.json, and trace.jsonl beside it.

A mistake in results.json is an error. Traces that cannot be shown are left out, with a notice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.data import jsonl
from specjax.errors import UserError

SCHEMA = 1  # of both files
# The number of values of an emitted token and of a drafted one.
OUT, DRAFT = 6, 7
ROUNDING = 1e-3  # a probability may exceed its range by this much
GIVE_RESULTS = "give the results.json that a bench wrote"


def results_path(workdir: Path) -> Path:
    """The results.json in a directory, or the file itself."""
    is_file = workdir.is_file() or (workdir.suffix == ".json" and not workdir.is_dir())
    return workdir if is_file else workdir / "results.json"


def read_results(path: Path) -> dict:
    """The object in results.json; its ``rows`` are a list whose entries are not checked.

    Raises:
        UserError: the file cannot be read, is not a JSON object, has another schema, or no rows.
    """
    where = f"results {path}"
    text = jsonl.read(path, where)
    try:
        results = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = (
            f" (line {error.lineno}: {error.msg})"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        raise UserError(f"{where} is not JSON{why}; {GIVE_RESULTS}") from None
    if not isinstance(results, dict):
        raise UserError(f"{where} is not a JSON object; {GIVE_RESULTS}")
    if not _is_schema(results.get("schema")):
        raise UserError(
            f"{where} has schema {_schema_text(results)}; this version reads schema {SCHEMA}"
        )
    if not isinstance(results.get("rows"), list):
        raise UserError(f'{where} has no list "rows"; {GIVE_RESULTS}')
    return results


def finished_rows(rows: Sequence[Any]) -> tuple[list[dict], list[str]]:
    """(the rows with a method and a measurement, a notice for each of the other rows).

    A measurement is a number under tokens_per_second or block_efficiency.
    """
    finished, notices = [], []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("method"), str):
            notices.append(f"row {number} is left out: it is not an object with a method")
        elif not any(
            number_of(row.get(key)) is not None for key in ("tokens_per_second", "block_efficiency")
        ):
            notices.append(f"row {number} ({row['method']}) is left out: it has no measurement")
        else:
            finished.append(row)
    return finished, notices


def number_of(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def passed(check: dict) -> bool | None:
    """The result of a lossless check; None unless it is true or false."""
    value = check.get("passed")
    return value if isinstance(value, bool) else None


def read_traces(path: Path) -> tuple[list[dict], list[str]]:
    """(the traces of a file that can be shown, a notice for every other line).

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    traces, notices = [], []
    lines = jsonl.lines(jsonl.read(path, f"trace {path}"))
    for number, line in lines:
        trace = jsonl.parse(line)
        problem = "it is not a JSON object" if trace is None else trace_problem(trace)
        if trace is None or problem:
            notices.append(f"{path.name} line {number} is left out: {problem}")
        else:
            traces.append(trace)
    if not lines:
        notices.append(f"{path.name} is empty: there is no trace to show")
    return traces, notices


def trace_problem(trace: dict) -> str | None:
    """Why a trace cannot be shown; None if it can."""
    if not _is_schema(trace.get("schema")):
        return f"it has schema {_schema_text(trace)}; this version reads schema {SCHEMA}"
    for key in ("method", "prompt"):
        if not isinstance(trace.get(key), str):
            return f'it has no text "{key}"'
    if not isinstance(trace.get("rounds"), list) or not trace["rounds"]:
        return 'it has no list "rounds" with at least one round'
    problems = (_round_problem(number, one) for number, one in enumerate(trace["rounds"], 1))
    return next((problem for problem in problems if problem), None)


def _round_problem(number: int, one: Any) -> str | None:
    """Why a round cannot be shown; None if it can."""
    if not isinstance(one, dict) or not all(
        isinstance(one.get(key), list) for key in ("out", "draft")
    ):
        return f'round {number} has no lists "out" and "draft"'
    for index, token in enumerate(one["out"]):
        if not _is_token(token, OUT) or token[2] not in (0, 1, 2, 3):
            return _not_a_token(number, "out", index, token)
    for index, node in enumerate(one["draft"]):
        if not _is_token(node, DRAFT) or not -1 <= node[2] < index or node[6] not in (0, 1):
            return _not_a_token(number, "draft", index, node)
    return None


def _not_a_token(number: int, key: str, index: int, value: Any) -> str:
    return (
        f"round {number}: {key} {index} is {json.dumps(value)[:60]}; "
        "the format of a trace is in specjax/bench/token_traces.py"
    )


def _is_token(token: Any, length: int) -> bool:
    """Whether it is [text, id, origin or parent, target's probability, draft's, rank(, kept)]."""
    if not isinstance(token, list) or len(token) != length or not isinstance(token[0], str):
        return False
    if type(token[1]) is not int or type(token[2]) is not int:
        return False
    for value in token[3:5]:
        if value is not None and (
            number_of(value) is None or not -ROUNDING <= value <= 1 + ROUNDING
        ):
            return False
    return token[5] is None or (type(token[5]) is int and token[5] >= 0)


def has_probabilities(trace: dict) -> bool:
    """Whether any token of a trace has a probability of the target."""
    rounds = trace["rounds"]
    return any(
        token[3] is not None for one in rounds for key in ("out", "draft") for token in one[key]
    )


def rejected_nodes(one: dict) -> list[list]:
    """The draft tokens of a round that were rejected: the children of the last accepted node.

    Empty unless the round ends with a residual token: without one, no token was rejected, or the
    text ended before.
    """
    if not one["out"] or one["out"][-1][2] != 1:
        return []
    last = max((index for index, node in enumerate(one["draft"]) if node[6]), default=-1)
    return [node for node in one["draft"] if node[2] == last and not node[6]]


def _is_schema(value: Any) -> bool:
    return type(value) is int and value == SCHEMA


def _schema_text(value: dict) -> str:
    return json.dumps(value["schema"])[:40] if "schema" in value else "none"
