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

# Numbers in one array of probabilities [B,T,V], of which several exist at a time. Larger batches
# are divided, and so are the places of a text where the model has ``LM.unembed``.
MAX_NUMBERS = 2**22


def rows(width: int, vocab_size: int, most: int = 8) -> int:
    """How many texts of ``width`` tokens may be scored at once, at least one."""
    return max(1, min(most, MAX_NUMBERS // (width * vocab_size)))


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
    batch = rows(width, target.vocab_size, batch)
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
    tokens, maps = context.tokens, context.sampling.maps
    out = lm.forward(target, params.target, tokens)
    draft = None if draft_probs is None else draft_probs(params, context)[:, :-1]
    if target.unembed is None or maps is not None:  # maps depend on the whole text
        probs = sampling.to_probs(logit_maps.along_text(maps, out.logits, tokens), context.sampling)
        return _fields(probs[:, :-1], draft, tokens[:, 1:])

    def some(parts):
        hidden, following, drafted = parts
        logits = target.unembed(params.target, hidden)
        return _fields(sampling.to_probs(logits, context.sampling), drafted, following)

    # The logits of all places are never computed.
    parts = out.hidden[:, :-1], tokens[:, 1:], draft
    size = max(1, MAX_NUMBERS // (len(tokens) * target.vocab_size))
    return _by_pieces(some, parts, min(size, tokens.shape[1] - 1))


def _by_pieces(function, parts, size: int):
    """``function`` of arrays [B,T,...], ``size`` places at a time; it returns arrays [B,T]."""
    length = jax.tree.leaves(parts)[0].shape[1]
    whole = length // size
    cut = lambda x: x[:, : whole * size].reshape(x.shape[0], whole, size, *x.shape[2:])  # noqa: E731
    pieces = jax.tree.map(lambda x: cut(x).swapaxes(0, 1), parts)
    done = jax.lax.map(function, pieces)
    done = jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], whole * size), done)
    if whole * size == length:
        return done
    rest = function(jax.tree.map(lambda x: x[:, whole * size :], parts))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), done, rest)


def _fields(probs, draft, following):
    """The fields, from probabilities f32[B,T,V] before the tokens ``following`` i32[B,T]."""
    own = jnp.take_along_axis(probs, following[..., None], -1)
    above = jnp.where(probs > own, probs, 0).sum(-1)
    tied = jnp.where(probs == own, probs, 0).sum(-1)
    if draft is None:
        zeros = jnp.zeros_like(above)
        return above, tied, zeros, zeros, zeros + jnp.nan
    higher = draft > probs
    preferred = jnp.take_along_axis(higher, following[..., None], -1)[..., 0]
    return (
        above,
        tied,
        preferred.astype(jnp.float32),
        jnp.where(higher, probs, 0).sum(-1),
        jnp.minimum(probs, draft).sum(-1),
    )
