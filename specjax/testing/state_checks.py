"""Checks of a drafter's state, which the law of the output does not depend on.

A wrong draft cache, or a wrong forecast, changes only the speed. No check of texts can see it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling
from specjax.testing import rounds
from specjax.testing.findings import Finding
from specjax.testing.models import TabularCache, prompts_of
from specjax.testing.whole_text import HashCache
from specjax.types import LM, DecodeState, Drafter, ModelParams

# Prompts of the check, with tokens of the smallest vocabulary; lookups draft after some of them.
PROMPTS = ([0, 1, 1, 0, 1], [1], [1, 1, 0, 1, 0, 0], [0, 0], [1, 0, 1, 0, 1, 0], [0, 1, 1])
TEMPERATURES = [1.0, 0.7, 0.0, 1.0, 0.0, 0.5]
ROUNDS, NEW = 8, 16
CLOSE = 1e-4


def state_follows_text(
    drafter: Drafter, target: LM, params: ModelParams, rule: str | None = None
) -> Finding:
    """After every round, ``propose`` gives what it gives after a fresh prefill of the same text.

    The drafts have the same nodes and tokens from the same keys, and probs within 1e-4. A token
    table as a draft model reads only two entries of its cache; its entries are compared directly.
    For other caches give a real decoder (``testing.tiny``) as the target.

    Drafters with ``Drafter.history`` are not compared. They must differ somewhere: otherwise the
    declaration hides a state that could be checked.
    """
    name = "its state follows the text"
    state = _prefilled(drafter, target, params)
    if not jax.tree.leaves(state.draft) and not drafter.history:
        return Finding(name, True, "it has no state")
    chosen = accept.load(rule or ("chain" if drafter.siblings == "chain" else "recursive"))
    play = jax.jit(lambda state: rounds.play(target, drafter, chosen, params, state))
    compare = jax.jit(lambda state, fresh: _compare(drafter, params, state, fresh))
    worst, wrong, nodes = 0.0, [], 0
    for number in range(ROUNDS):
        fresh = _prefilled(drafter, target, params, like=state)
        same, error, count = (np.asarray(x) for x in compare(state, fresh))
        same = same & _same_entries(state.draft, fresh.draft)
        alive = ~np.asarray(state.done)
        nodes, worst = nodes + int(count[alive].sum()), max(worst, float((error * alive).max()))
        wrong += [(number, int(row)) for row in np.flatnonzero(alive & (~same | (error > CLOSE)))]
        if not alive.any():
            break
        state, _ = play(state)
    if drafter.history:
        detail = "it declares history: drafts may differ from those after a fresh prefill"
        if wrong:
            return Finding(name, True, f"exempt: {detail}, and {len(wrong)} do")
        return Finding(name, None, f"{detail}, but none does; declare it only where it is needed")
    if wrong:
        number, row = wrong[0]
        return Finding(
            name,
            False,
            f"after {number} rounds, in row {row}, a draft or a cache is not that after a fresh "
            f"prefill of the same text ({len(wrong)} times; probs differ by up to {worst:.1e})",
        )
    if not nodes and drafter.nodes:
        return Finding(name, None, "no node was drafted")
    detail = f"{nodes} nodes in {ROUNDS} rounds equal those after a fresh prefill"
    return Finding(name, True, f"{detail}; probs differ by at most {worst:.1e}")


def _prefilled(
    drafter: Drafter, target: LM, params: ModelParams, like: DecodeState | None = None
) -> DecodeState:
    """A state after the prefill of PROMPTS, or of the texts of the state ``like``."""
    packed, lengths = decode.pack_prompts(prompts_of(target, PROMPTS))
    size = packed.shape[1] + NEW
    if like is None:
        tokens = jnp.pad(packed, ((0, 0), (0, NEW)), constant_values=-1)
    else:
        lengths, tokens = jnp.copy(like.length), like.tokens[:, :size]
        tokens = jnp.where(jnp.arange(size) < lengths[:, None], tokens, -1)
    return decode.prefill(
        target,
        drafter,
        params,
        tokens,
        lengths,
        rng.row_keys(3, len(PROMPTS)),
        max_len=size,
        sampling=sampling.make_sampling(len(PROMPTS), TEMPERATURES),
    )


def _compare(
    drafter: Drafter, params: ModelParams, state: DecodeState, fresh: DecodeState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: whether the drafts are equal, the difference of their probs, their nodes."""
    first = rounds.propose(drafter, params, state)
    second = rounds.propose(drafter, params, fresh.replace(round=state.round))
    both = first.valid & second.valid
    same = (first.valid == second.valid) & (~both | (first.tokens == second.tokens))
    if first.parents is not None:
        same &= ~both | (first.parents == second.parents)
    error = jnp.zeros(both.shape, jnp.float32)
    if first.probs is not None and second.probs is not None:
        sampled = both & ~state.sampling.greedy[:, None]
        error = jnp.where(sampled, jnp.abs(first.probs - second.probs).max(-1), 0)
    return same.all(-1), error.max(-1, initial=0), both.sum(-1)


def _same_entries(state: Any, fresh: Any) -> np.ndarray | bool:
    """bool[B]: whether all caches of table models have the same entries, as far as both reach."""
    good: np.ndarray | bool = True
    kinds = (TabularCache, HashCache)
    pairs = zip(*(_caches(part, kinds) for part in (state, fresh)), strict=True)
    for ours, other in pairs:
        lengths = np.minimum(np.asarray(ours.length), np.asarray(other.length))
        both = [
            np.asarray(c.tokens if isinstance(c, TabularCache) else c.entries)
            for c in (ours, other)
        ]
        inside = np.arange(both[0].shape[1]) < lengths[:, None]
        good = good & ((both[0] == both[1]) | ~inside).all(-1)
    return good


def _caches(state: Any, kinds: tuple[type, ...]) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]
