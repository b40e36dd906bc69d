"""Keeps what finished runs of configs/compare_targets.py counted, without times.

    PYTHONPATH=. python experiments/targets/run.py runs/smollm2 runs/shipped

Each run is stored in ``results.json`` beside this file under the name of its workdir; runs of other
names stay as they are. ``quantise.py`` makes .gguf files of other types.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.common import keep_runs, options, without_folder
from specjax.bench import uncertainty
from specjax.errors import UserError

COUNTS = ("target", "method", "temperature", "prompts", "tokens", "rounds", "block_efficiency")
COUNTS += ("acceptance_rate", "acceptance_by_depth", "standard_errors", "repeated_4grams")
FACTS = ("label", "name", "source", "dequantised_from", "dtype", "compared")


def run(folder: Path) -> dict[str, Any]:
    """The record of a finished run. Raises UserError."""
    try:
        results = json.loads((folder / "results.json").read_text())
        rows = [
            {key: row[key] for key in COUNTS} | {"lossless": row["lossless"]["passed"]}
            for row in results["rows"]
            if row["category"] is None
        ]
        for row in rows:
            error = row["standard_errors"]["block_efficiency"]
            row["interval"] = uncertainty.around(row["block_efficiency"], error, row["prompts"])
        targets = [{key: each[key] for key in FACTS} for each in results["targets"]]
        words = shlex.split(results["command"])
        command = " ".join(without_folder(w) if "=/" in w else w for w in words)
        facts = {key: results[key] for key in ("date", "machine", "versions")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} is no finished run of configs/compare_targets.py ({error}); give its workdir"
        ) from None
    first = {key: results["target"][key] for key in ("name", "dtype")}
    return {"command": command, **facts, "target": first, "rows": rows, "targets": targets}


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.add_argument("workdirs", nargs="+", type=Path, help="of finished runs")
    args: argparse.Namespace = parser.parse_args(argv)
    return keep_runs(args, "runs", "targets", run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
