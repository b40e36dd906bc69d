"""How far a draft would have come, given what the target wrote: block efficiency without decoding (``Training.foresee``).

A token that the chain rule emits was the draft's with probability min(1, draft / target), given its value: the joint
probability of saying x and accepting it is min(target(x), draft(x)). A deterministic draft is accepted as far as the text
goes along it, whatever the temperature and the lossless rule. Exact, therefore, for text that the target itself wrote.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling as sampling_lib
from specjax.sampling import Sampling
from specjax.topology.shapes import Topology


def kept(
    logits: jax.Array, target_logits: jax.Array, labels: jax.Array, sampling: Sampling
) -> jax.Array:
    """f32[B,T]: probability that the chain rule accepted the label i32[B,T], given that it was said; two f[B,T,V]."""
    draft, target = (
        jnp.take_along_axis(sampling_lib.to_probs(x, sampling), labels[..., None], -1)[..., 0]
        for x in (logits, target_logits)
    )
    return jnp.where(
        draft < target, draft / jnp.where(target > 0, target, 1), (draft > 0).astype(draft.dtype)
    )


def rank(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """i32[B,T]: how many tokens the draft prefers to the label; of equal ones the lower id comes first, as in ``top``."""
    own = jnp.take_along_axis(logits, labels[..., None], -1)
    before = jnp.arange(logits.shape[-1]) < labels[..., None]
    return ((logits > own) | (logits == own) & before).sum(-1).astype(jnp.int32)


def walk(ranks: Iterable[jax.Array], shape: Topology) -> list[jax.Array]:
    """bool[B,T] for each level of the tree: whether the text, the tokens of which have these ranks, goes on inside it."""
    table = np.full(
        (shape.nodes + 1, shape.branching + 1), -1, np.int32
    )  # [node + 1, rank] -> child; the last: too far
    for node, parent in enumerate(shape.parents):
        table[parent + 1, shape.ranks[node]] = node
    child, found, node = jnp.asarray(table), [], None
    for each in ranks:
        node = jnp.full_like(each, -1) if node is None else node
        inside = found[-1] if found else jnp.ones_like(each, bool)
        node = child[node + 1, jnp.minimum(each, shape.branching)]
        found.append(inside & (node >= 0))
    return found


def late(values: jax.Array) -> jax.Array:
    """Entries of features -> entries of pending tokens: one later, with nothing for the first, that has no feature."""
    return jnp.pad(values[:, :-1], ((0, 0), (1, 0), (0, 0)))
