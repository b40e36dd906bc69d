"""Tries of candidate sequences: one tree of several token sequences with common prefixes.

On the host (``merge``) and on the device (``merge_batched``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


def merge(sequences: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """The trie of several token sequences: (tokens, parents, sequences through each node).

    Breadth first, siblings in order of first appearance; an empty sequence adds no node. For
    deterministic candidates only, see ``merge_batched``.
    """
    # The children of each node by token, in order of insertion; entry 0 is the pending token.
    below: list[dict[int, int]] = [{}]
    passing = [len(sequences)]
    for sequence in sequences:
        at = 0
        for token in sequence:
            if token not in below[at]:
                below[at][token] = len(below)
                below.append({})
                passing.append(0)
            at = below[at][token]
            passing[at] += 1
    tokens: list[int] = []
    parents: list[int] = []
    order = [0]
    # A queue: it grows while it is read.
    for place, at in enumerate(order):
        for token, child in below[at].items():
            tokens.append(int(token))
            parents.append(place - 1)
            order.append(child)
    return tokens, parents, [passing[at] for at in order[1:]]


def merge_batched(
    tokens: jax.Array, valid: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The trie of K sequences per row, on the device.

    For deterministic candidates only: merging siblings that were *sampled* independently changes
    the output law, unless the acceptance rule keeps the multiplicities.

    Args:
        tokens: i32[B,K,L]. Node ``depth * K + k`` is the token of sequence k at that depth.
        valid: bool[B,K,L]. A False ends its sequence.

    Returns:
        tokens: i32[B,K*L].
        parents: i32[B,K*L], topologically ordered. They always point at a kept node.
        kept: bool[B,K*L]. The first sequence with a given prefix keeps its node; later ones do not.
        counts: i32[B,K*L], sequences through each node, 0 where it is not kept.
    """
    import jax.numpy as jnp

    batch, k, length = tokens.shape
    alive = jnp.cumprod(valid, axis=-1).astype(bool)
    # same[b,i,j,d]: sequence j has d + 1 tokens, and sequence i the same ones. Where sequence i is
    # shorter, the entry is not used.
    same = (tokens[:, :, None] == tokens[:, None]) & alive[:, None]
    same = jnp.cumprod(same, axis=-1).astype(bool)
    first = jnp.argmax(same, axis=2).astype(jnp.int32)  # [b,i,d] the earliest sequence that agrees
    kept = alive & (first == jnp.arange(k)[:, None])
    counts = jnp.where(kept, same.sum(axis=2), 0).astype(jnp.int32)
    parents = first[..., :-1] + k * jnp.arange(length - 1, dtype=jnp.int32)
    roots = jnp.full((batch, k, 1), -1, jnp.int32)
    parents = jnp.concatenate([roots, parents], axis=-1)[..., :length]

    def breadth_first(x: jax.Array) -> jax.Array:
        return x.swapaxes(1, 2).reshape(batch, length * k)

    return breadth_first(tokens), breadth_first(parents), breadth_first(kept), breadth_first(counts)
