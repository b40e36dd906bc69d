"""Tiny configurations of transformers, one or more per family of decoders."""

from __future__ import annotations

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 48,
    "partial_rotary_factor": 0.75,
}
_GEMMA = {**_SIZES, "head_dim": 12, "query_pre_attn_scalar": 10, "tie_word_embeddings": True}
_NEOX = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
_SLIDING, _FULL = "sliding_attention", "full_attention"
WINDOW = 6
_LINEAR = "linear_attention"
_DELTA = {
    **_SIZES,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": [_LINEAR, _FULL],
}
_TURNS = {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}
# name -> (class of the configuration, its arguments)
HF_FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {**_SIZES, "head_dim": 12}),
    "llama-yarn": ("LlamaConfig", {**_SIZES, "rope_parameters": _YARN}),
    "llama-linear": (
        "LlamaConfig",
        {
            **_SIZES,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0},
        },
    ),
    "mistral": ("MistralConfig", {**_SIZES, "head_dim": 12, "sliding_window": None}),
    "mistral-window": ("MistralConfig", {**_SIZES, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {**_SIZES, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {**_SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 12, "rms_norm_eps": 1e-3}),
    "qwen3-window": (
        "Qwen3Config",
        {
            **_SIZES,
            "head_dim": 12,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _FULL],
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe-window": (
        "Qwen3MoeConfig",
        {
            **_SIZES,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, "num_experts": 0, "rope_parameters": _TURNS},
    ),
    "qwen3_next-experts": (
        "Qwen3NextConfig",
        {
            **_DELTA,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "rms_norm_eps": 1e-3,
            "shared_expert_intermediate_size": 6,
            "rope_parameters": _TURNS,
        },
    ),
    "qwen3_5_text": (
        "Qwen3_5TextConfig",
        {
            **_DELTA,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "rope_parameters": _TURNS | {"mrope_section": [1, 1, 1], "mrope_interleaved": True},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{key: value for key, value in _SIZES.items() if key != "num_hidden_layers"},
            "head_dim": 12,
            "layers_block_type": [_LINEAR, "mlp", _LINEAR, _FULL, "mlp", _LINEAR],
            "n_groups": 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 6,
            "ssm_state_size": 5,
            "conv_kernel": 3,
            "mlp_bias": True,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {**_SIZES, "no_rope_layers": [1, 0], "tie_word_embeddings": True},
    ),
    "smollm3-window": (
        "SmolLM3Config",
        {
            **_SIZES,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "olmo2": ("Olmo2Config", {**_SIZES, "rms_norm_eps": 1e-3}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 3}),
    "gemma2-caps": (
        "Gemma2Config",
        {
            **_GEMMA,
            "sliding_window": 100,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3": ("Phi3Config", {**_SIZES, "sliding_window": None}),
    "phi3-long": (
        "Phi3Config",
        {
            **_SIZES,
            "rope_parameters": _LONG,
            "original_max_position_embeddings": 48,
            "sliding_window": WINDOW,
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **_NEOX,
            "layer_norm_eps": 1e-3,
            # Two pairs of dimensions: the base has no effect on the first one.
            "rope_parameters": {
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
                "rope_theta": 300.0,
            },
        },
    ),
    "gpt_neox-serial": (
        "GPTNeoXConfig",
        {
            **_NEOX,
            "use_parallel_residual": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
}


def reference_model(torch, transformers, name: str, changes: dict | None = None):
    """A random model of transformers of one of ``HF_FAMILIES``, in float32."""
    kind, arguments = HF_FAMILIES[name]
    config = getattr(transformers, kind)(**{**arguments, **(changes or {})})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.ndim == 1 else 0.0, 0.3)
    return model.eval()
