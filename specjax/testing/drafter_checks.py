"""Checks of a drafter alone: the form of its drafts, and its state after some rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling, step
from specjax.errors import UserError
from specjax.testing.drafts import check_draft
from specjax.testing.findings import Finding
from specjax.types import LM, Context, Drafter, ModelParams

PROMPTS = ([0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0])


def well_formed(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Every array of the drafts of three rounds is what the drafter's ``siblings`` require."""
    name = "drafts are well formed"
    packed, lengths = decode.pack_prompts(PROMPTS)
    settings = sampling.make_sampling(4, temperature=[1.0, 1.0, 0.5, 0.0])
    keys = rng.row_keys(0, 4)
    state = decode.prefill(
        target, drafter, params, packed, lengths, keys, max_len=12, sampling=settings
    )
    greedy = np.asarray(settings.greedy)

    @jax.jit
    def propose(state, number):
        keys = rng.RowKeys(state.keys, number, state.length)
        context = Context(state.tokens, state.length, state.sampling)
        return drafter.propose(params, keys, context, state.draft)[0]

    try:
        for number in range(3):
            draft = propose(state, jnp.asarray(number))
            check_draft(draft, target.vocab_size, drafter.siblings, greedy=greedy)
    except UserError as error:
        return Finding(name, False, str(error))
    shape = f"{drafter.siblings}, {drafter.nodes} nodes, {drafter.longest} deep"
    return Finding(name, True, shape)


def state_follows_text(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """In five rounds, the first draft token is drawn from ``Drafter.probs`` of the whole text.

    A wrong draft cache changes only the acceptance rate, never the output law, so that no other
    check can see it.
    """
    name = "the drafter's state follows the text"
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(target, drafter, params, packed, lengths, rng.row_keys(3, 4), max_len=24)
    rule, worst = accept.load("match"), 0.0

    @jax.jit
    def play_round(state):
        keys = rng.RowKeys(state.keys, state.round, state.length)
        scored = step.propose(target, drafter, params, state, keys)
        if drafter.probs is None or scored.draft.probs is None:
            return state, None
        text = Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
        expected = jax.vmap(lambda row, n: row[n - 1])(drafter.probs(params, text), state.length)
        error = jnp.abs(scored.draft.probs[:, 0] - expected).max(-1)
        after, _ = step.decide(target, drafter, rule, params, state, keys, scored, None)
        return after, jnp.where(state.done, 0, error).max()

    for _ in range(5):
        state, error = play_round(state)
        if error is None:
            return Finding(name, None, "it has no probs to compare with")
        worst = max(worst, float(error))
    return Finding(
        name,
        worst < 1e-4,
        f"the probs of its first token are off by at most {worst:.1e} in five rounds",
    )
