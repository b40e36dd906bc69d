"""Controllers beside every fixed draft length: the ratio to the best choice in hindsight.

    python -m specjax.run --config=configs/controllers.py:draft_model,runs/quickstart \\
        --workdir=runs/lengths_draft
    python -m specjax.run --config=configs/controllers.py:prompt_lookup --config.target=DIR \\
        --config.prompts=FILE --workdir=runs/lengths_lookup
    PYTHONPATH=. python experiments/draft_lengths/run.py quickstart=runs/lengths_draft \\
        runs/lengths_lookup

Collects benches of ``configs/controllers.py`` into ``results.json`` beside this file. A setting is
a target, a drafter, a temperature and a batch size. ``best`` is the highest median speed-up of its
fixed lengths, or 1, plain decoding, if all of them are slower: what a user who knew the outcome
would have chosen. A controller's ``ratio`` is its speed-up over that; ``tau`` tells its decisions
from its overhead. Every bench measures plain decoding and all methods in turns; the commands are
kept. NAME= before a folder is another name for its target, where several have the same. --out=
writes another file: ``chat_bank.json`` is that of SmolLM2 with fewer lengths.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import BENCH_TIMES, possible
from specjax.errors import UserError
from specjax.files import write_json


def rows_of(results: dict, control: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a bench, with the controller of each; ``control`` is label -> controller."""
    kept = ("temperature", "batch_size", "speedup", "speedup_interval", "block_efficiency")
    return [
        {
            "target": results["target"]["name"],
            "drafter": row["drafter"],
            "control": control[row["method"]],
            "lossless": row["lossless"]["passed"],
            **{key: row[key] for key in kept},
        }
        for row in possible([r for r in results["rows"] if r["category"] is None], BENCH_TIMES)
    ]


def setting_of(row: dict) -> tuple:
    """What identifies a setting."""
    return row["target"], row["drafter"], row["temperature"], row["batch_size"]


def compared(rows: Sequence[dict]) -> list[dict[str, Any]]:
    """One entry for each setting: the best fixed length, and the controllers' ratios to it."""
    settings = dict.fromkeys(map(setting_of, rows))
    result = []
    for target, drafter, temperature, batch in settings:
        own = [row for row in rows if setting_of(row) == (target, drafter, temperature, batch)]
        own = [row for row in own if row["speedup"] is not None]
        fixed = {r["control"]: r["speedup"] for r in own if r["control"].startswith("fixed:")}
        if not fixed:
            raise UserError(f"{target} with {drafter} has no fixed length; bench some")
        label = max(fixed, key=lambda name: fixed[name])
        best = max(fixed[label], 1.0)
        others = {r["control"]: r["speedup"] for r in own if r["control"] not in fixed}
        tau = {r["control"]: r["block_efficiency"] for r in own}
        result.append(
            {
                "target": target,
                "drafter": drafter,
                "temperature": temperature,
                "batch_size": batch,
                "fixed": fixed,
                "best": label if fixed[label] > 1 else "plain",
                "best_speedup": best,
                "controllers": others,
                "ratios": {name: speed / best for name, speed in others.items()},
                "tau": tau,
            }
        )
    return result


def read(text: str) -> tuple[dict, list[dict]]:
    """The results of a bench, "folder" or "name=folder", and its rows here. Raises UserError."""
    name, _, path = text.rpartition("=")
    folder = Path(path)
    try:
        results = json.loads((folder / "results.json").read_text())
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder} is no finished bench: {error}") from None
    if name:
        results["target"]["name"] = name
    methods = config.get("grid", {}).get("methods", {})
    return results, rows_of(results, {label: keys["control"] for label, keys in methods.items()})


def _shown(text: str) -> str:
    """The argument with the last folder of its path."""
    name, equals, path = text.rpartition("=")
    return f"{name}{equals}runs/{Path(path).name}"


def main(argv: Sequence[str]) -> int:
    """Collects the benches and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workdirs", nargs="+", help="of finished benches: DIR or NAME=DIR")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(argv)
    try:
        benches = [read(text) for text in args.workdirs]
        settings = [setting for _, rows in benches for setting in compared(rows)]
        if len({setting_of(each) for each in settings}) < len(settings):
            raise UserError("two benches have the same settings; give one, or NAME= for a target")
    except UserError as error:
        print(f"draft_lengths: {error}", file=sys.stderr)
        return 2
    first = benches[0][0]
    names = " ".join(map(_shown, args.workdirs))
    facts = {key: first[key] for key in ("date", "machine", "versions")}
    command = f"python experiments/draft_lengths/run.py {names}"
    commands = [results["command"] for results, _ in benches]
    write_json(args.out, {"command": command, **facts, "commands": commands, "settings": settings})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
