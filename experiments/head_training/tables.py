"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, number, of_rows, source

COLUMNS = (
    Column("method", "method"),
    Column("ms per step", "step_ms", ".0f"),
    Column("step", "ratio", ".2f"),
    Column("loss without gradient", "forward_ratio", ".2f"),
)


def tables(results: dict) -> str:
    """The cost of a training step, in passes of the target over the same tokens."""
    one = "- The target's pass over the batch, with logits: "
    one += number(results["forward_ms"], ".0f", " ms") or "not measured"
    return f"{source(results)}\n{one}\n\n{of_rows(results['rows'], COLUMNS)}"
