"""A pass of a SPIRe draft model over T tokens, in the order that their dependencies need."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.models import rope
from specjax.models.spire import cache as sparse
from specjax.models.spire.attention import Part, attend, heads_of
from specjax.models.spire.cache import SparseCache
from specjax.models.spire.config import SpireConfig
from specjax.models.transformer import Block, Transformer
from specjax.tree import Layout

Arrays = tuple[jax.Array, ...]


class _View(NamedTuple):
    """Where T tokens are, and what they attend to."""

    positions: jax.Array  # i32[B,T]
    block: jax.Array  # bool[B,T,P] tokens of the block, without the token itself
    slots: jax.Array  # bool[B,T,S]


class SpirePass(NamedTuple):
    """A pass: what is the same for all its tokens."""

    config: SpireConfig
    module: Transformer
    weights: jax.Array | None  # f[layers+1] of the mixture, before the softmax
    cache: SparseCache
    taps: tuple[int, ...]
    remat: bool


class Computed(NamedTuple):
    """The result for T tokens."""

    hidden: jax.Array  # [B,T,E]
    taps: Arrays
    k: Arrays  # [B,T,H,D] of each layer, for later tokens
    v: Arrays


def run(
    pass_: SpirePass, tokens: jax.Array, layout: Layout | None, block: KVBlock | None
) -> Computed:
    """The pass, in the order that the dependencies of its tokens need."""
    (batch, size), fed = tokens.shape, 0 if block is None else block.output.shape[1]
    chain = layout is None
    layout = tree.chain_layout(batch, size, fed) if layout is None else layout
    view = _view(pass_, layout, size)
    before = None if block is None else (block.k, block.v)
    if not pass_.config.feedback:
        return _parallel(pass_, tokens, view, before)
    if size == 1:
        return _together(pass_, tokens, view._replace(block=view.block[..., :fed]), before)
    known = _room(pass_, batch, size, before)
    # In a text that has no cache every token may depend on all before it.
    if chain or not pass_.cache.slots:
        return _in_order(pass_, tokens, view, known)
    # A token depends on its ancestors among the new ones: as many passes as the deepest has levels.
    above = (layout.visible[..., fed:] & ~jnp.eye(size, dtype=bool)).sum(-1, dtype=jnp.int32)
    return _by_levels(pass_, tokens, view, known, above.max() + 1)


def _view(pass_: SpirePass, layout: Layout, new: int) -> _View:
    config, every = pass_.config, pass_.cache.length[:, None] + layout.depth
    fed = every.shape[1] - new
    own = every[:, fed:]

    def near(position: jax.Array) -> jax.Array:
        """bool[B,T,n]: whether positions i32[B,n] are inside a token's window, or sinks."""
        place = position[:, None]
        return (own[:, :, None] - place < config.window) | (place < config.sinks)

    stored = sparse.positions(pass_.cache)
    others = jnp.arange(every.shape[1]) != fed + jnp.arange(new)[:, None]
    slots = (stored >= 0)[:, None] & near(stored)
    return _View(own, layout.visible & near(every) & others, slots)


def _room(
    pass_: SpirePass, batch: int, size: int, before: tuple[Arrays, Arrays] | None
) -> tuple[Arrays, Arrays]:
    """Keys and values of the block, with places for ``size`` further tokens."""
    decoder, dtype = pass_.config.decoder, pass_.module.embed.embedding[...].dtype
    shape = (batch, size, decoder.num_kv_heads, decoder.head_dim)
    empty = (jnp.zeros(shape, dtype),) * decoder.num_layers
    return (empty, empty) if before is None else tree.join(before, (empty, empty))


def _in_order(
    pass_: SpirePass, tokens: jax.Array, view: _View, known: tuple[Arrays, Arrays]
) -> Computed:
    """One token after the other."""
    size = tokens.shape[1]
    fed = known[0][0].shape[1] - size

    def step(known: tuple[Arrays, Arrays], xs: Any) -> tuple[Any, Any]:
        number, token, *parts = xs
        one = _View(*(part[:, None] for part in parts))
        done = _together(pass_, token[:, None], one, known)
        known = tree.put(known, (done.k, done.v), fed + number)
        return known, (done.hidden[:, 0], tuple(tap[:, 0] for tap in done.taps))

    by_token = (x.swapaxes(0, 1) for x in (tokens, *view))
    known, out = _scan(step, known, (jnp.arange(size), *by_token), pass_.remat)
    hidden, taps = jax.tree.map(lambda x: x.swapaxes(0, 1), out)
    k, v = jax.tree.map(lambda x: x[:, fed:], known)
    return Computed(hidden, taps, k, v)


def _scan(step: Any, known: Any, xs: Any, remat: bool) -> tuple[Any, Any]:
    """``jax.lax.scan``; with ``remat`` only the state between segments is stored."""
    length = len(xs[0])
    size = math.isqrt(length)
    if not remat or size < 2:
        return jax.lax.scan(step, known, xs)
    count = length // size
    whole = count * size
    segments = jax.tree.map(lambda x: x[:whole].reshape(count, size, *x.shape[1:]), xs)
    segment = jax.checkpoint(Bound(jax.lax.scan, step))
    known, out = jax.lax.scan(segment, known, segments)
    out = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), out)
    if whole == length:
        return known, out
    known, last = jax.lax.scan(step, known, jax.tree.map(lambda x: x[whole:], xs))
    return known, jax.tree.map(lambda *x: jnp.concatenate(x), out, last)


def _by_levels(
    pass_: SpirePass,
    tokens: jax.Array,
    view: _View,
    known: tuple[Arrays, Arrays],
    levels: jax.Array,
) -> Computed:
    """All tokens in every pass; after pass n those with fewer than n new ancestors are right."""
    size, places = tokens.shape[1], known[0][0].shape[1]
    shapes = jax.eval_shape(lambda known: _together(pass_, tokens, view, known), known)
    start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def once(carry: tuple[jax.Array, Any, Computed]) -> tuple[jax.Array, Any, Computed]:
        number, known, _ = carry
        done = _together(pass_, tokens, view, known)
        return number + 1, tree.put(known, (done.k, done.v), places - size), done

    more = lambda carry: carry[0] < levels  # noqa: E731
    return jax.lax.while_loop(more, once, (jnp.zeros((), jnp.int32), known, start))[2]


def _together(
    pass_: SpirePass, tokens: jax.Array, view: _View, known: tuple[Arrays, Arrays] | None
) -> Computed:
    """T tokens at once; ``known`` are keys and values of the places in ``view.block``."""
    module, own = pass_.module, None
    angles, x = _angles(pass_, view.positions), _embedded(pass_, tokens, view.positions)
    outputs = [x]
    for index, layer in enumerate(module.layers):
        read, angle = _read(layer, x), angles.get(pass_.config.decoder.rope(index))
        parts = _parts(pass_, index, view)
        if known is not None:
            k, v = (each[index].swapaxes(1, 2) for each in known)
            parts.insert(0, Part(k, v, view.block, guarded=True))
        if pass_.config.own:
            own = tuple(heads_of(layer.attention, kind, read, angle) for kind in "kv")
        x = _layer(layer, x, read, angle, parts, own)
        outputs.append(x)
    memory = _mixture(pass_, outputs)
    pairs = []
    for index, layer in enumerate(module.layers):
        read, angle = _read(layer, memory), angles.get(pass_.config.decoder.rope(index))
        pairs.append([heads_of(layer.attention, kind, read, angle) for kind in "kv"])
    k, v = zip(*pairs, strict=True)
    return Computed(module.norm(x), tuple(outputs[tap + 1] for tap in pass_.taps), k, v)


def _parallel(
    pass_: SpirePass, tokens: jax.Array, view: _View, before: tuple[Arrays, Arrays] | None
) -> Computed:
    """T tokens of a plain decoder: a layer's keys and values come from its input."""
    size, places = tokens.shape[1], view.block.shape[2]
    itself = jnp.arange(places) == places - size + jnp.arange(size)[:, None]
    visible = view.block | itself
    angles, x = _angles(pass_, view.positions), _embedded(pass_, tokens, view.positions)

    def one(index: int, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        layer = pass_.module.layers[index]
        read, angle = _read(layer, x), angles.get(pass_.config.decoder.rope(index))
        k, v = (heads_of(layer.attention, kind, read, angle) for kind in "kv")
        keys, values = k, v
        if before is not None:
            keys, values = (tree.join(e[index], n) for e, n in zip(before, (k, v), strict=True))
        first = Part(keys.swapaxes(1, 2), values.swapaxes(1, 2), visible, guarded=True)
        parts = [first, *_parts(pass_, index, view)]
        return _layer(layer, x, read, angle, parts, None), k, v

    outputs, keys, values = [], [], []
    for index in range(len(pass_.module.layers)):
        call = Bound(one, index)
        x, k, v = (jax.checkpoint(call) if pass_.remat else call)(x)
        outputs.append(x)
        keys.append(k)
        values.append(v)
    taps = tuple(outputs[tap] for tap in pass_.taps)
    return Computed(pass_.module.norm(x), taps, tuple(keys), tuple(values))


def _parts(pass_: SpirePass, index: int, view: _View) -> list[Part]:
    """The committed slots of a layer, if there are any."""
    if not pass_.cache.slots:
        return []
    return [Part(pass_.cache.k[index], pass_.cache.v[index], view.slots)]


def _layer(layer: Block, x, read, angle, parts: list[Part], own) -> jax.Array:
    """A layer's output [B,T,E] for its input x, of which ``read`` is the normalised form."""
    q = heads_of(layer.attention, "q", read, angle)
    mixed = layer.attention.o(attend(q, layer.attention.scores, parts, own))
    after = x + (layer.attention_post_norm(mixed) if layer.post else mixed)
    return layer.feed(x if layer.parallel else after, after)


def _read(layer: Block, x: jax.Array) -> jax.Array:
    return layer.attention_norm(x) if layer.pre else x


def _mixture(pass_: SpirePass, outputs: list[jax.Array]) -> jax.Array:
    """m_t [B,T,E] from the embedding and the outputs of all layers."""
    assert pass_.weights is not None
    wide = jnp.promote_types(pass_.weights.dtype, jnp.float32)
    shares = jax.nn.softmax(pass_.weights.astype(wide))
    total = sum(share * x.astype(wide) for share, x in zip(shares, outputs, strict=True))
    return jnp.asarray(total, outputs[0].dtype)


def _embedded(pass_: SpirePass, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    x, decoder = pass_.module.embedded(tokens), pass_.config.decoder
    if decoder.positions == "learned":
        x = x + pass_.module.positions(jnp.clip(positions, 0, decoder.max_positions - 1))
    return x


def _angles(pass_: SpirePass, positions: jax.Array) -> dict[Any, jax.Array]:
    """The rotary angles at ``positions`` i32[B,T], one array per kind of layer."""
    decoder = pass_.config.decoder
    ropes = dict.fromkeys(decoder.rope(index) for index in range(decoder.num_layers))
    return {own: rope.angle(own, positions) for own in ropes if own is not None}
