"""Draft models whose vocabulary is padded to another size than the target's."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import draft_models_small_model as _small_model

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.types import ModelParams

VOCAB, TOKENS = 3, "the same tokenizer"


def decoded(target, drafter, params):
    """i32[B,24]: greedy texts of prompts of several lengths."""
    tokens, lengths = decode.pack_prompts([[1, 2, 3], [4], [5, 1, 0, 2, 3, 1]])
    greedy, keys = sampling.make_sampling(3, 0.0), rng.row_keys(0, 3)
    state = decode.prefill(
        target, drafter, params, tokens, lengths, keys, max_len=24, sampling=greedy
    )
    rule = accept.load(accept.default_rule(drafter))
    state, _ = decode.generate(target, drafter, rule, params, state, max_steps=24)
    return np.asarray(state.tokens[:, :24])


def table(size, seed):
    """A model of ``size`` tokens with a known tokenizer, and its logits."""
    model = cases.tabular(size, f"{size} tokens")._replace(vocabulary=TOKENS)
    return model, cases.table(seed, size)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tree", ["", "2x1"])
def test_a_padded_draft_model_is_exact(size, tree):
    with jax.enable_x64(True):
        target, probs = table(VOCAB, 0)
        draft, own = table(size, 1)
        keys = {"tree": tree, "siblings": "without_replacement"} if tree else {"gamma": 2}
        drafter = drafters.make("draft_model", target, model=draft, params=own, **keys)
        rule = accept.load(accept.default_rule(drafter))
        params = ModelParams(probs, own)
        settings = {"rounds": 1, "temperature": 0.9}
        emitted = testing.exact_law(target, drafter, rule, params, [1, 0], 3, **settings)
        truth = testing.sequence_law(target, probs, [1, 0], 3, temperature=0.9)
    assert abs(emitted.sum() - 1) < 1e-12
    assert testing.total_variation(emitted, truth) < 1e-12


def test_padding_has_probability_zero_and_cut_tokens_are_left_out():
    small, large = table(2, 1), table(4, 1)
    tokens = jnp.asarray([[0, 1, 0]])
    for (model, params), wanted in ((small, 2), (large, 3)):
        fitted = _small_model.in_size(model, VOCAB)
        out, _ = fitted.apply(params, tokens, fitted.init_cache(1, 8))
        plain, _ = model.apply(params, tokens, model.init_cache(1, 8))
        assert fitted.vocab_size == out.logits.shape[-1] == VOCAB
        np.testing.assert_array_equal(out.logits[..., :wanted], plain.logits[..., :wanted])
        assert (np.asarray(jax.nn.softmax(out.logits))[..., wanted:] == 0).all()
        assert _small_model.in_size(model, VOCAB) is fitted
    model = table(3, 1)[0]
    assert _small_model.in_size(model, VOCAB) is model


@pytest.mark.slow
def test_a_real_draft_model_of_another_size_gives_plain_text():
    target, params = testing.tiny("llama", 0, vocab_size=17, width=16)
    target = target._replace(vocabulary=TOKENS)
    for size in (13, 24):
        draft, own = testing.tiny("llama", 1, layers=1, vocab_size=size, width=16)
        drafter = drafters.make(
            "draft_model", target, model=draft._replace(vocabulary=TOKENS), params=own, gamma=3
        )
        texts = [
            decoded(target, each, ModelParams(params, each.init_params(None)))
            for each in (drafter, drafters.make("none", target))
        ]
        np.testing.assert_array_equal(*texts)


@pytest.mark.parametrize("known", [(None, TOKENS), (TOKENS, None), (TOKENS, "another one")])
def test_other_sizes_without_the_same_tokenizer_are_refused(known):
    target, draft = cases.tabular(3), cases.tabular(4, "draft")
    target, draft = (m._replace(vocabulary=v) for m, v in zip((target, draft), known, strict=True))
    with pytest.raises(UserError, match="they must share one tokenizer"):
        drafters.make("draft_model", target, model=draft, params=cases.table(1, 4))
