"""The plot of a stream with a drafter that learns: acceptance and tokens per round over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specjax.report import _canvas, _rows, _series

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {"alpha": "acceptance rate (alpha)", "tau": "tokens per round (tau)"}


def acceptance_over_time(rows: Sequence[dict]) -> Figure | None:
    """A line per row that has "windows"; a grey line where the most frequent category changes."""
    known = [(row, windows) for row in rows if (windows := _windows(row))]
    if not known:
        return None
    shown = known[: _series.MOST]
    labels = [
        f"{_rows.label(row)}, temperature {_rows.number(row, 'temperature') or 0:g}"
        for row, _ in shown
    ]
    legend = _canvas.legend_text(labels)
    changes = _changes(shown[0][1])
    topics = ", ".join(f"from request {first} {name}" for first, name in changes)
    caption = "Means over the requests of a window, at its middle."
    caption += f" Topics: {topics}." if topics else ""
    if len(shown) < len(known):
        caption += f" The first {len(shown)} of {len(known)} are shown."
    figure, axes = _canvas.canvas(
        "Acceptance over time", list(PANELS.values()), 2.3, caption, legend.lines
    )
    for ax, name in zip(axes, PANELS, strict=True):
        for index, (_, windows) in enumerate(shown):
            look = _canvas.style(index)
            points = [
                ((one["first"] + one["last"]) / 2, value)
                for one in windows
                if (value := _rows.number(one, name)) is not None
            ]
            ax.plot(
                *zip(*points, strict=True) if points else ((), ()),
                color=look.colour,
                marker=look.marker,
                markersize=4,
                linestyle=look.line,
                linewidth=1.2,
            )
        for first, _ in changes[1:]:
            ax.axvline(first - 0.5, color=_canvas.GREY, linewidth=0.8, linestyle="dotted")
        ax.set_xlabel("request", fontsize=9)
    axes[0].set_ylim(0, 1.03)
    handles = [_canvas.sample(_canvas.style(index)) for index in range(len(shown))]
    _canvas.add_legend(figure, legend, handles)
    return figure


def _windows(row: dict) -> list[dict[str, Any]]:
    """The windows of a row that can be drawn."""
    values = row.get("windows")
    if not isinstance(values, list):
        return []
    return [
        one
        for one in values
        if isinstance(one, dict) and all(_rows.is_number(one.get(key)) for key in ("first", "last"))
    ]


def _changes(windows: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """(first request, category) of the first window and where the largest category changes."""
    result: list[tuple[int, str]] = []
    for one in windows:
        counts = _rows.part(one, "categories")
        if not counts:
            continue
        largest = str(max(counts, key=lambda name: counts[name]))
        if not result or result[-1][1] != largest:
            result.append((one["first"], largest))
    return result
