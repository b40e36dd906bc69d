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
    Column("compiled in", "compile_seconds", ".0f", " s"),
)


GPU_COLUMNS = (
    Column("program", "program"),
    Column("GPU", "chip"),
    Column("kernels", "kernels"),
    Column("conditionals", "conditionals"),
    Column("turns of loops", "loops"),
    Column("read GB", lambda row: row["read_bytes"] / 1e9, ".2f"),
    Column("written GB", lambda row: row["written_bytes"] / 1e9, ".3f"),
    Column("traffic", "traffic", ".2f", "x"),
    Column("copies", "copies"),
    Column("temporary MB", lambda row: row["temporary_bytes"] / 1e6, ",.0f"),
    Column("compiled in", "compile_seconds", ".0f", " s"),
)


def tables(results: dict) -> str:
    """What each executable shows; numbers of instructions, not of times on a chip."""
    where = f"- libtpu {results['versions']['plugin']}; no TPU"
    parts = ["TPUs", f"{source(results)}\n{where}", of_rows(results["rows"], COLUMNS)]
    if gpus := results.get("gpus"):
        where = f"- CUDA plugin {gpus['versions']['plugin']}; no GPU"
        parts += ["GPUs", f"{source(gpus)}\n{where}", of_rows(gpus["rows"], GPU_COLUMNS)]
    return "\n\n".join(parts)
