"""The metadata of a .gguf file as the config.json of the same model.

Every key of the architecture must be understood: one that is not is refused by name. The keys are
those of llama.cpp (gguf-py, constants.py); what it computes without a key (the attention scale of
Gemma, the places of its sliding windows) is taken from its src/llama-model.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError
from specjax.models import families
from specjax.models.config_values import check_supported, value_of
from specjax.models.sources.gguf_file import GgufFile

FACTORS = ("rope_freqs.weight",)  # tensors that belong to the configuration


class _Family(NamedTuple):
    """What llama.cpp's code has for an architecture, and its files do not hold.

    What is the default of ``models.families`` too, such as activations, is not repeated.
    """

    model_type: str  # in config.json
    fixed: Mapping[str, float] = {}
    # Keys of this family alone: in the file -> in config.json.
    keys: Mapping[str, str] = {}
    # Layers of Gemma, repeated: all but the last one of a group have a sliding window.
    group: int = 0
    # Layers of the largest Gemma, which scales queries by the width of a head among the hidden
    # units, not by head_dim.
    largest: int = 0


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_LOCAL = {"rope.freq_base_swa": "rope_local_base_freq"}
FAMILIES = {
    "llama": _Family("llama"),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "gemma2": _Family("gemma2", _CAPS, _WINDOW | {key: key for key in _CAPS}, 2, 46),
    "gemma3": _Family("gemma3_text", {}, _WINDOW | _LOCAL, 6, 62),
}
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_READ = {
    *_SIZES,
    *("attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    "vocab_size",
}
# Keys that are accepted with this value alone, which changes nothing.
_ONLY = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,  # any
}


def of_file(file: GgufFile) -> dict[str, Any]:
    """The config.json of a .gguf file.

    Raises UserError for an architecture or a key that is not supported, by name.
    """
    family = family_of(file)
    _check_keys(file, family)
    kind = family.model_type
    raw = {"architectures": [families.FAMILIES[kind].architecture], "model_type": kind}
    raw |= {name: _value(file, key, None, int) for key, name in _SIZES.items()}
    _check_layers(file, raw["num_hidden_layers"])
    heads = raw["num_attention_heads"]
    head_dim = _value(file, "attention.key_length", raw["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := _value(file, key, head_dim)) != head_dim:
            raise UserError(
                f"{file.path}: {file.architecture}.{key} is {other} and a head has {head_dim} "
                "elements; only equal widths are supported"
            )
    raw |= dict(family.fixed) | {
        "head_dim": head_dim,
        "num_key_value_heads": _value(file, "attention.head_count_kv", heads),
        "rms_norm_eps": _number(file, "attention.layer_norm_rms_epsilon", 1e-6),
        "vocab_size": _vocabulary(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    own = {name: _value(file, key) for key, name in family.keys.items()}
    raw |= {name: value for name, value in own.items() if value is not None}
    if file.architecture == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        raw["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    raw |= _positions(file, head_dim)
    raw |= _gemma(file, family, raw) if family.group else {}
    return raw | _ends(file)


def family_of(file: GgufFile) -> _Family:
    """The row of ``FAMILIES``. Raises UserError for an architecture that is not supported."""
    name = file.architecture
    check_supported("the architecture", name, FAMILIES, file.path, " for .gguf files")
    return FAMILIES[name]


def _check_keys(file: GgufFile, family: _Family) -> None:
    for key, value in file.fields.items():
        start, _, name = key.partition(".")
        if start != file.architecture or name in _READ or name in family.keys:
            continue
        if name not in _ONLY or _ONLY[name] not in (None, value):
            raise UserError(f"{file.path}: {key} = {value!r} is not supported; give another model")


def _number(file: GgufFile, key: str, default: float) -> float:
    """A number of the architecture, as ``_float``. Raises UserError for a text."""
    return _float(_value(file, key, default, float))


def _value(file: GgufFile, key: str, default: Any = None, kind: type | None = None) -> Any:
    """A value of the architecture.

    Raises UserError for one number per layer, and for a value that is no positive number of the
    ``kind``, if one is given.
    """
    name = f"{file.architecture}.{key}"
    value = file.fields.get(name, default)
    if isinstance(value, list) and len(set(value)) != 1:
        raise UserError(
            f"{file.path}: {name} differs between layers; only equal layers are supported"
        )
    value = value[0] if isinstance(value, list) else value
    return value if kind is None else value_of({name: value}, name, kind, default, file.path)


def _check_layers(file: GgufFile, layers: int) -> None:
    """Raises UserError if the file has tensors of fewer layers."""
    there = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if layers > len(there):
        raise UserError(
            f"{file.path}: {file.architecture}.block_count is {layers}, and there are tensors of "
            f"{len(there)} layers; copy it again"
        )


def _vocabulary(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path} has no tensor token_embd.weight; it holds no whole model")
    return file.tensors["token_embd.weight"].shape[0]


def _float(value: float) -> float:
    """The shortest decimal that has this float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _positions(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``. Raises UserError for scalings that are not supported."""
    theta = _number(file, "rope.freq_base", 10000.0)
    kind = _value(file, "rope.scaling.type", "none")
    scaling = None
    if FACTORS[0] in file.tensors:
        if kind != "none":
            raise UserError(f"{file.path} has both rope scaling {kind!r} and {FACTORS[0]}")
        scaling = _llama3(file, theta, head_dim)
    elif kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": _number(file, "rope.scaling.factor", 1.0)}
        original = _value(file, "rope.scaling.original_context_length")
        if kind == "yarn" and original is not None:
            scaling["original_max_position_embeddings"] = original
    elif kind != "none":
        raise UserError(
            f"{file.path}: rope scaling {kind!r} is not supported; "
            "supported: none, linear, yarn, and the factors of Llama 3"
        )
    return {"rope_theta": theta, "rope_scaling": scaling}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The scaling of Llama 3 whose divisors of the frequencies the file holds.

    A file has one divisor per pair of elements: 1 for high frequencies, ``factor`` for low ones,
    and between them 1 / (s + (1 - s) / factor), where s = (L / wavelength - low) / (high - low)
    for the context length L of the first training. L, low and high are known up to one factor;
    the usual values (8192, 1, 4) are tried first.
    """
    stored = file.tensors[FACTORS[0]]
    given = np.fromfile(file.path, np.float32, stored.shape[0], offset=stored.offset)
    if stored.kind != "F32" or given.size * 2 != head_dim:
        raise UserError(f"{file.path}: {FACTORS[0]} does not have {head_dim // 2} numbers")
    turns = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)  # 1 / wavelength
    factor = _float(given.max())
    for original, low, high in _candidates(given, turns, factor):
        smooth = np.clip((original * turns - low) / (high - low), 0.0, 1.0)
        if np.allclose(1 / (smooth + (1 - smooth) / factor), given, rtol=1e-4):
            ends = {"low_freq_factor": low, "high_freq_factor": high}
            scaling = {"factor": factor, "original_max_position_embeddings": original}
            return {"rope_type": "llama3"} | scaling | ends
    raise UserError(
        f"{file.path}: the factors in {FACTORS[0]} are not those of a Llama 3 scaling; "
        "other ones are not supported"
    )


def _candidates(given: np.ndarray, turns: np.ndarray, factor: float) -> list[tuple]:
    """(context length, low, high) that may have made the divisors; low is 1."""
    usual = (8192, 1.0, 4.0)
    between = (given > 1 + 1e-4) & (given < factor * (1 - 1e-4))
    if between.sum() < 2 or factor <= 1:
        return [usual]
    smooth = (1 / given[between] - 1 / factor) / (1 - 1 / factor)
    # L * turns - s * (high - 1) = 1 for each of them.
    known = np.stack([turns[between], -smooth], axis=1)
    (original, span), *_ = np.linalg.lstsq(known, np.ones(len(known)), rcond=None)
    if original < 1 or span <= 0:
        return [usual]
    return [usual, (round(original), 1.0, round(1.0 + float(span), 4))]


def _gemma(file: GgufFile, family: _Family, raw: dict[str, Any]) -> dict[str, Any]:
    """What llama.cpp has in its code for Gemma: the attention scale and the kinds of layers."""
    if raw.get("sliding_window") is None:
        raise UserError(f"{file.path} has no {file.architecture}.attention.sliding_window")
    layers, width = raw["num_hidden_layers"], raw["head_dim"]
    if layers == family.largest:
        width = raw["hidden_size"] // raw["num_attention_heads"]
    group = ["sliding_attention"] * (family.group - 1) + ["full_attention"]
    return {"query_pre_attn_scalar": width, "layer_types": (group * layers)[:layers]}


def _ends(file: GgufFile) -> dict[str, Any]:
    """The ids of the tokens that begin a text, and that end a text or a turn."""
    ids = [file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(i for i in ids if i is not None))
    begin = file.fields.get("tokenizer.ggml.bos_token_id")
    return {"bos_token_id": begin, "eos_token_id": known[0] if len(known) == 1 else known or None}
