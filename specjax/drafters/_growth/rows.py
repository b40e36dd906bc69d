"""What all shapes share: the rows that go on, and the question to the controller."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import logit_maps, tree
from specjax.control import Ahead, Controller
from specjax.drafters._growth.stepper import Begun, Nodes, Stepper
from specjax.rng import RowKeys
from specjax.sampling import dtype_of
from specjax.types import Context, ModelParams


class Job(NamedTuple):
    """One draft: what does not change while it grows."""

    stepper: Stepper
    controller: Controller | None
    params: ModelParams
    keys: RowKeys
    context: Context
    begun: Begun
    text: logit_maps.Text | None  # what the row's maps of logits read of the committed text
    limit: jax.Array | None = None  # i32[B] the controller's limit of levels; None: it has none

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.context.length.shape[0]

    @property
    def reads(self) -> Any:
        """What ``Stepper.step`` reads of the committed text."""
        return read_of(self.begun)

    @property
    def roots(self) -> int:
        """1 if the pending token has a place in the block, else 0."""
        return 0 if self.begun.memory is None else 1


def read_of(begun: Begun) -> Any:
    """What ``Stepper.step`` reads of the committed text."""
    return begun.kept if begun.reads is None else begun.reads


class Rows(struct.PyTreeNode):
    """The rows while a draft grows."""

    going: jax.Array  # bool[B] whether the row gets further levels
    finite: jax.Array  # bool[B] whether all logits were finite that the row used
    control: Any  # the controller's state


def mapped(
    job: Job, logits: jax.Array, tokens: jax.Array | None = None, visible: Any = None
) -> jax.Array:
    """Logits f[B,n,V] after the row's penalties, biases and bans, like the target's.

    ``tokens`` i32[B,P] are nodes of the draft, ``visible`` bool[B,n,P] (or [1,n,P]) those on the
    path of each of the n places; None: the places follow the committed text.
    """
    return logit_maps.for_draft(job.context.sampling.maps, job.text, logits, tokens, visible)


def first_rows(job: Job, control: Any) -> Rows:
    """All rows that can draft."""
    every = jnp.ones((job.batch,), bool)
    going = every if job.begun.ready is None else job.begun.ready
    return Rows(going if job.limit is None else going & (job.limit > 0), every, control)


def confidence(job: Job, memory: Any, size: int) -> jax.Array | None:
    """``Ahead.confidence`` of ``size`` nodes with this memory; None: there is none."""
    if job.controller is None or job.stepper.confidence is None:
        return None
    return jnp.broadcast_to(job.stepper.confidence(memory), (job.batch, size))


def ask(job: Job, rows: Rows, ahead: Ahead) -> Rows:
    """The rows after the controller's answer about the next level."""
    good = jnp.isfinite(ahead.logits.max(-1)).all(-1)
    rows = rows.replace(finite=rows.finite & (good | ~rows.going))
    if job.controller is None:
        return rows
    going = rows.going if job.limit is None else rows.going & (ahead.depth < job.limit)
    if job.controller.ask is None:
        return rows.replace(going=going)
    rows = rows.replace(going=going)
    answer, control = job.controller.ask(rows.control, ahead)
    return rows.replace(
        going=rows.going & answer, control=where_rows(rows.going, control, rows.control)
    )


def drawing(job: Job, rows: Rows) -> jax.Array | None:
    """Rows bool[B] that draw tokens; None = all. Without a controller all rows do."""
    return None if job.controller is None else rows.going


def step(job: Job, rows: Rows, nodes: Nodes, block: Any) -> tuple[jax.Array, Any]:
    """``Stepper.step``; with a controller it runs only if a row goes on, and else gives zeros."""

    def run() -> tuple[jax.Array, Any]:
        return job.stepper.step(job.params, job.reads, nodes, block)

    if job.controller is None:
        return run()
    # Only the shapes are needed.
    with jax.disable_jit(False):
        shapes = jax.eval_shape(run)
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)  # noqa: E731
    return jax.lax.cond(rows.going.any(), run, zeros)


def any_node(job: Job, depth: int) -> Nodes:
    """A node of an independent stepper, whose logits depend on the depth alone."""
    layout = tree.chain_layout(job.batch, 1, job.roots)
    return Nodes(job.context.pending[:, None], np.array([job.roots - 1]), depth, layout)


def log_probs(logits: jax.Array) -> jax.Array:
    """The draft's own log-probabilities f[...,V], in float32 at least."""
    return jax.nn.log_softmax(logits.astype(dtype_of(logits)), -1)


def token_log_prob(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """f[B,n]: the log-probability of tokens i32[B,n], chosen from ``logits`` f[B,n,V]."""
    return jnp.take_along_axis(log_probs(logits), tokens[..., None], -1)[..., 0]


def where_rows(rows: jax.Array, new: Any, old: Any) -> Any:
    """A pytree of arrays [B,...]: ``new`` in the rows bool[B], ``old`` elsewhere."""

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    return jax.tree.map(pick, new, old)
