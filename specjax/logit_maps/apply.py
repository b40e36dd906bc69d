"""The maps: what is known of the text before a token, and the logits that follow from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from specjax.logit_maps.settings import LogitMaps


class Text(struct.PyTreeNode):
    """What the maps read of the committed text of each row, the pending token included."""

    used: jax.Array  # bool[B,V] tokens of prompt and output
    count: jax.Array  # i32[B,V] occurrences in the output
    new: jax.Array  # i32[B] tokens of the output


def read(
    maps: LogitMaps | None, tokens: jax.Array, length: jax.Array, vocab_size: int
) -> Text | None:
    """The ``Text`` of tokens i32[B,S], of which the first ``length`` i32[B] are the text.

    Without maps None. Counted from the text in every round, so it cannot differ from the text.
    """
    if maps is None:
        return None
    batch, place = tokens.shape[0], jnp.arange(tokens.shape[1])
    inside, rows = place < length[:, None], jnp.arange(batch)[:, None]
    output = inside & (place >= maps.prompt[:, None])
    ids = _inside(jnp.where(inside, tokens, -1), vocab_size)
    used = jnp.zeros((batch, vocab_size), bool).at[rows, ids].set(True, mode="drop")
    count = jnp.zeros((batch, vocab_size), jnp.int32)
    count = count.at[rows, ids].add(output.astype(jnp.int32), mode="drop")
    return Text(used, count, output.sum(-1).astype(jnp.int32))


def mapped(
    maps: LogitMaps | None,
    text: Text | None,
    logits: jax.Array,
    nodes: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """The target's logits after the maps: f[B,T,V] -> f[B,T,V]. Without maps they are unchanged.

    Args:
        maps: the settings of the rows.
        text: of ``read``.
        logits: at T places, each of which continues the committed text and a path of nodes.
        nodes: i32[B,P] the tokens of nodes after the committed text; None: no path.
        visible: bool[B,T,P], or [1,T,P], which of them are on the path of each place.
    """
    if maps is None or text is None:
        return logits
    used, count, new = text.used[:, None], text.count[:, None], text.new[:, None]
    if nodes is not None and visible is not None and nodes.shape[1]:
        used, count, new = _after(used, count, new, nodes, visible, visible)
    return _map(maps, logits, used, count, new)


def for_draft(
    maps: LogitMaps | None,
    text: Text | None,
    logits: jax.Array,
    nodes: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """``mapped`` for the logits of a draft.

    Where the maps leave no token that the draft can have (a draft of a few tokens, all banned), the
    logits are unchanged: any distribution will do for a draft, and the target rejects its token.
    """
    if maps is None:
        return logits
    result = mapped(maps, text, logits, nodes, visible)
    return jnp.where(result.max(-1, keepdims=True) == -jnp.inf, logits, result)


def along_text(maps: LogitMaps | None, logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``for_draft`` for the logits f[B,S,V] after each prefix of a text i32[B,S].

    Needs S^2 memory; for tests and measurements.
    """
    if maps is None:
        return logits
    batch, size = tokens.shape
    place = jnp.arange(size)
    before = jnp.broadcast_to(place <= place[:, None], (batch, size, size))
    output = before & (place >= maps.prompt[:, None])[:, None]
    nothing = read(maps, tokens[:, :0], jnp.zeros((batch,), jnp.int32), logits.shape[-1])
    assert nothing is not None
    start = nothing.used[:, None], nothing.count[:, None], nothing.new[:, None]
    result = _map(maps, logits, *_after(*start, tokens, before, output))
    return jnp.where(result.max(-1, keepdims=True) == -jnp.inf, logits, result)


def _after(
    used: jax.Array,
    count: jax.Array,
    new: jax.Array,
    nodes: jax.Array,
    visible: jax.Array,
    output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """used [B,T,V], count [B,T,V] and new [B,T] with the tokens of nodes on each path.

    ``visible`` and ``output`` bool[B,T,P]: the nodes that count as text, and as output.
    """
    batch, size = nodes.shape
    vocab = used.shape[-1]
    places, same = visible.shape[1], output is visible
    visible = jnp.broadcast_to(visible, (batch, places, size)).astype(jnp.int32)
    output = visible if same else output.astype(jnp.int32)
    rows, place = jnp.arange(batch)[:, None, None], jnp.arange(places)[:, None]
    ids = _inside(nodes, vocab)[:, None]
    zeros = jnp.zeros((batch, places, vocab), jnp.int32)
    seen = zeros.at[rows, place, ids].add(visible, mode="drop")
    # Draft nodes are all output: one scatter is enough.
    written = seen if output is visible else zeros.at[rows, place, ids].add(output, mode="drop")
    return used | (seen > 0), count + written, new + output.sum(-1)


def _map(
    maps: LogitMaps, logits: jax.Array, used: jax.Array, count: jax.Array, new: jax.Array
) -> jax.Array:
    """The maps in their order; used and count [B,T,V] or [B,1,V], new i32[B,T] or [B,1]."""
    dtype, vocab = logits.dtype, logits.shape[-1]

    def per_row(values: jax.Array) -> jax.Array:
        return values[:, None, None].astype(dtype)

    if maps.ends.shape[1]:
        rows, ids = jnp.arange(logits.shape[0])[:, None], _inside(maps.ends, vocab)
        ends = jnp.zeros((logits.shape[0], vocab), bool).at[rows, ids].set(True, mode="drop")
        early = new < maps.min_new_tokens[:, None]
        logits = jnp.where(ends[:, None] & early[..., None], -jnp.inf, logits)
    if maps.bias is not None:
        logits = logits + maps.bias[:, None].astype(dtype)
    factor = per_row(maps.repetition)
    again = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(used, again, logits)
    logits = logits - per_row(maps.frequency) * count.astype(dtype)
    return logits - jnp.where(count > 0, per_row(maps.presence), 0)


def _inside(ids: jax.Array, vocab_size: int) -> jax.Array:
    """The ids, with ``vocab_size`` for those outside the vocabulary: a scatter drops them."""
    return jnp.where((ids >= 0) & (ids < vocab_size), ids, vocab_size)
