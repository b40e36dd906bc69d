"""The rows of results.json as the report spells them: columns with one definition each, and the details of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.report.files import number_of, passed

DASH = "\N{EN DASH}"  # what was not measured
MOST, LESS = 60, 24  # characters that the table shows of the first column, and of the others
PARTS = (
    "draft",
    "verify",
    "accept",
    "host",
)  # of the decoding time, in the order and the colours of its plot


class Column(NamedTuple):
    """A column of the table."""

    key: str
    head: str
    meaning: str
    spell: str = ""  # of a number; words have none


COLUMNS = (
    Column(
        "method",
        "method",
        "the label of the drafter and its settings; warm: it learnt from other prompts before",
    ),
    Column("accept", "rule", "the acceptance rule, which decides what is kept of a draft"),
    Column(
        "class",
        "class",
        "L1: the output law is the target's; L2: identical under greedy decoding; L3: lossy by design",
    ),
    Column("temperature", "T", "the sampling temperature; 0 is greedy decoding", "{:g}"),
    Column("batch_size", "batch", "rows decoded together", "{:g}"),
    Column("prompt_set", "prompts", "the set of prompts, and how many of them"),
    Column(
        "block_efficiency",
        "tau",
        "block efficiency: tokens per round of a row, the target's own included, after cutting at end-of-sequence and limits; "
        "between 1 and gamma + 1",
        "{:.2f}",
    ),
    Column(
        "acceptance_rate",
        "alpha",
        "acceptance rate: accepted / tested draft tokens; a token is tested if all before it were accepted (on a tree: some "
        "sibling at a tested depth)",
        "{:.2f}",
    ),
    Column(
        "tokens_per_second",
        "tokens/s",
        "tokens of all rows per second of decoding, without prefill",
        "{:,.0f}",
    ),
    Column(
        "autoregressive_tokens_per_second",
        "plain",
        "tokens/s of our own autoregressive loop: same model, precision and batch",
        "{:,.0f}",
    ),
    Column(
        "speedup",
        "speed-up",
        "tokens/s over those of plain decoding, median of interleaved passes; below it the least and the greatest",
        "{:.2f}x",
    ),
    Column(
        "predicted_speedup",
        "predicted",
        "tokens per turn of the loop, over plain decoding's, times (time of a one-token pass) / (time to draft + time to "
        "verify), each measured by itself",
        "{:.2f}x",
    ),
    Column(
        "system_efficiency", "eff", "system efficiency: speed-up / predicted speed-up", "{:.2f}"
    ),
    Column(
        "lossless",
        "lossless",
        "greedy: the same tokens as plain decoding, prompt by prompt; sampled: two tests of the outputs against the target's "
        "law, a smoke alarm; ?: too few tokens to tell",
    ),
)
DETAILS = (
    (
        "gamma",
        "the longest path of draft tokens that a round can accept; on a chain, draft tokens per round",
    ),
    ("nodes", "draft tokens per round; on a tree more than gamma"),
    ("acceptance by depth", "alpha of each depth, given that all before it were accepted"),
    (
        "overlap",
        "Σ min(target's law, draft's law) over the vocabulary, mean over every position of the target's text",
    ),
    (
        "step, draft, verify",
        "time of a one-token pass of the target, of one whole draft, of the pass that verifies it; median of the passes",
    ),
    (
        "probabilities of a trace",
        "of each token under the sampling settings, by the target and by the draft; at temperature 0, where all would be 0 "
        "or 1, under temperature 1",
    ),
)
FACTS = (  # key, head, spelling
    ("drafter", "drafter", ""),
    ("gamma", "gamma", "{:g}"),
    ("nodes", "nodes", "{:g}"),
    ("tokens", "tokens", "{:,.0f}"),
    ("rounds", "rounds", "{:,.0f}"),
    ("accepted_per_round", "accepted per round", "{:.2f}"),
    ("context", "mean prompt", "{:.0f} tokens"),
    ("prefill_seconds", "prefill", "{:.3g} s"),
    ("compile_seconds", "compilation", "{:.3g} s"),
)


class Cell(NamedTuple):
    """What the table shows, what it sorts by, a class for the style, a small second line, and the whole of what was cut."""

    text: str
    sort: float | str
    style: str = ""
    below: str = ""
    whole: str = ""


class Bar(NamedTuple):
    """A share between 0 and 1, drawn as a bar."""

    head: str
    text: str
    share: float


class Line(NamedTuple):
    """A row of the table, and what unfolds under it."""

    cells: list[Cell]
    facts: list[tuple[str, str]]
    bars: list[tuple[str, list[Bar]]]
    split: list[Bar]
    categories: list[list[str]]


CATEGORY_HEADS = ("category", "prompts", "tau", "alpha", "overlap", "tokens/s", "speed-up")
SAME = (
    "method",
    "accept",
    "temperature",
    "batch_size",
    "prompt_set",
    "warm",
)  # rows of one measurement, by category


def lines(rows: Sequence[dict]) -> list[Line]:
    """A line for every row over all prompts, its categories inside; a category without such a row has its own line."""
    whole = {_same(row) for row in rows if row.get("category") is None}
    parts: dict[str, list[dict]] = {}
    for row in rows:
        if row.get("category") is not None:
            parts.setdefault(_same(row), []).append(row)
    shown = [row for row in rows if row.get("category") is None or _same(row) not in whole]
    return [
        _line(row, parts.get(_same(row), []) if row.get("category") is None else [])
        for row in shown
    ]


def _same(row: dict) -> str:
    return repr([row.get(key) for key in SAME])


def _line(row: dict, parts: Sequence[dict]) -> Line:
    overlap = _object(row.get("overlap"))
    facts = [
        (head, _spell(row.get(key), spell))
        for key, head, spell in FACTS
        if row.get(key) is not None
    ]
    sizes = _object(row.get("parameters"))
    facts += [(f"{key} parameters", _spell(value, "{:,.0f}")) for key, value in sizes.items()]
    facts += _costs(row)
    if overlap:
        facts.append(
            (
                "overlap",
                f"{_spell(overlap.get('alpha'), '{:.3f}')}, {_spell(overlap.get('tokens'), '{:,.0f}')} tokens",
            )
        )
    if outcome := _object(row.get("lossless")):
        facts.append(("check", f"{outcome.get('check') or DASH}: {outcome.get('detail') or DASH}"))
    classes = {
        key: _object(value).get("alpha") for key, value in _object(overlap.get("by_class")).items()
    }
    groups = (
        ("acceptance by depth", _numbered(row.get("acceptance_by_depth"))),
        ("overlap by depth", _numbered(overlap.get("by_depth"))),
        ("overlap by token class", classes),
    )
    found = _object(overlap.get("by_category"))
    return Line(
        [_cut(_cell(row, column), LESS if place else MOST) for place, column in enumerate(COLUMNS)],
        facts,
        [(head, _bars(values)) for head, values in groups if values],
        _split(_object(row.get("time_split"))),
        [_category(part, _object(found.get(str(part["category"])))) for part in parts],
    )


def _cell(row: dict, column: Column) -> Cell:
    value = row.get(column.key)
    if column.key == "lossless":
        return _lossless(row)
    if column.key == "method":
        marks = [f"category {row['category']}"] if row.get("category") is not None else []
        return Cell(
            str(value), str(value), "", ", ".join(marks + ["warm"] * (row.get("warm") is True))
        )
    if column.key == "prompt_set":
        count = _spell(row.get("prompts"), "{:g}")
        return Cell(
            count if value is None else f"{value}",
            str(value or ""),
            "",
            "" if value is None else count,
        )
    if column.key == "class":
        lossy = value == "L3"
        return Cell(
            str(value or DASH), str(value or ""), "lossy" if lossy else "", "lossy" if lossy else ""
        )
    if not column.spell:
        return Cell(str(value or DASH), str(value or ""))
    number, below = number_of(value), ""
    if column.key == "speedup":
        below = _ends(_object(row.get("spread")).get("speedup"), "{:.2f}")
    return Cell(_spell(value, column.spell), "" if number is None else number, "number", below)


def _cut(cell: Cell, most: int) -> Cell:
    """The cell with as much of its words as a table bears."""
    text, below = short(cell.text, most), short(cell.below, most)
    whole = "; ".join(said for said, cut in ((cell.text, text), (cell.below, below)) if said != cut)
    return cell._replace(text=text, below=below, whole=whole)


def short(text: str, most: int = MOST) -> str:
    """The first characters of a name, and a mark if there are more."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _costs(row: dict) -> list[tuple[str, str]]:
    """What the parts of a turn cost, with their spread if it is known; and a hint where that cannot be the whole truth."""
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
        facts.append(("hint", f"verification was measured cheaper than a one-token pass: {why}"))
    elif efficiency is not None and efficiency > 1.05:
        facts.append(("hint", f"the speed-up is above what the costs of the parts allow: {why}"))
    return facts


def _ends(values: Any, spell: str) -> str:
    """The least and the greatest of several passes; "" if they are not known."""
    ends = [number_of(end) for end in values] if isinstance(values, list) else []
    return (
        DASH.join(spell.format(end) for end in ends) if len(ends) == 2 and None not in ends else ""
    )


def _split(shares: dict) -> list[Bar]:
    known = [part for part in PARTS if part in shares]
    return _bars(
        {
            part: shares[part]
            for part in [*known, *(other for other in shares if other not in PARTS)]
        },
        "{:.0%}",
    )


def _lossless(row: dict) -> Cell:
    outcome = _object(row.get("lossless"))
    if not outcome:
        return Cell(DASH, 0, "", "lossy by design" if row.get("class") == "L3" else "")
    found = passed(outcome)
    if found is None:
        readable = outcome.get("passed") is None
        return Cell("?", 2, "unsure", "too few tokens" if readable else "neither true nor false")
    word, style, rank = ("yes", "passed", 3) if found else ("NO", "failed", 1)
    return Cell(word, rank, style, str(outcome.get("detail") or "").rpartition(", ")[2])


def verdict(shown: Sequence[Line]) -> str:
    """One sentence on what the lossless checks found."""
    styles = [line.cells[-1].style for line in shown]
    lossy = [any(cell.style == "lossy" for cell in line.cells) for line in shown]
    others = sum(
        style not in ("passed", "failed") and not law
        for style, law in zip(styles, lossy, strict=True)
    )
    parts = [
        f"{styles.count('passed')} of {len(shown)} rows passed their lossless check",
        f"{styles.count('failed')} failed",
    ]
    parts += [f"{others} could not tell or had none"] if others else []
    parts += [f"{sum(lossy)} of class L3: lossy by design"] if any(lossy) else []
    return ", ".join(parts) + "."


def _category(row: dict, overlap: dict) -> list[str]:
    own = _object(row.get("overlap")) or overlap
    return [
        short(str(row["category"])),
        _spell(row.get("prompts"), "{:g}"),
        _spell(row.get("block_efficiency"), "{:.2f}"),
        _spell(row.get("acceptance_rate"), "{:.2f}"),
        _spell(own.get("alpha"), "{:.3f}"),
        _spell(row.get("tokens_per_second"), "{:,.0f}"),
        _spell(row.get("speedup"), "{:.2f}x"),
    ]


def _bars(values: Mapping[str, Any], spell: str = "{:.2f}") -> list[Bar]:
    numbers = {str(head): number_of(value) for head, value in values.items()}
    return [
        Bar(short(head), _spell(n, spell), min(max(n, 0.0), 1.0))
        for head, n in numbers.items()
        if n is not None
    ]


def _numbered(values: Any) -> dict[str, Any]:
    return {str(n): value for n, value in enumerate(values, 1)} if isinstance(values, list) else {}


def _object(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def _spell(value: Any, spell: str) -> str:
    number = number_of(value)
    return (
        DASH
        if value is None or (spell and number is None)
        else spell.format(number)
        if spell
        else str(value)
    )
