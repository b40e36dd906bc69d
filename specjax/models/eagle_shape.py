"""The shape of the decoder layers of EAGLE heads: widths of attention heads, rotary positions.

The rotary base is the one in the heads' own config.json, at the top level or inside
``rope_parameters``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models.hf_config import config_from_hf, value_of
from specjax.models.transformer_config import TransformerConfig

# Defaults of the authors' code, for what config.json leaves out. The target's values are never
# taken: most published EAGLE-3 heads were trained with the base 10000 on targets with another.
THETA, EPS = 10000.0, 1e-6
# The context of the models whose rotary frequencies a file scales without their own number.
POSITIONS = 2048


def facts(where: object, layer: Mapping[str, Any], leaves: Mapping[tuple, Any]) -> dict[str, Any]:
    """What the tensors and config.json give of the decoder layers, under the keys of config.json.

    ``leaves`` maps the paths of the parameters to arrays; ``layer`` has the keys of the decoder
    layers. Raises UserError.
    """
    attention = ("layers", "0", "attention")
    queries, keys = (leaves[(*attention, part, "kernel")].shape[1] for part in ("q", "k"))
    norm = leaves.get((*attention, "q_norm", "scale"))
    head_dim = head_dim_of(where, layer, norm, queries, keys)
    theta, scaling = rope_of(where, layer)
    return {
        "hidden_size": leaves["fc", "kernel"].shape[1],
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "intermediate_size": leaves["layers", "0", "mlp", "up", "kernel"].shape[1],
        "num_hidden_layers": len({path[1] for path in leaves if path[0] == "layers"}),
        "max_position_embeddings": checked(where, layer, "max_position_embeddings", int, POSITIONS),
        "rms_norm_eps": checked(where, layer, "rms_norm_eps", float, EPS),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": (*attention, "q", "bias") in leaves,
        "qk_norm": norm is not None,
        "hidden_act": layer.get("hidden_act"),
    }


def decoder(where: object, config: Mapping[str, Any]) -> TransformerConfig:
    """The shape of the decoder layers that ``Head.config`` describes.

    ``where`` is named in messages. Raises UserError for layers that cannot be computed.
    """
    own = ("model_type", "bias", "qk_norm")
    raw = {key: value for key, value in config.items() if key not in own}
    raw |= {"architectures": ["LlamaForCausalLM"], "vocab_size": config.get("vocab_size") or 1}
    raw |= {"tie_word_embeddings": False, "mlp_bias": False, "eos_token_id": None}
    raw.pop("rope_parameters", None)
    try:
        shape = config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if shape.activation != "silu":
        given = config["hidden_act"]
        raise UserError(f"{where}: hidden_act {given!r} is not supported; supported: silu")
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        raise UserError(
            f"{where}: rope type {scaling.kind!r} is not supported; supported: default, llama3"
        )
    return dataclasses.replace(shape, qk_norm=bool(config.get("qk_norm")), bos_token_id=None)


def head_dim_of(where: object, layer: Mapping[str, Any], norm: Any, queries: int, keys: int) -> int:
    """The width of an attention head: of its norm, or from config.json.

    ``queries`` and ``keys`` are the widths of all heads. Raises UserError.
    """
    if norm is not None:
        head_dim = np.size(norm)
    elif layer.get("head_dim") is not None:
        head_dim = checked(where, layer, "head_dim", int, None)
    elif layer.get("num_attention_heads") is not None:
        heads = checked(where, layer, "num_attention_heads", int, None)
        head_dim = queries // heads if queries % heads == 0 else 0
    else:
        raise UserError(
            f"{where}: config.json must give num_attention_heads or head_dim; the tensors do not "
            "show the width of an attention head"
        )
    if not head_dim or queries % head_dim or keys % head_dim or queries % keys:
        raise UserError(
            f"{where}: queries of {queries} and keys of {keys} cannot be split into attention "
            "heads of this number or width; correct num_attention_heads or head_dim"
        )
    return head_dim


def rope_of(where: object, layer: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling as in config.json) of the rotary positions, from the heads' own config.

    ``layer`` has the keys of the decoder layers. Raises UserError.
    """
    objects = [layer.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    for each in objects:
        if not isinstance(each, dict):
            raise UserError(f"{where}: rope_scaling is {each!r}; it must be an object or null")
        if any(isinstance(value, dict) for value in each.values()):
            raise UserError(
                f"{where}: rope_parameters has an object per kind of layer ({next(iter(each))}); "
                "supported: one for all layers"
            )
    for key in objects[0].keys() & objects[1].keys():
        if objects[0][key] != objects[1][key]:
            raise UserError(
                f"{where}: rope_parameters.{key} is {objects[0][key]!r} and rope_scaling.{key} is "
                f"{objects[1][key]!r}; they must be equal"
            )
    nested = {**objects[1], **objects[0]}
    given = {
        checked(where, x, "rope_theta", float, THETA) for x in (layer, nested) if "rope_theta" in x
    }
    if len(given) > 1:
        raise UserError(
            f"{where}: rope_theta is {layer['rope_theta']}, and {nested['rope_theta']} in the "
            "object of the scaling; they must be equal"
        )
    for part in (layer, nested):
        if checked(where, part, "partial_rotary_factor", float, 1.0) != 1:
            raise UserError(
                f"{where}: partial_rotary_factor {part['partial_rotary_factor']} is not "
                "supported; supported: 1"
            )
    kind = nested.get("rope_type", nested.get("type", "default"))
    scaling = {key: value for key, value in nested.items() if key != "rope_theta"}
    return next(iter(given), THETA), None if kind == "default" else scaling


def checked(where: object, raw: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """``hf_config.value_of`` with ``where`` in front of the message."""
    try:
        return value_of(dict(raw), key, kind, default)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
