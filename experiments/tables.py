"""Tables of MyST from the results of studies. No number is typed.

A study with results.json has a file ``tables.py`` beside it, whose ``tables`` gives the text of its
tables. A time that is null was not measured on a quiet machine: its cell is empty, and a column
without any cell is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple


def source(*layers: dict) -> str:
    """Command, machine, versions, date and load: of the first layer that has them."""

    def first(key: str) -> Any:
        return next((layer[key] for layer in layers if layer.get(key)), None)

    machine, versions = first("machine") or {}, first("versions") or {}
    shown = ("jax", "torch", "transformers", "llama-cpp-python", "vllm")
    named = [f"{name} {versions[name]}" for name in shown if name in versions]
    lines = [
        f"- Command: `PYTHONPATH=. {first('command')}`",
        f"- Machine: {machine.get('cpu')}, {machine.get('cores')} cores; {', '.join(named)}",
        f"- Date: {str(first('date'))[:10]}",
    ]
    others = next((x["others_cpu"] for x in layers if x.get("others_cpu") is not None), None)
    share = "not recorded" if others is None else f"{max(0.0, others):.3f}"
    lines.append(f"- Share of the machine that other processes used: {share}")
    if times := first("times"):
        lines.append(f"- Times: {times}")
    return "\n".join(lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A MyST table, without columns that are empty."""
    cells = [list(map(str, row)) for row in rows]
    kept = [n for n in range(len(heads)) if any(row[n] for row in cells)]
    lines = [list(heads), ["---"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line[n] for n in kept) + " |" for line in lines)


class Column(NamedTuple):
    """A column of a table with one line for each row of results."""

    head: str
    key: str | Callable[[dict], Any]  # of a row; "a.b" is a key of an object; or a function
    spec: str = ""  # the format of a number
    unit: str = ""

    def text(self, row: dict) -> str:
        """The value of a row; "" if it is null or missing."""
        value: Any = row
        if callable(self.key):
            value = self.key(row)
        else:
            for key in self.key.split("."):
                value = value.get(key)
        return number(value, self.spec, self.unit)


def of_rows(rows: Iterable[dict], columns: Sequence[Column]) -> str:
    """A table with these columns."""
    lines = [[column.text(row) for column in columns] for row in rows]
    return table([column.head for column in columns], lines)


def number(value: float | None, spec: str, unit: str = "") -> str:
    return "" if value is None else format(value, spec) + unit


def one_pass(results: dict) -> str:
    """A line with the time of the target's pass over one token, if it was measured."""
    times = results["forward_ms"]
    return f"\n- One-token pass: {times['forward_1']:.1f} ms" if times else ""


def by_temperature(rows: list[dict], batches: Sequence[int], depths: bool = False) -> str:
    """Columns per temperature: tau (alpha by depth), and tokens/s and speed-up per batch size."""
    rows = [row for row in rows if row["category"] is None]
    temperatures = sorted({row["temperature"] for row in rows})
    heads = ["method"]
    for temperature in temperatures:
        heads.append(f"T={temperature:g}: tau")
        if depths:
            heads.append("alpha by depth")
        heads += [f"batch {batch}: tokens/s, speed-up" for batch in batches]
    at = {(row["method"], row["temperature"], row["batch_size"]): row for row in rows}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        line = [method]
        for temperature in temperatures:
            first = at.get((method, temperature, batches[0]))
            line.append("" if first is None else f"{first['block_efficiency']:.2f}")
            if depths:
                alphas = (first or {}).get("acceptance_by_depth") or []
                line.append(" ".join(number(alpha, ".2f") for alpha in alphas))
            line += [speed(at.get((method, temperature, batch))) for batch in batches]
        lines.append(line)
    plain = ["plain decoding"]
    for temperature in temperatures:
        plain += ["1.00", *([""] if depths else [])]
        plain += [plain_rates(rows, temperature, batch) for batch in batches]
    return table(heads, [plain, *lines])


def speed(row: dict | None) -> str:
    if row is None or row["tokens_per_second"] is None:
        return ""
    return f"{row['tokens_per_second']:,.0f}, {row['speedup']:.2f}x"


def plain_rates(rows: list[dict], temperature: float, batch: int) -> str:
    """The range of plain decoding over the rows: runs in several processes have several values."""
    rates = [
        rate
        for row in rows
        if (row["temperature"], row["batch_size"]) == (temperature, batch)
        and (rate := row["autoregressive_tokens_per_second"]) is not None
    ]
    if not rates:
        return ""
    low, high = f"{min(rates):,.0f}", f"{max(rates):,.0f}"
    return low if low == high else f"{low} to {high}"
