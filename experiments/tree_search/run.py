"""Sequoia: measure acceptance and times, choose the tree, and compare prediction and measurement.

    # the pair that the quickstart trained
    PYTHONPATH=. python experiments/tree_search/run.py
    PYTHONPATH=. python experiments/tree_search/run.py --target=DIR --draft-layers=2 \\
        --prompts=FILE.txt
    PYTHONPATH=. python experiments/tree_search/run.py --target=DIR --draft=DIR \\
        --prompts=FILE.jsonl

About 2 minutes on 2 CPU cores for models of a million parameters. Chen et al. 2024 (2402.12374),
with the functions of this project:

1. acceptance P[rank]: decode with a tree of one level and ``--width`` siblings and the rule
   ``recursive``, and count the accepted ranks, for siblings drawn without replacement and for
   independent ones.
2. times: a target pass over n tokens, and drafting one level of the chosen tree (measured again
   until the choice does not change), both as multiples of a pass over one token.
3. ``search.best_size`` chooses. The tree goes to ``tree.json``, for ``config.drafter.tree``.
4. decode with a chain, k-ary trees, the best tree with as many nodes as the largest of them, and
   the chosen tree, interleaved with plain decoding: predicted and measured tokens per round, and
   the speed-up. A speed-up below 1 means that speculation is slower with this pair on this machine.

``--draft-layers=k`` takes the target's first k layers as the draft model. Writes ``results.json``
beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from experiments.common import BENCH_TIMES, checked, options, start
from experiments.tree_search.study import Options, study
from specjax.bench.passes import Job
from specjax.bench.results import machine
from specjax.data import prompts as prompts_lib
from specjax.errors import UserError
from specjax.files import write_json
from specjax.models import hf
from specjax.topology import shapes
from specjax.topology.shapes import Topology

TIMES = BENCH_TIMES | {"verify_ms", "draft_level", "choices"}
QUICKSTART = Path("runs/quickstart")
STDLIB_TOKENS = 64  # of each prompt of the set stdlib


def first_layers(target: hf.Loaded, layers: int, folder: Path) -> hf.Loaded:
    """A model of the target's first layers, by way of a directory. Raises UserError."""
    if not 0 < layers < target.config.num_layers:
        raise UserError(
            f"draft-layers is {layers}; the target has {target.config.num_layers}, so give fewer"
        )
    config = dataclasses.replace(target.config, num_layers=layers)
    kept = {index: layer for index, layer in target.params["layers"].items() if int(index) < layers}
    hf.save(folder, config, {**target.params, "layers": kept}, target.tokenizer)
    return hf.load(folder)


def load_pair(args: argparse.Namespace) -> tuple[hf.Loaded, hf.Loaded]:
    """(target, draft model). Raises UserError."""
    if not args.target:
        if not (QUICKSTART / "draft").is_dir():
            raise UserError(
                f"there is no trained pair in {QUICKSTART}; run python -m specjax.run "
                "--config=configs/quickstart.py:train first, or give --target with --draft or "
                "--draft-layers"
            )
        args.target, args.draft = QUICKSTART / "target", args.draft or QUICKSTART / "draft"
    if bool(args.draft) == bool(args.draft_layers):
        raise UserError(
            "give either --draft (a directory) or --draft-layers (how many of the target's layers)"
        )
    target = hf.load(args.target)
    if target.tokenizer is None:
        raise UserError(f"{target.directory} has no tokenizer.json; text needs one")
    if not args.draft_layers:
        return target, hf.load(args.draft)
    with tempfile.TemporaryDirectory() as folder:
        return target, first_layers(target, args.draft_layers, Path(folder) / "draft")


def load_prompts(args: argparse.Namespace, target: hf.Loaded) -> list[list[int]]:
    """Token ids of each prompt. Raises UserError."""

    def answer(_: Sequence) -> list[list[int]]:
        raise UserError("these prompts have several turns; give prompts with one turn")

    source = prompts_lib.PromptSource(
        names=(args.prompts,),
        num_prompts=args.num_prompts,
        prompt_tokens=STDLIB_TOKENS,
        seed=args.seed,
    )
    chosen = prompts_lib.read(source, target, answer, name=args.prompts)
    return [prompt.ids for prompt in chosen.prompts]


def show(measured: dict) -> None:
    """Prints the acceptance, a line per tree, and the prediction for the chosen tree."""
    for siblings, vector in measured["acceptance"].items():
        values = " ".join(f"{x:.3f}" for x in vector["acceptance"])
        print(f"P, {siblings}: {values} ({vector['rounds']} rounds)")
    heads = ("expected", "measured", "tokens/s", "speed-up", "predicted")
    print(f"{'tree':12}{'nodes':>6}{'depth':>6}" + "".join(f"{head:>10}" for head in heads))
    for row in measured["rows"]:
        expected = "-" if row["expected_tokens"] is None else f"{row['expected_tokens']:.2f}"
        print(
            f"{row['name']:12}{row['nodes']:6}{row['depth']:6}"
            f"{expected:>10}{row['measured_tokens']:10.2f}"
            f"{row['tokens_per_second']:10.0f}{row['speedup']:10.2f}{row['predicted_speedup']:10.2f}"
        )
    tokens, speedup = measured["promise"]["expected_tokens"], measured["promise"]["speedup"]
    print(f"chosen: predicted {tokens:.2f} tokens per round and a speed-up of {speedup:.2f}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--target", help="directory of the target; default: the quickstart's pair")
    add("--draft", help="directory of the draft model")
    add("--draft-layers", type=int, default=0, help="take the target's first layers instead")
    stdlib = prompts_lib.STDLIB
    add("--prompts", default=stdlib, help='.txt, .jsonl with a "prompt" key, or stdlib')
    add("--num-prompts", type=int, default=32)
    add("--temperature", type=float, default=0.6)
    add("--new", type=int, default=96, help="new tokens of each prompt")
    add("--batch", type=int, default=1)
    add("--width", type=int, default=8, help="siblings whose acceptance is measured")
    add("--depth", type=int, default=10, help="depth of the deepest tree that may be chosen")
    sizes = [1, 2, 4, 8, 16, 32, 64]
    add("--sizes", type=int, nargs="+", default=sizes, help="tokens verified at once")
    add("--k-ary", nargs="+", default=["2x2", "2x2x2", "4x4"])
    add("--repeats", type=int, default=5)
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parse(argv)
    target, draft = load_pair(args)
    prompts, stopwatch = load_prompts(args, target), start(args)
    job = Job(
        target=target.lm,
        params=target.params,
        prompts=prompts,
        settings={"temperature": args.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        batch_size=args.batch,
        max_new_tokens=args.new,
        eos_id=target.config.eos_token_id,
        seed=args.seed,
        repeats=args.repeats,
    )
    options = Options(args.width, args.depth, sorted({1, *args.sizes}), args.k_ary)
    measured = study(job, draft, options)
    command = sys.argv if argv is None else [str(__file__), *argv]
    layers = f"its first {args.draft_layers} layers" if args.draft_layers else draft.directory
    result = {
        "command": shlex.join(["python", *command]),
        "machine": machine(),
        "others_cpu": round(stopwatch.others_cpu, 3),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(stopwatch.seconds),
        "versions": {name: version(name) for name in ("jax", "flax")},
        "pair": {
            "target": f"{target.directory}, {target.config.num_layers} layers",
            "draft": layers,
        },
        "prompts": len(prompts),
        "temperature": args.temperature,
        "batch": args.batch,
        **measured,
    }
    write_json(args.out, checked(result, stopwatch, TIMES))
    shapes.save(
        args.out.with_name("tree.json"),
        Topology(tuple(measured["tree"])),
        acceptance=measured["acceptance"],
        temperature=args.temperature,
        machine=machine(),
    )
    show(measured)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
