"""Rollouts of reinforcement learning with drafts: GRPO of stories260K, with and without a drafter.

    PYTHONPATH=. python experiments/rollouts/run.py --target=stories260K      (minutes on two cores)

Every step samples ``--samples`` texts of each beginning from the current parameters, gives a text
the reward 1 - |sentences - 8| / 8 (at least 0; a sentence ends with one of . ! ?), and makes one
step of Adam on the policy gradient with the advantages of each group (GRPO, Shao et al. 2024,
2402.03300, without a reference model, one update per rollout). Arms differ in the drafter alone.
"warm": it also looks up the rollouts of earlier steps. An L1 rule leaves the law of the rollouts
unchanged, so the rewards of the arms differ by noise only.

The loop is a plain one of optax, not tunix's: it runs wherever specjax does, and all of its time is
either rollouts or updates. ``results.json`` beside this file gets reward and tau of each step.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax as sj
from experiments.common import checked, options, record, start, without_folder
from specjax.files import write_json
from specjax.models.lm import forward

BEGINNINGS = ("Once upon a time", "One day, a little dog", "Tom and Lily", "The big red ball")
MEMORY = {"memory": 16384}
# Label -> the drafter, and whether it learns from earlier steps.
ARMS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"name": "none"}, False),
    "suffix": ({"name": "suffix"}, False),
    "suffix, warm": ({"name": "suffix", **MEMORY}, True),
    "trie, warm": ({"name": "trie", "nodes": 16, **MEMORY}, True),
}
WANTED = 8
TIMES = frozenset({"rollout_share"})


def reward(text: str) -> float:
    """1 for a text of ``WANTED`` sentences, less for more or fewer."""
    sentences = sum(text.count(end) for end in ".!?")
    return max(0.0, 1 - abs(sentences - WANTED) / WANTED)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """[G,N]: the rewards of each group of samples, with mean 0 and standard deviation 1."""
    spread = rewards.std(1, keepdims=True)
    return (rewards - rewards.mean(1, keepdims=True)) / (spread + 1e-4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def update(model: Any, optimiser: Any, params: Any, state: Any, tokens, prompt, length, gains):
    """One step on rows of tokens i32[B,S], of which those in prompt..length - 1 were sampled."""

    def loss(params):
        logits = forward(model, params, tokens).logits[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], 2)[..., 0]
        place = jnp.arange(1, tokens.shape[1])
        own = (place >= prompt[:, None]) & (place < length[:, None])
        return -(own * chosen * gains[:, None]).sum() / own.sum()

    changes, state = optimiser.update(jax.grad(loss)(params), state)
    return optax.apply_updates(params, changes), state


def packed(prompts: list[list[int]], completions: list[Any], size: int) -> tuple[np.ndarray, ...]:
    """The rows of ``update``: tokens, the lengths of the prompts, and of the texts."""
    texts = [[*prompts[each.prompt], *each.tokens] for each in completions]
    tokens = np.zeros((len(texts), size), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    begin = np.asarray([len(prompts[each.prompt]) for each in completions])
    return tokens, begin, np.asarray(list(map(len, texts)))


def arm(args: argparse.Namespace, label: str, seed: int) -> dict[str, Any]:
    """A row of results.json: one training run."""
    drafter, warm = ARMS[label]
    # A model of its own, so that nothing is kept of other runs.
    model = sj.load(args.target)
    prompts = [model.tokenizer.encode(text).ids for text in BEGINNINGS]
    optimiser, params = _adam(args.rate), model.params
    state, size = optimiser.init(params), max(map(len, prompts)) + args.new
    rewards, taus, seconds = [], [], np.zeros(2)
    for step in range(args.steps):
        begin = time.perf_counter()
        rollouts = sj.generate_text(
            model,
            prompts,
            n=args.samples,
            temperature=1.0,
            drafter=drafter,
            warm=warm,
            params=params,
            seed=1000 * seed + step,
            max_new_tokens=args.new,
        )
        middle = time.perf_counter()
        found = np.asarray([reward(text) for text in rollouts.texts]).reshape(len(prompts), -1)
        rows = packed(prompts, rollouts.completions, size)
        gains = advantages(found).ravel().astype(np.float32)
        params, state = update(model.lm, optimiser, params, state, *rows, gains)
        jax.block_until_ready(params)
        # The first step also compiles.
        seconds += [middle - begin, time.perf_counter() - middle] if step else 0
        rewards.append(float(found.mean()))
        taus.append(rollouts.tau)
    print(f"{label}, seed {seed}: reward {rewards[-1]:.2f}, tau {taus[-1]:.2f}", file=sys.stderr)
    share = float(seconds[0] / seconds.sum()) if seconds.sum() else None
    return {"arm": label, "seed": seed, "reward": rewards, "tau": taus, "rollout_share": share}


@functools.cache
def _adam(rate: float) -> optax.GradientTransformation:
    return optax.adam(rate)


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="texts of each beginning")
    parser.add_argument("--new", type=int, default=64, help="tokens of a text")
    parser.add_argument("--rate", type=float, default=1e-3, help="of Adam")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", default=";".join(ARMS), help="labels, separated by semicolons")
    args = parser.parse_args(argv)
    stopwatch = start(args)
    shown = [without_folder(each) for each in argv if not each.startswith("--out")]
    settings = {key: getattr(args, key) for key in ("steps", "samples", "new", "rate", "seeds")}
    rows = []
    for label in args.arms.split(";"):
        rows += [arm(args, label, seed) for seed in range(args.seeds)]
    result = record(__file__, shown, stopwatch) | {"settings": settings, "rows": rows}
    write_json(args.out, checked(result, stopwatch, TIMES))


if __name__ == "__main__":
    main(sys.argv[1:])
