"""Shared by the tests of the command line: tiny models in files, and a way to call it."""

from __future__ import annotations

from pathlib import Path

import jax
import tokenizers

from specjax import testing
from specjax.models import hf, lm

ROOT = Path(__file__).parent.parent
GENERATE, BENCH = (f"--config={ROOT}/configs/{name}.py" for name in ("generate", "bench"))
TEXT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"


def save(path, seed=0, text=TEXT, **changes):
    """A random tiny model of one layer with a tokenizer of its own."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    config = testing.tiny_config("llama", tokenizer.get_vocab_size(), layers=1)
    params = lm.init_params(config, jax.random.key(seed))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    params |= changes
    hf.save(path, config, params, tokenizer)
    return str(path)
