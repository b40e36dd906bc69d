"""The common form of all figures: palette, panels, legends, captions, and the files of figures.

The figures are objects, drawn without pyplot: no global setting is changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import math
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from specjax.errors import on_disk
from specjax.files import write_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.4  # inches: 640 pixels at 100 dpi
LEFT, GAP = 0.02, 0.06  # of the texts: a share of the width; inches between them
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
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


# What the points of all series have in common.
POINTS = {"linewidth": 1.2, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}


def style(index: int) -> dict[str, Any]:
    """Options of a line with points, of series number ``index``; the first 70 differ."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index // len(COLOURS) % len(LINES)],
        **POINTS,
    }


def bar_style(index: int) -> dict[str, Any]:
    """Options of the bars of series number ``index``."""
    turn = index // len(COLOURS)
    return {
        "color": COLOURS[index % len(COLOURS)],
        "hatch": HATCHES[(index + turn) % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0,
    }


def plain(text: str, width: int | None = None) -> str:
    """The text without formulas: matplotlib shows dollar signs as they are.

    Text with more than ``width`` characters has two lines.
    """
    text = NOT_XML.sub("\ufffd", " ".join(str(text).split()))
    if width is not None:
        text = "\n".join(textwrap.wrap(text, width, max_lines=2, placeholder=" ...")) or text
    return text.replace("$", r"\$")


def canvas(title: str, panels: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """An empty figure with one or two columns of panels.

    Args:
        title: of the figure.
        panels: their headings; a single panel has none.
        height: of a panel with its labels, in inches.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure((WIDTH, 0.3 + lines * height), layout="constrained", facecolor="white")
    figure.suptitle(plain(title), x=LEFT, ha="left", fontsize=11, fontweight="bold")
    every = list(figure.subplots(lines, columns, squeeze=False).flat)
    for unused in every[len(panels) :]:
        unused.remove()
    axes = every[: len(panels)]
    for ax, heading in zip(axes, panels, strict=True):
        if columns > 1:
            ax.set_title(plain(heading, 45), fontsize=9, loc="left", color=GREY)
        ax.tick_params(labelsize=8, length=3)
        ax.xaxis.label.set_fontsize(9)
        ax.yaxis.label.set_fontsize(9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="both", color="#e6e6e6", linewidth=0.6)
        ax.set_axisbelow(True)
    return figure, axes


def finish(
    figure: Figure, labels: Sequence[str], caption: str, handles: Sequence[Any] = ()
) -> Figure:
    """Adds a legend and a caption below the panels of a figure from ``canvas``; returns it.

    Args:
        figure: becomes higher by what they take.
        labels: of the series; long ones lose their middle.
        caption: is wrapped.
        handles: what the legend shows of each series; () = a line with points.
    """
    from matplotlib.lines import Line2D

    handles = handles or [Line2D([], [], **style(index)) for index in range(len(labels))]
    text = textwrap.fill(caption, 112, break_on_hyphens=False).replace("$", r"\$")
    with _other_fonts():
        legend = _legend(figure, labels, handles)
        note = figure.text(LEFT, 0, text, fontsize=7.5, color=GREY, va="bottom")
        noted = note.get_window_extent().height / figure.dpi
    lower = GAP + noted + GAP
    below = lower + legend.get_window_extent().height / figure.dpi + GAP
    whole = figure.get_figheight() + below
    figure.set_figheight(whole)
    figure.set_layout_engine("constrained", rect=(0, below / whole, 1, 1 - below / whole))
    note.set_y(GAP / whole)
    legend.set_bbox_to_anchor((LEFT, lower / whole), figure.transFigure)
    return figure


def _legend(figure: Figure, labels: Sequence[str], handles: Sequence[Any]) -> Any:
    """A legend with as many columns as there is room for."""
    for columns in range(min(6, len(labels)), 0, -1):
        # Names in place of the labels: matplotlib leaves out a label that begins with "_".
        legend = figure.legend(
            handles,
            [f"series {index}" for index in range(len(labels))],
            loc="lower left",
            ncols=columns,
            fontsize=8,
            frameon=False,
            borderaxespad=0,
            borderpad=0.1,
            labelspacing=0.3,
            handlelength=1.8,
            columnspacing=1.4,
        )
        for entry, label in zip(legend.get_texts(), labels, strict=True):
            flat = " ".join(label.split())
            entry.set_text(plain(flat if len(flat) <= 60 else f"{flat[:36]} ... {flat[-19:]}"))
        room = (1 - LEFT) * figure.bbox.width
        if columns == 1 or legend.get_window_extent().width <= room:
            return legend
        legend.remove()


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


def name_bars(ax: Axes, names: Sequence[str], width: int) -> None:
    """Names the groups of horizontal bars, from the top to the bottom."""
    ax.set_yticks(range(len(names)), labels=[plain(name, width) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def number(value: float) -> str:
    """1200 as 1.2k, 68000000 as 68M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, at most 640 pixels wide.

    Text stays text. No id is that of another figure. The same figure gives the same text.
    """
    import matplotlib

    buffer = io.StringIO()
    # Text that is not drawn as paths can be searched and read aloud; the salt makes ids repeatable.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "specjax"}):
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _draw(figure, buffer, format="svg", metadata=metadata)
    text = buffer.getvalue()
    root = ElementTree.fromstring(text)
    for definitions in root.findall(f"{{{SVG}}}defs"):
        # A style element would apply to the whole page.
        if definitions.find(f"{{{SVG}}}style") is not None:
            root.remove(definitions)
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:10] + "-"
    for element in root.iter():
        for key, value in element.items():
            if key == "id":
                element.set(key, prefix + value)
            elif key.endswith("href"):
                element.set(key, f"#{prefix}{value[1:]}")
            else:
                element.set(key, value.replace("url(#", f"url(#{prefix}"))
    size = figure.get_figheight() / WIDTH
    root.attrib |= {
        "role": "img",
        "aria-label": figure.get_suptitle().replace(r"\$", "$"),
        "width": "640",
        "height": f"{640 * size:.0f}",
        "style": "max-width:100%;height:auto;stroke-linejoin:round",
    }
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, "unicode")


@contextlib.contextmanager
def _other_fonts() -> Iterator[None]:
    """Labels may have characters that matplotlib's font lacks; the reader's browser has them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _draw(figure: Figure, where: io.StringIO | Path, **options: Any) -> None:
    with _other_fonts():
        figure.savefig(where, **options)


def _write_svg(figure: Figure, path: Path) -> None:
    path.write_text(svg(figure) + "\n", encoding="utf-8")


def save(figures: Mapping[str, Figure], folder: str | os.PathLike) -> list[Path]:
    """Writes <name>.png, 1280 pixels wide, and <name>.svg for every figure, all or none.

    Returns the paths. Raises UserError if ``folder`` cannot be written.
    """
    folder, contents = Path(folder).expanduser(), {}
    for name, figure in figures.items():
        png = functools.partial(_draw, figure, dpi=200, metadata={"Software": None})
        contents |= {f"{name}.png": png, f"{name}.svg": functools.partial(_write_svg, figure)}
    with on_disk(f"cannot write plots into {folder}", "choose another folder"):
        write_all(folder, contents)
    return [folder / name for name in contents]
