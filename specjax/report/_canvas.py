"""Figures that read alike: one palette, one size, labels as they were written, legends and captions that fit."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.4  # inches: 640 pixels at 100 dpi
# Okabe and Ito's palette without its yellow, which white swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")  # ten and seven: no factor in common
LINES = ("solid", (0, (5, 1.5)), (0, (1.5, 1)))
HATCHES = (
    "",
    "////",
    "----",
    "xxxx",
    "\\\\\\\\",
    "++++",
    "||||",
)  # no dots: they make an SVG ten times as large
GREY = "#555555"
# What is no character in XML: controls (white space aside), halves of surrogate pairs, the two that are none.
UNFIT = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff\ufffe\uffff]")


class Look(NamedTuple):
    """How one series is drawn: no two of the first 70 are alike."""

    colour: str
    marker: str
    hatch: str
    line: Any


def look(index: int) -> Look:
    """The look of the series of that number."""
    turn = index // len(COLOURS)
    return Look(
        COLOURS[index % len(COLOURS)],
        MARKERS[index % len(MARKERS)],
        HATCHES[(index + turn) % len(HATCHES)],
        LINES[turn % len(LINES)],
    )


def plain(text: str, width: int | None = None) -> str:
    """The text as matplotlib shows it unread: a dollar sign starts no formula. Over ``width`` characters it takes two lines."""
    text = UNFIT.sub("\ufffd", " ".join(str(text).split()))
    if width is not None:
        text = "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" ...")) or text
    return text.replace("$", r"\$")


def canvas(
    title: str, panels: Sequence[str], height: float, caption: str, legend: int, left: float = 0.1
) -> tuple[Figure, list[Axes]]:
    """An empty figure of one or two columns of panels, each ``height`` inches, with room for ``legend`` lines below.

    ``panels`` are their headings; a single panel has none. They begin at the share ``left`` of the width.
    """
    from matplotlib.figure import Figure

    columns = 1 if len(panels) == 1 else 2
    lines = -(-len(panels) // columns)
    told = textwrap.fill(caption, 112, break_on_hyphens=False)
    top, gap = 0.42, 0.7  # inches: the title; ticks, an axis label and the next panel's heading
    foot = 0.13 * (told.count("\n") + 1) + 0.16 if told else 0.05
    bottom = foot + 0.149 * legend + (0.1 if legend else 0) + 0.5
    head = 0.1 if columns == 1 else 0.25
    whole = top + head + lines * height + (lines - 1) * gap + bottom
    figure = Figure(figsize=(WIDTH, whole), facecolor="white")
    figure.suptitle(
        plain(title), x=0.02, y=1 - 0.1 / whole, ha="left", va="top", fontsize=11, fontweight="bold"
    )
    grid = figure.add_gridspec(
        lines,
        columns,
        left=left,
        right=0.975,
        top=1 - (top + head) / whole,
        bottom=bottom / whole,
        hspace=gap / height,
        wspace=0.17,
    )
    axes = [
        figure.add_subplot(grid[place // columns, place % columns]) for place in range(len(panels))
    ]
    for ax, heading in zip(axes, panels, strict=True):
        if columns > 1:
            ax.set_title(plain(heading), fontsize=9, loc="left", color=GREY)
        ax.tick_params(labelsize=8, length=3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e6e6e6", linewidth=0.6)
        ax.set_axisbelow(True)
    figure.text(
        0.02, foot / whole, told.replace("$", r"\$"), fontsize=7.5, color=GREY, ha="left", va="top"
    )
    return figure, axes


class Key(NamedTuple):
    """What a legend needs, known before the figure is: the labels, and how many lines they take."""

    labels: list[str]
    columns: int
    lines: int


def key(labels: Sequence[str]) -> Key:
    """The labels of a legend in as many columns as their length allows; of a long one the middle is left out."""
    flat = [" ".join(label.split()) for label in labels]
    shown = [
        plain(label if len(label) <= 60 else f"{label[:36]} ... {label[-19:]}") for label in flat
    ]

    def width(
        columns: int,
    ) -> int:  # in characters; the entries run down the columns, and the first columns are longer
        lengths = [len(label) for label in shown]
        return sum(int(max(part)) + 8 for part in np.array_split(lengths, columns))

    columns = next(n for n in range(min(6, len(shown)), 0, -1) if n == 1 or width(n) <= 106)
    return Key(shown, columns, -(-len(shown) // columns))


def sample(style: Look) -> Any:
    """What stands for a line with points in a legend."""
    from matplotlib.lines import Line2D

    drawn = {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.line,
        "linewidth": 1.2,
        "markersize": 5.5,
    }
    return Line2D([], [], markeredgecolor="white", markeredgewidth=0.5, **drawn)


def add_legend(figure: Figure, labels: Key, handles: Sequence[Any]) -> None:
    """Puts the legend that ``canvas`` left room for."""
    from matplotlib.legend import Legend

    whole = figure.get_figheight()
    caption = figure.texts[-1]
    base = caption.get_position()[1] + 0.06 / whole
    names = [
        f"series {place}" for place in range(len(handles))
    ]  # a label that begins with "_" would be left out
    legend: Legend = figure.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(0.02, base),
        ncols=labels.columns,
        fontsize=8,
        frameon=False,
        borderaxespad=0,
        borderpad=0.1,
        labelspacing=0.3,
        handlelength=1.8,
        columnspacing=1.4,
    )
    for text, label in zip(legend.get_texts(), labels.labels, strict=True):
        text.set_text(label)


def ticks(
    ax: Axes, values: Iterable[float], spell: Callable[[float], str], steps: bool = False
) -> None:
    """Marks the x axis at the values measured; on a logarithmic scale if they span much, unless they are ``steps``."""
    values = sorted(set(values))
    wide = not steps and values[0] > 0 and values[-1] / values[0] >= 8
    if wide:
        ax.set_xscale("log")
    shown: list[float] = []
    least = 0.09 if ax.get_position().width > 0.5 else 0.16
    place = (lambda x: math.log(x)) if wide else (lambda x: x)
    for value in values:  # those that there is room for
        if not shown or place(value) - place(shown[-1]) >= least * (
            place(values[-1]) - place(values[0])
        ):
            shown.append(value)
    ax.set_xticks(shown, labels=[spell(value) for value in shown])
    ax.minorticks_off()
    ax.margins(x=0.07)


def number(value: float) -> str:
    """1200 as 1.2k, 68000000 as 68M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def bars(
    title: str,
    panels: dict[str, tuple[list[str], list[list[float | None]]]],
    labels: Sequence[str],
    caption: str,
    axis: str,
) -> Figure:
    """Horizontal bars, a group of them for every name: panel -> (names, values[series][name]); None leaves a gap."""
    legend = key(labels)
    most = max(len(names) for names, _ in panels.values())
    thick = max(0.085, min(0.2, 0.62 / len(labels)))  # inches of one bar
    longest = max(
        len(part)
        for names, _ in panels.values()
        for n in names
        for part in plain(n, 22).split("\n")
    )
    height = most * (thick * len(labels) + 0.12) + 0.1
    figure, axes = canvas(
        title, list(panels), height, caption, legend.lines, min(0.36, 0.04 + 0.0105 * longest)
    )
    handles: list[Any] = []
    for ax, (names, values) in zip(axes, panels.values(), strict=True):
        share = thick / (thick * len(labels) + 0.12)
        for place, series in enumerate(values):
            style = look(place)
            at = [group + (place - (len(values) - 1) / 2) * share for group in range(len(names))]
            drawn = ax.barh(
                at,
                [0.0 if v is None else v for v in series],
                share * 0.92,
                color=style.colour,
                hatch=style.hatch,
                edgecolor="white",
                linewidth=0,
            )
            handles = handles if len(handles) > place else [*handles, drawn]
        right = len(axes) > 1 and axes.index(ax) % 2
        ax.set_yticks(
            range(len(names)), labels=["" if right else plain(name, 22) for name in names]
        )
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(axis, fontsize=9)
    add_legend(figure, legend, handles)
    return figure
