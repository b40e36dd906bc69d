"""The tables of this study in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import Column, number, of_rows, source

COLUMNS = (
    Column("view", "view"),
    Column("batch", "batch"),
    Column("context", "context", ","),
    Column("plain ms", "plain_ms", ".1f"),
    Column("verify ms", "verify_ms", ".1f"),
    Column("draft ms", "draft_ms", ".1f"),
    Column("tau", "tau", ".2f"),
    Column("alpha", "alpha", ".2f"),
    Column("speed-up", "speedup", ".2f"),
    Column("from the times", "predicted", ".2f"),
    Column("roofline", "roofline", ".2f"),
)


def tables(results: dict) -> str:
    """The table of each target that was measured."""
    others = sorted(Path(__file__).parent.glob("*.json"))
    parts = [json.loads(p.read_text(encoding="utf-8")) for p in others if p.name != "results.json"]
    return "\n\n".join(map(_contexts, [results, *parts]))


def _contexts(results: dict) -> str:
    """Times of passes and drafts, tau and speed-ups, for each context, batch size and view."""
    settings, fit = results["settings"], results["fit"]
    facts = [f"- Target: {settings['target']}, float32; budget {settings['budget']}, gamma "]
    facts[0] += f"{settings['gamma']}, chunks chosen every {settings['refresh']} rounds"
    if fit:
        facts.append(
            f"- Fitted to the plain passes: {fit['bandwidth'] / 1e9:.1f} GB/s, "
            f"{fit['flops'] / 1e9:.0f} GFLOPS, {1e3 * fit['overhead']:.1f} ms for each pass"
        )
        critical = results.get("critical_context")
        facts.append(f"- Critical context: {'none' if critical is None else f'{critical:,.0f}'}")
    if trained := results.get("trained"):
        facts.append(f"- Target trained by: `PYTHONPATH=. {trained['command']}`")
        losses = zip(trained["ends"], trained["loss"], strict=True)
        each = ", ".join(f"{number(loss, '.2f')} up to token {end:,}" for end, loss in losses)
        facts.append(f"- Its loss on other text, nats per token: {each}")
    return "\n".join([source(results), *facts, "", of_rows(results["rows"], COLUMNS)])
