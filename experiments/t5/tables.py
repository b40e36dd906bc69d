"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, number, of_rows, source, table

COLUMNS = (
    Column("method", "method"),
    Column("T", "temperature", "g"),
    Column("gamma", "gamma"),
    Column("alpha", "alpha", ".2f"),
    Column("tau", "tau", ".2f"),
    Column("before cuts", "tokens_before_cut", ".2f"),
    Column("expected", "expected_tokens", ".2f"),
    Column("c", "c", ".2f"),
    Column("v", "verify", ".2f"),
    Column("speed-up", "speedup", ".2f", "x"),
    Column("theorem 3.8", "improvement", ".2f"),
    Column("theorem 3.8 with v", "improvement_measured_verify", ".2f"),
)


def tables(results: dict) -> str:
    """A part for each task."""
    parts = (f"{name.capitalize()}:\n\n{_task(found)}" for name, found in results.items())
    return "\n\n".join(parts)


def _task(results: dict) -> str:
    """What was trained, then each method at each gamma, beside what theory expects."""
    trained = [
        (
            name,
            f"{facts['parameters']:,}",
            facts["steps"],
            number(facts.get("heldout_loss"), ".3f"),
            number(facts.get("heldout_alpha"), ".3f"),
        )
        for name, facts in results["training"].items()
    ]
    models = table(("model", "parameters", "steps", "held-out loss", "held-out alpha"), trained)
    what = f"- Pairs: {results['pairs']}\n- Training: `{results['trained_by']}`"
    text = f"{source(results)}\n{what}\n\n{models}\n\n{of_rows(results['rows'], COLUMNS)}"
    far = results["differences"]
    rows = [(r["method"], r["gamma"], f"{r['texts']:.0%}", f"{r['tokens']:.0%}") for r in far]
    names = ("method, T=0", "gamma", "texts that differ from greedy ones", "tokens")
    return f"{text}\n\n{table(names, rows)}"
