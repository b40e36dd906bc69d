"""Shared by the tests of .gguf files: tiny models in both forms, written without specjax.

The tensors are made under the names of Hugging Face style directories. ``write_gguf`` stores them
as llama.cpp's converter does: q and k of Llama reordered, the norms of Gemma as 1 + w.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "vocab_size": 61,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SILU = {"hidden_act": "silu", "rope_theta": 5000.0, "rope_scaling": None}
_GELU = {
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "num_hidden_layers": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Architecture of llama.cpp and a variant -> config.json.
CONFIGS: dict[str, dict] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, **_SILU},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False, **_SILU},
    "llama-biases": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        **_SILU,
    },
    "llama-rope": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        **_SILU,
        "rope_scaling": LLAMA3,
    },
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, **_SILU, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": False, **_SILU},
    "gemma2": {
        "model_type": "gemma2",
        "rope_theta": 10000.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        **_GELU,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        **_GELU,
    },
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def config_of(name: str) -> dict:
    """The config.json of a case."""
    config = SIZES | CONFIGS[name]
    config["architectures"] = [_ARCHITECTURES[config["model_type"]]]
    if config["model_type"].startswith("gemma"):
        group = 2 if config["model_type"] == "gemma2" else 6
        config["layer_types"] = [
            "full_attention" if number % group == group - 1 else "sliding_attention"
            for number in range(config["num_hidden_layers"])
        ]
    return config


def tensors_of(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of transformers."""
    kind, width, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], width), "model.norm": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], width)
    gemma, biased = kind.startswith("gemma"), set()
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        shapes |= {layer + norm: (width,) for norm in norms}
        if kind in ("qwen3", "gemma3_text"):
            shapes |= {f"{layer}self_attn.{x}_norm": (config["head_dim"],) for x in "qk"}
        for part, shape in {"q": (q, width), "k": (kv, width), "v": (kv, width)}.items():
            shapes[f"{layer}self_attn.{part}_proj"] = shape
            if kind == "qwen2" or config.get("attention_bias"):
                biased.add(f"{layer}self_attn.{part}_proj")
        shapes[f"{layer}self_attn.o_proj"] = (width, q)
        if config.get("attention_bias"):
            biased.add(f"{layer}self_attn.o_proj")
        for part in ("gate", "up", "down"):
            shape = (width, inner) if part == "down" else (inner, width)
            shapes[f"{layer}mlp.{part}_proj"] = shape
            if config.get("mlp_bias"):
                biased.add(f"{layer}mlp.{part}_proj")
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        centre = 0.5 if len(shape) == 1 else 0.0
        tensors[f"{name}.weight"] = rng.normal(centre, 0.1, shape).astype(np.float32)
        if name in biased:
            tensors[f"{name}.bias"] = rng.normal(0.2, 0.1, shape[:1]).astype(np.float32)
    return tensors


def write_directory(path: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face style directory."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_gguf(
    path: Path,
    config: dict,
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    more=None,
    leave_out=(),
) -> dict[str, np.ndarray]:
    """A .gguf file; ``more`` gets the writer. Returns the tensors as they were stored.

    ``kind`` is the type of the matrices: quantised values are what the directory has to hold to be
    the same model.
    """
    import gguf

    arch = config["model_type"].removesuffix("_text")
    writer = gguf.GGUFWriter(path, arch)
    steps = {
        "block_count": writer.add_block_count,
        "context_length": writer.add_context_length,
        "embedding_length": writer.add_embedding_length,
        "feed_forward_length": writer.add_feed_forward_length,
        "head_count": writer.add_head_count,
        "head_count_kv": writer.add_head_count_kv,
        "key_length": writer.add_key_length,
        "value_length": writer.add_value_length,
        "eps": writer.add_layer_norm_rms_eps,
        "theta": writer.add_rope_freq_base,
        "window": writer.add_sliding_window,
        "attn_cap": writer.add_attn_logit_softcapping,
        "final_cap": writer.add_final_logit_softcapping,
        "vocab": writer.add_vocab_size,
    }
    names = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "head_count": "num_attention_heads",
        "head_count_kv": "num_key_value_heads",
        "key_length": "head_dim",
        "value_length": "head_dim",
        "eps": "rms_norm_eps",
        "theta": "rope_theta",
        "window": "sliding_window",
        "attn_cap": "attn_logit_softcapping",
        "final_cap": "final_logit_softcapping",
        "vocab": "vocab_size",
    }
    for step, add in steps.items():
        if config.get(names[step]) is not None and step not in leave_out:
            add(config[names[step]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    if more is not None:
        more(writer)
    if config.get("rope_scaling"):
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
    stored = {}
    for name, tensor in tensors.items():
        quantise = kind != "F32" and tensor.ndim == 2
        own, there = gguf_name(arch, name), stored_form(config, name, tensor)
        if quantise:
            type_ = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(there, type_)
            writer.add_tensor(own, data, raw_dtype=type_)
            there = gguf.quants.dequantize(data, type_)
        else:
            writer.add_tensor(own, there)
        stored[name] = stored_form(config, name, there, back=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def stored_form(config: dict, name: str, tensor: np.ndarray, back: bool = False) -> np.ndarray:
    """A tensor as llama.cpp stores it; ``back``: the other way."""
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1 if back else tensor + 1
    if (config["model_type"] == "llama" and ".q_proj." in name) or ".k_proj." in name:
        if config["model_type"] != "llama":
            return tensor
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        half = tensor.shape[0] // heads // 2
        inner = (half, 2) if back else (2, half)
        return tensor.reshape(heads, *inner, -1).swapaxes(1, 2).reshape(tensor.shape)
    return tensor


def gguf_name(arch: str, name: str) -> str:
    """The name of a tensor in a .gguf file, by the tables of the gguf library."""

    found = _names(arch).get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


@functools.cache
def _names(arch: str):
    import gguf

    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    return gguf.get_tensor_name_map(kind, 8)


def llama3_factors(config: dict) -> np.ndarray:
    """The divisors of the frequencies, as llama.cpp's converter computes them."""
    scaling, dim = config["rope_scaling"], config["head_dim"]
    low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
    high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
    factors = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * config["rope_theta"] ** (i / dim)
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(scaling["factor"])
        else:
            smooth = scaling["original_max_position_embeddings"] / wavelength
            smooth = (smooth - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
