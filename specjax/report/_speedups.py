"""Plots of the measured speed-up: along a setting, and against the predicted speed-up."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax import theory
from specjax.report import _canvas, _rows, _series
from specjax.report._axes import AXES, Axis
from specjax.report._rows import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEEDUP = "speed-up (times plain decoding)"
BARS = "Bars: minimum and maximum of the interleaved passes."
CURVE = (
    "Curves: 1 + s (E - 1) tokens for gamma c + v(gamma+1) steps, E = (1 - alpha^(gamma+1)) / "
    "(1 - alpha), with the means of alpha, c and s over the points, and v interpolated between the "
    "measured sizes; s is the share of full drafts that the rounds had, (tau - 1) over what the "
    "acceptance by depth gives if every round drafts gamma tokens. Assumed: all depths have the "
    "same acceptance rate, s is the same for every gamma, only drafting and verifying take time."
)
CURVE_POINTS = 64
MOST_METHODS, MOST_POINTS = 30, 40


def speedup_against(rows: Sequence[dict], axis: str) -> Figure | None:
    """Measured speed-up along one of ``_axes.AXES``; None unless two rows differ in that alone.

    Points are medians, their bars the minimum and the maximum of the passes. Along gamma also the
    curve of Theorem 3.8 with measured costs (Leviathan et al. 2023, 2211.17192).
    """
    chosen = AXES[axis]
    panels, left_out = _series.panels(_rows.finished(rows), axis)
    if not panels:
        return None
    curves = axis == "gamma" and any(_costs(s.rows) for panel in panels.values() for s in panel)
    caption = " ".join(
        filter(None, [BARS, chosen.caption, left_out.strip(), CURVE if curves else ""])
    )
    labels = sorted({s.label for panel in panels.values() for s in panel})
    legend = _canvas.legend_text(labels)
    height = 2.9 if len(panels) == 1 else 1.75
    figure, axes = _canvas.canvas(chosen.title, list(panels), height, caption, legend.lines)
    for ax, panel in zip(axes, panels.values(), strict=True):
        ax.axhline(1, color=_canvas.GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for series in panel:
            style = _canvas.style(labels.index(series.label))
            if axis != "gamma" or not _curve(ax, series.rows, style):
                _line(ax, series.rows, chosen, style)
            xs = [chosen.value(row) for row in series.rows]
            _points(ax, xs, series.rows, style)
        values = [chosen.value(row) for s in panel for row in s.rows]
        _canvas.ticks(ax, values, chosen.spell, chosen.steps)
        ax.set_ylim(bottom=0)
        ax.set_xlabel(chosen.label, fontsize=9)
    for ax in axes[:: 1 if len(axes) == 1 else 2]:
        ax.set_ylabel("speed-up" if len(axes) > 1 else SPEEDUP, fontsize=9)
    samples = [_canvas.sample(_canvas.style(index)) for index in range(len(labels))]
    _canvas.add_legend(figure, legend, samples)
    return figure


def _line(ax: Axes, rows: Sequence[dict], axis: Axis, style: _canvas.Style) -> None:
    """Joins the fastest points of a series."""
    ordered = sorted(rows, key=lambda row: number(row, "speedup"))
    fastest = {axis.value(row): row["speedup"] for row in ordered}
    xs = sorted(fastest)
    ys = [fastest[x] for x in xs]
    ax.plot(xs, ys, color=style.colour, linestyle=style.line, linewidth=1.2, alpha=0.8)


def _points(ax: Axes, xs: Sequence[float], rows: Sequence[dict], style: _canvas.Style):
    """Draws the speed-ups of the rows with their spread; returns the points without their bars."""
    drawn = ax.errorbar(
        xs,
        [row["speedup"] for row in rows],
        yerr=_spread(rows),
        fmt=style.marker,
        color=style.colour,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        elinewidth=1,
        capsize=2,
    )
    return drawn.lines[0]


def _spread(rows: Sequence[dict]) -> list[list[float]]:
    """[below, above]: from each speed-up to the ends of its passes; 0 where they are not known."""
    below, above = [], []
    for row in rows:
        ends = _rows.part(row, "spread").get("speedup")
        low, high = ends if isinstance(ends, list | tuple) and len(ends) == 2 else (None, None)
        middle = row["speedup"]
        below.append(max(middle - low, 0.0) if _rows.is_number(low) else 0.0)
        above.append(max(high - middle, 0.0) if _rows.is_number(high) else 0.0)
    return [below, above]


def _draft_share(row: dict) -> float:
    """The emitted draft tokens, as a share of those that full drafts would give.

    1 if every round drafts gamma tokens, less if some draft fewer or none; 1 if it is not known.
    """
    depths, tau = row.get("acceptance_by_depth"), number(row, "block_efficiency")
    if tau is None or not isinstance(depths, list | tuple):
        return 1.0
    if not all(_rows.is_number(rate) and 0 <= rate <= 1 for rate in depths):
        return 1.0
    full = theory.expected_tokens_by_depth(depths) - 1
    return min(max((tau - 1) / full, 0.0), 1.0) if full > 0 else 1.0


class _Costs(NamedTuple):
    """Means over the rows of a series; times in units of a one-token pass."""

    alpha: float
    share: float  # of ``_draft_share``
    c: float
    verify: dict[int, float]


def _costs(rows: Sequence[dict]) -> _Costs | None:
    """The costs of the rows that are chains and have all measurements; None if there are none."""
    alphas, shares, drafts, verify = [], [], [], {}
    for row in rows:
        alpha, gamma, nodes = (number(row, name) for name in ("acceptance_rate", "gamma", "nodes"))
        costs = _rows.part(row, "costs_ms")
        step, draft, check = (number(costs, name) for name in ("step", "draft", "verify"))
        if alpha is None or not 0 <= alpha <= 1:
            continue
        if gamma is None or gamma < 1 or gamma != int(gamma) or nodes != gamma:
            continue
        if draft is None or not step or not check:
            continue
        if min(step, check) > 0 <= draft:
            alphas.append(alpha)
            shares.append(_draft_share(row))
            drafts.append(draft / gamma / step)
            verify.setdefault(int(gamma) + 1, []).append(check / step)
    if not alphas:
        return None
    alpha, share, c = (statistics.fmean(values) for values in (alphas, shares, drafts))
    return _Costs(alpha, share, c, {n: statistics.fmean(v) for n, v in verify.items()})


def _curve(ax: Axes, rows: Sequence[dict], style: _canvas.Style) -> bool:
    """Draws the speed-up that theory gives for a series; False if its costs are not known."""
    if (costs := _costs(rows)) is None:
        return False
    last = max(costs.verify) - 1
    points = min(last, CURVE_POINTS - 1)
    gammas = [last * index // points for index in range(points + 1)]
    gains = []
    for gamma in gammas:
        tokens = 1 + costs.share * (theory.expected_tokens(costs.alpha, gamma) - 1)
        verify = theory.verify_cost(costs.verify, gamma + 1)
        gains.append(theory.speedup(tokens, gamma * costs.c, verify))
    ax.plot(gammas, gains, color=style.colour, linestyle=style.line, linewidth=1.4, alpha=0.75)
    return True


def predicted(rows: Sequence[dict]) -> Figure | None:
    """Measured against predicted speed-up; the distance from the diagonal is system efficiency."""
    both = [row for row in _rows.finished(rows) if (number(row, "predicted_speedup") or 0) > 0]
    if not both:
        return None
    groups, left_out = _fastest(both)
    caption = (
        "On the line, the accepted tokens and the costs of drafting and verifying explain the "
        f"speed-up (system efficiency 1); below it, other work takes time. {BARS}{left_out}"
    )
    legend = _canvas.legend_text(list(groups))
    title = "Measured speed-up against the predicted one"
    figure, (ax,) = _canvas.canvas(title, [""], 3.4, caption, legend.lines)
    shown = [row for group in groups.values() for row in group]
    ends = [row["speedup"] + above for row, above in zip(shown, _spread(shown)[1], strict=True)]
    most = max(*ends, *(row["predicted_speedup"] for row in shown)) * 1.08
    ax.plot([0, most], [0, most], color=_canvas.GREY, linewidth=1, linestyle=(0, (4, 3)))
    handles: list[Any] = []
    for index, group in enumerate(groups.values()):
        xs = [row["predicted_speedup"] for row in group]
        handles.append(_points(ax, xs, group, _canvas.style(index)))
    ax.set_xlim(0, most)
    ax.set_ylim(0, most)
    ax.set_xlabel(
        "predicted speed-up (tokens per round over the measured cost of a round)", fontsize=9
    )
    ax.set_ylabel("measured speed-up", fontsize=9)
    _canvas.add_legend(figure, legend, handles)
    return figure


def _fastest(rows: Sequence[dict]) -> tuple[dict[str, list[dict]], str]:
    """(label -> rows, of the fastest methods the fastest rows, a note on what is left out)."""
    kept, note = _series.thin(list(_rows.by_label(rows).values()), MOST_METHODS)
    groups = {_rows.label(group[0]): group for group in kept}
    if any(len(group) > MOST_POINTS for group in kept):
        note += f" Of each method the {MOST_POINTS} fastest rows are shown."
        groups = {
            label: sorted(group, key=lambda row: -row["speedup"])[:MOST_POINTS]
            for label, group in groups.items()
        }
    return groups, note
