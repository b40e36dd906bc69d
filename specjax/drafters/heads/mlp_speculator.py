"""MLP speculator: a small recurrent network reads the newest token and predicts the next one.

Wertheimer et al. 2024 (2404.19124) and its code (fms-extras). Stage i of n maps the state s_(i-1)
and the newest token x to

    s_i = GELU(LN_i(W_i s_(i-1) + (w_e / w_s) E_i[x])),  logits_i = H_i s_i,
    w_s = 0.5^(0.5/n),  w_e = sqrt((1 - w_s^2) I / 2)

where s_0 is the target's last feature, I the inner width and GELU the exact one; LN divides by the
root mean square, then scales and shifts. With these weights half of the power of s_0 is left after
n stages, also if fewer stages are run.

Rules and lossless classes are those of ``medusa``.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole, yes_or_no
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _drafter, _family, _given
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.models.logits import in_float32
from specjax.models.short_blocks import matmul
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "wertheimer2024accelerating"

SHARED = HeadKeys
HEADS = 3
EPS = 1e-6


def make(
    target: LM, *, inner: int = 0, tie: bool = False, scale_input: bool = False, **shared: Any
) -> Drafter:
    """Drafts with an MLP speculator.

    Args:
        target: the model whose features it reads.
        inner: I; 0: as in the files, or the target's width for a new one.
        tie: whether the stages of a new one share E, H and LN, and all but the first share W;
            read from the tensors of a stored one.
        scale_input: whether s_0 is divided by sqrt(2) times its root mean square; read from
            config.json if it has this key.
        shared: the keys of ``HeadKeys``; ``heads`` is the number n of stages, 3 for a new one (a
            flatter ``tree`` runs fewer), and ``model`` may be a released one ("accelerator"
            repositories).

    Raises:
        UserError: files without heads or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    keys = HeadKeys(**shared)
    whole("inner", inner, 0)
    yes_or_no("tie", tie)
    yes_or_no("scale_input", scale_input)
    given = _given.read("mlp_speculator", target, keys)
    stored = None
    if given.params is not None:
        stored, tie, scale_input = _stored(given, keys.heads, tie, scale_input)
    width = given.ends.width
    heads, inner = _given.sizes(stored, heads=(keys.heads, HEADS), inner=(inner, width))
    if tie and heads < 2:
        raise UserError(
            f"tie needs at least 2 stages, and heads is {heads}; raise heads or leave tie out"
        )
    keep = 0.5 ** (0.5 / heads)
    weight = math.sqrt((1 - keep**2) * inner / 2) / keep
    family = _family.Heads(
        name="mlp_speculator",
        depth=heads,
        begin=Bound(_begin, scale_input),
        step=Bound(_step, tie, weight),
        start=Bound(_start, (width, inner, target.vocab_size), heads, tie),
        facts=(("n_predict", heads), ("scale_input", scale_input)),
    )
    return _drafter.build(target, family, keys, given)


def _stored(
    given: Given, heads: int, tie: bool, scale_input: bool
) -> tuple[tuple[int, int], bool, bool]:
    """((stages, inner width), tie, scale_input) of stored heads. Raises UserError.

    ``heads``, ``tie`` and ``scale_input`` are the keys that were given.
    """
    params, config = given.params, given.config
    stages, _, inner = params["emb"].shape
    tied = stages == 1 and "proj" in params
    if tied:
        if not heads and not config:
            raise UserError(
                "these stages are tied, so their shapes do not show how many there are; give heads"
            )
        stages = config.get("n_predict", heads)
    flags = (("tie", tie, tied), ("scale_input", scale_input, config.get("scale_input", True)))
    for name, value, stored in flags:
        if value and not stored:
            raise UserError(f"{name} is set, and the given heads do not have it; leave it out")
    return (stages, inner), tied, config.get("scale_input", scale_input)


def _begin(scale_input: bool, params: ModelParams, feature: jax.Array) -> jax.Array:
    return _normal(feature) / math.sqrt(2) if scale_input else feature


def _step(
    tie: bool,
    weight: float,
    params: ModelParams,
    state: jax.Array,
    depth: int,
    tokens: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """``weight`` is w_e / w_s."""
    own, at = params.draft, 0 if tie else depth
    into = own["proj_in"] if depth == 0 else own["proj"][str(0 if tie else depth - 1)]
    state = matmul(state, into) + weight * own["emb"][at, tokens]
    state = _normal(state) * own["ln"]["scale"][at] + own["ln"]["bias"][at]
    state = jax.nn.gelu(state, approximate=False)
    return in_float32(matmul(state, own["head"][str(at)])), state


def _start(
    sizes: tuple[int, int, int], heads: int, tie: bool, target_params: Params, key: jax.Array
) -> Params:
    """``sizes`` are the target's width, the inner width and the vocabulary's size."""
    del target_params
    width, inner, vocab = sizes
    stages, after = (1, 1) if tie else (heads, heads - 1)
    shapes = {"emb": (stages, vocab, inner), "proj_in": (width, inner)}
    shapes |= {"head": (stages, inner, vocab)} | ({"proj": (after, inner, inner)} if after else {})
    keys = jax.random.split(key, len(shapes))
    params: Params = {
        name: jax.random.normal(k, shape) / math.sqrt(inner)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    # Taking one matrix of a stack copies it, in every draft.
    params |= {name: _apart(params[name]) for name in ("head", "proj") if name in params}
    return params | {"ln": {"scale": jnp.ones((stages, inner)), "bias": jnp.zeros((stages, inner))}}


def _apart(stack: jax.Array) -> dict[str, jax.Array]:
    return {str(index): matrix for index, matrix in enumerate(stack)}


def _normal(x: jax.Array) -> jax.Array:
    """x divided by its root mean square, which is computed in float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(x.dtype)
