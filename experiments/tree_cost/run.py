"""The cost of a round without the target's forward: tree mask, acceptance, bookkeeping, commit.

    PYTHONPATH=. python experiments/tree_cost/run.py            (about 2 minutes on 2 CPU cores)

The target has GPT-2's shape with 32768 tokens (12 layers, 768 wide, 12 heads, float32, random
weights). The draft is a tree of 64 nodes, the same in every round, so it costs no time. Measured:

- ``forward_*``: passes over 1 token, over chains, and over the tree with its pending token. The
  tree minus the chain of the same size is the cost of the mask.
- ``greedy_*``: a whole ``speculative_step`` at temperature 0, and each of its parts apart from the
  forward. Together they should take at most 5 % of the forward.
- ``sampled_*``: from logits to verdict at temperature 1, including softmax, for each rule, on
  distributions that overlap by about a half; the draft tokens are drawn from the draft's probs.
  ``softmax`` is the part that all of them share.

Every number is the median of loops that run in turns and whose iterations depend on each other.
Shares are of the forward of the whole tree and of one token. Writes ``results.json`` beside this
file. Run it on an idle machine: ``others_cpu`` is the share of it that other processes used.
"""

from __future__ import annotations

import dataclasses
import datetime
import shlex
import statistics
import sys
from importlib.metadata import version

import numpy as np

from experiments.common import GPT2, checked, options, start
from experiments.loops import Loop, clock, forward
from experiments.tree_cost import parts
from experiments.tree_cost.parts import RULES
from specjax.bench.results import machine
from specjax.files import write_json
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.tree import block_layout
from specjax.types import DETERMINISTIC

TARGET = dataclasses.replace(GPT2, vocab_size=32768)
TIMES = frozenset({"ms", "all_ms", "of_tree_forward", "of_one_token_forward"})
CASES = 3  # drafts of each kind of siblings


def summarise(seconds: dict[str, list[float]], size: int) -> list[dict]:
    """The rows of results.json: the medians, and differences and sums of them."""
    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    whole, one = median["forward_tree"], median["forward_chain_1"]
    for more, less in (("greedy_step", "forward_tree"), ("forward_tree", f"forward_chain_{size}")):
        # The samples of a pair are next to each other in time.
        pairs = zip(seconds[more], seconds[less], strict=True)
        median[f"{more} less {less}"] = statistics.median(a - b for a, b in pairs)
    median["greedy parts together"] = sum(
        median[f"greedy_{part}"] for part in ("accept", "bookkeeping", "commit")
    )
    for name in RULES:
        median[f"{name} less softmax"] = median[f"sampled_{name}"] - median["softmax"]
    return [
        {"name": n, "ms": 1e3 * s, "of_tree_forward": s / whole, "of_one_token_forward": s / one}
        | ({"all_ms": [1e3 * x for x in seconds[n]]} if n in seconds else {})
        for n, s in median.items()
    ]


def study(
    config: TransformerConfig,
    tree: shapes.Topology,
    batch: int,
    context: int,
    iterations: int,
    repeats: int,
) -> dict:
    """All measurements, as they go into results.json."""
    one = parts.prepare(config, tree, batch, context)
    cases = {
        kind: [parts.drawn(tree, batch, kind, seed, one.vocab) for seed in range(CASES)]
        for kind in set(RULES.values())
    }
    size = tree.nodes + 1
    chains = {f"forward_chain_{n}": (n, None) for n in (1, 8, 64, size)}
    trees = {"forward_tree": (size, block_layout(one.draft))}
    loops: dict[str, tuple[Loop, int]] = {
        name: (forward(one.target, one.params, one.state, n, layout, iterations), iterations)
        for name, (n, layout) in {**chains, **trees}.items()
    }
    loops |= parts.greedy_loops(one, cases[DETERMINISTIC][0], iterations)
    loops |= parts.sampled_loops(one, cases, iterations)
    accepted = {
        name: float(np.mean([total[0] for total in loops[f"sampled_{name}"][0]()])) / iterations
        for name in RULES
    }
    return {"rows": summarise(clock(loops, repeats), size), "accepted_per_round": accepted}


def show(measured: dict, others_cpu: float) -> None:
    """Prints the rows."""
    print(f"{'':32}{'ms':>9}  of the tree's forward  of one token's")
    for row in measured["rows"]:
        shares = f"{row['of_tree_forward']:14.1%}{row['of_one_token_forward']:16.1%}"
        print(f"{row['name']:32}{row['ms']:9.2f}{shares}")
    counts = measured["accepted_per_round"].items()
    print("accepted per round:", ", ".join(f"{name} {count:.2f}" for name, count in counts))
    print(f"other processes used {others_cpu:.0%} of the machine")


def main() -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--batch", type=int, default=1)
    add("--tree", default="4x3x2x1", help="see specjax.topology.shapes.parse; default: 64 nodes")
    add("--context", type=int, default=256, help="tokens of the text before the round")
    add("--turns", type=int, default=4, help="passes in a loop of forwards; 10 times for parts")
    add("--repeats", type=int, default=9)
    add("--layers", type=int, default=TARGET.num_layers)
    args = parser.parse_args()

    config, tree = dataclasses.replace(TARGET, num_layers=args.layers), shapes.parse(args.tree)
    stopwatch = start(args)
    measured = study(config, tree, args.batch, args.context, args.turns, args.repeats)
    others = stopwatch.others_cpu
    shape = f"{args.layers} layers, 768 wide, 12 heads, vocabulary 32768"
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "others_cpu": round(others, 3),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(stopwatch.seconds),
        "versions": {name: version(name) for name in ("jax", "flax")},
        "model": f"random GPT-2 ({shape}), float32",
        "batch": args.batch,
        "context": args.context,
        "tree": {"spec": args.tree, "nodes": tree.nodes, "depth": tree.depth},
        **measured,
    }
    write_json(args.out, checked(result, stopwatch, TIMES))
    show(measured, others)


if __name__ == "__main__":
    main()
