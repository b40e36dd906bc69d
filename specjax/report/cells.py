"""The rows of results.json as the lines of the report's table, each with its details."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.report import _rows
from specjax.report._rows import TIME_PARTS
from specjax.report._text import cut
from specjax.report.columns import COLUMNS, FACTS, Column
from specjax.report.inputs import number_of, passed

DASH = "\N{EN DASH}"  # not measured
NOT_MEASURABLE = "n/m"
# Characters shown of the first column, and of the other columns.
MOST, MOST_OTHERS = 60, 24


class Cell(NamedTuple):
    """One cell of the table."""

    text: str
    sort: float | str
    style: str = ""  # a CSS class
    below: str = ""  # a second line in small letters
    full: str = ""  # the texts that were cut, uncut


class Bar(NamedTuple):
    """A share between 0 and 1, drawn as a bar."""

    head: str
    text: str
    share: float


class Line(NamedTuple):
    """A line of the table, and the details that unfold under it."""

    cells: list[Cell]
    facts: list[tuple[str, str]]
    bars: list[tuple[str, list[Bar]]]
    split: list[Bar]
    categories: list[list[str]]


def lines(rows: Sequence[dict]) -> list[Line]:
    """One line for each row over all prompts, with the rows of its categories inside.

    A row of a category without such a row has a line of its own.
    """
    parts: dict[int, list[dict]] = {}
    for row, owner in zip(rows, _rows.owners(rows), strict=True):
        parts.setdefault(id(row if owner is None else owner), []).append(row)
    return [
        _line(row, [part for part in parts[id(row)] if part is not row])
        for row in rows
        if id(row) in parts
    ]


def verdict(shown: Sequence[Line]) -> str:
    """One sentence that counts the results of the lossless checks."""
    styles = [line.cells[-1].style for line in shown]
    lossy = [any(cell.style == "lossy" for cell in line.cells) for line in shown]
    others = sum(
        style not in ("passed", "failed") and not by_design
        for style, by_design in zip(styles, lossy, strict=True)
    )
    parts = [
        f"{styles.count('passed')} of {len(shown)} rows passed their lossless check",
        f"{styles.count('failed')} failed",
    ]
    parts += [f"{others} had no check or no clear result"] if others else []
    parts += [f"{sum(lossy)} of class L3: lossy by design"] if any(lossy) else []
    return ", ".join(parts) + "."


def _line(row: dict, categories: Sequence[dict]) -> Line:
    overlap = _object(row.get("overlap"))
    classes = {
        key: _object(value).get("alpha") for key, value in _object(overlap.get("by_class")).items()
    }
    groups = (
        ("acceptance by depth", _numbered(row.get("acceptance_by_depth"))),
        ("overlap by depth", _numbered(overlap.get("by_depth"))),
        ("overlap by token class", classes),
    )
    by_category = _object(overlap.get("by_category"))
    return Line(
        cells=[
            _cut_cell(_cell(row, column), MOST_OTHERS if index else MOST)
            for index, column in enumerate(COLUMNS)
        ],
        facts=_facts(row, overlap),
        bars=[(head, _bars(values)) for head, values in groups if values],
        split=_split(_object(row.get("time_split"))),
        categories=[
            _category(part, _object(by_category.get(str(part["category"])))) for part in categories
        ],
    )


def _facts(row: dict, overlap: dict) -> list[tuple[str, str]]:
    """(name, value) of the details that are one number or one text."""
    facts = [
        (head, _spell(row.get(key), number_format))
        for key, head, number_format in FACTS
        if row.get(key) is not None
    ]
    sizes = _object(row.get("parameters"))
    facts += [(f"{key} parameters", _spell(value, "{:,.0f}")) for key, value in sizes.items()]
    facts += _costs(row)
    if ends := _ends(row.get("speedup_interval"), "{:.2f}"):
        facts.append(("95% interval of the speed-up", ends))
    if overlap:
        alpha, tokens = overlap.get("alpha"), overlap.get("tokens")
        facts.append(("overlap", f"{_spell(alpha, '{:.3f}')}, {_spell(tokens, '{:,.0f}')} tokens"))
    if check := _object(row.get("lossless")):
        facts.append(("check", f"{check.get('check') or DASH}: {check.get('detail') or DASH}"))
    return facts


def _cell(row: dict, column: Column) -> Cell:
    value = row.get(column.key)
    if column.key == "lossless":
        return _lossless(row)
    if column.key == "method":
        marks = [f"category {row['category']}"] if row.get("category") is not None else []
        marks += ["warm"] * (row.get("warm") is True)
        return Cell(str(value), str(value), below=", ".join(marks))
    if column.key == "prompt_set":
        count = _spell(row.get("prompts"), "{:g}")
        if value is None:
            return Cell(count, "")
        return Cell(str(value), str(value or ""), below=count)
    if column.key == "class":
        lossy = "lossy" if value == "L3" else ""
        status = _rows.lossless_class(row).partition(" ")[2]
        return Cell(str(value or DASH), str(value or ""), lossy, lossy or status)
    if not column.number_format:
        return Cell(str(value or DASH), str(value or ""))
    number, below = number_of(value), ""
    if column.key == "speedup":
        below = _ends(_object(row.get("spread")).get("speedup"), "{:.2f}")
    elif column.key in ("block_efficiency", "acceptance_rate"):
        below = _error(row, column.key)
    text = _spell(value, column.number_format)
    if column.key == "system_efficiency" and _rows.too_efficient(row):
        text, below = NOT_MEASURABLE, text
    return Cell(text, "" if number is None else number, "number", below)


def _lossless(row: dict) -> Cell:
    check = _object(row.get("lossless"))
    if not check:
        return Cell(DASH, 0, "", "lossy by design" if row.get("class") == "L3" else "")
    result = passed(check)
    if result is None:
        why = "lossy by design" if row.get("class") == "L3" else "too few tokens"
        inconclusive = check.get("passed") is None
        return Cell("?", 2, "unsure", why if inconclusive else "neither true nor false")
    text, style, rank = ("yes", "passed", 3) if result else ("NO", "failed", 1)
    return Cell(text, rank, style, str(check.get("detail") or "").rpartition(", ")[2])


def _cut_cell(cell: Cell, most: int) -> Cell:
    text, below = cut(cell.text, most), cut(cell.below, most)
    pairs = ((cell.text, text), (cell.below, below))
    full = "; ".join(before for before, after in pairs if before != after)
    return cell._replace(text=text, below=below, full=full)


def _costs(row: dict) -> list[tuple[str, str]]:
    """The time of each part of a round, with its spread, and a hint where it cannot be right."""
    costs = _object(row.get("costs_ms"))
    spread = _object(_object(row.get("spread")).get("costs_ms"))
    facts = []
    for key, value in costs.items():
        ends = _ends(spread.get(key), "{:.3g}")
        facts.append((key, _spell(value, "{:.3g} ms") + (f" ({ends})" if ends else "")))
    step, verify = number_of(costs.get("step")), number_of(costs.get("verify"))
    efficiency = number_of(row.get("system_efficiency"))
    why = "the machine was busy, or too little was timed"
    if step is not None and verify is not None and verify < step:
        facts.append(("hint", f"verification took less time than a one-token pass: {why}"))
    elif efficiency is not None and efficiency > 1.05:
        facts.append(("hint", f"the speed-up is above what the costs of the parts allow: {why}"))
    return facts


def _error(row: dict, key: str) -> str:
    """A standard error with its sign; "" if it is not known."""
    error = number_of(_object(row.get("standard_errors")).get(key))
    return "" if error is None else f"\N{PLUS-MINUS SIGN} {error:.2f}"


def _ends(values: Any, number_format: str) -> str:
    """The minimum and the maximum of several passes; "" if there are none."""
    ends = [number_of(end) for end in values] if isinstance(values, list) else []
    if len(ends) != 2 or None in ends:
        return ""
    return DASH.join(number_format.format(end) for end in ends)


def _split(shares: dict) -> list[Bar]:
    parts = [part for part in TIME_PARTS if part in shares]
    parts += [part for part in shares if part not in TIME_PARTS]
    return _bars({part: shares[part] for part in parts}, "{:.0%}")


def _category(row: dict, overlap: dict) -> list[str]:
    """The texts of a category's line, in the order of ``CATEGORY_HEADS``."""
    overlap = _object(row.get("overlap")) or overlap
    return [
        cut(str(row["category"]), MOST),
        _spell(row.get("prompts"), "{:g}"),
        f"{_spell(row.get('block_efficiency'), '{:.2f}')} {_error(row, 'block_efficiency')}",
        _spell(row.get("repeated_4grams"), "{:.0%}"),
        f"{_spell(row.get('acceptance_rate'), '{:.2f}')} {_error(row, 'acceptance_rate')}",
        _spell(overlap.get("alpha"), "{:.3f}"),
        _spell(row.get("tokens_per_second"), "{:,.0f}"),
        _spell(row.get("speedup"), "{:.2f}x"),
    ]


def _bars(values: Mapping[str, Any], number_format: str = "{:.2f}") -> list[Bar]:
    numbers = {str(head): number_of(value) for head, value in values.items()}
    return [
        Bar(cut(head, MOST), _spell(number, number_format), min(max(number, 0.0), 1.0))
        for head, number in numbers.items()
        if number is not None
    ]


def _numbered(values: Any) -> dict[str, Any]:
    return {str(n): value for n, value in enumerate(values, 1)} if isinstance(values, list) else {}


def _object(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _spell(value: Any, number_format: str) -> str:
    """The value as text; a dash for None, and for what is not a number if it should be one."""
    if value is None:
        return DASH
    if not number_format:
        return str(value)
    number = number_of(value)
    return DASH if number is None else number_format.format(number)
