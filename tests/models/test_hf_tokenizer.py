"""Tokenizers of model directories: equal vocabularies, wrong sizes, no truncation or padding."""

from __future__ import annotations

import pytest
from hf_cases import CONFIGS, random_params, same_vocabulary, shaped, words
from tokenizers import pre_tokenizers

from specjax.errors import UserError
from specjax.models import hf


@pytest.mark.fast
def test_vocabularies(tmp_path):
    def model(name, size, tokenizer):
        config = shaped("llama", vocab_size=size)
        hf.save(tmp_path / name, config, random_params(config), tokenizer)
        return hf.load(tmp_path / name)

    a, bare, larger = (
        model("a", 61, words(61)),
        model("bare", 61, None),
        model("larger", 62, words(62)),
    )
    same, shifted = model("same", 61, words(61)), model("shifted", 61, words(61, start=1))
    assert same_vocabulary(a, same) is None and same_vocabulary(a, bare) is None
    assert "has 61 tokens and" in same_vocabulary(a, larger)
    assert same_vocabulary(a, shifted).startswith("58 of 61 token ids differ between ")
    assert (
        a.lm.vocabulary == same.lm.vocabulary != shifted.lm.vocabulary
        and bare.lm.vocabulary is None
    )


def test_vocabularies_of_trained_models(stories, data_dir):
    other = hf.load(data_dir / "models" / "aidreams260K")
    assert same_vocabulary(stories, stories) is None
    assert "of 512 token ids differ" in same_vocabulary(stories, other)


@pytest.mark.fast
def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    config = CONFIGS["llama"]
    hf.save(tmp_path / "m", config, random_params(config), words(80))
    with pytest.raises(UserError, match="has ids up to 79 and the model 61 tokens"):
        hf.load(tmp_path / "m")


@pytest.mark.fast
def test_added_tokens_may_be_beyond_the_model(tmp_path):
    """As Gemma 3's token for images: a text with it is refused when it is a prompt."""
    config, tokenizer = CONFIGS["llama"], words(61)
    tokenizer.add_special_tokens(["<image>"])
    hf.save(tmp_path / "m", config, random_params(config), tokenizer)
    loaded = hf.load(tmp_path / "m")
    assert loaded.tokenizer is not None and loaded.tokenizer.token_to_id("<image>") >= 61


@pytest.mark.fast
def test_texts_are_neither_truncated_nor_padded(tmp_path):
    """Truncation and padding in tokenizer.json are about one network's inputs and are ignored."""
    config, tokenizer = CONFIGS["llama"], words(61)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = " ".join([tokenizer.id_to_token(5)] * 20)
    length = len(tokenizer.encode(text).ids)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=12)
    hf.save(tmp_path / "m", config, random_params(config), tokenizer)
    loaded = hf.load(tmp_path / "m").tokenizer
    assert (
        len(loaded.encode(text).ids) == length > 4
        and len(loaded.encode(tokenizer.id_to_token(5)).ids) < 12
    )
