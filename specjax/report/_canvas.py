"""The common form of all figures: palette, size, labels as plain text, legends and captions."""

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
# Okabe and Ito's palette without its yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Ten markers and seven colours have no common factor: 70 combinations.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p")
LINES = ("solid", (0, (5, 1.5)), (0, (1.5, 1)))
# No dots: they make an SVG ten times larger.
HATCHES = ("", "////", "----", "xxxx", "\\\\\\\\", "++++", "||||")
GREY = "#555555"
# Not characters of XML: controls other than white space, halves of surrogate pairs, U+FFFE, U+FFFF.
NOT_XML = re.compile(r"[\x00-\x08\x0e-\x1b\x7f\ud800-\udfff\ufffe\uffff]")


class Style(NamedTuple):
    """How one series is drawn; the first 70 differ in colour or marker."""

    colour: str
    marker: str
    hatch: str
    line: Any


def style(index: int) -> Style:
    """The style of series number ``index``."""
    turn = index // len(COLOURS)
    return Style(
        COLOURS[index % len(COLOURS)],
        MARKERS[index % len(MARKERS)],
        HATCHES[(index + turn) % len(HATCHES)],
        LINES[turn % len(LINES)],
    )


def plain(text: str, width: int | None = None) -> str:
    """The text without formulas: matplotlib shows dollar signs as they are.

    Text with more than ``width`` characters has two lines.
    """
    text = NOT_XML.sub("\ufffd", " ".join(str(text).split()))
    if width is not None:
        text = "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" ...")) or text
    return text.replace("$", r"\$")


class Layout(NamedTuple):
    """Heights of the parts of a figure, in inches, from the top to the bottom."""

    title: float
    head: float  # the headings of the panels
    panels: float
    gap: float  # between panels: ticks, an axis label and the next heading
    bottom: float  # ticks, axis label, legend and caption
    caption: float

    @property
    def whole(self) -> float:
        """The height of the figure."""
        return self.title + self.head + self.panels + self.bottom


def _layout(panels: int, height: float, caption: str, legend: int) -> Layout:
    columns = 1 if panels == 1 else 2
    lines, gap = -(-panels // columns), 0.7
    below = 0.13 * (caption.count("\n") + 1) + 0.16 if caption else 0.05
    return Layout(
        title=0.42,
        head=0.1 if columns == 1 else 0.25,
        panels=lines * height + (lines - 1) * gap,
        gap=gap,
        bottom=below + 0.149 * legend + (0.1 if legend else 0) + 0.5,
        caption=below,
    )


def canvas(
    title: str, panels: Sequence[str], height: float, caption: str, legend: int, left: float = 0.1
) -> tuple[Figure, list[Axes]]:
    """An empty figure with one or two columns of panels, and room below for a legend.

    Args:
        title: of the figure.
        panels: their headings; a single panel has none.
        height: of a panel, in inches.
        caption: is wrapped, at the bottom.
        legend: lines of the legend.
        left: where the panels begin, as a share of the width.
    """
    from matplotlib.figure import Figure

    caption = textwrap.fill(caption, 112, break_on_hyphens=False)
    columns = 1 if len(panels) == 1 else 2
    sizes = _layout(len(panels), height, caption, legend)
    figure = Figure(figsize=(WIDTH, sizes.whole), facecolor="white")
    top = 1 - 0.1 / sizes.whole
    figure.suptitle(
        plain(title), x=0.02, y=top, ha="left", va="top", fontsize=11, fontweight="bold"
    )
    grid = figure.add_gridspec(
        -(-len(panels) // columns),
        columns,
        left=left,
        right=0.975,
        top=1 - (sizes.title + sizes.head) / sizes.whole,
        bottom=sizes.bottom / sizes.whole,
        hspace=sizes.gap / height,
        wspace=0.17,
    )
    axes = [
        figure.add_subplot(grid[index // columns, index % columns]) for index in range(len(panels))
    ]
    for ax, heading in zip(axes, panels, strict=True):
        if columns > 1:
            ax.set_title(plain(heading), fontsize=9, loc="left", color=GREY)
        ax.tick_params(labelsize=8, length=3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e6e6e6", linewidth=0.6)
        ax.set_axisbelow(True)
    text, y = caption.replace("$", r"\$"), sizes.caption / sizes.whole
    figure.text(0.02, y, text, fontsize=7.5, color=GREY, ha="left", va="top")
    return figure, axes


class LegendText(NamedTuple):
    """The labels of a legend, and the columns and lines that they take."""

    labels: list[str]
    columns: int
    lines: int


def legend_text(labels: Sequence[str]) -> LegendText:
    """The labels, in as many columns as their lengths allow; long labels lose their middle."""
    flat = [" ".join(label.split()) for label in labels]
    shown = [
        plain(label if len(label) <= 60 else f"{label[:36]} ... {label[-19:]}") for label in flat
    ]

    def width(columns: int) -> int:
        """In characters. The entries run down the columns, and the first columns are longer."""
        lengths = [len(label) for label in shown]
        return sum(int(max(part)) + 8 for part in np.array_split(lengths, columns))

    columns = next(n for n in range(min(6, len(shown)), 0, -1) if n == 1 or width(n) <= 106)
    return LegendText(shown, columns, -(-len(shown) // columns))


def sample(style: Style) -> Any:
    """The line with a point that a legend shows for a series."""
    from matplotlib.lines import Line2D

    options = {
        "color": style.colour,
        "marker": style.marker,
        "linestyle": style.line,
        "linewidth": 1.2,
        "markersize": 5.5,
    }
    return Line2D([], [], markeredgecolor="white", markeredgewidth=0.5, **options)


def add_legend(figure: Figure, text: LegendText, handles: Sequence[Any]) -> None:
    """Adds the legend to a figure from ``canvas``, in the room for it."""
    from matplotlib.legend import Legend

    whole = figure.get_figheight()
    caption = figure.texts[-1]
    base = caption.get_position()[1] + 0.06 / whole
    # Names in place of the labels: matplotlib leaves out a label that begins with "_".
    names = [f"series {index}" for index in range(len(handles))]
    legend: Legend = figure.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(0.02, base),
        ncols=text.columns,
        fontsize=8,
        frameon=False,
        borderaxespad=0,
        borderpad=0.1,
        labelspacing=0.3,
        handlelength=1.8,
        columnspacing=1.4,
    )
    for entry, label in zip(legend.get_texts(), text.labels, strict=True):
        entry.set_text(label)


def ticks(
    ax: Axes, values: Iterable[float], spell: Callable[[float], str], steps: bool = False
) -> None:
    """Marks the measured values on the x axis, as many as there is room for.

    The scale is logarithmic if the values span a factor of 8, unless they are ``steps``.
    """
    values = sorted(set(values))
    wide = not steps and values[0] > 0 and values[-1] / values[0] >= 8
    if wide:
        ax.set_xscale("log")
    shown: list[float] = []
    least = 0.09 if ax.get_position().width > 0.5 else 0.16
    position = math.log if wide else float
    for value in values:
        room = least * (position(values[-1]) - position(values[0]))
        if not shown or position(value) - position(shown[-1]) >= room:
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
    """Horizontal bars, one group for each name.

    Args:
        title: of the figure.
        panels: heading -> (names, values[series][name]); None leaves a gap.
        labels: of the series.
        caption: below the figure.
        axis: the label of the x axis.
    """
    text = legend_text(labels)
    most = max(len(names) for names, _ in panels.values())
    thick = max(0.085, min(0.2, 0.62 / len(labels)))  # inches of one bar
    group = thick * len(labels) + 0.12  # inches of one group
    longest = max(
        len(line)
        for names, _ in panels.values()
        for name in names
        for line in plain(name, 22).split("\n")
    )
    left = min(0.36, 0.04 + 0.0105 * longest)
    figure, axes = canvas(title, list(panels), most * group + 0.1, caption, text.lines, left)
    handles: list[Any] = []
    for index, (ax, (names, values)) in enumerate(zip(axes, panels.values(), strict=True)):
        drawn = _bar_panel(ax, values, thick / group)
        handles += drawn[len(handles) :]
        right = len(axes) > 1 and index % 2
        ax.set_yticks(
            range(len(names)), labels=["" if right else plain(name, 22) for name in names]
        )
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(axis, fontsize=9)
    add_legend(figure, text, handles)
    return figure


def _bar_panel(ax: Axes, values: Sequence[Sequence[float | None]], share: float) -> list[Any]:
    """Draws values[series][name]; ``share`` is the width of a bar, of a group. Returns the bars."""
    drawn = []
    for index, series in enumerate(values):
        offset = (index - (len(values) - 1) / 2) * share
        look = style(index)
        bar = ax.barh(
            [group + offset for group in range(len(series))],
            [0.0 if value is None else value for value in series],
            share * 0.92,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="white",
            linewidth=0,
        )
        drawn.append(bar)
    return drawn
