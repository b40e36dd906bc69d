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

from experiments.common import BENCH_TIMES, keep_runs, options, possible, without_folder
from specjax.errors import UserError

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
    return keep_runs(args, "benches", "benches", lambda folder: bench(folder, args.busy == "drop"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
