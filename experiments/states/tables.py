"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("family", "family"),
    Column("batch", "batch_size"),
    Column("tokens", "tokens"),
    Column("pass ms", "pass_ms", ".2f"),
    Column("with updates ms", "updates_ms", ".2f"),
    Column("with states ms", "states_ms", ".2f"),
    Column("updates MiB", lambda row: row["updates_bytes"] / 2**20, ".2f"),
    Column("states MiB", lambda row: row["states_bytes"] / 2**20, ".2f"),
)


def tables(results: dict) -> str:
    """Passes with both forms of a commit."""
    return f"{source(results)}\n\n{of_rows(results['rows'], COLUMNS)}"
