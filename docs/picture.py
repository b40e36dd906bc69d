"""Makes the picture of the README from the report of a bench.

    python -m specjax.run --config=configs/quickstart.py
    python docs/picture.py runs/quickstart docs/_static/report.png

It shows the report's header, table and token trace in headless Chromium, without the plots. Needs
playwright and Chromium (the extra "test", and CONTRIBUTING.md). Takes seconds.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

MOST_BYTES = 300_000
WIDTH = 1280
COLOURS = 128
# What a picture in a README has no room for.
HIDE = "#plots, .definitions, .command, .notices, footer, main h2 + .lead { display: none }"
BEST_ROUND = """() => {
    const marks = [...document.querySelectorAll('#text .mark')];
    const shown = marks.filter(m => Number(m.textContent) > 1 && m.parentElement.querySelector(
        '.residual'));
    return Number((shown[2] ?? shown[0] ?? marks[0])?.parentElement.dataset.r ?? 0);
}"""


def draw(report: Path) -> bytes:
    """A PNG of the page. Raises SystemExit if there is no Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("SPECJAX_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if not path:
        sys.exit("no Chromium is installed; install one, or set SPECJAX_CHROMIUM to its path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        page.goto(report.resolve().as_uri())
        _arrange(page)
        image = page.screenshot(full_page=True, animations="disabled")
        browser.close()
    return image


def _arrange(page: Page) -> None:
    """Hides parts of the page, and opens a round with accepted and rejected draft tokens."""
    page.add_style_tag(content=HIDE)
    if page.locator("#viewer").count():
        for _ in range(page.evaluate(BEST_ROUND)):
            page.locator("[data-go=next]").click()
        page.evaluate("document.activeElement.blur()")


def main(argv: list[str]) -> int:
    """Writes the picture; returns the exit status."""
    if len(argv) != 3:
        print("usage: python docs/picture.py DIR FILE.png", file=sys.stderr)
        return 2
    report, picture = Path(argv[1]) / "report.html", Path(argv[2])
    if not report.is_file():
        print(f"{report} does not exist; run a bench with this workdir first", file=sys.stderr)
        return 2
    image = Image.open(io.BytesIO(draw(report))).convert("RGB")
    image = image.quantize(COLOURS, dither=Image.Dither.NONE)
    picture.parent.mkdir(parents=True, exist_ok=True)
    image.save(picture, optimize=True)
    size = picture.stat().st_size
    print(f"wrote {picture}: {image.width} x {image.height} pixels, {size} bytes")
    if size > MOST_BYTES:
        print(f"it is larger than {MOST_BYTES} bytes", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
