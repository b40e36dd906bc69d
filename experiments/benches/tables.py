"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import by_temperature, source


def tables(results: dict) -> str:
    """One table for each bench."""
    texts = [f"- Command: `PYTHONPATH=. {results['command']}`"]
    for name, each in results["benches"].items():
        sizes = sorted({row["batch_size"] for row in each["rows"]})
        shown = by_temperature(each["rows"], sizes)
        facts = source(each).replace("Command: `PYTHONPATH=. ", "Bench: `")
        texts.append(f"**{name}** ({each['target']})\n\n{facts}\n\n{shown}")
    return "\n\n".join(texts)
