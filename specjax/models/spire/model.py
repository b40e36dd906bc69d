"""SPIRe's draft model as the pure functions of ``types.LM``.

With feedback memory, a token t has a memory m_t = sum_l softmax(a)_l x_t^l of its embedding x_t^0
and the outputs x_t^1, x_t^2, ... of the layers. Every layer projects the keys and values that later
tokens attend to from m_t, through its own norm and its own matrices. So a token depends on the last
layer of the tokens before it: a chain is computed one token after the other, a tree level by level.

Sources: SPIRe, Neelam et al. 2025 (2504.06419), for sparse attention, pruned initialisation and
feedback memory together; Feedback Transformer, Fan et al. 2020 (2002.09402), for the memory. There
the layers may share the matrices of keys and values; here each has its own, which the pruned
initialisation gives.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.errors import UserError
from specjax.models import lm
from specjax.models.spire import cache as sparse
from specjax.models.spire import passes
from specjax.models.spire.cache import SparseCache
from specjax.models.spire.config import SpireConfig, check
from specjax.models.transformer import Transformer
from specjax.types import LM, Output

MEMORY = "memory"  # the parameters {"weights": f[layers+1]} of the mixture


def with_memory(config: SpireConfig, params: dict) -> dict:
    """The parameters of its decoder with those of the memory: zeros, a plain mean of all layers."""
    if not config.feedback:
        return params
    dtype = params["embed"]["embedding"].dtype
    return params | {MEMORY: {"weights": jnp.zeros(config.decoder.num_layers + 1, dtype)}}


def abstract_params(config: SpireConfig, dtype=jnp.float32) -> dict:
    """The parameters' shapes and dtypes: a plain dict of ``jax.ShapeDtypeStruct``, no arrays."""
    params = lm.abstract_params(config.decoder, dtype)
    return jax.eval_shape(Bound(with_memory, config), params)


@functools.cache
def from_config(
    config: SpireConfig,
    dtype=jnp.float32,
    taps: tuple[int, ...] = (),
    name: str = "spire",
    remat: bool = False,
) -> LM:
    """The model of ``config`` as an ``LM``.

    Equal arguments give the same object, so no program is compiled twice.

    Args:
        config: its shape.
        dtype: of the cache; a pass computes in the dtype of its parameters.
        taps: layer numbers; the output hidden states of these layers are in ``Output.taps``.
        name: for messages and results.
        remat: compute activations again in the backward pass: with feedback memory in segments of
            about the root of the length, else in each layer.

    Raises UserError for taps that are not layers, and for wrong values of ``config``.
    """
    check(config)
    decoder, dtype = config.decoder, jnp.dtype(dtype)
    if any(not 0 <= tap < decoder.num_layers for tap in taps):
        raise UserError(f"taps are {taps}; layers are numbered 0..{decoder.num_layers - 1}")

    def init_cache(batch: int, slots: int) -> SparseCache:
        shape = (decoder.num_layers, batch, decoder.num_kv_heads, slots, decoder.head_dim)
        return sparse.zeros(*shape, dtype, config.sinks, config.window)

    def apply(params, tokens, cache, layout=None, block=None):
        own, weights = _split(params)
        job = passes.SpirePass(config, _module(config, own), weights, cache, taps, remat)
        done = passes.run(job, tokens, layout, block)
        out = Output(job.module.logits(done.hidden), done.hidden, done.taps)
        return out, KVBlock(done.k, done.v, done.hidden[..., 0].astype(jnp.float32))

    return LM(
        init_cache,
        apply,
        sparse.commit,
        decoder.vocab_size,
        decoder.longest_text,
        name=name,
        width=decoder.hidden_size,
        embed=lambda params, tokens: _module(config, _split(params)[0]).embedded(tokens),
        unembed=lambda params, hidden: _module(config, _split(params)[0]).logits(hidden),
        layers=decoder.num_layers,
        window=config.window,
        tapping=lambda layers: from_config(config, dtype, tuple(layers), name, remat).apply,
    )


def _split(params: dict) -> tuple[dict, jax.Array | None]:
    """The parameters of the decoder, and the weights of the mixture."""
    own = {key: value for key, value in params.items() if key != MEMORY}
    return own, params[MEMORY]["weights"] if MEMORY in params else None


def _module(config: SpireConfig, params: dict) -> Transformer:
    return lm.merge(config.decoder, params, params["embed"]["embedding"].dtype)
