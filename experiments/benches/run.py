"""Keeps the rows of finished benches for the results page.

    python -m specjax.run --config=configs/cascade.py:runs/quickstart --workdir=runs/cascade
    PYTHONPATH=. python experiments/benches/run.py runs/cascade

Each bench is stored in ``results.json`` beside this file under the name of its workdir, with its
command, machine, versions and date; benches of other names stay as they are. With --busy=drop, for
benches of a machine with other work, their times are null.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import BENCH_TIMES, options, possible, without_folder
from specjax.errors import UserError
from specjax.files import write_json

KEPT = (
    "method",
    "category",
    "temperature",
    "batch_size",
    "block_efficiency",
    "acceptance_rate",
    "tokens_per_second",
    "autoregressive_tokens_per_second",
    "speedup",
    "speedup_interval",
    "predicted_speedup",
)


def bench(folder: Path, busy: bool) -> dict[str, Any]:
    """The record of a finished bench. Raises UserError."""
    try:
        results = json.loads((folder / "results.json").read_text())
        timed = (
            [row | dict.fromkeys(BENCH_TIMES & row.keys()) for row in results["rows"]]
            if busy
            else possible(results["rows"], BENCH_TIMES)
        )
        rows = [
            {**{key: row[key] for key in KEPT}, "lossless": (row["lossless"] or {}).get("passed")}
            for row in timed
            if row["category"] is None
        ]
        # A relative path is part of the command; an absolute one is of the machine.
        words = shlex.split(results["command"])
        command = " ".join(without_folder(w) if "=/" in w else w for w in words)
        facts = {key: results[key] for key in ("date", "machine", "versions")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is no finished bench ({error}); give its workdir") from None
    return {"command": command, **facts, "target": results["target"]["name"], "rows": rows}


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.add_argument("workdirs", nargs="+", type=Path, help="of finished benches")
    args: argparse.Namespace = parser.parse_args(argv)
    try:
        new = {folder.name: bench(folder, args.busy == "drop") for folder in args.workdirs}
    except UserError as error:
        print(f"benches: {error}", file=sys.stderr)
        return 2
    known = json.loads(args.out.read_text())["benches"] if args.out.exists() else {}
    benches = known | new
    names = " ".join(f"runs/{name}" for name in benches)
    command = f"python experiments/benches/run.py {names}"
    write_json(args.out, {"command": command, "benches": benches})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
