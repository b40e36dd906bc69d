"""What a draft of some sublayers computes along a whole text, in one pass.

A draft token is computed with the target's own keys and values of the text before it. A plain pass
of the part over the text would read the part's own ones instead, and give other logits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import logit_maps, sampling
from specjax.cache import KVBlock
from specjax.tree import Layout, chain_layout
from specjax.types import LM, Array, Context, ModelParams, Output, Params, Sublayers


def of_layers(block: Any, layers: tuple[int, ...]) -> Any:
    """The block of a decoder, with the keys and values of these layers alone."""
    if not isinstance(block, KVBlock):
        return block  # of a table, which has no layers
    k, v = (tuple(values[layer] for layer in layers) for values in (block.k, block.v))
    return block.replace(k=k, v=v)


def outputs(target: LM, part: Sublayers, params: Params, tokens: Array) -> tuple[Output, Output]:
    """The outputs of the target and of a draft's first step after each token of i32[B,T].

    ``params`` are the target's. The draft at token t reads the target's keys and values of the
    tokens before t, and computes its own for t.
    """
    out, block = target.apply(params, tokens, target.init_cache(tokens.shape[0], 0))
    return out, draft(target, part, params, tokens, block)


def draft(target: LM, part: Sublayers, params: Params, tokens: Array, block: Any) -> Output:
    """The second of ``outputs``, with the target's block of the text."""
    batch, size = tokens.shape
    place = jnp.arange(size)
    before, own = place < place[:, None], place == place[:, None]
    visible = jnp.broadcast_to(jnp.concatenate([before, own], 1), (batch, size, 2 * size))
    depth = chain_layout(batch, size).depth
    layout = Layout(visible, jnp.concatenate([depth, depth], 1))
    model, given = target.with_part(part), of_layers(block, part.attention)
    return model.apply(params, tokens, target.init_cache(batch, 0), layout, given)[0]


def probs(target: LM, part: Sublayers, params: ModelParams, context: Context) -> jax.Array:
    """f32[B,S,V]: ``Drafter.probs`` of a draft with these sublayers."""
    logits = outputs(target, part, params.target, context.tokens)[1].logits
    logits = logit_maps.along_text(context.sampling.maps, logits, context.tokens)
    return sampling.to_probs(logits, context.sampling)
