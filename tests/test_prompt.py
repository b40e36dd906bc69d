"""From prompts to a state: packing, chunked prefill, buffer sizes, donation, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from decode_cases import NEW, PROMPTS, begin, oracle, run, speculate, tabular, tiny

from specjax import decode, drafters, rng, sampling, testing
from specjax.drafters.draft_models import draft_model
from specjax.errors import UserError
from specjax.types import ModelParams


@pytest.mark.parametrize(
    ("family", "chunk"),
    # Of the 6 tokens that are fed: one at a time; two full chunks; one chunk and a rest.
    [("llama", 1), ("llama", 3), ("llama", 5), ("gpt2", 5)],
)
def test_chunked_prefill_fills_the_same_cache(family, chunk):
    model, params = tiny(family)
    drafter = drafters.make("none", model)
    whole = begin(model, drafter, ModelParams(params))
    pieces = begin(model, drafter, ModelParams(params), chunk=chunk)
    np.testing.assert_array_equal(whole.cache.length, pieces.cache.length)
    for a, b in zip(whole.cache.k + whole.cache.v, pieces.cache.k + pieces.cache.v, strict=True):
        for row, prompt in enumerate(PROMPTS):
            here = (row, slice(None), slice(len(prompt) - 1))
            np.testing.assert_allclose(a[here], b[here], atol=2e-5)


def test_the_smallest_buffer_is_sufficient():
    """A prompt that fills the model's positions, and one new token: no slot after the end."""
    model, params = tiny("gpt2")
    drafter, both = draft_model.make(model, model=model, gamma=6), ModelParams(params, params)
    prompts = [[i % 32 for i in range(127)], [5]]
    keys = {"new": 1, "max_len": 128}
    output = speculate(model, drafter, "chain", both, prompts, **keys)[0]
    assert output == oracle(model, both, prompts, **keys)


def test_the_state_is_donated_and_the_arguments_stay_valid():
    model, params = tiny("llama")
    drafter, both = drafters.make("none", model), ModelParams(params)
    keys, settings = rng.row_keys(0, 5), sampling.make_sampling(5, 0.0)
    packed, lengths = decode.pack_prompts(PROMPTS)
    max_len = packed.shape[1] + NEW
    # In the second turn all arguments must still be valid.
    for _ in range(2):
        state = decode.prefill(
            model, drafter, both, packed, lengths, keys, max_len=max_len, sampling=settings
        )
        run(model, drafter, "chain", both, state)
        assert state.cache.k[0].is_deleted()
    for array in (keys, packed, settings.temperature):
        assert not array.is_deleted()


def test_bad_prompts():
    model, params = tiny("llama")
    drafter, both = drafters.make("none", model), ModelParams(params)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        decode.pack_prompts([[1], []])
    with pytest.raises(UserError, match="no prompt"):
        decode.pack_prompts([])
    with pytest.raises(UserError, match="a prompt has 3 tokens and the buffer 2; make it wider"):
        decode.pack_prompts([[1, 2, 3]], 2)
    for wrong in (10**12, -(10**12)):
        with pytest.raises(UserError, match=f"prompt 1 has the token id {wrong}, which is no int"):
            decode.pack_prompts([[1], np.array([2, wrong])])
    for wrong in ([[1.9, 2.2]], ["Once"], [1, 2], [[[1, 2]]], [[10**30]]):
        with pytest.raises(UserError, match="prompt 0 is .*; it must be token ids"):
            decode.pack_prompts(wrong)
    assert decode.pack_prompts(np.array([[1, 2], [3, 4]]))[0].tolist() == [[1, 2], [3, 4]]
    with pytest.raises(UserError, match="need 200 positions, and the model has 128"):
        begin(model, drafter, both, max_len=200)
    with pytest.raises(
        UserError, match="the prompt has 7 tokens and max_len is 5; it must be at least 7"
    ):
        begin(model, drafter, both, max_len=5)
    with pytest.raises(UserError, match="limit is 27; it must be at most max_len, which is 20"):
        begin(model, drafter, both, new=20, max_len=20)
    with pytest.raises(UserError, match="prompt 1 has the token id 32; ids must be in 0..31"):
        begin(model, drafter, both, [[1], [2, 32]])


def test_arguments_for_other_rows():
    model, both = tabular(5), ModelParams(np.zeros((6, 5, 5), np.float32))
    packed, lengths = decode.pack_prompts([[1, 2, 3], [4]])
    good = {"prompt": packed, "lengths": lengths, "keys": rng.row_keys(0, 2), "max_len": 6}
    for change, message in (
        ({"keys": rng.row_keys(0, 1)}, r"keys are key<fry>\[1\], and the prompt has 2 rows"),
        ({"keys": rng.row_keys(0, 3)}, r"keys are key<fry>\[3\], and the prompt has 2 rows"),
        ({"keys": [0, 1]}, "keys are of type list, and the prompt has 2 rows"),
        ({"sampling": sampling.make_sampling(3)}, "sampling is for 3 rows, and the prompt has 2; "),
        ({"sampling": sampling.make_sampling(1)}, "sampling is for 1 rows, and the prompt has 2; "),
        ({"sampling": {"temperature": 1.0}}, "sampling is of type dict; it must be of type Samp"),
        ({"max_len": 3}, "max_len is 3, the length of a prompt; it must be at least 4"),
        ({"max_len": 6.0}, "max_len is 6.0; it must be a whole number >= 1"),
        ({"chunk": 0}, "chunk is 0; it must be a whole number >= 1"),
        ({"prompt": [[1, 2, 3], [4, 0, 0]]}, "prompt is of type list; .*: decode.pack_prompts"),
        ({"prompt": packed * 1.0}, r"prompt is float32\[2, 3\]; it must be integers \[B,P\]"),
        ({"lengths": np.array([3])}, r"lengths is int64\[1\]; it must be integers \[2\], one for"),
        ({"limit": np.array([4, 5, 6])}, r"limit is int64\[3\]; it must be integers \[2\]"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            decode.prefill(model, drafters.make("none", model), both, **good | change)
        assert "\n" not in str(caught.value)


def test_bad_drafters():
    model, params = tiny("llama")
    for gamma in (0, -1, 2.5):
        with pytest.raises(UserError, match="gamma is .*whole number >= 1"):
            draft_model.make(model, model=model, gamma=gamma)
        with pytest.raises(UserError, match="gamma is"):
            drafters.make("prompt_lookup", model, gamma=gamma)
    with pytest.raises(UserError, match="vocabulary of 40 and the target of 32"):
        draft_model.make(model, model=testing.tiny("llama", vocab_size=40)[0])
    with pytest.raises(UserError, match="not the same ones"):
        draft_model.make(model._replace(vocabulary="a"), model=model._replace(vocabulary="b"))
    with pytest.raises(
        UserError,
        match="unknown drafter 'ngrams'; it must be one of bild, block_head, .*, escalate",
    ):
        drafters.make("ngrams", model)
    with pytest.raises(UserError, match="does not take the key 'gama'; it takes gamma, max_ngram"):
        drafters.make("prompt_lookup", model, gama=3)
    with pytest.raises(UserError, match="needs the key 'model'"):
        drafters.make("draft_model", model)
    with pytest.raises(UserError, match="match is 'newest'"):
        drafters.make("prompt_lookup", model, match="newest")
    with pytest.raises(UserError, match="the draft model has 16"):
        short = model._replace(max_positions=16)
        begin(model, draft_model.make(model, model=short), ModelParams(params, params))
