"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("setting", "method"),
    Column("tau", "block_efficiency", ".2f"),
    Column("speed-up", "speedup", ".2f", "x"),
    Column("predicted", "predicted_speedup", ".2f", "x"),
    Column("system efficiency", "system_efficiency", ".3f"),
)


def tables(results: dict) -> str:
    """Speed-up, prediction and their ratio for each rate and length."""
    rows = sorted(results["rows"], key=lambda row: (row["gamma"], row["acceptance_rate"]))
    return f"{source(results)}\n\n{of_rows(rows, COLUMNS)}"
