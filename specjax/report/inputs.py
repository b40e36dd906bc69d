"""Reads what a bench wrote: results.json, and trace.jsonl beside it.

A mistake in results.json is an error. Traces that cannot be shown are left out, with a notice.
The values of rows are not checked, and texts may hold any character: see the functions at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax import files
from specjax.data import jsonl
from specjax.errors import UserError

SCHEMA = 1  # of both files
# The number of values of a token in the lists of a round: of an emitted one, and of a drafted one.
LENGTHS = {"out": 6, "draft": 7}
ROUNDING = 1e-3  # a probability may exceed its range by this much
GIVE_RESULTS = "give the results.json that a bench wrote"
# Rows that agree in these keys are one measurement, as a whole and by category.
SAME = ("method", "accept", "temperature", "batch_size", "prompt_set", "new_tokens", "warm")
RANGE = 1e15  # no measurement is larger, and matplotlib cannot lay out an axis that is much longer
TIME_PARTS = ("draft", "verify", "accept", "host")  # the parts of the decoding time, in order
# Characters that a terminal interprets, or that no file can hold, and what is shown instead.
# Tabs (9) and line feeds (10) stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
VISIBLE |= dict.fromkeys(
    (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)
VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
MOST_NOTICES = 5  # notices of one kind that are shown in full


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
        results = files.parsed(text)
    except ValueError as error:
        has_place = isinstance(error, json.JSONDecodeError)
        why = f" (line {error.lineno}: {error.msg})" if has_place else ""
        raise UserError(f"{where} is not JSON{why}; {GIVE_RESULTS}") from None
    if not isinstance(results, dict):
        raise UserError(f"{where} is not a JSON object; {GIVE_RESULTS}")
    if problem := _schema_problem(results):
        raise UserError(f"{where} {problem}")
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
    for line in jsonl.objects(jsonl.read(path, f"trace {path}"), path.name):
        problem = "it is not a JSON object" if line.value is None else trace_problem(line.value)
        if line.value is None or problem:
            notices.append(f"{line.where} is left out: {problem}")
        else:
            traces.append(line.value)
    if not traces and not notices:
        notices.append(f"{path.name} is empty: there is no trace to show")
    return traces, notices


def trace_problem(trace: dict) -> str | None:
    """Why a trace cannot be shown; None if it can."""
    if problem := _schema_problem(trace):
        return f"it {problem}"
    for key in ("method", "prompt"):
        if not isinstance(trace.get(key), str):
            return f'it has no text "{key}"'
    if not isinstance(trace.get("rounds"), list) or not trace["rounds"]:
        return 'it has no list "rounds" with at least one round'
    problems = (_round_problem(number, one) for number, one in enumerate(trace["rounds"], 1))
    return next((problem for problem in problems if problem), None)


def _round_problem(number: int, one: Any) -> str | None:
    """Why a round cannot be shown; None if it can."""
    if not isinstance(one, dict) or not all(isinstance(one.get(key), list) for key in LENGTHS):
        return f'round {number} has no lists "out" and "draft"'
    for key, length in LENGTHS.items():
        for index, token in enumerate(one[key]):
            links = range(4) if key == "out" else range(-1, index)
            if not _is_token(token, length, links):
                return (
                    f"round {number}: {key} {index} is {json.dumps(token)[:60]}; "
                    "the format of a trace is in specjax/bench/token_traces.py"
                )
    return None


def _is_token(token: Any, length: int, links: range) -> bool:
    """Whether it is [text, id, origin or parent, target's probability, draft's, rank(, kept)].

    ``links`` are the origins or parents that it may have.
    """
    if not isinstance(token, list) or len(token) != length or not isinstance(token[0], str):
        return False
    whole = token[1], token[2], 0 if token[5] is None else token[5]
    probs = [number_of(value) for value in token[3:5] if value is not None]
    return (
        all(type(value) is int for value in whole)
        and token[2] in links
        and all(prob is not None and -ROUNDING <= prob <= 1 + ROUNDING for prob in probs)
        and whole[2] >= 0
        and token[6:] in ([], [0], [1])
    )


def has_probabilities(trace: dict) -> bool:
    """Whether any token of a trace has a probability of the target."""
    rounds = trace["rounds"]
    return any(token[3] is not None for one in rounds for key in LENGTHS for token in one[key])


def rejected_nodes(one: dict) -> list[list]:
    """The draft tokens of a round that were rejected: the children of the last accepted node.

    Empty unless the round ends with a residual token: without one, no token was rejected, or the
    text ended before.
    """
    if not one["out"] or one["out"][-1][2] != 1:
        return []
    last = max((index for index, node in enumerate(one["draft"]) if node[6]), default=-1)
    return [node for node in one["draft"] if node[2] == last and not node[6]]


def _schema_problem(value: dict) -> str | None:
    """What is wrong with the schema of an object; None: nothing."""
    schema = value.get("schema")
    if type(schema) is int and schema == SCHEMA:
        return None
    text = json.dumps(schema)[:40] if "schema" in value else "none"
    return f"has schema {text}; this version reads schema {SCHEMA}"


def is_number(value: Any) -> bool:
    """Whether it is a number that can be drawn: 0, or between 1 / ``RANGE`` and ``RANGE``."""
    number = number_of(value)
    return number is not None and (number == 0 or 1 / RANGE <= abs(number) <= RANGE)


def number(row: dict, name: str) -> Any:
    """The value under ``name`` if it is a number that can be drawn, else None."""
    value = row.get(name)
    return value if is_number(value) else None


def part(row: dict, name: str) -> dict:
    """The value under ``name`` if it is an object, else {}."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def label(row: dict) -> str:
    """The user's label of the row's method."""
    return str(row.get("method") or row.get("drafter") or "unnamed")


def finished(rows: Sequence[dict]) -> list[dict]:
    """The rows over all prompts that have a speed-up."""
    return [
        row for row in rows if (number(row, "speedup") or 0) > 0 and row.get("category") is None
    ]


def owners(rows: Sequence[dict]) -> list[dict | None]:
    """For each row of a category the row over all prompts that it is a part of.

    That is a row with the same settings: if several lengths of prompts were measured, the one with
    its own mean length, else the last one before it. None if there is none, and for other rows.
    """
    whole: dict[str, list[tuple[int, dict]]] = {}
    for index, row in enumerate(rows):
        if row.get("category") is None:
            whole.setdefault(_settings(row), []).append((index, row))
    result: list[dict | None] = []
    for index, row in enumerate(rows):
        known = whole.get(_settings(row), []) if row.get("category") is not None else []
        alike = [each for each in known if each[1].get("context") == row.get("context")]
        choice = alike or known
        before = [each for at, each in choice if at < index]
        result.append(before[-1] if before else choice[0][1] if choice else None)
    return result


def _settings(row: dict) -> str:
    return repr([row.get(key) for key in SAME])


def visible(text: str) -> str:
    """The text with a visible sign for every character that a terminal would interpret."""
    return text.translate(VISIBLE)


def one_line(text: str) -> str:
    """The visible text on one line."""
    return " ".join(visible(text).split())


def cut(text: str, most: int) -> str:
    """At most ``most`` characters of the text; a longer text ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_notices(notices: Sequence[str], rest: str) -> list[str]:
    """The first notices of one kind, and one that counts the others.

    Args:
        notices: of one kind.
        rest: completes "3 more ..." for the notices that are not shown.
    """
    more = len(notices) - MOST_NOTICES
    return [*notices[:MOST_NOTICES], f"{more:,} more {rest}"] if more > 1 else list(notices)
