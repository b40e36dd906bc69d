"""specjax against transformers: same weights, prompts and machine; alone, with a draft model, and with prompt lookup.

    PYTHONPATH=. python experiments/vs_transformers/run.py --stories=DIR        (about 6 minutes on 2 CPU cores)

It needs torch and transformers. Every speed-up that specjax reports is measured against its own autoregressive loop, so that
loop must not be slow; and a method is worth no more than its implementation. Both sides decode the same prompts with

- ``autoregressive``: one token a pass.
- ``draft_model``: a draft model, 5 tokens a round (``assistant_model``; ``num_assistant_tokens=5``, its schedule "constant",
  its confidence threshold 0, so that it drafts 5 as ours does).
- ``prompt_lookup``: up to 10 tokens a round, n-grams up to 2 (``prompt_lookup_num_tokens=10``; ours with
  ``rule="transformers"``, which takes the same n-gram, occurrence and length).

The prompts have ragged lengths and come one at a time, for transformers' assisted generation knows no larger batch. Greedy
texts must be the same, token for token, and take the same number of rounds. Sampled texts (temperature 1, no top-k, no
top-p) cannot be compared, for the two draw other noise; there tau, tokens a round, must be about the same.

Pairs of models, float32: ``gpt2`` (12 layers, 768 wide, vocabulary 50257, with a draft of 2 layers, 256 wide; constructed
weights that agree often and not always, see pair.py), and with --stories ``stories`` (stories260K or another small
directory; its draft is --stories-draft, or its own first two layers, which without training are hardly ever right).

transformers runs as it comes, eager, with a dynamic cache, and with 1 torch thread or all, whichever suits each method best
(tried first). The sides take turns in one process; prefill is part of the time, compilation and first calls are not; medians
count. Writes ``results.json`` beside this file. Run it on an idle machine: where another process holds one of two cores, torch
with two threads is ten times slower. ``others_cpu`` is the share of the machine that other processes took: near 0, or
the ratios mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.vs_transformers import pair, sides
from specjax.bench.results import machine
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.transformer import TransformerConfig

GPT2 = TransformerConfig(
    family="gpt2",
    vocab_size=50257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=1024,
    attention_bias=True,
    mlp_bias=True,
    # No end-of-sequence token: then neither side has to be kept from stopping early.
)
DRAFT = dataclasses.replace(
    GPT2, num_layers=2, hidden_size=256, intermediate_size=1024, num_heads=4, num_kv_heads=4
)
OPENINGS = (
    "Once upon a time, there was a little girl named Lily. She liked to play with her red ball in the park.",
    "Tom had a dog. The dog was big and brown. One day,",
    "The sun was warm and the birds sang. A small cat sat by the door and looked at the birds.",
    'Mom said, "It is time for bed." But Ben was not tired.',
)


class Pair(NamedTuple):
    """Two directories and what to decode with them."""

    name: str
    target: Path
    draft: Path
    prompts: list[list[int]]
    new: int
    model: str  # in words


def constructed(folder: Path, new: int, small: bool) -> Pair:
    """The GPT-2 shapes with the weights of pair.py."""
    if small:
        tiny = dataclasses.replace(
            GPT2,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=2,
            head_dim=32,
        )
        target, draft, prompts = pair.make(tiny, tiny, 4, (0.15, 0.15))
    else:
        target, draft, prompts = pair.make(GPT2, DRAFT, 4)
    for name, made in (("target", target), ("draft", draft)):
        hf.save(folder / name, made.config, made.params)
    words = "12 layers, 768 wide, 12 heads, and a draft of 2 layers, 256 wide; vocabulary 50257, constructed weights"
    return Pair(
        "gpt2", folder / "target", folder / "draft", prompts, new, "tiny shapes" if small else words
    )


def stories(directory: str, draft: str, folder: Path, new: int) -> Pair:
    """A small trained model, and a draft model given or made of its first two layers. Raises UserError."""
    target, words = hf.load(directory), "a draft model that was given"
    if target.tokenizer is None:
        raise UserError(
            f"{directory} has no tokenizer.json, and the prompts of this study are texts"
        )
    if not draft:
        from specjax.train import initial  # only here: it brings the training stack along

        hf.save(folder / "pruned", *initial.pruned(target, "0,1"), target.tokenizer)
        draft, words = str(folder / "pruned"), "its own first 2 layers as draft"
    prompts = [target.tokenizer.encode(text).ids for text in OPENINGS]
    shape = f"{target.config.num_layers} layers, {target.config.hidden_size} wide"
    name = f"{Path(directory).name} ({shape}, vocabulary {target.config.vocab_size}), {words}"
    return Pair("stories", Path(directory), Path(draft), prompts, new, name)


def compare(chosen: Pair, heat: float, passes: int, device: str, dtype: str) -> list[dict]:
    """Rows of all methods at one temperature."""
    mine = [hf.load(path, dtype=np.dtype(dtype)) for path in (chosen.target, chosen.draft)]
    peer = [sides.load_theirs(str(path), device, dtype) for path in (chosen.target, chosen.draft)]
    rows = []
    runs, threads = {}, {}
    import torch

    for method in sides.GAMMA:
        runs["specjax", method] = sides.ours(
            mine[0], mine[1], method, chosen.prompts, chosen.new, heat
        )
        runs["transformers", method] = sides.theirs(
            peer[0], peer[1], method, chosen.prompts, chosen.new, heat
        )
        one = sides.theirs(peer[0], peer[1], method, chosen.prompts[:1], chosen.new, heat)
        choices = sorted({1, os.cpu_count() or 1}) if device == "cpu" else [torch.get_num_threads()]
        threads[method] = sides.best_threads([one], choices)
        runs["specjax", method](0)
    seconds: dict[Any, list[float]] = {key: [] for key in runs}
    answers: dict[Any, list[sides.Answer]] = {key: [] for key in runs}
    for seed in range(passes):
        for key, run in runs.items():
            if key[0] == "transformers":
                torch.set_num_threads(threads[key[1]])
            began = time.perf_counter()
            answers[key].append(run(seed))
            seconds[key].append(time.perf_counter() - began)
    for method in sides.GAMMA:
        row: dict[str, Any] = {
            "pair": chosen.name,
            "method": method,
            "temperature": heat,
            "gamma": sides.GAMMA[method],
        }
        for side in ("specjax", "transformers"):
            row[side] = summary(answers[side, method], seconds[side, method])
        row["transformers"]["threads"] = threads[method]
        texts = zip(
            *(a.texts for side in ("specjax", "transformers") for a in answers[side, method]),
            strict=True,
        )
        same = [all(text == each[0] for text in each) for each in texts]
        ratios = [
            b / a
            for a, b in zip(
                seconds["specjax", method], seconds["transformers", method], strict=True
            )
        ]
        row["ratio"] = (
            row["specjax"]["tokens_per_second"] / row["transformers"]["tokens_per_second"]
        )
        row["ratio_spread"] = [min(ratios), max(ratios)]
        row["identical"] = f"{sum(same)}/{len(same)}" if heat == 0 else None
        row["distinct_tokens"] = statistics.mean(
            len(set(text)) for text in answers["specjax", method][0].texts
        )
        rows.append(row)
    return rows


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


def shown(argument: str) -> str:
    """An argument for the record: of a directory its name, not where it lies."""
    flag, equals, value = argument.rpartition("=")
    return f"{flag}{equals}{Path(value).name}" if "/" in value else argument


def busy() -> float:
    """CPU seconds that other processes have used since the machine started (0 where /proc does not tell)."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - time.process_time()


def table(result: dict) -> str:
    """The rows as Markdown."""
    head = (
        "pair",
        "method",
        "T",
        "specjax tokens/s",
        "tau",
        "transformers tokens/s",
        "tau",
        "ratio",
        "greedy texts",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        cells = [row["pair"], row["method"], f"{row['temperature']:g}"]
        for side in (row["specjax"], row["transformers"]):
            low, high = side["spread"]
            cells += [
                f"{side['tokens_per_second']:.1f} ({low:.1f}-{high:.1f})",
                f"{side['block_efficiency']:.2f}",
            ]
        same = "not comparable" if row["identical"] is None else f"{row['identical']} identical"
        lines.append("| " + " | ".join([*cells, f"**{row['ratio']:.2f}x**", same]) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--passes", type=int, default=3, help="times that every method decodes all prompts"
    )
    parser.add_argument(
        "--new", type=int, default=48, help="new tokens a prompt (stories: twice as many)"
    )
    parser.add_argument(
        "--stories", default="", help="directory of a small trained model; without it: gpt2 only"
    )
    parser.add_argument(
        "--stories-draft", default="", help="its draft model; without it: its own first two layers"
    )
    parser.add_argument(
        "--device", default="", help="of torch; without it: cuda if there is one. jax picks its own"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--small", action="store_true", help="tiny shapes: a test that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(argv)
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if (
        args.dtype == "float32"
    ):  # on GPUs jax would take a shorter mantissa for products, and torch does not
        jax.config.update("jax_default_matmul_precision", "float32")
    since, others = time.perf_counter(), busy()
    rows, models = [], {}
    with tempfile.TemporaryDirectory() as folder:
        pairs = [constructed(Path(folder), args.new, args.small)]
        if args.stories:
            pairs.append(stories(args.stories, args.stories_draft, Path(folder), 2 * args.new))
        for chosen in pairs:
            models[chosen.name] = chosen.model
            for heat in (0.0, 1.0):
                rows += compare(chosen, heat, args.passes, device, args.dtype)
    seconds = time.perf_counter() - since
    result = {
        "schema": 1,
        "command": shlex.join(["python", "experiments/vs_transformers/run.py", *map(shown, argv)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine()
        | {"torch_device": torch.cuda.get_device_name() if device == "cuda" else device},
        "others_cpu": round((busy() - others) / seconds / (os.cpu_count() or 1), 3),
        "seconds": round(seconds),
        "versions": {
            name: version(name) for name in ("specjax", "jax", "flax", "torch", "transformers")
        }
        | {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind},
        "dtype": args.dtype,
        "models": models,
        "prompts": {chosen.name: [len(prompt) for prompt in chosen.prompts] for chosen in pairs},
        "new_tokens": {chosen.name: chosen.new for chosen in pairs},
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(result))
    print(f"other processes took {result['others_cpu']:.0%} of the machine")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
