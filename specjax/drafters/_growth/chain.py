"""A chain, grown in one compiled loop: the program has the same size for every length."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import tree
from specjax.bound import Bound
from specjax.control import Ahead
from specjax.drafters._growth import rows as growing
from specjax.drafters._growth.rows import Job, Rows
from specjax.drafters._growth.siblings import Family, draw
from specjax.drafters._growth.stepper import Nodes
from specjax.types import Draft


class _Carry(struct.PyTreeNode):
    """The chain so far."""

    draft: Draft  # all gamma nodes; those beyond the last drawn one are empty
    block: Any  # the memory of the nodes that were fed
    rows: Rows
    # f[B,1] each, for the controller: of the path, and of its newest token
    log_prob: tuple[jax.Array, jax.Array]


def grow(job: Job, rows: Rows, gamma: int, siblings: str, block: Any) -> tuple[Draft, Any, Rows]:
    """A chain of ``gamma`` nodes, the block, and the rows.

    ``block`` has room for the gamma - 1 nodes that are fed, and for the pending token if it has a
    place. Without a controller every row gets all nodes; with one the loop ends when no row goes
    on.
    """
    if job.roots:
        block = tree.put(block, job.begun.memory, 0)
    carry = _begin(job, rows, gamma, siblings, block)
    level = Bound(_level, job, siblings)
    if job.controller is None:
        carry = jax.lax.fori_loop(1, gamma, level, carry)
    else:

        def running(pair: tuple[jax.Array, _Carry]) -> jax.Array:
            return (pair[0] < gamma) & pair[1].rows.going.any()

        start = jnp.ones((), jnp.int32), carry
        carry = jax.lax.while_loop(running, lambda pair: (pair[0] + 1, level(*pair)), start)[1]
    return carry.draft.replace(finite=carry.rows.finite), carry.block, carry.rows


def _begin(job: Job, rows: Rows, gamma: int, siblings: str, block: Any) -> _Carry:
    """The chain with its first node."""
    logits = growing.mapped(job, job.begun.logits[:, None])
    start = jnp.zeros((job.batch, 1), growing.dtype_of(logits))
    sure = growing.confidence(job, job.begun.memory, 1)
    one, rows = _next(job, siblings, 0, logits, rows, (start, start), sure)
    empty = jax.tree.map(lambda x: jnp.zeros((x.shape[0], gamma, *x.shape[2:]), x.dtype), one)
    return _Carry(tree.put(empty, one, 0), block, rows, _after(job, (start, start), logits, one))


def _level(job: Job, siblings: str, index: jax.Array, carry: _Carry) -> _Carry:
    """Feeds node ``index`` - 1 and draws node ``index``."""
    index = jnp.asarray(index, jnp.int32)
    own = job.roots + index - 1  # its place in the block
    size = jax.tree.leaves(carry.block)[0].shape[1]
    column = jnp.arange(size + 1)
    # The new token has the last column; in the others, only the tokens before it were filled.
    visible = (column < own) | (column == size)
    depth = jnp.where(column == size, own, column)
    layout = tree.Layout(
        jnp.broadcast_to(visible, (job.batch, 1, size + 1)),
        jnp.broadcast_to(depth.astype(jnp.int32), (job.batch, size + 1)),
    )
    token = jax.lax.dynamic_slice_in_dim(carry.draft.tokens, index - 1, 1, 1)
    parent = jnp.broadcast_to(own - 1, (job.batch, 1))
    nodes = Nodes(token, parent, index, layout)
    # The loop ends when no row goes on, so the step needs no condition of its own.
    logits, memory = job.stepper.step(job.params, job.reads, nodes, carry.block)
    if job.text is not None:
        above = jnp.arange(carry.draft.tokens.shape[1]) < index
        logits = growing.mapped(job, logits, carry.draft.tokens, above[None, None])
    sure = growing.confidence(job, memory, 1)
    one, rows = _next(job, siblings, index, logits, carry.rows, carry.log_prob, sure)
    return _Carry(
        tree.put(carry.draft, one, index),
        tree.put(carry.block, memory, own),
        rows,
        _after(job, carry.log_prob, logits, one),
    )


def _next(
    job: Job,
    siblings: str,
    index: Any,
    logits: jax.Array,
    rows: Rows,
    log_prob: tuple[jax.Array, jax.Array],
    sure: jax.Array | None,
) -> tuple[Draft, Rows]:
    """Node ``index``, drawn from ``logits`` f[B,1,V], and the rows that have it."""
    path, token = log_prob
    rows = growing.ask(job, rows, Ahead(index, logits, path, rows.going[:, None], token, sure))
    zero = np.zeros(1, int)
    level = Family(jnp.reshape(index, (1,)), zero, zero, jnp.reshape(index, (1,)) - 1)
    going = growing.drawing(job, rows)
    one = draw(job.keys, job.context, logits, zero, level, siblings, going)
    return one.replace(valid=one.valid & rows.going[:, None]), rows


def _after(
    job: Job, log_prob: tuple[jax.Array, jax.Array], logits: jax.Array, one: Draft
) -> tuple[jax.Array, jax.Array]:
    """``_Carry.log_prob`` of the path with its new token; only a controller reads it."""
    if job.controller is None:
        return log_prob
    token = growing.token_log_prob(logits, one.tokens).astype(log_prob[0].dtype)
    return log_prob[0] + token, token
