"""Plots of the rows of results.json: every plot that the rows have data for.

The caption of a figure states its assumptions. Rows without a speed-up are left out, and rows of
one category are only in the plot of categories.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specjax import theory
from specjax.report import canvas, inputs, series
from specjax.report.canvas import save as save
from specjax.report.canvas import svg as svg
from specjax.report.inputs import TIME_PARTS, number, part
from specjax.report.series import AXES, Axis

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
MOST_METHODS, MOST_POINTS = 30, 40  # of the plot of the predicted speed-up
MOST_TEMPERATURES = 2  # of plots with groups of bars
MOST_NAMES = 40  # groups of bars in a panel
MOST_BARS = 30  # of the plot of the decoding time
FIRST_SHOWN = " Of rows with the same settings the first is shown."
SHORTER = (
    " Of several lengths of a chain the longest is shown, and of several batch sizes the smallest."
)
DASHED: dict[str, Any] = {"color": canvas.GREY, "linewidth": 1, "linestyle": (0, (4, 3))}
POSITIONS = {
    "tau_by_output_position": "output position (tokens)",
    "tau_by_context_position": "context position (tokens)",
}
WINDOWS = {"alpha": "acceptance rate (alpha)", "tau": "tokens per round (tau)"}


def draw(rows: Sequence[dict]) -> dict[str, Figure]:
    """File name without suffix -> figure, of every plot that the rows have data for."""
    figures = {f"speedup_by_{axis}": speedup_against(rows, axis) for axis in AXES} | {
        "predicted_and_measured": predicted(rows),
        "acceptance_by_depth": acceptance_by_depth(rows),
        "overlap_by_class": overlap_by_class(rows),
        "time_split": time_split(rows),
        "efficiency_by_category": by_category(rows),
        "acceptance_over_time": acceptance_over_time(rows),
        "tau_along_text": tau_along_text(rows),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def speedup_against(rows: Sequence[dict], axis: str) -> Figure | None:
    """Measured speed-up along one of ``series.AXES``; None unless two rows differ in that alone.

    Points are medians, their bars the minimum and the maximum of the passes. Along gamma also the
    curve of Theorem 3.8 with measured costs (Leviathan et al. 2023, 2211.17192).
    """
    chosen = AXES[axis]
    panels, left_out = series.panels(inputs.finished(rows), axis)
    if not panels:
        return None
    labels = sorted({label for panel in panels.values() for label, _ in panel})
    figure, axes = canvas.canvas(chosen.title, list(panels), 3.5 if len(panels) == 1 else 2.4)
    curves = False
    for ax, panel in zip(axes, panels.values(), strict=True):
        ax.axhline(1, zorder=1, **DASHED)
        for label, group in panel:
            style = canvas.style(labels.index(label))
            curve = _curve(group) if axis == "gamma" else None
            curves = curves or curve is not None
            xs, ys = _fastest_points(group, chosen) if curve is None else curve
            ax.plot(xs, ys, alpha=0.8, **style)[0].set_marker("")
            _points(ax, [chosen.value(row) for row in group], group, style)
        values = [chosen.value(row) for _, group in panel for row in group]
        canvas.ticks(ax, values, chosen.spell, chosen.steps)
        ax.set(ylim=(0, None), xlabel=chosen.label)
    for ax in axes[:: min(2, len(axes))]:
        ax.set_ylabel("speed-up" if len(axes) > 1 else SPEEDUP)
    parts = [BARS, chosen.caption, left_out.strip(), CURVE if curves else ""]
    return canvas.finish(figure, labels, " ".join(filter(None, parts)))


def _fastest_points(rows: Sequence[dict], axis: Axis) -> tuple[list[float], list[float]]:
    """The values on the axis, and the largest speed-up at each."""
    ordered = sorted(rows, key=lambda row: number(row, "speedup"))
    fastest = {axis.value(row): row["speedup"] for row in ordered}
    return sorted(fastest), [fastest[x] for x in sorted(fastest)]


def _points(ax: Axes, xs: Sequence[float], rows: Sequence[dict], style: dict[str, Any]):
    """Draws the speed-ups of the rows with their spread; returns the points without their bars."""
    ys = [row["speedup"] for row in rows]
    points: dict[str, Any] = {**style, "linestyle": "none"}
    return ax.errorbar(xs, ys, yerr=_spread(rows), elinewidth=1, capsize=2, **points).lines[0]


def _spread(rows: Sequence[dict]) -> list[tuple[float, ...]]:
    """[below, above]: from each speed-up to the ends of its passes."""
    ends = [_list(part(row, "spread"), "speedup") for row in rows]
    pairs = [_distances(row["speedup"], each) for row, each in zip(rows, ends, strict=True)]
    return list(zip(*pairs, strict=True))


def _distances(value: float, ends: Sequence[Any]) -> tuple[float, float]:
    """From a value down and up to the ends of its range; 0 where they are not known."""
    low, high = ends if len(ends) == 2 else (math.nan, math.nan)
    below = max(value - low, 0.0) if inputs.is_number(low) else 0.0
    return below, max(high - value, 0.0) if inputs.is_number(high) else 0.0


def _draft_share(row: dict) -> float:
    """The emitted draft tokens, as a share of those that full drafts would give.

    1 if every round drafts gamma tokens, less if some draft fewer or none; 1 if it is not known.
    """
    depths, tau = _list(row, "acceptance_by_depth"), number(row, "block_efficiency")
    if tau is None or not all(inputs.is_number(rate) and 0 <= rate <= 1 for rate in depths):
        return 1.0
    full = theory.expected_tokens_by_depth(depths) - 1
    return min(max((tau - 1) / full, 0.0), 1.0) if full > 0 else 1.0


def _costs(rows: Sequence[dict]) -> tuple[list[float], dict[int, float]] | None:
    """([alpha, ``_draft_share``, c], v) of chains with all measurements; None if there are none.

    Means over the rows of a series; c and v in units of a one-token pass.
    """
    means, verify = [], {}
    for row in rows:
        alpha, gamma, nodes = (number(row, name) for name in ("acceptance_rate", "gamma", "nodes"))
        costs = part(row, "costs_ms")
        step, draft, check = (number(costs, name) for name in ("step", "draft", "verify"))
        if None in (alpha, gamma, step, draft, check) or nodes != gamma or gamma != int(gamma):
            continue
        if 0 <= alpha <= 1 <= gamma and min(step, check) > 0 <= draft:
            means.append((alpha, _draft_share(row), draft / gamma / step))
            verify.setdefault(int(gamma) + 1, []).append(check / step)
    if not means:
        return None
    verify = {n: statistics.fmean(times) for n, times in verify.items()}
    return [statistics.fmean(values) for values in zip(*means, strict=True)], verify


def _curve(rows: Sequence[dict]) -> tuple[list[int], list[float]] | None:
    """(gammas, the speed-ups that theory gives) for a series; None if its costs are not known."""
    if (costs := _costs(rows)) is None:
        return None
    (alpha, share, c), times = costs
    last = max(times) - 1
    points = min(last, CURVE_POINTS - 1)
    gammas = [last * index // points for index in range(points + 1)]
    gains = []
    for gamma in gammas:
        tokens = 1 + share * (theory.expected_tokens(alpha, gamma) - 1)
        gains.append(theory.speedup(tokens, gamma * c, theory.verify_cost(times, gamma + 1)))
    return gammas, gains


def predicted(rows: Sequence[dict]) -> Figure | None:
    """Measured against predicted speed-up; the distance from the diagonal is system efficiency."""
    both = [row for row in inputs.finished(rows) if (number(row, "predicted_speedup") or 0) > 0]
    if not both:
        return None
    groups, left_out = _fastest(both)
    caption = (
        "On the line, the accepted tokens and the costs of drafting and verifying explain the "
        f"speed-up (system efficiency 1); below it, other work takes time. {BARS}{left_out}"
    )
    figure, (ax,) = canvas.canvas("Measured speed-up against the predicted one", [""], 4.0)
    shown = [row for group in groups.values() for row in group]
    ends = [row["speedup"] + above for row, above in zip(shown, _spread(shown)[1], strict=True)]
    most = max(*ends, *(row["predicted_speedup"] for row in shown)) * 1.08
    ax.plot([0, most], [0, most], **DASHED)
    handles = [
        _points(ax, [row["predicted_speedup"] for row in group], group, canvas.style(index))
        for index, group in enumerate(groups.values())
    ]
    ax.set(xlim=(0, most), ylim=(0, most))
    ax.set_xlabel("predicted speed-up (tokens per round over the measured cost of a round)")
    ax.set_ylabel("measured speed-up")
    return canvas.finish(figure, list(groups), caption, handles)


def _fastest(rows: Sequence[dict]) -> tuple[dict[str, list[dict]], str]:
    """(label -> rows, of the fastest methods the fastest rows, a note on what is left out)."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(inputs.label(row), []).append(row)
    kept, note = series.thin(list(groups.values()), MOST_METHODS)
    if any(len(group) > MOST_POINTS for group in kept):
        note += f" Of each method the {MOST_POINTS} fastest rows are shown."
        kept = [sorted(group, key=lambda row: -row["speedup"])[:MOST_POINTS] for group in kept]
    return {inputs.label(group[0]): group for group in kept}, note


def acceptance_by_depth(rows: Sequence[dict]) -> Figure | None:
    """Conditional acceptance at each depth: a line per method, a panel per temperature."""
    known = [row for row in inputs.finished(rows) if _depths(row)]
    if not known:
        return None
    # Acceptance does not depend on the batch, and a longer chain has all depths of a shorter one.
    panels, left_out = _by_temperature(_by_settings(known), longest_chain=True)
    labels = _names(panels.values())
    title = "Acceptance by depth" + ("" if len(panels) > 1 else f" at {next(iter(panels))}")
    figure, axes = canvas.canvas(title, list(panels), 3.5 if len(panels) == 1 else 2.9)
    for ax, panel in zip(axes, panels.values(), strict=True):
        for label, row in panel.items():
            depths = _depths(row)
            ax.plot(range(1, len(depths) + 1), depths, **canvas.style(labels.index(label)))
        deepest = max((len(_depths(row)) for row in panel.values()), default=1)
        canvas.ticks(ax, range(1, deepest + 1), str, True)
        ax.set(ylim=(0, 1.03), xlabel="depth (tokens after the pending one)")
    axes[0].set_ylabel("accepted share")
    caption = (
        "The share of the tokens tested at a depth that was accepted there; a depth is tested if "
        f"all depths before it were accepted.{left_out}{_note_on_repeats(known)}"
    )
    return canvas.finish(figure, labels, caption)


def _by_settings(rows: Sequence[dict]) -> dict[tuple, dict]:
    """Settings -> the first row that has them."""
    groups: dict[tuple, dict] = {}
    for row in rows:
        groups.setdefault(tuple(series.settings_of(row).items()), row)
    return groups


def _note_on_repeats(rows: Sequence[dict]) -> str:
    return "" if len(_by_settings(rows)) == len(rows) else FIRST_SHOWN


def _depths(row: dict) -> list[float]:
    values = _list(row, "acceptance_by_depth")
    return [value if inputs.is_number(value) else math.nan for value in values]


def _list(row: dict, name: str) -> Sequence[Any]:
    """The value under ``name`` if it is a list, else []."""
    value = row.get(name)
    return value if isinstance(value, list | tuple) else []


def _names(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names in all groups, in the order of their first appearance."""
    return list(dict.fromkeys(itertools.chain.from_iterable(groups)))


def _by_temperature(
    entries: dict[tuple, dict], longest_chain: bool = False
) -> tuple[dict[str, dict[str, dict]], str]:
    """(heading -> label -> entry, with a panel for each temperature; a note on what is left out).

    ``entries`` are settings as from ``_by_settings`` -> a row. Of several batch sizes the smallest
    is shown; before that, with ``longest_chain``, of several lengths of a chain the longest.
    """

    def rank(row: dict) -> tuple[int, float]:
        return -len(_depths(row)) * longest_chain, number(row, "batch_size") or 0

    chosen: dict[tuple, dict] = {}
    for key, row in entries.items():
        settings, names = dict(key), {"temperature", "batch_size"}
        if longest_chain and settings["shape"] == "chain":
            names |= {"gamma", "nodes"}
        kept = tuple(pair for pair in key if pair[0] not in names)
        place = number(settings, "temperature") or 0, kept
        if place not in chosen or rank(row) < rank(chosen[place]):
            chosen[place] = row
    order = list(dict.fromkeys(kept for _, kept in chosen))
    note = ""
    if len(chosen) < len(entries):
        note = SHORTER if longest_chain else " Of several batch sizes the smallest is shown."
    if len(order) > series.MOST:
        note += f" The first {series.MOST} of {len(order)} are shown."
    first = order[: series.MOST]
    labels = dict(zip(first, series.labels_of([dict(kept) for kept in first]), strict=True))
    temperatures = sorted({temperature for temperature, kept in chosen if kept in labels})
    most = series.MOST_PANELS
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

    def values(row: dict) -> dict[str, float]:
        classes = part(part(row, "overlap"), "by_class")
        alphas = ((name, number(part(classes, name), "alpha")) for name in classes)
        return {name: alpha for name, alpha in alphas if alpha is not None}

    known = [row for row in inputs.finished(rows) if values(row)]
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
    for row, owner in zip(rows, inputs.owners(rows), strict=True):
        tau = number(row, "block_efficiency")
        if row.get("category") is not None and tau is not None:
            # Categories have prompts of different lengths: the length of all prompts counts.
            context = None if owner is None else number(owner, "context")
            settings = tuple((series.settings_of(row) | {"context": context}).items())
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
    values: Callable[[dict], dict[str, float]],
    title: str,
    caption: str,
    axis: str,
) -> Figure | None:
    """Bars of ``values`` (row -> name -> number) in a panel for each temperature."""
    chosen, left_out = _by_temperature(entries)
    caption += left_out
    if not chosen:
        return None
    panels = {
        heading: {label: values(row) for label, row in panel.items()}
        for heading, panel in chosen.items()
    }
    if len(panels) > MOST_TEMPERATURES:
        largest = sorted(panels, key=lambda heading: -len(panels[heading]))[:MOST_TEMPERATURES]
        panels = {heading: panel for heading, panel in panels.items() if heading in largest}
        caption += " Of several temperatures the two with most methods are shown."
    names = _names(bars for panel in panels.values() for bars in panel.values())
    if len(names) > MOST_NAMES:
        caption += f" The first {MOST_NAMES} of {len(names)} groups of bars are shown."
        names = names[:MOST_NAMES]
    labels = _names(panels.values())
    if len(panels) == 1:
        title += f", {next(iter(panels))}"
    thick = max(0.085, min(0.2, 0.62 / len(labels)))  # inches of one bar
    group = thick * len(labels) + 0.12  # inches of one group
    figure, axes = canvas.canvas(title, list(panels), len(names) * group + 0.7)
    handles: list[Any] = []
    for index, (ax, panel) in enumerate(zip(axes, panels.values(), strict=True)):
        for at, label in enumerate(labels):
            offset = (at - (len(labels) - 1) / 2) * thick / group
            lengths = [panel.get(label, {}).get(name, 0.0) for name in names]
            places = [place + offset for place in range(len(names))]
            handles.append(ax.barh(places, lengths, thick / group * 0.92, **canvas.bar_style(at)))
        canvas.name_bars(ax, names if index % 2 == 0 else [""] * len(names), 22)
        ax.set_xlabel(axis)
    return canvas.finish(figure, labels, caption, handles[: len(labels)])


def time_split(rows: Sequence[dict]) -> Figure | None:
    """The shares of the decoding time that the parts of a round take: a stacked bar per row."""

    def split(row: dict) -> list[float]:
        return [number(part(row, "time_split"), name) or 0.0 for name in TIME_PARTS]

    known = [row for row in inputs.finished(rows) if any(split(row))]
    if not known:
        return None
    groups, left_out = series.thin([[row] for row in known], MOST_BARS, batches=True)
    known = [row for (row,) in groups]
    title, height = "Where the decoding time goes", 0.25 * len(known) + 0.7
    figure, (ax,) = canvas.canvas(title, [""], height)
    handles, left = [], [0.0] * len(known)
    for index, shares in enumerate(zip(*map(split, known), strict=True)):
        widths, look = [100 * share for share in shares], canvas.bar_style(index)
        handles.append(ax.barh(range(len(known)), widths, 0.72, left=left, **look))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    canvas.name_bars(ax, series.distinct(known), 38)
    ax.set(xlim=(0, 100), xlabel="share of the decoding time (%)")
    caption = f"Shares of the time of the decode loop, without prefill and compilation.{left_out}"
    return canvas.finish(figure, list(TIME_PARTS), caption, handles)


def acceptance_over_time(rows: Sequence[dict]) -> Figure | None:
    """A stream with a drafter that learns: a line per row that has "windows".

    A grey line is where the most frequent category changes.
    """
    ends = ("first", "last")
    known = [(row, windows) for row in rows if (windows := _objects(row, "windows", ends))]
    if not known:
        return None
    shown = known[: series.MOST]
    labels = [
        f"{inputs.label(row)}, temperature {number(row, 'temperature') or 0:g}" for row, _ in shown
    ]
    changes = _changes(shown[0][1])
    topics = ", ".join(f"from request {first} {name}" for first, name in changes)
    caption = "Means over the requests of a window, at its middle."
    caption += f" Topics: {topics}." if topics else ""
    if len(shown) < len(known):
        caption += f" The first {len(shown)} of {len(known)} are shown."
    figure, axes = canvas.canvas("Acceptance over time", list(WINDOWS.values()), 3.0)
    for ax, name in zip(axes, WINDOWS, strict=True):
        for index, (_, windows) in enumerate(shown):
            there = [one for one in windows if number(one, name) is not None]
            middles = [(one["first"] + one["last"]) / 2 for one in there]
            ax.plot(middles, [one[name] for one in there], **canvas.style(index))
        for first, _ in changes[1:]:
            ax.axvline(first - 0.5, color=canvas.GREY, linewidth=0.8, linestyle="dotted")
        ax.set_xlabel("request")
    axes[0].set_ylim(0, 1.03)
    return canvas.finish(figure, labels, caption)


def _objects(row: dict, name: str, keys: Sequence[str]) -> list[dict[str, Any]]:
    """The objects in the list under ``name`` that have numbers under all of the keys."""
    objects = [one for one in _list(row, name) if isinstance(one, dict)]
    return [one for one in objects if all(number(one, key) is not None for key in keys)]


def _changes(windows: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """(first request, category) of the first window and where the largest category changes."""
    largest = [
        (one["first"], str(max(counts, key=lambda name: counts[name])))
        for one in windows
        if (counts := part(one, "categories"))
    ]
    return [next(group) for _, group in itertools.groupby(largest, key=lambda pair: pair[1])]


def tau_along_text(rows: Sequence[dict]) -> Figure | None:
    """Tokens per round by output position and by context position: a line per method.

    A panel per temperature and kind of position. Rows of a replay are drawn too.
    """
    known = [row for row in rows if row.get("category") is None and _several_positions(row)]
    panels, left_out = _by_temperature(_by_settings(known))
    if not panels:
        return None
    labels = _names(panels.values())
    drawn = [(heading, key) for heading in panels for key in POSITIONS]
    figure, axes = canvas.canvas("Tokens per round along the text", [h for h, _ in drawn], 2.9)
    for ax, (heading, key) in zip(axes, drawn, strict=True):
        begins: dict[float, float] = {}
        for label, row in panels[heading].items():
            ones, index = _positions(row, key), labels.index(label)
            begins |= {_place(one["from"]): one["from"] for one in ones}
            # Beside each other, so that no bar hides another one.
            aside = 0.05 * (index - (len(labels) - 1) / 2)
            places = [_place(one["from"]) + aside for one in ones]
            points = [one["block_efficiency"] for one in ones]
            spreads = [_distances(one["block_efficiency"], _list(one, "interval")) for one in ones]
            bars = list(zip(*spreads, strict=True)) or None
            ax.errorbar(places, points, yerr=bars, elinewidth=1, capsize=2, **canvas.style(index))
        if begins:
            spell = lambda place, begins=begins: canvas.number(begins[place])  # noqa: E731
            canvas.ticks(ax, begins, spell, True)
        ax.set(ylim=(0, None), xlabel=POSITIONS[key])
    for ax in axes[:: len(POSITIONS)]:
        ax.set_ylabel("tokens per round (tau)")
    caption = (
        "A point is over the rounds that begin between its position and the next one, which is "
        "twice as far. Bars: 95 % intervals over prompts; none where one prompt is that long. "
        f"Fewer prompts reach later positions.{left_out}{_note_on_repeats(known)}"
    )
    return canvas.finish(figure, labels, caption)


def _several_positions(row: dict) -> bool:
    return any(len(_positions(row, key)) > 1 for key in POSITIONS)


def _positions(row: dict, key: str) -> list[dict[str, Any]]:
    """The intervals of positions of a row that can be drawn."""
    return _objects(row, key, ("from", "block_efficiency"))


def _place(begin: float) -> float:
    """Where an interval that begins there is drawn: 0, 32, 64, 128, ... are one apart."""
    return math.log2(max(begin, 16))
