"""Plain greedy decoding: our autoregressive loop against ``transformers.generate``, same weights, same machine.

    python experiments/vs_transformers/run.py            (a few minutes on 2 CPU cores; needs torch and transformers)

Every speed-up that specjax reports is measured against its own autoregressive loop, so that loop must not be slow. Here
both decode a random model of GPT-2's shape (12 layers, 768 wide, 12 heads, 50257 tokens, float32), batch 1, 128 new
tokens after a prompt of 32. They take turns in one process, prefill is part of the time, compilation and the first call
are not, and the medians count. Both must give the same tokens. Writes ``results.json`` beside this file.

Run it on an idle machine: where another process held one of two cores, torch made 2.8 tokens/s with two threads and 22 to
25 with one, so the ratio means nothing there. ``others_cpu`` in the results is the share of the machine that
other processes took meanwhile; it should be near 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, drafters, rng, sampling
from specjax.models import hf, lm
from specjax.models.transformer import TransformerConfig
from specjax.types import ModelParams

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


def ours(directory: str, prompt: np.ndarray, new: int) -> Callable[[], list[int]]:
    """A function that decodes once with specjax and returns the new token ids."""
    loaded = hf.load(directory, dtype=jnp.float32)
    drafter = drafters.load("none").make(loaded.lm)
    params = ModelParams(loaded.params, {})
    batch, size = prompt.shape
    tokens, lengths = jnp.asarray(prompt), jnp.full((batch,), size, jnp.int32)
    settings = sampling.make_sampling(batch, temperature=0.0)

    def run() -> list[int]:
        keys = rng.row_keys(0, batch)
        state = decode.prefill(loaded.lm, drafter, params, tokens, lengths, keys, sampling=settings, max_len=size + new)
        state = decode.autoregressive(loaded.lm, params, state, max_steps=new)
        jax.block_until_ready(state)
        return decode.outputs(state, [size])[0]

    return run


def theirs(directory: str, prompt: np.ndarray, new: int) -> Callable[[], list[int]]:
    """The same with transformers and torch."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.tensor(prompt, dtype=torch.long)

    def run() -> list[int]:
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                min_new_tokens=new,
                max_new_tokens=new,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
        return out[0, prompt.shape[1] :].tolist()

    return run


def machine() -> dict:
    """What it ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {"cpu": names[0] if names else "unknown", "cores": os.cpu_count()}


def busy() -> float:
    """CPU seconds that other processes have used since the machine started (0 where /proc does not tell)."""
    if not Path("/proc/stat").exists():
        return 0.0
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=128, help="new tokens")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()

    prompt = np.random.default_rng(0).integers(0, GPT2.vocab_size, (1, args.prompt)).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        directory = str(Path(folder) / "model")
        params = lm.init_params(GPT2, jax.random.key(0))
        # As initialised, tied embeddings make it repeat its last token for ever; equal outputs would prove nothing.
        params["layers"] = jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, params["layers"])
        hf.save(directory, GPT2, params)
        del params
        runs = {"specjax": ours(directory, prompt, args.new), "transformers": theirs(directory, prompt, args.new)}

    tokens = {name: run() for name, run in runs.items()}  # compiles and warms up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    since, others = time.perf_counter(), busy()
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            again = run()
            seconds[name].append(time.perf_counter() - start)
            if again != tokens[name]:
                sys.exit(f"{name} gave other tokens on another run of the same greedy decoding")

    others = (busy() - others) / (time.perf_counter() - since) / (os.cpu_count() or 1)
    pairs = enumerate(zip(*tokens.values(), strict=True))
    difference = next((i for i, (a, b) in pairs if a != b), None)
    rates = {name: [args.new / s for s in all_] for name, all_ in seconds.items()}
    medians = {name: statistics.median(all_) for name, all_ in rates.items()}
    ratio = medians["specjax"] / medians["transformers"]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "others_cpu": round(others, 3),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("jax", "flax", "torch", "transformers")},
        "model": "random GPT-2 (12 layers, 768 wide, 12 heads, vocabulary 50257), float32, batch 1, greedy",
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "rows": [{"name": n, "tokens_per_second": medians[n], "all": rates[n]} for n in runs],
        "ratio": ratio,
        "identical_tokens": difference is None,
        "first_difference": difference,
        "distinct_tokens": len(set(tokens["specjax"])),  # one token repeated would prove little
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, rate in medians.items():
        print(f"{name:14}{rate:8.1f} tokens/s")
    same = "identical tokens" if difference is None else f"tokens differ from position {difference}"
    print(f"{'ratio':14}{ratio:8.2f}   {same}; other processes took {others:.0%} of the machine")


if __name__ == "__main__":
    main()
