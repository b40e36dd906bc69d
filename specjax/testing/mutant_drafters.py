"""Wrong drafters: functions (draft, keys, context) -> draft that change a correct draft.

The registry, with the mistake and its source, is ``specjax.testing.mutants``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import _walk
from specjax.types import Draft, Drafter


def with_draft(change: Callable) -> Callable[[Drafter], Drafter]:
    """A function of drafters: every draft becomes ``change(draft, keys, context)``."""

    def mutate(drafter: Drafter) -> Drafter:
        def propose(params, keys, context, state):
            draft, state = drafter.propose(params, keys, context, state)
            return change(draft, keys, context), state

        return drafter._replace(propose=propose, name=change.__name__)

    return mutate


def _own_probs(draft: Draft) -> jax.Array:
    """f[B,N]: the probability of each draft token in its own probs."""
    assert draft.probs is not None
    return jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]


def _siblings(draft: Draft) -> jax.Array:
    """bool[B,N,N]: nodes with the same parent, each with itself too."""
    parents = _walk.parents(draft)
    return parents[:, :, None] == parents[:, None]


def argmax_with_softmax_probs(draft, keys, context):
    return draft.replace(tokens=jnp.argmax(draft.probs, -1).astype(jnp.int32))


def declares_other_probs(draft, keys, context):
    """Declares the probs without the temperature; here, flatter ones."""
    flat = jnp.sqrt(draft.probs)
    return draft.replace(probs=flat / flat.sum(-1, keepdims=True))


def drops_after_drawing(draft, keys, context):
    return draft.replace(valid=draft.valid & (_own_probs(draft) > 0.2))


def top_k_with_iid_probs(draft, keys, context):
    """The most probable tokens as siblings, with the probs of i.i.d. draws."""
    size = draft.tokens.shape[1]
    rank = (_siblings(draft) & jnp.tril(jnp.ones((size, size), bool), -1)).sum(-1)
    best = jnp.argsort(-draft.probs, axis=-1)
    tokens = jnp.take_along_axis(best, rank[..., None], -1)[..., 0]
    return draft.replace(tokens=tokens.astype(jnp.int32))


def keeps_best_draws(draft, keys, context):
    """Of i.i.d. draws it keeps the more probable half."""
    mass = _own_probs(draft)
    others = _siblings(draft) & ~jnp.eye(mass.shape[1], dtype=bool)
    better = others & (mass[:, None] > mass[:, :, None])
    return draft.replace(valid=draft.valid & ~better.any(-1))


def forgets_earlier_siblings(draft, keys, context):
    """Draws without replacement and declares the probs with replacement."""
    # The first sibling's probs have no excluded token.
    first = jnp.argmax(_siblings(draft), -1)
    return draft.replace(probs=jnp.take_along_axis(draft.probs, first[..., None], 1))


def argmax_next_to_greedy_rows(draft, keys, context):
    """Drafts the argmax for sampled rows too, when greedy rows are in the batch."""
    greedy = context.sampling.greedy
    mixed = greedy.any() & ~greedy.all()
    best = jnp.argmax(draft.probs, -1).astype(jnp.int32)
    return draft.replace(tokens=jnp.where(mixed & ~greedy[:, None], best, draft.tokens))


def draws_with_coin_noise(draft, keys, context):
    """Draws the first token with the uniform number that the rule accepts it with."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    total = jnp.cumsum(draft.probs, -1)
    first = jnp.argmax(total > u[..., None] * total[..., -1:], -1).astype(jnp.int32)
    return draft.replace(tokens=jnp.concatenate([first[:, :1], draft.tokens[:, 1:]], 1))
