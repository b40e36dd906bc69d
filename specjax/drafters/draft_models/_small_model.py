"""What drafters with a small language model share: loading it, feeding it, its probabilities.

The draft cache holds the committed text without its newest tokens: the pending token, and tokens
that the last round accepted and this model was never fed (the last draft token, or all of them if
another drafter proposed them). Each round begins with a block wide enough for these tokens.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.drafters import _foresee
from specjax.errors import UserError
from specjax.models.lm import forward
from specjax.sampling import Sampling
from specjax.types import LM, Batch, Context, ModelParams, Params


def load(target: LM, model: LM | str | os.PathLike, params: Params) -> tuple[LM, Params]:
    """The draft model and its parameters, from an ``LM`` or a Hugging Face directory.

    Raises UserError for a directory that cannot be loaded, or another vocabulary than the target's.
    """
    if not isinstance(model, LM):
        # Imported here: drafters made from an LM need no file formats.
        from specjax.models import hf

        loaded = hf.load(model)
        model, params = loaded.lm, loaded.params
    check_vocabulary(target, model)
    return model, params


def init_params(name: str, params: Params, key: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    del key
    if params is None:
        raise UserError(f"{name} was made from an LM without params; give params=, or a directory")
    return params


def prefill(model: LM, params: Params, context: Context, slots: int) -> Any:
    """The cache of the prompt without its pending token, in a buffer of ``slots``."""
    cache = model.init_cache(context.tokens.shape[0], slots)
    return decode.feed(model, params, context.tokens[:, :-1], context.length - 1, cache)[1]


def catch_up(
    model: LM, params: Params, context: Context, cache: Any, width: int, gaps: bool = False
) -> tuple[jax.Array, Any]:
    """Feeds the committed tokens that the cache lacks and commits all but the pending one.

    The cache lacks 1 to ``width`` tokens. With ``gaps`` it may lack any number, and ``width`` are
    fed at a time.

    Returns the logits f32[B,V] after the pending token, and the cache: the pending token is written
    at ``cache.length``, as the root of the block that follows.
    """
    if gaps:

        def feed(carry):
            cache = carry[2]
            left = context.length - cache.length > width
            more, cache = _feed(model, params, context, cache, width, left)
            return left.any(), more, cache

        logits = jax.eval_shape(lambda c: _feed(model, params, context, c, width)[0], cache)
        start = (jnp.asarray(True), jnp.zeros(logits.shape, logits.dtype), cache)
        return jax.lax.while_loop(lambda carry: carry[0], feed, start)[1:]
    return _feed(model, params, context, cache, width)


def _feed(
    model: LM,
    params: Params,
    context: Context,
    cache: Any,
    width: int,
    left: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """One block of ``catch_up``; rows with ``left`` bool[B] need another block after it."""
    slots = cache.length[:, None] + jnp.arange(width)
    block = jnp.take_along_axis(context.tokens, slots, axis=1, mode="clip")
    # May be 0 in a finished row, whose draft is not used.
    missing = context.length - cache.length
    out, cache = model.apply(params, block, cache)
    last = jnp.clip(missing - 1, 0, width - 1)
    cache = model.commit(cache, last if left is None else jnp.where(left, width, last))
    return jnp.take_along_axis(out.logits, last[:, None, None], axis=1)[:, 0], cache


def foresee(
    target: LM, model: LM, depth: int, params: ModelParams, batch: Batch, sampling_: Sampling
) -> jax.Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the model's probabilities."""
    tokens = batch.tokens
    logits, target_logits = (
        forward(m, p, tokens[:, :-1]).logits
        for m, p in ((model, params.draft), (target, params.target))
    )
    accepted = _foresee.accept_probs(logits, target_logits, tokens[:, 1:], sampling_)
    return by_depth(accepted, depth, 0)


def ranks(model: LM, depth: int, params: ModelParams, batch: Batch) -> jax.Array:
    """i32[B,T,depth]: ``Training.ranks``; the model reads the text, so depths differ by a shift."""
    logits = forward(model, params.draft, batch.tokens[:, :-1]).logits
    return by_depth(_foresee.rank(logits, batch.tokens[:, 1:]), depth, -1)


def by_depth(values: jax.Array, depth: int, beyond: float) -> jax.Array:
    """[B,T] values of the token after each position -> [B,T,depth], of the next ``depth`` tokens.

    ``beyond`` is the value after the end of the text.
    """
    padded = jnp.pad(values, ((0, 0), (0, depth)), constant_values=beyond)
    return jnp.stack([padded[:, d : d + values.shape[1]] for d in range(depth)], -1)


def probs(model: LM, params: ModelParams, context: Context) -> jax.Array:
    """f32[B,S,V]: ``Drafter.probs``, what the model would draw from after each prefix."""
    logits = forward(model, params.draft, context.tokens).logits
    return sampling.to_probs(logits, context.sampling)


def check_vocabulary(target: LM, draft: LM) -> None:
    """Raises UserError unless both models have the same tokens."""
    if target.vocab_size != draft.vocab_size:
        raise UserError(
            f"the draft model has a vocabulary of {draft.vocab_size} and the target of "
            f"{target.vocab_size}; they must share one tokenizer"
        )
    if target.vocabulary and draft.vocabulary and target.vocabulary != draft.vocabulary:
        raise UserError(
            f"draft model and target have {target.vocab_size} tokens each, but not the same ones; "
            "they must share one tokenizer"
        )


def check_positions(draft: LM, slots: int, nodes: int) -> None:
    """Raises UserError if a text of ``slots - nodes`` tokens does not fit the draft model."""
    if draft.max_positions is not None and slots - nodes > draft.max_positions:
        raise UserError(
            f"prompt and new tokens need {slots - nodes} positions, and the draft model has "
            f"{draft.max_positions}; shorten them or take another draft model"
        )
