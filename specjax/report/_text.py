"""Text for readers: control characters made visible, one line, cut to a length."""

from __future__ import annotations

from collections.abc import Sequence

# Characters that a terminal interprets, or that no file can hold, and what is shown instead.
# Tabs (9) and line feeds (10) stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
VISIBLE |= dict.fromkeys(
    (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)
VISIBLE |= dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
MOST_NOTICES = 5  # notices of one kind that are shown in full


def visible(text: str) -> str:
    """The text with a visible sign for every character that a terminal would interpret."""
    return text.translate(VISIBLE)


def one_line(text: str, most: int | None = None) -> str:
    """The visible text on one line; at most ``most`` characters."""
    text = " ".join(visible(text).split())
    return text if most is None else cut(text, most)


def cut(text: str, most: int) -> str:
    """At most ``most`` characters of the text; a longer text ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_notices(notices: Sequence[str], rest: str) -> list[str]:
    """The first notices of one kind, and one that counts the others.

    Args:
        notices: of one kind.
        rest: completes "3 more ..." for the notices that are not shown.
    """
    more = len(notices) - MOST_NOTICES
    return [*notices[:MOST_NOTICES], f"{more:,} more {rest}"] if more > 1 else list(notices)
