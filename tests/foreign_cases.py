"""A model as another library has it: its forward pass, with a cache of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bound import Bound
from specjax.models import adapter
from specjax.types import LM

VOCAB, WIDTH, HEADS, LAYERS = 13, 16, 2, 2


def foreign_params(seed=0, vocab=VOCAB):
    draw = np.random.default_rng(seed)
    shapes = {"embed": (vocab, WIDTH), "out": (WIDTH, vocab)}
    for layer in range(LAYERS):
        shapes |= {f"qkv{layer}": (WIDTH, 3 * WIDTH), f"o{layer}": (WIDTH, WIDTH)}
    return {name: jnp.asarray(draw.normal(size=shape) * 0.6) for name, shape in shapes.items()}


def rotated(x, positions):
    size = x.shape[-1] // 2
    angle = positions[..., None, None] / 100.0 ** (jnp.arange(size) / size)
    a, b = x[..., :size], x[..., size:]
    both = (a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle))
    return jnp.concatenate(both, -1).astype(x.dtype)


def init_cache(batch, slots, rows=False, dtype=None):
    """One array of all layers, with slots before rows, and one index."""
    shape = (LAYERS, slots, batch, HEADS, WIDTH // HEADS)
    index = jnp.zeros((batch,) if rows else (), jnp.int32)
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype), "end": index}


def with_states(params, tokens, positions, cache, mask):
    """Two layers of attention; the mask decides what is seen, or (None) the index of each row.

    Also gives the hidden states.
    """
    x, (batch, size) = params["embed"][tokens], tokens.shape
    k, v, end = cache["k"], cache["v"], cache["end"]
    slots = k.shape[1]
    if mask is None:
        mask = jnp.arange(slots) <= (end[:, None] + jnp.arange(size))[..., None]
    for layer in range(LAYERS):
        parts = jnp.split(x @ params[f"qkv{layer}"], 3, -1)
        q, key, value = (part.reshape(batch, size, HEADS, -1) for part in parts)
        q, key = rotated(q, positions), rotated(key, positions)
        if end.ndim:
            place = (end[:, None] + jnp.arange(size)).T
            k = k.at[layer, place, jnp.arange(batch)].set(key.swapaxes(0, 1))
            v = v.at[layer, place, jnp.arange(batch)].set(value.swapaxes(0, 1))
        else:
            put = jax.lax.dynamic_update_slice
            at = [jnp.asarray(i, jnp.int32) for i in (layer, end, 0, 0, 0)]
            k = put(k, key.swapaxes(0, 1)[None], at)
            v = put(v, value.swapaxes(0, 1)[None], at)
        scores = jnp.where(mask[:, None], jnp.einsum("bthd,sbhd->bhts", q, k[layer]), -1e30)
        read = jnp.einsum("bhts,sbhd->bthd", jax.nn.softmax(scores), v[layer])
        x = x + read.reshape(batch, size, -1) @ params[f"o{layer}"]
    return x @ params["out"], {"k": k, "v": v, "end": end + size}, x


def call(*args):
    return with_states(*args)[:2]


def by_index(params, tokens, positions, cache, mask):
    return call(params, tokens, positions, cache, None)


def masked(vocab: int = VOCAB) -> LM:
    return adapter.from_call(call, init_cache, vocab_size=vocab)


def of_chains(vocab: int = VOCAB) -> LM:
    own = Bound(init_cache, rows=True)
    return adapter.from_call(by_index, own, vocab_size=vocab, chains_only=True)


def with_heads() -> LM:
    """A model that heads take."""
    lm = adapter.from_call(with_states, init_cache, vocab_size=VOCAB, width=WIDTH)
    return lm._replace(embed=embed, unembed=unembed)


def embed(params, tokens):
    return params["embed"][tokens]


def unembed(params, hidden):
    return hidden @ params["out"]
