"""Pairs of words, a tiny T5 with their tokenizer, and small versions of the T5 configurations."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import tokenizers

from specjax import testing
from specjax.models import hf, t5_config

ROOT = Path(__file__).parent.parent
WORDS = ["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(3, 40))]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "head_dim": 8}
SIZES |= {"num_layers": 1, "buckets": 8, "max_distance": 12}


def tokenizer() -> tokenizers.Tokenizer:
    """One id per word; </s> ends every text, as in T5."""
    vocab = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<pad>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return made


def save(path: Path, seed: int = 0) -> str:
    """A directory with a random model that writes with all of its words."""
    config = t5_config.t5(**SIZES, vocab_size=len(WORDS), start_token_id=0)
    _, params = testing.tiny_t5(seed, vocab_size=len(WORDS), num_layers=1, scale=8.0)
    hf.save(path, config, params, tokenizer())
    return str(path)


def lines(count: int) -> list[dict[str, str]]:
    """Pairs whose output is the reversed source."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        words = [f"w{i}" for i in random.integers(3, 40, random.integers(2, 7))]
        made.append({"source": " ".join(words), "output": " ".join(words[::-1])})
    return made


def write(path: Path, pairs: list) -> str:
    """A .jsonl file."""
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    return str(path)


def small(name: str, pairs: str, **changes):
    """configs/NAME.py for tiny models; keys of ``changes`` are dotted with two underscores."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "configs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.data.pairs = pairs
    config.model.update({**SIZES, "encoder_layers": 1})
    config.train.update({"steps": 4, "batch_size": 4, "length": 16, "eval_batches": 2})
    config.train.update({"eval_every": 2, "checkpoint_every": 2})
    config.optimiser.schedule = "constant"
    config.examine.update({"prompt_tokens": 12, "new_tokens": 6, "every": 4})
    config.examine.prompts = min(config.examine.prompts, 4)
    config.model.update(changes.pop("model", {}))
    flat = {key.replace("__", "."): value for key, value in changes.items()}
    config.update_from_flattened_dict(flat)
    return config
