"""Which rows of results.json belong together: the lines and panels of a plot, and the shortest labels that tell them apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.report import _canvas

RANGE = 1e15  # no measurement is larger, and an axis over much more cannot be laid out


def is_number(value: Any) -> bool:
    """Whether it is a number that can be drawn: finite, and neither beyond ``RANGE`` nor, but for 0, below its inverse."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == 0 or 1 / RANGE <= abs(value) <= RANGE


def number(row: dict, name: str) -> Any:
    """The row's number of that name; None if it is missing, null or none that can be drawn."""
    value = row.get(name)
    return value if is_number(value) else None


def part(row: dict, name: str) -> dict:
    """The row's entry of that name, if it is made of further entries; else {}."""
    value = row.get(name)
    return value if isinstance(value, dict) else {}


def finished(rows: Sequence[dict]) -> list[dict]:
    """The rows over all prompts that have a speed-up."""
    return [
        row for row in rows if (number(row, "speedup") or 0) > 0 and row.get("category") is None
    ]


def _size(row: dict, name: str) -> Any:
    return number(part(row, "parameters"), name)


class Axis(NamedTuple):
    """What a plot of the speed-up has on its x axis."""

    title: str
    label: str
    value: Callable[[dict], Any]
    ignored: tuple[
        str, ...
    ]  # what may differ between the points of a line, for it follows from the axis
    spell: Callable[[float], str] = "{:g}".format
    caption: str = ""
    steps: bool = False  # whether the values are few whole numbers in a row


AXES = {
    "gamma": Axis(
        "Speed-up by the length of the draft",
        "gamma (draft tokens along the longest path)",
        lambda row: number(row, "gamma"),
        ("gamma", "nodes", "draft"),
        caption="The dashed line is plain decoding.",
        steps=True,
    ),
    "temperature": Axis(
        "Speed-up by temperature",
        "temperature",
        lambda row: number(row, "temperature"),
        ("temperature",),
        caption="The dashed line is plain decoding.",
    ),
    "batch_size": Axis(
        "Speed-up by batch size",
        "batch size (rows)",
        lambda row: number(row, "batch_size"),
        ("batch_size",),
        caption="The dashed line is plain decoding at the same batch size.",
    ),
    "draft_parameters": Axis(
        "Speed-up by the size of the drafter",
        "parameters of the drafter",
        lambda row: _size(row, "draft"),
        ("draft", "method"),
        _canvas.number,
        "The dashed line is plain decoding. Where several drafters have one size, the line joins the fastest.",
    ),
    "context": Axis(
        "Speed-up by the length of the context",
        "context (mean tokens of the prompts)",
        lambda row: number(row, "context"),
        ("context",),
        _canvas.number,
        "The dashed line is plain decoding. A line is one set of prompts, cut to each length.",
    ),
}

# What a row is, beside its measurements, and how it is told where two rows of a method differ in it.
SPELT: dict[str, Callable[[Any], str]] = {
    "method": str,
    "drafter": str,
    "accept": str,
    "class": str,
    "temperature": lambda value: f"T {_spelt(value)}",
    "batch_size": "batch {}".format,
    "gamma": "gamma {}".format,
    "nodes": "{} nodes".format,
    "shape": str,
    "target": lambda size: "target of " + (_canvas.number(size) if size else "unknown size"),
    "draft": lambda size: "drafter of " + (_canvas.number(size) if size else "unknown size"),
    "context": lambda tokens: (
        f"{_canvas.number(tokens) if tokens else 'unknown'} tokens of context"
    ),
    "prompt_set": lambda name: str(name or "unnamed prompts"),
    "warm": lambda warm: "warm" if warm else "cold",
}
FOLLOWS = {
    "context": "prompt_set",
    "class": "accept",
    "shape": "nodes",
}  # need not be told beside that, if it does
PANELS = ("temperature", "batch_size")
MOST = 16  # lines in a panel
MOST_PANELS = 24


def _spelt(value: Any) -> str:
    return f"{value:g}" if is_number(value) else str(value)


def name(row: dict) -> str:
    """The user's label of the row."""
    return str(row.get("method") or row.get("drafter") or "unnamed")


def facts_of(row: dict) -> dict[str, Any]:
    """What a row is, beside its measurements."""
    facts = {key: row.get(key) for key in SPELT}
    facts |= {
        "method": name(row),
        "target": _size(row, "target"),
        "draft": _size(row, "draft"),
        "context": number(row, "context"),
        "warm": bool(row.get("warm")),
    }
    facts["shape"] = "chain" if facts["nodes"] == facts["gamma"] else "tree"
    return {
        key: value if value is None or isinstance(value, int | float | str) else str(value)
        for key, value in facts.items()
    }


class Series(NamedTuple):
    """Rows that differ only along the axis."""

    label: str
    rows: list[dict]


def panels(rows: Sequence[dict], axis: str) -> tuple[dict[str, list[Series]], str]:
    """Heading -> the series in that panel that have at least two values on the axis ({} if there are none), and what to say
    if some of them are left out."""
    what = AXES[axis]
    headings = [key for key in PANELS if key not in what.ignored]
    rows = [row for row in rows if what.value(row) is not None]
    groups = _together(rows, axis)
    if axis == "gamma":  # a label often says it: "draft gamma 4" and "draft gamma 6" are one line
        grouped = {id(row) for some in groups.values() for row in some}
        alone = [row for row in rows if id(row) not in grouped]
        groups |= _together(alone, axis, number_in_label=True)
    found: dict[tuple, list[tuple[dict, list[dict]]]] = {}
    for key, some in groups.items():
        facts = dict(key)
        found.setdefault(tuple((h, facts.pop(h)) for h in headings), []).append(
            (facts, sorted(some, key=what.value))
        )
    told = ""
    for heading, members in found.items():
        kept, said = thin([some for _, some in members], MOST)
        found[heading] = [
            (facts, some) for facts, some in members if any(some is one for one in kept)
        ]
        told = told or said
    ordered = sorted(
        found, key=lambda heading: [value if is_number(value) else -1 for _, value in heading]
    )
    if len(ordered) > MOST_PANELS:
        told += f" The first {MOST_PANELS} of {len(ordered)} panels are shown."
        ordered = ordered[:MOST_PANELS]
    labels = iter(labels_of([facts for heading in ordered for facts, _ in found[heading]]))
    made = {}
    for heading in ordered:
        title = ", ".join(f"{key.replace('_size', '')} {_spelt(value)}" for key, value in heading)
        made[title] = [Series(next(labels), some) for _, some in found[heading]]
    return made, told


def _together(
    rows: Sequence[dict], axis: str, number_in_label: bool = False
) -> dict[tuple, list[dict]]:
    """The rows that differ along the axis alone, by what they have in common, where they do differ."""
    what, groups = AXES[axis], {}
    for row in rows:
        facts = facts_of(row)
        if number_in_label:
            facts["method"] = re.sub(
                rf"(?<![\d.]){re.escape(str(facts['gamma']))}(?![\d.])", "…", facts["method"]
            )
        elif "method" in what.ignored:
            facts["method"] = facts["drafter"] or facts["method"]
        kept = {
            key: value for key, value in facts.items() if key not in what.ignored or key == "method"
        }
        groups.setdefault(tuple(kept.items()), []).append(row)
    return {key: some for key, some in groups.items() if len({what.value(row) for row in some}) > 1}


def labels_of(facts: Sequence[dict], always: Sequence[str] = ()) -> list[str]:
    """The method, whatever else the entries of that method differ in, and what is ``always`` told; no two that differ in
    anything have the same label."""
    methods: dict[Any, list[dict]] = {}
    for one in facts:
        methods.setdefault(one["method"], []).append(one)
    told = {}
    for method, alike in methods.items():
        values = {
            key: {other.get(key) for other in alike}
            for key in SPELT
            if any(key in other for other in alike)
        }
        differ = [
            key for key in values if key in always or (key != "method" and len(values[key]) > 1)
        ]
        if {"gamma", "nodes"} <= set(differ) and all(
            other.get("nodes") == other.get("gamma") for other in alike
        ):
            differ.remove("nodes")  # of a chain it is the same
        for key, by in FOLLOWS.items():
            pairs = {(other.get(by), other.get(key)) for other in alike}
            if {key, by} <= set(differ) and key not in always and len(pairs) == len(values[by]):
                differ.remove(key)
        told[method] = differ
    labels, seen = [], {}
    for one in facts:
        label = ", ".join(
            [one["method"], *(SPELT[key](one[key]) for key in told[one["method"]] if key in one)]
        )
        others = seen.setdefault(label, [])
        if one not in others:
            others.append(one)
        place = others.index(one) + 1
        labels.append(label if place == 1 else f"{label} ({place})")
    return labels


def thin(
    groups: Sequence[list[dict]], most: int, batches: bool = False
) -> tuple[list[list[dict]], str]:
    """At most ``most`` of the groups of rows, in the order that they came in, and what to say of it.

    First goes what a method has beside its smallest batch (with ``batches``), then what it has beside its fastest setting at
    the same temperature and batch, and then the slowest of all.
    """

    def fastest(group: list[dict]) -> float:
        return max(number(row, "speedup") for row in group)

    def setting(group: list[dict], *keys: str) -> tuple:
        return (name(group[0]), *(str(group[0].get(key)) for key in keys))

    kept, told = list(groups), ""
    if len(kept) > most and batches:
        ordered = sorted(kept, key=lambda group: number(group[0], "batch_size") or 0, reverse=True)
        smallest = {setting(group, "temperature"): group[0].get("batch_size") for group in ordered}
        kept = [
            group
            for group in kept
            if group[0].get("batch_size") == smallest[setting(group, "temperature")]
        ]
        told += " Smallest batches only." if len(kept) < len(groups) else ""
    if len(kept) > most:
        best = {setting(group, *PANELS): group for group in sorted(kept, key=fastest)}
        fewer = [group for group in kept if best[setting(group, *PANELS)] is group]
        told += (
            " Of several settings of one method the fastest is shown."
            if len(fewer) < len(kept)
            else ""
        )
        kept = fewer
    if len(kept) > most:
        told += f" The {most} fastest of {len(kept)} are shown."
        limit = sorted(map(fastest, kept))[-most]
        kept = [group for group in kept if fastest(group) >= limit][:most]
    return kept, told


def distinct(rows: Sequence[dict]) -> list[str]:
    """A label for every row, of whatever tells it from the rows with the same method."""
    facts = [facts_of(row) for row in rows]
    several = [key for key in PANELS if len({one[key] for one in facts}) > 1]
    return labels_of(facts, several)


def by_label(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """The rows of every method, in the order of their first appearance."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    return groups
