"""The tables of this study in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import number, source, table

HEADS = Path(__file__).parent / "heads.json"  # heads and a distilled model, longer answers


def tables(results: dict) -> str:
    """The tables of all methods without heads, then those with."""
    return f"{_of(results)}\n\n**Heads**\n\n{_of(json.loads(HEADS.read_text()))}"


def _of(results: dict) -> str:
    """By temperature tau and loops of each task, then the speed-ups of each batch size."""
    rows = results["rows"]
    settings = sorted({(row["temperature"], row["batch_size"]) for row in rows})
    tasks = list(dict.fromkeys(row["category"] for row in rows))
    at = {
        (row["temperature"], row["batch_size"], row["method"], row["category"]): row for row in rows
    }
    methods = list(dict.fromkeys(row["method"] for row in rows))
    heads = ["method", *("all" if task is None else task.replace("_", " ") for task in tasks)]
    texts = [source(results)]
    for temperature in dict.fromkeys(t for t, _ in settings):
        batch = next(b for t, b in settings if t == temperature)
        for title, text in (("tau and its standard error over prompts", _tau), ("loops", _loops)):
            lines = [
                (method, *(text(at[temperature, batch, method, task]) for task in tasks))
                for method in methods
            ]
            texts.append(f"**Temperature {temperature:g}: {title}**\n\n{table(heads, lines)}")
    for temperature, batch in settings:
        title = (
            f"**Temperature {temperature:g}, batch {batch}: speed-up, median over batches, and the "
            "95 % interval of the ratio of all tokens/s**"
        )
        lines = [
            (method, *(_gain(at[temperature, batch, method, task]) for task in tasks))
            for method in methods
        ]
        plain = [
            at[temperature, batch, methods[0], task]["autoregressive_tokens_per_second"]
            for task in tasks
        ]
        first = ("plain decoding, tokens/s", *(number(rate, ".1f") for rate in plain))
        texts.append(f"{title}\n\n{table(heads, [first, *lines])}")
    modelled = [m for m in methods if at[*settings[0], m, None].get("predicted")]
    if modelled:
        texts.append(_predictions(modelled, settings, at))
    return "\n\n".join(texts)


def _predictions(methods: list[str], settings: list[tuple], at: dict[tuple, dict]) -> str:
    """The speed-ups by the roofline over all tasks; devices with equal ones share a table."""
    columns: dict[tuple, list[str]] = {}
    for name in at[*settings[0], methods[0], None]["predicted"]:
        cells = [
            (method, *(f"{at[*s, method, None]['predicted'][name]:.2f}x" for s in settings))
            for method in methods
        ]
        columns.setdefault(tuple(cells), []).append(name)
    heads = ["method", *(f"T={t:g}, batch {batch}" for t, batch in settings)]
    return "\n\n".join(
        f"**Predicted, not measured: {' and '.join(names)}, by the roofline with this tau in "
        f"bfloat16, without launches**\n\n{table(heads, lines)}"
        for lines, names in columns.items()
    )


def _tau(row: dict) -> str:
    error = number(row["standard_errors"]["block_efficiency"], ".2f")
    return f"{number(row['block_efficiency'], '.2f')} ± {error}"


def _loops(row: dict) -> str:
    return number(row["repeated_4grams"], ".0%")


def _gain(row: dict) -> str:
    low, high = row["speedup_interval"] or (None, None)
    ends = f" [{number(low, '.2f')}, {number(high, '.2f')}]" if low is not None else ""
    return number(row["speedup"], ".2f", f"x{ends}")
