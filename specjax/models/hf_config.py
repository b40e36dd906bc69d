"""Translates config.json to and from ``TransformerConfig``.

A setting that the decoder does not support raises a UserError that names the key.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.models.transformer_config import RopeScaling, TransformerConfig

FAMILIES = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}


def table(text: str) -> dict[str, dict[str, str]]:
    """Parses rows of names: family -> name in specjax -> name in the checkpoint ("-" = none)."""
    rows = [line.split() for line in text.strip().splitlines()]
    return {
        family: {row[0]: row[i] for row in rows if row[i] != "-"}
        for i, family in enumerate(FAMILIES, 1)
    }


_FIELDS = table("""
    vocab_size         vocab_size               vocab_size
    hidden_size        hidden_size              n_embd
    num_heads          num_attention_heads      n_head
    num_layers         num_hidden_layers        n_layer
    intermediate_size  intermediate_size        n_inner
    num_kv_heads       num_key_value_heads      -
    head_dim           head_dim                 -
    max_positions      max_position_embeddings  n_positions
    norm_eps           rms_norm_eps             layer_norm_epsilon
    tie_embeddings     tie_word_embeddings      tie_word_embeddings
    attention_bias     attention_bias           -
    mlp_bias           mlp_bias                 -
""")
# The decoder always computes these; a checkpoint with another value is refused.
_ONLY: dict[str, dict[str, list]] = {
    "llama": {"hidden_act": ["silu"]},
    "gpt2": {
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "reorder_and_upcast_attn": [False],
    },
}
_FLAGS = {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True}
# The defaults of transformers, for keys that config.json does not have.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_positions": 2048, "norm_eps": 1e-6} | dict.fromkeys(_FLAGS, False),
    "gpt2": {"max_positions": 1024, "norm_eps": 1e-5} | _FLAGS,
}


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

    Raises UserError: unsupported architecture or setting, missing or wrong values.
    """
    family = _family(raw)
    for key, allowed in _ONLY[family].items():
        if raw.get(key) is not None and raw[key] not in allowed:
            raise UserError(
                f"{key} {raw[key]!r} is not supported; supported: {', '.join(map(str, allowed))}"
            )
    keys, gpt2 = _FIELDS[family], family == "gpt2"
    hidden, heads = value_of(raw, keys["hidden_size"]), value_of(raw, keys["num_heads"])
    if hidden % heads and (gpt2 or raw.get("head_dim") is None):
        raise UserError(
            f"the hidden size {hidden} is not a multiple of the {heads} attention heads"
        )
    values: dict[str, Any] = {"num_kv_heads": heads, "head_dim": hidden // heads}
    values |= _DEFAULTS[family]
    values |= {"intermediate_size": 4 * hidden} if gpt2 else {}
    for field, key in keys.items():
        kind = type(values[field]) if field in _DEFAULTS[family] else int
        values[field] = value_of(raw, key, kind, values.get(field))
    if heads % values["num_kv_heads"]:
        raise UserError(
            f"{heads} attention heads are not a multiple of "
            f"{values['num_kv_heads']} key/value heads"
        )
    if not gpt2:
        if values["head_dim"] % 2:
            raise UserError(
                f"head_dim {values['head_dim']} is odd; rotary positions need an even one"
            )
        values["rope_theta"], values["rope_scaling"] = rope(raw, values["max_positions"])
    return TransformerConfig(
        family=family, bos_token_id=raw.get("bos_token_id"), eos_token_id=eos_ids(raw), **values
    )


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
    raw: dict[str, Any] = {"architectures": [FAMILIES[config.family]], "model_type": config.family}
    raw |= {key: allowed[0] for key, allowed in _ONLY[config.family].items()}
    raw |= {key: getattr(config, field) for field, key in _FIELDS[config.family].items()}
    eos = config.eos_token_id
    raw |= {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
    }
    if config.family == "llama":
        # The keys of transformers 4, which transformers 5 also reads.
        raw |= {"rope_theta": config.rope_theta, "rope_scaling": None}
        if config.rope_scaling is not None:
            scaling = dataclasses.asdict(config.rope_scaling)
            scaling["original_max_position_embeddings"] = scaling.pop("original_max_positions")
            raw["rope_scaling"] = {"rope_type": "llama3", **scaling}
    back = config_from_hf(raw)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(back, field.name):
            raise UserError(f"a {FAMILIES[config.family]} cannot have {field.name} {value!r}")
    return raw


def _family(raw: dict) -> str:
    """The family of a config.json, from its architectures or its model_type."""
    kind = raw.get("model_type")
    names = raw.get("architectures") or ([FAMILIES.get(kind, kind)] if kind else [])
    if not names:
        raise UserError(
            "not the configuration of a model (no architectures, no model_type); "
            "give a model directory or a trained run's workdir"
        )
    family = next((family for family, name in FAMILIES.items() if name in names), None)
    if family is None:
        raise UserError(
            f"architecture {names[0]} is not supported; supported: {', '.join(FAMILIES.values())}"
        )
    return family


def value_of(raw: dict, key: str, kind: type = int, default: Any = None) -> Any:
    """A number above 0, or a boolean if ``kind`` is bool, from config.json."""
    value = default if raw.get(key) is None else raw[key]
    valid = isinstance(value, (int, kind)) and isinstance(value, bool) == (kind is bool)
    if not valid or (kind is not bool and value <= 0):
        expected = f"a positive {'integer' if kind is int else 'number'}"
        raise UserError(
            f"{key} is {'missing' if value is None else repr(value)}; "
            f"it must be {'true or false' if kind is bool else expected}"
        )
    return value


def rope(raw: dict, positions: int) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of the rotary positions in a config.json. Raises UserError."""
    loose = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    given = loose | (raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = value_of(given, "rope_theta", float, 10000.0)
    if value_of(given, "partial_rotary_factor", float, 1) != 1:
        raise UserError(
            f"partial_rotary_factor {given['partial_rotary_factor']} is not supported; supported: 1"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rope type {kind!r} is not supported; supported: default, llama3")
    factor, low, high = (
        value_of(given, key, float) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    original = value_of(given, "original_max_position_embeddings", int, positions)
    return theta, RopeScaling(factor, low, high, original)
