"""Logits in a program whose matrices are divided among devices."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from specjax.models import short_blocks

# Columns of a tile of a TPU's vector memory.
LANES = 128


def in_float32(logits: jax.Array) -> jax.Array:
    """Logits [...,V] in float32 at least; each device that computes them has all.

    In a program for a mesh that XLA divides (``jax.set_mesh``, ``jax.sharding.use_abstract_mesh``),
    the vocabulary is gathered once, here. Otherwise each sort, sum and maximum of sampling and
    acceptance is an exchange of its own. Not on TPUs if a part of the vocabulary is not a whole
    number of tiles: XLA:TPU then joins the parts slowly, by its own estimate of cycles.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    parts = math.prod(size for kind, size in axes if kind == AxisType.Auto)
    if parts > 1 and not (short_blocks.for_tpu() and logits.shape[-1] % (parts * LANES)):
        free = [PartitionSpec.UNCONSTRAINED] * (logits.ndim - 1)
        logits = jax.lax.with_sharding_constraint(logits, PartitionSpec(*free, None))
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
