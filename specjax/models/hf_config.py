"""Translates config.json to and from ``TransformerConfig``.

``families`` has the keys of each family and ``layer_keys`` those that differ by layer. A setting
that the decoder does not support raises a UserError that names the key.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.models import layer_keys, t5_config
from specjax.models.config_values import value_of
from specjax.models.families import ACTIVATIONS, FAMILIES, Family, shape
from specjax.models.t5_config import T5Config
from specjax.models.transformer_config import TransformerConfig

_KINDS = {
    **dict.fromkeys(("tie_embeddings", "attention_bias", "mlp_bias", "parallel"), bool),
    **dict.fromkeys(("norm_eps", "query_scalar", "attention_softcap", "final_softcap"), float),
}
# null in config.json means None, not the default.
_NULLABLE = ("attention_softcap", "final_softcap")
# Keys that change what a decoder computes. A family that does not read such a key refuses values
# other than null, false and 0.
_CHANGING = {
    *("attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "lm_head_bias", "qk_norm"),
    *("use_qk_norm", "qk_layernorm", "sliding_window", "use_sliding_window", "clip_qkv", "alibi"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("attention_chunk_size", "attention_multiplier", "attention_sinks", "rope_interleaved"),
    *("use_parallel_residual", "parallel_attn", "use_bidirectional_attention"),
    *("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank"),
    *("num_kv_shared_layers", "add_cross_attention"),
}
# The same for factors, of which 1 has no effect either.
_FACTORS = {
    *("partial_rotary_factor", "rotary_pct", "logit_scale", "logits_scaling"),
    *("embedding_multiplier", "residual_multiplier"),
}
# A larger number is a mistake in the file, and its layers would fill the memory.
_MOST_LAYERS = 10_000
# Other names of the same switches.
_SPELLINGS = {
    **dict.fromkeys(("use_qk_norm", "qk_layernorm"), "qk_norm"),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias"), "attention_bias"),
}
_ROTARY = ("partial_rotary_factor", "rotary_pct")
# Names of models that also read images; "text_config" describes their text model.
_NESTED = {"gemma3": "Gemma3ForConditionalGeneration"}


def read_json(path: Path) -> dict:
    """The JSON object in a file of a model directory.

    Raises UserError if the file is missing or holds no JSON object, and OSError.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} has no {path.name}; give a Hugging Face style model directory"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UserError(f"{path} is not valid JSON ({error}); copy it again") from None


def config_from_hf(raw: dict) -> TransformerConfig:
    """The decoder that a config.json describes, with the keys of transformers 4 or 5.

    Of a Gemma 3 with a vision tower, the text model; of T5 a ``T5Config``. Raises UserError:
    unsupported architecture or setting, missing or wrong values.
    """
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(
            f"quantization_config {method!r} is not supported; give the model with weights in "
            "float32, bfloat16 or float16, or a .gguf file"
        )
    if t5_config.is_t5(raw):
        return t5_config.read(raw, eos_ids(raw))
    raw = _text_model(raw)
    name = _family(raw)
    family = FAMILIES[name]
    for key, allowed in family.only.items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise UserError(
                f"{key} {raw[key]!r} is not supported; supported: {', '.join(map(str, allowed))}"
            )
    _check_unread(raw, family)
    values = _sizes(raw, family) | _values(raw, family)
    values |= layer_keys.read(raw, family, values)
    return shape(name, bos_token_id=bos_id(raw), eos_token_id=eos_ids(raw), **values)


def _sizes(raw: dict, family: Family) -> dict[str, Any]:
    """The fields that follow from the hidden size and the heads where the file has no key."""
    keys, defaults = family.keys, family.defaults
    hidden, heads = (
        value_of(raw, keys[field], int, defaults.get(field))
        for field in ("hidden_size", "num_heads")
    )
    layers = value_of(raw, keys["num_layers"], int, defaults.get("num_layers"))
    if layers > _MOST_LAYERS:
        raise UserError(
            f"{keys['num_layers']} is {layers}; decoders with at most {_MOST_LAYERS} are built"
        )
    sizes = {"intermediate_size": 4 * hidden, "num_kv_heads": heads}
    given = raw.get(keys.get("head_dim", ""), defaults.get("head_dim"))
    if given is None and hidden % heads:
        raise UserError(
            f"the hidden size {hidden} is not a multiple of the {heads} attention heads"
        )
    sizes["head_dim"] = hidden // heads
    for field in ("num_kv_heads", "head_dim"):
        if field in keys:
            default = sizes[field] if keys[field] in raw else defaults.get(field, sizes[field])
            sizes[field] = value_of(raw, keys[field], int, default)
    if heads % sizes["num_kv_heads"]:
        raise UserError(
            f"{heads} attention heads are not a multiple of {sizes['num_kv_heads']} key/value heads"
        )
    if "n_inner" not in keys.values():
        del sizes["intermediate_size"]
    return sizes


def _values(raw: dict, family: Family) -> dict[str, Any]:
    """The other fields with one value for all layers."""
    values: dict[str, Any] = {}
    fallback = {"tie_embeddings": True, "norm_eps": 1e-5}
    for field, key in family.keys.items():
        default = family.defaults.get(field, fallback.get(field))
        if field in ("num_kv_heads", "head_dim"):
            continue
        if field == "activation":
            values[field] = _activation(key, raw.get(key) or default or "silu")
        elif field == "intermediate_size" and key == "n_inner" and raw.get(key) is None:
            continue
        elif field in _NULLABLE and raw.get(key, default) is None:
            values[field] = None
        else:
            values[field] = value_of(raw, key, _KINDS.get(field, int), default)
    return values


def _activation(key: str, name: Any) -> str:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(f"{key} {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _check_unread(raw: dict, family: Family) -> None:
    """Raises UserError for a key that changes the computation and that the family does not read."""
    own = {*family.keys.values(), *family.only}
    own |= {"sliding_window"} if family.windows != "none" else set()
    own |= {"use_sliding_window"} if family.windows in ("after", "unrotated") else set()
    own |= set(_ROTARY) if family.switches.get("positions") != "learned" else set()
    if "experts" in family.names:
        own |= {"num_experts", "num_local_experts", "use_sliding_window"}
    for key in sorted((_CHANGING | _FACTORS) - own):
        value = raw.get(key)
        if value in (None, False, 0) or (key in _FACTORS and value == 1):
            continue
        # A switch that every model of the family has.
        if value is True and family.switches.get(_SPELLINGS.get(key, key)) is True:
            continue
        raise UserError(f"{key} {value!r} is not supported for {family.architecture}")
    kinds = raw.get("layer_types") or []
    if family.windows == "none" and not isinstance(kinds, list):
        raise UserError(f"layer_types is {kinds!r}; it must be a list of names")
    if family.windows == "none" and any(kind != "full_attention" for kind in kinds):
        raise UserError(f"layer_types {kinds!r} is not supported for {family.architecture}")


def bos_id(raw: dict) -> int | None:
    value = raw.get("bos_token_id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"bos_token_id is {value!r}; it must be a token id")
    return value


def eos_ids(raw: dict) -> tuple[int, ...]:
    """The end-of-sequence ids of a config.json or generation_config.json, each once.

    Raises UserError for a value that is neither an id nor a list of ids.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in ids):
        raise UserError(f"eos_token_id is {value!r}; it must be a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def config_to_hf(config: TransformerConfig) -> dict:
    """The config.json of a decoder.

    Raises UserError for a shape that the architecture cannot express (GPT-2 without biases).
    """
    if isinstance(config, T5Config):
        return t5_config.write(config)
    if config.family not in FAMILIES:
        raise UserError(f"there is no family {config.family!r}; there are: {', '.join(FAMILIES)}")
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": config.family}
    raw |= {key: allowed[0] for key, allowed in family.only.items()}
    for field, key in family.keys.items():
        value = getattr(config, field)
        raw[key] = _written_activation(value, family) if field == "activation" else value
    eos = config.eos_token_id
    raw |= {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
        # For some families the default of transformers is an id beyond a small vocabulary.
        "pad_token_id": None,
    }
    raw |= layer_keys.write(config, family)
    back = config_from_hf(raw)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(back, field.name):
            raise UserError(f"a {family.architecture} cannot have {field.name} {value!r}")
    return raw


def _written_activation(value: str, family: Family) -> str:
    usual = family.defaults.get("activation", "silu")
    names = [usual, *(name for name in ACTIVATIONS if ACTIVATIONS[name] == value)]
    return next((name for name in names if ACTIVATIONS[name] == value), value)


def _text_model(raw: dict) -> dict:
    """The configuration of the text model in the file of a model that also reads images."""
    nested, names = raw.get("text_config"), raw.get("architectures")
    kinds = [raw.get("model_type"), *(names if isinstance(names, list) else [])]
    images = any(each in kinds for each in (*_NESTED, *_NESTED.values()))
    if not isinstance(nested, dict) or not images:
        return raw
    kept = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    outer = {key: raw[key] for key in kept if raw.get(key) is not None and nested.get(key) is None}
    return nested | outer | {"architectures": [FAMILIES["gemma3_text"].architecture]}


def _family(raw: dict) -> str:
    """The family of a config.json, from its architectures or its model_type."""
    kind, given = raw.get("model_type"), raw.get("architectures") or []
    for value, whole in ((kind, [kind]), (given, given)):
        if not isinstance(whole, list) or any(not isinstance(each, str) for each in whole if each):
            raise UserError(
                f"model_type and architectures must be a name and a list of names, not {value!r}"
            )
    known = {family.architecture: name for name, family in FAMILIES.items()}
    if not raw.get("architectures") and kind in FAMILIES:
        return kind
    names = raw.get("architectures") or ([kind] if kind else [])
    if not names:
        raise UserError(
            "not the configuration of a model (no architectures, no model_type); "
            "give a model directory or a trained run's workdir"
        )
    family = next((known[name] for name in names if name in known), None)
    if family is None:
        every = ", ".join([*known, t5_config.ARCHITECTURE])
        raise UserError(f"architecture {names[0]} is not supported; supported: {every}")
    return family
