"""Published speed-ups beside predictions, and the pair GPT-2 XL with GPT-2 in its real shapes.

    PYTHONPATH=. python experiments/papers/published.py --workdir=runs/gpt2

GPT-2 XL (48 layers, 1,600 wide, 6.2 GB in float32) and GPT-2 (12 layers, 768 wide) with random
weights: the draft model really runs, and its tokens are then right with a chosen probability
(drafter ``controlled``). Four draft tokens, 40 new tokens, temperature 0, as in configs/gpt2.py,
which has the real weights. --layers shortens the target. Adds "gpt2" to results.json beside this
file. Run it on an idle machine; ten minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.common import GPT2, checked, options, record, start, without_folder
from experiments.papers.parts import TIMES
from experiments.tables import Column, of_rows, source
from specjax import accept, drafters, theory
from specjax.files import write_json
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.run import measure
from specjax.theory import scaling
from specjax.types import ModelParams

XL = dataclasses.replace(
    GPT2, hidden_size=1600, intermediate_size=6400, num_layers=48, num_heads=25, num_kv_heads=25
)
GAMMA, RATES = 4, (0.6, 0.8, 0.9)


class Published(NamedTuple):
    """A speed-up of a paper, at temperature 0 and batch 1."""

    pair: str
    gamma: int
    alpha: float
    c: float  # the paper's, or computed
    speedup: float
    source: str


LLAMA = TransformerConfig(
    "llama", 32000, 4096, 11008, 32, 32, 32, 128, 2048, tie_embeddings=False
)  # 7B
SMALL = TransformerConfig("llama", 32000, 768, 3072, 2, 12, 12, 64, 2048, tie_embeddings=False)


def _llama() -> float:
    """c of LLaMA-68M for LLaMA-7B on an A100 at 512 cached tokens, by ``theory.scaling``."""
    setup, plan = scaling.setup_of("A100 40GB SXM", LLAMA), scaling.Speculation(1, 1.0, draft=SMALL)
    return scaling.speculative(setup, plan, 1, 512).draft / scaling.plain(setup, 1, 512).step


T5 = "Leviathan et al. 2023, table 2"
ROWS = (
    Published("T5 XXL with T5 small, English to German", 7, 0.75, 0.02, 3.4, T5),
    Published("T5 XXL with T5 base, English to German", 7, 0.80, 0.04, 2.8, T5),
    Published("T5 XXL with T5 large, English to German", 7, 0.82, 0.11, 1.7, T5),
    Published("LLaMA 7B with 68M, A100", 5, 0.61, _llama(), 2.35, "reported; c of theory.scaling"),
)
PREDICTED = (
    Column("pair", lambda row: row.pair),
    Column("gamma", lambda row: row.gamma),
    Column("alpha", lambda row: row.alpha, ".2f"),
    Column("c", lambda row: row.c, ".3f"),
    Column("theorem 3.8", lambda x: theory.walltime_improvement(x.alpha, x.gamma, x.c), ".2f", "x"),
    Column("published", lambda row: row.speedup, ".2f", "x"),
    Column("source", lambda row: row.source),
)
MEASURED = (
    Column("alpha", "alpha", ".1f"),
    Column("tau", "tau", ".2f"),
    Column("c", "c", ".3f"),
    Column("v", "verify", ".2f"),
    Column("theorem 3.8", "improvement", ".2f", "x"),
    Column("plain, s", "plain_seconds", ".1f"),
    Column("speculative, s", "seconds", ".1f"),
    Column("speed-up", "speedup", ".2f", "x"),
)


def tables(results: dict) -> str:
    """Published speed-ups and predictions, and the measured pair if there is one."""
    texts = ["**Published speed-ups**", of_rows(ROWS, PREDICTED)]  # pyright: ignore
    if pair := results.get("gpt2"):
        title = f"**GPT-2 XL ({pair['layers']} layers) with GPT-2, random weights, gamma {GAMMA}**"
        texts += [f"{title}\n\n{source(pair)}", of_rows(pair["rows"], MEASURED)]
    return "\n\n".join(texts)


def study(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each rate of acceptance."""
    config = dataclasses.replace(XL, num_layers=args.layers)
    target, model = (lm.from_config(each, jnp.float32) for each in (config, GPT2))
    weights, small = (
        lm.init_params(each, jax.random.key(seed)) for seed, each in enumerate((config, GPT2))
    )
    inner = drafters.make("draft_model", target, model=model, params=small, gamma=GAMMA)
    drafter = drafters.make("controlled", target, drafters=[inner])
    own, rule = drafter.init_params(jax.random.key(0)), accept.load("chain")
    methods = {
        f"{rate:g}": (drafter, rule, ModelParams(weights, own | {"rate": jnp.float32(rate)}))
        for rate in RATES
    }
    prompt = jax.random.randint(jax.random.key(1), (10,), 0, GPT2.vocab_size).tolist()
    keys = {"max_new_tokens": args.new, "repeats": args.repeats, "report": False}
    found = measure((target, weights), methods, [prompt], workdir=args.workdir, show=False, **keys)
    rows = []
    for row in found["rows"]:
        costs, alpha = row["costs_ms"], float(row["method"])
        c, verify = costs["draft"] / GAMMA / costs["step"], costs["verify"] / costs["step"]
        rates = row["tokens_per_second"], row["autoregressive_tokens_per_second"]
        rows.append(
            {
                "alpha": alpha,
                "tau": row["block_efficiency"],
                "c": c,
                "verify": verify,
                "improvement": theory.walltime_improvement(alpha, GAMMA, c),
                "seconds": args.new / rates[0],
                "plain_seconds": args.new / rates[1],
                "speedup": row["speedup"],
                "lossless": row["lossless"]["passed"],
            }
        )
    return rows


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=XL.num_layers, help="of the target")
    parser.add_argument("--new", type=int, default=40, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    stopwatch = start(args)
    found = {"layers": args.layers, "rows": study(args)}
    result = json.loads(args.out.read_text()) if args.out.exists() else {"pairs": {}}
    head = record(__file__, [without_folder(each) for each in argv], stopwatch)
    result["gpt2"] = checked({**head, **found}, stopwatch, TIMES)
    write_json(args.out, result)
    print(tables(result))


if __name__ == "__main__":
    main(sys.argv[1:])
