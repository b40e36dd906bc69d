"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("pair", "pair"),
    Column("beams", "beams"),
    Column("gamma", "gamma"),
    Column("draft's beams", "draft_beams"),
    Column("tokens per pass", "nodes"),
    Column("steps per pass", lambda row: row["steps"] / row["passes"], ".2f"),
    Column("passes per step", lambda row: row["passes"] / row["steps"], ".2f"),
    Column("plain, ms per step", "plain_ms_per_step", ".2f"),
    Column("speed-up", "speedup", ".2f", "x"),
    Column("same hypotheses", lambda row: f"{row['identical']}/{row['prompts']}"),
)


def tables(results: dict) -> str:
    """Speculative beams beside plain beam search: one line for each shape of the draft."""
    models = "\n".join(
        f"- `{name}`: a target of {sizes['target_parameters']:,} parameters, a draft model of "
        f"{sizes['draft_parameters']:,}"
        for name, sizes in results["models"].items()
    )
    return f"{source(results)}\n{models}\n\n{of_rows(results['rows'], COLUMNS)}"
