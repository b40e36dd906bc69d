"""Rotary positions: frequencies, their scalings, partial rotation, and the keys of config.json.

Each pair of dimensions of a query or key is turned by its frequency times the position. Only
the first ``Rope.dim`` dimensions of a head are turned; the others are unchanged.

Sources: rotary positions (2104.09864), linear scaling (2306.15595), Llama 3 scaling (2407.21783
and its released configuration), YaRN (2309.00071), LongRoPE (2402.13753).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a longer context follow from those of the original one.

    Attributes:
        kind: "linear", "llama3", "yarn" or "longrope".
        factor: by how much the context grew; all kinds but longrope divide frequencies by it.
        original_max_positions: length of the original context; all kinds but linear.
        low_freq_factor: llama3.
        high_freq_factor: llama3.
        beta_fast: yarn; pairs with more turns in the original context keep their frequency.
        beta_slow: yarn; pairs with fewer turns are divided by ``factor``.
        truncate: yarn; round the range of pairs between the two to whole pairs.
        attention_factor: yarn and longrope; multiplies cos and sin.
        short_factors: longrope; divides each frequency, [dim/2].
        long_factors: longrope; the same for texts beyond ``original_max_positions``.
        long: longrope; which of the two is used, for every position of every text.

    A longrope model has two sets of frequencies. One cache cannot mix them: keys that were written
    with the short factors are wrong for a text that needs the long ones. transformers looks at the
    longest text of a batch in each step and computes all keys again when it passes
    ``original_max_positions``, so the same text has other probabilities in another batch. Here the
    set is a property of the model. With the short factors, which are the default, texts end at
    ``original_max_positions``; ``long=True`` uses the long factors throughout.
    """

    kind: str
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    long: bool = False


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions of a layer.

    Attributes:
        theta: base of the frequencies.
        dim: how many dimensions of a head are turned; even. The pairs are (i, i + dim/2), as in
            Hugging Face checkpoints of the Llama family.
        scaling: None leaves the frequencies as they are.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None


def frequencies(rope: Rope) -> jax.Array:
    """f32[dim/2]: the angle per position of each pair of dimensions."""
    inverse = rope.theta ** (-jnp.arange(0, rope.dim, 2, dtype=jnp.float32) / rope.dim)
    scaling = rope.scaling
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling)
    if scaling.kind == "yarn":
        return _yarn(inverse, rope, scaling)
    factors = scaling.long_factors if scaling.long else scaling.short_factors
    return inverse / jnp.asarray(factors, jnp.float32)


def _llama3(inverse: jax.Array, scaling: RopeScaling) -> jax.Array:
    wavelength, original = 2 * math.pi / inverse, scaling.original_max_positions
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    far, near = original / low, original / high
    between = (1 - smooth) * inverse / scaling.factor + smooth * inverse
    return jnp.where(
        wavelength > far, inverse / scaling.factor, jnp.where(wavelength < near, inverse, between)
    )


def _yarn(inverse: jax.Array, rope: Rope, scaling: RopeScaling) -> jax.Array:
    def pair(turns: float) -> float:
        """The pair, a real number, that turns this often in the original context."""
        wavelength = scaling.original_max_positions / turns
        return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.dim - 1)
    # The released code avoids a division by zero in this way.
    width = (last - first) or 0.001
    ramp = jnp.clip((jnp.arange(rope.dim // 2, dtype=jnp.float32) - first) / width, 0, 1)
    return inverse / scaling.factor * ramp + inverse * (1 - ramp)


def angle(rope: Rope, positions: jax.Array) -> jax.Array:
    """f32[B,T,dim/2]: the rotary angles at ``positions`` i32[B,T]."""
    return positions[..., None].astype(jnp.float32) * frequencies(rope)


def rotate(x: jax.Array, angle: jax.Array, rope: Rope) -> jax.Array:
    """Turns the first ``rope.dim`` dimensions of x [B,T,H,D] by ``angle`` f32[B,T,dim/2].

    The result has the shape and dtype of x; it is computed in float32. The turned dimensions are
    multiplied by the attention factor of yarn and longrope.
    """
    if rope.dim < x.shape[-1]:
        turned = rotate(x[..., : rope.dim], angle, rope)
        return jnp.concatenate([turned, x[..., rope.dim :]], axis=-1)
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    if rope.scaling is not None and rope.scaling.attention_factor != 1:
        cos, sin = cos * rope.scaling.attention_factor, sin * rope.scaling.attention_factor
    first, second = jnp.split(x.astype(cos.dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
