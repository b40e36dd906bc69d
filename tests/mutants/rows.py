"""Mistakes in what moves rows of a batch, and in siblings, that tests of whole texts can miss.

``caught_by`` is the default test that detects the mistake, "module::test".
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from mutants.patches import Patched, instead
from specjax.drafters.nested import staged
from specjax.generation import refill, texts

_REFILL = "generation.test_refill::test_a_new_row_has_nothing_of_the_row_before"
_SAMPLES = (
    "generation.test_texts::test_samples_have_the_prompt_of_their_row_and_settings_of_their_own"
)
_STAGED = "drafters.nested.test_staged::test_siblings_are_distinct"


def _kept(field, right, state, *rest):
    # A copy: the state is donated.
    old = jax.tree.map(jnp.copy, getattr(state, field))
    return right(state, *rest).replace(**{field: old})


def _refill_keeps(field: str, what: str) -> Patched:
    change = instead(refill, "_inserted", functools.partial(_kept, field))
    return Patched(
        f"refill_keeps_{field}", f"a new row has the {what} of the row before", _REFILL, change
    )


def _without_prompt(right, state, samples, axes, rest):
    return right(state, samples, axes, rest).replace(sampling=rest[2])


def _interleaved(right, state, samples, axes, rest):
    after, count = right(state, samples, axes, rest), state.length.shape[0]
    order = jnp.arange(count * samples) % count * samples
    return after.replace(tokens=after.tokens[order])


def _never_done(right, *args):
    after = right(*args)
    return after.replace(done=jnp.zeros_like(after.done))


def _first_token_again(right, settings, keys, *rest):
    def draw(purpose, weights, count, index):
        return keys.draw_distinct(purpose, jnp.ones_like(weights), count, index)

    return right(settings, SimpleNamespace(draw_distinct=draw), *rest)


def _best_again(right, settings, keys, context, drawn, logits):
    tokens, *rest = right(settings, keys, context, drawn, logits)
    best = jnp.argmax(logits, -1)[..., None]
    again = jnp.concatenate([best.astype(tokens.dtype), tokens[..., :-1]], -1)
    return jnp.where(context.sampling.greedy[:, None, None], again, tokens), *rest


ROWS = (
    _refill_keeps("sampling", "sampling settings"),
    _refill_keeps("limit", "limit"),
    _refill_keeps("keys", "key"),
    _refill_keeps("round", "round"),
    _refill_keeps("draft", "drafter's state"),
    _refill_keeps("taps", "taps"),
    Patched(
        "prompt_of_samples_is_output",
        "of several samples of a prompt, penalties count the prompt as output",
        _SAMPLES,
        instead(texts, "_repeated", _without_prompt),
    ),
    Patched(
        "samples_interleaved",
        "the rows of a prompt are not neighbours",
        _SAMPLES,
        instead(texts, "_repeated", _interleaved),
    ),
    Patched(
        "samples_without_room_go_on",
        "a sample that has its limit at once is not finished",
        _SAMPLES,
        instead(texts, "_repeated", _never_done),
    ),
    Patched(
        "siblings_of_the_same_token",
        "the siblings of staged may have the chain's token again",
        _STAGED,
        instead(staged, "_siblings", _first_token_again),
    ),
    Patched(
        "best_token_again",
        "in a greedy row the first sibling is the chain's token",
        _STAGED,
        instead(staged, "_siblings", _best_again),
    ),
)
