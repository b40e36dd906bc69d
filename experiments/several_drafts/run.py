"""Rules for several drafts beside the best possible one, and trees that branch late.

    PYTHONPATH=. python experiments/several_drafts/run.py --workdir=runs/several --busy=drop \\
        --pair=code=assets/target,draft_tree,assets/draft,assets/prompts.jsonl

A pair is NAME=TARGET,DRAFTER,MODEL,PROMPTS, where MODEL is the model of the drafter, which draws
trees. Two parts, without times:

- One position, of drafters that are models: the chance that one of k independent drafts is
  accepted, the mean over all places of texts that the target wrote, by ``recursive`` (SpecInfer,
  2305.09781), ``k_seq`` (SpecTr, 2310.15141), ``gbv`` (2602.16961), ``coupled`` (2506.05632; by
  simulation), and the largest chance of any lossless rule (``theory.best_acceptance``).
- Trees of 12 drawn nodes: tokens per round by shape, rule and temperature, as Thomas et al. 2026
  (2602.16994) compare them. A shape that branches late is a chain first and several chains after it
  (their delayed tree expansion).

Each pair is stored in ``results.json`` beside this file; other pairs stay as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import BENCH_TIMES, checked, options, record, start, without_folder
from experiments.papers import law, pairs, parts
from specjax import accept, drafters, theory
from specjax.accept import gbv, k_seq
from specjax.data import prompts as prompts_lib
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf

# Label -> shape; all have 12 nodes.
SHAPES = {
    "one chain": "chain:12",
    "2 chains of 6": "chains:2x6",
    "3 chains of 4": "chains:3x4",
    "2 tokens, then 2 chains of 5": "1x1x2x1x1x1x1",
    "3 tokens, then 3 chains of 3": "1x1x1x3x1x1",
    "6 tokens, then 2 chains of 3": "1x1x1x1x1x1x2x1x1",
    "2 chains of 2, each then 2 of 2": "2x1x2x1",
    "3 tokens, 3 below each": "3x3",
}
CHAIN = "one chain"
TREES = {
    "recursive": ("iid", "recursive"),
    "k_seq": ("iid", "k_seq"),
    "traversal": ("iid", "traversal"),
    "gbv": ("iid", "gbv"),
    "recursive, distinct siblings": ("without_replacement", "recursive"),
    "traversal, distinct siblings": ("without_replacement", "traversal"),
}
CHAINS = {"recursive": ("iid", "chain"), "traversal": ("iid", "block")}
COUNTS = (1, 2, 4, 8)
DRAWS = 8  # of the noise of ``coupled``, at each place


def accepted(target: np.ndarray, draft: np.ndarray, count: int, seed: int) -> dict[str, np.ndarray]:
    """The chance of acceptance by rule, f64[P], of ``count`` drafts at P places f64[P,V]."""
    rest, rejected = target, np.ones(len(target))
    for _ in range(count):
        rejected = rejected * (1 - theory.overlap(rest, draft))
        left = np.maximum(rest - draft, 0)
        total = left.sum(-1, keepdims=True)
        # Without a residual the draft is accepted for certain, and what follows has no weight.
        rest = np.where(total > 0, left / np.where(total > 0, total, 1), draft)
    with jax.enable_x64(True):
        first, second = jnp.asarray(target), jnp.asarray(draft)
        counts = jnp.full(len(target), count)
        rho = k_seq.solve(counts, first, second)
        passes = k_seq.any_passes(k_seq.overlap(rho, first, second), jnp.float64(count))
        law = gbv.last_of(counts, second, gbv.ranks(first, second))
        last = np.asarray(jnp.minimum(first, law).sum(-1))
    return {
        "recursive": 1 - rejected,
        "k_seq": np.asarray(passes),
        "gbv": last,
        "coupled": coupled(target, draft, count, seed),
        "best": theory.best_acceptance(target, draft, count),
    }


def coupled(target: np.ndarray, draft: np.ndarray, count: int, seed: int) -> np.ndarray:
    """How often the token of ``coupled`` is one of its ``count`` drafts, f64[P], in DRAWS draws."""
    generator, size, found = np.random.default_rng(seed), target.shape, np.zeros(len(target))
    with np.errstate(divide="ignore"):
        for _ in range(DRAWS):
            least, tokens = np.full(size, np.inf, np.float32), []
            for _ in range(count):
                noise = generator.standard_exponential(size, np.float32)
                least = np.minimum(least, noise)
                tokens.append((noise / draft).argmin(-1))
            token = (least / target).argmin(-1)
            found += (np.array(tokens) == token).any(0)
    return found / DRAWS


def positions(pair: pairs.Pair, own: dict[str, Any], args: argparse.Namespace) -> list[dict]:
    """The rows of the first part."""
    drafter = drafters.make(target=pair.target.lm, **own, tree="chain:1", siblings="iid")
    if drafter.probs is None:  # heads have none for whole texts
        return []
    rows = []
    for temperature in args.temperatures:
        ids = [each.ids for each in pair.prompts[: args.texts]]
        texts = pairs.written(pair.target, ids, temperature, args)
        kept: dict[int, list[dict[str, np.ndarray]]] = {count: [] for count in COUNTS}
        found = law.places(pair.target.lm, drafter, pair.params(drafter), texts)
        for text, both in enumerate(found):
            at = [each ** (1 / temperature) for each in both]
            first, second = (each / each.sum(-1, keepdims=True) for each in at)
            for count in COUNTS:
                kept[count].append(accepted(first, second, count, text))
        for count, each in kept.items():
            means = {
                rule: float(np.concatenate([x[rule] for x in each]).mean()) for rule in each[0]
            }
            rows.append({"temperature": temperature, "drafts": count, **means})
        parts.say(f"{pair.name}: one position, temperature {temperature:g}")
    return rows


def shapes(pair: pairs.Pair, own: dict[str, Any], args: argparse.Namespace) -> list[dict]:
    """The rows of the second part."""
    methods, names = {}, {}
    for label, tree in SHAPES.items():
        for name, (siblings, rule) in (CHAINS if label == CHAIN else TREES).items():
            drafter = drafters.make(target=pair.target.lm, **own, tree=tree, siblings=siblings)
            methods[f"{label}: {name}"] = drafter, accept.load(rule)
            names[f"{label}: {name}"] = {"shape": label, "rule": name}
    keys = {"temperatures": tuple(args.temperatures), "batch_sizes": (args.batch,)}
    rows = parts.bench(pair, methods, args, "shapes ", **keys)
    kept = ("temperature", "block_efficiency", "speedup")
    return [
        names[row["method"]]
        | {name: row[name] for name in kept}
        | {"lossless": (row["lossless"] or {}).get("passed")}
        for row in rows
        if row["category"] is None
    ]


def prepared(name: str, files: Sequence[str], args: argparse.Namespace) -> tuple[pairs.Pair, dict]:
    """The pair, and the keys of its drafter. Raises UserError."""
    directory, drafter, model, prompt_file = files
    target = hf.load(directory)
    source = prompts_lib.PromptSource(
        names=(prompt_file,),
        first_turns=True,
        num_prompts=args.prompts,
        max_prompt_tokens=args.prompt_tokens,
        chat=prompts_lib.AUTO,
    )
    read = prompts_lib.read(source, target, lambda _: [], name=prompt_file).prompts
    return pairs.Pair(name, target, {}, read, [], {}, 0.0), {"name": drafter, "model": model}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--pair", action="append", required=True, help="NAME=TARGET,DRAFTER,MODEL,PROMPTS")
    add("--workdir", type=Path, required=True)
    add("--temperatures", type=float, nargs="+", default=(0.5, 1.0, 1.5))
    add("--new", type=int, default=128, help="new tokens of a text")
    add("--prompts", type=int, default=64, help="of the benches")
    add("--texts", type=int, default=32, help="that the target writes, for one position")
    add("--prompt-tokens", type=int, default=96, help="longer prompts are cut")
    add("--batch", type=int, default=8, help="rows of the benches")
    add("--repeats", type=int, default=1)
    args = parser.parse_args(argv)
    args.workdir = args.workdir.resolve()
    return args


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    known = json.loads(args.out.read_text()) if args.out.exists() else {"pairs": {}}
    for text in args.pair:
        name, _, files = text.partition("=")
        stopwatch = start(args)
        try:
            pair, own = prepared(name, files.split(","), args)
            found = {"positions": positions(pair, own, args), "shapes": shapes(pair, own, args)}
        except (UserError, ValueError) as error:
            raise SystemExit(f"several_drafts: {error}") from None
        facts = record(__file__, [without_folder(each) for each in argv], stopwatch)
        settings = {key: getattr(args, key) for key in ("new", "prompts", "texts", "batch")}
        found = checked(found, stopwatch, BENCH_TIMES)
        known["pairs"][name] = facts | {"settings": settings} | found
        write_json(args.out, known)


if __name__ == "__main__":
    main(sys.argv[1:])
