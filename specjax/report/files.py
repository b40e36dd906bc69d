"""What a bench left behind, read again: results.json, and trace.jsonl beside it.

A mistake in results.json is an error; of traces, whatever can be shown is, and the rest is told in notices.
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
ORIGINS = (
    "accepted",
    "residual",
    "bonus",
    "plain",
)  # of an emitted token, by their numbers in a trace
OUT, DRAFT = 6, 7  # how many values an emitted token and a drafted one have
# A text may hold what a terminal obeys, or what no file can hold: show it instead. Tabs and line feeds are text.
PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
PICTURES |= dict.fromkeys(
    (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)
PICTURES |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
FEW = 5  # notices of one kind that are told word by word


def results(path: Path) -> dict:
    """The object in results.json; ``rows`` is a list of objects, each unchecked.

    Raises:
        UserError: a file that cannot be read, is no JSON object, has another schema, or no list of rows.
    """
    where = f"results {path}"
    text = jsonl.read(path, where)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = (
            f" (line {error.lineno}: {error.msg})"
            if isinstance(error, json.JSONDecodeError)
            else ""
        )
        raise UserError(
            f"{where} is not JSON{why}; give the results.json that a bench wrote"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{where} is no JSON object; give the results.json that a bench wrote")
    if not _is_schema(found.get("schema")):
        raise UserError(
            f"{where} has schema {_shown(found, 'schema')}; this version reads schema {SCHEMA}"
        )
    if not isinstance(found.get("rows"), list):
        raise UserError(f'{where} has no list "rows"; give the results.json that a bench wrote')
    return found


def finished(rows: Sequence[Any]) -> tuple[list[dict], list[str]]:
    """The rows that have a method and a figure, tokens per second or block efficiency; and a notice of each of the others."""
    good, notices = [], []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("method"), str):
            notices.append(f"row {number} is left out: it is no object with a method")
        elif not any(
            number_of(row.get(key)) is not None for key in ("tokens_per_second", "block_efficiency")
        ):
            notices.append(
                f"row {number} ({row['method']}) is left out: it is not finished, nothing was measured"
            )
        else:
            good.append(row)
    return good, notices


def few(notices: Sequence[str], what: str) -> list[str]:
    """The first notices of one kind, and how many more there are; ``what`` says of them what happened."""
    more = len(notices) - FEW
    return [*notices[:FEW], f"{more:,} more {what}"] if more > 1 else list(notices)


def one_line(text: str, most: int | None = None) -> str:
    """The text on one line, cut after ``most`` characters, with everything in it that a terminal would obey made visible."""
    text = " ".join(text.translate(PICTURES).split())
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def number_of(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


def passed(outcome: dict) -> bool | None:
    """What a lossless check found: only true and false are findings."""
    found = outcome.get("passed")
    return found if isinstance(found, bool) else None


def traces(path: Path) -> tuple[list[dict], list[str]]:
    """The traces of a file that can be shown, and a notice of every line that cannot.

    Raises:
        UserError: a file that cannot be read, or is not UTF-8.
    """
    good, notices = [], []
    found = jsonl.lines(jsonl.read(path, f"trace {path}"))
    for number, line in found:
        record = jsonl.parse(line)
        why = "it is no JSON object" if record is None else problem(record)
        if record is None or why:
            notices.append(f"{path.name} line {number} is left out: {why}")
        else:
            good.append(record)
    if not found:
        notices.append(f"{path.name} is empty: there is no trace to show")
    return good, notices


def problem(record: dict) -> str | None:
    """What is wrong with a trace, or None."""
    if not _is_schema(record.get("schema")):
        return f"it has schema {_shown(record, 'schema')}; this version reads schema {SCHEMA}"
    for key in ("method", "prompt"):
        if not isinstance(record.get(key), str):
            return f'it has no text "{key}"'
    if not isinstance(record.get("rounds"), list) or not record["rounds"]:
        return 'it has no list "rounds" with at least one round'
    for number, one in enumerate(record["rounds"], 1):
        if not isinstance(one, dict) or not all(
            isinstance(one.get(key), list) for key in ("out", "draft")
        ):
            return f'round {number} has no lists "out" and "draft"'
        for place, token in enumerate(one["out"]):
            if not _is_token(token, OUT) or token[2] not in (0, 1, 2, 3):
                return f"round {number}: out {place} is {json.dumps(token)[:60]}; see the format of a trace"
        for place, node in enumerate(one["draft"]):
            if not _is_token(node, DRAFT) or not -1 <= node[2] < place or node[6] not in (0, 1):
                return f"round {number}: draft {place} is {json.dumps(node)[:60]}; see the format of a trace"
    return None


def _is_token(token: Any, length: int) -> bool:
    """Whether it is [text, id, origin or parent, target's probability, draft's, rank(, kept)]."""
    if not isinstance(token, list) or len(token) != length or not isinstance(token[0], str):
        return False
    if type(token[1]) is not int or type(token[2]) is not int:
        return False
    for value in token[3:5]:
        if value is not None and not (
            number_of(value) is not None and -1e-3 <= value <= 1 + 1e-3
        ):  # rounding is forgiven
            return False
    return token[5] is None or (type(token[5]) is int and token[5] >= 0)


def has_probabilities(record: dict) -> bool:
    """Whether any token of a trace has a probability of the target."""
    rounds = record["rounds"]
    return any(
        token[3] is not None for one in rounds for key in ("out", "draft") for token in one[key]
    )


def rejected(one: dict) -> list[list]:
    """The draft tokens of a round that were refused where the target's own token came in: children of the last node kept."""
    if (
        not one["out"] or one["out"][-1][2] != 1
    ):  # no residual: nothing was refused, or the text ended before
        return []
    last = max((place for place, node in enumerate(one["draft"]) if node[6]), default=-1)
    return [node for node in one["draft"] if node[2] == last and not node[6]]


def _is_schema(value: Any) -> bool:
    return type(value) is int and value == SCHEMA


def _shown(found: dict, key: str) -> str:
    return json.dumps(found[key])[:40] if key in found else "none"
