"""A config.json with few keys means what transformers' own configuration class makes of it.

The same configuration is read twice: with the keys that are given, and with all keys that
transformers writes for it, its defaults among them.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from specjax.models import hf
from specjax.models.families import FAMILIES

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 56,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
}
_GPT2 = {"vocab_size": 61, "n_embd": 256, "n_layer": 12, "n_head": 32}
# Ids have no default here: a text then ends at its limit.
_IDS = ("bos_token_id", "eos_token_id")
_CLASSES = {
    "llama": "LlamaConfig",
    "gpt2": "GPT2Config",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen3_next": "Qwen3NextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig",
    "nemotron_h": "NemotronHConfig",
    "smollm3": "SmolLM3Config",
    "olmo2": "Olmo2Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "phi3": "Phi3Config",
    "gpt_neox": "GPTNeoXConfig",
}
_MORE: dict[str, list[dict]] = {
    "qwen2": [{"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 3}],
    "qwen3": [{"use_sliding_window": True}, {"use_sliding_window": True, "max_window_layers": 3}],
    "qwen3_moe": [
        {"num_experts": 16},
        {"num_experts": 16, "decoder_sparse_step": 3},
        {"num_experts": 16, "mlp_only_layers": [2]},
        {"num_experts": 16, "num_experts_per_tok": 2, "use_sliding_window": True},
    ],
    "qwen3_next": [
        {"full_attention_interval": 3},
        {"num_experts": 0},
        {"num_experts": 16, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 8},
    ],
    "qwen3_5_text": [{"full_attention_interval": 2, "linear_num_value_heads": 16}],
    "smollm3": [{"no_rope_layer_interval": 3}, {"use_sliding_window": True, "sliding_window": 8}],
    "gemma2": [{"sliding_window": 16}],
    "gemma3_text": [{"sliding_window": 16}],
}
# Where the defaults of transformers are refused.
_ALWAYS = {"nemotron_h": {"hybrid_override_pattern": "M-MM*-M-"}}
CASES = [(name, more) for name in FAMILIES for more in ({}, *_MORE.get(name, ()))]


@pytest.mark.parametrize(("family", "more"), CASES, ids=str)
def test_few_keys_have_the_defaults_of_transformers(family, more):
    transformers = pytest.importorskip("transformers")
    few = (_GPT2 if family == "gpt2" else _SIZES) | _ALWAYS.get(family, {}) | more
    made = getattr(transformers, _CLASSES[family])(**few)
    full = json.loads(made.to_json_string(use_diff=False))
    full["architectures"] = [FAMILIES[family].architecture]
    ours, theirs = (hf.config_from_hf(raw) for raw in (few | {"model_type": family}, full))
    different = {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(ours)
        if field.name not in _IDS and getattr(ours, field.name) != getattr(theirs, field.name)
    }
    assert different == {}
