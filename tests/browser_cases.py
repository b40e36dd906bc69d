"""What the tests of reports in a browser share."""

from __future__ import annotations

import time

LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
# Texts of tokens that are hard to show, or that HTML could misinterpret.
DIFFICULT = [
    "<script>",
    "</script>",
    "\u2028",
    "👩‍👩‍👧",
    "שלום",
    "\u202e",
    "\x1b",
    "\u00a0",
    "  ",
    "\u200d",
    "",
    " a\tb\n",
    "&lt;",
]


def status(page) -> str:
    """The line that describes the current round."""
    return page.locator("#status").inner_text()


def until(page, condition: str) -> None:
    """Waits for a condition. (The page's own policy forbids ``wait_for_function``.)"""
    end = time.monotonic() + 5
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(20)


def inside(page, selector: str) -> bool:
    """Whether an element is completely inside the window."""
    box, size = page.locator(selector).bounding_box(), page.viewport_size
    right, bottom = box["x"] + box["width"], box["y"] + box["height"]
    return min(box["x"], box["y"]) >= 0 and right <= size["width"] and bottom <= size["height"]
