"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, one_pass, source

COLUMNS = (
    Column("drafter", "drafter"),
    Column("nodes", "nodes"),
    Column("ms per draft", "draft_ms", ".1f"),
    Column("first pass", "first_share", ".1%"),
    Column("all passes", "network_share", ".1%"),
    Column("draft", "draft_share", ".1%"),
    Column("growth", "growth_share", ".1%"),
)


def tables(results: dict) -> str:
    """The cost of drafting with parameters, as shares of the target's pass over one token."""
    return f"{source(results)}{one_pass(results)}\n\n{of_rows(results['rows'], COLUMNS)}"
