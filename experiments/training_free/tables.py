"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import by_temperature, source


def tables(results: dict) -> str:
    """One table per target: a row per method, a column per temperature."""
    texts = []
    for name, target in results["targets"].items():
        rows = target["rows"]
        texts.append(f"**{name}**\n\n{source(target, results)}\n\n{by_temperature(rows, (1, 8))}")
    return "\n\n".join(texts)
