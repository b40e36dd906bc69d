"""Sequoia from end to end: measure acceptance and times, choose the tree, and see whether it keeps its promise.

    PYTHONPATH=. python experiments/tree_search/run.py                        (the pair that the quickstart trained)
    PYTHONPATH=. python experiments/tree_search/run.py --target=DIR --draft-layers=2 --prompts=FILE.txt
    PYTHONPATH=. python experiments/tree_search/run.py --target=DIR --draft=DIR --prompts=FILE.jsonl

About 2 minutes on 2 CPU cores for models of a million parameters. Chen et al. 2024 (2402.12374), with this project's functions:

1. acceptance P[rank]: a tree of one level and ``--width`` siblings is decoded with the rule ``recursive``, and in every round
   the rank that stood is noted; for siblings drawn without replacement, and for independent ones.
2. times: a target pass over n tokens, and a level of drafting (of the tree chosen last: it is measured again until the
   choice stays), both as multiples of a pass over one token.
3. ``tree_search.best_size`` chooses; the tree goes to ``tree.json``, which ``config.drafter.tree`` reads.
4. a chain, k-ary trees, the best tree of as many nodes as the largest of them, and the tree chosen are decoded in turns with
   plain decoding: predicted against measured tokens a round, and the speed-up. Below 1, speculation does not pay with this
   pair on this machine.

``--draft-layers=k`` takes the target's own first k layers as the draft model. Writes ``results.json`` beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from experiments.vs_transformers.run import busy, machine
from specjax import accept, decode
from specjax.bench import measuring, passes
from specjax.bench import summaries as rows_lib
from specjax.bench.passes import Job, Method
from specjax.data import prompts as prompts_lib
from specjax.drafters.draft_models import draft_tree
from specjax.errors import UserError
from specjax.models import hf
from specjax.run import resolve
from specjax.topology import search, shapes
from specjax.topology.shapes import Topology
from specjax.types import ModelParams

QUICKSTART = Path("runs/quickstart")


def cut(target: hf.Loaded, layers: int, folder: Path) -> hf.Loaded:
    """The target's first layers as a model of their own, by way of a directory."""
    if not 0 < layers < target.config.num_layers:
        raise UserError(
            f"draft-layers is {layers}; the target has {target.config.num_layers}, so give fewer"
        )
    config = dataclasses.replace(target.config, num_layers=layers)
    kept = {index: layer for index, layer in target.params["layers"].items() if int(index) < layers}
    hf.save(folder, config, {**target.params, "layers": kept}, target.tokenizer)
    return hf.load(folder)


def method(
    job: Job, draft: hf.Loaded, tree: Topology, name: str, siblings: str = "without_replacement"
) -> Method:
    """Drafting that tree, accepted by ``recursive``."""
    drafter = draft_tree.make(
        job.target, model=draft.lm, params=draft.params, tree=tree, siblings=siblings
    )
    return Method(name, drafter, accept.load("recursive"), ModelParams(job.params, draft.params))


def acceptance(job: Job, draft: hf.Loaded, width: int, siblings: str) -> tuple[np.ndarray, int]:
    """P f64[width] on the text that the target writes, and the number of rounds it was counted on."""
    made, ranks = method(job, draft, shapes.full((width,)), siblings, siblings), []
    for rows, prompts in passes.batches(job):
        state = passes.begin(job, made.drafter, made.params, rows, prompts)
        for _, info in decode.stream(
            job.target, made.drafter, made.accept, made.params, state, eos_id=job.eos_id
        ):
            ranks.append(search.accepted_ranks(info))
    seen = np.concatenate(ranks)
    return search.acceptance_vector(seen, width), seen.size


def level_time(job: Job, draft: hf.Loaded, tree: Topology) -> float:
    """Seconds of drafting one level of that tree."""
    return passes.time_of_draft(job, method(job, draft, tree, "times")) / tree.depth


def choose(job: Job, draft: hf.Loaded, p: np.ndarray, verify: dict[int, float], depth: int):
    """The best tree (``verify`` in seconds), the drafting time of its levels, and what was chosen on the way."""
    one, tree, steps = verify[1], shapes.chain(min(4, depth)), []
    relative = {n: seconds / one for n, seconds in verify.items()}
    while True:  # a level's time depends on its width, so on the choice
        level = level_time(job, draft, tree) / one
        choice = search.best_size(p, relative, level, range(1, depth + 1))
        steps.append(
            {
                "level": level,
                "nodes": choice.nodes,
                "depth": choice.topology.depth,
                "speedup": choice.speedup,
            }
        )
        if choice.topology == tree or len(steps) == 4:
            return choice, level, steps
        tree = choice.topology


def best_chain(p: np.ndarray, verify: dict[int, float], level: float, depth: int) -> Topology:
    """The chain that promises most, by the same times; between the sizes that were measured, verify is a straight line."""
    sizes, times = np.array(list(verify)), np.array(list(verify.values())) / verify[1]

    def promise(gamma: int) -> float:
        cost = np.interp(gamma + 1, sizes, times) + gamma * level
        return search.expected_tokens(shapes.chain(gamma), p) / cost

    return shapes.chain(max(range(1, min(depth, int(sizes[-1]) - 1) + 1), key=promise))


def study(
    job: Job, draft: hf.Loaded, width: int, depth: int, sizes: Sequence[int], k_ary: Sequence[str]
) -> dict:
    """All of it, as it goes into results.json; under "tree" the parents of the tree chosen."""
    vectors = {}
    for siblings in ("without_replacement", "iid"):
        p, rounds = acceptance(job, draft, width, siblings)
        vectors[siblings] = {"acceptance": p.tolist(), "none": 1 - p.sum(), "rounds": rounds}
    p = np.array(vectors["without_replacement"]["acceptance"])
    verify = {n: passes.time_of_verify(job, None, n) for n in sizes}
    chain_level = level_time(job, draft, shapes.chain(min(4, depth))) / verify[1]
    choice, level, steps = choose(job, draft, p, verify, depth)
    chain = best_chain(p, verify, chain_level, depth)
    trees = {f"chain:{chain.nodes}": chain} | {spec: shapes.parse(spec) for spec in k_ary}
    nodes = max(tree.nodes for tree in trees.values())
    trees[f"optimal:{nodes}"] = search.optimal(p, nodes, depth)[
        0
    ]  # whatever it costs: against k-ary of that size
    trees["chosen"] = choice.topology
    first = {
        tree: name for name, tree in reversed(trees.items())
    }  # a tree is measured once, under its first name
    methods = [method(job, draft, tree, name) for tree, name in first.items()]
    measuring.warm([job], methods)
    measured = {
        row["method"]: row
        for row in rows_lib.measured_rows(job, methods, measuring.measure(job, methods))
    }
    rows = []
    for name, tree in trees.items():
        row = measured[first[tree]]
        promised = search.expected_tokens(tree, p) if tree.branching <= width else None
        rows.append(
            {"name": name, "nodes": tree.nodes, "depth": tree.depth, "expected_tokens": promised}
            # What the end of a text cuts off was accepted all the same: the model speaks of whole rounds.
            | {"measured_tokens": 1 + row["accepted_per_round"]}
            | {
                k: row[k]
                for k in (
                    "block_efficiency",
                    "tokens_per_second",
                    "autoregressive_tokens_per_second",
                )
            }
            | {
                k: row[k]
                for k in (
                    "speedup",
                    "predicted_speedup",
                    "time_split",
                    "rounds",
                    "tokens",
                    "lossless",
                )
            }
        )
    return {
        "acceptance": vectors,
        "verify_ms": {n: 1e3 * seconds for n, seconds in verify.items()},
        "draft_level": {"chain": chain_level, "chosen": level},
        "choices": steps,
        "tree": list(choice.topology.parents),
        "promise": {"expected_tokens": choice.expected, "speedup": choice.speedup},
        "rows": rows,
    }


def pair(args: argparse.Namespace, folder: Path) -> tuple[hf.Loaded, hf.Loaded]:
    """Target and draft model. Raises UserError, also where there is nothing to load yet."""
    if not args.target:
        if not (QUICKSTART / "draft").is_dir():
            raise UserError(
                f"there is no trained pair in {QUICKSTART}; run python -m specjax.run --config=configs/quickstart.py first, "
                "or give --target with --draft or --draft-layers"
            )
        args.target, args.draft = QUICKSTART / "target", args.draft or QUICKSTART / "draft"
    if bool(args.draft) == bool(args.draft_layers):
        raise UserError(
            "give either --draft (a directory) or --draft-layers (how many of the target's layers)"
        )
    target = resolve.load_target(ConfigDict({"target": str(args.target)}))
    return target, cut(
        target, args.draft_layers, folder / "draft"
    ) if args.draft_layers else hf.load(args.draft)


def one_turn(asked: Sequence) -> list[list[int]]:
    """No conversations here."""
    raise UserError("these prompts have several turns; give some of one turn")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="directory of the target; default: the quickstart's pair")
    parser.add_argument("--draft", help="directory of the draft model")
    parser.add_argument(
        "--draft-layers",
        type=int,
        default=0,
        help="take so many of the target's first layers instead",
    )
    parser.add_argument(
        "--prompts", default=prompts_lib.STDLIB, help='.txt, .jsonl with a "prompt" key, or stdlib'
    )
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--new", type=int, default=96, help="new tokens of each prompt")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--width", type=int, default=8, help="siblings whose acceptance is measured"
    )
    parser.add_argument("--depth", type=int, default=10, help="the deepest tree that may be chosen")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32, 64],
        help="tokens verified at once",
    )
    parser.add_argument("--k-ary", nargs="+", default=["2x2", "2x2x2", "4x4"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(argv)

    began, others = time.perf_counter(), busy()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = pair(args, Path(folder))
    asked = {
        "prompt": "",
        "prompts": args.prompts,
        "num_prompts": args.num_prompts,
        "prompt_tokens": 64,
    }
    config = ConfigDict(asked | {"data_dir": "", "seed": args.seed, "max_new_tokens": args.new})
    prompts = prompts_lib.read(config, target, one_turn).prompts
    settings = {"temperature": args.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    job = Job(
        target.lm, target.params, [p.ids for p in prompts], settings, args.batch, args.new,
        target.config.eos_token_id, args.seed, args.repeats,
    )  # fmt: skip
    measured = study(job, draft, args.width, args.depth, sorted({1, *args.sizes}), args.k_ary)
    others = (busy() - others) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    result = {
        "command": shlex.join(
            ["python", *sys.argv] if argv is None else ["python", str(__file__), *argv]
        ),
        "machine": machine(),
        "others_cpu": round(others, 3),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - began),
        "versions": {name: version(name) for name in ("jax", "flax")},
        "pair": {
            "target": f"{target.directory}, {target.config.num_layers} layers",
            "draft": f"its first {args.draft_layers} layers"
            if args.draft_layers
            else draft.directory,
        },
        "prompts": len(prompts),
        "temperature": args.temperature,
        "batch": args.batch,
        **measured,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    source = {
        "acceptance": measured["acceptance"],
        "temperature": args.temperature,
        "machine": machine(),
    }
    shapes.save(args.out.with_name("tree.json"), Topology(tuple(measured["tree"])), **source)

    for siblings, vector in measured["acceptance"].items():
        print(
            f"P, {siblings}: {' '.join(f'{x:.3f}' for x in vector['acceptance'])} ({vector['rounds']} rounds)"
        )
    print(
        f"{'tree':12}{'nodes':>6}{'depth':>6}{'expected':>10}{'measured':>10}{'tokens/s':>10}{'speed-up':>10}{'predicted':>10}"
    )
    for row in measured["rows"]:
        expected = "-" if row["expected_tokens"] is None else f"{row['expected_tokens']:.2f}"
        print(
            f"{row['name']:12}{row['nodes']:6}{row['depth']:6}{expected:>10}{row['measured_tokens']:10.2f}"
            f"{row['tokens_per_second']:10.0f}{row['speedup']:10.2f}{row['predicted_speedup']:10.2f}"
        )
    promise = measured["promise"]
    print(
        f"chosen: promises {promise['expected_tokens']:.2f} tokens a round and a speed-up of {promise['speedup']:.2f}"
    )


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
