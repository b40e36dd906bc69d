"""How much of the speed-up that theory promises does the compiled loop deliver, whatever the models are worth?

    PYTHONPATH=. python experiments/system_efficiency/run.py            (about 8 minutes on 2 CPU cores)

The target has GPT-2's shape (12 layers, 768 wide, vocabulary 50257), the draft model 2 layers of width 256; float32, random
weights, batch 1, greedy. The draft model is really run, and its tokens are then replaced so that each is accepted with a
chosen probability (drafter ``controlled``), so every length and every acceptance rate can be had without training. For each:

    system efficiency = measured speed-up / predicted speed-up,
    predicted = tokens per round x (time of a one-token pass) / (time to draft + time to verify), each measured by itself,

all of it interleaved with plain decoding (``specjax.bench``). ``rest_ms`` is what a round takes beyond drafting and verifying:
acceptance, commit, bookkeeping; ``plain_rest_ms`` is what a token of plain decoding takes beyond its pass. Writes
``results.json`` beside this file. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from experiments.vs_transformers.run import GPT2, busy
from specjax import accept, drafters
from specjax.bench import measuring, results, summaries, timing
from specjax.bench.passes import Job, Method
from specjax.models import lm
from specjax.models.transformer import TransformerConfig
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


def methods(
    job: Job, draft: TransformerConfig, gammas: Sequence[int], rates: Sequence[float]
) -> list[list[Method]]:
    """For each gamma a method for each rate; they share one drafter, and so what is compiled."""
    model, params = lm.from_config(draft), lm.init_params(draft, jax.random.key(1))
    found = []
    for gamma in gammas:
        inner = drafters.make("draft_model", job.target, model=model, params=params, gamma=gamma)
        drafter = drafters.make("controlled", job.target, drafters=[inner])
        own = drafter.init_params(jax.random.key(0))
        found.append(
            [
                Method(
                    f"gamma {gamma}, acceptance {rate:g}",
                    drafter,
                    accept.load("chain"),
                    ModelParams(job.params, own | {"rate": jnp.float32(rate)}),
                )
                for rate in rates
            ]
        )
    return found


def measured(job: Job, some: Sequence[Method], rates: Sequence[float]) -> list[dict]:
    """Rows of one gamma, with what a round and a plain token take beyond what was timed by itself."""
    measuring.warm([job], some[:1])  # the others run the same programs
    found = measuring.measure(job, some)
    plain = statistics.median(p.loop / p.loops for p in found.plain)
    made = summaries.measured_rows(job, some, found)
    for row, rate, runs in zip(made, rates, found.methods, strict=True):
        cost = row["costs_ms"]
        whole = 1e3 * statistics.median(p.loop / p.loops for p in runs)
        row |= {
            "rate": rate,
            "round_ms": whole,
            "rest_ms": whole - cost["draft"] - cost["verify"],
            "plain_ms": 1e3 * plain,
            "plain_rest_ms": 1e3 * plain - cost["step"],
        }
    return made


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 0.6, 0.8, 0.95])
    parser.add_argument("--new", type=int, default=64, help="new tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="tiny models: a test that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args(argv)

    timing.MIN_SECONDS = (
        0.05 if args.small else 0.4
    )  # seconds of each sample of a part: a pass takes twenty milliseconds here
    shrunk = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    shrunk |= {"head_dim": 16, "vocab_size": 64}
    target, draft = (dataclasses.replace(c, **shrunk) if args.small else c for c in (GPT2, DRAFT))
    random = np.random.default_rng(0)
    job = Job(
        target=lm.from_config(target),
        params=lm.init_params(target, jax.random.key(0)),
        prompts=[
            random.integers(0, target.vocab_size, 24 + 8 * i).tolist() for i in range(args.prompts)
        ],
        settings={"temperature": 0.0},
        batch_size=1,
        max_new_tokens=args.new,
        eos_id=(),
        seed=0,
        repeats=args.repeats,
    )
    since, others, found = time.perf_counter(), busy(), []
    console = Console(stderr=True)
    with console.status("") as status:
        for gamma, some in zip(
            args.gammas, methods(job, draft, args.gammas, args.rates), strict=True
        ):
            status.update(f"gamma {gamma}")
            found += measured(job, some, args.rates)
            jax.clear_caches()
    result = results.head() | {
        "command": shlex.join(["python", "experiments/system_efficiency/run.py", *argv]),
        "others_cpu": round(
            (busy() - others) / (time.perf_counter() - since) / (os.cpu_count() or 1), 3
        ),
        "rows": found,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for row in found:
        print(
            f"{row['method']:26} tau {row['block_efficiency']:.2f}  {row['speedup']:.2f}x of {row['predicted_speedup']:.2f}x: "
            f"{row['system_efficiency']:.3f}  rest {row['rest_ms']:.2f} of {row['round_ms']:.1f} ms"
        )
    worst = min(found, key=lambda row: row["system_efficiency"])
    print(
        f"least: {worst['system_efficiency']:.3f} ({worst['method']}); other processes {result['others_cpu']:.0%}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
