"""Objects in place of those that are not there yet: a drafter can be made and its keys checked.

A configuration that trains first has no target and no draft model before its stages have run, and
``--explain`` has none at all. None of these objects has weights, and none starts a backend.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax import drafters, registry
from specjax.data import datastore, ngram_tables
from specjax.models import lm, t5_config
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM

VOCABULARY = 2048
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4}
INNER = "prompt_lookup"  # the drafter inside a nested one


def target(**changes: Any) -> LM:
    """A small Llama without weights; ``changes`` are fields of its configuration."""
    shape: dict[str, Any] = {"family": "llama", "vocab_size": VOCABULARY, "max_positions": 2048}
    shape |= {**SIZES, "num_kv_heads": 4, "head_dim": 16, **changes}
    return lm.from_config(TransformerConfig(**shape), jnp.float32)


def target_of(name: str) -> LM:
    """A target that the drafter ``name`` drafts for."""
    if not getattr(drafters.load(name), "NEEDS_ENCODER", False):
        return target()
    shape = t5_config.t5(**SIZES, head_dim=16, vocab_size=VOCABULARY, start_token_id=0)
    return lm.from_config(shape, jnp.float32)


def value(key: str, vocab_size: int = VOCABULARY) -> Any:
    """An object for the key of a drafter that needs a file, or nested drafters; None for others."""
    if key == "model":
        return target(vocab_size=vocab_size)
    if key == "models":
        return [target(vocab_size=vocab_size)]
    if key == "datastore":
        return datastore.build([[0, 1, 0, 1]])
    if key == "tables":
        return ngram_tables.count([[0, 1, 0, 1]], vocab_size)
    return {"drafters": {INNER: {}}, "skip_attention": "0", "skip_mlp": ""}.get(key)


def keys(name: str) -> dict[str, Any]:
    """Values for the keys that the drafter ``name`` needs; None for a key of another kind."""
    needed = registry.keys_of(drafters.load(name)).values()
    values = {key.name: value(key.name) for key in needed if key.required}
    return values | {key.name: key.facts.example for key in needed if key.facts.example is not None}
