"""The tokenizer of a model: tokenizer.json and tokenizer_config.json, or those of a .gguf file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from specjax import files
from specjax.errors import UserError, on_disk
from specjax.models.hf_config import read_json
from specjax.models.sources import gguf_file, gguf_tokenizer
from specjax.models.transformer_config import TransformerConfig


def load_tokenizer(path: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer of a directory, a .gguf file or a tokenizer.json.

    It is without truncation and padding. None if there is none. ``vocab_size``: of the model.
    Raises UserError if it is damaged, not supported, or has more ids than the model.
    """
    in_gguf = gguf_file.is_gguf(path)
    file = path if in_gguf or path.is_file() else path / "tokenizer.json"
    if not file.exists():
        return None
    if in_gguf:
        tokenizer = gguf_tokenizer.read(gguf_file.read(path))
    else:
        # The library raises plain Exceptions.
        with on_disk(f"{file} is damaged", "copy it again", Exception):
            tokenizer = Tokenizer.from_file(str(file))
    if tokenizer is None:
        return None
    # Added tokens may be beyond the model's vocabulary: Gemma 3 has one for images. A text with one
    # is refused when it is a prompt.
    size = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    if vocab_size is not None and size > vocab_size:
        raise UserError(
            f"{file} has ids up to {size - 1} and the model {vocab_size} tokens; they do not match"
        )
    # These settings are about the input length of one network; texts here keep all their tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_config(path: Path) -> dict:
    """tokenizer_config.json of a directory, {} if missing; or what a .gguf file has of it.

    Raises UserError if it is damaged.
    """
    if gguf_file.is_gguf(path):
        return gguf_tokenizer.config(gguf_file.read(path))
    file = path / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def save_tokenizer(path: Path, tokenizer: Tokenizer, config: TransformerConfig) -> None:
    """Writes tokenizer.json, and tokenizer_config.json for transformers. Raises OSError."""
    tokenizer.save(str(path / "tokenizer.json"))
    ids = {"bos_token": config.bos_token_id, "eos_token": next(iter(config.eos_token_id), None)}
    ids["pad_token"] = getattr(config, "pad_token_id", None)
    tokens = {key: tokenizer.id_to_token(i) for key, i in ids.items() if i is not None}
    tokens["unk_token"] = getattr(tokenizer.model, "unk_token", None)
    tokens = {key: token for key, token in tokens.items() if token is not None}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_positions}
    files.write_json(
        path / "tokenizer_config.json", kind | tokens | {"clean_up_tokenization_spaces": False}
    )


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of the vocabulary: equal if two tokenizers map the same strings to the same ids."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()
