"""An EAGLE-3 head for a chat model, from questions to a table: data in parts, training, a bench.

    PYTHONPATH=. python experiments/trained_drafters/chat_head.py --target=DIR \\
        --workdir=runs/head --questions=questions/train.jsonl --bench=question.jsonl

For each part: the target answers the next questions (configs/self_generate.py, at temperature 0
and 1), and its features of the answers are stored (configs/features.py). Then the head learns from
all parts (configs/eagle3.py), and a bench decodes with it, as a chain, a drawn chain and a dynamic
tree, beside plain decoding. A killed run goes on with the same command. With more --parts the next
head learns from all of them; --init=WORKDIR starts it from an earlier head. No part begins after
--data-minutes. --keep=DIR stores the answers of each part as DIR/PART.tar.xz, and a part that is
there is not answered again: assets/answers has those of SmolLM2-135M-Instruct to the questions of
``questions.py`` (--keep=assets/answers --part=400).
``chat_head.json`` beside this file gets the curve of held-out tau and the rows of the bench, by
--name. --head=DIR measures a head that is there, without training. On a GPU: larger --batch and
--rows.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common import BENCH_TIMES, checked, options, record, start, without_folder
from experiments.tables import number, source, table
from experiments.trained_drafters.measuring import bench_config
from experiments.trained_drafters.training import CONFIGS, run_config
from specjax import drafters
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf

TIMES = BENCH_TIMES | {"tokens_per_second", "seconds"}
KEPT = (
    *("method", "category", "temperature", "batch_size", "block_efficiency"),
    *("acceptance_by_depth", "speedup", "speedup_interval", "lossless"),
)
CURVE = (("loss", ".3f"), ("decoded_tau_t0", ".2f"), ("decoded_tau_t1", ".2f"))


def answers(args: argparse.Namespace, part: int) -> Path:
    """Lets the target answer the questions of a part, or takes the kept answers; the workdir."""
    workdir, kept = args.workdir / f"answers{part}", None
    if args.keep is not None:
        kept = args.keep / f"{part}.tar.xz"
        if kept.is_file():
            unpack(kept, workdir)
            return workdir
    keys = {
        "target": args.target,
        "generation.prompts": args.questions,
        "generation.chat": "own",
        "generation.skip": part * args.part,
        "generation.num_prompts": args.part,
        "generation.prompt_tokens": args.prompt_tokens,
        "generation.new_tokens": args.new,
        "generation.batch_size": args.batch,
        "generation.temperatures": (0.0, 1.0),
        "generation.shard_prompts": 64,
    }
    run_config(CONFIGS / "self_generate.py", workdir, keys)
    if kept is not None:
        pack(workdir, kept)
    return workdir


def pack(workdir: Path, archive: Path) -> None:
    """Keeps the answers of a workdir, without the path of the target."""
    folder = workdir / "generated"
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["target"]["name"] = Path(manifest["target"]["name"]).name
    text = json.dumps(manifest, indent=2).encode()
    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(".part")
    with tarfile.open(unfinished, "w:xz") as file:
        for name in manifest["shards"]:
            file.add(folder / name, f"generated/{name}", filter=anonymous)
        facts = anonymous(tarfile.TarInfo("generated/manifest.json"))
        facts.size = len(text)
        file.addfile(facts, io.BytesIO(text))
    unfinished.rename(archive)


def anonymous(facts: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry of a file in an archive, without user, group and time."""
    facts.uid = facts.gid = facts.mtime = 0
    facts.uname = facts.gname = ""
    return facts


def unpack(archive: Path, workdir: Path) -> None:
    """The workdir of kept answers. Raises UserError for a file that is no such archive."""
    try:
        with tarfile.open(archive) as file:
            file.extractall(workdir, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"--keep: {archive} is no archive of answers: {error}") from None


def features(args: argparse.Namespace, part: int, taps: Sequence[int]) -> Path:
    """Stores the target's features of a part; the workdir."""
    keys = {
        "target": args.target,
        "data.generated": answers(args, part),
        "features.taps": tuple(taps),
        "train.length": args.length,
        "train.batch_size": args.rows,
        "examine.prompts": args.examined,
        "examine.prompt_tokens": args.prompt_tokens,
    }
    workdir = args.workdir / f"features{part}"
    run_config(CONFIGS / "features.py", workdir, keys)
    return workdir


def stored(args: argparse.Namespace) -> list[Path]:
    """The features of all parts; after --data-minutes only of those that are finished."""
    target, begun, result = hf.load(args.target).lm, time.monotonic(), []
    taps = sorted(drafters.make("eagle3", target).taps)
    for part in range(args.parts):
        late = result and time.monotonic() - begun > 60 * args.data_minutes
        if late and not (args.workdir / f"features{part}" / "summary.json").is_file():
            break
        result.append(features(args, part, taps))
    return result


def train(args: argparse.Namespace, parts: Sequence[Path]) -> Path:
    """Trains the head on the parts for --epochs; the workdir."""
    facts = [json.loads((part / "summary.json").read_text()) for part in parts]
    rows = sum(each["rows"] for each in facts)
    steps = max(round(args.epochs * rows / args.rows), 1)
    keys = {
        "target": args.target,
        "data.features": ",".join(map(str, parts)),
        "loss.steps": 4,
        "loss.places": min(args.places, args.length),
        "optimiser.learning_rate": args.rate,
        "train.steps": steps,
        "train.length": args.length,
        "train.batch_size": args.rows,
        "train.eval_every": max(steps // args.evaluations, 1),
        "examine.every": max(steps // args.evaluations, 1),
        "examine.prompts": args.examined,
        "examine.prompt_tokens": args.prompt_tokens,
        "train.checkpoint_every": max(steps // 8, 1),
    }
    # An earlier head has its draft vocabulary.
    keys |= {"init": args.init} if args.init else {"drafter.draft_vocab": args.draft_vocab}
    # Other parts are another run.
    workdir = args.workdir / f"head{len(parts)}"
    run_config(CONFIGS / "eagle3.py", workdir, keys)
    return workdir


def curve(args: argparse.Namespace, head: Path) -> list[dict[str, Any]]:
    """The measurements on held-out text of a training run."""
    lines = map(json.loads, (head / "metrics.jsonl").read_text().splitlines())
    names = ("heldout_loss", "heldout_decoded_tau_t0", "heldout_decoded_tau_t1")
    return [
        {"step": line["step"], "rows_seen": line["step"] * args.rows}
        | {name.removeprefix("heldout_"): line.get(name) for name in names}
        for line in lines
        if line.get("heldout_loss") is not None
    ]


def bench(args: argparse.Namespace, head: Path) -> list[dict[str, Any]]:
    """The rows of the bench: the head as a chain, a drawn chain, and a tree."""
    keys = {"name": "eagle3", "model": str(head), "accept": ""}
    chain = {**keys, "tree": "chain:4"}
    forms = {
        "chain": chain,
        "drawn chain": {**chain, "siblings": "iid"},
        "tree": {**keys, "tree": "dynamic"},
        "prompt_lookup": {"name": "prompt_lookup", "gamma": 4, "accept": ""},
    }
    config = args.workdir / "bench.py"
    config.write_text(bench_config(forms), encoding="utf-8")
    own = {
        "target": args.target,
        "prompts": args.bench,
        "num_prompts": args.prompts,
        "max_new_tokens": args.bench_tokens,
        "repeats": args.repeats,
        "grid.temperatures": (0.0, 1.0),
        "trace_prompts": 0,
        "report": False,
    }
    workdir = args.workdir / f"bench-{head.name}"
    run_config(config, workdir, own)
    rows = json.loads((workdir / "results.json").read_text())["rows"]
    return [{key: row[key] for key in KEPT} for row in rows]


def tables(results: dict) -> str:
    """For each head its curve and its bench."""
    parts = []
    for name, found in results.items():
        rows = [
            (f"{each['rows_seen']:,}", *(number(each[key], form) for key, form in CURVE))
            for each in found["curve"]
        ]
        heads = ("rows seen", "held-out loss", "tau, T = 0", "tau, T = 1")
        parts += [f"**{name}**\n\n{source(found)}"]
        parts += [table(heads, rows)] * bool(rows)
        parts += [by_task(found["bench"])] * bool(found["bench"])
    return "\n\n".join(parts)


def by_task(rows: Sequence[Mapping[str, Any]]) -> str:
    """tau and speed-up of all questions and of each task."""
    tasks = list(dict.fromkeys(row["category"] for row in rows))
    lines: dict[tuple[str, str], dict[str | None, str]] = {}
    for row in rows:
        cells = (number(row["block_efficiency"], ".2f"), number(row["speedup"], ".2f", "x"))
        own = lines.setdefault((row["method"], f"{row['temperature']:g}"), {})
        own[row["category"]] = ", ".join(filter(None, cells))
    heads = ("all" if task is None else task.replace("_", " ") for task in tasks)
    cells = [(*label, *(own.get(task, "") for task in tasks)) for label, own in lines.items()]
    return table(("method", "T", *heads), cells)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = options(__file__, __doc__)
    parser.set_defaults(out=Path(__file__).with_name("chat_head.json"))
    add = parser.add_argument
    add("--target", required=True)
    add("--questions", help="to answer, in Spec-Bench's format")
    add("--head", type=Path, help="measure this head; nothing is trained")
    add("--bench", required=True, help="questions of the bench")
    add("--workdir", type=Path, required=True)
    add("--name", default="EAGLE-3", help="of the results")
    add("--parts", type=int, default=4)
    add("--part", type=int, default=1600, help="questions of a part")
    add("--keep", type=Path, help="folder of archives with the answers of parts")
    add("--data-minutes", type=float, default=1e9, help="after which no further part begins")
    add("--batch", type=int, default=32, help="questions that are answered together")
    add("--prompt-tokens", type=int, default=448)
    add("--new", type=int, default=256, help="tokens of an answer")
    add("--length", type=int, default=704, help="tokens of a training row")
    add("--rows", type=int, default=6, help="of a training step")
    add("--places", type=int, default=288, help="of a row that are drafted in a step")
    add("--draft-vocab", type=int, default=8192)
    add("--epochs", type=float, default=3.0)
    add("--rate", type=float, default=1e-3)
    add("--evaluations", type=int, default=8)
    add("--examined", type=int, help="held-out prompts of each part that are measured; at most 32")
    add("--init", default="", help="workdir of an earlier head")
    add("--prompts", type=int, default=24, help="of the bench")
    add("--bench-tokens", type=int, default=128)
    add("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    if (args.head is None) == (args.questions is None):
        parser.error("give --questions, or --head for a head that is there")
    # One of twenty prompts is held out.
    args.examined = args.examined or max(1, min(32, args.part // 25))
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    return args


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    try:
        parts = [] if args.head else stored(args)
        head = args.head or train(args, parts)
        stopwatch = start(args)
        found = {
            **record(__file__, [without_folder(each) for each in argv], stopwatch),
            "parts": [json.loads((part / "summary.json").read_text()) for part in parts],
            "curve": [] if args.head else curve(args, head),
            "bench": bench(args, head),
        }
    except UserError as error:
        raise SystemExit(f"chat_head: {error}") from None
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    write_json(args.out, known | {args.name: checked(found, stopwatch, TIMES)})
    print(tables({args.name: found}))


if __name__ == "__main__":
    main(sys.argv[1:])
