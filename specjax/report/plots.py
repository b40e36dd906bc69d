"""Plots of the rows of results.json: every one for which the rows have data, and no other.

What a figure assumes is said below it. Rows that are not finished (no speed-up) are left out, and rows of one category are
in the plot of categories alone. Nothing global is touched: figures are objects, drawn without pyplot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specjax.report import _canvas, _series
from specjax.report._files import save, svg
from specjax.report._series import number
from specjax.report._speedups import predicted, speedup_against

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


def draw(rows: Sequence[dict]) -> dict[str, Figure]:
    """Every plot that the rows have data for, by a name fit for a file; {} if there is none."""
    makers: dict[str, Callable[[Sequence[dict]], Figure | None]] = {
        f"speedup_by_{axis}": lambda rows, axis=axis: speedup_against(rows, axis) for axis in _series.AXES
    }
    makers |= {
        "predicted_and_measured": predicted,
        "acceptance_by_depth": acceptance_by_depth,
        "overlap_by_class": overlap_by_class,
        "time_split": time_split,
        "efficiency_by_category": by_category,
    }
    figures = {name: make(rows) for name, make in makers.items()}
    return {name: figure for name, figure in figures.items() if figure is not None}


def acceptance_by_depth(rows: Sequence[dict]) -> Figure | None:
    """Conditional acceptance at each depth, a line for every method and a panel for every temperature."""
    known = [row for row in _series.finished(rows) if _depths(row)]
    if not known:
        return None
    # What is accepted does not depend on the batch, and a longer draft shows the depths of a shorter one as well.
    known.sort(key=lambda row: (-len(_depths(row)), number(row, "batch_size") or 0))
    longest: dict[tuple, dict] = {}
    for row in known:
        longest.setdefault((number(row, "temperature") or 0, _series.name(row)), row)
    temperatures = sorted({temperature for temperature, _ in longest})
    groups, fewer = _series.thin([[row] for row in longest.values()], _series.MOST * len(temperatures))
    panels: dict[str, dict[str, dict]] = {f"temperature {temperature:g}": {} for temperature in temperatures}
    for (row,) in groups:
        panels[f"temperature {number(row, 'temperature') or 0:g}"][_series.name(row)] = row
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    legend = _canvas.key(labels)
    told = "The share of the tokens tested at a depth that was accepted there; a depth is tested if all above it were accepted."
    told += fewer
    title = "Acceptance by depth" + ("" if len(panels) > 1 else f" at {next(iter(panels))}")
    figure, axes = _canvas.canvas(title, list(panels), 2.9 if len(panels) == 1 else 2.3, told, legend.lines)
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes, panels.values(), strict=True):
        for label, row in panel.items():
            style, depths = _canvas.look(labels.index(label)), _depths(row)
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
        _canvas.ticks(ax, range(1, max(map(len, map(_depths, panel.values())), default=1) + 1), str, True)
        ax.set_ylim(0, 1.03)
        ax.set_xlabel("depth (tokens after the pending one)", fontsize=9)
    axes[0].set_ylabel("accepted share", fontsize=9)
    _canvas.add_legend(figure, legend, [handles[label] for label in labels])
    return figure


def _depths(row: dict) -> list[float]:
    values = row.get("acceptance_by_depth")
    return [v if _series.is_number(v) else math.nan for v in values] if isinstance(values, list | tuple) else []


def overlap_by_class(rows: Sequence[dict]) -> Figure | None:
    """True overlap of draft and target on each class of tokens of the target's text, where rows have it."""

    def values(row: dict) -> dict[str, float | None]:
        classes = _series.part(_series.part(row, "overlap"), "by_class")
        return {name: number(_series.part(classes, name), "alpha") for name in classes}

    told = "alpha of each class: the sum over x of min(target(x), draft(x)), on every position of text that the target wrote."
    return _grouped(
        _series.finished(rows), values, "Overlap of draft and target by class of token", told, "mean overlap"
    )


def by_category(rows: Sequence[dict]) -> Figure | None:
    """Block efficiency in every category of prompts, from the rows of one category."""
    merged: dict[tuple, dict] = {}
    for row in rows:
        tau = number(row, "block_efficiency")
        if row.get("category") is not None and tau is not None:
            place = _series.name(row), number(row, "temperature"), number(row, "batch_size")
            merged.setdefault(place, {**row, "tau": {}})["tau"].setdefault(str(row["category"]), tau)
    told = "Tokens per round of the prompts of one category, the target's own token included."
    return _grouped(
        list(merged.values()),
        lambda row: row["tau"],
        "Block efficiency by category of prompt",
        told,
        "block efficiency (tokens)",
    )


def _grouped(
    rows: Sequence[dict], values: Callable[[dict], dict[str, float | None]], title: str, told: str, axis: str
) -> Figure | None:
    """Bars of ``values``, name -> number, in a panel for every temperature; of several batch sizes the smallest is shown."""
    panels: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in sorted(rows, key=lambda row: (number(row, "temperature") or 0, number(row, "batch_size") or 0)):
        found: dict[str, float | None] = {name: value for name, value in values(row).items() if value is not None}
        if found:
            panels.setdefault(f"temperature {number(row, 'temperature') or 0:g}", {}).setdefault(
                _series.name(row), found
            )
    if not panels:
        return None
    if len(panels) > 2:
        most = sorted(panels, key=lambda heading: -len(panels[heading]))[:2]
        panels = {heading: panel for heading, panel in panels.items() if heading in most}
        told += " Of several temperatures the two with most methods are shown."
    names = list(dict.fromkeys(name for panel in panels.values() for found in panel.values() for name in found))
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    if len(panels) == 1:
        title += f", {next(iter(panels))}"
    shown = {
        heading: (names, [[panel.get(label, {}).get(name) for name in names] for label in labels])
        for heading, panel in panels.items()
    }
    return _canvas.bars(title, shown, labels, told, axis)


PARTS = ("draft", "verify", "accept", "host")


def time_split(rows: Sequence[dict]) -> Figure | None:
    """Where the time of decoding goes: stacked shares, a bar for every row."""
    known = [
        row for row in _series.finished(rows) if any(number(_series.part(row, "time_split"), part) for part in PARTS)
    ]
    if not known:
        return None
    groups, fewer = _series.thin([[row] for row in known], 30, batches=True)
    known = [row for (row,) in groups]
    legend = _canvas.key(PARTS)
    told = "Shares of the time of the decode loop; prefill and compilation are outside it." + fewer
    figure, (ax,) = _canvas.canvas(
        "Where the decoding time goes", [""], 0.25 * len(known) + 0.1, told, legend.lines, 0.37
    )
    handles, reached = [], [0.0] * len(known)
    for place, part in enumerate(PARTS):
        shares = [100 * (number(row["time_split"], part) or 0.0) for row in known]
        style = _canvas.look(place)
        handles.append(
            ax.barh(
                range(len(known)),
                shares,
                0.72,
                left=reached,
                color=style.colour,
                hatch=_canvas.HATCHES[place],
                edgecolor="white",
                linewidth=0,
            )
        )
        reached = [a + b for a, b in zip(reached, shares, strict=True)]
    labels = _series.distinct(known)
    ax.set_yticks(range(len(known)), labels=[_canvas.plain(label, 38) for label in labels])
    ax.set_ylim(len(known) - 0.5, -0.5)
    ax.set_xlim(0, 100)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("share of the decoding time (%)", fontsize=9)
    _canvas.add_legend(figure, legend, handles)
    return figure
