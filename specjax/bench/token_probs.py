"""What target and drafter think of every token of a text that the target wrote: the raw material of overlap and law check."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.models import lm
from specjax.types import LM, Context, Drafter, ModelParams

MOST = (
    2**28
)  # floats of one array of laws: rows go in smaller groups where texts and vocabulary are large


class Views(NamedTuple):
    """Of every token of the outputs, in order, f64[tokens] each."""

    better: np.ndarray  # the target's mass on more probable tokens
    own: np.ndarray  # its mass on the token, and on those as probable
    liked: np.ndarray  # 1 where the drafter likes the token better than the target does
    chance: np.ndarray  # the target's mass on such tokens
    overlap: (
        np.ndarray
    )  # sum of min(target, draft) over the vocabulary; nan without a law of the drafter


def views(
    target: LM,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    drafter: Drafter | None = None,
    *,
    width: int = 0,
    batch: int = 8,
) -> Views:
    """Looks at every output token given its prefix, under the sampling settings.

    Args:
        target: the model; its parameters are ``params.target``.
        params: the pair's.
        prompts, outputs: token ids, row by row.
        settings: of ``sampling.make_sampling``.
        drafter: one with a ``law``, for the last three views.
        width: longest text, so that several calls share what is compiled; 0 = that of these.
        batch: rows at once, at the most.
    """
    width = width or max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    batch = max(1, min(batch, MOST // (width * target.vocab_size)))
    law, seen = None if drafter is None else drafter.probs, []
    for start in range(0, len(prompts), batch):
        some = slice(start, start + batch)
        context = _pack(
            [[*p, *o] for p, o in zip(prompts[some], outputs[some], strict=True)],
            batch,
            width,
            settings,
        )
        found = np.stack([np.asarray(v) for v in _look(target, law, params, context)])
        pairs = enumerate(zip(prompts[some], outputs[some], strict=True))
        seen += [found[:, i, len(p) - 1 : len(p) + len(o) - 1] for i, (p, o) in pairs]
    return Views(*np.concatenate(seen, axis=1).astype(np.float64))


def _pack(rows: list[list[int]], batch: int, width: int, settings: dict) -> Context:
    tokens = np.zeros((batch, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows] + [1] * (batch - len(rows)), np.int32)
    return Context(
        jnp.asarray(tokens), jnp.asarray(lengths), sampling.make_sampling(batch, **settings)
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _look(target, law, params, context):
    """f32[B,T-1] each, of every next token."""
    tokens = context.tokens
    laws = sampling.to_probs(lm.forward(target, params.target, tokens).logits, context.sampling)[
        :, :-1
    ]
    own = jnp.take_along_axis(laws, tokens[:, 1:, None], -1)
    better, ties = jnp.where(laws > own, laws, 0).sum(-1), jnp.where(laws == own, laws, 0).sum(-1)
    if law is None:
        nothing = jnp.zeros_like(better)
        return better, ties, nothing, nothing, nothing + jnp.nan
    draft = law(params, context)[:, :-1]
    likes = draft > laws
    liked = jnp.take_along_axis(likes, tokens[:, 1:, None], -1)[..., 0]
    return (
        better,
        ties,
        liked.astype(jnp.float32),
        jnp.where(likes, laws, 0).sum(-1),
        jnp.minimum(laws, draft).sum(-1),
    )
