"""Checks of a drafter's state, which the law of the output does not depend on.

A wrong draft cache, or a wrong forecast, changes only the speed. No check of texts can see it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, step, tree
from specjax.testing import loop
from specjax.testing.findings import Finding
from specjax.testing.models import TabularCache, prompts_of
from specjax.types import LM, DecodeState, Drafter, ModelParams

# Prompts of the check, with tokens of the smallest vocabulary; lookups draft after some of them.
PROMPTS = ([0, 1, 1, 0, 1], [1], [1, 1, 0, 1, 0, 0], [0, 0], [1, 0, 1, 0, 1, 0], [0, 1, 1])
TEMPERATURES = [1.0, 0.7, 0.0, 1.0, 0.0, 0.5]
ROUNDS, NEW = 8, 16
CLOSE = 1e-4


def state_follows_text(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
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
    chosen = accept.load("chain" if drafter.siblings == "chain" else "recursive")
    play = jax.jit(lambda state: step.speculative_step(target, drafter, chosen, params, state))
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
        detail = (
            f"after {number} rounds, in row {row}, a draft or a cache is not that after a fresh "
            f"prefill of the same text ({len(wrong)} times; probs differ by up to {worst:.1e})"
        )
        return Finding(name, False, detail)
    if not nodes and drafter.nodes:
        return Finding(name, None, "no node was drafted")
    detail = f"{nodes} nodes in {ROUNDS} rounds equal those after a fresh prefill"
    return Finding(name, True, f"{detail}; probs differ by at most {worst:.1e}")


def _prefilled(
    drafter: Drafter, target: LM, params: ModelParams, like: DecodeState | None = None
) -> DecodeState:
    """A state after the prefill of PROMPTS, or of the texts of the state ``like``."""
    texts = prompts_of(target, PROMPTS)
    size = max(map(len, texts)) + NEW
    if like is not None:
        pairs = zip(np.asarray(like.tokens), np.asarray(like.length), strict=True)
        texts = [row[:length].tolist() for row, length in pairs]
    new = [size - len(text) for text in texts]
    options = {"width": size, "max_len": size, "temperature": TEMPERATURES}
    return loop.begin(target, drafter, params, texts, new, 3, **options)


def _compare(
    drafter: Drafter, params: ModelParams, state: DecodeState, fresh: DecodeState
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: whether the drafts are equal, the difference of their probs, their nodes."""
    first = loop.propose(drafter, params, state)
    second = loop.propose(drafter, params, fresh.replace(round=state.round))
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
    caches = (tree.of_type(each, TabularCache) for each in (state, fresh))
    for ours, other in zip(*caches, strict=True):
        lengths = np.minimum(np.asarray(ours.length), np.asarray(other.length))
        first, second = np.asarray(ours.entries), np.asarray(other.entries)
        inside = np.arange(first.shape[1]) < lengths[:, None]
        good = good & ((first == second) | ~inside).all(-1)
    return good


def widths_do_not_matter(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Text and rounds are those of verifying the whole draft, at every width.

    A drafter that reads what the target computed for nodes that do not exist gives other drafts
    when they are not verified. The law of the output does not show it.
    """
    name = "verified widths do not matter"
    if len(tree.widths(drafter)) == 1:
        return Finding(name, True, "its rounds have one width")
    wrong, narrow, rounds = [], 0, 0
    for row in range(len(PROMPTS)):
        whole = _decoded(drafter, target, params, row, (drafter.nodes + 1,))
        few = _decoded(drafter, target, params, row, None)
        wrong += [] if all(map(np.array_equal, whole[:-1], few[:-1])) else [row]
        ran = few[-1] > 0
        narrow, rounds = narrow + int((few[-1][ran] <= drafter.nodes).sum()), rounds + ran.sum()
    if wrong:
        detail = (
            f"after prompt {PROMPTS[wrong[0]]} at temperature {TEMPERATURES[wrong[0]]:g}, text or "
            f"rounds differ from those of verifying all nodes ({len(wrong)} of {len(PROMPTS)} "
            "prompts)"
        )
        return Finding(name, False, detail)
    if not narrow:
        return Finding(name, True, "every round verified all nodes, so no other width was tried")
    return Finding(name, True, f"{narrow} of {rounds} rounds verified only a part")


def _decoded(
    drafter: Drafter, target: LM, params: ModelParams, row: int, widths: tuple[int, ...] | None
) -> tuple[np.ndarray, ...]:
    """The text, then what each round emitted, accepted, drafted, tested and verified."""
    rule = accept.load("chain" if drafter.siblings == "chain" else "recursive")
    # All prompts have one shape, so there is one program.
    longest = max(map(len, PROMPTS))
    prompt = prompts_of(target, [PROMPTS[row]])
    temperature = TEMPERATURES[row]
    state = loop.begin(
        *(target, drafter, params, prompt, NEW, 5, [row]), width=longest, temperature=temperature
    )
    state, records = decode.generate(
        target, drafter, rule, params, state, max_steps=NEW, verify_widths=widths
    )
    decode.check(state)
    counts = records.emitted, records.accepted, records.drafted, records.tested, records.verified
    return tuple(np.asarray(x) for x in (state.tokens, *counts))
