"""The modules of EAGLE's draft networks, made of the parts of ``specjax.models.transformer``.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4): fc([token ; feature]), then decoder layers of which
the first has no norm before its attention; the result is the feature of the next token. EAGLE-3
(Li et al. 2025, 2503.01840, section 3): g = fc(low, middle and high taps); the attention of the
first layer reads [norm(token) ; norm(g)], with g as the residual; a norm and a head of its own
follow. The later options of EAGLE-3.1 and of the vLLM "speculators" files are switches of
``Shape``. P-EAGLE (2602.01469) has learned taps for places whose feature is unknown.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.models.attention import Attention, Past, stored
from specjax.models.linear import Linear, linear_options
from specjax.models.norm import Norm
from specjax.models.transformer import Mlp
from specjax.models.transformer_config import TransformerConfig
from specjax.types import Params


class Fed(NamedTuple):
    """What a draft network computed for T slots."""

    hidden: jax.Array  # [B,T,D] what the head reads
    feature: jax.Array  # [B,T,D] what the next slot reads in the place of the target's feature


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static facts of a draft network."""

    config: TransformerConfig  # of its layers; ``hidden_size`` is D
    read: int  # E, the width of the target's features
    taps: tuple[int, ...] = ()  # (): EAGLE-1, which reads the target's last feature
    vocab: int | None = None  # V_d, the width of a head of its own; None: the target's head
    fc_bias: bool = False
    fc_norm: bool = False  # EAGLE-3.1: a norm of each tap before fc
    input_norm: bool = False  # one norm of all taps before fc
    norm_output: bool = False  # EAGLE-3.1: the next slot reads the feature after the last norm
    norm_before_residual: bool = False  # the residual of the first layer is the normed feature
    shift: int = 1  # see ``Network``
    parallel: bool = False  # P-EAGLE: it has taps of its own for masks


class _Layer(nnx.Module):
    """A decoder layer; ``first``: its attention reads its input without a norm."""

    def __init__(
        self, config: TransformerConfig, dtype, rngs: nnx.Rngs, first: bool, read: int | None = None
    ):
        self.first = first
        if not first:
            self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, dtype, rngs, read)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = Mlp(config, dtype, rngs)

    def __call__(self, x, angle, past: Past, own, residual=None):
        """x [B,T,read] -> ([B,T,D], keys and values); ``residual`` None is x."""
        residual = x if residual is None else residual
        x, k, v = self.attention(x if self.first else self.attention_norm(x), angle, past, own)
        x = residual + x
        return x + self.mlp(self.mlp_norm(x)), k, v


class _Wide(_Layer):
    """EAGLE-3's first layer: its attention reads [norm(token) ; norm(feature)]."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs, first=True, read=2 * config.hidden_size)
        self.token_norm = Norm(config, dtype)
        self.feature_norm = Norm(config, dtype)

    def join(self, embedded: jax.Array, features: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B,T,D] each -> (the attention's input [B,T,2D], the normed features)."""
        normed = self.feature_norm(features)
        return jnp.concatenate([self.token_norm(embedded), normed], -1), normed


class _Net(nnx.Module):
    """What both networks share: their layers."""

    def __init__(self, first: _Layer, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        more = {
            str(i): _Layer(config, dtype, rngs, first=False) for i in range(1, config.num_layers)
        }
        self.layers = nnx.Dict({"0": first, **more})

    def run(self, x, angle, past: Past, cache: KVCache, block: KVBlock | None, residual=None):
        keys, values = [], []
        for index in range(len(self.layers)):
            own = stored(cache, block, index)
            x, k, v = self.layers[str(index)](x, angle, past, own, residual)
            residual = None
            keys.append(k)
            values.append(v)
        return x, KVBlock(tuple(keys), tuple(values), x[..., 0].astype(jnp.float32))


class Eagle(_Net):
    """The network of EAGLE-1 and EAGLE-2."""

    def __init__(self, shape: Shape, dtype, rngs: nnx.Rngs):
        super().__init__(_Layer(shape.config, dtype, rngs, first=True), shape.config, dtype, rngs)
        size, kw = shape.config.hidden_size, linear_options(shape.fc_bias, dtype, rngs)
        self.fc = Linear(size + shape.read, size, **kw)

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        x = self.fc(jnp.concatenate([embedded, features], -1))
        x, own = self.run(x, angle, past, cache, block)
        return Fed(x, x), own


class Eagle3(_Net):
    """The network of EAGLE-3."""

    def __init__(self, shape: Shape, dtype, rngs: nnx.Rngs):
        config, count = shape.config, len(shape.taps)
        super().__init__(_Wide(config, dtype, rngs), config, dtype, rngs)
        self.shape = shape
        kw = linear_options(False, dtype, rngs)
        self.fc = Linear(count * shape.read, config.hidden_size, **kw)
        if shape.fc_norm:
            self.fc_norm = Norm(config, dtype, (count, shape.read))
        if shape.input_norm:
            self.input_norm = Norm(config, dtype, count * shape.read)
        if shape.parallel:
            taps = jax.random.normal(rngs.params(), (1, 1, count * shape.read), dtype)
            self.mask_hidden = nnx.Param(0.02 * taps)
        self.norm = Norm(config, dtype)
        if shape.vocab is not None:
            self.head = Linear(config.hidden_size, shape.vocab, **kw)

    def read(self, taps: jax.Array) -> jax.Array:
        """Taps [B,T,n,E] -> [B,T,D]."""
        if self.shape.fc_norm:
            taps = self.fc_norm(taps)
        taps = taps.reshape(*taps.shape[:-2], -1)
        return self.fc(self.input_norm(taps) if self.shape.input_norm else taps)

    def masked(self) -> jax.Array:
        """[D]: what stands for the feature at a mask."""
        taps = self.mask_hidden[...].reshape(1, 1, len(self.shape.taps), -1)
        return self.read(taps)[0, 0]

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        first: Any = self.layers["0"]
        x, normed = first.join(embedded, features)
        residual = normed if self.shape.norm_before_residual else features
        x, own = self.run(x, angle, past, cache, block, residual)
        hidden = self.norm(x)
        return Fed(hidden, hidden if self.shape.norm_output else x), own


def _module(shape: Shape, dtype: Any, rngs: nnx.Rngs) -> Eagle | Eagle3:
    return (Eagle3 if shape.taps else Eagle)(shape, dtype, rngs)


@functools.cache
def abstract(shape: Shape, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of the module, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: _module(shape, dtype, nnx.Rngs(0))))


def new(shape: Shape, key: jax.Array) -> Params:
    """Random parameters (normal, standard deviation 0.02) as a plain dict."""
    return nnx.to_pure_dict(nnx.state(_module(shape, jnp.float32, nnx.Rngs(key))))
