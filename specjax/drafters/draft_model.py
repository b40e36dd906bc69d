"""A smaller language model drafts a chain, one token at a time, from its own cache. L1 with the chain rule.

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318), card A2. Each token is drawn from the draft model's law
under the row's own sampling settings, and that law is what ``Draft.probs`` holds.

The draft cache holds the committed text up to, and without, the newest one or two tokens: after a full acceptance the
last draft token was never fed. So every round begins by feeding a block of two, of which the first one or two count.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, sampling
from specjax.drafters._checks import at_least, positions, same_vocabulary
from specjax.errors import UserError
from specjax.models.lm import forward
from specjax.rng import DRAFT
from specjax.types import LM, Draft, Drafter, Params


def make(target: LM, *, model: LM | str | os.PathLike, gamma: int = 5, params: Params = None) -> Drafter:
    """Drafts with a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or a directory in Hugging Face layout.
        gamma: draft tokens per round.
        params: the draft model's parameters when ``model`` is an ``LM``; ``init_params`` returns them.

    Raises:
        UserError: gamma below 1, another vocabulary than the target's, a directory that cannot be loaded.
    """
    at_least("gamma", gamma, 1)
    if not isinstance(model, LM):
        from specjax.models import hf  # only here: the core needs no file formats

        loaded = hf.load(model)
        model, params = loaded.lm, loaded.params
    same_vocabulary(target, model)

    def init(params, context, target_out, slots):
        positions(model, slots, gamma)
        cache = model.init_cache(context.tokens.shape[0], slots + 1)  # one more: the first block is two wide
        return decode.feed(model, params.draft, context.tokens[:, :-1], context.length - 1, cache)[1]

    def propose(params, keys, context, cache):
        slots = cache.length[:, None] + jnp.arange(2)
        block = jnp.take_along_axis(context.tokens, slots, axis=1, mode="clip")
        missing = context.length - cache.length  # 1 or 2; 0 in a finished row, whose draft nobody looks at
        out, cache = model.apply(params.draft, block, cache)
        cache = model.commit(cache, missing)
        last = jnp.maximum(missing - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(out.logits, last, axis=1)[:, 0]
        row_keys = keys.at_round(DRAFT)
        token, probs, finite = _next(row_keys, 0, logits, context)

        def step(carry, index):
            cache, token = carry
            out, cache = model.apply(params.draft, token[:, None], cache)
            cache = model.commit(cache, jnp.ones_like(cache.length))
            token, probs, finite = _next(row_keys, index, out.logits[:, 0], context)
            return (cache, token), (token, probs, finite)

        (cache, _), rest = jax.lax.scan(step, (cache, token), jnp.arange(1, gamma))
        tokens, laws, finites = jax.tree.map(
            lambda first, more: jnp.moveaxis(jnp.concatenate([first[None], more]), 0, 1), (token, probs, finite), rest
        )
        cache = cache.replace(length=context.length)  # committed text only: a rejected tail is simply forgotten
        draft = Draft(tokens=tokens, valid=jnp.ones_like(tokens, bool), probs=laws, finite=finites.all(-1))
        return draft, cache

    def update(params, cache, draft, verdict, target_out):
        # The pending token and the first gamma - 1 draft tokens were fed; of the latter the accepted ones stay.
        kept = jnp.clip(verdict.count - 1, 0, gamma - 1)
        return model.commit(cache, kept)

    def init_params(key: jax.Array) -> Any:
        if params is None:
            raise UserError("draft_model was made from an LM without params; give params=, or a directory")
        return params

    def law(params, context):
        return sampling.to_probs(forward(model, params.draft, context.tokens).logits, context.sampling)

    return Drafter(init_params, init, propose, update, nodes=gamma, name="draft_model", law=law)


def _next(keys, index, logits, context):
    """Draws one token of each row from logits [B,V]: (token i32[B], its law f32[B,V], finite bool[B])."""
    peak = logits.max(-1)

    def sampled(logits):
        probs = sampling.to_probs(logits, context.sampling)
        return sampling.draw_rows(jax.vmap(lambda k: jax.random.fold_in(k, index))(keys), probs), probs

    def greedy(logits):  # the rule then looks at token ids only: no softmax, and no law
        return jnp.argmax(logits, -1).astype(jnp.int32), jnp.zeros_like(logits)

    token, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled, logits)
    return token, probs, jnp.isfinite(peak)
