"""Wrong drafters: functions (draft, keys, context) -> draft that change a correct draft.

The registry, with the mistake and its source, is ``mutants``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import verdict as _verdict
from specjax.types import Draft, Drafter


def with_draft(change: Callable) -> Callable[[Drafter], Drafter]:
    """A function of drafters: every draft becomes ``change(draft, keys, context)``."""

    def mutate(drafter: Drafter) -> Drafter:
        def propose(params, keys, context, state):
            draft, state = drafter.propose(params, keys, context, state)
            return change(draft, keys, context), state

        # A change may make nodes invalid.
        return drafter._replace(propose=propose, name=change.__name__, whole=False)

    return mutate


def _own_probs(draft: Draft) -> jax.Array:
    """f[B,N]: the probability of each draft token in its own probs."""
    assert draft.probs is not None
    return jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]


def _siblings(draft: Draft) -> jax.Array:
    """bool[B,N,N]: nodes with the same parent, each with itself too."""
    parents = _verdict.parents(draft)
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


def claims_another_temperature(draft, keys, context):
    """Declares the probs of temperature 1 and draws with the row's own."""
    heat = jnp.where(context.sampling.greedy, 1, context.sampling.temperature)[:, None, None]
    plain = draft.probs ** heat.astype(draft.probs.dtype)
    return draft.replace(probs=plain / plain.sum(-1, keepdims=True))


def length_after_looking(draft, keys, context):
    """Chooses the length from the drawn tokens: it ends before the first unlikely token.

    Confidence 1 for token 0, 1/2 for the others.
    """
    confidence = jnp.cumprod(jnp.where(draft.tokens == 0, 1.0, 0.5), -1)
    return draft.replace(valid=draft.valid & (confidence > 0.6))


def length_from_a_later_token(draft, keys, context):
    """Drops the whole draft because of its second token."""
    return draft.replace(valid=draft.valid & (draft.tokens[:, 1:2] != 0))


def length_by_the_class_of_the_draft_token(draft, keys, context):
    """Drops the draft where its first token, not the pending one, is of a class: an odd one."""
    return draft.replace(valid=draft.valid & (draft.tokens[:, :1] % 2 == 0))


def never_drafts_eos(draft, keys, context):
    """Makes a drawn token 0 invalid, as if it were an end-of-sequence token."""
    return draft.replace(valid=draft.valid & (draft.tokens != 0))


def flattering_probs(draft, keys, context):
    """Of two distributions it declares the one in which the drawn token is less probable."""
    chance = 1 / draft.probs.shape[-1]
    high = (_own_probs(draft) > chance)[..., None]
    return draft.replace(probs=jnp.where(high, jnp.full_like(draft.probs, chance), draft.probs))


def probs_of_the_next_sibling(draft, keys, context):
    """Declares for each of two drafters the probs of the other."""
    return draft.replace(probs=draft.probs[:, jnp.array([2, 3, 0, 1])])


def drafts_from_the_next_row(draft, keys, context):
    """Its tokens are those of another row's draft."""
    return draft.replace(tokens=jnp.roll(draft.tokens, 1, axis=0))


def wrong_in_later_rounds(drafter: Drafter) -> Drafter:
    """Declares other probs from the second round on. It counts the rounds in its own state."""

    def init(*args):
        state = drafter.init(*args)
        return state, jnp.zeros(args[1].length.shape, jnp.int32)

    def propose(params, keys, context, state):
        draft, inner = drafter.propose(params, keys, context, state[0])
        wrong, late = declares_other_probs(draft, keys, context), state[1] > 0
        draft = jax.tree.map(
            lambda a, b: jnp.where(late.reshape(-1, *[1] * (a.ndim - 1)), a, b), wrong, draft
        )
        return draft, (inner, state[1] + 1)

    def update(params, state, *rest):
        return drafter.update(params, state[0], *rest), state[1]

    return drafter._replace(init=init, propose=propose, update=update, name="wrong_in_later_rounds")


def corrupt_below_the_newest(drafter: Drafter) -> Drafter:
    """Its cache is zero below the newest three entries."""

    def update(params, state, *rest):
        return jax.tree.map(_zero_old, drafter.update(params, state, *rest), is_leaf=_is_cache)

    return drafter._replace(update=update, name="corrupt_below_the_newest")


def _is_cache(part) -> bool:
    return hasattr(part, "length") and (hasattr(part, "k") or hasattr(part, "tokens"))


def _zero_old(part):
    if not _is_cache(part):
        return part

    def zero(x, axis):
        slot = jnp.arange(x.shape[axis]) < part.length[:, None] - 3
        return jnp.where(slot.reshape(slot.shape[0], *_ones(x, axis)), 0, x)

    if hasattr(part, "tokens"):
        return part.replace(tokens=zero(part.tokens, 1))
    return part.replace(k=tuple(zero(x, 2) for x in part.k), v=tuple(zero(x, 2) for x in part.v))


def _ones(x, axis: int) -> tuple[int, ...]:
    """The shape of a mask [B,S] without B, to be broadcast to ``x``, whose slots are ``axis``."""
    return tuple(x.shape[axis] if place == axis else 1 for place in range(1, x.ndim))


def commits_another_node(drafter: Drafter) -> Drafter:
    """Its cache keeps the first node of each level, also where another one was accepted."""

    def update(params, state, draft, verdict, target_out):
        first = jnp.argmax(_siblings(draft), -1)
        path = jnp.where(
            verdict.path >= 0, jnp.take_along_axis(first, jnp.maximum(verdict.path, 0), 1), -1
        )
        wrong = verdict.replace(path=path.astype(verdict.path.dtype))
        return drafter.update(params, state, draft, wrong, target_out)

    return drafter._replace(update=update, name="commits_another_node")


def forgets_the_last_round(drafter: Drafter) -> Drafter:
    """``update`` keeps the state of the round before, as if nothing had been accepted."""

    def update(params, state, draft, verdict, target_out):
        nothing = verdict.replace(path=jnp.full_like(verdict.path, -1))
        return drafter.update(params, state, draft, nothing, target_out)

    return drafter._replace(update=update, name="forgets_the_last_round")


def probs_of_the_depth_before(draft, keys, context):
    """Declares for each token of a chain the probs of the depth before it."""
    return draft.replace(probs=jnp.concatenate([draft.probs[:, :1], draft.probs[:, :-1]], 1))


def embeddings_behind_the_pending_token(drafter: Drafter) -> Drafter:
    """Continues from the outputs behind the pending token, also where nodes were accepted."""

    def update(params, state, draft, verdict, target_out):
        first = verdict.replace(count=jnp.minimum(verdict.count, 1))
        return drafter.update(params, state, draft, first, target_out)

    return drafter._replace(update=update, name="embeddings_behind_the_pending_token")


def one_threshold_for_the_batch(drafter: Drafter) -> Drafter:
    """All rows have the threshold of the first row."""

    def update(params, state, *rest):
        state = drafter.update(params, state, *rest)
        own = state.control.threshold
        first = jnp.broadcast_to(own[:1], own.shape)
        return state.replace(control=state.control.replace(threshold=first))

    return drafter._replace(update=update, name="one_threshold_for_the_batch")


def optimistic_forecast(drafter: Drafter) -> Drafter:
    """Its forecast of the acceptance is a tenth too high."""
    assert drafter.training is not None and drafter.training.foresee is not None
    foresee = drafter.training.foresee

    def more(*args):
        return jnp.minimum(1.1 * foresee(*args), 1)

    training = drafter.training._replace(foresee=more)
    return drafter._replace(training=training, name="optimistic_forecast")


def needless_history(drafter: Drafter) -> Drafter:
    """Declares history, so that a state that follows the text is not compared."""
    return drafter._replace(history=True, name="needless_history")


def believes_every_node(drafter: Drafter) -> Drafter:
    """Its state takes what the target computed for nodes that do not exist."""

    def update(params, state, draft, *rest):
        every = draft.replace(tokens=jnp.maximum(draft.tokens, 0), valid=jnp.ones_like(draft.valid))
        return drafter.update(params, state, every, *rest)

    return drafter._replace(update=update, name="believes_every_node")
