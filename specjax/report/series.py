"""The rows of results.json as the lines and panels of a plot, with distinct labels."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.report import canvas
from specjax.report.inputs import is_number, label, number, part

MOST = 16  # lines in a panel
MOST_PANELS = 24
PANELS = ("temperature", "batch_size")  # the settings that have panels of their own
# Settings as (name, value), in the order of the names.
Settings = tuple[tuple, ...]
PLAIN = "The dashed line is plain decoding"


class Axis(NamedTuple):
    """The x axis of a plot of the speed-up."""

    title: str
    label: str
    setting: str  # the one along the axis, of ``settings_of``
    # Further settings in which the points of one line may differ: the axis determines them.
    determined: tuple[str, ...] = ()
    spell: Callable[[float], str] = "{:g}".format
    caption: str = f"{PLAIN}."
    steps: bool = False  # whether the values are a few consecutive whole numbers

    def value(self, row: dict) -> Any:
        """The value of a row on the axis; None if it is not known."""
        value = settings_of(row)[self.setting]
        return value if is_number(value) else None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Settings in which the points of one line may differ."""
        return self.setting, *self.determined


AXES = {
    "gamma": Axis(
        "Speed-up by the length of the draft",
        "gamma (draft tokens along the longest path)",
        "gamma",
        ("nodes", "draft"),
        steps=True,
    ),
    "temperature": Axis("Speed-up by temperature", "temperature", "temperature"),
    "batch_size": Axis(
        "Speed-up by batch size",
        "batch size (rows)",
        "batch_size",
        caption=f"{PLAIN} at the same batch size.",
    ),
    "draft_parameters": Axis(
        "Speed-up by the size of the drafter",
        "parameters of the drafter",
        "draft",
        ("method",),
        canvas.number,
        f"{PLAIN}. Where several drafters have one size, the line joins the fastest.",
    ),
    "context": Axis(
        "Speed-up by the length of the context",
        "context (mean tokens of the prompts)",
        "context",
        (),
        canvas.number,
        f"{PLAIN}. A line is one set of prompts, cut to each length.",
    ),
    "new_tokens": Axis(
        "Speed-up by the length of the output",
        "output (new tokens)",
        "new_tokens",
        spell=canvas.number,
    ),
}


def spell(value: Any) -> str:
    """A setting as text."""
    return f"{value:g}" if is_number(value) else str(value)


def _spell_size(name: str) -> Callable[[Any], str]:
    return lambda size: f"{name} of {canvas.number(size) if size else 'unknown size'}"


# The settings of a row, and the text of each in a label.
SETTINGS: dict[str, Callable[[Any], str]] = {
    "method": str,
    "drafter": str,
    "accept": str,
    "class": str,
    "temperature": lambda value: f"T {spell(value)}",
    "batch_size": "batch {}".format,
    "gamma": "gamma {}".format,
    "nodes": "{} nodes".format,
    "shape": str,
    "target": _spell_size("target"),
    "draft": _spell_size("drafter"),
    "context": lambda tokens: f"{canvas.number(tokens) if tokens else 'unknown'} tokens of context",
    "prompt_set": lambda name: str(name or "unnamed prompts"),
    "new_tokens": "{} new tokens".format,
    "warm": lambda warm: "warm" if warm else "cold",
}
# A label leaves the first setting out if the second one, which it has, determines it.
DETERMINED_BY = {"context": "prompt_set", "class": "accept", "shape": "nodes"}


def settings_of(row: dict) -> dict[str, Any]:
    """The settings of a row: name -> a value that can be a key of a dict."""
    settings = {key: row.get(key) for key in SETTINGS}
    settings |= {
        "method": label(row),
        "target": number(part(row, "parameters"), "target"),
        "draft": number(part(row, "parameters"), "draft"),
        "context": number(row, "context"),
        "warm": bool(row.get("warm")),
    }
    settings["shape"] = "chain" if settings["nodes"] == settings["gamma"] else "tree"
    return {
        key: value if value is None or isinstance(value, int | float | str) else str(value)
        for key, value in settings.items()
    }


def labels_of(entries: Sequence[dict], always: Sequence[str] = ()) -> list[str]:
    """A label for each entry: its method, and the settings in which entries of that method differ.

    Entries that differ in any setting have different labels.

    Args:
        entries: settings as from ``settings_of``, or some of them.
        always: settings that every label has.
    """
    methods: dict[Any, list[dict]] = {}
    for entry in entries:
        methods.setdefault(entry["method"], []).append(entry)
    named = {method: _distinguishing(group, always) for method, group in methods.items()}
    labels, seen = [], {}
    for entry in entries:
        keys = [key for key in named[entry["method"]] if key in entry]
        text = ", ".join([entry["method"], *(SETTINGS[key](entry[key]) for key in keys)])
        others = seen.setdefault(text, [])
        if entry not in others:
            others.append(entry)
        index = others.index(entry) + 1
        labels.append(text if index == 1 else f"{text} ({index})")
    return labels


def _distinguishing(entries: Sequence[dict], always: Sequence[str]) -> list[str]:
    """The settings that the labels of one method have."""
    known = [key for key in SETTINGS if any(key in entry for entry in entries)]
    values = {key: {entry.get(key) for entry in entries} for key in known}
    keys = [key for key in values if key in always or (key != "method" and len(values[key]) > 1)]
    chains = all(entry.get("nodes") == entry.get("gamma") for entry in entries)
    if {"gamma", "nodes"} <= set(keys) and chains:
        keys.remove("nodes")
    for key, by in DETERMINED_BY.items():
        pairs = {(entry.get(by), entry.get(key)) for entry in entries}
        if {key, by} <= set(keys) and key not in always and len(pairs) == len(values[by]):
            keys.remove(key)
    return keys


def distinct(rows: Sequence[dict]) -> list[str]:
    """A label for each row, with the temperature and the batch size if the rows have several."""
    entries = [settings_of(row) for row in rows]
    several = [key for key in PANELS if len({entry[key] for entry in entries}) > 1]
    return labels_of(entries, several)


def panels(rows: Sequence[dict], axis: str) -> tuple[dict[str, list[tuple[str, list[dict]]]], str]:
    """(heading -> its series with at least two values on the axis, a note on what is left out).

    A series is a label, and rows that differ only along the axis. {} if there are no such series;
    the note is "" if all are shown.
    """
    chosen = AXES[axis]
    headings = [key for key in PANELS if key not in chosen.ignored]
    rows = [row for row in rows if chosen.value(row) is not None]
    groups = _groups(rows, axis)
    if axis == "gamma":
        # Labels often have the number: "draft gamma 4" and "draft gamma 6" are one line.
        grouped = {id(row) for group in groups.values() for row in group}
        others = [row for row in rows if id(row) not in grouped]
        groups |= _groups(others, axis, number_in_label=True)
    members: dict[Settings, list[tuple[dict, list[dict]]]] = {}
    for key, group in groups.items():
        settings = dict(key)
        heading = tuple((name, settings.pop(name)) for name in headings)
        members.setdefault(heading, []).append((settings, sorted(group, key=chosen.value)))
    note = ""
    for heading, series in members.items():
        kept, left_out = thin([group for _, group in series], MOST)
        shown = {id(group) for group in kept}
        members[heading] = [pair for pair in series if id(pair[1]) in shown]
        note = note or left_out
    ordered = sorted(
        members, key=lambda heading: [value if is_number(value) else -1 for _, value in heading]
    )
    if len(ordered) > MOST_PANELS:
        note += f" The first {MOST_PANELS} of {len(ordered)} panels are shown."
        ordered = ordered[:MOST_PANELS]
    labels = iter(labels_of([settings for heading in ordered for settings, _ in members[heading]]))
    result = {}
    for heading in ordered:
        title = ", ".join(f"{name.replace('_size', '')} {spell(value)}" for name, value in heading)
        result[title] = [(next(labels), group) for _, group in members[heading]]
    return result, note


def _groups(
    rows: Sequence[dict], axis: str, number_in_label: bool = False
) -> dict[Settings, list[dict]]:
    """Common settings -> the rows that have them, of groups with several values on the axis.

    With ``number_in_label`` labels that differ only in the value of gamma are one label.
    """
    chosen, groups = AXES[axis], {}
    ignored = {*chosen.ignored} - {"method"}
    for row in rows:
        settings = settings_of(row)
        if number_in_label:
            gamma = rf"(?<![\d.]){re.escape(str(settings['gamma']))}(?![\d.])"
            settings["method"] = re.sub(gamma, "…", settings["method"])
        elif "method" in chosen.ignored:
            settings["method"] = settings["drafter"] or settings["method"]
        common = tuple(pair for pair in settings.items() if pair[0] not in ignored)
        groups.setdefault(common, []).append(row)
    return {
        key: group for key, group in groups.items() if len({chosen.value(row) for row in group}) > 1
    }


def thin(
    groups: Sequence[list[dict]], most: int, batches: bool = False
) -> tuple[list[list[dict]], str]:
    """(at most ``most`` of the groups of rows, in their order, a note on what is left out).

    If there are more than ``most``, groups are dropped in this order until few enough are left:
    with ``batches``, all but the smallest batch size of a method; then all but the fastest settings
    of a method at each temperature and batch size; then the slowest groups.
    """
    kept, note = list(groups), ""
    if len(kept) > most and batches:
        ordered = sorted(kept, key=lambda group: number(group[0], "batch_size") or 0, reverse=True)
        smallest = {_key(group, "temperature"): group[0].get("batch_size") for group in ordered}
        kept = [
            group
            for group in kept
            if group[0].get("batch_size") == smallest[_key(group, "temperature")]
        ]
        note += " Smallest batches only." if len(kept) < len(groups) else ""
    if len(kept) > most:
        best = {_key(group, *PANELS): group for group in sorted(kept, key=_fastest)}
        fewer = [group for group in kept if best[_key(group, *PANELS)] is group]
        if len(fewer) < len(kept):
            note += " Of several settings of one method the fastest is shown."
        kept = fewer
    if len(kept) > most:
        note += f" The {most} fastest of {len(kept)} are shown."
        limit = sorted(map(_fastest, kept))[-most]
        kept = [group for group in kept if _fastest(group) >= limit][:most]
    return kept, note


def _fastest(group: list[dict]) -> float:
    return max(number(row, "speedup") for row in group)


def _key(group: list[dict], *names: str) -> tuple:
    """The method of a group and some of its settings."""
    return (label(group[0]), *(str(group[0].get(name)) for name in names))
