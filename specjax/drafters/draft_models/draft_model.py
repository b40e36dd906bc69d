"""A smaller language model drafts a chain, one token at a time, from its own cache. L1 with the chain rule.

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318), card A2. Each token is drawn from the draft model's law
under the row's own sampling settings, and that law is what ``Draft.probs`` holds.
"""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import whole
from specjax.drafters.draft_models import _small_model
from specjax.rng import DRAFT
from specjax.types import LM, Draft, Drafter, Params, Training

BEHIND = 2  # tokens that the draft cache may lack: the pending one, and after a full acceptance the last draft token


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
        gaps: whether rounds may pass in which another drafter proposed; ``escalate`` asks for it.
        params: the draft model's parameters when ``model`` is an ``LM``; ``init_params`` returns them.

    Raises:
        UserError: gamma below 1, another vocabulary than the target's, a directory that cannot be loaded.
    """
    whole("gamma", gamma, 1)
    model, params = _small_model.load(target, model, params)

    def init(params, context, target_out, slots):
        _small_model.check_positions(model, slots, gamma)
        return _small_model.begin(model, params.draft, context, slots + BEHIND)

    def propose(params, keys, context, cache):
        logits, cache = _small_model.catch_up(model, params.draft, context, cache, BEHIND, gaps)
        cache = model.commit(cache, jnp.ones_like(cache.length))
        first = _next(keys, 0, logits, context)

        def step(carry, index):
            cache, token = carry
            out, cache = model.apply(params.draft, token[:, None], cache)
            cache = model.commit(cache, jnp.ones_like(cache.length))
            token, probs, finite = _next(keys, index, out.logits[:, 0], context)
            return (cache, token), (token, probs, finite)

        tokens, laws, finites = jax.tree.map(lambda x: x[:, None], first)
        if gamma > 1:
            (cache, _), rest = jax.lax.scan(step, (cache, first[0]), jnp.arange(1, gamma))
            tokens, laws, finites = jax.tree.map(
                lambda first, more: jnp.concatenate([first[:, None], jnp.moveaxis(more, 0, 1)], 1),
                first,
                rest,
            )
        cache = cache.replace(
            length=context.length
        )  # committed text only: a rejected tail is simply forgotten
        draft = Draft(
            tokens=tokens, valid=jnp.ones_like(tokens, bool), probs=laws, finite=finites.all(-1)
        )
        return draft, cache

    def update(params, cache, draft, verdict, target_out):
        # The pending token and the first gamma - 1 draft tokens were fed; of the latter the accepted ones stay.
        kept = jnp.clip(verdict.count - 1, 0, gamma - 1)
        return model.commit(cache, kept)

    return Drafter(
        init_params=lambda key: _small_model.given("draft_model", params),
        init=init,
        propose=propose,
        update=update,
        nodes=gamma,
        name="draft_model",
        probs=lambda params, context: _small_model.probs(model, params.draft, context),
        gaps=gaps,
        training=Training(
            foresee=lambda params, batch, how: _small_model.foresee(
                target, model, params, batch, how, gamma
            ),
            ranks=lambda params, batch: _small_model.ranks(model, params, batch, gamma),
        ),
    )


def _next(keys, index, logits, context):
    """Draws one token of each row from logits [B,V]: (token i32[B], its law f32[B,V], finite bool[B])."""
    peak = logits.max(-1)

    def sampled(logits):
        probs = sampling.to_probs(logits, context.sampling)
        return keys.draw(DRAFT, probs, index), probs

    def greedy(logits):  # the rule then looks at token ids only: no softmax, and no law
        return sampling.argmax(logits), jnp.zeros_like(logits)

    token, probs = jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled, logits)
    return token, probs, jnp.isfinite(peak)
