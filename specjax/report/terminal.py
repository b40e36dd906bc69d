"""Results as a table, and traces coloured by where each token came from, in the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.report import _rows, _text, inputs
from specjax.report.cells import NOT_MEASURABLE

STYLES = ("green", "bold red", "bold blue", "bold")  # by origin: accepted, residual, bonus, plain
REJECTED = "magenta strike dim"
TICK, SOON, OFTEN = 0.5, 2.0, 10.0  # seconds, see ``Status``
WIDTH = 120  # characters of a file or a pipe, which have no width; the table fits in it


def console() -> Console:
    """The console for tables and traces."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


class Status:
    """What takes time at the moment: a spinner on a terminal, and elsewhere lines.

    A line is printed when something has taken ``SOON`` seconds, and one every ``OFTEN`` seconds,
    with the seconds since the beginning.
    """

    def __init__(self, console: Console, message: str):
        self._console, self._message = console, message
        self._began = self._changed = time.monotonic()
        self._spinner = console.status(Text(message)) if console.is_terminal else None
        self._ended = threading.Event()
        self._printer = threading.Thread(target=self._print, daemon=True)

    def __enter__(self) -> Status:
        if self._spinner is not None:
            self._spinner.start()
        elif not self._console.quiet:
            self._printer.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        if self._spinner is not None:
            self._spinner.stop()
        elif self._printer.ident is not None:
            self._printer.join()

    def update(self, message: str) -> None:
        """Changes the message."""
        self._message, self._changed = message, time.monotonic()
        if self._spinner is not None:
            self._spinner.update(Text(message))

    def _print(self) -> None:
        shown, last = "", self._began
        while not self._ended.wait(TICK):
            now, message = time.monotonic(), self._message
            late = message != shown and now - self._changed >= SOON
            if late or now - last >= OFTEN - TICK:
                self._console.print(Text(f"{now - self._began:4.0f} s  {message}"))
                shown, last = message, now


def has_colours(console: Console) -> bool:
    """Whether styles are visible: not in a file or a pipe, nor with NO_COLOR."""
    return console.color_system is not None and not console.no_color


def fail(message: str, status: int = 2) -> int:
    """Prints an error message on one line of stderr; returns the exit status."""
    print(f"specjax: {_text.one_line(message)}", file=sys.stderr)
    return status


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, at most 120 characters wide, without the rows of single categories.

    If the rows have different prompts, a column names the set, and the mean length of its prompts
    if one set has several lengths.
    """
    rows = [row for row in rows if row.get("category") is None]
    prompts = _prompts(rows)
    out = Table(box=None, pad_edge=False, collapse_padding=True)
    out.add_column("method", overflow="fold", max_width=26)
    if prompts:
        out.add_column("prompts", overflow="fold", max_width=14)
    for head in ("rule", "class"):
        out.add_column(head, no_wrap=True)
    numbers = (
        "T",
        "batch",
        "tau",
        "loops",
        "alpha",
        "tokens/s",
        "plain",
        "speed-up",
        "pred",
        "eff",
    )
    for head in numbers:
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("lossless", overflow="fold")
    for row, name in zip(rows, prompts or [""] * len(rows), strict=True):
        out.add_row(
            _cell(row.get("method"), 100),
            *([_cell(name, 60)] if prompts else []),
            _cell(row.get("accept"), 18),
            _cell(_rows.lossless_class(row) or None, 11),
            _number(row, "temperature", "{:g}"),
            _number(row, "batch_size", "{:g}"),
            _number(row, "block_efficiency"),
            _number(row, "repeated_4grams", "{:.0%}"),
            _number(row, "acceptance_rate"),
            _number(row, "tokens_per_second", "{:.0f}"),
            _number(row, "autoregressive_tokens_per_second", "{:.0f}"),
            _number(row, "speedup", "{:.2f}x"),
            _number(row, "predicted_speedup", "{:.2f}x"),
            NOT_MEASURABLE if _rows.too_efficient(row) else _number(row, "system_efficiency"),
            Text(_lossless(row.get("lossless"))),
        )
    return out


def line(row: dict) -> Text:
    """The main values of a row of results.json, before there is a table."""
    parts = [
        f"tau {_number(row, 'block_efficiency')}",
        f"{_number(row, 'tokens_per_second', '{:.0f}')} tokens/s",
        f"plain {_number(row, 'autoregressive_tokens_per_second', '{:.0f}')}",
        f"speed-up {_number(row, 'speedup', '{:.2f}x')}",
        f"lossless: {_lossless(row.get('lossless'))}",
    ]
    return Text.assemble(_cell(row.get("method"), 100), ": ", ", ".join(parts))


def notes(rows: Sequence[dict]) -> list[str]:
    """What the table's marks mean, one line each; none without marks."""
    lines = []
    if any(_rows.too_efficient(row) for row in rows):
        lines.append(
            f"{NOT_MEASURABLE}: not measurable: the speed-up is far above what the costs of the "
            "parts allow, so too little was timed, or the machine was busy"
        )
    random = {
        str(row.get("prompt_set") or "-") for row in rows if row.get("random_prompts") is True
    }
    if random:
        names = "" if random == {"-"} else f" ({', '.join(sorted(random))})"
        lines.append(
            f"random prompts{names}: these prompts look like token ids drawn at random; what a "
            "model writes after them is not what it writes for users, so tau and alpha say little"
        )
    if any(_rows.lossless_class(row).endswith("declared") for row in rows):
        lines.append(
            "declared: the method's author declares the class; "
            "testing.check_drafter and testing.check_accept prove it"
        )
    return lines


def _prompts(rows: Sequence[dict]) -> list[str]:
    """A name for the prompts of each row; [] if all rows have the same prompts."""
    names = [str(row.get("prompt_set") or "-") for row in rows]
    lengths = [_number(row, "context", "{:.0f}") for row in rows]
    lengths_of: dict[str, set[str]] = {}
    for name, length in zip(names, lengths, strict=True):
        lengths_of.setdefault(name, set()).add(length)
    if len(lengths_of) < 2 and all(len(each) < 2 for each in lengths_of.values()):
        return []
    return [
        f"{name}, {length} tokens" if len(lengths_of[name]) > 1 and length != "-" else name
        for name, length in zip(names, lengths, strict=True)
    ]


def _cell(value: Any, most: int) -> Text:
    """Text from a file: without markup, and with control characters made visible."""
    return Text(_text.one_line(str("-" if value is None else value), most) or "-")


def _number(row: dict, key: str, number_format: str = "{:.2f}") -> str:
    value = inputs.number_of(row.get(key))
    return "-" if value is None else _text.one_line(number_format.format(value), 12)


def _lossless(check: Any) -> str:
    if not isinstance(check, dict):
        return "-"
    passed = inputs.passed(check)
    text = "?" if passed is None else "yes" if passed else "NO"
    detail = str(check.get("detail") or "-").rpartition(", ")[2]
    return _text.one_line(f"{text}, {detail}", 60)


def legend(rejected: bool = True) -> Text:
    """The meaning of the colours of ``trace``."""
    meanings = (
        "accepted draft token",
        "target's token after a rejection",
        "after a full draft",
        "nothing drafted",
    )
    parts: list[tuple[str, str]] = list(zip(meanings, STYLES, strict=True))
    if rejected:
        parts.insert(1, ("rejected draft token", REJECTED))
    return Text("  ").join(Text(meaning, style) for meaning, style in parts)


def trace(record: dict, rejected: bool = True) -> Text:
    """One continuation of trace.jsonl, with the first rejected draft token of each round.

    Args:
        record: a trace for which ``inputs.trace_problem`` is None.
        rejected: False leaves the rejected tokens out: without colours they would look like text.
    """
    out = Text()
    out.append(_text.visible(record["prompt"]), "dim")
    for one in record["rounds"]:
        for index, token in enumerate(one["out"]):
            if index + 1 == len(one["out"]):
                for node in inputs.rejected_nodes(one)[:1] if rejected else ():
                    out.append(_text.visible(node[0].replace("\n", "↵")), REJECTED)
            out.append(_text.visible(token[0]), STYLES[token[2]])
    return out
