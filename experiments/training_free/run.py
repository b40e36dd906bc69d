"""Every training-free drafter on two targets: tau, tokens/s and speed-up, greedy and sampled, batch 1 and 8, cold and warm.

    PYTHONPATH=. python experiments/training_free/run.py --stories=DIR --text=FILE --corpus=FILE

Targets: the quickstart's (runs/quickstart, trained if need be; prompts are held-out Python code), stories260K (--stories, its
directory) with the beginnings of TinyStories as prompts: of --text, a story a line, the last eight; the first eight are for the
warm drafters to learn from. Datastore and tables are made of --corpus, other stories. Without --stories only the first
target is measured; --only=NAME measures one of them, and keeps what is known of the other. Each is one run of
configs/training_free.py in a process of its own, with its measurements interleaved; the rows go to ``results.json`` beside
this file, and tables to the terminal. Ten minutes a target on two CPU cores; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.vs_transformers.run import busy, machine

PROMPTS, WARM, WORDS = 8, 8, 24
CONFIG = Path(__file__).parents[2] / "configs" / "training_free.py"


def openings(text: str) -> list[str]:
    """The beginnings of stories, no two alike: first those that are measured, then those to learn from."""
    stories = {
        line.lower(): " ".join(line.split()[:WORDS])
        for line in text.split("\n")
        if len(line.split()) > 2 * WORDS
    }
    begin = list(stories.values())
    if len(begin) < PROMPTS + WARM:
        raise SystemExit(
            f"the text has {len(begin)} different stories; {PROMPTS + WARM} are needed"
        )
    return [*begin[-PROMPTS:], *begin[:WARM]]


def measure(workdir: Path, flags: list[str]) -> dict[str, Any]:
    """The rows of one run of the configuration, and how it was made."""
    since, others = time.perf_counter(), busy()
    models = f":{workdir}" if (workdir / "target").exists() else ""
    command = [
        sys.executable,
        "-m",
        "specjax.run",
        f"--config={CONFIG}{models}",
        f"--workdir={workdir}",
        *flags,
    ]
    if status := subprocess.run(command).returncode:
        raise SystemExit(status)
    return {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "others_cpu": (busy() - others) / (time.perf_counter() - since) / (os.cpu_count() or 1),
        "seconds": time.perf_counter() - since,
        "versions": {name: version(name) for name in ("specjax", "jax")},
        "rows": json.loads((workdir / "results.json").read_text())["rows"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method, tau, tokens/s and speed-up for every temperature and batch size."""
    cells = sorted({(row["temperature"], row["batch_size"]) for row in rows})
    head = "| method | " + " | ".join(f"T={t:g}, batch {b}" for t, b in cells) + " |"
    found = {(row["method"], row["temperature"], row["batch_size"]): row for row in rows}
    plain = [
        f"1, {found[rows[0]['method'], *cell]['autoregressive_tokens_per_second']:.0f}, 1x"
        for cell in cells
    ]
    lines = [head, "|" + "---|" * (len(cells) + 1), f"| plain decoding | {' | '.join(plain)} |"]
    for method in dict.fromkeys(row["method"] for row in rows):
        here = [found[method, *cell] for cell in cells]
        texts = [
            f"{r['block_efficiency']:.2f}, {r['tokens_per_second']:.0f}, {r['speedup']:.2f}x"
            for r in here
        ]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quickstart", default="runs/quickstart", help="workdir of the quickstart")
    parser.add_argument("--stories", default="", help="directory of stories260K")
    parser.add_argument("--text", default="", help="file of stories to begin, one a line")
    parser.add_argument(
        "--corpus",
        default="",
        help=".txt or .jsonl file of other stories, for datastore and tables",
    )
    parser.add_argument("--only", default="", choices=("", "quickstart", "stories260K"))
    parser.add_argument("--out", default=str(Path(__file__).with_name("results.json")))
    args, more = parser.parse_known_args(argv)
    out = Path(args.out)
    result: dict[str, Any] = (
        json.loads(out.read_text()) if args.only and out.exists() else {"targets": {}}
    )
    # Names of files, not where they lie on this machine.
    told = [
        f"{key}={Path(value).name}" if value else key
        for key, _, value in (arg.partition("=") for arg in argv)
    ]
    result["command"] = shlex.join(["python", "experiments/training_free/run.py", *told])
    if args.only != "stories260K":
        result["targets"]["quickstart"] = measure(Path(args.quickstart), more)
    if args.stories and args.only != "quickstart":
        with tempfile.TemporaryDirectory() as folder:
            prompts, asked = (
                openings(Path(args.text).read_text(encoding="utf-8")),
                Path(folder, "prompts.jsonl"),
            )
            asked.write_text(
                "".join(json.dumps({"prompt": text}) + "\n" for text in prompts), encoding="utf-8"
            )
            flags = [
                f"--config.target={args.stories}",
                f"--config.prompts={asked}",
                f"--config.warm_prompts={WARM}",
            ]
            flags += ["--config.prepare=('store','tables')"]
            for stage in ("store", "tables"):
                flags += [
                    f"--config.stages.{stage}.target={args.stories}",
                    f"--config.stages.{stage}.data.files={args.corpus}",
                ]
            result["targets"]["stories260K"] = measure(Path(folder, "run"), [*flags, *more])
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, target in result["targets"].items():
        print(f"\n{name}\n{table(target['rows'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
