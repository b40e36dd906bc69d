"""Results as a table, and a continuation coloured by where each token came from, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.report import files

STYLES = ("green", "bold red", "bold blue", "bold")  # by origin: accepted, residual, bonus, plain
REJECTED = "magenta strike dim"
# A token may hold what a terminal obeys: show it instead. Tabs and line feeds are text.
PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
PICTURES |= dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")


def console() -> Console:
    """Where tables and traces are printed: a file or a pipe has no width of its own, and gets 120, enough for the table."""
    made = Console(highlight=False, soft_wrap=True, emoji=False)
    if not made.is_terminal:
        made.width = 120
    return made


def fail(message: str, status: int = 2) -> int:
    """Prints a user's mistake on one line of stderr; returns the exit status."""
    print(f"specjax: {' '.join(message.split())}", file=sys.stderr)
    return status


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, within 120 characters; rows of single categories are left to the HTML report."""
    out = Table(box=None, pad_edge=False, collapse_padding=True)
    out.add_column("method", overflow="fold", max_width=26)
    for head in ("rule", "class"):
        out.add_column(head, no_wrap=True)
    for head in ("T", "batch", "tau", "alpha", "tokens/s", "plain", "speed-up", "predicted", "eff"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("lossless", overflow="fold")
    for row in rows:
        if row.get("category") is None:
            out.add_row(
                Text(str(row.get("method", "-"))),  # the user's label: no markup is looked for in it
                Text(str(row.get("accept") or "-")),
                Text(str(row.get("class") or "-")),
                _number(row, "temperature", "{:g}"),
                _number(row, "batch_size", "{:g}"),
                _number(row, "block_efficiency"),
                _number(row, "acceptance_rate"),
                _number(row, "tokens_per_second", "{:.0f}"),
                _number(row, "autoregressive_tokens_per_second", "{:.0f}"),
                _number(row, "speedup", "{:.2f}x"),
                _number(row, "predicted_speedup", "{:.2f}x"),
                _number(row, "system_efficiency"),
                Text(_lossless(row.get("lossless"))),
            )
    return out


def _number(row: dict, key: str, spell: str = "{:.2f}") -> str:
    value = files.number_of(row.get(key))
    return "-" if value is None else spell.format(value)


def _lossless(outcome: Any) -> str:
    if not isinstance(outcome, dict):
        return "-"
    word = "?" if outcome.get("passed") is None else "yes" if outcome["passed"] else "NO"
    return f"{word}, {str(outcome.get('detail') or '-').rpartition(', ')[2]}"


def legend() -> Text:
    """What the colours of ``trace`` mean."""
    words = ("accepted draft token", "target's token after a rejection", "after a full draft", "nothing drafted")
    parts = [(word, style) for word, style in zip(words, STYLES, strict=True)]
    parts.insert(1, ("rejected draft token", REJECTED))
    return Text("  ").join(Text(word, style) for word, style in parts)


def trace(record: dict) -> Text:
    """One continuation of trace.jsonl: accepted drafts, the first rejected draft of each round, and the target's tokens.

    Args:
        record: a trace that ``files.problem`` finds nothing wrong with.
    """
    out = Text()
    out.append(record["prompt"].translate(PICTURES), "dim")
    for one in record["rounds"]:
        for place, token in enumerate(one["out"]):
            if place + 1 == len(one["out"]):
                for node in files.rejected(one)[:1]:
                    out.append(node[0].replace("\n", "↵").translate(PICTURES), REJECTED)
            out.append(token[0].translate(PICTURES), STYLES[token[2]])
    return out
