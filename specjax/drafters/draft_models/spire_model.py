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

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from specjax import cache as kv
from specjax import checks, tree
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.errors import UserError, on_disk
from specjax.models import hf, lm, tensor_files
from specjax.models.attention import Scores
from specjax.models.hf import Loaded
from specjax.models.hf_config import config_from_hf, config_to_hf, translated
from specjax.models.hf_tokenizer import fingerprint, load_tokenizer
from specjax.models.hf_weights import check_sizes, read_params
from specjax.models.transformer import Block, Transformer
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, Array, Output

# The shape of a SPIRe draft model.


@dataclasses.dataclass(frozen=True)
class SpireConfig:
    """A decoder of few layers whose attention is sparse and reads a feedback memory.

    A token at position p attends to position s <= p if s < ``sinks`` or p - s < ``window``. The
    paper states none of these numbers, nor how its feedback memory treats the token itself.

    Attributes:
        decoder: the shape of its layers; those of a target in the pruned initialisation.
        sinks: the first positions, which all tokens attend to (StreamingLLM, 2309.17453).
        window: the newest positions, the token's own included.
        feedback: keys and values of earlier tokens are projected from their memory, a mixture of
            the outputs of all layers (2002.09402). False: a plain decoder with sparse attention,
            whose blocks are computed in parallel.
        own: with ``feedback``: a token also attends to itself, with the keys and values of each
            layer's input, as in the target's layers. False: to earlier tokens alone, as in the
            Feedback Transformer; the first token of a text then attends to nothing.
    """

    decoder: TransformerConfig
    sinks: int
    window: int
    feedback: bool = True
    own: bool = True

    @property
    def slots(self) -> int:
        """The most slots of the cache of a row."""
        return self.sinks + self.window


def shape_of(decoder: TransformerConfig, keys: Any) -> SpireConfig:
    """The shape with these layers and the keys ``spire.DraftModelKeys``. Raises UserError."""
    shape = SpireConfig(decoder, **dataclasses.asdict(keys))
    check(shape, keys.OWNER)
    return shape


def check(config: SpireConfig, prefix: str = "") -> None:
    """Raises UserError for wrong values; ``prefix`` is put before the names of the keys."""
    checks.whole(f"{prefix}sinks", config.sinks, 0)
    checks.whole(f"{prefix}window", config.window, 1)
    checks.yes_or_no(f"{prefix}feedback", config.feedback)
    checks.yes_or_no(f"{prefix}own", config.own)
    if not config.feedback and not config.own:
        raise UserError(
            f"{prefix}own is False and {prefix}feedback too; own belongs to feedback memory, "
            "leave it True"
        )
    if config.decoder.recurrent is not None:
        raise UserError(
            "a SPIRe model reads some keys and values of each layer, and recurrent layers have "
            "none; take a target without recurrent layers"
        )
    narrow = min((size for size in config.decoder.windows if size is not None), default=None)
    if narrow is not None and config.window > narrow:
        raise UserError(
            f"{prefix}window is {config.window}, and a layer of the target has a sliding window of "
            f"{narrow} positions; give at most {narrow}"
        )


# A cache of constant size: the first positions of the text, and a ring of the newest ones.
#
# With ``sinks`` s and W further slots, position p < s is in slot p, and position p >= s in slot
# s + (p - s) mod W. Keys have the rotation of their true position. A text that fits has position p
# in slot p.


class SparseCache(struct.PyTreeNode):
    """Keys and values of every layer; slots without a position have no meaning."""

    k: tuple[Array, ...]  # [B,H,S,D] each
    v: tuple[Array, ...]
    length: Array  # i32[B] tokens committed
    sinks: int = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """S."""
        return self.k[0].shape[2]

    @property
    def ring(self) -> int:
        """The slots after those of the sinks; 0: no text is longer than the sinks."""
        return max(self.slots - self.sinks, 0)


def positions(cache: SparseCache) -> Array:
    """i32[B,S]: the position in each slot; -1: none."""
    fixed = jnp.arange(cache.slots - cache.ring)
    first = jnp.where(fixed < cache.length[:, None], fixed, -1)
    if not cache.ring:
        return first
    later = kv.newest(cache.length - cache.sinks, cache.ring)
    return jnp.concatenate([first, jnp.where(later < 0, -1, later + cache.sinks)], 1)


def commit(
    cache: SparseCache, block: KVBlock, count: Array, path: Array | None = None
) -> SparseCache:
    """Appends the tokens at ``path[:count]`` of a block; arguments as those of ``LM.commit``.

    A slot is written only if a committed token has its place there.
    """
    kept, inside = tree.accepted(block, count, path)
    # With 64-bit types enabled (exactness tests), all indices of an update must have one type.
    start = kv.write_after(cache.length, kept.output).astype(jnp.result_type(int))
    slot = _slots(cache, start, count, inside.shape[1])

    def put(buffer: Array, new: Array) -> Array:
        return kv.write_at(buffer, new.swapaxes(1, 2).astype(buffer.dtype), slot)

    k, v = jax.tree.map(put, (cache.k, cache.v), (kept.k, kept.v))
    return cache.replace(k=k, v=v, length=cache.length + count)


def _slots(cache: SparseCache, start: Array, count: Array, size: int) -> Array:
    """i[B,M]: the slot of each token; S, which does not exist, for one that is not written."""
    place = jnp.arange(size)
    position = start[:, None] + place
    kept, slot = place < count[:, None], position
    if cache.ring:
        sink = position < cache.sinks
        # Of several tokens for one slot only the last is written.
        kept &= sink | (place >= count[:, None] - cache.ring)
        slot = jnp.where(sink, position, cache.sinks + (position - cache.sinks) % cache.ring)
    return jnp.where(kept, slot, cache.slots)


# Attention of a SPIRe draft model: over committed slots, the block, and the token itself.
#
# It differs from ``specjax.models.attention`` in what has keys and values: with feedback memory
# those of earlier tokens and those of the token itself have different inputs, and a token may
# attend to nothing.


class Part(NamedTuple):
    """Keys and values that T tokens may attend to."""

    keys: Array  # [B,H,n,D]
    values: Array
    visible: Array  # bool[B,T,n]
    # Whether a value may be not finite; only tokens that attend to it may get NaN.
    guarded: bool = False


def attend(q: Array, rule: Scores, parts: list[Part], own: tuple[Array, Array] | None) -> Array:
    """Attention of queries [B,T,N,D] over the parts: [B,T,N*D], zeros for tokens without any.

    ``own``: keys and values [B,T,H,D]; each token attends to its own too. None: it does not.
    """
    batch, size, heads, width = q.shape
    if not parts and own is None:
        return jnp.zeros((batch, size, heads * width), q.dtype)
    kv_heads = parts[0].keys.shape[1] if own is None else own[0].shape[2]
    # [B,H,G,T,D]: the queries of a group share a key head.
    q = q.reshape(batch, size, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = [_scores(q, rule, part, wide) for part in parts]
    mine = None if own is None else [x.swapaxes(1, 2)[:, :, None] for x in own]
    if mine is not None:
        products = (q.astype(wide) * mine[0].astype(wide)).sum(-1, keepdims=True)
        scores.append(rule.of(products))
    peaks = [each.max(-1, keepdims=True) for each in scores]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    out, total = jnp.zeros(q.shape, q.dtype), jnp.zeros(peak.shape, wide)
    for part, each in zip(parts, scores, strict=False):
        weights = jnp.where(part.visible[:, None, None], jnp.exp(each - peak), 0)
        out, total = out + _values(weights, part, q.dtype), total + weights.sum(-1, keepdims=True)
    if mine is not None:
        weights = jnp.exp(scores[-1] - peak)
        out, total = out + weights.astype(q.dtype) * mine[1].astype(q.dtype), total + weights
    out = (out / jnp.where(total > 0, total, 1)).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, size, -1)


def _scores(q: Array, rule: Scores, part: Part, wide) -> Array:
    """[B,H,G,T,n]."""
    keys = part.keys.astype(q.dtype)
    products = jnp.einsum("bhgtd,bhnd->bhgtn", q, keys, preferred_element_type=wide)
    return jnp.where(part.visible[:, None, None], rule.of(products), jnp.finfo(wide).min)


def _values(weights: Array, part: Part, dtype) -> Array:
    """[B,H,G,T,D]: the sum of the values with weights that are not normalised."""
    values, weights = part.values.astype(dtype), weights.astype(dtype)
    if not part.guarded:
        return jnp.einsum("bhgtn,bhnd->bhgtd", weights, values)
    # A token's weight elsewhere is 0, but 0 * NaN is NaN.
    finite = jnp.isfinite(values).all((1, 3))
    values = jnp.where(finite[:, None, :, None], values, 0)
    out = jnp.einsum("bhgtn,bhnd->bhgtd", weights, values)
    reaches = (part.visible & ~finite[:, None]).any(-1)
    return jnp.where(reaches[:, None, None, :, None], jnp.nan, out)


# A pass of a SPIRe draft model over T tokens, in the order that their dependencies need.


Arrays = tuple[Array, ...]
Pair = tuple[Array, Array]  # keys and values
Pairs = tuple[Arrays, Arrays]  # those of each layer, of the places of a block


class _View(NamedTuple):
    """Where T tokens are, and what they attend to."""

    positions: Array  # i32[B,T]
    block: Array  # bool[B,T,P] tokens of the block, without the token itself
    slots: Array  # bool[B,T,S]


class SpirePass(NamedTuple):
    """A pass: what is the same for all its tokens."""

    config: SpireConfig
    module: Transformer
    weights: Array | None  # f[layers+1] of the mixture, before the softmax
    cache: SparseCache
    taps: tuple[int, ...]
    remat: bool


class Computed(NamedTuple):
    """The result for T tokens."""

    hidden: Array  # [B,T,E]
    taps: Arrays
    k: Arrays  # [B,T,H,D] of each layer, for later tokens
    v: Arrays


def run(pass_: SpirePass, tokens: Array, layout: Layout | None, block: KVBlock | None) -> Computed:
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

    def near(position: Array) -> Array:
        """bool[B,T,n]: whether positions i32[B,n] are inside a token's window, or sinks."""
        place = position[:, None]
        return (own[:, :, None] - place < config.window) | (place < config.sinks)

    stored = positions(pass_.cache)
    others = jnp.arange(every.shape[1]) != fed + jnp.arange(new)[:, None]
    slots = (stored >= 0)[:, None] & near(stored)
    return _View(own, layout.visible & near(every) & others, slots)


def _room(pass_: SpirePass, batch: int, size: int, before: Pairs | None) -> Pairs:
    """Keys and values of the block, with places for ``size`` further tokens."""
    decoder, dtype = pass_.config.decoder, pass_.module.embed.embedding[...].dtype
    shape = (batch, size, decoder.num_kv_heads, decoder.head_dim)
    empty = (jnp.zeros(shape, dtype),) * decoder.num_layers
    return (empty, empty) if before is None else tree.join(before, (empty, empty))


def _in_order(pass_: SpirePass, tokens: Array, view: _View, known: Pairs) -> Computed:
    """One token after the other."""
    size = tokens.shape[1]
    fed = known[0][0].shape[1] - size

    def step(known: Pairs, xs: Any) -> tuple[Any, Any]:
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
    pass_: SpirePass, tokens: Array, view: _View, known: Pairs, levels: Array
) -> Computed:
    """All tokens in every pass; after pass n those with fewer than n new ancestors are right."""
    size, places = tokens.shape[1], known[0][0].shape[1]
    start = tree.zeros(lambda known: _together(pass_, tokens, view, known), known)

    def once(carry: tuple[Array, Any, Computed]) -> tuple[Array, Any, Computed]:
        number, known, _ = carry
        done = _together(pass_, tokens, view, known)
        return number + 1, tree.put(known, (done.k, done.v), places - size), done

    more = lambda carry: carry[0] < levels  # noqa: E731
    return jax.lax.while_loop(more, once, (jnp.zeros((), jnp.int32), known, start))[2]


def _together(pass_: SpirePass, tokens: Array, view: _View, known: Pairs | None) -> Computed:
    """T tokens at once; ``known`` are keys and values of the places in ``view.block``."""
    module = pass_.module
    angles, x = pass_.module.angles(view.positions), pass_.module.first(tokens, view)
    outputs = [x]
    for index, layer in enumerate(module.layers):
        read, angle, own = _projected(pass_, index, x, angles)
        parts = _parts(pass_, index, view, known and [each[index] for each in known])
        x = _layer(layer, x, read, angle, parts, own if pass_.config.own else None)
        outputs.append(x)
    memory = _mixture(pass_, outputs)
    pairs = [_projected(pass_, index, memory, angles)[2] for index in range(len(module.layers))]
    k, v = zip(*pairs, strict=True)
    return Computed(module.norm(x), tuple(outputs[tap + 1] for tap in pass_.taps), k, v)


def _parallel(pass_: SpirePass, tokens: Array, view: _View, before: Pairs | None) -> Computed:
    """T tokens of a plain decoder: a layer's keys and values come from its input."""
    size, places = tokens.shape[1], view.block.shape[2]
    itself = jnp.arange(places) == places - size + jnp.arange(size)[:, None]
    view = view._replace(block=view.block | itself)
    angles, x = pass_.module.angles(view.positions), pass_.module.first(tokens, view)

    def one(index: int, x: Array) -> tuple[Array, Array, Array]:
        read, angle, pair = _projected(pass_, index, x, angles)
        every = pair
        if before is not None:
            every = tuple(tree.join(e[index], n) for e, n in zip(before, pair, strict=True))
        parts = _parts(pass_, index, view, every)
        return _layer(pass_.module.layers[index], x, read, angle, parts, None), *pair

    done = []
    for index in range(len(pass_.module.layers)):
        call = Bound(one, index)
        done.append((jax.checkpoint(call) if pass_.remat else call)(x))
        x = done[-1][0]
    outputs, keys, values = zip(*done, strict=True)
    taps = tuple(outputs[tap] for tap in pass_.taps)
    return Computed(pass_.module.norm(x), taps, keys, values)


def _parts(pass_: SpirePass, index: int, view: _View, block: Sequence[Array] | None) -> list[Part]:
    """The block of a layer, and its committed slots, if there are any.

    ``block`` are keys and values [B,n,H,D]; None: there is none.
    """
    cache = pass_.cache
    parts = [Part(cache.k[index], cache.v[index], view.slots)] if cache.slots else []
    if block is None:
        return parts
    keys, values = (each.swapaxes(1, 2) for each in block)
    return [Part(keys, values, view.block, guarded=True), *parts]


def _layer(layer: Block, x, read, angle, parts: list[Part], own) -> Array:
    """A layer's output [B,T,E] for its input x, of which ``read`` is the normalised form."""
    q = layer.attention.part("q", read, angle)
    mixed = layer.attention.o(attend(q, layer.attention.scores, parts, own))
    after = x + (layer.attention_post_norm(mixed) if layer.post else mixed)
    return layer.feed(x if layer.parallel else after, after)


def _projected(pass_: SpirePass, index: int, x: Array, angles: list) -> tuple[Array, Any, Pair]:
    """What a layer's attention reads of x, its rotary angles, and its keys and values of x."""
    layer, angle = pass_.module.layers[index], angles[index]
    read = layer.attention_norm(x) if layer.pre else x
    attention = layer.attention
    return read, angle, (attention.part("k", read, angle), attention.part("v", read, angle))


def _mixture(pass_: SpirePass, outputs: list[Array]) -> Array:
    """m_t [B,T,E] from the embedding and the outputs of all layers."""
    assert pass_.weights is not None
    wide = jnp.promote_types(pass_.weights.dtype, jnp.float32)
    shares = jax.nn.softmax(pass_.weights.astype(wide))
    total = sum(share * x.astype(wide) for share, x in zip(shares, outputs, strict=True))
    return jnp.asarray(total, outputs[0].dtype)


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
    config: SpireConfig, dtype=jnp.float32, taps: tuple = (), name: str = "spire", remat=False
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
    decoder.check_taps(taps)

    def init_cache(batch: int, slots: int) -> SparseCache:
        own = min(slots, config.slots)
        shape = (decoder.num_layers, batch, decoder.num_kv_heads, own, decoder.head_dim)
        plain = kv.zeros(*shape, dtype)
        return SparseCache(plain.k, plain.v, plain.length, config.sinks)

    def apply(params, tokens, cache, layout=None, block=None):
        weights = params[MEMORY]["weights"] if MEMORY in params else None
        job = SpirePass(config, _module(config, params), weights, cache, taps, remat)
        done = run(job, tokens, layout, block)
        out = Output(job.module.logits(done.hidden), done.hidden, done.taps)
        return out, KVBlock(done.k, done.v, done.hidden[..., 0].astype(jnp.float32))

    return LM(
        init_cache,
        apply,
        commit,
        decoder.vocab_size,
        decoder.longest_text,
        name=name,
        width=decoder.hidden_size,
        embed=lambda params, tokens: _module(config, params).embedded(tokens),
        unembed=lambda params, hidden: _module(config, params).logits(hidden),
        layers=decoder.num_layers,
        window=config.window,
        tapping=lambda layers: from_config(config, dtype, tuple(layers), name, remat).apply,
    )


def _module(config: SpireConfig, params: dict) -> Transformer:
    return lm.merge(config.decoder, params, params["embed"]["embedding"].dtype)


# Directories of SPIRe draft models: config.json, the decoder's tensors, the memory's weights.
#
# config.json names an architecture that only this module reads: a loader of plain decoders would
# compute full attention with these weights. Its key "decoder" is the config.json of the layers.


ARCHITECTURE = "SpireDraftModel"
_KEYS = ("sinks", "window", "feedback", "own")
_MEMORY_FILE = "memory.safetensors"


def load(directory: str | os.PathLike, *, dtype: Any = None, on_host: bool = False) -> Loaded:
    """Reads a directory that ``save`` wrote, or the workdir of the run that trained it.

    ``dtype`` and ``on_host`` as in ``hf.load``. Raises UserError if it is something else, or a file
    is missing or damaged.
    """
    path = hf.resolve(directory)
    if not path.is_dir():
        raise UserError(f"{path} is no directory of a SPIRe draft model; train one first")
    config, dtype = read_config(path), hf.parameter_dtype(dtype)
    check_sizes(path, config.decoder)
    tokenizer = load_tokenizer(path, config.decoder.vocab_size)
    params = read_params(path, config.decoder, dtype, on_host)
    if config.feedback:
        params[MEMORY] = {"weights": jnp.asarray(_read_weights(path, config), dtype)}
    model = from_config(config, dtype)
    if tokenizer is not None:
        model = model._replace(vocabulary=fingerprint(tokenizer))
    return Loaded(model, params, config, tokenizer, str(path))


def read_config(path: Path) -> SpireConfig:
    """The shape in config.json. Raises UserError if it is that of something else, or wrong."""
    file, raw = path / "config.json", hf.read_json(path / "config.json")
    if raw.get("architectures") != [ARCHITECTURE]:
        raise UserError(
            f"{path} is no SPIRe draft model; give one that configs/spire.py trained, or another "
            "drafter (draft_model takes plain decoders)"
        )
    missing = [key for key in _KEYS if key not in raw]
    if missing or not isinstance(raw.get("decoder"), dict):
        wrong = [*missing, "decoder"][0]
        raise UserError(f"{file} has no {wrong}; train the model again, or copy it again")
    own: Any = {key: raw[key] for key in _KEYS}
    config = SpireConfig(translated(file, raw["decoder"], config_from_hf), **own)
    translated(file, config, check)
    return config


def save(
    directory: str | os.PathLike,
    config: SpireConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    layers: str = "",
) -> None:
    """Writes a directory for ``load``, all at once; ``params`` keep their dtype.

    ``layers``: those of the target that it started from, for the reader of config.json. With
    several processes all must call it, and the first one writes.

    Raises UserError if the parameters do not fit the config or the directory holds something else
    than a model, and OSError; the directory then stays unchanged.
    """
    hf.check_params(params, abstract_params(config))
    raw: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "spire"}
    raw |= {key: getattr(config, key) for key in _KEYS}
    raw |= {"target_layers": layers} if layers else {}
    dtype = str(params["embed"]["embedding"].dtype)
    raw |= {"torch_dtype": dtype, "decoder": config_to_hf(config.decoder)}
    weights = {MEMORY: tensor_files.tensor(params[MEMORY]["weights"])} if config.feedback else {}
    tensors = {_MEMORY_FILE: weights} if weights else {}
    own = {key: value for key, value in params.items() if key != MEMORY}
    hf.write(directory, config.decoder, own, raw, tokenizer, tensors=tensors)


def _read_weights(path: Path, config: SpireConfig) -> Any:
    """The weights of the mixture, f[layers+1]. Raises UserError."""
    file, size = path / _MEMORY_FILE, config.decoder.num_layers + 1
    if not file.is_file():
        raise UserError(f"{path} lacks {_MEMORY_FILE}; copy the directory again")
    with (
        on_disk(f"{file} is damaged or incomplete", "copy it again", SafetensorError),
        safe_open(str(file), framework="np") as opened,
    ):
        weights = opened.get_tensor(MEMORY)
    if weights.shape != (size,):
        raise UserError(
            f"{file}: {MEMORY} is {list(weights.shape)}, expected {[size]}; the weights do not "
            "belong to this config.json"
        )
    return weights
