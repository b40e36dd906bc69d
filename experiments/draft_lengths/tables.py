"""The tables of this study in the documentation."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import number, source, table


def tables(results: dict) -> str:
    """Every controller by setting, then all of them on one pair, some by task, and their cost."""
    every, bank, cost, *chat = (
        json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
        for name in ("all", "chat_bank", "cost", "chat", "chat_hydra", "chat_draft")
    )
    tables = [f"{_ratios(own)}\n\n{_goodput_counts(own)}" for own in (results, bank)]
    tables += [_ratios(every), *map(_lengths_by_task, chat)]
    return "\n\n".join([*tables, _costs_of_controllers(cost)])


def _ratios(results: dict) -> str:
    """The best fixed length, and each controller's share of it, for each setting."""
    names = list(dict.fromkeys(n for s in results["settings"] for n in s["ratios"]))
    lines = [
        (
            each["target"],
            each["drafter"],
            f"{each['temperature']:g}",
            each["batch_size"],
            each["best"].replace("fixed:", ""),
            f"{each['best_speedup']:.2f}",
            *(number(each["ratios"].get(name), ".2f") for name in names),
            *(number(each["tau"].get(name), ".2f") for name in names if "tau" in each),
        )
        for each in results["settings"]
    ]
    heads = ("target", "drafter", "T", "batch", "best length", "its speed-up")
    if all("tau" in each for each in results["settings"]):
        names += [f"tau of {name}" for name in names]
    commands = [f"- Bench: `{command}`" for command in results["commands"]]
    return "\n".join([source(results), *commands, "", table([*heads, *names], lines)])


def _goodput_counts(results: dict) -> str:
    """In how many settings of each target goodput control is not behind."""
    # A measurement that was impossible is left out.
    measured = [each for each in results["settings"] if "goodput" in each["ratios"]]
    parts = []
    for target in dict.fromkeys(each["target"] for each in measured):
        own = [each for each in measured if each["target"] == target]
        plain = sum(each["controllers"]["goodput"] >= 0.98 for each in own)
        best = sum(each["ratios"]["goodput"] >= 0.97 for each in own)
        parts.append(f"{target}: {plain} and {best} of {len(own)}")
    what = "Settings in which `goodput` has at least 0.98 of plain decoding, and 0.97 of the best "
    return f"{what}choice. {'; '.join(parts)}."


def _costs_of_controllers(results: dict) -> str:
    """The time of rounds with the same drafts, for each controller."""
    lines = [
        (
            row["control"],
            row["batch"],
            number(row["round_ms"], ".2f"),
            number(row["ratio"], ".3f"),
            " to ".join(f"{each:.2f}" for each in row["quartiles"] or ()),
        )
        for row in results["rows"]
    ]
    heads = ("controller", "batch", "ms of a round, median", "ratio to none, median", "quartiles")
    return "\n".join([source(results), "", table(heads, lines)])


def _lengths_by_task(results: dict) -> str:
    """As ``tables``, by task, from the rows of experiments/real_model.

    Where no speed-up was measured the cells are tau.
    """
    timed = any(row["speedup_of_totals"] is not None for row in results["rows"])
    cells: dict[tuple, dict[str, float | None]] = {}
    for row in results["rows"]:
        drafter = row["method"].split()[0]
        key = drafter, row["temperature"], row["batch_size"], row["category"] or "all"
        control = row["method"].rpartition("control=")[2]
        value = row["speedup_of_totals" if timed else "block_efficiency"]
        cells.setdefault(key, {})[control] = value
    names = [n for n in next(iter(cells.values())) if not n.startswith("fixed:")]
    lines = []
    for (drafter, temperature, batch, task), speeds in cells.items():
        fixed = {name: speed for name, speed in speeds.items() if name not in names}
        known = {name: speed for name, speed in fixed.items() if speed is not None}
        label = max(known, key=lambda name: known[name], default="plain")
        best = max(known.get(label, 1.0), 1.0)
        length = label.removeprefix("fixed:") if best > 1 else "plain"
        what = drafter, f"{temperature:g}", batch, task.replace("_", " ")
        each = [number(speed, ".2f") for speed in fixed.values()]
        if not timed:
            lines.append((*what, *each, "", *(number(speeds[name], ".2f") for name in names)))
            continue
        shares = {name: x if (x := speeds[name]) is None else x / best for name in names}
        own = (number(speeds[name], ".2f", f" ({number(shares[name], '.2f')})") for name in names)
        lines.append((*what, *each, length, *own))
    fixed = [name for name in next(iter(cells.values())) if name not in names]
    lengths = (name.replace("fixed:", "length ") for name in fixed)
    heads = ("drafter", "T", "batch", "task", *lengths, "best", *names)
    about = f"- Target: {results['target']['name']}; {results['questions']} questions of each task "
    about += f"or more, {results['new_tokens']} new tokens; "
    about += "speed-ups of totals, and in brackets the ratio to the best choice" if timed else "tau"
    return "\n".join([source(results), about, "", table(heads, lines)])
