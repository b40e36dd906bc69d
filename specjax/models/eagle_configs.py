"""The config.json that EAGLE heads are written with: one function per layout.

``eagle_dialects`` reads what is written here. Every file also has the key ``specjax`` with the
facts that dialects express in different ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models.config_values import MASK_IDS
from specjax.models.eagle_dialects import IDS, OWN

# Keys that are made anew for every file; all others of a config are copied.
_LAYER = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size"),
)
_MADE = {
    *_LAYER,
    *("architectures", "auto_map", "rope_parameters", "tie_word_embeddings", "torch_dtype"),
    *("dtype", "qk_norm", "layer_types", "sliding_window", "use_sliding_window", "bias"),
    *("max_window_layers", "pretraining_tp", "attention_dropout", "logit_scale"),
    *("speculators_model_type", "speculators_version", "transformer_layer_config"),
    *("eagle_config", IDS, "draft_vocab_size", "target_hidden_size", "embed_requires_grad"),
    *("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "read_as"),
    *("taps", "draft_ids", "speculators_config", "parallel_drafting", "parallel", OWN),
    *MASK_IDS,
}
# How many tokens a program drafts that takes the number from the file.
_SPECULATIVE_TOKENS = 5


def compose(
    kind: str, layout: str, config: Mapping[str, Any], parts: Mapping[str, Any]
) -> dict[str, Any]:
    """The config.json of heads.

    Args:
        kind: eagle or eagle3.
        layout: one of ``eagle_layouts.LAYOUTS``.
        config: as ``Head.config``.
        parts: ``draft_vocab_size``, ``fc_norm``, ``norm_before_fc``, ``bias``: what the tensors
            show.
    """
    kept = {key: value for key, value in config.items() if key not in _MADE}
    layer = {key: config.get(key) for key in _LAYER} | {"hidden_act": "silu", "mlp_bias": False}
    if layer["vocab_size"] is None:
        del layer["vocab_size"]
    layer["model_type"] = "qwen3" if config["qk_norm"] else "llama"
    own = {"kind": kind, "layout": layout}
    if kind == "eagle":
        name = "Qwen3ForCausalLM" if config["qk_norm"] else "LlamaForCausalLM"
        flat = {"architectures": [name], **layer, "bias": parts["bias"]}
        return kept | flat | {"tie_word_embeddings": False, OWN: own}
    own |= {"taps": config.get("taps"), "norm_output": config["norm_output"]}
    switches = {
        "draft_vocab_size": parts["draft_vocab_size"],
        "norm_output": config["norm_output"],
        "norm_before_residual": config["norm_before_residual"],
        "norm_before_fc": parts["norm_before_fc"],
        "fc_norm": parts["fc_norm"],
        "tie_word_embeddings": False,
    }
    if config.get("parallel"):
        own["parallel"] = config["parallel"]
        # vLLM reads the second name.
        switches |= dict.fromkeys(("mask_token_id", "ptd_token_id"), config["mask_token_id"])
    if layout == "speculators":
        body = _speculators(config, layer)
    else:
        body = layer | _taps(layout, config.get("taps"))
        body |= {"target_hidden_size": config["target_hidden_size"]}
        name = "LlamaForCausalLMEagle3" if layout == "specforge" else "LlamaForCausalLM"
        body |= {"architectures": [name]}
    return kept | body | switches | {OWN: own}


def _taps(layout: str, taps: list[int] | None) -> dict[str, Any]:
    """The layer numbers of a flat config.json.

    SpecForge and SGLang take a list that begins with 1 for outputs of layers, as SpecForge trains
    with them. In all other lists, number i is the output of layer i - 1.
    """
    if taps is None:
        return {}
    if layout == "specforge":
        ids = list(taps) if taps[0] == 1 else [tap + 1 for tap in taps]
        return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return {IDS: [tap + 1 for tap in taps]}


def _speculators(config: Mapping[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """The keys of the vLLM speculators library. The file has no version: no library wrote it."""
    width, taps = config["target_hidden_size"], config.get("taps")
    tokens = config.get("parallel")
    method = "peagle" if tokens else "eagle3"
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": tokens or _SPECULATIVE_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    verifier = {"name_or_path": config.get("base_model_name_or_path"), "architectures": []}
    made = {
        "algorithm": method,
        "proposal_methods": [greedy],
        "default_proposal_method": "greedy",
        "verifier": verifier,
    }
    return {
        "architectures": ["PEagleSpeculator" if tokens else "Eagle3Speculator"],
        "speculators_model_type": method,
        "speculators_config": config.get("speculators_config") or made,
        "transformer_layer_config": layer,
        IDS: None if taps is None else [tap + 1 for tap in taps],
        "target_hidden_size": None if width == config["hidden_size"] else width,
        "embed_requires_grad": False,
    }
