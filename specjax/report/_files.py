"""Figures as files, and as SVG that can stand beside others in one page."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from specjax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def svg(figure: Figure) -> str:
    """The figure as one <svg> element, at most 640 pixels wide: text is text, and no id is that of another figure.

    The same figure gives the same text.
    """
    import matplotlib

    made = io.StringIO()
    # Text that is not drawn as paths can be searched and read aloud; the salt makes ids repeatable.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "specjax"}):
        _draw(figure, made, format="svg", metadata={"Date": None})
    text = made.getvalue()
    text = text[text.index("<svg") :].strip()
    prefix = "f" + hashlib.sha256(text.encode()).hexdigest()[:10] + "-"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    # A style element would hold for the whole page.
    text = re.sub(
        r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL
    )
    _, _, width, height = map(float, re.search(r'viewBox="([^"]*)"', text).group(1).split())  # pyright: ignore
    title = figure.get_suptitle().replace(r"\$", "$")
    head = f'<svg role="img" aria-label={quoteattr(title)} width="640" height="{640 * height / width:.0f}"'
    head += ' style="max-width:100%;height:auto;stroke-linejoin:round"'
    opening, rest = text.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return opening.replace("<svg", head, 1) + ">" + rest


def _draw(figure: Figure, where: io.StringIO | Path, **how: Any) -> None:
    with (
        warnings.catch_warnings()
    ):  # labels may hold characters that the font lacks; a browser has another
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(where, **how)


def save(
    figures: Mapping[str, Figure], folder: str | os.PathLike, formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Writes <name>.<format> for every figure into ``folder``, all or nothing, and returns the paths.

    PNG is 1280 pixels wide. UserError for another format than png and svg, and for a folder that cannot be written.
    """
    for kind in formats:
        if kind not in FORMATS:
            raise UserError(f"format is {kind!r}; it must be one of {', '.join(FORMATS)}")
    folder = Path(folder).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new.", dir=folder) as fresh:
            written = [Path(fresh) / f"{name}.{kind}" for name in figures for kind in formats]
            for path in written:
                if path.suffix == ".svg":
                    path.write_text(svg(figures[path.stem]) + "\n", encoding="utf-8")
                else:
                    _draw(figures[path.stem], path, dpi=200, metadata={"Software": None})
            return [path.replace(folder / path.name) for path in written]
    except OSError as error:
        raise UserError(
            f"cannot write plots into {folder}: {error.strerror}; choose another folder"
        ) from None
