"""A small decoder over a target's features: the draft network of EAGLE-1, EAGLE-2 and EAGLE-3.

Slot t of its text reads token t + 1 and the feature of token t, at rotary position t, and predicts
token t + 2. At slots for which the target has no feature yet, the network reads its own output at
the slot before. So a draft needs no further pass of the target.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4): fc([token ; feature]), then decoder layers of which
the first has no norm before its attention; the result is the feature of the next token. EAGLE-3
(Li et al. 2025, 2503.01840, section 3): g = fc(low, middle and high taps); the attention of the
first layer reads [norm(token) ; norm(g)], with g as the residual; a norm and a head of its own
follow. The later options of EAGLE-3.1 and of the vLLM "speculators" files are switches of
``Shape``. P-EAGLE (2602.01469) has learned taps for places whose feature is unknown.

A ``Network`` is the one description for drafting and training.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.drafters import files
from specjax.drafters.files import Ends, Given
from specjax.drafters.heads import _prefix, _shape, _vocabulary
from specjax.drafters.shared_keys import EagleKeys
from specjax.models import rope_config
from specjax.models.attention import Attention, Past, past, rope_angle, stored
from specjax.models.layers import (
    Linear,
    Module,
    Norm,
    at_least,
    dtype_of,
    in_float32,
    linear_options,
    matmul,
)
from specjax.models.transformer import ExpertMlp, Mlp
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Columns, Layout
from specjax.types import Array, ModelParams, Output, Params


class _Object(dict):
    """A JSON object that is a static value: it has a hash."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


class Fed(NamedTuple):
    """What a draft network computed for T slots."""

    hidden: Array  # [B,T,D] what the head reads
    feature: Array  # [B,T,D] what the next slot reads in the place of the target's feature


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
    parallel: int = 0  # P-EAGLE: how many tokens it drafts in one pass; 0: one
    mask_id: int | None = None  # P-EAGLE: the token at places whose token is unknown
    # How many modules in sequence; above 1 ``Network.apply(module=k)`` computes module k.
    modules: ClassVar[int] = 1
    zero_first: ClassVar[bool] = False


class Layer(nnx.Module):
    """A decoder layer; ``first``: its attention reads its input without a norm."""

    def __init__(
        self, config: TransformerConfig, dtype, rngs: nnx.Rngs, first: bool, read: int | None = None
    ):
        self.first = first
        if not first:
            self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, dtype, rngs, read)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = (ExpertMlp if config.has_experts(0) else Mlp)(config, dtype, rngs)

    def __call__(self, x, angle, past: Past, own, residual=None):
        """x [B,T,read] -> ([B,T,D], keys and values); ``residual`` None is x."""
        residual = x if residual is None else residual
        x, k, v = self.attention(x if self.first else self.attention_norm(x), angle, past, own)
        x = residual + x
        return x + self.mlp(self.mlp_norm(x)), k, v


class _Wide(Layer):
    """EAGLE-3's first layer: its attention reads [norm(token) ; norm(feature)]."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs, first=True, read=2 * config.hidden_size)
        self.token_norm = Norm(config, dtype)
        self.feature_norm = Norm(config, dtype)

    def join(self, embedded: Array, features: Array) -> tuple[Array, Array]:
        """[B,T,D] each -> (the attention's input [B,T,2D], the normed features)."""
        normed = self.feature_norm(features)
        return jnp.concatenate([self.token_norm(embedded), normed], -1), normed


class Layers(nnx.Module):
    """Decoder layers: the base class of all networks."""

    def __init__(self, first: Layer, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        more = {
            str(i): Layer(config, dtype, rngs, first=False) for i in range(1, config.num_layers)
        }
        self.layers = nnx.Dict({"0": first, **more})

    def run(self, x, angle, past: Past, cache: KVCache, block: KVBlock | None, residual=None):
        keys, values = [], []
        for index in range(len(self.layers)):
            own = stored(cache, block, index)
            x, k, v = self.layers[str(index)](x, angle, past, own, None if index else residual)
            keys.append(k)
            values.append(v)
        return x, KVBlock(tuple(keys), tuple(values), x[..., 0].astype(jnp.float32))


class Eagle(Layers):
    """The network of EAGLE-1 and EAGLE-2."""

    def __init__(self, shape: Shape, dtype, rngs: nnx.Rngs):
        super().__init__(Layer(shape.config, dtype, rngs, first=True), shape.config, dtype, rngs)
        size, kw = shape.config.hidden_size, linear_options(shape.fc_bias, dtype, rngs)
        self.fc = Linear(size + shape.read, size, **kw)

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        x = self.fc(jnp.concatenate([embedded, features], -1))
        x, own = self.run(x, angle, past, cache, block)
        return Fed(x, x), own


class Eagle3(Layers):
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

    def read(self, taps: Array) -> Array:
        """Taps [B,T,n,E] -> [B,T,D]."""
        if self.shape.fc_norm:
            taps = self.fc_norm(taps)
        taps = taps.reshape(*taps.shape[:-2], -1)
        return self.fc(self.input_norm(taps) if self.shape.input_norm else taps)

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


MODULE = Module(_module)


class Network(NamedTuple):
    """A draft network on a target; ``params`` is always the pair ``ModelParams``."""

    name: str  # of the method
    shape: Any  # static: ``Shape``, or that of a subclass
    ends: Ends
    dtype: Any = jnp.dtype(jnp.float32)  # of parameters, activations and cache
    # i32[V_d] ascending: the token of each logit; None: all tokens.
    ids: np.ndarray | None = None
    vocab_size: int = 0  # of the target, which ``spread_logits`` needs where there are ``ids``
    # What config.json must hold about the parameters in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()
    # The size of an embedding that new parameters have; 0: they have none.
    embedded: int = 0

    @property
    def width(self) -> int:
        """D."""
        return self.shape.config.hidden_size

    def module(self, params: ModelParams, number: int = 0) -> Any:
        """The module with its parameters, inside a traced function."""
        return MODULE.merge(self.shape, params.draft, self.dtype)

    def init_cache(self, batch: int, slots: int) -> KVCache:
        """An empty cache; each module in sequence has one."""
        config = self.shape.config
        return _prefix.init_cache(config, self.dtype, config.num_layers, batch, slots)

    def read(self, params: ModelParams, out: Output) -> Array:
        """[B,T,D]: the target's features as the network reads them."""
        dtype = at_least(self.dtype, params.draft)
        if not self.shape.taps:
            return out.hidden.astype(dtype)
        return self.module(params).read(jnp.stack(out.taps, -2).astype(dtype))

    def masked(self, params: ModelParams) -> Array:
        """[D]: the learned feature that a parallel network reads at a mask."""
        module = self.module(params)
        taps = module.mask_hidden[...].reshape(1, 1, len(self.shape.taps), -1)
        return module.read(taps)[0, 0]

    def apply(
        self,
        params: ModelParams,
        tokens: Array,
        features: Array,
        cache: KVCache,
        layout: Layout | Columns | None = None,
        block: KVBlock | None = None,
        *,
        module: int = 0,
    ) -> tuple[Fed, KVBlock]:
        """tokens i32[B,T], features [B,T,D] -> (``Fed``, keys and values), as ``LM.apply``."""
        dtype, fed = at_least(self.dtype, params.draft), 0 if block is None else block.size
        view = past(cache, tokens.shape[1], layout, fed)
        angle = rope_angle(self.shape.config, view.positions)
        embedded = embed(self.ends, params, tokens).astype(dtype)
        if self.shape.zero_first:
            embedded = jnp.where((view.positions == 0)[..., None], 0, embedded)
        own = self.module(params, module)
        return own(embedded, features.astype(dtype), angle, view, cache, block)

    def logits(self, params: ModelParams, hidden: Array) -> Array:
        """``Fed.hidden`` [...,D] -> f[...,V_d], in float32 at least."""
        if self.shape.vocab is None:
            return logits(self.ends, params, hidden)
        return in_float32(self.module(params).head(hidden))

    def spread_logits(self, params: ModelParams, hidden: Array) -> Array:
        """f[...,V]: ``logits`` at their tokens, -inf at all others."""
        return _vocabulary.spread(self.ids, self.logits(params, hidden), self.vocab_size)

    def start(self, target_params: Params, key: Array) -> Params:
        """New parameters: random, but a head and an embedding of its own begin as the target's.

        They too are random where the network has another width.
        """
        params = MODULE.new(self.shape, key)
        dtype = params["fc"]["kernel"].dtype
        same = self.width == self.ends.width
        if self.embedded:
            if same:
                table = self.ends.embed(target_params, jnp.arange(self.embedded))
            else:
                own = jax.random.fold_in(key, 1)  # the module has drawn from the key
                table = jax.random.normal(own, (self.embedded, self.width)) / self.width**0.5
            params["embed"] = {"embedding": table.astype(dtype)}
        if self.shape.vocab is not None and same:
            head = self.ends.output_kernel(target_params).astype(dtype)
            params["head"]["kernel"] = head if self.ids is None else head[:, jnp.asarray(self.ids)]
        return params


def build(
    name: str, shape: Shape, given: Given, keys: EagleKeys, vocab_size: int, ids: np.ndarray | None
) -> Network:
    """The network of this shape, that of the method ``name``. Raises UserError.

    ``vocab_size`` is that of the target; ``ids`` i32[V_d] ascending are the tokens that it can
    draft, None: all.
    """
    _shape.check(name, given, MODULE.leaves(shape))
    mask = () if shape.mask_id is None else (("mask_token_id", shape.mask_id),)
    # The default shift is not written into config.json.
    stated = [fact for fact in files.facts(type(keys), shape) if fact != ("shift", 1)]
    facts = (*layer_facts(shape.config), *stated, *mask, *_vocabulary.facts(ids, vocab_size))
    embedded = vocab_size if getattr(keys, "embeddings", False) else 0
    own = name, shape, given.ends, dtype_of(given.params), ids, vocab_size
    return Network(*own, facts, embedded)


def embed(ends: Ends, params: ModelParams, tokens: Array) -> Array:
    """i32[...] -> [...,D]: by the embedding of the network's parameters, or the target's."""
    if "embed" not in params.draft:
        return ends.embed(params.target, tokens)
    table = params.draft["embed"]["embedding"]
    return table[jnp.clip(tokens, 0, table.shape[0] - 1)]


def logits(ends: Ends, params: ModelParams, hidden: Array) -> Array:
    """[...,D] -> f[...,V_d] in float32 at least: by a head of the parameters, or the target's."""
    if "head" in params.draft:
        return in_float32(matmul(hidden, params.draft["head"]["kernel"].astype(hidden.dtype)))
    return in_float32(ends.unembed(params.target, hidden))


def layer_facts(config: TransformerConfig) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about the layers in addition to their tensors."""
    result = _prefix.facts(config)
    written = rope_config.write(config.rope_of_full(), config.head_dim)
    if config.rotary_dim is not None:
        result += (("partial_rotary_factor", written["partial_rotary_factor"]),)
    if (own := config.experts) is not None:
        result += (("num_experts_per_tok", own.chosen), ("norm_topk_prob", own.renormalise))
        result += (("intermediate_size", config.intermediate_size),)
    if config.rope_scaling is None:
        return result
    return (*result, ("rope_scaling", _Object(written["rope_scaling"])))
