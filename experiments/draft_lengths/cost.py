"""What a controller costs by itself: rounds with the same drafts, with and without it.

    PYTHONPATH=. python experiments/draft_lengths/cost.py --target=DIR --draft=DIR --text=FILE

Controllers are set so that they never shorten a draft. Then every text has the same rounds, and the
time of a round differs only by what the controller computes, and by the loop and the branches that
make its drafts variable. All of them decode the same prompts in turns; the ratio of each turn to
the same turn without a controller, median and quartiles. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import checked, options, record, start, without_folder
from specjax import decode
from specjax.bench import methods
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method, begin
from specjax.data import text_files
from specjax.files import write_json
from specjax.models import hf

# Label -> a text that never ends a draft of GAMMA tokens early.
GAMMA = 4
TIMES = frozenset({"round_ms", "ratio", "quartiles"})
CONTROLS = {
    "none": "",
    "fixed": f"fixed:{GAMMA}",
    "threshold": "threshold:0",
    "entropy": "entropy:1000",
    "confidence": "confidence:0",
    "goodput": f"goodput:most={GAMMA},draft=0,verify=0",
    "goodput, open": f"goodput:most={GAMMA},draft=0,verify=0,rows=open",
}


def job_of(args: argparse.Namespace, target: hf.Loaded, batch: int) -> Job:
    """Prompts from places of the text that are far apart, greedy."""
    assert target.tokenizer is not None
    text = "".join(text_files.pieces(args.text))[: 200 * args.prompt * batch]
    ids = target.tokenizer.encode(text).ids
    prompts = [ids[i * len(ids) // batch :][: args.prompt] for i in range(batch)]
    settings = {"temperature": 0.0}
    new = args.new
    return Job(target.lm, target.params, prompts, settings, batch, new, (), seed=0, repeats=1)


def run(job: Job, method: Method, state: Any) -> tuple[float, np.ndarray]:
    """Seconds per round, and the drafted tokens of the rounds."""
    own = jax.block_until_ready(jax.tree.map(jnp.copy, state))
    began = time.perf_counter()
    after, records = decode.generate(
        job.target, method.drafter, method.accept, method.params, own, max_steps=job.max_new_tokens
    )
    jax.block_until_ready(after.tokens)
    seconds = time.perf_counter() - began
    drafted, emitted = (np.asarray(x) for x in (records.drafted, records.emitted))
    return seconds / int(emitted.any(1).sum()), drafted


def compare(args: argparse.Namespace, target: hf.Loaded, batch: int) -> list[dict[str, Any]]:
    """One row per controller that drafts as much as none."""
    job, made = job_of(args, target, batch), {}
    for label in args.controls:
        keys = {"name": "draft_model", "model": args.draft, "gamma": GAMMA}
        choice = MethodChoice(keys | {"control": CONTROLS[label]}, "chain", {})
        method = methods.build(
            target.lm, target.params, choice, label=label, seed=0, temperatures=(0.0,)
        )
        state = begin(job, method.drafter, method.params, range(batch), job.prompts)
        made[label] = method, jax.block_until_ready(state)
    drafted = {label: run(job, *each)[1] for label, each in made.items()}
    same = [n for n, each in drafted.items() if np.array_equal(each, drafted["none"])]
    if others := ", ".join(label for label in drafted if label not in same):
        print(f"batch {batch}: not compared, other drafts than without a controller: {others}")
    seconds: dict[str, list[float]] = {label: [] for label in same}
    for turn in range(args.turns):
        # Rotate the order.
        for place in range(len(same)):
            label = same[(turn + place) % len(same)]
            seconds[label].append(run(job, *made[label])[0])
    rows = []
    for label in same:
        ratios = np.array(seconds[label]) / np.array(seconds["none"])
        low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
        ms = 1e3 * float(np.median(seconds[label]))
        row = {"batch": batch, "control": label, "round_ms": ms, "ratio": middle}
        rows.append(row | {"quartiles": [low, high]})
    return rows


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.set_defaults(out=Path(__file__).with_name("cost.json"))
    parser.add_argument("--target", required=True, help="directory of the model")
    parser.add_argument("--draft", required=True, help="directory of its draft model")
    parser.add_argument("--text", required=True, type=Path, help="a text for prompts")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens to decode")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--controls", default=";".join(CONTROLS))
    args = parser.parse_args(argv)
    args.controls = args.controls.split(";")
    if "none" not in args.controls or not set(args.controls) <= set(CONTROLS):
        parser.error(f"--controls must have none, and others of {'; '.join(CONTROLS)}")
    stopwatch, target = start(args), hf.load(args.target)
    rows = []
    for batch in map(int, args.batches.split(",")):
        own = compare(args, target, batch)
        rows += own
        print(*own, sep="\n", flush=True)
        shown = [without_folder(argument) for argument in argv]
        facts = {"target": Path(args.target).name, "gamma": GAMMA, "rows": rows}
        facts |= record(__file__, shown, stopwatch)
        write_json(args.out, checked(facts, stopwatch, TIMES))


if __name__ == "__main__":
    main(sys.argv[1:])
