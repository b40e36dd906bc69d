"""config.json: both directions, old and new keys, one clear line for everything unsupported."""

from __future__ import annotations

import json

import pytest
from hf_cases import CONFIGS, hf_keys

from specjax.errors import UserError
from specjax.models import families, hf, lm
from specjax.models.transformer_config import Rope, RopeScaling

pytestmark = pytest.mark.fast


LATE = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1}
LLAMA, GPT2 = (hf.config_to_hf(CONFIGS[name]) for name in ("llama", "gpt2"))


REFUSED = [
    (LLAMA | {"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu, "),
    (
        GPT2 | {"activation_function": "quick_gelu"},
        "activation_function 'quick_gelu' .* gelu_pytorch_tanh, gelu_new",
    ),
    (
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx True is not",
    ),
    (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False is not"),
    (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' .* supported: default, linear, llama3, yarn, longrope",
    ),
    (LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor is 0; it must be"),
    (
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "low_freq_factor is missing",
    ),
    (LLAMA | {"partial_rotary_factor": 0.1}, r"partial_rotary_factor 0.1 of head_dim 8 turns 0"),
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
    (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; decoders with at"),
    (LLAMA | {"vocab_size": None}, "vocab_size is missing; it must be a positive integer"),
    (LLAMA | {"hidden_size": 32.5}, "hidden_size is 32.5; it must be a positive integer"),
    (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a positive number"),
    (
        LLAMA | {"tie_word_embeddings": "yes"},
        "tie_word_embeddings is 'yes'; it must be true or false",
    ),
    # A key that changes the computation is not ignored by a family without it.
    (LLAMA | {"sliding_window": 8}, "sliding_window 8 is not supported for LlamaForCausalLM"),
    (LLAMA | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    (LLAMA | {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0 is not supported"),
    (LLAMA | {"num_experts": 8}, "num_experts 8 is not supported for LlamaForCausalLM"),
    (LLAMA | {"layer_types": ["sliding_attention"] * 2}, "layer_types .* is not supported"),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention True is not supported"),
    (GPT2 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    (hf_keys("mistral", attention_bias=True), "attention_bias True is not supported for Mistral"),
    (
        hf_keys("mistral", sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
        "layer_types has full_attention and sliding_attention; the layers of a Mistral",
    ),
    (hf_keys("mistral", sliding_window=0), "sliding_window is 0; it must be a positive integer"),
    (hf_keys("qwen2", layer_types=["sliding_attention"] * 2), "there is no window; give sliding_w"),
    (
        hf_keys("qwen3", layer_types=["chunked_attention"] * 2),
        "layer_types has 'chunked_attention'",
    ),
    (hf_keys("qwen3", layer_types=["full_attention"]), "layer_types must be a list of 2 names"),
    (
        hf_keys("qwen3", layer_types=None, **LATE),
        "max_window_layers is -1; it must be a whole number",
    ),
    (hf_keys("smollm3", no_rope_layers=[1, 2]), "no_rope_layers must be a list of 2 numbers"),
    (
        hf_keys("gemma2", use_bidirectional_attention=True),
        "use_bidirectional_attention True is not supported for Gemma2ForCausalLM",
    ),
    (hf_keys("gpt_neox", qk_layernorm=True), "qk_layernorm True is not supported"),
    (
        hf_keys("qwen3_moe", num_experts_per_tok=9, num_experts=8),
        "num_experts_per_tok is 9; it must be at most num_experts, which is 8",
    ),
    (
        hf_keys("qwen3_next", num_experts=8),
        "num_experts_per_tok is 10; it must be at most num_experts, which is 8",
    ),
    (
        hf_keys("qwen3_next", num_experts=16, shared_expert_intermediate_size=0),
        "shared_expert_intermediate_size is 0; it must be a positive integer",
    ),
    (
        hf_keys("qwen3_next", linear_num_value_heads=3),
        "linear_num_value_heads 3 is no multiple of linear_num_key_heads, which is 2",
    ),
    (hf_keys("nemotron_h", n_groups=3), "mamba_num_heads 4 is no multiple of n_groups, which is 3"),
    (
        hf_keys("nemotron_h", layers_block_type=None, hybrid_override_pattern="M-E*"),
        "layer 2 of the file is 'moe', which is not supported; supported: linear_attention",
    ),
    (
        hf_keys("nemotron_h", layers_block_type=["attention", "mlp", "mlp"]),
        "layer 2 of the file is a feed-forward part after another one, which is not supported",
    ),
    (
        hf_keys("nemotron_h", layers_block_type=["moe"], n_routed_experts=8),
        "layer 0 of the file is 'moe', which is not supported",
    ),
    (hf_keys("nemotron_h", time_step_min=False), "time_step_min is False; it must be a positive n"),
    (hf_keys("nemotron_h", time_step_min=-1.0), "time_step_min is -1.0; it must be a positive num"),
    (hf_keys("nemotron_h", use_bias=True), "use_bias True is not supported; supported: False"),
    (hf_keys("qwen3_5_text", layer_types=["sliding_attention"] * 2), "layer_types .* is not supp"),
    (hf_keys("qwen3_5_text", layer_types=["linear_attention"]), "must be a list of 2 names"),
    (
        LLAMA | {"quantization_config": {"quant_method": "awq"}},
        "quantization_config 'awq' is not supported; give the model with weights in float32",
    ),
    ({"model_type": "gpt_oss"}, "architecture gpt_oss is not supported; supported: Llama"),
    ({"architectures": ["Gemma4ForCausalLM"]}, "architecture Gemma4ForCausalLM is not supported"),
    ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM is not"),
    ({"architectures": 5}, "must be a name and a list of names, not 5"),
    ({"architectures": [["a"]]}, "must be a name and a list of names"),
    ({"architectures": [[]]}, "must be a name and a list of names"),
    ({"model_type": ["llama"]}, "must be a name and a list of names"),
    (LLAMA | {"hidden_act": ["silu"]}, r"hidden_act \['silu'\] is not supported"),
    (LLAMA | {"bos_token_id": [1]}, "bos_token_id is .*; it must be a token id"),
    (LLAMA | {"layer_types": 5}, "layer_types is 5; it must be a list of names"),
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


@pytest.mark.fast
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_written_and_read(family):
    raw = json.loads(json.dumps(hf_keys(family)))
    config = hf.config_from_hf(raw)
    assert config.family == family and hf.config_to_hf(config) == raw
    assert config.window(0) is None
    # By its model_type alone, with keys of transformers that change nothing here.
    del raw["architectures"]
    assert hf.config_from_hf(raw | {"use_cache": True, "attention_dropout": 0.0}) == config


def test_windows_follow_the_rule_of_the_family():
    def windows(family, **changes):
        raw = hf_keys(family, num_hidden_layers=7, sliding_window=8, **changes)
        return "".join("-" if size is None else "w" for size in hf.config_from_hf(raw).windows)

    assert windows("mistral") == windows("phi3") == "wwwwwww"
    late = {"use_sliding_window": True, "max_window_layers": 5, "layer_types": None}
    assert windows("qwen2", **late) == windows("qwen3", **late) == "-----ww"
    assert windows("qwen2", **late | {"use_sliding_window": False}) == ""
    assert windows("gemma2", layer_types=None) == "w-w-w-w"
    assert windows("gemma3_text", layer_types=None) == "wwwww-w"
    assert windows("gemma3_text", layer_types=None, sliding_window_pattern=2) == "w-w-w-w"
    sparse = {"layer_types": None, "use_sliding_window": True, "no_rope_layers": None}
    assert windows("smollm3", **sparse) == "---w---"
    assert windows("smollm3", **sparse, no_rope_layer_interval=3) == "--w--w-"
    assert windows("qwen3_moe", use_sliding_window=True, mlp_only_layers=[]) == "wwwwwww"
    # The default of transformers, where a file has no such key.
    bare = {key: x for key, x in hf_keys("mistral").items() if key != "sliding_window"}
    assert hf.config_from_hf(bare).windows == (4096, 4096)


def test_the_text_model_of_a_gemma_3_with_images():
    """gemma-3-4b-it: many keys are missing in its text_config."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = hf.config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "text_config": text,
            "vision_config": {"model_type": "siglip_vision_model"},
            "eos_token_id": [1, 106],
        }
    )
    assert (config.family, config.vocab_size, config.head_dim) == ("gemma3_text", 262208, 256)
    assert (config.num_heads, config.num_kv_heads, config.tie_embeddings) == (8, 4, True)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.eos_token_id == (1, 106)
    assert config.rope(5) == Rope(1e6, 256, scaling=RopeScaling("linear", 8.0))
    assert config.rope(0) == Rope(1e4, 256) and config.embedding_scale == 2560**0.5
    assert config.attention_softcap is None and config.query_scalar == 256


def test_switches_of_published_models():
    qwen = {
        "architectures": ["Qwen2ForCausalLM"],
        **{"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
        **{"intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936},
        **{"max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False},
        **{"rope_theta": 1000000.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-06},
    }
    config = hf.config_from_hf(qwen)
    assert config.attention_bias and config.output_bias is False and config.windows == ()
    assert hf.config_from_hf(hf_keys("qwen3_moe", use_qk_norm=True, qkv_bias=False)).qk_norm
    assert hf.config_from_hf(hf_keys("qwen2", use_qkv_bias=True)).attention_bias
    pythia = {
        "architectures": ["GPTNeoXForCausalLM"],
        **{"hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048},
        **{"layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox"},
        **{"num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000},
        **{"rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True},
        **{"vocab_size": 50304},
    }
    config = hf.config_from_hf(pythia)
    assert config.parallel and not config.gated and config.rotary_dim == 16
    assert config.norm == "layer" and config.activation == "gelu" and config.attention_bias


def test_longrope_ends_at_the_end_of_its_short_factors():
    raw = hf_keys(
        "phi3",
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )
    config = hf.config_from_hf(raw)
    assert (config.max_positions, config.longest_text) == (128, 32)
    assert lm.from_config(config).max_positions == 32


@pytest.mark.parametrize(("stated", "least"), [(None, 0.001), (0, 0.0), (0.0, 0.0), (0.5, 0.5)])
def test_the_least_step_of_mamba_2(stated, least):
    config = hf.config_from_hf(hf_keys("nemotron_h", time_step_min=stated))
    assert config.recurrent is not None and config.recurrent.least_step == least
