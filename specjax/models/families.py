"""The families of decoders: one table of switches, keys of config.json, and tensor names.

A family is the name by which checkpoints are read and written (``model_type`` in config.json).
What its models compute is in the fields of ``TransformerConfig`` that are named here.

Sources: the configurations and modules of transformers 5; the papers in ``transformer``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.models.transformer_config import Recurrent, TransformerConfig

# The names of activations in config.json. The first one of an activation is written, unless the
# default of the family is another name of it.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    "relu": "relu",
    "relu2": "relu2",
}


# Every n-th layer of a family with recurrent layers has attention.
INTERVAL = 4


# Key of config.json: the inner units of the expert that computes every token.
SHARED = "shared_expert_intermediate_size"


class Family(NamedTuple):
    """How the checkpoints of a family are read and written."""

    architecture: str
    keys: Mapping[str, str]  # field of TransformerConfig -> key of config.json
    names: Mapping[str, str]  # module -> name in the checkpoint; equal names: one fused tensor
    switches: dict[str, Any] = {}  # noqa: RUF012  (never mutated)
    # fields that have these values in every model
    # Fields, or keys that differ by layer, that config.json may lack: the defaults of transformers.
    defaults: Mapping[str, Any] = {}
    only: Mapping[str, list] = {}  # keys with the values that can be computed; the first is written
    scaled: bool = False  # embeddings are multiplied by the root of the hidden size
    # Which layers have a window by default: "none" (no key), "all", "after" max_window_layers,
    # "unrotated" ones, or all but every n-th ("2", "6").
    windows: str = "none"
    rope: Mapping[str, Any] = {}  # arguments of ``rope_config.read``
    transposed: bool = True  # whether linear kernels are [out, in] in the checkpoint
    # Module names of fused tensors that have the parts of a head next to each other -> the field of
    # ``TransformerConfig`` or ``Recurrent`` with the number of heads.
    by_head: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}  # other beginnings of names that files have
    ignored: tuple[str, ...] = ()  # beginnings of names of tensors that are not read
    # Whether a layer of a file is attention, a recurrence or a feed-forward part alone.
    apart: bool = False


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "intermediate_size": "intermediate_size",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
_BIAS, _MLP_BIAS = {"attention_bias": "attention_bias"}, {"mlp_bias": "mlp_bias"}
_GEMMA_KEYS = (
    _KEYS
    | _BIAS
    | {
        "activation": "hidden_activation",
        "query_scalar": "query_pre_attn_scalar",
        "attention_softcap": "attn_logit_softcapping",
        "final_softcap": "final_logit_softcapping",
    }
)
# Of models with as many key heads as heads, whose width follows from the hidden size.
_EQUAL = {key: name for key, name in _KEYS.items() if key not in ("num_kv_heads", "head_dim")}
_GPT2_KEYS = _EQUAL | {
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_positions": "n_positions",
    "norm_eps": "layer_norm_epsilon",
    "activation": "activation_function",
}
_NEOX_KEYS = _EQUAL | _BIAS | {"norm_eps": "layer_norm_eps", "parallel": "use_parallel_residual"}

_NAMES = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OLMO2_NAMES = _NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = _OLMO2_NAMES | {"mlp_norm": "pre_feedforward_layernorm"}
_QKV = ("attention.q", "attention.k", "attention.v")
_PHI3_NAMES = _NAMES | dict.fromkeys(_QKV, "self_attn.qkv_proj")
_PHI3_NAMES |= dict.fromkeys(("mlp.gate", "mlp.up"), "mlp.gate_up_proj")
_NEOX_NAMES = {
    "embed": "gpt_neox.embed_in",
    "layers": "gpt_neox.layers",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **dict.fromkeys(_QKV, "attention.query_key_value"),
    "attention.o": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_GPT2_NAMES = {
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "layers": "transformer.h",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attention_norm": "ln_1",
    **dict.fromkeys(_QKV, "attn.c_attn"),
    "attention.o": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_DELTA_NAMES = _NAMES | {
    "attention.gate": "self_attn.q_proj",
    **dict.fromkeys(("delta.q", "delta.k", "delta.v", "delta.z"), "linear_attn.in_proj_qkvz"),
    **dict.fromkeys(("delta.b", "delta.a"), "linear_attn.in_proj_ba"),
    **dict.fromkeys(("delta.q_conv", "delta.k_conv", "delta.v_conv"), "linear_attn.conv1d"),
    "delta": "linear_attn",
    "delta.norm": "linear_attn.norm",
    "delta.o": "linear_attn.out_proj",
}
_MAMBA = dict.fromkeys(("z", "x", "b", "c", "dt"), "mixer.in_proj")
_MAMBA |= dict.fromkeys(("x_conv", "b_conv", "c_conv"), "mixer.conv1d")
_MAMBA |= {"norm": "mixer.norm", "o": "mixer.out_proj"}
_NEMOTRON_NAMES = {
    "embed": "model.embeddings",
    "layers": "model.layers",
    "norm": "model.norm_f",
    "head": "lm_head",
    **dict.fromkeys(("attention_norm", "mlp_norm"), "norm"),
    **{f"attention.{part}": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"mlp.{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"mamba.{part}": name for part, name in _MAMBA.items()},
    "mamba": "mixer",
}
_MOE_NAMES = {"mlp.router": "mlp.gate", "experts": "mlp.experts"}
_SHARED_NAMES = {"mlp.shared_gate": "mlp.shared_expert_gate"}
_SHARED_NAMES |= {f"mlp.shared.{x}": f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")}
_QWEN3_5_NAMES = _DELTA_NAMES | {f"delta.{x}": f"linear_attn.in_proj_{x}" for x in "zba"}
_QWEN3_5_NAMES |= dict.fromkeys(("delta.q", "delta.k", "delta.v"), "linear_attn.in_proj_qkv")


def _moe(experts: int, chosen: int, size: int, renormalise: bool) -> dict[str, Any]:
    """The defaults of transformers for the keys of experts."""
    return {
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "norm_topk_prob": renormalise,
    }


_UNTIED = {"tie_embeddings": False, "norm_eps": 1e-6}
_QWEN = _UNTIED | {"max_positions": 32768, "sliding_window": 4096}
_GEMMA = {
    "norm_eps": 1e-6,
    "head_dim": 256,
    "num_kv_heads": 4,
    "query_scalar": 256,
    "sliding_window": 4096,
    "activation": "gelu_pytorch_tanh",
}
# Files of Gemma 3 with a vision tower lack them.
_GEMMA3_SIZES = dict(zip(_KEYS, (262208, 2304, 8, 26, 9216, 4, 256, 131072), strict=False))
_DELTA_SWITCHES = {"norm": "rms1p", "qk_norm": True, "attention_gate": True}
_GEMMA_SWITCHES = {"norm": "rms1p", "post_norm": True}
_CENTRED = {"norm": "layer", "gated": False, "mlp_bias": True}
_GPT2_OFF = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
_VISION = ("vision_tower.", "multi_modal_projector.")

FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM", _KEYS | _BIAS | _MLP_BIAS, _NAMES, {}, _UNTIED | {"max_positions": 2048}
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2_KEYS,
        _GPT2_NAMES,
        _CENTRED | {"positions": "learned", "attention_bias": True},
        {"max_positions": 1024, "norm_eps": 1e-5, "activation": "gelu_new"},
        {"scale_attn_weights": [True], **{key: [False] for key in _GPT2_OFF}},
        transposed=False,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _KEYS,
        _NAMES,
        defaults=_UNTIED | {"max_positions": 131072, "num_kv_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _KEYS,
        _NAMES,
        {"attention_bias": True, "output_bias": False},
        _QWEN | {"num_kv_heads": 32},
        windows="after",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _KEYS | _BIAS,
        _NAMES,
        {"qk_norm": True},
        _QWEN | {"num_kv_heads": 32, "head_dim": 128},
        windows="after",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _KEYS | _BIAS,
        _NAMES | _MOE_NAMES,
        {"qk_norm": True},
        _QWEN | {"num_kv_heads": 4} | _moe(128, 8, 768, False),
        {"hidden_act": ["silu"]},
        windows="all",
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _KEYS | _BIAS,
        _DELTA_NAMES | _MOE_NAMES | _SHARED_NAMES,
        _DELTA_SWITCHES,
        _UNTIED
        | {"max_positions": 32768, "num_kv_heads": 2, "head_dim": 256}
        | _moe(512, 10, 512, True)
        | {SHARED: 512},
        {"hidden_act": ["silu"]},
        rope={"partial": 0.25},
        by_head={"q_proj": "num_heads", "in_proj_qkvz": "key_heads", "in_proj_ba": "key_heads"},
    ),
    "qwen3_5_text": Family(
        "Qwen3_5ForCausalLM",
        _KEYS | _BIAS,
        _QWEN3_5_NAMES,
        _DELTA_SWITCHES,
        _UNTIED | {"max_positions": 32768, "num_kv_heads": 4, "head_dim": 256},
        {"attn_output_gate": [True]},
        rope={"partial": 0.25, "unread": ("mrope_section", "mrope_interleaved")},
        by_head={"q_proj": "num_heads"},
        # A file with the vision tower, which is not read.
        renamed={"model.language_model.": "model."},
        ignored=("model.visual.", "visual."),
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        _KEYS | _MLP_BIAS | {"norm_eps": "layer_norm_epsilon", "activation": "mlp_hidden_act"},
        _NEMOTRON_NAMES,
        {"positions": "none", "gated": False, "norm": "rms_once"},
        {"tie_embeddings": False, "num_kv_heads": 8, "head_dim": 128, "max_positions": 4096}
        | {"activation": "relu2"},
        {"mamba_hidden_act": ["silu"], "use_conv_bias": [True], "attention_bias": [False]}
        | {key: [False] for key in ("use_bias", "mamba_proj_bias", "residual_in_fp32")},
        renamed={"backbone.": "model."},
        ignored=("mtp.",),
        apart=True,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        _KEYS | _BIAS | _MLP_BIAS,
        _NAMES,
        defaults={"norm_eps": 1e-6, "max_positions": 32768, "num_kv_heads": 4},
        windows="unrotated",
        rope={"theta": 2000000.0},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _KEYS | _BIAS,
        _OLMO2_NAMES,
        {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_whole": True},
        {"tie_embeddings": False, "max_positions": 2048},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_KEYS,
        _GEMMA_NAMES,
        _GEMMA_SWITCHES,
        _GEMMA | {"max_positions": 8192, "attention_softcap": 50.0, "final_softcap": 30.0},
        scaled=True,
        windows="2",
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_KEYS,
        _GEMMA_NAMES,
        _GEMMA_SWITCHES | {"qk_norm": True},
        _GEMMA | _GEMMA3_SIZES,
        scaled=True,
        windows="6",
        rope={"theta": 1000000.0, "local_theta": 10000.0},
        # A file with the vision tower, which is not read.
        renamed={
            "language_model.model.": "model.",
            "model.language_model.": "model.",
            "language_model.lm_head.": "lm_head.",
        },
        ignored=(*_VISION, *(f"model.{name}" for name in _VISION)),
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _KEYS,
        _PHI3_NAMES,
        defaults={"tie_embeddings": False, "max_positions": 4096},
        windows="all",
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        _NEOX_KEYS,
        _NEOX_NAMES,
        _CENTRED,
        {"tie_embeddings": False, "max_positions": 2048, "activation": "gelu"}
        | {"parallel": True, "attention_bias": True},
        rope={"partial": 0.25},
        by_head={"query_key_value": "num_heads"},
        renamed={"lm_head.": "embed_out."},
    ),
}


def shape(family: str, **fields: Any) -> TransformerConfig:
    """A decoder of a family: its switches and ``fields`` (the sizes, and other values)."""
    row = FAMILIES[family]
    activation = ACTIVATIONS[row.defaults.get("activation", "silu")]
    own: dict[str, Any] = row.switches | {"activation": activation}
    if row.scaled:
        own["embedding_scale"] = math.sqrt(fields["hidden_size"])
    if "delta" in row.names:
        # A quarter of each head is rotated, an even number of dimensions.
        own["rotary_dim"] = 2 * max(fields["head_dim"] // 8, 1)
        own["recurrent"] = _recurrent(fields)
    if "mamba" in row.names:
        own["recurrent"] = dataclasses.replace(_recurrent(fields), kind="mamba2", least_step=0.001)
    return TransformerConfig(family=family, **own | fields)


def _recurrent(fields: Mapping[str, Any]) -> Recurrent:
    """Recurrent layers with the heads of the attention; the last layer has attention."""
    size, last = fields["head_dim"], fields["num_layers"] - 1
    layers = tuple(i for i in range(last) if (i + 1) % INTERVAL)
    return Recurrent(fields["num_kv_heads"], fields["num_heads"], size, size, 4, layers)
