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


def console() -> Console:
    """Where tables and traces are printed: a file or a pipe has no width of its own, and gets 120, enough for the table."""
    made = Console(highlight=False, soft_wrap=True, emoji=False)
    if not made.is_terminal:
        made.width = 120
    return made


def fail(message: str, status: int = 2) -> int:
    """Prints a user's mistake on one line of stderr; returns the exit status."""
    print(f"specjax: {files.one_line(message)}", file=sys.stderr)
    return status


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, within 120 characters; rows of single categories are left to the HTML report.

    Where rows have different prompts, a column says which: the set, and where one set has several, the mean prompt's length.
    """
    rows = [row for row in rows if row.get("category") is None]
    prompts = _prompts(rows)
    out = Table(box=None, pad_edge=False, collapse_padding=True)
    out.add_column("method", overflow="fold", max_width=26)
    if prompts:
        out.add_column("prompts", overflow="fold", max_width=14)
    for head in ("rule", "class"):
        out.add_column(head, no_wrap=True)
    for head in ("T", "batch", "tau", "alpha", "tokens/s", "plain", "speed-up", "predicted", "eff"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("lossless", overflow="fold")
    for row, said in zip(rows, prompts or [""] * len(rows), strict=True):
        out.add_row(
            _text(row.get("method"), 100),
            *([_text(said, 60)] if prompts else []),
            _text(row.get("accept"), 18),
            _text(row.get("class"), 5),
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


def _prompts(rows: Sequence[dict]) -> list[str]:
    """What tells the prompts of each row from those of the others; [] if nothing does."""
    names = [str(row.get("prompt_set") or "-") for row in rows]
    lengths = [_number(row, "context", "{:.0f}") for row in rows]
    several: dict[str, set[str]] = {}
    for name, length in zip(names, lengths, strict=True):
        several.setdefault(name, set()).add(length)
    if len(several) < 2 and all(len(each) < 2 for each in several.values()):
        return []
    return [
        f"{name}, {length} tokens" if len(several[name]) > 1 and length != "-" else name
        for name, length in zip(names, lengths, strict=True)
    ]


def _text(value: Any, most: int) -> Text:
    """A user's words: no markup is looked for in them, and no terminal obeys them."""
    return Text(files.one_line(str("-" if value is None else value), most) or "-")


def _number(row: dict, key: str, spell: str = "{:.2f}") -> str:
    value = files.number_of(row.get(key))
    return "-" if value is None else files.one_line(spell.format(value), 12)


def _lossless(outcome: Any) -> str:
    if not isinstance(outcome, dict):
        return "-"
    passed = files.passed(outcome)
    word = "?" if passed is None else "yes" if passed else "NO"
    return files.one_line(f"{word}, {str(outcome.get('detail') or '-').rpartition(', ')[2]}", 60)


def legend() -> Text:
    """What the colours of ``trace`` mean."""
    words = (
        "accepted draft token",
        "target's token after a rejection",
        "after a full draft",
        "nothing drafted",
    )
    parts = [(word, style) for word, style in zip(words, STYLES, strict=True)]
    parts.insert(1, ("rejected draft token", REJECTED))
    return Text("  ").join(Text(word, style) for word, style in parts)


def trace(record: dict) -> Text:
    """One continuation of trace.jsonl: accepted drafts, the first rejected draft of each round, and the target's tokens.

    Args:
        record: a trace that ``files.problem`` finds nothing wrong with.
    """
    out = Text()
    out.append(record["prompt"].translate(files.PICTURES), "dim")
    for one in record["rounds"]:
        for place, token in enumerate(one["out"]):
            if place + 1 == len(one["out"]):
                for node in files.rejected(one)[:1]:
                    out.append(node[0].replace("\n", "↵").translate(files.PICTURES), REJECTED)
            out.append(token[0].translate(files.PICTURES), STYLES[token[2]])
    return out
