"""The tables of this study in the documentation."""

from __future__ import annotations

from typing import Any

from experiments.tables import number, source, table

APART = ("total variation", "same argmax", "texts equal")


def tables(results: dict) -> str:
    """For each run a table with a line for each target."""
    texts = [f"- Command: `PYTHONPATH=. {results['command']}`"]
    return "\n\n".join([*texts, *map(_run, results["runs"].values())])


def _run(run: dict) -> str:
    methods = list(dict.fromkeys(row["method"] for row in run["rows"] if row["target"] is None))
    first = [_tau(run, None, method) for method in methods]
    lines = [[f"{run['target']['name']}, {run['target']['dtype']}", "", "", "", *first]]
    for target in run["targets"]:
        [one] = target["compared"]
        apart = [
            f"{one['total_variation']:.4f} {_ends(one['total_variation_interval'], '.4f')}",
            f"{one['argmax_agreement']:.2%} {_ends(one['argmax_agreement_interval'], '.2%')}",
            f"{one['texts_equal']} of {one['texts']}",
        ]
        taus = [
            f"{_tau(run, target['label'], method)}; x {number(own['tau_ratio'], '.3f')} "
            f"{_ends(own['tau_ratio_interval'], '.3f')}"
            for method, own in one["methods"].items()
        ]
        lines.append([_name(target), *apart, *taus])
    heads = ["target", *APART, *(f"tau of {method}" for method in methods)]
    facts = source(run).replace("Command: `PYTHONPATH=. ", "Run: `")
    return f"**{run['target']['name']}**\n\n{facts}\n\n{table(heads, lines)}"


def _name(target: dict) -> str:
    rounded = target["dequantised_from"]
    return rounded and f"{rounded} (.gguf)" if target["source"] == "gguf" else target["label"]


def _tau(run: dict, target: str | None, method: str) -> str:
    name = method if target is None else f"{target}: {method}"
    [row] = [row for row in run["rows"] if row["method"] == name]
    return f"{row['block_efficiency']:.3f} {_ends(row['interval'], '.3f')}"


def _ends(interval: Any, spec: str) -> str:
    return "" if interval is None else "[{}, {}]".format(*(format(end, spec) for end in interval))
