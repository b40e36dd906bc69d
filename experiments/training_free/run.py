"""The training-free drafters on two targets: tau, tokens/s and speed-up in many settings.

    PYTHONPATH=. python experiments/training_free/run.py --stories=DIR --text=FILE --corpus=FILE

Settings: greedy and sampled, batch 1 and 8, cold and warm. Targets: the quickstart's
(runs/quickstart, trained if it is not there; prompts are held-out Python code), and stories260K
(--stories, its directory) with beginnings of TinyStories as prompts: of --text, with one story per
line, the last eight; the warm drafters learn from the first eight. Datastore and tables are made
from --corpus, other stories. Without --stories only the first target is measured; --only=NAME
measures one of them, and keeps the earlier results of the other. Each target is one run of
configs/training_free.py in its own process, with interleaved measurements; the rows go to
``results.json`` beside this file, and tables to the terminal. Ten minutes per target on two CPU
cores; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.common import BENCH_TIMES, checked, options, start, without_folder
from specjax.bench.results import machine
from specjax.files import write_json

PROMPTS, WARM, WORDS = 8, 8, 24
TIMES = BENCH_TIMES
CONFIG = Path(__file__).parents[2] / "configs" / "training_free.py"


def openings(text: str) -> list[str]:
    """Beginnings of different stories: first those to measure, then those to learn from."""
    stories = {
        line.lower(): " ".join(line.split()[:WORDS])
        for line in text.split("\n")
        if len(line.split()) > 2 * WORDS
    }
    begin = list(stories.values())
    if len(begin) < PROMPTS + WARM:
        raise SystemExit(
            f"the text has {len(begin)} different stories; give one with {PROMPTS + WARM} or more"
        )
    return [*begin[-PROMPTS:], *begin[:WARM]]


def measure(args: argparse.Namespace, workdir: Path, flags: list[str]) -> dict[str, Any]:
    """Runs the configuration; its rows, with date, machine and versions."""
    stopwatch = start(args)
    models = f":{workdir}" if (workdir / "target").exists() else ""
    command = [sys.executable, "-m", "specjax.run", f"--config={CONFIG}{models}"]
    if status := subprocess.run([*command, f"--workdir={workdir}", *flags]).returncode:
        raise SystemExit(status)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "others_cpu": stopwatch.others_cpu,
        "seconds": stopwatch.seconds,
        "versions": {name: version(name) for name in ("specjax", "jax")},
        "rows": json.loads((workdir / "results.json").read_text())["rows"],
    }
    return checked(result, stopwatch, TIMES)


def measure_stories(args: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """The results of stories260K."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        texts = openings(Path(args.text).read_text(encoding="utf-8"))
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        prompts.write_text("".join(lines), encoding="utf-8")
        keys = {
            "target": args.stories,
            "prompts": prompts,
            "warm_prompts": WARM,
            "prepare": "('store','tables')",
        }
        for stage in ("store", "tables"):
            keys[f"stages.{stage}.target"] = args.stories
            keys[f"stages.{stage}.data.files"] = args.corpus
        own = [f"--config.{key}={value}" for key, value in keys.items()]
        return measure(args, Path(folder, "run"), [*own, *flags])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method, with tau, tokens/s and speed-up of each setting."""
    settings = sorted({(row["temperature"], row["batch_size"]) for row in rows})
    head = "| method | " + " | ".join(f"T={t:g}, batch {b}" for t, b in settings) + " |"
    found = {(row["method"], row["temperature"], row["batch_size"]): row for row in rows}
    plain = [
        f"1, {_rate(found[rows[0]['method'], *setting]['autoregressive_tokens_per_second'])}, 1x"
        for setting in settings
    ]
    lines = [head, "|" + "---|" * (len(settings) + 1), f"| plain decoding | {' | '.join(plain)} |"]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for setting in settings:
            row = found[method, *setting]
            speed = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            rate = _rate(row["tokens_per_second"])
            cells.append(f"{row['block_efficiency']:.2f}, {rate}, {speed}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(tokens: float | None) -> str:
    """Tokens per second; "-" where the machine was busy."""
    return "-" if tokens is None else f"{tokens:.0f}"


def main(argv: list[str]) -> None:
    """Entry point. Arguments that the parser does not know go to both runs."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--quickstart", default="runs/quickstart", help="workdir of the quickstart")
    add("--stories", default="", help="directory of stories260K")
    add("--text", default="", help="file with beginnings of stories, one per line")
    add("--corpus", default="", help=".txt or .jsonl of other stories, for datastore and tables")
    add("--only", default="", choices=("", "quickstart", "stories260K"))
    args, flags = parser.parse_known_args(argv)
    result: dict[str, Any] = (
        json.loads(args.out.read_text()) if args.only and args.out.exists() else {"targets": {}}
    )
    script = ["python", "experiments/training_free/run.py"]
    result["command"] = shlex.join([*script, *map(without_folder, argv)])
    if args.only != "stories260K":
        result["targets"]["quickstart"] = measure(args, Path(args.quickstart), flags)
        write_json(args.out, result)
    if args.stories and args.only != "quickstart":
        result["targets"]["stories260K"] = measure_stories(args, flags)
    write_json(args.out, result)
    for name, target in result["targets"].items():
        print(f"\n{name}\n{table(target['rows'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
