"""Every training-free drafter, a distilled model of two layers, and heads on a real chat model.

    PYTHONPATH=. python experiments/real_model/run.py --target=DIR --prompts=question.jsonl \\
        --generated=runs/generated --draft=runs/draft --workdir=runs/real

The target is SmolLM2-135M-Instruct (Apache-2.0) in float32; the prompts are the first turns of the
questions of Spec-Bench (2401.07851), with the model's chat template: of each of the six tasks the
first --questions that have at most 768 tokens, rounded up to whole batches. All of them are read
once per batch size and temperature, and every method starts from the same cache. Plain decoding and
all methods decode a batch one after the other, in another order each time, before the next batch:
a speed-up is the median over batches of such ratios, and the machine's drift cancels.

A cell is a batch size, a temperature and a task; each is stored in the workdir when it is done. The
same command continues a run that was killed; --seconds ends it early, after the cell that is
running. ``results.json`` beside this file is written when all cells are there.

``--methods`` takes other drafters too, as in "prompt_lookup gamma=8 control=fixed:4;prompt_lookup
gamma=8 control=goodput". Controllers that read costs get a profile, measured on other questions.

With the defaults (10 questions of each task, 24 new tokens, one pass) about an hour on two idle CPU
cores, five minutes of it compilation; --new=18 takes three quarters of an hour. Texts of this
length hardly loop: configs/replay.py on longer recorded answers shows what loops add to tau.
Datastore, n-gram tables and the distilled model are made from the target's answers to about 1,000
other questions (experiments/trained_drafters/questions.py):

    python -m specjax.run --config=configs/self_generate.py --workdir=runs/generated \\
        --config.target=DIR --config.generation.chat=own --config.generation.num_prompts=1088 \\
        --config.generation.prompts=gsm8k_train.jsonl,mbpp_train.jsonl,sgd.jsonl,stories.jsonl \\
        --config.generation.prompt_tokens=160 --config.generation.new_tokens=160 \\
        "--config.generation.temperatures=(0.0,)" --config.generation.batch_size=32
    python -m specjax.run --config=configs/distill.py --workdir=runs/draft --config.target=DIR \\
        --config.data.generated=runs/generated --config.pruned=0,29 --config.train.steps=360 \\
        --config.optimiser.name=adamw --config.optimiser.learning_rate=5e-4

``heads.json`` has heads too, and longer answers (--new=32, an hour). Its draft model learned from
assets/answers/0.tar.xz, unpacked, by the command above with --config.train.batch_size=2 (27
minutes); the command of Hydra is in experiments/trained_drafters/chat_head.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments.common import BENCH_TIMES, checked, options, record, start, without_folder
from experiments.real_model import measuring, profiles, rows
from experiments.real_model.measuring import Setting
from experiments.real_model.methods import build
from experiments.real_model.rows import PLAIN
from specjax.bench import provenance, uncertainty
from specjax.bench.passes import Method
from specjax.data import chat, prompt_files
from specjax.files import write_json
from specjax.models import hf

TIMES = BENCH_TIMES | {"times", "empty", "finds", "missed"}  # the last four are of profiles


class Question(NamedTuple):
    """A prompt of the study."""

    number: int  # in the file; for the noise
    ids: list[int]


def others(path: Path, target: hf.Loaded) -> list[list[int]]:
    """The ids of the last question of each task that has at most 256 tokens: not measured ones."""
    every = questions(path, target, 1 << 20, 1)
    short = ([each.ids for each in own if len(each.ids) <= 256] for own in every.values())
    return [own[-1] for own in short if own]


def questions(path: Path, target: hf.Loaded, count: int, batch: int) -> dict[str, list[Question]]:
    """Task -> the first questions that are short enough, at least ``count`` in whole batches."""
    tokenizer = target.text_tokenizer
    template = chat.load("", target.directory, tokenizer)
    chosen: dict[str, list[Question]] = {}
    for number, each in enumerate(prompt_files.read(path, f"--prompts {path}", "spec_bench")):
        text = prompt_files.spell(each, 0, [], template).text
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        own = chosen.setdefault(prompt_files.task(each.category) or "", [])
        if len(ids) <= measuring.WIDTHS[-1] and len(own) < -(-count // batch) * batch:
            own.append(Question(number, ids))
    return chosen


def measure_cell(
    setting: Setting, methods: Sequence[Method], temperature: float, some: Sequence[Question]
) -> dict[str, list[dict]]:
    """Label -> one entry per batch; plain decoding is one of the labels."""
    result: dict[str, list[dict]] = {label: [] for label in (PLAIN, *(m.name for m in methods))}
    starts = range(0, len(some), setting.batch_size)
    for turn, offset in enumerate(starts):
        batch = some[offset : offset + setting.batch_size]
        prompts = [each.ids for each in batch]
        order: list[Method | None] = [None, *methods]
        readings: dict[tuple[int, ...], measuring.Read] = {}
        # Rotate the order: no method always runs first.
        first = turn % len(order)
        for method in order[first:] + order[:first]:
            numbers = [each.number for each in batch]
            taps = () if method is None else method.drafter.taps
            read = readings.get(taps) or measuring.read(setting, prompts, method)
            readings[taps] = read
            run = measuring.decode_batch(setting, method, read, numbers, temperature)
            result[PLAIN if method is None else method.name].append(rows.to_json(run))
    return result


def measure_batch_size(
    args: argparse.Namespace, target: hf.Loaded, methods: Sequence[Method], batch: int, end: float
) -> bool:
    """Measures the cells of a batch size that are missing; whether all are there."""
    chosen = questions(args.prompts, target, args.questions, batch)
    todo = [
        (temperature, task)
        for temperature in args.temperatures
        for task in chosen
        if not path_of(args.workdir, batch, temperature, task).exists()
    ]
    if not todo:
        return True
    longest = measuring.WIDTHS[-1]
    slots = measuring.slots_of(methods, longest, args.new)
    setting = Setting(
        target.lm, target.params, target.config.eos_token_id, batch, args.new, slots, args.seed
    )
    began = time.perf_counter()
    firsts = {measuring.width_of(some[0].ids): [some[0].ids] for some in chosen.values()}
    measuring.compile_all(setting, methods, list(firsts.values()))
    print(f"batch {batch}: compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for done, (temperature, task) in enumerate(todo):
        if time.perf_counter() > end:
            return False
        began = time.perf_counter()
        cell = measure_cell(setting, methods, temperature, chosen[task])
        write_json(path_of(args.workdir, batch, temperature, task), cell)
        seconds = time.perf_counter() - began
        left = (len(todo) - done - 1) * seconds / 60
        print(
            f"batch {batch}, T={temperature:g}, {task}: {seconds:.0f} s, about {left:.0f} min left "
            "at this batch size",
            flush=True,
        )
    return True


def path_of(workdir: Path, batch: int, temperature: float, task: str) -> Path:
    """The file of a cell."""
    return workdir / "cells" / f"batch{batch}-T{temperature:g}-{task}.json"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; the workdir is created, and refused if it belongs to other ones."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--target", required=True, help="directory of the chat model")
    add("--prompts", required=True, type=Path, help="the questions of Spec-Bench")
    add("--generated", default="", help="workdir of configs/self_generate.py; empty: no store")
    add("--draft", default="", help="workdir of the distilled model; empty: leave it out")
    add("--workdir", required=True, type=Path, help="for the cells")
    add("--questions", type=int, default=10, help="of each task, at least")
    add("--new", type=int, default=24, help="new tokens of each")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--batch-sizes", type=int, nargs="+", default=[1, 4])
    add("--methods", default="", help="labels, or drafters with keys, separated by semicolons")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=float("inf"), help="start no cell after this time")
    args = parser.parse_args(argv)
    args.methods = [name.strip() for name in args.methods.split(";") if name.strip()]
    kept = ("questions", "new", "methods", "seed")
    own = {key: getattr(args, key) for key in kept}
    own |= {key: Path(getattr(args, key)).name for key in ("target", "prompts", "draft")}
    (args.workdir / "cells").mkdir(parents=True, exist_ok=True)
    file = args.workdir / "settings.json"
    if file.exists() and json.loads(file.read_text()) != own:
        raise SystemExit(f"{args.workdir} has cells of other arguments ({file}); choose another")
    write_json(file, own)
    return args


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    stopwatch = start(args)
    end = time.perf_counter() + args.seconds
    target = hf.load(args.target)
    profile = args.workdir / "profile.json"
    if (keys := profiles.wanted(args.methods)) is not None:
        some = others(args.prompts, target)
        profiles.measure(profile, target, keys, some, args.batch_sizes, args.temperatures)
        jax.clear_caches()
    methods = build(target, args.generated, args.draft, args.methods, args.temperatures, profile)
    for batch in args.batch_sizes:
        if not measure_batch_size(args, target, methods, batch, end):
            print("time is up; the same command continues")
            return
        jax.clear_caches()
    every: list[dict[str, Any]] = []
    named = {method.name: method for method in methods}
    for batch, temperature in itertools.product(args.batch_sizes, args.temperatures):
        tasks = questions(args.prompts, target, args.questions, batch)
        files = {task: path_of(args.workdir, batch, temperature, task) for task in tasks}
        every += rows.rows(
            {task: json.loads(file.read_text()) for task, file in files.items()},
            named,
            batch,
            temperature,
        )
    for row in every:
        row["predicted"] = rows.predicted(row, named[row["method"]], target.config)
    facts = provenance.target(target.params, name="", directory=target.directory)
    result = record(__file__, [without_folder(argument) for argument in argv], stopwatch) | {
        "target": facts,
        "questions": args.questions,
        "new_tokens": args.new,
        "profile": json.loads(profile.read_text()) if keys is not None else None,
        "uncertainty": uncertainty.ABOUT,
        "rows": every,
    }
    write_json(args.out, checked(result, stopwatch, TIMES))
    print(rows.table(every))


if __name__ == "__main__":
    main(sys.argv[1:])
