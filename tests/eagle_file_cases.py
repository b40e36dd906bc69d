"""Shared by the tests of files of draft networks: parameters, and files as others write them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from head_file_cases import fill
from safetensors.numpy import save_file

from specjax.drafters.files import head_files
from specjax.errors import UserError

# D, E, V, V_d, head_dim, query heads, key heads, feed-forward, taps
D, E, V, W, H, Q, K, F, N = 8, 8, 20, 6, 4, 4, 2, 10, 3
IDS = np.array([0, 3, 4, 9, 15, 19], np.int32)
LAYER = {
    "num_attention_heads": Q,
    "num_key_value_heads": K,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def layer(read=D, bias=False, qk_norm=False, **norms):
    """The shapes of a decoder layer whose attention reads ``read``."""

    def one(inside, out):
        return {"kernel": (inside, out)} | ({"bias": (out,)} if bias else {})

    attention = {
        "q": one(read, Q * H),
        "k": one(read, K * H),
        "v": one(read, K * H),
        "o": one(Q * H, D),
    }
    if qk_norm:
        attention |= {"q_norm": {"scale": (H,)}, "k_norm": {"scale": (H,)}}
    mlp = {
        "gate": {"kernel": (D, F)},
        "up": {"kernel": (D, F)},
        "down": {"kernel": (F, D)},
    }
    scales = {name: {"scale": (D,)} for name in norms}
    return {"attention": attention, "mlp_norm": {"scale": (D,)}, "mlp": mlp, **scales}


def eagle(layers=1, fc_bias=True, embed=False, **options):
    shapes = {
        "fc": {"kernel": (2 * D, D)} | ({"bias": (D,)} if fc_bias else {}),
        "layers": {"0": layer(**options)},
    }
    for i in range(1, layers):
        shapes["layers"][str(i)] = layer(**options, attention_norm=True)
    return shapes | ({"embed": {"embedding": (V, D)}} if embed else {})


def eagle3(layers=1, width=W, read=E, taps=N, fc=None, embed=False, **options):
    """``fc`` is the norm before fc: None, "fc_norm" or "input_norm"."""
    shapes = {
        "fc": {"kernel": (taps * read, D)},
        "layers": {"0": layer(2 * D, **options, token_norm=True, feature_norm=True)},
        "norm": {"scale": (D,)},
        "head": {"kernel": (D, width)},
    }
    for i in range(1, layers):
        shapes["layers"][str(i)] = layer(**options, attention_norm=True)
    if fc:
        shapes[fc] = {"scale": (taps, read) if fc == "fc_norm" else (taps * read,)}
    return shapes | ({"embed": {"embedding": (V, D)}} if embed else {})


def redrafter(rnn=True, projection=False):
    width = 5 if projection else 2 * D
    shapes = {
        "block": {str(i): {"kernel": (width, width), "bias": (width,)} for i in range(2)},
        "head": {"kernel": (width, V)},
    }
    if rnn:
        shapes["rnn"] = {"w": {"kernel": (D, D)}, "u": {"kernel": (D, D), "bias": (D,)}}
    if projection:
        shapes["input_proj"] = {"kernel": (2 * D, width), "bias": (width,)}
    return shapes


REDUCED = {"draft_ids": IDS, "vocab_size": V}
EAGLE3 = {"taps": [1, 4, 7], "norm_output": False, "norm_before_residual": False} | LAYER
# Name -> kind, shapes, keys of config.json.
CASES = {
    "eagle": ("eagle", eagle(), LAYER | {"vocab_size": V}),
    "eagle of two layers": ("eagle", eagle(2, fc_bias=False, embed=True), LAYER),
    "eagle with biases": ("eagle", eagle(bias=True), LAYER | {"rope_scaling": LLAMA3}),
    "eagle of Qwen3": ("eagle", eagle(qk_norm=True), {"rms_norm_eps": 1e-6}),
    "eagle3": ("eagle3", eagle3(), EAGLE3 | REDUCED),
    "eagle3 of all tokens": ("eagle3", eagle3(width=V), EAGLE3 | {"taps": [0, 2, 5]}),
    "eagle3.1": (
        "eagle3",
        eagle3(fc="fc_norm", embed=True),
        EAGLE3 | REDUCED | {"norm_output": True, "rope_scaling": LLAMA3},
    ),
    "eagle3 with a norm of all taps": (
        "eagle3",
        eagle3(2, fc="input_norm", taps=2),
        EAGLE3 | REDUCED | {"taps": [5, 3], "norm_before_residual": True},
    ),
    "eagle3 of Qwen3": ("eagle3", eagle3(2, qk_norm=True), {**EAGLE3, **REDUCED, "head_dim": H}),
    "eagle3 with biases": ("eagle3", eagle3(bias=True), EAGLE3 | REDUCED),
    "eagle3 for a wider target": ("eagle3", eagle3(read=12, embed=True), EAGLE3 | REDUCED),
    "redrafter": ("redrafter", redrafter(), {}),
    "redrafter with a running sum": ("redrafter", redrafter(rnn=False), {}),
    "redrafter with a projection": ("redrafter", redrafter(rnn=False, projection=True), {}),
    "redrafter with both": ("redrafter", redrafter(projection=True), {}),
}


def params_of(name, dtype: Any = np.float32):
    return fill(CASES[name][1], dtype)


def released_layer(prefix, read=D, norms=("input_layernorm",), bias=(), seed=0, qk_norm=False):
    """The tensors of a layer as PyTorch stores them, [out, in]."""
    sizes = {
        "self_attn.q_proj": (Q * H, read),
        "self_attn.k_proj": (K * H, read),
        "self_attn.v_proj": (K * H, read),
        "self_attn.o_proj": (D, Q * H),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    shapes = {f"{prefix}.{name}.weight": shape for name, shape in sizes.items()}
    shapes |= {f"{prefix}.{n}.weight": (D,) for n in (*norms, "post_attention_layernorm")}
    shapes |= {
        f"{prefix}.self_attn.{n}_proj.bias": (sizes[f"self_attn.{n}_proj"][0],) for n in bias
    }
    if qk_norm:
        shapes |= {f"{prefix}.self_attn.{n}_norm.weight": (H,) for n in "qk"}
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def released_eagle(**options):
    rng = np.random.default_rng(9)
    tensors = {"fc.weight": (D, 2 * D), "fc.bias": (D,), "embed_tokens.weight": (V, D)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in tensors.items()}
    return tensors | released_layer("layers.0", norms=(), **options)


def released_eagle3(first="midlayer", maps=True, **options):
    rng = np.random.default_rng(8)
    shapes = {"fc.weight": (D, N * E), "norm.weight": (D,), "lm_head.weight": (W, D)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ("hidden_norm", "input_layernorm")
    tensors |= released_layer(first, 2 * D, norms, **options)
    if maps:
        t2d = np.zeros(V, np.bool_)
        t2d[IDS] = True
        tensors |= {"d2t": IDS.astype(np.int64) - np.arange(W), "t2d": t2d}
    return tensors


PUBLISHED = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V} | LAYER
SPECFORGE = PUBLISHED | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": W,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [1, 4, 7],
        "use_aux_hidden_state": True,
    },
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.4.0",
    "speculators_config": {
        "algorithm": "eagle3",
        "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {"model_type": "llama", "vocab_size": V, **LAYER},
    "draft_vocab_size": W,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [2, 5, 8],
}


def store(path, tensors, config):
    """Writes a directory as other programs do: model.safetensors and config.json."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def assert_refused(match, path, kind="eagle3"):
    """Reading fails with one line."""
    with pytest.raises(UserError, match=match) as caught:
        head_files.read(path, kind)
    assert "\n" not in str(caught.value)
