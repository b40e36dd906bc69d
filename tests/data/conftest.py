"""Shared by the tests of this folder: a model directory with a tokenizer for chats."""

from __future__ import annotations

import json

import pytest
from chat_cases import OPENAI
from tokenizers import AddedToken, Tokenizer

from specjax import testing
from specjax.data import token_streams
from specjax.models import hf


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model directory; its byte-level tokenizer has the special tokens of ChatML."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = token_streams.train_tokenizer([" ".join(m["content"] for m in OPENAI) * 3], 300)
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    shape = testing.tiny_config(vocab_size=tokenizer.get_vocab_size(), layers=1, width=16)
    params = testing.tiny(vocab_size=shape.vocab_size, layers=1, width=16)[1]
    hf.save(folder, shape, params, tokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "bos_token": token_streams.SEPARATOR,
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model):
    return Tokenizer.from_file(str(model / "tokenizer.json"))
