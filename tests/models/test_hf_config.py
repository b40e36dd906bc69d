"""config.json: both directions, old and new keys, one clear line for everything unsupported."""

from __future__ import annotations

import json

import pytest
from hf_cases import CONFIGS

from specjax.errors import UserError
from specjax.models import hf

pytestmark = pytest.mark.fast


LLAMA, GPT2 = (hf.config_to_hf(CONFIGS[name]) for name in ("llama", "gpt2"))


REFUSED = [
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
    (
        GPT2 | {"activation_function": "relu"},
        "activation_function 'relu' .* gelu_new, gelu_pytorch_tanh",
    ),
    (
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx True is not",
    ),
    (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False is not"),
    (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope type 'linear' .* supported: default, llama3",
    ),
    (LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
    (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor is missing",
    ),
    (LLAMA | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported"),
    (
        LLAMA | {"num_key_value_heads": 3},
        "4 attention heads are not a multiple of 3 key/value heads",
    ),
    (
        LLAMA | {"head_dim": None, "hidden_size": 30},
        "hidden size 30 is not a multiple of the 4 attention heads",
    ),
    (LLAMA | {"head_dim": 7}, "head_dim 7 is odd"),
    (GPT2 | {"n_head": 5}, "hidden size 32 is not a multiple of the 5"),
    (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a positive integer"),
    (LLAMA | {"vocab_size": None}, "vocab_size is missing; it must be a positive integer"),
    (LLAMA | {"hidden_size": 32.5}, "hidden_size is 32.5; it must be a positive integer"),
    (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a positive number"),
    (
        LLAMA | {"tie_word_embeddings": "yes"},
        "tie_word_embeddings is 'yes'; it must be true or false",
    ),
    ({"model_type": "mamba"}, "architecture mamba is not supported"),
    ({"mode": "train"}, "no architectures, no model_type"),
]


@pytest.mark.fast
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused_configs(case):
    raw, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        hf.config_from_hf(raw)
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_old_and_new_keys_of_a_config():
    for name, config in CONFIGS.items():
        assert hf.config_from_hf(json.loads(json.dumps(hf.config_to_hf(config)))) == config, name
    old = hf.config_to_hf(CONFIGS["llama-rope"])
    new = {
        key: value
        for key, value in old.items()
        if key not in ("rope_theta", "rope_scaling", "architectures")
    }
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500.0}
    assert hf.config_from_hf(new) == CONFIGS["llama-rope"]
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert (
        hf.config_from_hf(new).rope_scaling is None and hf.config_from_hf(new).rope_theta == 500.0
    )
    bare = hf.config_from_hf(GPT2 | {"n_inner": None, "eos_token_id": [5, 6]})
    assert bare.intermediate_size == 4 * 32 and bare.eos_token_id == (5, 6)
    assert hf.config_from_hf(LLAMA | {"head_dim": None, "eos_token_id": None}).head_dim == 8
    few = {
        key: value
        for key, value in LLAMA.items()
        if key not in ("tie_word_embeddings", "num_key_value_heads")
    }
    assert not hf.config_from_hf(few).tie_embeddings and hf.config_from_hf(few).num_kv_heads == 4
