"""Probabilities along a text: in pieces they are the same, and need less memory."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafters, testing
from specjax.bench import lossless
from specjax.bench.overlap import overlap
from specjax.models import lm
from specjax.types import ModelParams

PROMPTS, OUTPUTS = [[1, 2, 3], [4], [5, 6]], [[5, 6, 7, 8], [9, 10], [3, 3, 3, 3, 3, 3]]


@pytest.fixture
def small(monkeypatch):
    """Arrays of few numbers; programs that were compiled for more are forgotten."""

    def use(numbers):
        monkeypatch.setattr(lossless, "MAX_NUMBERS", numbers)
        lossless._compare.clear_cache()  # pyright: ignore

    yield use
    monkeypatch.undo()
    lossless._compare.clear_cache()  # pyright: ignore


@pytest.mark.parametrize("name", ["none", "prompt_lookup"])
@pytest.mark.parametrize("settings", [{"temperature": 0.7, "top_k": 4}, {"temperature": 0.0}])
def test_pieces_of_a_text_give_the_same(small, name, settings):
    target, params = testing.tiny("llama", 0, 4.0)
    keys = {"min_ngram": 1} if name == "prompt_lookup" else {}
    drafter = drafters.make(name, target, **keys)
    whole = target._replace(unembed=None)
    given = [ModelParams(params, {}), PROMPTS, OUTPUTS, settings, drafter]
    expected = lossless.compare(lossless.Texts(whole, *given))
    for numbers in (3 * target.vocab_size, target.vocab_size):  # three places of a row; one
        small(numbers)
        got = lossless.compare(lossless.Texts(target, *given))
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_memory_does_not_grow_with_the_text(small):
    """Eight texts of 40 tokens, of which two places each fit."""
    config = testing.tiny_config("llama", 20_000, layers=1)
    target, params = lm.from_config(config), lm.abstract_params(config)
    small(2 * 8 * target.vocab_size)
    context = lossless.pack([[1] * 40] * 8, [1] * 8, 8, 40, {"temperature": 1.0})

    def size(target):
        program = lossless._compare.lower(target, None, ModelParams(params, {}), context)
        return program.compile().memory_analysis().temp_size_in_bytes  # pyright: ignore

    assert size(target) < size(target._replace(unembed=None)) / 5


def test_forecasts_are_made_of_as_many_rows_as_fit(small, monkeypatch):
    target, params = testing.tiny("llama", 0, 4.0)
    drafter = drafters.make("early_exit", target, exit_layer=1)
    assert drafter.training is not None and drafter.training.foresee is not None
    sizes = []

    def foresee(params, batch, how):
        sizes.append(batch.tokens.shape)
        return jnp.zeros((*batch.tokens.shape, 1))

    mine = drafter._replace(training=drafter.training._replace(foresee=foresee), probs=None)
    small(2 * 20 * target.vocab_size)
    given = ModelParams(params, {}), PROMPTS, OUTPUTS, {"temperature": 1.0}, mine, 20
    assert overlap(lossless.Texts(target, *given)) is not None
    assert sizes == [(2, 20)]  # traced once, for both calls
