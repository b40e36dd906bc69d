"""Plots of the rows of results.json: every plot that the rows have data for.

The caption of a figure states its assumptions. Rows without a speed-up are left out, and rows of
one category are only in the plot of categories. The figures are objects, drawn without pyplot: no
global setting is changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specjax.report import _canvas, _labels, _rows, _series
from specjax.report._axes import AXES
from specjax.report._rows import TIME_PARTS, number
from specjax.report._speedups import predicted, speedup_against
from specjax.report.figures import save, svg
from specjax.report.over_time import acceptance_over_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "acceptance_by_depth",
    "by_category",
    "draw",
    "overlap_by_class",
    "predicted",
    "save",
    "speedup_against",
    "svg",
    "time_split",
]

MOST_TEMPERATURES = 2  # of plots with groups of bars
MOST_NAMES = 40  # groups of bars in a panel
MOST_BARS = 30  # of the plot of the decoding time
FIRST_SHOWN = " Of rows with the same settings the first is shown."


def draw(rows: Sequence[dict]) -> dict[str, Figure]:
    """File name without suffix -> figure, of every plot that the rows have data for."""
    makers: dict[str, Callable[[Sequence[dict]], Figure | None]] = {
        f"speedup_by_{axis}": lambda rows, axis=axis: speedup_against(rows, axis) for axis in AXES
    }
    makers |= {
        "predicted_and_measured": predicted,
        "acceptance_by_depth": acceptance_by_depth,
        "overlap_by_class": overlap_by_class,
        "time_split": time_split,
        "efficiency_by_category": by_category,
        "acceptance_over_time": acceptance_over_time,
    }
    figures = {name: make(rows) for name, make in makers.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def acceptance_by_depth(rows: Sequence[dict]) -> Figure | None:
    """Conditional acceptance at each depth: a line per method, a panel per temperature."""
    known = [row for row in _rows.finished(rows) if _depths(row)]
    if not known:
        return None
    # Acceptance does not depend on the batch, and a longer chain has all depths of a shorter one.
    panels, left_out = _by_temperature(
        _by_settings(known),
        lambda row: (-len(_depths(row)), number(row, "batch_size") or 0),
        lambda settings: (
            "batch_size",
            *(("gamma", "nodes") if settings["shape"] == "chain" else ()),
        ),
        "Of several lengths of a chain the longest is shown, and of several batch sizes the "
        "smallest.",
    )
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    legend = _canvas.legend_text(labels)
    caption = (
        "The share of the tokens tested at a depth that was accepted there; a depth is tested if "
        f"all depths before it were accepted.{left_out}{_note_on_repeats(known)}"
    )
    title = "Acceptance by depth" + ("" if len(panels) > 1 else f" at {next(iter(panels))}")
    height = 2.9 if len(panels) == 1 else 2.3
    figure, axes = _canvas.canvas(title, list(panels), height, caption, legend.lines)
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes, panels.values(), strict=True):
        for label, row in panel.items():
            style, depths = _canvas.style(labels.index(label)), _depths(row)
            (line,) = ax.plot(
                range(1, len(depths) + 1),
                depths,
                color=style.colour,
                marker=style.marker,
                markersize=5,
                linestyle=style.line,
                linewidth=1.2,
                markeredgecolor="white",
                markeredgewidth=0.5,
            )
            handles.setdefault(label, line)
        deepest = max((len(_depths(row)) for row in panel.values()), default=1)
        _canvas.ticks(ax, range(1, deepest + 1), str, True)
        ax.set_ylim(0, 1.03)
        ax.set_xlabel("depth (tokens after the pending one)", fontsize=9)
    axes[0].set_ylabel("accepted share", fontsize=9)
    _canvas.add_legend(figure, legend, [handles[label] for label in labels])
    return figure


def _by_settings(rows: Sequence[dict]) -> dict[tuple, dict]:
    """Settings -> the first row that has them."""
    groups: dict[tuple, dict] = {}
    for row in rows:
        groups.setdefault(tuple(_labels.settings_of(row).items()), row)
    return groups


def _note_on_repeats(rows: Sequence[dict]) -> str:
    return "" if len(_by_settings(rows)) == len(rows) else FIRST_SHOWN


def _depths(row: dict) -> list[float]:
    values = row.get("acceptance_by_depth")
    if not isinstance(values, list | tuple):
        return []
    return [value if _rows.is_number(value) else math.nan for value in values]


def _by_temperature(
    entries: dict[tuple, dict],
    least: Callable[[dict], Any],
    ignored: Callable[[dict], Sequence[str]],
    choice: str,
) -> tuple[dict[str, dict[str, dict]], str]:
    """(heading -> label -> entry, with a panel for each temperature; a note on what is left out).

    Args:
        entries: settings as from ``_by_settings`` -> a row.
        least: row -> a key. Of entries that differ only in ignored settings, the one with the
            least key is shown.
        ignored: settings -> the names of those to ignore.
        choice: the sentence that describes this choice.
    """
    chosen: dict[tuple, dict] = {}
    series: dict[tuple, None] = {}  # in the order of their first entries
    for key, row in entries.items():
        settings = dict(key)
        temperature = settings.pop("temperature")
        names = ignored(settings)
        kept = tuple((name, value) for name, value in settings.items() if name not in names)
        series[kept] = None
        place = (temperature if _rows.is_number(temperature) else 0), kept
        if place not in chosen or least(row) < least(chosen[place]):
            chosen[place] = row
    note = f" {choice}" if len(chosen) < len(entries) else ""
    if len(series) > _series.MOST:
        note += f" The first {_series.MOST} of {len(series)} are shown."
    first = list(series)[: _series.MOST]
    labels = dict(zip(first, _labels.labels_of([dict(kept) for kept in first]), strict=True))
    temperatures = sorted({temperature for temperature, kept in chosen if kept in labels})
    most = _series.MOST_PANELS
    if len(temperatures) > most:
        note += f" The lowest {most} of {len(temperatures)} temperatures are shown."
    panels: dict[str, dict[str, dict]] = {}
    for temperature in temperatures[:most]:
        heading = f"temperature {temperature:g}"
        if heading in panels:
            heading = f"temperature {temperature}"
        panels[heading] = {
            label: chosen[temperature, kept]
            for kept, label in labels.items()
            if (temperature, kept) in chosen
        }
    return panels, note


def overlap_by_class(rows: Sequence[dict]) -> Figure | None:
    """Overlap of draft and target for each class of tokens of the target's text."""

    def values(row: dict) -> dict[str, float | None]:
        classes = _rows.part(_rows.part(row, "overlap"), "by_class")
        return {name: number(_rows.part(classes, name), "alpha") for name in classes}

    known = [
        row
        for row in _rows.finished(rows)
        if any(value is not None for value in values(row).values())
    ]
    caption = (
        "alpha of each class: the sum over x of min(target(x), draft(x)), mean over the positions "
        f"of the target's text.{_note_on_repeats(known)}"
    )
    title = "Overlap of draft and target by class of token"
    return _grouped(_by_settings(known), values, title, caption, "mean overlap")


def by_category(rows: Sequence[dict]) -> Figure | None:
    """Block efficiency of each category of prompts, from the rows of one category."""
    merged: dict[tuple, dict] = {}
    repeated = False
    for row, owner in zip(rows, _rows.owners(rows), strict=True):
        tau = number(row, "block_efficiency")
        if row.get("category") is not None and tau is not None:
            # Categories have prompts of different lengths: the length of all prompts counts.
            context = None if owner is None else number(owner, "context")
            settings = tuple((_labels.settings_of(row) | {"context": context}).items())
            by_name = merged.setdefault(settings, {**row, "tau": {}})["tau"]
            repeated = repeated or str(row["category"]) in by_name
            by_name.setdefault(str(row["category"]), tau)
    caption = (
        "Tokens per round of the prompts of one category, including the target's own token."
        f"{FIRST_SHOWN if repeated else ''}"
    )
    title = "Block efficiency by category of prompt"
    axis = "block efficiency (tokens)"
    return _grouped(merged, lambda row: row["tau"], title, caption, axis)


def _grouped(
    entries: dict[tuple, dict],
    values: Callable[[dict], dict[str, float | None]],
    title: str,
    caption: str,
    axis: str,
) -> Figure | None:
    """Bars of ``values`` (row -> name -> number) in a panel for each temperature."""
    chosen, left_out = _by_temperature(
        entries,
        lambda row: number(row, "batch_size") or 0,
        lambda _: ("batch_size",),
        "Of several batch sizes the smallest is shown.",
    )
    caption += left_out
    if not chosen:
        return None
    panels = {
        heading: {
            label: {name: value for name, value in values(row).items() if value is not None}
            for label, row in panel.items()
        }
        for heading, panel in chosen.items()
    }
    if len(panels) > MOST_TEMPERATURES:
        largest = sorted(panels, key=lambda heading: -len(panels[heading]))[:MOST_TEMPERATURES]
        panels = {heading: panel for heading, panel in panels.items() if heading in largest}
        caption += " Of several temperatures the two with most methods are shown."
    names = list(
        dict.fromkeys(name for panel in panels.values() for bars in panel.values() for name in bars)
    )
    if len(names) > MOST_NAMES:
        caption += f" The first {MOST_NAMES} of {len(names)} groups of bars are shown."
        names = names[:MOST_NAMES]
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    if len(panels) == 1:
        title += f", {next(iter(panels))}"
    shown = {
        heading: (names, [[panel.get(label, {}).get(name) for name in names] for label in labels])
        for heading, panel in panels.items()
    }
    return _canvas.bars(title, shown, labels, caption, axis)


def time_split(rows: Sequence[dict]) -> Figure | None:
    """The shares of the decoding time that the parts of a round take: a stacked bar per row."""
    known = [
        row
        for row in _rows.finished(rows)
        if any(number(_rows.part(row, "time_split"), part) for part in TIME_PARTS)
    ]
    if not known:
        return None
    groups, left_out = _series.thin([[row] for row in known], MOST_BARS, batches=True)
    known = [row for (row,) in groups]
    legend = _canvas.legend_text(TIME_PARTS)
    caption = f"Shares of the time of the decode loop, without prefill and compilation.{left_out}"
    title = "Where the decoding time goes"
    height = 0.25 * len(known) + 0.1
    figure, (ax,) = _canvas.canvas(title, [""], height, caption, legend.lines, 0.37)
    handles, left = [], [0.0] * len(known)
    for index, part in enumerate(TIME_PARTS):
        shares = [100 * (number(row["time_split"], part) or 0.0) for row in known]
        bar = ax.barh(
            range(len(known)),
            shares,
            0.72,
            left=left,
            color=_canvas.style(index).colour,
            hatch=_canvas.HATCHES[index],
            edgecolor="white",
            linewidth=0,
        )
        handles.append(bar)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    labels = _labels.distinct(known)
    ax.set_yticks(range(len(known)), labels=[_canvas.plain(label, 38) for label in labels])
    ax.set_ylim(len(known) - 0.5, -0.5)
    ax.set_xlim(0, 100)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("share of the decoding time (%)", fontsize=9)
    _canvas.add_legend(figure, legend, handles)
    return figure
