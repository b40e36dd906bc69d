"""Recurrent layers: a state in the place of keys and values.

The gated delta rule (``GatedDelta``): a token with the state S [K,V] before it takes exp(decay) S,
reads what that has at its key, writes the difference to its own value there, by the share beta, and
reads the result at its query:

    u = beta (v - k^T exp(decay) S);   S' = exp(decay) S + k u^T;   o = S'^T q

Mamba-2 (``Mamba2``) does not correct the value: u = step x, with the key B, the query C, and
-exp(a_log) times the step size of the head as decay; o has d x more.

Queries, keys and values are the outputs of a short causal convolution. In a block every token goes
on from the state of its parent, and its convolution reads its own path. No state of a node is
computed: with the updates u of its ancestors, a token reads the state before the block, decayed by
its path, and k_j u_j^T of each ancestor j, decayed by the path from j. That is attention inside the
block, with the ancestors as its mask, and with the correction a triangular system for u: nodes
follow their parents. So a chain, a tree, a tree that grows level by level, and a chunk of the
prompt are one computation.

Sources: Gated DeltaNet (2412.06464), the delta rule in chunks (2406.06484), Qwen3-Next and Qwen3.5
(their configurations and modules in transformers 5); Mamba-2 (2405.21060), Nemotron-H (2504.03624,
and its module in transformers 5, which takes no step below ``Recurrent.least_step`` in passes over
several tokens; here no token does).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import tree
from specjax.cache import EXACT, RecurrentState, Updates
from specjax.models.layers import Linear, Norm, init, linear_options
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout

REFERENCE = (
    *("yang2025gated", "qwenteam2025next"),
    *("dao2024transformers", "nvidia2025nemotronh"),
)

# Of the norms of queries and keys, as in the released modules.
EPS = 1e-6


class Before(NamedTuple):
    """What one recurrent layer has before its tokens are fed."""

    state: RecurrentState
    fed: Updates | None = None  # of the tokens of the block that were fed before


def empty(config: TransformerConfig, dtype, batch: int) -> tuple[RecurrentState, ...]:
    """The states of all recurrent layers before a text; ``dtype`` is that of activations."""
    own = config.recurrent
    if own is None:
        return ()
    shape = (batch, own.value_heads, own.key_dim, own.value_dim)
    window = (batch, own.kernel - 1, own.channels)
    wide = jnp.promote_types(dtype, jnp.float32)
    return tuple(
        RecurrentState(jnp.zeros(shape, wide), jnp.zeros(window, dtype)) for _ in own.layers
    )


def places(layout: Layout, width: int) -> jax.Array:
    """i32[B,T,W-1]: where the inputs before each token are, the nearest last, for W = ``width``.

    Places count from the W - 1 inputs before the block, which P tokens follow.
    """
    new, more = layout.visible.shape[1], width - 1
    depth = layout.depth[:, layout.depth.shape[1] - new :]
    wanted = depth[..., None] - jnp.arange(more, 0, -1)  # i32[B,T,W-1]
    found = layout.visible[:, :, None] & (layout.depth[:, None, None] == wanted[..., None])
    # A token near the root also reads inputs before the block.
    return jnp.where(wanted < 0, more + wanted, more + jnp.argmax(found, -1))


class Convolution(nnx.Module):
    """The weights of a causal convolution of each channel by itself."""

    def __init__(self, width: int, channels: int, dtype, rngs: nnx.Rngs, bias: bool = False):
        self.kernel = nnx.Param(init()(rngs.params(), (width, channels), dtype))
        self.bias = nnx.Param(jnp.zeros((channels,), dtype)) if bias else None


def convolved(kernel: jax.Array, new: jax.Array, before: Before, at: jax.Array | None) -> jax.Array:
    """The convolution, with weights [W,C], of inputs [B,T,C] along their paths.

    ``at`` are the ``places`` of the tokens; None: the block is a chain.
    """
    parts = [before.state.window.astype(new.dtype), new]
    if before.fed is not None:
        parts.insert(1, before.fed.inputs.astype(new.dtype))
    whole, size = jnp.concatenate(parts, 1), new.shape[1]
    more, total = len(kernel) - 1, whole.shape[1]
    out = new * kernel[-1]
    for index in range(more):
        if at is None:
            start = total - size - more + index
            earlier = whole[:, start : start + size]
        else:
            earlier = jnp.take_along_axis(whole, at[..., index, None], 1)
        out = out + earlier * kernel[index]
    return out


def new_rates(heads: int, dtype, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """(a_log, dt_bias) [H] of a new layer: it forgets at rates of 1 / 1000 to 1.6 per token.

    Mamba-2 (2405.21060, section 9).
    """
    rate = jax.random.uniform(rngs.params(), (heads,), minval=1.0, maxval=16.0)
    step = jax.random.uniform(rngs.params(), (heads,))
    step = jnp.exp(jnp.log(0.001) + step * jnp.log(100.0))
    bias = step + jnp.log(-jnp.expm1(-step))
    return nnx.Param(jnp.log(rate).astype(dtype)), nnx.Param(bias.astype(dtype))


class GatedDelta(nnx.Module):
    """The gated delta rule: convolution, recurrence, a norm with a gate, and a linear map."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        assert config.recurrent is not None
        self.sizes = own = config.recurrent
        kw = linear_options(False, dtype, rngs)
        keys, values = own.key_heads * own.key_dim, own.value_heads * own.value_dim
        self.q, self.k = (Linear(config.hidden_size, keys, **kw) for _ in range(2))
        self.v = Linear(config.hidden_size, values, **kw)
        self.q_conv, self.k_conv = (Convolution(own.kernel, keys, dtype, rngs) for _ in range(2))
        self.v_conv = Convolution(own.kernel, values, dtype, rngs)
        self.z = Linear(config.hidden_size, values, **kw)
        self.b, self.a = (Linear(config.hidden_size, own.value_heads, **kw) for _ in range(2))
        self.a_log, self.dt_bias = new_rates(own.value_heads, dtype, rngs)
        self.norm = Norm(dataclasses.replace(config, norm="rms"), dtype, own.value_dim)
        self.o = Linear(values, config.hidden_size, **kw)

    def __call__(
        self, x: jax.Array, layout: Any, at: jax.Array | None, before: Before
    ) -> tuple[jax.Array, Updates]:
        """x [B,T,E] -> ([B,T,E], the updates of the T tokens).

        ``layout`` is a ``tree.Layout`` of the block. ``at`` are the ``places`` of the tokens;
        None: the block is a chain.
        """
        own = self.sizes
        wide = jnp.promote_types(x.dtype, jnp.float32)
        inputs = jnp.concatenate([self.q(x), self.k(x), self.v(x)], -1)
        kernel = [part.kernel[...] for part in (self.q_conv, self.k_conv, self.v_conv)]
        mixed = convolved(jnp.concatenate(kernel, -1), inputs, before, at)
        mixed = jax.nn.silu(mixed.astype(wide))
        keys = own.key_heads * own.key_dim
        q, k, v = jnp.split(mixed.astype(x.dtype).astype(wide), (keys, 2 * keys), -1)
        q, k = (_unit(part.reshape(*x.shape[:2], own.key_heads, -1)) for part in (q, k))
        v = v.reshape(*x.shape[:2], own.value_heads, -1)
        beta = jax.nn.sigmoid(self.b(x).astype(wide))
        bias, rate = self.dt_bias[...].astype(wide), jnp.exp(self.a_log[...].astype(wide))
        decay = -rate * jax.nn.softplus(self.a(x).astype(wide) + bias)
        tokens = Tokens(q * own.key_dim**-0.5, k, v, beta, decay)
        out, values = delta_rule(tokens, layout, before.state.memory, before.fed)
        gate = self.z(x).reshape(out.shape).astype(wide)
        out = self.norm(out.astype(x.dtype)).astype(wide) * jax.nn.silu(gate)
        out = self.o(out.astype(x.dtype).reshape(*x.shape[:2], -1))
        return out, Updates(k, values, decay, inputs)


class Scale(nnx.Module):
    """The factors of a norm."""

    def __init__(self, size: int, dtype):
        self.scale = nnx.Param(jnp.ones((size,), dtype))


class Mamba2(nnx.Module):
    """Mamba-2: convolution, recurrence, a gate, a norm of each group, and a linear map."""

    def __init__(self, config: TransformerConfig, dtype, rngs: nnx.Rngs):
        assert config.recurrent is not None
        self.sizes, self.eps = config.recurrent, config.norm_eps
        own, width = self.sizes, config.hidden_size
        kw = linear_options(False, dtype, rngs)
        keys, values = own.key_heads * own.key_dim, own.value_heads * own.value_dim
        self.z, self.x = (Linear(width, values, **kw) for _ in range(2))
        self.b, self.c = (Linear(width, keys, **kw) for _ in range(2))
        self.dt = Linear(width, own.value_heads, **kw)
        self.x_conv, self.b_conv, self.c_conv = (
            Convolution(own.kernel, size, dtype, rngs, bias=True) for size in (values, keys, keys)
        )
        self.a_log, self.dt_bias = new_rates(own.value_heads, dtype, rngs)
        self.d = nnx.Param(jnp.ones((own.value_heads,), dtype))
        self.norm = Scale(values, dtype)
        self.o = Linear(values, width, **kw)

    def __call__(
        self, x: jax.Array, layout: Any, at: jax.Array | None, before: Before
    ) -> tuple[jax.Array, Updates]:
        """x [B,T,E] -> ([B,T,E], the updates of the T tokens); arguments as in ``GatedDelta``."""
        own, wide = self.sizes, jnp.promote_types(x.dtype, jnp.float32)
        inputs = jnp.concatenate([self.x(x), self.b(x), self.c(x)], -1)
        parts = (self.x_conv, self.b_conv, self.c_conv)
        kernel = jnp.concatenate([part.kernel[...] for part in parts], -1).astype(wide)
        bias = jnp.concatenate([part.bias[...] for part in parts if part.bias is not None], -1)
        # Rounded once, after the bias, as in PyTorch.
        mixed = convolved(kernel, inputs.astype(wide), before, at) + bias.astype(wide)
        mixed = jax.nn.silu(mixed.astype(x.dtype).astype(wide)).astype(x.dtype).astype(wide)
        keys, values = own.key_heads * own.key_dim, own.value_heads * own.value_dim
        value, b, c = jnp.split(mixed, (values, values + keys), -1)
        b, c = (part.reshape(*x.shape[:2], own.key_heads, -1) for part in (b, c))
        value = value.reshape(*x.shape[:2], own.value_heads, -1)
        bias, rate = self.dt_bias[...].astype(wide), jnp.exp(self.a_log[...].astype(wide))
        step = jax.nn.softplus(self.dt(x).astype(wide) + bias)
        step = jnp.maximum(step, own.least_step)
        tokens = Tokens(c, b, value * step[..., None], None, -rate * step)
        state = before.state.memory
        out, written = delta_rule(tokens, layout, state, before.fed)
        out = out + self.d[...].astype(wide)[:, None] * value
        out = self._gated(out.reshape(*x.shape[:2], -1), self.z(x).astype(wide))
        return self.o(out.astype(x.dtype)), Updates(b, written, tokens.decay, inputs)

    def _gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """[B,T,HV] each -> the norm of each group after the gate."""
        out = (out * jax.nn.silu(gate)).reshape(*out.shape[:2], self.sizes.key_heads, -1)
        out = out * jax.lax.rsqrt((out * out).mean(-1, keepdims=True) + self.eps)
        return out.reshape(gate.shape) * self.norm.scale[...].astype(out.dtype)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS)


class Tokens(NamedTuple):
    """The inputs of the recurrence; G key heads, H value heads, in float32 at least."""

    q: jax.Array  # [B,T,G,K]
    k: jax.Array  # [B,T,G,K]
    v: jax.Array  # [B,T,H,V]
    beta: jax.Array | None  # [B,T,H]; None: v is written as it is
    decay: jax.Array  # [B,T,H]


def delta_rule(
    tokens: Tokens, layout: Layout, memory: jax.Array, fed: Updates | None = None
) -> tuple[jax.Array, jax.Array]:
    """The outputs [B,T,H,V] of T tokens, and their updates u [B,T,H,V] (``Updates.values``).

    Without ``Tokens.beta`` an update is the token's value, as in Mamba-2.
    ``layout`` is that of the block, whose other tokens are ``fed``; memory [B,H,K,V] is the state
    before it. Tokens after one with values that are not finite get NaN; no other token does.
    """
    finite = _finite(tokens)
    visible, (batch, size, heads) = layout.visible, tokens.decay.shape
    tokens = jax.tree.map(lambda part: _where(finite, part, 0), tokens)
    k, values, decay, sound = tokens.k, None, tokens.decay, finite
    if fed is not None:
        good = jnp.isfinite(fed.values).all((2, 3))
        old = [_where(good, part, 0) for part in (fed.keys, fed.decay, fed.values)]
        k, decay = tree.join((old[0], old[1]), (k, decay))
        values, sound = old[2].swapaxes(1, 2), jnp.concatenate([good, finite], 1)
    start, weight = _decays(layout, decay, fed is not None)
    group = heads // k.shape[2]
    kinds = [tokens.q] if tokens.beta is None else [tokens.k, tokens.q]
    both, last = jnp.concatenate(kinds, 1), len(kinds) - 1
    # What keys and queries read of the state, in one pass over it; and of each other's keys.
    grouped = memory.reshape(batch, -1, group, *memory.shape[2:])
    read = jnp.einsum("btgk,bgrkv->bgrtv", both, grouped, precision=EXACT)
    read = read.reshape(batch, heads, len(kinds), size, -1) * start[:, :, None, :, None]
    match = jnp.einsum("btgk,bpgk->bgtp", both, k, precision=EXACT)
    match = jnp.repeat(match, group, 1).reshape(batch, heads, len(kinds), size, -1)
    match = match * weight[:, :, None]
    if tokens.beta is None:
        own = tokens.v.swapaxes(1, 2)
    else:
        own = _corrected(tokens.v, tokens.beta, read, match, values)
    every = own if values is None else jnp.concatenate([values, own], 2)
    out = read[:, :, last] + jnp.einsum(
        "bhtp,bhpv->bhtv", match[:, :, last], every, precision=EXACT
    )
    reached = ~(visible & ~sound[:, None]).any(-1)
    out, own = (_where(reached, part.swapaxes(1, 2), jnp.nan) for part in (out, own))
    return out, own


def _corrected(
    v: jax.Array, beta: jax.Array, read: jax.Array, match: jax.Array, values: jax.Array | None
) -> jax.Array:
    """The updates [B,H,T,V] of the delta rule.

    For T tokens v [B,T,H,V] and beta [B,T,H]. ``read[:, :, 0]`` [B,H,T,V] is what their keys read
    of the state, ``match[:, :, 0]`` [B,H,T,P] are the decayed products of keys; ``values``
    [B,H,P-T,V] are the updates of the tokens that were fed before.
    """
    beta = beta.swapaxes(1, 2)[..., None]
    wanted, size = v.swapaxes(1, 2) - read[:, :, 0], v.shape[1]
    first = match.shape[-1] - size
    if values is not None:
        wanted -= jnp.einsum("bhtp,bhpv->bhtv", match[:, :, 0, :, :first], values, precision=EXACT)
    own = beta * wanted
    if size > 1:
        system = jnp.tril(beta * match[:, :, 0, :, first:], -1)
        own = jax.lax.linalg.triangular_solve(
            system, own, left_side=True, lower=True, unit_diagonal=True
        )
    return own


def _decays(layout: Layout, decay: jax.Array, in_parts: bool) -> tuple[jax.Array, jax.Array]:
    """How much is left at each token of the state [B,H,T], and of each of the P tokens [B,H,T,P].

    0 for tokens that are no ancestors. ``decay`` [B,P,H]; ``in_parts``: not all P tokens are new.
    """
    seen = layout.visible.astype(decay.dtype)
    total = jnp.einsum("btp,bph->bht", seen, decay, precision=EXACT)
    if in_parts:
        # The layout has no ancestors of earlier tokens: those below j on the path to a token.
        deeper = (layout.depth[:, :, None] > layout.depth[:, None]).astype(decay.dtype)
        between = jnp.einsum("btp,bph,bpj->bhtj", seen, decay, deeper, precision=EXACT)
    else:
        between = total[..., None] - total[:, :, None]
    weight = jnp.exp(jnp.where(layout.visible[:, None], between, -jnp.inf))
    return jnp.exp(total), weight


def _finite(parts: Tokens) -> jax.Array:
    """bool[B,T]: the tokens whose values are all finite."""
    given = [part for part in parts if part is not None]
    each = [jnp.isfinite(part).reshape(*part.shape[:2], -1).all(-1) for part in given]
    return jnp.stack(each).all(0)


def _where(rows: jax.Array, part: jax.Array, other: float) -> jax.Array:
    """An array [B,T,...] with ``other`` where bool[B,T] is False."""
    return jnp.where(rows.reshape(*rows.shape, *[1] * (part.ndim - 2)), part, other)
