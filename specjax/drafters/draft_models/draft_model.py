"""A smaller language model drafts a chain, one token at a time, from its own cache.

L1 with the rule "chain". Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318). Each
token is drawn from the draft model's distribution under the row's own sampling settings, and
``Draft.probs`` holds exactly these probabilities.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import whole
from specjax.drafters.draft_models import _small_model
from specjax.rng import DRAFT, RowKeys
from specjax.types import (
    LM,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)

# Tokens that the draft cache may lack: the pending one, and after a full acceptance the last draft
# token.
BEHIND = 2


class _Setup(NamedTuple):
    """The static settings."""

    model: LM
    gamma: int
    gaps: bool


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gamma: int = 5,
    gaps: bool = False,
    params: Params = None,
) -> Drafter:
    """Drafts with a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or a directory in Hugging Face layout.
        gamma: draft tokens per round.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``; ``init_params`` returns
            them.

    Raises:
        UserError: gamma below 1, another vocabulary than the target's, a directory that cannot be
            loaded.
    """
    whole("gamma", gamma, 1)
    model, params = _small_model.load(target, model, params)
    setup = _Setup(model, gamma, gaps)
    return Drafter(
        init_params=functools.partial(_small_model.init_params, "draft_model", params),
        init=functools.partial(_init, setup),
        propose=functools.partial(_propose, setup),
        update=functools.partial(_update, setup),
        nodes=gamma,
        name="draft_model",
        probs=functools.partial(_small_model.probs, model),
        gaps=gaps,
        training=Training(
            foresee=functools.partial(_small_model.foresee, target, model, gamma),
            ranks=functools.partial(_small_model.ranks, model, gamma),
        ),
    )


def _init(
    setup: _Setup, params: ModelParams, context: Context, target_out: Output, slots: int
) -> Any:
    _small_model.check_positions(setup.model, slots, setup.gamma)
    return _small_model.prefill(setup.model, params.draft, context, slots + BEHIND)


def _propose(
    setup: _Setup, params: ModelParams, keys: RowKeys, context: Context, cache: Any
) -> tuple[Draft, Any]:
    model, gamma, gaps = setup
    logits, cache = _small_model.catch_up(model, params.draft, context, cache, BEHIND, gaps)
    cache = model.commit(cache, jnp.ones_like(cache.length))
    first = _next(keys, 0, logits, context)

    def step(carry, index):
        cache, token = carry
        out, cache = model.apply(params.draft, token[:, None], cache)
        cache = model.commit(cache, jnp.ones_like(cache.length))
        token, probs, finite = _next(keys, index, out.logits[:, 0], context)
        return (cache, token), (token, probs, finite)

    tokens, probs, finites = jax.tree.map(lambda x: x[:, None], first)
    if gamma > 1:
        (cache, _), rest = jax.lax.scan(step, (cache, first[0]), jnp.arange(1, gamma))
        tokens, probs, finites = jax.tree.map(
            lambda first, more: jnp.concatenate([first[:, None], jnp.moveaxis(more, 0, 1)], 1),
            first,
            rest,
        )
    # Back to the committed text; ``update`` commits the accepted draft tokens.
    cache = cache.replace(length=context.length)
    draft = Draft(
        tokens=tokens, valid=jnp.ones_like(tokens, bool), probs=probs, finite=finites.all(-1)
    )
    return draft, cache


def _update(
    setup: _Setup,
    params: ModelParams,
    cache: Any,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> Any:
    # The pending token and the first gamma - 1 draft tokens were fed; of these draft tokens the
    # accepted ones stay.
    kept = jnp.clip(verdict.count - 1, 0, setup.gamma - 1)
    return setup.model.commit(cache, kept)


def _next(
    keys: RowKeys, index: int | jax.Array, logits: jax.Array, context: Context
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws a token of each row from logits [B,V]: (i32[B], its probs f32[B,V], finite bool[B])."""
    peak = logits.max(-1)

    def sampled(logits):
        probs = sampling.to_probs(logits, context.sampling)
        return keys.draw(DRAFT, probs, index), probs

    # In greedy rows rules compare token ids only: no softmax, and no probs.
    def greedy(logits):
        return sampling.argmax(logits), jnp.zeros_like(logits)

    token, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled, logits)
    return token, probs, jnp.isfinite(peak)
