"""A tiny language model and its training runs; small versions of the project's configurations."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.train import loop, optimise
from specjax.train.settings import Schedule, Settings
from specjax.types import Batch

# Vocabulary, width, rows and length of the tiny model and its batches.
V, E, B, T = 11, 8, 4, 6


def equal(a, b) -> bool:
    """Whether two pytrees have the same structure and bit-identical leaves."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def close(a, b, tolerance=2e-6) -> bool:
    return all(
        np.allclose(x, y, atol=tolerance)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


class Steps:
    """Batches with ragged labels, a pure function of the step; records the requested steps."""

    def __init__(self):
        self.asked: list[int] = []

    def batch(self, step: int) -> Batch:
        self.asked.append(step)
        random = np.random.default_rng(step)
        labelled = random.random((B, T + 1)) < np.linspace(0.1, 0.9, B)[:, None]
        return Batch(random.integers(0, V, (B, T + 1), dtype=np.int32), labelled)


@functools.cache
def _initial() -> dict:
    keys = jax.random.split(jax.random.key(7), 3)
    shapes = {
        "embed": {"embedding": (V, E)},
        "layers": [{"kernel": (E, E), "scale": (E,)}],
        "head": {"kernel": (E, V)},
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    draw = [
        jax.random.normal(jax.random.fold_in(keys[0], i), shape) * 0.5
        for i, shape in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, draw)


def initial() -> dict:
    """The parameters of a bigram model with one hidden layer."""
    return jax.tree.map(lambda leaf: leaf, _initial())


def bigram_loss(params, target_params, batch, key, noise=0.0):
    """Cross-entropy where labelled; with ``noise`` it depends on the key."""
    x = params["embed"]["embedding"][batch.tokens[:, :-1]]
    x = x + jnp.tanh(x @ params["layers"][0]["kernel"]) * params["layers"][0]["scale"]
    x = x + noise * jax.random.normal(key, x.shape, x.dtype)
    log_probs = jax.nn.log_softmax((x @ params["head"]["kernel"]).astype(jnp.float32))
    right = jnp.take_along_axis(log_probs, batch.tokens[:, 1:, None], -1)[..., 0]
    mask = batch.labelled[:, 1:]
    weight = mask.sum().astype(jnp.float32)

    def mean(values):
        return jnp.where(mask, values, 0).sum() / jnp.maximum(weight, 1)

    return -mean(right), {"accuracy": mean(jnp.exp(right)), "weight": weight}


noisy_loss = functools.partial(bigram_loss, noise=0.1)


def rewrite(params, target_params, batch, key):
    """Replaces every other token by one that the model draws."""
    logits = params["embed"]["embedding"][batch.tokens] @ params["head"]["kernel"]
    drawn = jax.random.categorical(key, logits)
    return batch.replace(
        tokens=jnp.where(jnp.arange(T + 1) % 2, drawn, batch.tokens).astype(jnp.int32)
    )


@functools.cache
def make_optimiser(name="adamw", **changes) -> optimise.Optimiser:
    return optimise.optimiser(name=name, **{"steps": 20, "learning_rate": 3e-2} | changes)


def train(
    workdir,
    steps=20,
    *,
    loss=bigram_loss,
    optimiser="adamw",
    params=None,
    batches=None,
    config=None,
    examine=None,
    rewrite=None,
    held_out_loss=None,
    eval_batches=None,
    log_every=4,
    eval_every=10,
    checkpoint_every=6,
    examine_every=1,
    **settings,
):
    """Trains the tiny model; ``settings`` are those of ``Settings``."""
    if isinstance(optimiser, str):
        optimiser = make_optimiser(optimiser)
    if eval_batches is None:
        eval_batches = [Steps().batch(77), Steps().batch(78)]
    task = loop.Task(
        loss,
        initial() if params is None else params,
        {},
        batches or Steps(),
        eval_batches,
        examine,
        rewrite,
        held_out_loss,
    )
    schedule = Schedule(
        steps=steps,
        log_every=log_every,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
        examine_every=examine_every,
    )
    config = {"a": 1} if config is None else config
    return loop.train(task, optimiser, schedule, workdir, Settings(**settings), config)


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


# Options of ``train``: the modes in which a resumed run must be bit-identical.
MODES = {
    "adamw": {},
    "muon, average, parts": {"optimiser": "muon", "ema": 0.9, "accumulate": 2},
    "rewritten, bfloat16": {"rewrite": rewrite, "precision": "bfloat16"},
}


ROOT = Path(__file__).parents[1]
# Text for the small configurations.
TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # caf\u00e9\n\n" for i in range(400))


def small_config(name: str, *args: str, **changes):
    """A config of the project, made small; keys of ``changes`` are dotted with two underscores."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*args)
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    if "model" in config:
        config.model.update(small | {"max_positions": 64})
    config.train.update(
        {"steps": 30, "batch_size": 4, "length": 32, "eval_every": 10, "eval_batches": 2}
    )
    config.optimiser.update({"name": "adamw", "learning_rate": 1e-2})
    config.examine.update(
        {"prompts": min(config.examine.prompts, 4), "prompt_tokens": 6, "new_tokens": 12}
    )
    config.update_from_flattened_dict(
        {key.replace("__", "."): value for key, value in changes.items()}
    )
    return config
