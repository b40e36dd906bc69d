"""The time of a training step of heads and draft networks, beside the target's forward alone.

    PYTHONPATH=. python experiments/head_training/run.py          (about 8 minutes on 2 CPU cores)

The target has 12 layers, 768 wide, 32768 tokens (float32, random weights). A step is the target's
forward, the loss, its gradient and AdamW, on random tokens. ``ratio`` is the time of a step divided
by the time of the target's forward with its logits. ``forward_ratio`` is the same without the
gradient, so it is the cost of evaluating the loss.

Medians over steps that run in turns. Writes ``results.json`` beside this file; run it on an idle
machine.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import checked, options, record, start
from experiments.loops import Loop, clock
from specjax import drafters
from specjax.drafters.heads.eagle import _loss
from specjax.files import write_json
from specjax.models import lm
from specjax.models.transformer_config import TransformerConfig
from specjax.train import optimise, update
from specjax.types import LM, Batch

TIMES = frozenset({"step_ms", "ratio", "forward_ratio", "forward_ms"})
TARGET = TransformerConfig(
    family="llama",
    vocab_size=32768,
    hidden_size=768,
    intermediate_size=2048,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_dim=64,
    max_positions=4096,
)
# Label -> drafter, its keys, keys of its loss.
METHODS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "medusa": ("medusa", {"heads": 4}, {}),
    "hydra": ("hydra", {"heads": 4}, {}),
    "redrafter": ("redrafter", {}, {}),
    "eagle": ("eagle", {}, {}),
    "hass": ("eagle", {}, _loss.HASS),
    "eagle3": ("eagle3", {}, {}),
    "eagle3, draft vocabulary": ("eagle3", {"draft_vocab": 4}, {}),  # a quarter of the tokens
}


def steps_of(target: LM, target_params: Any, batch: Batch, label: str) -> dict[str, Loop]:
    """A training step and an evaluation of the loss."""
    name, keys, weights = METHODS[label]
    if "draft_vocab" in keys:
        size = target.vocab_size // keys["draft_vocab"]
        keys = {"draft_ids": np.arange(size, dtype=np.int32)}
    training = drafters.make(name, target, **keys).training
    assert training is not None and training.loss is not None and training.start is not None
    loss = functools.partial(training.loss, **weights)
    optimiser = optimise.optimiser(name="adamw", steps=1000, learning_rate=1e-4)
    state = update.fresh(training.start(target_params, jax.random.key(0)), optimiser, 0.0)
    key = jax.random.key(1)
    step = jax.jit(update.step(loss, optimiser, 1, 0.0), donate_argnums=0)
    # A copy: the step donates its state.
    params, box = jax.tree.map(jnp.copy, state["params"]), [state]

    def train() -> Any:
        box[0], metrics = step(box[0], target_params, batch, key)
        return metrics

    evaluate: Callable[..., Any] = jax.jit(loss)
    return {
        f"{label} step": train,
        f"{label} loss": lambda: evaluate(params, target_params, batch, key),
    }


def measure(config: TransformerConfig, rows: int, length: int, samples: int) -> dict[str, Any]:
    """All times in milliseconds."""
    target = lm.from_config(config)
    params = lm.init_params(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(2), (rows, length + 1), 0, config.vocab_size)
    batch = Batch(tokens)

    @jax.jit
    def forward(params):
        out = lm.forward(target, params, tokens[:, :-1])
        # All logits are read: they are the labels of the heads.
        return out.logits.max(-1), out.hidden

    loops: dict[str, Loop] = {"forward": lambda: forward(params)}
    for label in METHODS:
        loops |= steps_of(target, params, batch, label)
    seconds = clock({name: (loop, 1) for name, loop in loops.items()}, samples)
    ms = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    rows_of = [
        {
            "method": label,
            "step_ms": ms[f"{label} step"],
            "ratio": ms[f"{label} step"] / ms["forward"],
            "forward_ratio": ms[f"{label} loss"] / ms["forward"],
        }
        for label in METHODS
    ]
    return {"rows": rows_of, "forward_ms": ms["forward"]}


def main(argv: list[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--rows", type=int, default=2, help="rows of a batch")
    add("--length", type=int, default=128, help="tokens of a row")
    add("--samples", type=int, default=5, help="steps of each kind")
    add("--small", action="store_true", help="a tiny model, for a test")
    args = parser.parse_args(argv)
    stopwatch, config = start(args), TARGET
    if args.small:
        tiny = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "head_dim": 4}
        config = dataclasses.replace(config, num_layers=3, num_heads=4, num_kv_heads=4, **tiny)
    result = measure(config, args.rows, args.length, args.samples)
    result |= record(__file__, argv, stopwatch)
    write_json(args.out, checked(result, stopwatch, TIMES))
    print(f"the target's forward {result['forward_ms']:.0f} ms")
    for row in result["rows"]:
        print(f"{row['method']:26} step {row['step_ms']:8.0f} ms, {row['ratio']:.2f} forwards")


if __name__ == "__main__":
    main(sys.argv[1:])
