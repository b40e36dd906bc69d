"""Results as a table, and traces coloured by where each token came from, in the terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.report import columns, inputs

STYLES = ("green", "bold red", "bold blue", "bold")  # by origin: accepted, residual, bonus, plain
REJECTED = "magenta strike dim"
TICK, SOON, OFTEN = 0.5, 2.0, 10.0  # seconds, see ``Status``
WIDTH = 120  # characters of a file or a pipe, which have no width; the table fits in it
# Columns with their details; what stands between a value and its detail.
JOINTS = {"class": " ", "speedup": "\n", "total_variation": "\n", "lossless": ", "}
# Columns whose texts are folded -> their width (None: what is left); the longest texts of columns.
FOLDED = {"method": 26, "prompt_set": 14, "lossless": None}
MOST = {"method": 100, "prompt_set": 60, "lossless": 60, "class": 11}
LINE = (
    *("method", "block_efficiency", "tokens_per_second", "autoregressive_tokens_per_second"),
    *("speedup", "lossless"),
)


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

    def part(self, name: str) -> Callable[[str], None]:
        """A function that changes the message to one about ``name``."""
        return lambda message: self.update(f"{name}: {message}")

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
    print(f"specjax: {inputs.one_line(message)}", file=sys.stderr)
    return status


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, at most 120 characters wide, without the rows of single categories.

    If the rows have different prompts, a column names the set, and the mean length of its prompts
    if one set has several lengths. Below a speed-up is its 95 % interval.
    """
    rows = [row for row in rows if row.get("category") is None]
    chosen, texts = columns.table(rows, JOINTS)
    out = Table(box=None, pad_edge=False, collapse_padding=True)
    for column in chosen:
        folds, numbers = column.key in FOLDED, bool(column.number_format)
        out.add_column(
            column.short or column.head,
            justify="right" if numbers else "left",
            no_wrap=not folds,
            overflow="fold" if folds else "ellipsis",
            max_width=FOLDED.get(column.key),
        )
    for line in texts:
        out.add_row(*(Text(_short(*each)) for each in zip(chosen, line, strict=True)))
    return out


def _short(column: columns.Column, text: str) -> str:
    most = MOST.get(column.key, 12 if column.number_format else 18)
    return "\n".join(inputs.cut(part, most) for part in text.split("\n"))


def line(row: dict) -> Text:
    """The main values of a row of results.json, before there is a table."""
    method, *texts = (columns.joined(row, columns.BY_KEY[key], JOINTS) for key in LINE)
    tau, rate, plain, speedup, lossless = texts
    text = f"{inputs.cut(method, MOST['method'])}: tau {tau}, {rate} tokens/s, plain {plain}, "
    return Text(f"{text}speed-up {' '.join(speedup.split())}, lossless: {lossless}")


def notes(rows: Sequence[dict]) -> list[str]:
    """What the table's marks mean, one line each; none without marks."""
    lines = []
    if any(columns.too_efficient(row) for row in rows):
        lines.append(
            f"{columns.NOT_MEASURABLE}: not measurable: the speed-up is far above what the costs "
            "of the parts allow, so too little was timed, or the machine was busy"
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
    lines += [
        f"{inputs.one_line(inputs.label(row))}: {sentence}"
        for row in rows
        if row.get("category") is None and (sentence := columns.near_ties(row))
    ]
    if any(columns.BY_KEY["class"].detail(row) == "declared" for row in rows):
        lines.append(
            "declared: the method's author declares the class; "
            "testing.check_drafter and testing.check_accept prove it"
        )
    return lines


def curves(found: Sequence[dict]) -> list[str]:
    """Tokens per round by the draft length, one line for each curve over all prompts."""
    return [
        f"tokens per round of {inputs.one_line(each['method'])} for 1 to {len(each['gammas'])} "
        f"draft tokens, temperature {each['temperature']:g}, batch {each['batch_size']}: "
        f"{each['length']}"
        for each in found
        if each["category"] is None and each["length"]
    ]


def targets(found: Sequence[dict]) -> list[str]:
    """How far each further target is from the first one, one line for each setting."""
    lines = []
    for label, one in ((each["label"], one) for each in found for one in each["compared"]):
        values = [
            ("total variation", one, "total_variation"),
            ("same argmax", one, "argmax_agreement"),
        ]
        taus = [(f"tau of {name} x", own, "tau_ratio") for name, own in one["methods"].items()]
        texts = [
            f"{name} {own[key]:.4f}{columns.ends(own[f'{key}_interval'], ' [{:.4f}, {:.4f}]')}"
            for name, own, key in (*values, *taus)
            if own[key] is not None
        ]
        texts.append(f"{one['texts_equal']} of {one['texts']} texts equal")
        lines.append(inputs.one_line(f"{label}, {one['setting']}: {'; '.join(texts)}"))
    return lines


def legend(rejected: bool = True) -> Text:
    """The meaning of the colours of ``trace``."""
    accepted, residual, bonus, plain = STYLES
    meanings = {
        "accepted draft token": accepted,
        **({"rejected draft token": REJECTED} if rejected else {}),
        "target's token after a rejection": residual,
        "after a full draft": bonus,
        "nothing drafted": plain,
    }
    return Text("  ").join(Text(meaning, style) for meaning, style in meanings.items())


def trace(record: dict, rejected: bool = True) -> Text:
    """One continuation of trace.jsonl, with the first rejected draft token of each round.

    Args:
        record: a trace for which ``inputs.trace_problem`` is None.
        rejected: False leaves the rejected tokens out: without colours they would look like text.
    """
    pieces = [(inputs.visible(record["prompt"]), "dim")]
    for one in record["rounds"]:
        nodes = inputs.rejected_nodes(one)[:1] if rejected else []
        tokens = [(inputs.visible(token[0]), STYLES[token[2]]) for token in one["out"]]
        # Before the target's own token.
        tokens[-1:-1] = [(inputs.visible(node[0].replace("\n", "↵")), REJECTED) for node in nodes]
        pieces += tokens
    return Text.assemble(*pieces)
