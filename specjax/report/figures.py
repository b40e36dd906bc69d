"""Writes figures to files, and as SVG elements for pages with several of them."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from specjax.errors import UserError
from specjax.files import write_all

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, at most 640 pixels wide.

    Text stays text. No id is that of another figure. The same figure gives the same text.
    """
    import matplotlib

    buffer = io.StringIO()
    # Text that is not drawn as paths can be searched and read aloud; the salt makes ids repeatable.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "specjax"}):
        _draw(figure, buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:10] + "-"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    # A style element would apply to the whole page.
    text = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL
    )
    view_box = re.search(r'viewBox="([^"]*)"', text)
    assert view_box is not None  # matplotlib always writes one
    _, _, width, height = map(float, view_box[1].split())
    title = quoteattr(figure.get_suptitle().replace(r"\$", "$"))
    head = f'<svg role="img" aria-label={title} width="640" height="{640 * height / width:.0f}"'
    head += ' style="max-width:100%;height:auto;stroke-linejoin:round"'
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return opening.replace("<svg", head, 1) + ">" + rest


def _draw(figure: Figure, where: io.StringIO | Path, **options: Any) -> None:
    # Labels may have characters that matplotlib's font lacks; the reader's browser has other fonts.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(where, **options)


def _write_svg(figure: Figure, path: Path) -> None:
    path.write_text(svg(figure) + "\n", encoding="utf-8")


def _write_png(figure: Figure, path: Path) -> None:
    """1280 pixels wide."""
    _draw(figure, path, dpi=200, metadata={"Software": None})


def save(
    figures: Mapping[str, Figure], folder: str | os.PathLike, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Writes <name>.<format> for every figure into ``folder``, all or none; returns the paths.

    Raises:
        UserError: a format is not png or svg, or the folder cannot be written.
    """
    for kind in formats:
        if kind not in FORMATS:
            raise UserError(f"format is {kind!r}; it must be one of {', '.join(FORMATS)}")
    folder = Path(folder).expanduser()
    writers = {"png": _write_png, "svg": _write_svg}
    contents = {
        f"{name}.{kind}": functools.partial(writers[kind], figure)
        for name, figure in figures.items()
        for kind in formats
    }
    try:
        write_all(folder, contents)
    except OSError as error:
        raise UserError(
            f"cannot write plots into {folder}: {error.strerror}; choose another folder"
        ) from None
    return [folder / name for name in contents]
