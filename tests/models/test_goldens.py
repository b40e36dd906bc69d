"""The logits of every family are those of transformers, stored by ``golden_cases``."""

from __future__ import annotations

import functools
import json

import golden_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import hf
from specjax.models.families import FAMILIES
from specjax.prompt import feed

CASES = json.loads(golden_cases.FILE.read_text())


@pytest.mark.fast
@pytest.mark.parametrize("name", golden_cases.NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    case = CASES[name]
    golden_cases.write(tmp_path, case["config"], case["shapes"])
    model, params, *_ = hf.load(tmp_path, dtype=jnp.float32)
    tokens, prefilled = jnp.asarray([golden_cases.tokens(name)]), 8

    # A prompt in two chunks, the second of which reads the cache, and then a block after it.
    @functools.partial(jax.jit, static_argnums=0)
    def logits(size, params, tokens):
        cache = model.init_cache(1, tokens.shape[1])
        out, cache = feed(model, params, tokens[:, :size], jnp.asarray([size]), cache, chunk=5)
        after, _ = model.apply(params, tokens[:, size:], cache)
        return jnp.concatenate([model.unembed(params, out.hidden), after.logits], 1)[0]

    got = np.asarray(logits(prefilled, params, tokens))
    np.testing.assert_allclose(got, case["logits"], rtol=0, atol=1e-4)
    assert np.std(case["logits"]) > 0.3


def test_every_family_has_a_golden_model():
    kinds = {CASES[name]["config"]["model_type"] for name in golden_cases.NAMES}
    assert kinds == set(FAMILIES)
