"""Wrong acceptance rules: functions (keys, draft, target_probs) -> Verdict.

Those for trees are in ``mutants.tree_rules``. The registry, with the mistake and its source, is
``mutants``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import rng
from specjax.accept import block, chain, recursive
from specjax.accept import verdict as _verdict


def _accepted(keys, draft, target_probs):
    """bool[B,N]: the token-wise test of speculative sampling, on a chain."""
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    return coins.flip(*chain.masses(draft, target_probs)) & draft.valid


def _emit(keys, draft, accepted, probs):
    """The first ``accepted`` tokens, then a token drawn from ``probs``."""
    return _verdict.prefix(draft, accepted, keys.draw(rng.RESIDUAL, probs))


def resample_from_target(keys, draft, target_probs):
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    return _emit(keys, draft, accepted, _verdict.at(target_probs, accepted))


def likelier_is_accepted(keys, draft, target_probs):
    target, drafted = chain.masses(draft, target_probs)
    accepted = _verdict.first_failure((target > drafted) & draft.valid)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def bonus_row_forgotten(keys, draft, target_probs):
    """After a fully accepted chain the probs are those at its last token, not those after it."""
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    full = (accepted == draft.tokens.shape[1])[:, None]
    residual = chain.leftover(accepted, draft, target_probs)
    return _emit(keys, draft, accepted, jnp.where(full, target_probs[:, -2], residual))


def filter_of_the_draft_only(keys, draft, target_probs):
    """At temperature 1/2 the probs without temperature are the square root of those with it."""
    root = jnp.sqrt(target_probs)
    return chain.chain(keys, draft, root / root.sum(-1, keepdims=True))


def match_then_resample(keys, draft, target_probs):
    path, probs = _match_path(keys, draft, target_probs)
    return _verdict.along(draft, path, keys.draw(rng.RESIDUAL, probs))


def _match_path(keys, draft, target_probs):
    """Sample-then-match without the token at the mismatch: path, and target probs at its end."""
    walk = _verdict.begin_walk(draft, target_probs)
    for depth in range(draft.longest):
        active = walk.open.any(-1)
        token = keys.draw_at(depth, walk.probs, active)
        hit = walk.open & (draft.tokens == token[:, None]) & active[:, None]
        ended = ~hit.any(-1)[:, None]
        walk = walk.replace(open=walk.open & ~ended)
        walk = _verdict.descend(walk, draft, target_probs, jnp.argmax(hit, -1), hit.any(-1))
    return walk.path, walk.probs


def residual_after_full_chain(keys, draft, target_probs):
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    full = (accepted == draft.tokens.shape[1])[:, None]
    wrong = recursive.residual(target_probs[:, -1], draft.probs[:, -1])
    probs = jnp.where(full, wrong, chain.leftover(accepted, draft, target_probs))
    return _emit(keys, draft, accepted, probs)


def continues_after_rejection(keys, draft, target_probs):
    kept = _accepted(keys, draft, target_probs)
    accepted = jnp.max(jnp.where(kept, jnp.arange(1, kept.shape[1] + 1), 0), -1)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def unadjusted_bonus_token(keys, draft, target_probs):
    """At temperature 1/2 the probs without temperature are the square root of those with it."""
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    full = (accepted == draft.tokens.shape[1])[:, None]
    residual = chain.leftover(accepted, draft, target_probs)
    return _emit(keys, draft, accepted, jnp.where(full, jnp.sqrt(target_probs[:, -1]), residual))


def _block_test(keys, draft, target_probs):
    """The tests bool[B,N] of block verification, and its weights f[B,N+1]."""
    weight = block.weights(draft, target_probs)
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    return coins.flip(*block.chances(draft, target_probs, weight)), weight


def block_stops_at_first_rejection(keys, draft, target_probs):
    passed, weight = _block_test(keys, draft, target_probs)
    accepted = _verdict.first_failure(passed)
    return _emit(keys, draft, accepted, block.after(accepted, draft, target_probs, weight))


def block_with_chain_residual(keys, draft, target_probs):
    passed, _ = _block_test(keys, draft, target_probs)
    accepted = jnp.max(jnp.where(passed, jnp.arange(1, passed.shape[1] + 1), 0), -1)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def residual_with_draft_noise(keys, draft, target_probs):
    """Draws the residual token with the key that drew the first draft token."""
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    probs = chain.leftover(accepted, draft, target_probs)
    return _verdict.prefix(draft, accepted, keys.draw(rng.DRAFT, probs, 0))


def one_number_for_coin_and_residual(keys, draft, target_probs):
    """Uses one uniform number twice: for the rejection and for the residual token."""
    u = jax.vmap(lambda k: jax.random.uniform(k, draft.tokens.shape[1:]))(keys.at_round(rng.ACCEPT))
    target_mass, draft_mass = chain.masses(draft, target_probs)
    accepted = _verdict.first_failure((u * draft_mass < target_mass) & draft.valid)
    reused = _verdict.at(u, jnp.minimum(accepted, u.shape[1] - 1))[:, None]
    total = jnp.cumsum(chain.leftover(accepted, draft, target_probs), -1)
    return _verdict.prefix(draft, accepted, jnp.argmax(total > reused * total[:, -1:], -1))


def noise_of_first_round(keys, draft, target_probs):
    """Uses the keys of round 0 in every round (Sequoia's ``r`` and ``rand``)."""
    return chain.chain(keys.replace(round=jnp.zeros_like(keys.round)), draft, target_probs)


def coins_requested_twice(keys, draft, target_probs):
    """Requests its coins again at the second token."""
    coins = [keys.coins(draft.tokens.shape[1], target_probs.dtype) for _ in range(2)]
    first, again = (each.flip(*chain.masses(draft, target_probs)) for each in coins)
    kept = jnp.concatenate([first[:, :1], again[:, :-1]], 1) & draft.valid
    accepted = _verdict.first_failure(kept)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def third_token_against_second_probs(keys, draft, target_probs):
    """Tests the third token against the target's probs of the second."""
    shifted = target_probs.at[:, 2].set(target_probs[:, 1])
    coins = keys.coins(draft.tokens.shape[1], target_probs.dtype)
    kept = coins.flip(*chain.masses(draft, shifted)) & draft.valid
    accepted = _verdict.first_failure(kept)
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def coins_keyed_by_position(keys, draft, target_probs):
    """Block verification with coins of text positions: those of rejected tokens come again."""
    size = draft.tokens.shape[1]
    weight = block.weights(draft, target_probs)
    noise = jax.vmap(jax.vmap(jax.random.uniform))(keys.at_position(jnp.arange(size)))
    kept, total = block.chances(draft, target_probs, weight)
    passed = noise * total < kept
    accepted = jnp.max(jnp.where(passed, jnp.arange(1, size + 1), 0), -1)
    return _emit(keys, draft, accepted, block.after(accepted, draft, target_probs, weight))


def fails_on_empty_drafts(keys, draft, target_probs):
    """Reads the probs of the last node; a draft of 0 nodes has none."""
    last = draft.probs[:, -1] if draft.probs is not None else draft.tokens[:, -1]
    del last
    return chain.chain(keys, draft, target_probs)


def residual_of_the_node_before_at_the_end(keys, draft, target_probs):
    """After a rejection of the last token it subtracts the draft's probs one node earlier."""
    size = draft.tokens.shape[1]
    accepted = _verdict.first_failure(_accepted(keys, draft, target_probs))
    last = (accepted == size - 1)[:, None]
    wrong = recursive.residual(_verdict.at(target_probs, accepted), draft.probs[:, size - 2])
    right = chain.leftover(accepted, draft, target_probs)
    return _emit(keys, draft, accepted, jnp.where(last, wrong, right))


def coins_of_the_first_row(keys, draft, target_probs):
    """All rows use the key of the first row for their coins."""
    shared = keys.replace(base=jnp.broadcast_to(keys.base[:1], keys.base.shape))
    accepted = _verdict.first_failure(_accepted(shared, draft, target_probs))
    return _emit(keys, draft, accepted, chain.leftover(accepted, draft, target_probs))


def greedy_accepts_ties(draft, logits):
    """At temperature 0 it accepts every token that ties with the best."""
    before = _verdict.before(draft, logits)
    own = jnp.take_along_axis(before, jnp.clip(draft.tokens, 0)[..., None], -1)[..., 0]
    path, end = _verdict.deepest(draft, own == before.max(-1))
    best = jnp.argmax(_verdict.at(logits, end), -1)
    return _verdict.along(draft, path, best)
