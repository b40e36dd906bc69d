"""Drafts the text of a draft model with another vocabulary: SLEM, string-level exact match. L1.

Timor et al. 2025 (2502.05202). The draft model writes its most probable tokens; their bytes are
cut into the target's tokens, the longest first. The draft is a function of the committed text, so
every lossless rule takes it; with "match" the target's sample is compared with it, as in the paper
(where the draft model samples). The cut need not be that of the target's tokenizer: a token that
the target would not write there is rejected.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling, tree
from specjax.bound import Bound
from specjax.drafters import growth
from specjax.drafters.draft_models import _small_model
from specjax.drafters.draft_models._vocabularies import draft_text
from specjax.drafters.draft_models._vocabularies.draft_text import Kept, Reader
from specjax.drafters.draft_models._vocabularies.maps import Maps, Trie, trie
from specjax.drafters.growth import Begun
from specjax.models.token_bytes import TokenBytes
from specjax.rng import RowKeys
from specjax.types import LM, Array, Context, Draft, Drafter, ModelParams

# The longest token, in bytes, of the draft model that is read, and of the target that is drafted.
BYTES = 24


class _Setup(NamedTuple):
    """The static settings."""

    reader: Reader
    gamma: int
    steps: int  # tokens of the draft model in a draft
    trie: Trie
    bytes: np.ndarray  # i32[W,L] the bytes of each draft token
    sizes: np.ndarray  # i32[W] how many; 0: the token ends the draft


class _Written(struct.PyTreeNode):
    """What the draft model writes."""

    token: Array  # i32[B] the newest one, which the model has not read
    text: Array  # i32[B,C] the bytes of all
    size: Array  # i32[B]
    going: Array  # bool[B]
    finite: Array  # bool[B]


def build(
    model: LM, params: Any, maps: Maps, pair: tuple[TokenBytes, TokenBytes], size: int, gamma: int
) -> Drafter:
    """The drafter of ``gamma`` tokens; ``pair`` are the vocabularies of target and draft model.

    ``size`` is the number of the target's tokens.
    """
    # As many draft tokens as gamma tokens have on average over the vocabulary.
    steps = int(np.ceil(gamma * maps.sizes.mean()))
    behind = min(gamma + maps.pieces.shape[1], _small_model.CATCH_UP)
    table, sizes = _table(pair[1], model.vocab_size)
    reader = Reader(model, maps, steps, behind)
    setup = _Setup(reader, gamma, steps, trie(pair[0], size, BYTES), table, sizes)
    return Drafter(
        init_params=Bound(_small_model.init_params, "draft_model", params),
        init=Bound(draft_text.init, reader, nodes=gamma),
        propose=Bound(_propose, setup),
        # The accepted tokens are read again, as the draft tokens that a fresh prefill would read.
        nodes=gamma,
        name="draft_model",
        # A draft ends at a token without bytes, and as many tokens are read as the text needs.
        constant_cost=False,
    )


@functools.lru_cache(maxsize=8)
def _table(vocabulary: TokenBytes, width: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of each draft token, i32[W,L], and their number, i32[W]; 0 if it has too many."""
    tokens = [data if data and len(data) <= BYTES else b"" for data in vocabulary.tokens[:width]]
    tokens += [b""] * (width - len(tokens))
    table = np.zeros((width, max(1, *map(len, tokens))), np.int32)
    for token, data in enumerate(tokens):
        table[token, : len(data)] = list(data)
    return table, np.array(list(map(len, tokens)), np.int32)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, kept: Kept
) -> tuple[Draft, Kept]:
    begun = draft_text.begin(setup.reader, params, context, kept)
    written = _write(setup, params, begun)
    tokens, valid = cut(setup.trie, written.text, written.size, setup.gamma)
    return Draft(tokens, valid, finite=written.finite), begun.kept


def _write(setup: _Setup, params: ModelParams, begun: Begun) -> _Written:
    """The draft model's own continuation: its most probable tokens."""
    kept, batch, room = begun.kept, len(begun.logits), setup.steps * setup.bytes.shape[1]
    every, none = jnp.ones((batch,), bool), jnp.zeros((batch,), jnp.int32)
    going = every if begun.ready is None else begun.ready
    start = _Written(none, jnp.zeros((batch, room), jnp.int32), none, going, every)
    first = _appended(setup, start, begun.logits)
    if setup.steps == 1:
        return first
    one = Bound(_one, setup, params, kept)
    # A block with room for all tokens of a draft but the last.
    token = jnp.zeros((batch, 1), jnp.int32)
    like = tree.shapes(lambda: setup.reader.model.apply(params.draft, token, kept.cache)[1])
    block = growth.room(like, setup.steps - 1)

    # The last token is not read.
    def running(carry: tuple) -> Array:
        return (carry[0] < setup.steps - 1) & carry[1].going.any()

    return jax.lax.while_loop(running, lambda carry: one(*carry), (none[0], first, block))[1]


def _appended(setup: _Setup, written: _Written, logits: Array) -> _Written:
    """The text with the bytes of one token more, the most probable one of ``logits`` f[B,W]."""
    token = sampling.argmax(logits)
    finite = written.finite & (jnp.isfinite(logits.max(-1)) | ~written.going)
    sizes = jnp.take(jnp.asarray(setup.sizes), token, mode="clip")
    sizes = jnp.where(written.going, sizes, 0)
    data = jnp.take(jnp.asarray(setup.bytes), token, axis=0, mode="clip")
    column = jnp.arange(data.shape[1])
    place = jnp.where(column < sizes[:, None], written.size[:, None] + column, -1)
    place = jnp.where(place < 0, written.text.shape[1], place)
    rows = jnp.arange(token.shape[0])[:, None]
    text = written.text.at[rows, place].set(data, mode="drop")
    return _Written(token, text, written.size + sizes, written.going & (sizes > 0), finite)


def _one(
    setup: _Setup, params: ModelParams, kept: Kept, index: Array, written: _Written, block
) -> tuple[Array, _Written, object]:
    """The model reads its token ``index``, and writes the next one."""
    token, apply = written.token, setup.reader.model.apply
    layout = growth.next_layout(len(token), setup.steps - 1, index)
    out, own = apply(params.draft, token[:, None], kept.cache, layout, block)
    more = _appended(setup, written, out.logits[:, 0])
    return index + 1, more, tree.put(block, own, index)


def cut(words: Trie, text: Array, size: Array, count: int) -> tuple[Array, Array]:
    """The first ``count`` tokens of texts i32[B,C] of ``size`` i32[B] bytes, the longest first.

    Returns tokens i32[B,count], and which exist: up to a byte that begins no token.
    """
    keys, children, ends = (jnp.asarray(x) for x in words[:3])
    last = max(len(words.keys) - 1, 0)

    def byte(start: Array, offset: Array, carry: tuple) -> tuple:
        node, token, length = carry
        at = start + offset
        value = jnp.take_along_axis(text, jnp.minimum(at, text.shape[1] - 1)[:, None], 1)[:, 0]
        key = node * 256 + value
        place = jnp.minimum(jnp.searchsorted(keys, key), last)
        found = (node >= 0) & (at < size) & (keys[place] == key)
        node = jnp.where(found, children[place], -1)
        own = jnp.where(found, ends[jnp.maximum(node, 0)], -1)
        return node, jnp.where(own >= 0, own, token), jnp.where(own >= 0, offset + 1, length)

    def one(start: Array, _) -> tuple[Array, Array]:
        none = jnp.zeros_like(start)
        first = none, none - 1, none
        found = jax.lax.fori_loop(0, words.depth, Bound(byte, start), first)
        return start + found[2], found[1]

    _, tokens = jax.lax.scan(one, jnp.zeros_like(size), length=count)
    tokens = tokens.T
    valid = jnp.cumprod(tokens >= 0, 1).astype(bool)
    return jnp.maximum(tokens, 0), valid
