"""The tables of this study in the documentation."""

from __future__ import annotations

from experiments.tables import Column, of_rows, source

COLUMNS = (
    Column("part", lambda row: row["name"].replace("_", " ")),
    Column("ms", "ms", ".2f"),
    Column("of the tree's forward", "of_tree_forward", ".1%"),
    Column("of a one-token forward", "of_one_token_forward", ".1%"),
)


def tables(results: dict) -> str:
    """The parts of a round, in ms and as shares of the forward."""
    tree = results["tree"]
    where = f"- Model: {results['model']}\n- Tree: {tree['spec']}, {tree['nodes']} nodes; context "
    facts = f"{source(results)}\n{where}{results['context']}"
    return f"{facts}\n\n{of_rows(results['rows'], COLUMNS)}"
