"""Compares target and draft probabilities at every token of texts that the target wrote.

The overlap and the check of the output law are computed from them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import logit_maps, sampling
from specjax.models import lm
from specjax.types import LM, Context, Drafter, ModelParams

# Numbers in one array of probabilities [B,T,V]. Larger batches are divided.
MAX_NUMBERS = 2**28


class Comparison(NamedTuple):
    """One entry per output token, in order, f64[tokens]."""

    above: np.ndarray  # target probability of all tokens that are more probable
    tied: np.ndarray  # target probability of the token and of those with the same probability
    preferred: np.ndarray  # 1 where the draft probability of the token is above the target's
    preferred_mass: np.ndarray  # target probability of all tokens of which that is true
    overlap: np.ndarray  # sum of min(target, draft) over the vocabulary; nan without draft probs


def compare(
    target: LM,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    drafter: Drafter | None = None,
    *,
    width: int = 0,
    batch: int = 8,
) -> Comparison:
    """Compares the probabilities at every output token, given the text before it.

    Args:
        target: the model; its parameters are ``params.target``.
        params: those of the pair.
        prompts, outputs: token ids, row by row.
        settings: arguments of ``sampling.make_sampling``.
        drafter: its ``probs`` are compared; without them the last three fields are 0, 0 and nan.
        width: length of the longest text, so that several calls share one program; 0 = of these.
        batch: largest number of rows in one call of the models.
    """
    width = width or max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    batch = max(1, min(batch, MAX_NUMBERS // (width * target.vocab_size)))
    draft_probs, columns = None if drafter is None else drafter.probs, []
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        pairs = list(zip(prompts[some], outputs[some], strict=True))
        begins = [len(p) for p, _ in pairs]
        context = _pack([[*p, *o] for p, o in pairs], begins, batch, width, settings)
        values = np.stack([np.asarray(v) for v in _compare(target, draft_probs, params, context)])
        # Column t belongs to the token at t + 1.
        columns += [
            values[:, i, len(p) - 1 : len(p) + len(o) - 1] for i, (p, o) in enumerate(pairs)
        ]
    return Comparison(*np.concatenate(columns, axis=1).astype(np.float64))


def _pack(
    rows: list[list[int]], begins: list[int], batch: int, width: int, settings: dict
) -> Context:
    """The texts; ``begins`` are the lengths of their prompts."""
    tokens = np.zeros((batch, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows] + [1] * (batch - len(rows)), np.int32)
    how = sampling.make_sampling(batch, **settings)
    how = sampling.after_prompt(how, jnp.asarray([*begins, *[1] * (batch - len(rows))]))
    return Context(jnp.asarray(tokens), jnp.asarray(lengths), how)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compare(target, draft_probs, params, context):
    """The fields of ``Comparison`` for every token after the first, f32[B,T-1] each."""
    tokens = context.tokens
    logits = lm.forward(target, params.target, tokens).logits
    logits = logit_maps.along_text(context.sampling.maps, logits, tokens)
    probs = sampling.to_probs(logits, context.sampling)[:, :-1]
    own = jnp.take_along_axis(probs, tokens[:, 1:, None], -1)
    above = jnp.where(probs > own, probs, 0).sum(-1)
    tied = jnp.where(probs == own, probs, 0).sum(-1)
    if draft_probs is None:
        zeros = jnp.zeros_like(above)
        return above, tied, zeros, zeros, zeros + jnp.nan
    draft = draft_probs(params, context)[:, :-1]
    higher = draft > probs
    preferred = jnp.take_along_axis(higher, tokens[:, 1:, None], -1)[..., 0]
    return (
        above,
        tied,
        preferred.astype(jnp.float32),
        jnp.where(higher, probs, 0).sum(-1),
        jnp.minimum(probs, draft).sum(-1),
    )
