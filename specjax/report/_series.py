"""Groups the rows of results.json into the lines and panels of a plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from specjax.report._axes import AXES
from specjax.report._labels import PANELS, labels_of, settings_of, spell
from specjax.report._rows import is_number, label, number

MOST = 16  # lines in a panel
MOST_PANELS = 24
# Settings as (name, value), in the order of the names.
Settings = tuple[tuple, ...]


class Series(NamedTuple):
    """Rows that differ only along the axis."""

    label: str
    rows: list[dict]


def panels(rows: Sequence[dict], axis: str) -> tuple[dict[str, list[Series]], str]:
    """(heading -> its series with at least two values on the axis, a note on what is left out).

    {} if there are no such series; the note is "" if all are shown.
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
        members[heading] = [
            (settings, group) for settings, group in series if any(group is one for one in kept)
        ]
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
        result[title] = [Series(next(labels), group) for _, group in members[heading]]
    return result, note


def _groups(
    rows: Sequence[dict], axis: str, number_in_label: bool = False
) -> dict[Settings, list[dict]]:
    """Common settings -> the rows that have them, of groups with several values on the axis.

    With ``number_in_label`` labels that differ only in the value of gamma are one label.
    """
    chosen, groups = AXES[axis], {}
    for row in rows:
        settings = settings_of(row)
        if number_in_label:
            gamma = rf"(?<![\d.]){re.escape(str(settings['gamma']))}(?![\d.])"
            settings["method"] = re.sub(gamma, "…", settings["method"])
        elif "method" in chosen.ignored:
            settings["method"] = settings["drafter"] or settings["method"]
        common = {
            key: value
            for key, value in settings.items()
            if key not in chosen.ignored or key == "method"
        }
        groups.setdefault(tuple(common.items()), []).append(row)
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
