"""The tables of this study in the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from experiments.tables import number, source, table


def tables(results: dict) -> str:
    """Latency and goodput of every policy by load, adaptive ones against the best length; trees."""
    parts = [f"{source(results)}\n- Seeds: {results['seeds']}"]
    for name, about in results["settings"].items():
        rows = [row for row in results["rows"] if row["setting"] == name]
        parts.append(f"**{name}** ({about}): mean latency of a request in seconds, by load")
        parts.append(_by_load(rows, lambda row: f"{row['latency']['mean']:.3g}"))
        parts.append(f"{name}: tokens per second")
        parts.append(_by_load(rows, lambda row: f"{row['goodput']:,.0f}"))
        parts.append(f"{name}: against the best fixed length")
        parts.append(_against_fixed(rows))
    return "\n\n".join([*parts, *map(_trees, ("trees", "trees_smollm2"))])


def _trees(name: str) -> str:
    """Chains and trees under modelled costs: the best fixed size, and the controlled ones."""
    path = Path(__file__).with_name(f"{name}.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    groups: dict[tuple, list[dict]] = {}
    for row in results["rows"]:
        key = row["setting"], row["rows"], row["temperature"]
        groups.setdefault(key, []).append(row)
    kinds = list(dict.fromkeys(row["kind"] for row in results["rows"]))
    heads = ["costs", "rows", "T"]
    for kind in kinds:
        of_kind = [row["control"] for row in results["rows"] if row["kind"] == kind]
        heads += [f"{kind}: best size", *(f"`{name}`" for name in dict.fromkeys(of_kind) if name)]
    lines = []
    for (setting, rows, temperature), own in groups.items():
        line = [setting, rows, f"{temperature:g}"]
        for kind in kinds:
            mine = [row for row in own if row["kind"] == kind]
            best = max((row for row in mine if not row["control"]), key=lambda row: row["speed"])
            line += [_speed(best), *(_speed(row) for row in mine if row["control"])]
        lines.append(line)
    what = (
        "**Chains and trees** of {}: speed over plain decoding (tokens per round, verified nodes)"
    )
    facts = f"{what.format(', '.join(results['models']))}\n\n{source(results)}"
    return f"{facts}\n\n{table(heads, lines)}"


def _speed(row: dict) -> str:
    """The speed, the tokens per round and the mean number of verified nodes."""
    return f"{row['speed']:.2f} ({row['tau']:.2f}, {row['nodes']:.1f})"


def _by_load(rows: list[dict], cell: Callable[[dict], str]) -> str:
    """One line per load, one column per policy."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    loads: dict[float, dict] = {}
    for row in rows:
        loads.setdefault(row["load"], {})[row["policy"]] = cell(row)
    lines = [(f"{share:g}", *(each[name] for name in policies)) for share, each in loads.items()]
    return table(("load", *policies), lines)


def _against_fixed(rows: list[dict]) -> str:
    """Goodput and mean latency as multiples of those of the best fixed length, with errors."""
    lines = [
        (
            number(row["load"], "g"),
            row["policy"],
            f"{row['relative_goodput'][0]:.3f} +- {row['relative_goodput'][1]:.3f}",
            f"{row['relative_latency'][0]:.3f} +- {row['relative_latency'][1]:.3f}",
            row["best_fixed"]["latency"],
            *(f"{row['latency'][p]:.3g}" for p in ("p50", "p90", "p99")),
            *(f"{1e3 * row['per_token'][p]:.3g}" for p in ("p50", "p99")),
            number(row["rows"], ".1f"),
            number(row["drafted"], ".2f"),
        )
        for row in rows
        if not row["policy"].startswith("fixed")
    ]
    heads = ("load", "policy", "goodput", "latency", "best fixed", "p50 s", "p90 s", "p99 s")
    heads += ("per token p50 ms", "p99 ms", "rows", "drafted")
    return table(heads, lines)
