"""Small models for tests: tiny decoders, and tables of logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import tree
from specjax.errors import UserError
from specjax.models import families, lm
from specjax.models.spire import model as spire
from specjax.models.spire.config import SpireConfig
from specjax.models.t5_config import t5
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, LowerLayers, Output, Sublayers


def tiny_config(
    family: str = "llama", vocab_size: int = 32, layers: int = 2, width: int = 32
) -> TransformerConfig:
    """A decoder small enough to compile in a second.

    It has grouped-query attention, unless the family cannot have it (GPT-2, GPT-NeoX).
    """
    return families.shape(
        family,
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2 if "num_kv_heads" in families.FAMILIES[family].keys else 4,
        head_dim=width // 4,
        max_positions=128,
    )


def tiny(family: str = "llama", seed: int = 0, scale: float = 8.0, **shape) -> tuple[LM, dict]:
    """A random tiny decoder and its params.

    ``scale`` multiplies the weight matrices, so that its probabilities are far from uniform.
    """
    config = tiny_config(family, **shape)
    params = lm.init_params(config, jax.random.key(seed))
    return lm.from_config(config), jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)


def tiny_t5(seed: int = 0, scale: float = 20.0, dtype=jnp.float32, **fields) -> tuple[LM, dict]:
    """A random tiny encoder-decoder model and its params; its decoder begins with token 0.

    ``fields`` are those of ``T5Config``; ``scale`` as in ``tiny``; ``dtype`` of the activations.
    """
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
    sizes |= {"vocab_size": 32, "num_layers": 2, "buckets": 8, "max_distance": 12}
    config = t5(**sizes | {"start_token_id": 0} | fields)
    params = lm.init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
    return lm.from_config(config, dtype), params


def prompts_of(target: LM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Prompts for the target, of the same lengths: with an encoder, their last token is its start.

    A prompt of one token gets a second one, and a prompt with a source and the start token is not
    changed.
    """
    if target.encoder is None:
        return [list(prompt) for prompt in prompts]
    start = target.encoder.start
    others = [token for token in range(target.vocab_size) if token != start]

    def one(prompt: Sequence[int]) -> list[int]:
        if start in prompt[1:] and prompt[0] != start:
            return list(prompt)
        return [*(others[token % len(others)] for token in prompt[:-1] or prompt), start]

    return [one(list(prompt)) for prompt in prompts]


def tiny_spire(
    seed: int = 0, sinks: int = 1, window: int = 3, scale: float = 8.0, **shape
) -> tuple[LM, dict]:
    """A random SPIRe draft model with feedback memory, and its params.

    Its cache has four slots, so texts of a few tokens do not fit; ``scale`` as in ``tiny``.
    """
    config = SpireConfig(tiny_config(**shape), sinks, window)
    params = lm.init_params(config.decoder, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * scale if x.ndim > 1 else x, params)
    return spire.from_config(config), spire.with_memory(config, params)


class TabularCache(struct.PyTreeNode):
    """The committed text."""

    length: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B,S]

    def score(self, table, tokens, layout=None, block=None) -> tuple[Output, jax.Array]:
        """``LM.apply`` of a table after this text; ``HashCache`` has it too, so parts read both."""
        return _apply(table, tokens, self, layout, block)


# How many layers of a table can be tapped: the tap of layer i is its hidden vector, rotated by i.
LAYERS = 3


def tapping(apply: Callable, missing: int = 0) -> Callable:
    """``LM.tapping`` of a table model with this ``apply``; ``missing`` as in ``_rolled``."""

    @functools.cache
    def tapped(layers: tuple[int, ...]) -> Callable:
        if any(not 0 <= layer < LAYERS for layer in layers):
            raise UserError(f"taps are {layers}; layers are numbered 0..{LAYERS - 1}")

        def with_taps(*args):
            out, block = apply(*args)
            taps = tuple(jnp.roll(out.hidden, i, -1) for i in layers)
            return _rolled(out, missing)._replace(taps=taps), block

        return with_taps

    return tapped


def _rolled(out: Output, missing: int) -> Output:
    """The output of a part that lacks so many sublayers; taps are those of the whole model."""
    logits = jnp.roll(out.logits, missing, -1) if missing else out.logits
    return out._replace(logits=logits, hidden=logits)


def _score(table, tokens, cache, layout=None, block=None):
    return cache.score(table, tokens, layout, block)


def _extended(pair, tokens, cache, layout=None, block=None):
    """``LM.extended`` of a table: a row is added to the logits of the last token."""
    table, rows = pair
    out, block = cache.score(table, tokens, layout, block)
    own = tokens - table.shape[-1]
    more = rows[jnp.clip(own, 0, len(rows) - 1)]
    logits = out.logits + jnp.where((own >= 0)[..., None], more, 0)
    return Output(logits, logits), block


def above(layers: tuple[int, ...]) -> Callable[..., tuple[Output, Any]]:
    """``LM.above`` of a table."""
    return functools.partial(_go_on, layers)


def _go_on(
    layers: tuple[int, ...], pair: tuple[jax.Array, LowerLayers], tokens, cache, layout=None
) -> tuple[Output, Any]:
    """A pass in which the logits of the first tokens come from the hidden states of a part.

    The other tokens read the part's block, and so does a commit.
    """
    table, known = pair
    size, done = tokens.shape[1], known.hidden.shape[1]
    logits, block = known.hidden[:, :size], known.block[:, :size]
    # The output of a layer is the hidden vector, rotated by its number.
    logits = jnp.roll(logits, 1 - known.count, -1)
    if size > done:
        later = None if layout is None else layout.replace(visible=layout.visible[:, done:])
        out, more = cache.score(table, tokens[:, done:], later, known.block)
        logits, block = tree.join((logits, block), (out.logits, more))
    taps = tuple(jnp.roll(logits, layer, -1) for layer in layers)
    return Output(logits, logits, taps), block


@functools.cache
def part(vocab_size: int, name: str, sublayers: Sublayers) -> LM:
    """``LM.part`` of a table: its logits, rolled by the number of sublayers that are left out."""
    for layers in sublayers:
        if any(not 0 <= layer < LAYERS for layer in layers):
            raise UserError(f"sublayers {layers} are asked for; give numbers 0..{LAYERS - 1}")
    missing = 2 * LAYERS - len(sublayers.attention) - len(sublayers.mlp)

    def apply(*args):
        out, block = _score(*args)
        return _rolled(out, missing), block

    return tabular(vocab_size, name)._replace(apply=apply, tapping=tapping(_score, missing))


def tabular(vocab_size: int, name: str = "tabular") -> LM:
    """A model that is a table: its params are logits f32[V+1,V,V], indexed by the last two tokens.

    Index V of the first axis: there is no earlier token. The model has a cache and takes chains and
    trees. Its law is known, so the outputs of a decode loop can be checked exactly. Its logits
    depend on the cache alone, so a wrong commit changes the output.
    """
    # The hidden vector is the logits and the head is the identity, so drafters with heads work too.
    return LM(
        _init_cache,
        _apply,
        _commit,
        vocab_size,
        name=name,
        width=vocab_size,
        embed=_embed,
        unembed=_unembed,
        layers=LAYERS,
        tapping=TAPPING,
        part=functools.partial(part, vocab_size, name),
        extended=_extended,
        above=above,
    )


def _init_cache(batch: int, slots: int) -> TabularCache:
    return TabularCache(jnp.zeros((batch,), jnp.int32), jnp.full((batch, slots), -1, jnp.int32))


def _apply(table, tokens, cache, layout=None, block=None):
    (batch, size), vocab = tokens.shape, table.shape[-1]
    stored = tokens if block is None else jnp.concatenate([block, tokens], 1)
    if layout is None:
        layout = tree.chain_layout(batch, size, stored.shape[1] - size)
    # The token before each one: in the block the visible one that is one position earlier.
    own = layout.depth[:, -size:]
    above = layout.visible & (layout.depth[:, None] == own[..., None] - 1)
    inside = jnp.take_along_axis(stored, jnp.argmax(above, -1), 1)
    last = jnp.maximum(cache.length - 1, 0)[:, None]
    committed = jnp.take_along_axis(cache.tokens, last, 1) if cache.tokens.shape[1] else last
    outside = jnp.where(cache.length[:, None] > 0, committed, vocab)
    before = jnp.where(above.any(-1), inside, outside)
    logits = table[jnp.clip(before, 0, vocab), jnp.clip(tokens, 0, vocab - 1)]
    return Output(logits, logits), tokens


TAPPING = tapping(_apply)


def _commit(cache, block, count, path=None):
    if path is None:
        path = jnp.broadcast_to(jnp.arange(block.shape[1]), block.shape)
    kept = jnp.arange(path.shape[1]) < count[:, None]
    new = tree.take(block, path, kept)
    slot = cache.length[:, None] + jnp.arange(path.shape[1])
    place = jnp.where(kept, slot, cache.tokens.shape[1])
    rows = jnp.arange(path.shape[0])[:, None]
    tokens = cache.tokens.at[rows, place].set(new, mode="drop")
    return cache.replace(tokens=tokens, length=cache.length + count)


def _embed(table, tokens):
    return jax.nn.one_hot(tokens, table.shape[-1], dtype=table.dtype)


def _unembed(table, hidden):
    return hidden


def random_table(seed: int, vocab_size: int, sharpness: float = 1.5, dtype=np.float32) -> jax.Array:
    """Params for ``tabular``: logits f32[V+1,V,V]."""
    table = np.random.default_rng(seed).normal(size=(vocab_size + 1, vocab_size, vocab_size))
    return jnp.asarray((sharpness * table).astype(dtype))
