"""Trained drafters on one target: draft models with every distillation, and every kind of heads.

    PYTHONPATH=. python experiments/trained_drafters/run.py --name=stories260K --target=DIR \\
        --text=stories.txt --workdir=runs/trained/stories260K

Trains each drafter of ``trained.TRAINED`` (configs/<its config>.py with other keys), then decodes
held-out prompts (the test split of the text) plainly and with each drafter, greedy and at
temperature 1, interleaved in one process (configs/bench.py). The same command resumes a run that
was killed. ``results.json`` beside this file gets tau, alpha by depth and speed-up, the held-out
curves, and the forecasts: those in training, and at the end those for --verified prompts with tau
of decoding them. Without --text the corpus is the embedded one, Python code. --steps and --prompts
make it shorter; --only="A;B" trains and measures some drafters.

A chat model answers questions and is measured on others:

    ... --questions=questions.jsonl --temperatures=0.0 --bench=other.jsonl --features=bfloat16 \\
        --own="eagle3: drafter.draft_vocab=8192 loss.steps=3; hass: train.steps=100" \\
        --methods="eagle;eagle, dynamic tree;eagle3"

--answers takes answers that are there, such as an unpacked archive of assets/answers, in place of
generating them. --features stores the target's features once for all heads; --own gives keys to
single drafters; --methods measures only these labels. The tokens per second of training are the
median of the run's own records, without those of steps that evaluated; --timed measures them again
after all runs, one drafter after the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from experiments.common import BENCH_TIMES, checked, options, start, without_folder
from experiments.trained_drafters.measuring import bench, verify
from experiments.trained_drafters.trained import TRAINED, methods
from experiments.trained_drafters.training import metrics, time_steps, train
from specjax.bench.results import machine
from specjax.files import write_text

TIMES = BENCH_TIMES | {"seconds", "data_share"}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per method, with tau, alpha by depth and speed-up at each temperature."""
    rows = [row for row in rows if row["category"] is None]
    by_key = {(row["method"], row["temperature"]): row for row in rows}
    temperatures = sorted({row["temperature"] for row in rows})
    heads = [f"T={t:g}: tau, alpha by depth, speed-up" for t in temperatures]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---|" * len(temperatures)]
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for t in temperatures:
            row = by_key[method, t]
            alpha = " ".join(f"{a:.2f}" for a in row["acceptance_by_depth"] or ())
            cells.append(f"{row['block_efficiency']:.2f}, {alpha}, {row['speedup']:.2f}x")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; ``workdir`` is created, ``names`` are the drafters to train."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--name", required=True, help="the key of the results in results.json")
    add("--target", required=True, help="model directory or workdir of a trained run")
    add("--text", default="", help=".txt or .jsonl file; empty: the embedded corpus")
    add("--workdir", required=True, type=Path)
    add("--seed", type=int, default=0, help="of the runs: their parameters and the order of texts")
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=8)
    add("--rate", type=float, default=1e-3, help="learning rate of heads (AdamW)")
    add("--width", type=int, default=128, help="of the draft models, which have one layer")
    add("--length", type=int, default=128)
    add("--generated", type=int, default=4096, help="prompts that the target continues")
    add("--temperatures", default="0.0,1.0", help="at which it continues each of them")
    add("--questions", default="", help="files of questions that it answers instead")
    add("--answers", default="", help="a folder with the answers, which are then not generated")
    add("--features", default="", help="dtype in which its features are stored; empty: not stored")
    add("--start", type=int, default=32, help="tokens of these prompts")
    add("--continued", type=int, default=96, help="tokens that the target writes after each")
    add("--rows", type=int, default=64, help="prompts that it continues at once")
    add("--examined", type=int, default=64, help="held-out prompts of the forecasts")
    add("--evaluations", type=int, default=10, help="in a training run")
    add("--eval-batches", type=int, default=12, help="of the held-out text")
    add("--timed", action="store_true", help="measures tokens/s of training steps too")
    add("--own", default="", help="keys of single drafters: name: key=value key=value; name: ...")
    add("--bench", default="", help="a file of prompts to decode; empty: --prompts from the text")
    add("--prompts", type=int, default=32, help="of the bench")
    add("--bench-rows", type=int, default=1, help="of the bench: its batch size")
    add("--repeats", type=int, default=3, help="of the bench; 0: without it")
    add("--methods", default="", help="labels to measure, separated by semicolons; empty: all")
    add("--new", type=int, default=64)
    add("--verified", type=int, default=512, help="prompts to compare forecasts and decoding on")
    add("--only", default="", help="names, separated by semicolons")
    args = parser.parse_args(argv)
    args.names = split(args.only, ";") or list(TRAINED)
    known(args.names, TRAINED)
    args.methods, args.own = split(args.methods, ";"), own_keys(args.own)
    known(args.methods, methods(dict.fromkeys(args.names, "")))
    known(args.own, args.names)
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    return args


def split(text: str, separator: str) -> list[str]:
    """The parts of a list."""
    return [part.strip() for part in text.split(separator) if part.strip()]


def own_keys(text: str) -> dict[str, dict[str, str]]:
    """Name -> key -> value, of "name: key=value key=value; name: ..."."""
    result = {}
    for part in split(text, ";"):
        name, colon, keys = part.partition(":")
        pairs = [key.partition("=") for key in keys.split()]
        if not colon or not all(equals for _, equals, _ in pairs):
            raise SystemExit(f"--own has {part!r}; it must be name: key=value key=value")
        result[name.strip()] = {key: value for key, _, value in pairs}
    return result


def known(names: Iterable[str], every: Iterable[str]) -> None:
    """Ends the program at a name that does not exist."""
    every = list(every)
    if unknown := [name for name in names if name not in every]:
        raise SystemExit(f"unknown drafter {unknown[0]!r}; it must be one of {'; '.join(every)}")


def main(argv: list[str]) -> None:
    """Entry point."""
    args = parse(argv)
    stopwatch = start(args)
    trained = {name: train(name, args) for name in args.names}
    rates = {name: time_steps(name, args) for name in args.names if args.timed}
    rows = bench(args, trained) if args.repeats else []
    verified = verify(args, trained, args.verified) if args.verified else {}
    result = json.loads(args.out.read_text()) if args.out.exists() else {"targets": {}}
    script = ["python", "experiments/trained_drafters/run.py"]
    measured = {
        "command": shlex.join([*script, *map(without_folder, argv)]),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "others_cpu": stopwatch.others_cpu,
        "versions": {name: version(name) for name in ("specjax", "jax")},
        "training": {
            name: metrics(workdir) | ({"tokens_per_second": rates[name]} if name in rates else {})
            for name, workdir in trained.items()
        },
        "forecasts": verified,
        "rows": rows,
    }
    result["targets"][args.name] = checked(measured, stopwatch, TIMES)
    write_text(args.out, json.dumps(result, indent=1) + "\n")
    print(table(rows))
    for name, tau in verified.items():
        forecast = f"forecast {tau['foreseen']:.3f}, decoded {tau['decoded']:.3f}"
        print(f"{name}: tau at temperature 1 {forecast}")


if __name__ == "__main__":
    main(sys.argv[1:])
