"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, number, of_rows, source, table

POSITIONS = (
    Column("T", "temperature", "g"),
    Column("drafts", "drafts"),
    Column("recursive", "recursive", ".3f"),
    Column("k_seq", "k_seq", ".3f"),
    Column("gbv", "gbv", ".3f"),
    Column("coupled", "coupled", ".3f"),
    Column("the best rule", "best", ".3f"),
)


def tables(results: dict) -> str:
    """For each pair the chances at one position, and tokens per round by shape and rule."""
    texts = []
    for name, pair in results["pairs"].items():
        texts.append(f"**{name}**\n\n{source(pair)}")
        if pair["positions"]:
            texts.append(of_rows(pair["positions"], POSITIONS))
        at = {(row["temperature"], row["shape"], row["rule"]): row for row in pair["shapes"]}
        rules, shapes = (list(dict.fromkeys(key[n] for key in at)) for n in (2, 1))
        for temperature in dict.fromkeys(key[0] for key in at):
            lines = [
                (shape, *(tau(at.get((temperature, shape, rule))) for rule in rules))
                for shape in shapes
            ]
            texts.append(table((f"tau, T = {temperature:g}", *rules), lines))
    return "\n\n".join(texts)


def tau(row: dict | None) -> str:
    return "" if row is None else number(row["block_efficiency"], ".2f")
