"""The acceptance of every exit layer: equal to the drafter's own, 1 at the last layer."""

from __future__ import annotations

import numpy as np
import pytest

from specjax import drafters, testing
from specjax.bench import lossless
from specjax.drafters.self_speculation import early_exit
from specjax.errors import UserError
from specjax.types import ModelParams

PROMPTS, OUTPUTS = [[1, 2, 3], [4]], [[5, 6, 7, 8], [9, 10]]


@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 4}]
)
def test_each_layer_is_the_overlap_of_its_drafter(settings):
    target, params = testing.tiny("llama", 0, 4.0, layers=3)
    given = early_exit.acceptance_by_layer(target, params, PROMPTS, OUTPUTS, settings)
    assert given.shape == (3, 6)
    np.testing.assert_allclose(given[-1], 1, atol=1e-5)
    for layer in (1, 2):
        drafter = drafters.make("early_exit", target, exit_layer=layer)
        how = ModelParams(params), PROMPTS, OUTPUTS, settings, drafter
        own = lossless.compare(lossless.Texts(target, *how))
        np.testing.assert_allclose(given[layer - 1], own.overlap, atol=1e-5)


@pytest.mark.fast
def test_bad_input_is_one_line():
    target, params = testing.tiny()
    with pytest.raises(UserError, match="tabular does not give its layers and its last norm"):
        early_exit.acceptance_by_layer(testing.tabular(3), params, PROMPTS, OUTPUTS, {})
    with pytest.raises(UserError, match="bans depend on the text; measure exits without them"):
        settings = {"banned": [1], "vocab_size": target.vocab_size}
        early_exit.acceptance_by_layer(target, params, PROMPTS, OUTPUTS, settings)
