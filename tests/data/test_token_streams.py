"""Text to batches: tokenizers, token streams, crops, held-out batches and prompts."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.data import token_streams
from specjax.errors import UserError

fast = pytest.mark.fast
TEXT = "".join(f"def f{i}(x):\n    return x + {i % 7}  # caf\u00e9\n\n" for i in range(400))


@fast
def test_tokenizer_and_stream():
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.to_str() == token_streams.train_tokenizer([TEXT], 300).to_str()
    assert (
        tokenizer.token_to_id(token_streams.SEPARATOR) == token_streams.separator_id(tokenizer) == 0
    )
    stream = token_streams.tokenise(tokenizer, ["def f(", "\u00fc\n"])
    assert stream.dtype == np.int32 and stream[0] == 0 and list(stream).count(0) == 2
    assert tokenizer.decode(stream.tolist()) == "def f(\u00fc\n"
    assert tokenizer.decode(token_streams.tokenise(tokenizer, [TEXT]).tolist()) == TEXT
    assert token_streams.tokenise(tokenizer, []).shape == (0,)
    with pytest.raises(UserError, match="257"):
        token_streams.train_tokenizer([TEXT], 256)


def test_streams_are_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(token_streams, "_SMALLEST_STORED", 10)
    first, second = (
        token_streams.train_tokenizer([TEXT], 300),
        token_streams.train_tokenizer([TEXT], 310),
    )
    stream = token_streams.cached_tokens(first, [TEXT], tmp_path)
    other = token_streams.cached_tokens(second, [TEXT], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and len(other) < len(stream)
    monkeypatch.setattr(token_streams, "tokenise", None)
    assert np.array_equal(token_streams.cached_tokens(first, [TEXT], tmp_path), stream)


@fast
def test_a_damaged_stream_is_made_again_and_a_full_disk_is_one_line(tmp_path, monkeypatch):
    tokenizer = token_streams.train_tokenizer(["some words"], 300)
    monkeypatch.setattr(token_streams, "_SMALLEST_STORED", 0)
    tokens = token_streams.cached_tokens(tokenizer, ["words"], tmp_path / "a")
    [file] = (tmp_path / "a").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert (token_streams.cached_tokens(tokenizer, ["words"], tmp_path / "a") == tokens).all()

    def full(file, tokens):
        raise OSError("103683 requested and 15328 written")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(UserError, match="cannot be stored in .* .103683 .*; make room"):
        token_streams.cached_tokens(tokenizer, ["words"], tmp_path / "b")
    assert not list((tmp_path / "b").iterdir())


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.int32)
    batches = token_streams.Batches(tokens, 4, 16, seed=3)
    assert batches.batch(0).labelled is None and batches.batch(0).segments is None
    later = [batches.batch(step).tokens for step in (5, 0, 9)]
    again = token_streams.Batches(tokens, 4, 16, seed=3)
    assert np.array_equal(later, [again.batch(step).tokens for step in (5, 0, 9)])
    assert (
        isinstance(later[0], np.ndarray)
        and later[0].shape == (4, 17)
        and later[0].dtype == np.int32
    )
    assert (np.diff(later[0], axis=1) == 1).all()  # crops
    assert not np.array_equal(later[0], later[1])
    other = token_streams.Batches(tokens, 4, 16, seed=4)
    assert not np.array_equal(later[0], other.batch(5).tokens)
    smallest = token_streams.Batches(tokens[:17], 2, 16)
    assert np.array_equal(smallest.batch(0).tokens, [tokens[:17]] * 2)
    with pytest.raises(UserError, match="16 tokens, fewer than one crop of 17"):
        token_streams.Batches(tokens[:16], 4, 16)


@fast
def test_held_out_batches():
    tokens = np.arange(1000, dtype=np.int32)
    batches = [batch.tokens for batch in token_streams.held_out_batches(tokens, 4, 16, 3)]
    assert [batch.shape for batch in batches] == [(4, 17)] * 3
    assert len(np.unique(batches)) == 3 * 4 * 17
    assert batches[0][0, 0] == 0 and batches[-1][-1, -1] == 999
    # No token is read twice.
    assert len(token_streams.held_out_batches(tokens, 4, 16, 1000)) == 1000 // 68
    assert len(token_streams.held_out_batches(tokens[:20], 4, 16, 5)) == 1
    with pytest.raises(UserError, match="fewer"):
        token_streams.held_out_batches(tokens[:16], 4, 16, 5)


@fast
def test_held_out_prompts():
    tokenizer = token_streams.train_tokenizer([TEXT], 300)
    texts = [TEXT[:5000], TEXT[5000:]]
    prompts = token_streams.held_out_prompts(texts, tokenizer, 20, 12, seed=1)
    assert [len(prompt) for prompt in prompts] == [12] * 20
    assert prompts == token_streams.held_out_prompts(texts, tokenizer, 20, 12, seed=1)
    assert prompts != token_streams.held_out_prompts(texts, tokenizer, 20, 12, seed=2)
    starts = {line[:8] for line in TEXT.splitlines()}
    assert all(tokenizer.decode(prompt).splitlines()[0][:8] in starts for prompt in prompts)
    with pytest.raises(UserError, match="prompts of 9999 tokens"):
        token_streams.held_out_prompts([TEXT[:5000]], tokenizer, 2, 9999)
