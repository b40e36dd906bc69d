"""Where a target corrected its drafter, and a ring of the last texts with these places.

A round ends by rejection where a draft token was tested and none was accepted: on a tree, where the
last accepted node has children and all of them were rejected. The token that the target puts there
is a correction, and its place in the text is a *wrong* place. The token after a draft that was
accepted to its end (the bonus token) is no correction, because no draft token was tested there.

A wrong place is the index of the corrected token in the text: the prediction that was wrong is the
one made after the token before it. ``Batch.labelled`` has the same meaning.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax.types import Array, Batch, Records

POSITIONS = ("wrong", "emitted")


class Places(NamedTuple):
    """The wrong places of texts."""

    wrong: Array  # bool[B,S]
    depth: Array  # i32[B,S] how many draft tokens were accepted before it in its round; else -1


def wrong_places(records: Records, starts: Array, size: int) -> Places:
    """The wrong places of the rows of a decode loop, from its counts.

    ``starts`` i32[B] are the lengths of the prompts, ``size`` is S. A rejection that a text does
    not contain, because it was cut before, has no place.
    """
    before = starts + jnp.cumsum(records.emitted, 0) - records.emitted  # i32[R,B]
    rejected = records.tested > records.accepted
    rejected &= records.emitted == records.accepted + 1
    place = jnp.where(rejected, before + records.accepted, size)
    rows = jnp.arange(starts.shape[0])
    nowhere = jnp.zeros((starts.shape[0], size), bool)
    wrong = nowhere.at[rows, place].set(True, mode="drop")
    depth = (
        jnp.full(nowhere.shape, -1, jnp.int32).at[rows, place].set(records.accepted, mode="drop")
    )
    return Places(wrong, depth)


class Ring(struct.PyTreeNode):
    """The texts of the last I requests, and which of their tokens are labels."""

    tokens: Array  # i32[I,S] 0 beyond the text
    labelled: Array  # bool[I,S]
    depths: Array  # i32[I,S] depth of the draft at a wrong place, -1 elsewhere
    newest: Array  # i32[] the row that is written next


def empty(rows: int, size: int) -> Ring:
    """A ring of ``rows`` texts of at most ``size`` tokens, without a label."""
    tokens = jnp.zeros((rows, size), jnp.int32)
    return Ring(tokens, tokens > 0, tokens - 1, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("positions",), donate_argnums=(0,))
def remember(
    ring: Ring,
    tokens: Array,
    length: Array,
    records: Records,
    starts: Array,
    real: Array,
    *,
    positions: str = "wrong",
) -> tuple[Ring, Array]:
    """Puts the texts of a batch into the ring; also returns the number of wrong places i32[B].

    ``tokens``, ``length`` and ``records`` are those of a decode loop, ``starts`` i32[B] the lengths
    of the prompts; rows that are not ``real`` bool[B] only fill up the batch. Labels are the wrong
    places, or with ``positions`` "emitted" all new tokens. A batch has at most as many rows as the
    ring.
    """
    rows, size = ring.tokens.shape
    places = wrong_places(records, starts, size)
    index = jnp.arange(size)
    inside = index < length[:, None]
    labelled = places.wrong
    if positions == "emitted":
        labelled = inside & (index >= starts[:, None])
    row = jnp.where(real, (ring.newest + jnp.cumsum(real) - 1) % rows, rows)
    put = lambda old, new: old.at[row].set(new, mode="drop")  # noqa: E731
    ring = Ring(
        put(ring.tokens, jnp.where(inside, tokens[:, :size], 0)),
        put(ring.labelled, labelled),
        put(ring.depths, places.depth),
        (ring.newest + real.sum()) % rows,
    )
    return ring, places.wrong.sum(-1)


def batch_of(ring: Ring, positions: str = "wrong") -> Batch:
    """The ring as text to train on. At a wrong place only the depth that was wrong learns."""
    depths = ring.depths if positions == "wrong" else None
    return Batch(ring.tokens, ring.labelled, depths=depths)
