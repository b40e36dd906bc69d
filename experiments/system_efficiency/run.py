"""The share of the speed-up predicted by theory that the compiled loop delivers.

    PYTHONPATH=. python experiments/system_efficiency/run.py         (8 minutes on 2 CPU cores)

The target has GPT-2's shape (12 layers, 768 wide, vocabulary 50257), the draft model 2 layers of
width 256; float32, random weights, batch 1, greedy. The draft model really runs, and its tokens are
then replaced so that each is accepted with a chosen probability (drafter ``controlled``). So every
length and every acceptance rate can be measured without training. For each:

    system efficiency = measured speed-up / predicted speed-up,
    predicted = tokens per round x (time of a one-token pass) / (time to draft + time to verify),
    each measured alone,

all of it interleaved with plain decoding (``specjax.bench``). ``rest_ms`` is the time of a round
without drafting and verifying: acceptance, commit, bookkeeping; ``plain_rest_ms`` is the time of a
token of plain decoding without its pass. Writes ``results.json`` beside this file. Run it on an
idle machine.
"""

from __future__ import annotations

import dataclasses
import shlex
import statistics
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.common import BENCH_TIMES, GPT2, checked, options, start
from specjax import accept, drafters
from specjax.bench import measuring, results, summaries, timing
from specjax.bench.passes import Job, Method
from specjax.files import write_json
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.types import ModelParams

DRAFT = dataclasses.replace(
    GPT2,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
)
TIMES = BENCH_TIMES | {"round_ms", "rest_ms", "plain_ms", "plain_rest_ms"}
SMALL = {  # the shape of both models with --small
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}
# Seconds of each sample of a part: a pass takes twenty milliseconds here.
SAMPLE_SECONDS, SMALL_SAMPLE_SECONDS = 0.4, 0.05


def methods(
    job: Job, draft: TransformerConfig, gammas: Sequence[int], rates: Sequence[float]
) -> list[list[Method]]:
    """One method per rate for each gamma; these share a drafter, so also the compiled programs."""
    model, params = lm.from_config(draft), lm.init_params(draft, jax.random.key(1))
    result = []
    for gamma in gammas:
        inner = drafters.make("draft_model", job.target, model=model, params=params, gamma=gamma)
        drafter = drafters.make("controlled", job.target, drafters=[inner])
        draft_params = drafter.init_params(jax.random.key(0))
        result.append(
            [
                Method(
                    f"gamma {gamma}, acceptance {rate:g}",
                    drafter,
                    accept.load("chain"),
                    ModelParams(job.params, draft_params | {"rate": jnp.float32(rate)}),
                )
                for rate in rates
            ]
        )
    return result


def measured_rows(job: Job, methods: Sequence[Method], rates: Sequence[float]) -> list[dict]:
    """The rows of one gamma, with the time of a round and of a plain token outside their parts."""
    measuring.warm([job], methods[:1])  # all methods run the same programs
    measured = measuring.measure(job, methods)
    plain = statistics.median(p.loop / p.loops for p in measured.plain)
    rows = summaries.measured_rows(job, methods, measured)
    for row, rate, runs in zip(rows, rates, measured.methods, strict=True):
        cost = row["costs_ms"]
        whole = 1e3 * statistics.median(p.loop / p.loops for p in runs)
        row |= {
            "rate": rate,
            "round_ms": whole,
            "rest_ms": whole - cost["draft"] - cost["verify"],
            "plain_ms": 1e3 * plain,
            "plain_rest_ms": 1e3 * plain - cost["step"],
        }
    return rows


def make_job(config: TransformerConfig, prompts: int, new: int, repeats: int) -> Job:
    """Greedy decoding of random prompts with random weights."""
    random = np.random.default_rng(0)
    return Job(
        target=lm.from_config(config),
        params=lm.init_params(config, jax.random.key(0)),
        prompts=[
            random.integers(0, config.vocab_size, 24 + 8 * i).tolist() for i in range(prompts)
        ],
        settings={"temperature": 0.0},
        batch_size=1,
        max_new_tokens=new,
        eos_id=(),
        seed=0,
        repeats=repeats,
    )


def show(rows: Sequence[dict], others_cpu: float) -> None:
    """Prints the rows, and the one with the least system efficiency."""
    for row in rows:
        print(
            f"{row['method']:26} tau {row['block_efficiency']:.2f}  {row['speedup']:.2f}x of "
            f"{row['predicted_speedup']:.2f}x: {row['system_efficiency']:.3f}  "
            f"rest {row['rest_ms']:.2f} of {row['round_ms']:.1f} ms"
        )
    worst = min(rows, key=lambda row: row["system_efficiency"])
    least = f"least: {worst['system_efficiency']:.3f} ({worst['method']})"
    print(f"{least}; other processes {others_cpu:.0%}")


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--gammas", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.8, 0.95])
    add("--new", type=int, default=64, help="new tokens per prompt")
    add("--prompts", type=int, default=2)
    add("--repeats", type=int, default=3)
    add("--small", action="store_true", help="tiny models, for a test")
    args = parser.parse_args(argv)

    timing.MIN_SECONDS = SMALL_SAMPLE_SECONDS if args.small else SAMPLE_SECONDS
    small = SMALL if args.small else {}
    target, draft = (dataclasses.replace(config, **small) for config in (GPT2, DRAFT))
    job = make_job(target, args.prompts, args.new, args.repeats)
    stopwatch, rows = start(args), []
    every = methods(job, draft, args.gammas, args.rates)
    with Console(stderr=True).status("") as status:
        for gamma, some in zip(args.gammas, every, strict=True):
            status.update(f"gamma {gamma}")
            rows += measured_rows(job, some, args.rates)
            jax.clear_caches()
    result = results.head() | {
        "command": shlex.join(["python", "experiments/system_efficiency/run.py", *argv]),
        "others_cpu": round(stopwatch.others_cpu, 3),
        "rows": rows,
    }
    write_json(args.out, checked(result, stopwatch, TIMES))
    show(rows, result["others_cpu"])


if __name__ == "__main__":
    main(sys.argv[1:])
