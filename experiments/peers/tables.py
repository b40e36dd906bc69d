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
CHAT = (
    Column("program", "side"),
    Column("method", "method"),
    Column("weights", "precision"),
    Column("tokens/s", "tokens_per_second", ".1f"),
    Column("lowest", lambda row: (row["spread"] or (None, None))[0], ".1f"),
    Column("highest", lambda row: (row["spread"] or (None, None))[1], ".1f"),
    Column("ratio to specjax, plain", "ratio", ".2f", "x"),
    Column("tau", "block_efficiency", ".2f"),
    Column("round / plain pass", "round", ".2f"),
    Column("same texts", "identical"),
    Column("bytes of a pass / bandwidth", "share_of_bandwidth", ".0%"),
)


def tables(results: dict) -> str:
    """Pairs of models row by row, then the chat model; each part if it was measured."""
    texts = []
    if results.get("rows"):
        models = "\n".join(f"- `{name}`: {what}" for name, what in results["models"].items())
        facts = f"{source(results)}\n{models}\n- Precision: {results['dtype']}"
        texts.append(f"{facts}\n\n{of_rows(results['rows'], COLUMNS)}")
    if part := results.get("chat"):
        lines = [
            f"**{part['model']}**\n\n{source(part)}",
            f"- Prompts: {len(part['prompts'])} of {min(part['prompts'])} to "
            f"{max(part['prompts'])} tokens, at most {part['new_tokens']} new ones",
            f"- Passes: {part['passes']}; draft tokens: {part['gamma']}; "
            f"threads: {part['threads']}",
        ]
        if copied := part["copied_bytes_per_second"]:
            lines.append(f"- A copy reads and writes {copied / 1e9:.1f} GB/s")
        rows = [row | {"round": _round(row, part["rows"])} for row in part["rows"]]
        texts.append("\n".join(lines) + f"\n\n{of_rows(rows, CHAT)}")
    return "\n\n".join(texts)


def _round(row: dict, rows: list[dict]) -> float:
    """The time of a round, in passes of plain decoding of the same program and precision."""
    own = (row["side"], row["precision"], "plain")
    [plain] = [each for each in rows if (each["side"], each["precision"], each["method"]) == own]
    return row["block_efficiency"] * plain["tokens_per_second"] / row["tokens_per_second"]
