"""The experiments of the first papers on small targets, with theory beside each measured number.

    PYTHONPATH=. python experiments/papers/run.py --workdir=runs/papers \\
        --pair=code=assets/target,assets/draft,, --pair=stories=stories260K,,,tinystories.txt.xz

A pair is NAME=TARGET,DRAFT,PROMPTS,TEXT. Without DRAFT one is distilled on text of the target
(``trained_drafters``); without TEXT it is the embedded corpus, Python code; without PROMPTS they
are beginnings of lines of its held-out part. Tables of unigrams and bigrams are counted in the rest
of the text. Each pair is stored in ``results.json`` beside this file; other pairs stay as they are.

- Leviathan et al. 2023 (2211.17192): alpha by temperature; gamma 1 to 8 beside equation 1,
  theorem 3.8 (with a pass of one step, and with the measured cost of passes) and theorem 3.11;
  lenience, with the distance of its law; the time of outputs by their length.
- Chen et al. 2023 (2302.01318): K = 4 in two domains: a pair, or a category of prompts, is one.
- Miao et al. 2024 (SpecInfer, 2305.09781): how often the draft's best k tokens have the target's.
- alpha by class of token.

``alpha`` is by definition, over all places of texts that the target wrote (``bench.overlap``), and
all predictions are made from it; ``acceptance_rate`` is that of the loop. Operations are those of
weights (``theory.roofline``). The law is that of a token where the rule tests a draft token; the
token after a whole draft has the target's. Ten minutes per pair on two CPU cores (estimated from a
small run); run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import Stopwatch, checked, options, record, start, without_folder
from experiments.papers import further, law, tables
from experiments.papers.pairs import DRAFT, Pair, prepared
from experiments.papers.parts import GAMMA, TIMES, alphas, bench, beside_theory, say
from specjax import accept
from specjax.errors import UserError
from specjax.files import write_json
from specjax.theory import roofline


class Sizes(NamedTuple):
    """What the parts vary."""

    gammas: Sequence[int]
    temperatures: Sequence[float]  # 0 and 1 are among them
    leniences: Sequence[float]
    lengths: Sequence[int]  # new tokens; cut where the target has fewer positions


FULL = Sizes(range(1, 9), (0.0, 0.5, 1.0, 1.5), (1.0, 0.5, 0.3, 0.1), (32, 128, 384, 1024))
SMALL = Sizes((1, GAMMA), (0.0, 0.5, 1.0), (1.0, 0.3), (4, 16))


def chains(pair: Pair, found: list[dict[str, Any]], args: argparse.Namespace) -> list[dict]:
    """The draft model by gamma at temperature 0 and 1, and with ``GAMMA`` at the others."""
    rule = accept.load("chain")
    methods = {f"gamma {n}": (pair.drafter(DRAFT, n), rule) for n in args.sizes.gammas}
    rows = bench(pair, methods, args, "gammas", temperatures=(0.0, 1.0))
    one = {f"gamma {GAMMA}": methods[f"gamma {GAMMA}"]}
    others = [each for each in args.sizes.temperatures if each not in (0, 1)]
    rows += bench(pair, one, args, "temperatures", temperatures=others)
    known = {each["temperature"]: each for each in found if each["drafter"] == DRAFT}
    result = []
    for row in rows:
        of, category = known[row["temperature"]], row["category"]
        alpha = of["alpha"] if category is None else of["by_category"][category]["alpha"]
        result.append(beside_theory(row, DRAFT, alpha, pair))
    return result


def lenient(pair: Pair, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """The lenient rule for every kind of draft, and the shares of the draft's best tokens."""
    rows, shares = [], []
    for kind in pair.models:
        drafter = pair.drafter(kind, GAMMA)
        say(f"{pair.name}: law, {kind}")
        texts = pair.texts[1.0], pair.texts[0.0]
        parts = (pair.target.lm, drafter, pair.params(drafter))
        exact = law.measured(*parts, *texts, args.sizes.leniences)
        shares += [{"drafter": kind, **each} for each in exact["top"]]
        methods = {
            f"{kind}, lenience {each:g}": (drafter, accept.load("lenient", lenience=each))
            for each in args.sizes.leniences
        }
        found = bench(pair, methods, args, f"{kind} lenience", temperatures=(0.0, 1.0))
        of = dict(zip(methods, exact["lenience"], strict=True))
        for row in (each for each in found if each["category"] is None):
            here = of[row["method"]]
            greedy = row["temperature"] == 0
            alpha = here["alpha_greedy"] if greedy else here["alpha"]
            kept = ("total_variation", "kl", "jensen_shannon")
            distances = {key: None if greedy else here[key] for key in kept}
            own = {"lenience": here["lenience"], **distances}
            rows.append(beside_theory(row, kind, alpha, pair) | own)
    return rows, shares


def lengths(pair: Pair, found: list[dict[str, Any]], args: argparse.Namespace) -> list[dict]:
    """The wall time of greedy outputs by their length, without the prompt's pass."""
    some = pair.prompts[:2]
    room = pair.target.config.longest_text - max(len(each.ids) for each in some)
    alpha = next(r["alpha"] for r in found if (r["drafter"], r["temperature"]) == (DRAFT, 0))
    methods = {DRAFT: (pair.drafter(DRAFT, GAMMA), accept.load("chain"))}
    rows = []
    for size in sorted({min(each, room) for each in args.sizes.lengths}):
        keys = {"prompts": some, "max_new_tokens": size, "ignore_eos": True}
        [row, *_] = bench(pair, methods, args, f"length {size} ", **keys)
        each = beside_theory(row, DRAFT, alpha, pair)
        seconds = size / each["tokens_per_second"], size / each["plain_tokens_per_second"]
        rows.append(each | {"new": size, "seconds": seconds[0], "plain_seconds": seconds[1]})
    return rows


def study(pair: Pair, args: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    say(f"{pair.name}: alpha")
    found = alphas(pair)
    lenience, shares = lenient(pair, args)
    settings = ("new", "prompts", "texts", "repeats", "draft_steps", "generated")
    return {
        "settings": {name: getattr(args, name) for name in settings},
        "parameters": roofline.parameters(pair.target.config),
        "c_hat": pair.work,
        "alphas": found,
        "chains": chains(pair, found, args),
        "lenience": lenience,
        "lengths": lengths(pair, found, args),
        "tops": shares,
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments; ``pairs`` are the files by name, ``sizes`` what the parts vary."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--pair", action="append", required=True, help="NAME=TARGET,DRAFT,PROMPTS,TEXT")
    add("--workdir", type=Path, required=True)
    add("--new", type=int, default=96, help="new tokens of a text, but for lengths")
    add("--prompts", type=int, default=16, help="of the benches")
    add("--texts", type=int, default=48, help="that the target writes, for alpha and the laws")
    add("--prompt-tokens", type=int, default=96, help="longer prompts of a file are cut")
    add("--repeats", type=int, default=3, help="of the benches")
    add("--draft-steps", type=int, default=600, help="of a draft that is trained")
    add("--generated", type=int, default=2048, help="prompts that the target continues for it")
    add("--small", action="store_true", help="few gammas, leniences and lengths, for a test")
    add("--further", action="store_true", help="the parts of further.py, in place of the others")
    add("--draft", action="append", default=[], help="WIDTH=DIR: a draft model of another size")
    add("--checkpoint", action="append", default=[], help="STEP=DIR, of one training; the target")
    args = parser.parse_args(argv)
    args.sizes, args.pairs = SMALL if args.small else FULL, {}
    args.drafts, args.checkpoints = further.named(args.draft), further.named(args.checkpoint)
    for text in args.pair:
        name, _, files = text.partition("=")
        if not name or files.count(",") != 3:
            raise UserError(f"--pair is {text!r}; it must be NAME=TARGET,DRAFT,PROMPTS,TEXT")
        args.pairs[name] = [each.strip() for each in files.split(",")]
    args.workdir.mkdir(parents=True, exist_ok=True)
    args.workdir = args.workdir.resolve()
    return args


def store(
    result: dict[str, Any],
    part: str,
    name: str,
    found: dict[str, Any],
    argv: Sequence[str],
    args: argparse.Namespace,
    stopwatch: Stopwatch,
) -> None:
    """Writes what was measured, with the command, the machine and the date."""
    head = record(__file__, [without_folder(each) for each in argv], stopwatch)
    result.setdefault(part, {})[name] = checked({**head, **found}, stopwatch, TIMES)
    write_json(args.out, result)


def run(argv: Sequence[str]) -> None:
    """Measures every pair."""
    args = parse(argv)
    start(args)  # refuses before the training
    result = json.loads(args.out.read_text()) if args.out.exists() else {"pairs": {}}
    part, known = "further" if args.further else "pairs", result["pairs"]
    for name, files in args.pairs.items():
        pair = prepared(name, files, args)
        stopwatch = start(args)
        found = further.study(pair, known[name], args) if args.further else study(pair, args)
        store(result, part, name, found, argv, args, stopwatch)
    if args.checkpoints:
        stopwatch = start(args)
        store(result, "further", "checkpoints", further.checkpoints(args), argv, args, stopwatch)
    print(tables.tables(result))


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    try:
        run(argv)
    except UserError as error:
        raise SystemExit(f"papers: {error}") from None


if __name__ == "__main__":
    main(sys.argv[1:])
