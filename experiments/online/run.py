"""Online speculative decoding on stories260K: acceptance over a stream whose topic changes.

    PYTHONPATH=. python experiments/online/run.py --target=stories260K --text=tinystories.txt.xz \\
        --stories=TinyStories-valid-30KB.txt --dialogues=test.jsonl.xz --code=mbpp.jsonl \\
        --workdir=runs/online

Distils a draft model of one layer from the target on --text (configs/distill.py), then decodes the
same stream with every arm of ``ARMS`` (configs/online.py): --requests beginnings of stories, then
of dialogues (Schema-Guided Dialogue), of programs (MBPP), and of other stories. The target knows
stories only; after the other beginnings it writes what it makes of them. ``results.json`` beside
this file gets alpha and tau of every window of requests, and the times of requests and updates.
The same command resumes a run that was killed; finished arms are not run again.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common import checked, options, record, start, without_folder
from specjax.files import write_json, write_text

CONFIGS = Path(__file__).parents[2] / "configs"
CHARACTERS = 60  # of a beginning, at most
# Label -> keys of configs/online.py; the others have the defaults below.
ARMS: dict[str, dict[str, Any]] = {
    "no updates": {"online.learn": False},
    "forward KL": {},
    "forward KL, after every request": {"online.every": 1},
    "reverse KL": {"loss.divergence": "reverse_kl"},
    "Jeffreys": {"loss.divergence": "jeffreys"},
    "forward KL, all emitted tokens": {"online.positions": "emitted"},
    "forward KL, ring of 64": {"online.buffer": 64},
}
TOPICS = ("stories", "dialogues", "code", "other stories")
TIMES = frozenset({"seconds_per_update", "seconds_per_request", "seconds", "seconds_of_updates"})
KEPT = ("first", "last", "updates", "alpha", "tau", "wrong")


def read(path: str) -> str:
    """The text of a file, which may be compressed."""
    with lzma.open(path, "rt") if path.endswith(".xz") else open(path, encoding="utf-8") as file:
        return file.read()


def beginnings(texts: list[str]) -> list[str]:
    """Their first characters, up to the end of a word; each once, in random order."""
    cut = (re.match(rf".{{15,{CHARACTERS}}}(?=\s)", text, re.DOTALL) for text in texts)
    found = sorted({match.group() for match in cut if match})
    random.Random(0).shuffle(found)
    return found


def stream(args: argparse.Namespace) -> list[dict[str, str]]:
    """The requests, topic after topic. Stops the program if a file has too few."""
    turns = [json.loads(line)["turns"] for line in read(args.dialogues).splitlines()]
    programs = [json.loads(line)["code"] for line in read(args.code).splitlines()]
    stories = beginnings(re.split(r"(?<=[.!?])\s+", read(args.stories)))
    texts = {
        "stories": stories[: args.requests],
        "dialogues": beginnings([" ".join(text for _, text in turn) for turn in turns]),
        "code": beginnings([text.replace("\r", "") for text in programs]),
        "other stories": stories[args.requests :],
    }
    result = []
    for topic in TOPICS:
        if len(texts[topic]) < args.requests:
            raise SystemExit(f"there are {len(texts[topic])} beginnings of {topic}")
        result += [{"prompt": text, "category": topic} for text in texts[topic][: args.requests]]
    return result


def run_config(name: str, workdir: Path, keys: Mapping[str, Any]) -> None:
    """Runs a configuration with these keys in its own process."""
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "specjax.run", f"--config={CONFIGS / name}.py"]
    print(f"\n{workdir.name}", file=sys.stderr, flush=True)
    done = subprocess.run([*command, f"--workdir={workdir}", *flags], stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)


def distil(args: argparse.Namespace) -> Path:
    """Trains the draft model; its workdir."""
    text = args.workdir / "text.txt"
    write_text(text, read(args.text))
    workdir, width = args.workdir / "draft", args.width
    keys = {
        "target": args.target,
        "data.files": text,
        "model.hidden_size": width,
        "model.intermediate_size": 3 * width,
        "model.num_heads": 4,
        "model.num_kv_heads": 4,
        "train.steps": args.steps,
        "train.batch_size": 8,
        "examine.prompts": 0,
    }
    run_config("distill", workdir, keys)
    return workdir


def arm(args: argparse.Namespace, label: str, temperature: float, keys: dict) -> dict[str, Any]:
    """A row of results.json: one pass over the stream."""
    workdir = args.workdir / f"{label.replace(',', '').replace(' ', '_')}-{temperature:g}"
    own = {
        "target": args.target,
        "drafter.model": args.workdir / "draft",
        "drafter.gamma": args.gamma,
        "prompts": args.workdir / "stream.jsonl",
        "sampling.temperature": temperature,
        "max_new_tokens": args.new,
        "ignore_eos": True,
        "online.window": args.window,
        "online.checkpoint_every": len(TOPICS) * args.requests,
        "optimiser.learning_rate": args.rate,
        "report": False,
    }
    if not (workdir / "results.json").exists():
        run_config("online", workdir, own | keys)
    results = json.loads((workdir / "results.json").read_text())
    whole, *topics = results["rows"]
    return {
        "arm": label,
        "temperature": temperature,
        "alpha": whole["acceptance_rate"],
        "tau": whole["block_efficiency"],
        "topics": {row["category"]: row["block_efficiency"] for row in topics},
        "windows": [{key: one[key] for key in KEPT} for one in whole["windows"]],
        **{key: value for key, value in results["online"].items() if key != "window"},
    }


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    for name in ("target", "text", "stories", "dialogues", "code"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--requests", type=int, default=200, help="of each topic")
    parser.add_argument("--new", type=int, default=64, help="tokens of an output")
    parser.add_argument("--window", type=int, default=25, help="requests of a window")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--rate", type=float, default=3e-3, help="the constant learning rate")
    parser.add_argument("--steps", type=int, default=200, help="of the draft before the stream")
    parser.add_argument("--width", type=int, default=64, help="of the draft")
    parser.add_argument("--arms", default=";".join(ARMS), help="labels, separated by semicolons")
    args = parser.parse_args(argv)
    stopwatch = start(args)
    args.workdir.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for line in stream(args)]
    write_text(args.workdir / "stream.jsonl", "".join(lines))
    distil(args)
    shown = [without_folder(each) for each in argv if not each.startswith(("--out", "--workdir"))]
    settings = {key: getattr(args, key) for key in ("requests", "new", "gamma", "rate", "window")}
    rows = []
    for label in args.arms.split(";"):
        for temperature in (0.0, 1.0):
            rows.append(arm(args, label, temperature, ARMS[label]))
            head = record(__file__, [*shown, "--workdir=DIR"], stopwatch)
            result = head | {"settings": settings, "topics": TOPICS, "rows": rows}
            write_json(args.out, checked(result, stopwatch, TIMES))


if __name__ == "__main__":
    main(sys.argv[1:])
