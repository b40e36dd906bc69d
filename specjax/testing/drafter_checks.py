"""Checks of a drafter alone: the form of its drafts, and the probs that it gives for any text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, decode, rng, sampling
from specjax.errors import UserError
from specjax.testing import rounds
from specjax.testing.drafts import check_draft
from specjax.testing.findings import Finding
from specjax.testing.models import prompts_of
from specjax.types import LM, Context, Drafter, ModelParams

PROMPTS = ([0, 1, 1], [1], [1, 1, 0, 1, 1], [0, 0])


def well_formed(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Every array of the drafts of three rounds is what the drafter's ``siblings`` require."""
    name = "drafts are well formed"
    packed, lengths = decode.pack_prompts(prompts_of(target, PROMPTS))
    settings = sampling.make_sampling(4, temperature=[1.0, 1.0, 0.5, 0.0])
    keys = rng.row_keys(0, 4)
    state = decode.prefill(
        target, drafter, params, packed, lengths, keys, max_len=12, sampling=settings
    )
    greedy = np.asarray(settings.greedy)
    propose = jax.jit(lambda state: rounds.propose(drafter, params, state))
    try:
        for number in range(3):
            draft = propose(state.replace(round=jnp.asarray(number)))
            check_draft(draft, target.vocab_size, drafter.siblings, greedy=greedy)
            # A text of one token has no feature yet.
            empty = np.asarray(state.length) == 1 if drafter.features else np.zeros(4, bool)
            fed = 0 if draft.fed is None else np.asarray(draft.fed)[:, None]
            full = (np.asarray(draft.valid) | (np.arange(drafter.nodes) < fed)).all(-1) | empty
            if drafter.whole and not full.all():
                row = int(np.argmin(full))
                raise UserError(f"row {row} has an invalid node, and the drafter declares whole")
    except UserError as error:
        return Finding(name, False, str(error))
    shape = f"{drafter.siblings}, {drafter.nodes} nodes, {drafter.longest} deep"
    return Finding(name, True, shape)


def probs_of_text(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """In five rounds, the first draft token is drawn from ``Drafter.probs`` of the whole text."""
    name = "its first token is drawn from Drafter.probs"
    packed, lengths = decode.pack_prompts(prompts_of(target, PROMPTS))
    state = decode.prefill(target, drafter, params, packed, lengths, rng.row_keys(3, 4), max_len=24)
    rule, worst = accept.load("match"), 0.0

    @jax.jit
    def play_round(state):
        draft = rounds.propose(drafter, params, state)
        if drafter.probs is None or draft.probs is None:
            return state, None
        text = Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
        expected = jax.vmap(lambda row, n: row[n - 1])(drafter.probs(params, text), state.length)
        error = jnp.abs(draft.probs[:, 0] - expected).max(-1)
        after, _ = rounds.play(target, drafter, rule, params, state)
        return after, jnp.where(state.done, 0, error).max()

    for _ in range(5):
        state, error = play_round(state)
        if error is None:
            return Finding(name, True, "its drafts are deterministic")
        worst = max(worst, float(error))
    detail = f"its probs are off by at most {worst:.1e} in five rounds"
    return Finding(name, worst < 1e-4, detail)
