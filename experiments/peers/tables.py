"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("models", "pair"),
    Column("method", "method"),
    Column("T", "temperature", "g"),
    Column("specjax tokens/s", "specjax.tokens_per_second", ",.0f"),
    Column("transformers tokens/s", "transformers.tokens_per_second", ",.0f"),
    Column("ratio", "ratio", ".2f", "x"),
    Column("tau", "specjax.block_efficiency", ".2f"),
    Column("its tau", "transformers.block_efficiency", ".2f"),
    Column("same texts", lambda row: row["identical"] or None),
)


def tables(results: dict) -> str:
    """Both sides, row by row."""
    models = "\n".join(f"- `{name}`: {what}" for name, what in results["models"].items())
    facts = f"{source(results)}\n{models}\n- Precision: {results['dtype']}"
    return f"{facts}\n\n{of_rows(results['rows'], COLUMNS)}"
