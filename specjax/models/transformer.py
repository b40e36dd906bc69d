"""One decoder for all families: from tokens to the input of the LM head.

Attention reads two parts: the committed text in the cache, and the tokens of the block itself
through a mask. Prefill, single steps, draft chains, draft trees and packed documents share this
code. The cache is not written (see ``specjax.cache.commit``). What a family computes differently is
a switch of ``TransformerConfig``; ``families`` lists them.

Sources: Llama (2302.13971), grouped-query attention (2305.13245), GPT-2 (Radford et al. 2019),
GPT-NeoX's parallel residual (2204.06745), OLMo 2's norms (2501.00656), Gemma 2 (2408.00118), Gemma
3 (2503.19786), Qwen3 (2505.09388).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.bound import Bound
from specjax.cache import KVCache, Queries, block_of
from specjax.models import rope
from specjax.models.attention import Attention, Past, Stored, past, stored
from specjax.models.layers import Linear, Norm, capped, in_float32, init, linear_options, tied_head
from specjax.models.recurrent import GatedDelta, Mamba2, places
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import Sublayers

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": Bound(jax.nn.gelu, approximate=False),
    "gelu_tanh": Bound(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}


class Mlp(nnx.Module):
    """Two linear maps with an activation between them, and a gate unless ``gated`` is False."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.gated, self.activation = config.gated, config.activation
        kw = linear_options(config.mlp_bias, dtype, rngs)
        if self.gated:
            self.gate = Linear(config.hidden_size, config.intermediate_size, **kw)
        self.up = Linear(config.hidden_size, config.intermediate_size, **kw)
        self.down = Linear(config.intermediate_size, config.hidden_size, **kw)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.gated:
            return self.down(activation(self.activation, self.gate(x)) * self.up(x))
        return self.down(activation(self.activation, self.up(x)))


def activation(name: str, x: jax.Array) -> jax.Array:
    """The activation of this name, computed in float32 at least and rounded once."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return ACTIVATIONS[name](x.astype(wide)).astype(x.dtype)


class Block(nnx.Module):
    """Attention and feed-forward part, with the norms that the configuration has."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs, layer: int = 0):
        self.pre, self.post, self.parallel = config.pre_norm, config.post_norm, config.parallel
        self.feeds = layer not in config.without_mlp
        if self.pre:
            self.attention_norm = Norm(config, dtype)
        if self.pre and self.feeds:
            self.mlp_norm = Norm(config, dtype)
        own = config.recurrent if config.is_recurrent(layer) else None
        self.kind = "attention" if own is None else own.kind
        if self.kind == "mamba2":
            self.mamba = Mamba2(config, dtype, rngs)
        elif self.kind == "delta":
            self.delta = GatedDelta(config, dtype, rngs)
        else:
            self.attention = Attention(config, dtype, rngs, layer=layer)
        if self.feeds:
            make = ExpertMlp if config.has_experts(layer) else Mlp
            self.mlp = make(config, dtype, rngs)
        if self.post:
            self.attention_post_norm = Norm(config, dtype)
        if self.post and self.feeds:
            self.mlp_post_norm = Norm(config, dtype)

    def __call__(self, x, angle, past: Past, stored: Stored):
        """x [B,T,E] -> ([B,T,E], keys and values of the T tokens [B,T,H,D]).

        Of a recurrent layer: ([B,T,E], ``cache.Updates``); ``stored`` is its ``Before``.
        """
        attended, *own = self._attended(x, angle, past, stored)
        if self.parallel and self.feeds:
            # In the order in which GPT-NeoX adds and rounds.
            return x + (attended + self._fed(x)), *own
        after = x + attended
        return self.feed(after, after), *own

    def attend(self, x, angle, past: Past, stored: Stored):
        """The attention alone; arguments and results are those of the layer."""
        attended, *own = self._attended(x, angle, past, stored)
        return x + attended, *own

    def _attended(self, x, angle, past: Past, stored: Any):
        """What the attention or the recurrence adds to x; keys and values, or updates."""
        read = self.attention_norm(x) if self.pre else x
        if self.kind == "attention":
            attended, *own = self.attention(read, angle, past, stored)
        else:
            mixer = self.mamba if self.kind == "mamba2" else self.delta
            attended, *own = mixer(read, past.layout, past.places, stored)
        return self.attention_post_norm(attended) if self.post else attended, *own

    def queries(self, x, angle) -> Queries:
        """x [B,T,E] -> the queries of its attention."""
        q = self.attention.part("q", self.attention_norm(x) if self.pre else x, angle)
        rule = self.attention.scores
        return Queries(q.astype(jnp.float32) / rule.divisor, rule.softcap)

    def feed(self, read, after):
        """``after`` [B,T,E] with the result of the feed-forward part, if any, for ``read``."""
        return after + self._fed(read) if self.feeds else after

    def _fed(self, read):
        """What the feed-forward part adds."""
        fed = self.mlp(self.mlp_norm(read) if self.pre else read)
        return self.mlp_post_norm(fed) if self.post else fed


class Transformer(nnx.Module):
    """The decoder; ``dtype`` is that of parameters and activations, logits are float32."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        self.config = config
        kw = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs, "embedding_init": init()}
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, **kw)
        if config.positions == "learned":
            self.positions = nnx.Embed(config.max_positions, config.hidden_size, **kw)
        self._add_layers(config, dtype, rngs)
        self.norm = Norm(config, dtype)
        if not config.tie_embeddings:
            kw = linear_options(config.head_bias, dtype, rngs)
            self.head = Linear(config.hidden_size, config.vocab_size, **kw)

    def _add_layers(self, config: TransformerConfig, dtype, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Block(config, dtype, rngs, i) for i in range(config.num_layers)])

    def __call__(
        self,
        tokens,
        cache: Any,
        layout: Layout | None = None,
        block: Any = None,
        taps: tuple[int, ...] = (),
        remat: bool = False,
        part: Sublayers | None = None,
        kept: jax.Array | None = None,
        rows: jax.Array | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
        """tokens i32[B,T] -> (hidden [B,T,E], taps, the block of these tokens).

        ``layout`` and ``block`` as in ``types.LM``, ``remat`` and ``part`` as in
        ``lm.from_config``, ``rows`` as in ``Inside.extended``; cache and block have the layers
        whose attention is computed. ``kept`` bool[B,L]: the layers of each row that change its
        hidden states; None: all. ``start`` [B,T,E]: the input of the first layer that is computed;
        None: the embeddings.
        """
        fed = 0 if block is None else block.size
        view = past(cache, tokens.shape[1], layout, fed)
        if layout is not None and self.config.recurrent is not None:
            view = view._replace(places=places(layout, self.config.recurrent.kernel))
        x, angles = self._inputs(tokens, view, cache, rows, start)
        made, tapped, every = [], {}, tuple(range(self.config.num_layers))
        attends, feeds = (every, every) if part is None else part
        for index, layer in enumerate(self.layers):
            before = x
            if index in attends:
                call = layer.__call__ if index in feeds else layer.attend
                call = jax.checkpoint(call) if remat else call
                x, *own = call(x, angles[index], view, stored(cache, block, len(made)))
                made.append(tuple(own) if len(own) > 1 else own[0])
            elif index in feeds:
                x = (jax.checkpoint(layer.feed) if remat else layer.feed)(x, x)
            if kept is not None:
                x = jnp.where(kept[:, index, None, None], x, before)
            tapped[index] = x
        hidden = self.norm(x)
        own = block_of(made, hidden[..., 0].astype(jnp.float32))
        return hidden, tuple(tapped[i] for i in taps), own

    def queries(self, tokens: jax.Array, cache: KVCache) -> tuple[Queries, ...]:
        """For each layer the queries of tokens i32[B,T] after a cache, in sequence."""
        view = past(cache, tokens.shape[1], None)
        angles, every = self.angles(view.positions), range(self.config.num_layers)
        _, after, _ = self(tokens, cache, taps=tuple(every))
        reads = (self.first(tokens, view), *after)
        return tuple(self.layers[i].queries(reads[i], angles[i]) for i in every)

    def _inputs(
        self, tokens: jax.Array, view: Past, cache: Any, rows, start
    ) -> tuple[jax.Array, Sequence[Any]]:
        """The input of the first layer, and for each layer its rotary angles."""
        x = self.first(tokens, view, rows) if start is None else start
        return x, self.angles(view.positions)

    def first(self, tokens: jax.Array, view: Any, rows: jax.Array | None = None) -> jax.Array:
        """[B,T,E]: the input of the first layer; ``rows`` [L,E]: for ids beyond the vocabulary."""
        x = self.embedded(tokens)
        if rows is not None:
            own = tokens - self.config.vocab_size
            more = rows[jnp.clip(own, 0, len(rows) - 1)].astype(x.dtype)
            x = jnp.where((own >= 0)[..., None], more, x)
        if self.config.positions == "learned":
            x = x + self.positions(jnp.clip(view.positions, 0, self.config.max_positions - 1))
        return x

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """i32[...] -> [...,E]: the embeddings, without learned positions."""
        # Ids are out of range only in masked draft nodes and past the length limit; the results of
        # both are discarded later.
        x = self.embed(jnp.clip(tokens, 0, self.config.vocab_size - 1))
        scale = self.config.embedding_scale
        return x if scale is None else x * jnp.asarray(scale, x.dtype)

    def angles(self, positions: jax.Array) -> list[jax.Array | None]:
        """For each layer the rotary angles at ``positions`` i32[B,T]; None if it has none."""
        ropes = [self.config.rope(i) for i in range(self.config.num_layers)]
        made = {own: rope.angle(own, positions) for own in dict.fromkeys(ropes) if own is not None}
        return [None if own is None else made[own] for own in ropes]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[B,T,E] -> f32[B,T,V]."""
        tied = self.config.tie_embeddings
        out = in_float32(tied_head(self.embed, hidden) if tied else self.head(hidden))
        return capped(out, self.config.final_softcap)

    def some_logits(self, hidden: jax.Array, ids: np.ndarray) -> jax.Array:
        """[B,T,E] -> f32[B,T,n]: the logits of the tokens ``ids`` i32[n], and no others."""
        tied = self.config.tie_embeddings
        kernel = self.embed.embedding[...][ids].T if tied else self.head.kernel[...][:, ids]
        out = hidden @ kernel.astype(hidden.dtype)
        if not tied and self.head.bias is not None:
            out = out + self.head.bias[...][ids].astype(out.dtype)
        return capped(in_float32(out), self.config.final_softcap)


class ExpertMlp(nnx.Module):
    """A router and SwiGLU experts with kernels [experts, in, out].

    Every token is computed by all experts that were chosen for it: no expert has a capacity, so a
    token's result does not depend on the other tokens of the batch. Sources: sparsely gated experts
    (1701.06538), Qwen3 (2505.09388), and for the shared expert Qwen2 (2407.10671, section 2.2.2).

    ``Experts.chosen`` of them compute each token; their weights are softmax probabilities over all
    experts, divided by their sum if ``Experts.renormalise``. With ``Experts.shared_size`` one more
    expert computes every token; its weight is the sigmoid of a linear map.
    """

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        assert config.experts is not None
        hidden_size, sizes = config.hidden_size, config.experts
        self.experts, self.chosen, self.renormalise = sizes.experts, sizes.chosen, sizes.renormalise
        self.has_shared = sizes.shared_size is not None
        self.router = Linear(hidden_size, sizes.experts, **linear_options(False, dtype, rngs))
        shape = (sizes.experts, hidden_size, sizes.intermediate_size)
        self.gate, self.up = (nnx.Param(init()(rngs.params(), shape, dtype)) for _ in range(2))
        self.down = nnx.Param(init()(rngs.params(), (shape[0], shape[2], shape[1]), dtype))
        if self.has_shared:
            own = dataclasses.replace(config, intermediate_size=sizes.shared_size, mlp_bias=False)
            self.shared = Mlp(own, dtype, rngs)
            self.shared_gate = Linear(hidden_size, 1, **linear_options(False, dtype, rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B,T,E] -> [B,T,E]."""
        weights, index = self.route(x)
        flat = x.reshape(-1, x.shape[-1])
        weights, index = (each.reshape(-1, self.chosen) for each in (weights, index))
        compute = self._each_choice if index.size <= self.experts else self._each_expert
        out = compute(flat, weights, index).reshape(x.shape)
        if self.has_shared:
            out = out + jax.nn.sigmoid(self.shared_gate(x)) * self.shared(x)
        return out

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B,T,E] -> the weights [B,T,k] in the dtype of x, and the experts i32[B,T,k]."""
        logits = self.router(x)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights, index = jax.lax.top_k(jax.nn.softmax(logits.astype(wide)), self.chosen)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdims=True)
        return weights.astype(x.dtype), index

    def _each_choice(self, x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        """Reads the kernels of the chosen experts only, once for each token and choice.

        One choice after another: a gather of [N*k,E,F] would copy the kernels.
        """
        kernels = self.gate[...], self.up[...], self.down[...]

        def add(out, choice):
            row, weight, expert = choice
            token = jax.lax.dynamic_slice_in_dim(x, row, 1)
            own = (jax.lax.dynamic_index_in_dim(kernel, expert, 0, False) for kernel in kernels)
            return out.at[row].add((_swiglu(token, *own) * weight)[0]), None

        rows = jnp.repeat(jnp.arange(x.shape[0]), self.chosen)
        choices = rows, weights.reshape(-1), index.reshape(-1)
        return jax.lax.scan(add, jnp.zeros_like(x), choices)[0]

    def _each_expert(self, x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
        """Reads all kernels once; each expert computes all tokens, and the chosen ones count."""
        mine = index[..., None] == jnp.arange(self.experts)  # bool[N,k,experts]
        weights = jnp.where(mine, weights[..., None], 0).sum(1).T
        kernels = self.gate[...], self.up[...], self.down[...]

        def add(out, expert):
            *own, weight, counts = expert
            # Selected, not multiplied by 0: an expert that was not chosen may give NaN.
            return out + jnp.where(counts[:, None], _swiglu(x, *own) * weight[:, None], 0), None

        return jax.lax.scan(add, jnp.zeros_like(x), (*kernels, weights, mine.any(1).T))[0]


def _swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """[N,E] -> [N,E] with kernels [E,F], [E,F], [F,E]."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down
