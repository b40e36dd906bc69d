"""Results as a table, and a continuation coloured by who wrote each token, in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from rich.table import Table
from rich.text import Text

from specjax.types import StepInfo

ACCEPTED, REJECTED, TARGET = "green", "red strike dim", "bold blue"


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, within 120 characters."""
    out = Table(box=None, pad_edge=False)
    for head in ("method", "rule", "class"):
        out.add_column(head, no_wrap=True)
    for head in ("T", "batch", "tau", "alpha", "tokens/s", "plain", "speed-up", "predicted"):
        out.add_column(head, justify="right", no_wrap=True)
    out.add_column("lossless")
    for row in rows:
        out.add_row(
            Text(row["method"]),  # the user's label: no markup is looked for in it
            row["accept"],
            row["class"],
            f"{row['temperature']:g}",
            str(row["batch_size"]),
            _number(row["block_efficiency"]),
            _number(row["acceptance_rate"]),
            _number(row["tokens_per_second"], "{:.0f}"),
            _number(row["autoregressive_tokens_per_second"], "{:.0f}"),
            _number(row["speedup"], "{:.2f}x"),
            _number(row["predicted_speedup"], "{:.2f}x"),
            _lossless(row["lossless"]),
        )
    return out


def _number(value: float | None, spell: str = "{:.2f}") -> str:
    return "-" if value is None else spell.format(value)


def _lossless(outcome: dict | None) -> str:
    if outcome is None:
        return "-"
    word = {True: "yes", False: "NO", None: "?"}[outcome["passed"]]
    return f"{word}, {outcome['detail'].rpartition(', ')[2]}"


def legend() -> Text:
    """What the colours of ``trace`` mean."""
    return Text.assemble(
        ("accepted draft token", ACCEPTED),
        "  ",
        ("rejected draft token", REJECTED),
        "  ",
        ("target's own token", TARGET),
    )


def trace(prompt: Sequence[int], rounds: Sequence[StepInfo], decode: Callable[[list[int]], str], row: int = 0) -> Text:
    """One row's continuation: accepted drafts, the first rejected draft of each round, and the target's tokens.

    Tokens are spelt in their context, as what they add to the text: many tokenizers drop the space of a token alone.
    """
    ids, text = list(prompt), decode(list(prompt))
    out = Text(text, style="dim")

    def add(token: int, style: str, keep: bool = True) -> None:
        nonlocal text
        longer = decode([*ids, token])
        if keep:
            ids.append(token)
        if not longer.endswith("\ufffd"):  # half a character waits for its other half
            out.append(longer[len(text) :], style=style)
            text = longer if keep else text

    for info in rounds:
        emitted = int(info.emitted[row])
        accepted = min(int(info.accepted[row]), emitted)
        tokens = np.asarray(info.tokens[row])
        for token in tokens[:accepted]:
            add(int(token), ACCEPTED)
        if accepted < emitted:
            if accepted < int(info.drafted[row]):
                add(int(info.draft.tokens[row, accepted]), REJECTED, keep=False)
            add(int(tokens[accepted]), TARGET)
    return out
