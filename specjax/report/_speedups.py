"""The measured speed-up: along what was varied, and beside what theory predicts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax import theory
from specjax.report import _canvas, _series
from specjax.report._series import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEEDUP = "speed-up (times plain decoding)"


def speedup_against(rows: Sequence[dict], axis: str) -> Figure | None:
    """Measured speed-up along one axis of ``_series.AXES``, if two rows differ in that alone; else None.

    Points are medians and their bars the least and the most of the passes. Along gamma the curve of Theorem 3.8 with
    measured costs goes with them (Leviathan et al. 2023, 2211.17192).
    """
    what = _series.AXES[axis]
    panels, fewer = _series.panels(_series.finished(rows), axis)
    if not panels:
        return None
    curves = axis == "gamma" and any(_cost(s.rows) for panel in panels.values() for s in panel)
    told = [
        "Bars: least and most of the interleaved passes.",
        what.caption,
        fewer.strip(),
        CURVE if curves else "",
    ]
    labels = sorted({s.label for panel in panels.values() for s in panel})
    legend = _canvas.key(labels)
    height = 2.9 if len(panels) == 1 else 1.75
    figure, axes = _canvas.canvas(
        what.title, list(panels), height, " ".join(filter(None, told)), legend.lines
    )
    handles: dict[str, Any] = {}
    for ax, panel in zip(axes, panels.values(), strict=True):
        ax.axhline(1, color=_canvas.GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        for series in panel:
            style = _canvas.look(labels.index(series.label))
            curve = _curve(ax, series.rows, style) if axis == "gamma" else False
            best = {
                what.value(row): row
                for row in sorted(series.rows, key=lambda row: number(row, "speedup"))
            }
            if not curve:
                joined = [best[x]["speedup"] for x in sorted(best)]
                ax.plot(
                    sorted(best),
                    joined,
                    color=style.colour,
                    linestyle=style.line,
                    linewidth=1.2,
                    alpha=0.8,
                )
            xs, ys = (
                [what.value(row) for row in series.rows],
                [row["speedup"] for row in series.rows],
            )
            _points(ax, xs, ys, _spread(series.rows), style)
            handles.setdefault(series.label, _canvas.sample(style))
        _canvas.ticks(
            ax, [what.value(row) for s in panel for row in s.rows], what.spell, what.steps
        )
        ax.set_ylim(bottom=0)
        ax.set_xlabel(what.label, fontsize=9)
    for ax in axes[:: 1 if len(axes) == 1 else 2]:
        ax.set_ylabel("speed-up" if len(axes) > 1 else SPEEDUP, fontsize=9)
    _canvas.add_legend(figure, legend, [handles[label] for label in labels])
    return figure


CURVE = (
    "Curves: 1 + s (E - 1) tokens for gamma c + v(gamma+1) steps, E = (1 - alpha^(gamma+1)) / (1 - alpha), with the means of "
    "alpha, c and s over the points, and v interpolated between the measured sizes; s is the share of the draft that was "
    "there to be accepted, (tau - 1) over what the acceptance by depth gives if every round drafts gamma tokens. Assumed: "
    "all depths are accepted alike, s is the same for every gamma, and nothing but drafting and verifying takes time."
)
CURVE_POINTS = 64
MOST_METHODS, MOST_POINTS = 30, 40


def _points(ax: Axes, xs: Sequence[float], ys: Sequence[float], errors, style: _canvas.Look):
    drawn = ax.errorbar(
        xs,
        ys,
        yerr=errors,
        fmt=style.marker,
        color=style.colour,
        markersize=5.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        elinewidth=1,
        capsize=2,
    )
    return drawn.lines[0]  # for the legend: the point without its bar


def _spread(rows: Sequence[dict]) -> list[list[float]]:
    """How far the passes reach below and above each row's speed-up; 0 where that is not known."""
    below, above = [], []
    for row in rows:
        reach = _series.part(row, "spread").get("speedup")
        low, high = reach if isinstance(reach, list | tuple) and len(reach) == 2 else (None, None)
        middle = row["speedup"]
        below.append(max(middle - low, 0.0) if _series.is_number(low) else 0.0)
        above.append(max(high - middle, 0.0) if _series.is_number(high) else 0.0)
    return [below, above]


def _drafted(row: dict) -> float:
    """Which share of the tokens that full drafts would bring the rounds did bring: 1 if each drafts gamma tokens.

    A drafter that at times has nothing to propose, or less than gamma, brings less. 1 also where it is not known.
    """
    depths, tau = row.get("acceptance_by_depth"), number(row, "block_efficiency")
    if tau is None or not isinstance(depths, list | tuple):
        return 1.0
    if not all(_series.is_number(chance) and 0 <= chance <= 1 for chance in depths):
        return 1.0
    full = theory.expected_tokens_by_depth(depths) - 1
    return min(max((tau - 1) / full, 0.0), 1.0) if full > 0 else 1.0


class _Costs(NamedTuple):
    alpha: float
    share: float  # of ``_drafted``
    c: float
    verify: dict[int, float]


def _cost(rows: Sequence[dict]) -> _Costs | None:
    """The means of a series of chains, all measured; None if something is missing."""
    alphas, shares, drafts, verify = [], [], [], {}
    for row in rows:
        alpha, gamma, nodes = (number(row, name) for name in ("acceptance_rate", "gamma", "nodes"))
        step, draft, check = (
            number(_series.part(row, "costs_ms"), name) for name in ("step", "draft", "verify")
        )
        if (
            alpha is None
            or not 0 <= alpha <= 1
            or gamma is None
            or gamma < 1
            or gamma != int(gamma)
            or nodes != gamma
            or draft is None
            or not step
            or not check
        ):
            continue
        if min(step, check) > 0 <= draft:
            alphas.append(alpha)
            shares.append(_drafted(row))
            drafts.append(draft / gamma / step)
            verify.setdefault(int(gamma) + 1, []).append(check / step)
    if not alphas:
        return None
    alpha, share, c = (statistics.fmean(values) for values in (alphas, shares, drafts))
    return _Costs(alpha, share, c, {n: statistics.fmean(v) for n, v in verify.items()})


def _curve(ax: Axes, rows: Sequence[dict], style: _canvas.Look) -> bool:
    """Draws what theory says of a series; False if its costs are not known."""
    if (found := _cost(rows)) is None:
        return False
    last = max(found.verify) - 1
    points = min(last, CURVE_POINTS - 1)
    gammas = [last * place // points for place in range(points + 1)]  # all of them, if they are few
    gains = []
    for gamma in gammas:
        tokens = 1 + found.share * (theory.expected_tokens(found.alpha, gamma) - 1)
        gains.append(
            theory.speedup(tokens, gamma * found.c, theory.verify_cost(found.verify, gamma + 1))
        )
    ax.plot(gammas, gains, color=style.colour, linestyle=style.line, linewidth=1.4, alpha=0.75)
    return True


def predicted(rows: Sequence[dict]) -> Figure | None:
    """Measured speed-up against the predicted one, with the diagonal: the distance is the system efficiency."""
    both = [row for row in _series.finished(rows) if (number(row, "predicted_speedup") or 0) > 0]
    if not both:
        return None
    every = _series.by_label(both)
    kept, fewer = _series.thin(list(every.values()), MOST_METHODS)
    groups = {_series.name(some[0]): some for some in kept}
    if any(len(some) > MOST_POINTS for some in kept):
        fewer += f" Of each method the {MOST_POINTS} fastest rows are shown."
        fastest = {
            label: sorted(some, key=lambda row: -row["speedup"]) for label, some in groups.items()
        }
        groups = {label: some[:MOST_POINTS] for label, some in fastest.items()}
    both = [row for some in groups.values() for row in some]
    legend = _canvas.key(list(groups))
    told = (
        "On the line, the tokens accepted and the costs of drafting and verifying explain the speed-up (system efficiency 1); "
        "below it, time is lost elsewhere. Bars: least and most of the interleaved passes." + fewer
    )
    figure, (ax,) = _canvas.canvas(
        "Measured speed-up beside the predicted one", [""], 3.4, told, legend.lines
    )
    most = max(max(row["speedup"], row["predicted_speedup"]) for row in both) * 1.08
    ax.plot([0, most], [0, most], color=_canvas.GREY, linewidth=1, linestyle=(0, (4, 3)))
    handles = [
        _points(
            ax,
            [row["predicted_speedup"] for row in group],
            [row["speedup"] for row in group],
            _spread(group),
            _canvas.look(place),
        )
        for place, group in enumerate(groups.values())
    ]
    ax.set_xlim(0, most)
    ax.set_ylim(0, most)
    ax.set_xlabel(
        "predicted speed-up (tokens per round over the measured cost of a round)", fontsize=9
    )
    ax.set_ylabel("measured speed-up", fontsize=9)
    _canvas.add_legend(figure, legend, handles)
    return figure
