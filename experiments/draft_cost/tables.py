"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, one_pass, source

COLUMNS = (
    Column("drafter", "drafter"),
    Column("nodes", "nodes"),
    Column("ms per round", "ms", ".3f"),
    Column("of a one-token pass", "share", ".2%"),
    Column("of the verifying pass", "share_of_verify", ".2%"),
)


def tables(results: dict) -> str:
    """The cost of each drafter per round."""
    rows = sorted(results["rows"], key=lambda row: row["ms"] or 0)
    return f"{source(results)}{one_pass(results)}\n\n{of_rows(rows, COLUMNS)}"
