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
        f"speedup_by_{axis}": lambda rows, axis=axis: speedup_against(rows, axis)
        for axis in _series.AXES
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
    # What is accepted does not depend on the batch, and a longer chain shows the depths of a shorter one as well.
    panels, left_out = _by_temperature(
        _apart(known),
        lambda row: (-len(_depths(row)), number(row, "batch_size") or 0),
        lambda facts: ("batch_size", *(("gamma", "nodes") if facts["shape"] == "chain" else ())),
        "Of several lengths of a chain the longest is shown, and of several batch sizes the smallest.",
    )
    left_out += _alike(known)
    labels = list(dict.fromkeys(label for panel in panels.values() for label in panel))
    legend = _canvas.key(labels)
    told = "The share of the tokens tested at a depth that was accepted there; a depth is tested if all above it were accepted."
    told += left_out
    title = "Acceptance by depth" + ("" if len(panels) > 1 else f" at {next(iter(panels))}")
    figure, axes = _canvas.canvas(
        title, list(panels), 2.9 if len(panels) == 1 else 2.3, told, legend.lines
    )
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
        _canvas.ticks(
            ax, range(1, max(map(len, map(_depths, panel.values())), default=1) + 1), str, True
        )
        ax.set_ylim(0, 1.03)
        ax.set_xlabel("depth (tokens after the pending one)", fontsize=9)
    axes[0].set_ylabel("accepted share", fontsize=9)
    _canvas.add_legend(figure, legend, [handles[label] for label in labels])
    return figure


def _apart(rows: Sequence[dict]) -> dict[tuple, dict]:
    """The rows by what they are; of rows alike in all of it the first."""
    groups: dict[tuple, dict] = {}
    for row in rows:
        groups.setdefault(tuple(_series.facts_of(row).items()), row)
    return groups


def _alike(rows: Sequence[dict]) -> str:
    return (
        ""
        if len(_apart(rows)) == len(rows)
        else " Of rows alike in all but their measurements the first is shown."
    )


def _depths(row: dict) -> list[float]:
    values = row.get("acceptance_by_depth")
    return (
        [v if _series.is_number(v) else math.nan for v in values]
        if isinstance(values, list | tuple)
        else []
    )


def _by_temperature(
    groups: dict[tuple, Any],
    least: Callable[[Any], Any],
    but: Callable[[dict], Sequence[str]],
    said: str,
) -> tuple[dict[str, dict[str, Any]], str]:
    """Heading -> label -> what is shown there, a panel for every temperature, and what to say of what is left out.

    Args:
        groups: facts of a row, as the items of ``_series.facts_of`` -> what is to be shown.
        least: of the entries that differ only in what ``but`` names for their facts the one with the least of it is shown.
        said: the sentence that tells so.
    """
    chosen: dict[tuple, Any] = {}
    series: dict[tuple, None] = {}  # in the order of their first appearance
    for key, shown in groups.items():
        facts = dict(key)
        heading = facts.pop("temperature")
        ignored = but(facts)
        left = tuple((name, value) for name, value in facts.items() if name not in ignored)
        series[left] = None
        place = (heading if _series.is_number(heading) else 0), left
        if place not in chosen or least(shown) < least(chosen[place]):
            chosen[place] = shown
    told = f" {said}" if len(chosen) < len(groups) else ""
    if len(series) > _series.MOST:
        told += f" The first {_series.MOST} of {len(series)} are shown."
    kept = list(series)[: _series.MOST]
    labels = dict(zip(kept, _series.labels_of([dict(left) for left in kept]), strict=True))
    panels: dict[str, dict[str, Any]] = {}
    headings = sorted({heading for heading, left in chosen if left in labels})
    if len(headings) > _series.MOST_PANELS:
        told += f" The lowest {_series.MOST_PANELS} of {len(headings)} temperatures are shown."
    for heading in headings[: _series.MOST_PANELS]:
        found = {
            label: chosen[heading, left]
            for left, label in labels.items()
            if (heading, left) in chosen
        }
        title = f"temperature {heading:g}"
        panels[f"temperature {heading}" if title in panels else title] = found
    return panels, told


def overlap_by_class(rows: Sequence[dict]) -> Figure | None:
    """True overlap of draft and target on each class of tokens of the target's text, where rows have it."""

    def values(row: dict) -> dict[str, float | None]:
        classes = _series.part(_series.part(row, "overlap"), "by_class")
        return {name: number(_series.part(classes, name), "alpha") for name in classes}

    told = "alpha of each class: the sum over x of min(target(x), draft(x)), on every position of text that the target wrote."
    known = [
        row
        for row in _series.finished(rows)
        if any(value is not None for value in values(row).values())
    ]
    return _grouped(
        _apart(known),
        values,
        "Overlap of draft and target by class of token",
        told + _alike(known),
        "mean overlap",
    )


def by_category(rows: Sequence[dict]) -> Figure | None:
    """Block efficiency in every category of prompts, from the rows of one category."""
    merged: dict[tuple, dict] = {}
    told = "Tokens per round of the prompts of one category, the target's own token included."
    twice = False
    for row in rows:
        tau = number(row, "block_efficiency")
        if row.get("category") is not None and tau is not None:
            place = tuple(_series.facts_of(row).items())
            found = merged.setdefault(place, {**row, "tau": {}})["tau"]
            twice = twice or str(row["category"]) in found
            found.setdefault(str(row["category"]), tau)
    told += " Of rows alike in all but their measurements the first is shown." if twice else ""
    return _grouped(
        merged,
        lambda row: row["tau"],
        "Block efficiency by category of prompt",
        told,
        "block efficiency (tokens)",
    )


def _grouped(
    rows: dict[tuple, dict],
    values: Callable[[dict], dict[str, float | None]],
    title: str,
    told: str,
    axis: str,
) -> Figure | None:
    """Bars of ``values``, name -> number, in a panel for every temperature; of several batch sizes the smallest is shown."""
    chosen, left_out = _by_temperature(
        rows,
        lambda row: number(row, "batch_size") or 0,
        lambda _: ("batch_size",),
        "Of several batch sizes the smallest is shown.",
    )
    told += left_out
    if not chosen:
        return None
    panels = {
        heading: {
            label: {name: value for name, value in values(row).items() if value is not None}
            for label, row in panel.items()
        }
        for heading, panel in chosen.items()
    }
    if len(panels) > 2:
        most = sorted(panels, key=lambda heading: -len(panels[heading]))[:2]
        panels = {heading: panel for heading, panel in panels.items() if heading in most}
        told += " Of several temperatures the two with most methods are shown."
    names = list(
        dict.fromkeys(
            name for panel in panels.values() for found in panel.values() for name in found
        )
    )
    if len(names) > 40:
        told += f" The first 40 of {len(names)} groups of bars are shown."
        names = names[:40]
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
        row
        for row in _series.finished(rows)
        if any(number(_series.part(row, "time_split"), part) for part in PARTS)
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
