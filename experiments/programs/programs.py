"""The programs of experiments/programs: what is compiled, for which chips, at which sizes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.accelerator.models import LARGE
from experiments.accelerator.models import SMALL as TARGET
from experiments.states.run import committed
from specjax import accept, decode, drafters, outcome, prompt, rng, sampling, tree
from specjax import cache as cache_lib
from specjax.cache import KVBlock, KVCache
from specjax.models import attention, lm
from specjax.models.transformer_config import Recurrent, TransformerConfig
from specjax.train import objectives, optimise, update
from specjax.types import LM, Batch, Drafter, ModelParams, Output

# The shape of Llama 3.2 1B, and a draft model for it.
DRAFT = dataclasses.replace(
    TARGET, hidden_size=1024, intermediate_size=4096, num_layers=2, num_heads=16
)


# The target with the recurrent layers of Qwen3-Next: three of four, and a state of 2 MiB in each.
HYBRID = dataclasses.replace(
    TARGET,
    recurrent=Recurrent(16, 32, 128, 128, 4, tuple(i for i in range(16) if (i + 1) % 4)),
    rope_scaling=None,
)


class Size(NamedTuple):
    """The sizes of all programs."""

    target: TransformerConfig = TARGET
    draft: TransformerConfig = DRAFT
    hybrid: TransformerConfig = HYBRID
    large: TransformerConfig = LARGE
    prompt: int = 1024
    text: int = 2048  # the longest text; sizes the cache
    rows: int = 4  # of a training step, for each device
    length: int = 512  # tokens of a row of a training step
    # Whether the target's layers are one loop over stacked parameters: ``scanned``.
    scan: bool = False

    @property
    def turns(self) -> int | None:
        """The turns of the loop over layers."""
        return self.target.num_layers if self.scan else None

    def model(self) -> tuple[LM, Any]:
        """The target in bfloat16, and the shapes of its parameters."""
        dtype = jnp.dtype(jnp.bfloat16)
        params = lm.abstract_params(self.target, dtype)
        if self.scan:
            return scanned(self.target, dtype), jax.eval_shape(stacked, params)
        return lm.from_config(self.target, dtype), params


def small() -> Size:
    """Sizes that compile in seconds. Matrices are as wide as the target's, but there are fewer."""
    target = dataclasses.replace(TARGET, vocab_size=16384, num_layers=2)
    draft = dataclasses.replace(DRAFT, vocab_size=16384, num_layers=1)
    own = Recurrent(2, 4, 16, 16, 4, layers=(0,))
    hybrid = dataclasses.replace(target, recurrent=own, rope_scaling=None)
    large = dataclasses.replace(LARGE, vocab_size=16384, num_layers=2)
    return Size(target, draft, hybrid, large, prompt=64, text=512, rows=2, length=64)


def stacked(params: dict) -> dict:
    """Parameters whose equal layers are one tree with a first axis over layers."""
    layers = params["layers"].values()
    return params | {"layers": jax.tree.map(lambda *own: jnp.stack(own), *layers)}


@functools.cache
def scanned(config: TransformerConfig, dtype: np.dtype) -> LM:
    """A decoder of equal layers whose pass is a loop over them.

    Parameters are those of ``stacked``; keys and values are [L,B,H,S,D].
    """
    one = dataclasses.replace(config, num_layers=1)

    def init_cache(batch: int, slots: int) -> KVCache:
        shape = (config.num_layers, batch, config.num_kv_heads, slots, config.head_dim)
        return KVCache(
            (jnp.zeros(shape, dtype),), (jnp.zeros(shape, dtype),), jnp.zeros((batch,), jnp.int32)
        )

    def apply(params: Any, tokens: jax.Array, cache: KVCache, layout=None, block=None):
        assert block is None, "a block in parts is not written here"

        def module(layer: Any) -> Any:
            return lm.merge(one, params | {"layers": {0: layer}}, dtype)

        whole = module(jax.tree.map(lambda x: x[0], params["layers"]))
        view = attention.past(cache, tokens.shape[1], layout)
        (angle,) = whole.angles(view.positions)

        def step(x: jax.Array, own: Any) -> Any:
            layer, k, v = own
            x, *new = module(layer).layers[0](x, angle, view, attention.Stored(k, v))
            return x, new

        given = params["layers"], cache.k[0], cache.v[0]
        hidden, new = jax.lax.scan(step, whole.first(tokens, view), given)
        hidden = whole.norm(hidden)
        # [L,B,P,H,D] -> [B,P,L,H,D]: the first axes of all parts of a block are rows and tokens.
        k, v = (jnp.moveaxis(each, 0, 2) for each in new)
        own = KVBlock((k,), (v,), hidden[..., 0].astype(jnp.float32))
        return Output(whole.logits(hidden), hidden), own

    def commit(cache: KVCache, block: KVBlock, count: jax.Array, path=None) -> KVCache:
        kept, _ = tree.accepted(block, count, path)
        start = cache_lib.write_after(cache.length, kept.output)

        def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
            write = functools.partial(cache_lib.write, start=start)
            return jax.vmap(write)(buffer, jnp.moveaxis(new, 2, 0))

        k, v = put(cache.k[0], kept.k[0]), put(cache.v[0], kept.v[0])
        return cache.replace(k=(k,), v=(v,), length=cache.length + count)

    return LM(init_cache, apply, commit, config.vocab_size, layers=config.num_layers)


class Pair(NamedTuple):
    """Target and drafter as static objects, and the shapes of their parameters."""

    target: LM
    drafter: Drafter
    params: ModelParams
    passes: int  # passes of the draft model in the text of a round
    shared: float = 0.0  # bytes of the target's parameters that such a pass reads too


class Made(NamedTuple):
    """A program before it is compiled."""

    traced: Any  # jax.stages.Traced
    needed: float  # bytes that one round or pass must read: weights and caches
    shapes: list[tuple[str, tuple[int, ...]]]  # of weights and caches
    loop: bool = False
    layers: int | None = None  # turns of the loop over layers; None: there is no such loop


GAMMA = 5  # tokens of a chain
# Method -> passes of the draft model that are in the text of a round, and the drafter. A chain has
# one pass before a loop and one inside it; XLA:GPU states how often the loop turns.
DRAFTERS: dict[str, tuple[int, Callable[..., Drafter]]] = {
    "plain": (0, lambda target, draft: drafters.make("none", target=target)),
    "lookup": (0, lambda target, _: drafters.make("prompt_lookup", target=target, gamma=GAMMA)),
    "chain": (2, lambda target, draft: _draft("draft_model", target, draft, gamma=GAMMA)),
    "tree": (3, lambda target, draft: _draft("draft_tree", target, draft, tree="4x2x1")),
    "nested": (2, lambda target, draft: _nested(target, draft)),
}
# Heads on the target's features, as chains: passes, and keys. EAGLE's pass reads the target's LM
# head too; the pass of other heads is one product for each depth.
HEADS: dict[str, tuple[int, dict[str, int]]] = {
    "medusa": (1, {}),
    "hydra": (1, {}),
    "eagle": (2, {"gamma": GAMMA}),
}


def _draft(name: str, target: LM, draft: LM, **keys: Any) -> Drafter:
    return drafters.make(name, target=target, model=draft, **keys)


def _nested(target: LM, draft: LM) -> Drafter:
    """A lookup in the text, and the draft model for rows without a match."""
    stages = [
        drafters.make("prompt_lookup", target=target, gamma=GAMMA),
        _draft("draft_model", target, draft, gamma=GAMMA, gaps=True),
    ]
    return drafters.make("escalate", target=target, drafters=stages)


@functools.cache
def pair(method: str, size: Size) -> Pair:
    """A method with a draft model or heads in bfloat16."""
    target, given_target = size.model()
    if method in HEADS:
        return _with_heads(method, size, target)
    draft = lm.from_config(size.draft, jnp.dtype(jnp.bfloat16))
    passes, make = DRAFTERS[method]
    given = lm.abstract_params(size.draft, jnp.bfloat16)
    if method == "nested":
        drafting: Any = ({}, given)
    else:
        drafting = given if passes else {}
    params = ModelParams(given_target, drafting)
    return Pair(target, make(target, draft), params, passes)


def _with_heads(method: str, size: Size, target: LM) -> Pair:
    passes, keys = HEADS[method]
    given = lm.abstract_params(size.target, jnp.bfloat16)
    drafter = drafters.make(method, target=target, **keys)
    assert drafter.training is not None and drafter.training.start is not None
    key = jax.eval_shape(lambda: jax.random.key(0))
    fresh = jax.eval_shape(drafter.training.start, given, key)
    heads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), fresh)
    # The target's head and embedding are one matrix.
    shared = nbytes(given["embed"]) if method == "eagle" else 0.0
    return Pair(target, drafter, ModelParams(given, heads), passes, shared)


def nbytes(tree: Any) -> float:
    """Bytes of all arrays on one device."""
    return sum(
        math.prod(_shard_shape(x)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)
    )


def _shard_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of the part on one device."""
    return tuple(x.shape if x.sharding is None else x.sharding.shard_shape(x.shape))


def shapes_of(*trees: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Types and shapes of matrices and caches, in the names of HLO."""
    names = {"bfloat16": "bf16", "float32": "f32"}
    found = {
        (names[str(x.dtype)], _shard_shape(x))
        for x in jax.tree.leaves(trees)
        if len(x.shape) > 1 and str(x.dtype) in names
    }
    return sorted(found)


def on(where: Any, tree: Any) -> Any:
    """The same shapes on a device, or with a pytree of shardings."""
    if isinstance(where, jax.Device):
        where = SingleDeviceSharding(where)
    if isinstance(where, jax.sharding.Sharding):
        where = jax.tree.map(lambda _: where, tree)
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, where
    )


def forward(size: Size, device: Any, tokens: int, batch: int = 1) -> Made:
    """A pass over so many tokens, and the commit of one."""
    target, params = size.model()
    params = on(device, params)
    cache = on(device, jax.eval_shape(lambda: target.init_cache(batch, size.text)))

    def one(params, tokens, cache):
        out, block = target.apply(params, tokens, cache)
        cache = target.commit(cache, block, jnp.ones((batch,), jnp.int32))
        return jnp.argmax(out.logits, -1).astype(jnp.int32), cache

    given = on(device, jax.ShapeDtypeStruct((batch, tokens), jnp.int32))
    traced = jax.jit(one, donate_argnums=2).trace(params, given, cache)
    return Made(traced, nbytes((params, cache)), shapes_of(params, cache.k), layers=size.turns)


def hybrid(size: Size, device: Any, tokens: int, form: str) -> Made:
    """A pass of the hybrid over so many tokens, and the commit of some, in a form of ``states``."""
    target = lm.from_config(size.hybrid, jnp.dtype(jnp.bfloat16))
    params = on(device, lm.abstract_params(size.hybrid, jnp.bfloat16))
    cache = on(device, jax.eval_shape(lambda: target.init_cache(1, size.text)))

    def one(params, tokens, cache, count):
        out, block = target.apply(params, tokens, cache)
        cache = committed(form, target, cache, block, count)
        return jnp.argmax(out.logits, -1).astype(jnp.int32), cache

    given = on(device, [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, tokens), (1,))])
    traced = jax.jit(one, donate_argnums=2).trace(params, given[0], cache, given[1])
    return Made(traced, nbytes((params, cache)), shapes_of(params, cache.attention.k))


def prompts(size: Size, batch: int) -> tuple:
    """The shapes of prompts, lengths, limits, keys and sampling settings."""
    return jax.eval_shape(
        lambda: (
            jnp.zeros((batch, size.prompt), jnp.int32),
            jnp.zeros((batch,), jnp.int32),
            jnp.zeros((batch,), jnp.int32),
            rng.row_keys(0, batch),
            sampling.make_sampling(batch),
        )
    )


def prefill(size: Size, device: Any, batch: int = 1) -> Made:
    """The prefill of the plain loop."""
    target, drafter, params, *_ = pair("plain", size)
    static = {"max_len": size.text, "chunk": 256}
    given = on(device, prompts(size, batch))
    params = on(device, params)
    traced = prompt._prefill.trace(target, drafter, params, *given, **static)
    cache = jax.eval_shape(lambda: target.init_cache(batch, size.text))
    return Made(traced, nbytes((params, cache)), shapes_of(params, cache.k))


def state_of(made: Pair, size: Size, batch: int) -> Any:
    """The shapes of a state after the prefill."""
    start = prompt.make_prefill(made.target, made.drafter, size.text, 256, False)
    return jax.eval_shape(start, made.params, *prompts(size, batch))


def caches(state: Any) -> list[jax.ShapeDtypeStruct]:
    """Keys and values of the target and of the draft model."""
    return [x for x in jax.tree.leaves((state.cache, state.draft)) if x.ndim >= 4 and x.size]


def needed(made: Pair, params: ModelParams, state: Any) -> float:
    """Bytes that a round must read: the target's once, the draft model's in every pass.

    Of all devices together those of one: ``params`` and ``state`` may be divided.
    """
    drafting = nbytes((params.draft, caches(state.replace(cache=())))) + made.shared
    return nbytes((params.target, state.cache)) + made.passes * drafting


def loop(
    size: Size, device: Any, method: str, turns: bool = False, widths: tuple[int, ...] | None = None
) -> Made:
    """The compiled loop over rounds, with one method, for one row.

    ``turns``: whether the turns of the draft's loop are counted. ``widths`` of verification; None:
    those of the method.
    """
    made = pair(method, size)
    made = made._replace(passes=GAMMA) if turns and made.passes == 2 else made
    state = state_of(made, size, 1)
    stop = jax.eval_shape(lambda: outcome.stop_ids(2))
    params, state, stop = on(device, (made.params, state, stop))
    rule = accept.load(accept.default_rule(made.drafter))
    static = {"max_steps": size.text - size.prompt, "verify_widths": widths}
    traced = decode._generate.trace(made.target, made.drafter, rule, params, state, stop, **static)
    shapes = shapes_of(params, caches(state))
    return Made(traced, needed(made, params, state), shapes, loop=True, layers=size.turns)


def autoregressive(size: Size, device: Any) -> Made:
    """The compiled loop of plain decoding, for one row."""
    made = pair("plain", size)
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    stop = jax.eval_shape(lambda: outcome.stop_ids(2))
    given = on(device, (made.params, state_of(made, size, 1), steps, stop))
    traced = decode._autoregressive.trace(made.target, *given)
    params, state = given[:2]
    shapes = shapes_of(params, caches(state))
    return Made(traced, needed(made, params, state), shapes, loop=True, layers=size.turns)


def loss_and_state(size: Size) -> tuple[Any, Any, Any]:
    """Loss and optimiser of the draft model's training, and the shapes of its state."""
    model = lm.from_config(size.draft, jnp.dtype(jnp.bfloat16))
    optimiser = optimise.optimiser(name="adamw", steps=100, learning_rate=1e-3)
    params = lm.abstract_params(size.draft)
    state = jax.eval_shape(lambda params: update.fresh(params, optimiser, 0.0), params)
    return objectives.pretrain_loss(model), optimiser, state


def batch_of(size: Size, devices: int) -> Batch:
    tokens: Any = jax.ShapeDtypeStruct((devices * size.rows, size.length), jnp.int32)
    return Batch(tokens)


def training(size: Size, device: Any) -> Made:
    """A step of training the draft model on tokens, in bfloat16 with float32 parameters."""
    loss, optimiser, state = loss_and_state(size)
    step = update.step(update.in_precision(loss, "bfloat16"), optimiser, 1, 0.0)
    key = jax.eval_shape(lambda: jax.random.key(0))
    arguments = on(device, (state, {}, batch_of(size, 1), key))
    traced = jax.jit(step, donate_argnums=0).trace(*arguments)
    return Made(traced, nbytes(arguments[0]), shapes_of(state["params"]))
