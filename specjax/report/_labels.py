"""The settings of a row, and the shortest labels that distinguish rows with different settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specjax.report import _canvas
from specjax.report._rows import is_number, label, number, parameters

PANELS = ("temperature", "batch_size")  # the settings that have panels of their own


def spell(value: Any) -> str:
    """A setting as text."""
    return f"{value:g}" if is_number(value) else str(value)


def _spell_size(name: str) -> Callable[[Any], str]:
    return lambda size: f"{name} of {_canvas.number(size) if size else 'unknown size'}"


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
    "context": lambda tokens: (
        f"{_canvas.number(tokens) if tokens else 'unknown'} tokens of context"
    ),
    "prompt_set": lambda name: str(name or "unnamed prompts"),
    "warm": lambda warm: "warm" if warm else "cold",
}
# A label leaves the first setting out if the second one, which it has, determines it.
DETERMINED_BY = {"context": "prompt_set", "class": "accept", "shape": "nodes"}


def settings_of(row: dict) -> dict[str, Any]:
    """The settings of a row: name -> a value that can be a key of a dict."""
    settings = {key: row.get(key) for key in SETTINGS}
    settings |= {
        "method": label(row),
        "target": parameters(row, "target"),
        "draft": parameters(row, "draft"),
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
    values = {
        key: {entry.get(key) for entry in entries}
        for key in SETTINGS
        if any(key in entry for entry in entries)
    }
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
