"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("program", "program"),
    Column("chip", "chip"),
    Column("mesh", "mesh"),
    Column("M cycles", lambda row: row["estimated_cycles"] / 1e6, ".2f"),
    Column("traffic", "traffic", ".2f", "x"),
    Column("compiler's GB", lambda row: row["compiler_bytes"] / 1e9, ".2f"),
    Column("arguments GB", lambda row: row["argument_bytes"] / 1e9, ".2f"),
    Column("temporary MB", lambda row: row["temporary_bytes"] / 1e6, ",.0f"),
    Column("aliased GB", lambda row: row["aliased_bytes"] / 1e9, ".2f"),
    Column(
        "collectives", lambda row: "{inside_loops} / {outside_loops}".format(**row["collectives"])
    ),
    Column(
        "copies",
        lambda row: "{within_main} / {from_chip} / {to_chip}".format(**row["copies_in_loops"]),
    ),
    Column("float32", "float32_of_bfloat16"),
    Column("host", "host_transfers"),
)


def tables(results: dict) -> str:
    """What each executable shows; numbers of instructions, not of times."""
    where = f"- libtpu {results['versions']['libtpu']}; no TPU"
    return f"{source(results)}\n{where}\n\n{of_rows(results['rows'], COLUMNS)}"
