"""Decoder layers in head files: names of their tensors, widths of attention heads, rotations.

The rotary base is the one in the heads' own config.json, at the top level or inside
``rope_parameters``. Letters of the tables:

    D  hidden width of the network     V  vocabulary of the target     H  width of an attention head
    A  width of all queries            C  of all keys and values       F  of the feed-forward
    N  number of experts               I  width of an expert           S  of the shared expert
    O  one
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.drafters.files.codec import Rule, Rules, Tensors, linear, scale
from specjax.errors import UserError
from specjax.models import rope_config
from specjax.models.config_values import agreed, value_of
from specjax.models.families import FAMILIES, SHARED
from specjax.models.hf_config import config_from_hf, translated
from specjax.models.transformer_config import Experts, TransformerConfig

# Defaults of the authors' code, for what config.json leaves out. The target's values are never
# taken: most published EAGLE-3 heads were trained with the base 10000 on targets with another.
THETA, EPS = 10000.0, 1e-6
# The context of the models whose rotary frequencies a file scales without their own number.
POSITIONS = 2048


# Module of a layer here -> its dimensions: of a kernel, or the letter of a scale.
DIMS = {
    "attention_norm": "D",
    **{"attention.q": "D A", "attention.k": "D C", "attention.v": "D C", "attention.o": "A D"},
    **{"attention.q_norm": "H", "attention.k_norm": "H", "mlp_norm": "D"},
    **{"mlp.gate": "D F", "mlp.up": "D F", "mlp.down": "F D"},
}
# Module -> its name in files of Llama.
NAMES = {module: FAMILIES["llama"].names[module] for module in DIMS}
WITHOUT_NORM = {module: name for module, name in NAMES.items() if module != "attention_norm"}
# Key of config.json -> field of ``Experts``.
_EXPERTS = {
    "num_experts": "experts",
    "num_experts_per_tok": "chosen",
    "moe_intermediate_size": "intermediate_size",
    "norm_topk_prob": "renormalise",
    SHARED: "shared_size",
}
PARTS = {"attention.q_norm": "qk_norm", "attention.k_norm": "qk_norm"}
_BIASES: dict[str, str] = dict.fromkeys(("attention.q", "attention.k", "attention.v"), "biases")
_BIASES["attention.o"] = "output_bias"


def decoder_layer(
    name: str,
    place: str,
    names: Mapping[str, str] = NAMES,
    dims: Mapping[str, str] = DIMS,
    parts: Mapping[str, str] = PARTS,
    biases: Mapping[str, str] = _BIASES,
) -> Rules:
    """The tensors of a decoder layer; ``name`` and ``place`` are what theirs begin with.

    The modules are those of ``names``. ``parts`` has the optional ones, ``biases`` those that may
    have a bias: module -> part of a ``Rule``.
    """
    rules: Rules = ()
    for module, stored in names.items():
        rule = linear if " " in dims[module] else scale
        own = biases.get(module), parts.get(module, "")
        rules += rule(name + stored, place + module, dims[module], *own)
    return rules


def gate_and_experts(name: str, place: str) -> Rules:
    """What layers of Qwen3-Next have beside those of Llama; arguments as in ``decoder_layer``.

    The gate after the attention, which files have inside of the queries (``split_gates``), and a
    router, experts, and one that computes every token in the place of the feed-forward part.
    """
    moe = {"router": ("gate", "D N"), "shared_gate": ("shared_expert_gate", "D O")}
    experts, gate = "experts", (f"{name}self_attn.gate_proj", f"{place}attention.gate", "D A")
    rules = linear(*gate, "biases", "gated")
    for part in ("gate", "up", "down"):
        dims = "I D" if part == "down" else "D I"
        stored = f"{name}mlp.experts.{{j}}.{part}_proj.weight"
        rules += (Rule(stored, f"{place}mlp.{part}[{{j}}]", dims, True, experts),)
        moe[f"shared.{part}"] = f"shared_expert.{part}_proj", dims.replace("I", "S")
    for module, (stored, dims) in moe.items():
        rules += linear(f"{name}mlp.{stored}", f"{place}mlp.{module}", dims, parts=experts)
    return rules


def split_gates(where: object, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The tensors, with the gate of each head under a name of its own: gate_proj.

    Files have the queries of a head, then its gate. Raises UserError.
    """
    heads, result = value_of(config, "num_attention_heads", int, None, where), dict(tensors)

    def half(read: Callable[[], np.ndarray], index: int) -> np.ndarray:
        whole = read()
        if whole.ndim == 0 or len(whole) % (2 * heads):
            raise UserError(
                f"{where}: q_proj is {list(whole.shape)}, which cannot be split into the queries "
                f"and the gates of {heads} heads; correct num_attention_heads"
            )
        by_head = whole.reshape(heads, 2, -1, *whole.shape[1:])
        return by_head[:, index].reshape(-1, *whole.shape[1:])

    for name in [name for name in tensors if ".q_proj." in name]:
        for index, part in enumerate((".q_proj.", ".gate_proj.")):
            own = name.replace(".q_proj.", part)
            result[own] = functools.partial(half, tensors[name], index)
    return result


def join_gates(leaves: Mapping[tuple, Any], head_dim: int) -> dict[tuple, Any]:
    """The leaves with the gate of each head after its queries: the inverse of ``split_gates``."""
    result = dict(leaves)
    for path in [path for path in leaves if path[-3:-1] == ("attention", "gate")]:
        queries, gate = (*path[:-2], "q", path[-1]), result.pop(path)
        parts = [x.reshape(*x.shape[:-1], -1, head_dim) for x in (leaves[queries], gate)]
        own = np if isinstance(gate, np.ndarray) else jnp
        result[queries] = own.stack(parts, -2).reshape(*gate.shape[:-1], -1)
    return result


def plain_names(where: object, kind: str, tensors: Tensors) -> Tensors:
    """The tensors without buffers and without "model.", which some programs put before most names.

    Raises UserError for the files of a language model.
    """
    if _is_whole_model(tensors):
        raise UserError(
            f"{where} is a whole model, not {kind} heads; give a directory of {kind} heads that "
            "were trained for such a model"
        )
    kept = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
    named = {name.removeprefix("model."): tensors[name] for name in kept}
    if len(named) < len(kept):
        raise UserError(f'{where} has tensors with and without "model." in front; copy it again')
    return named


def is_eagle3(names: Collection[str]) -> bool:
    """Whether these are the names of an EAGLE-3 network, not of an EAGLE-1 network."""
    return any(name.endswith(".hidden_norm.weight") for name in names)


def _is_whole_model(names: Collection[str]) -> bool:
    """Whether these are the names of a language model: a head has fc, or no embedding and norm."""
    own = {re.sub(r"^(model|transformer|gpt_neox)\.", "", name) for name in names}
    first = "layers.0.self_attn.o_proj.weight"
    whole = {"embed_tokens.weight", "norm.weight", first} <= own
    gpt2 = {"wte.weight", "wpe.weight", "ln_f.weight"} <= own
    neox = {"embed_in.weight", "final_layer_norm.weight"} <= own
    return (whole or gpt2 or neox) and "fc.weight" not in own and not is_eagle3(own)


def add_output_biases(leaves: dict[tuple, Any]) -> None:
    """Adds zeros for the attention's output bias where q, k and v have biases (Qwen2)."""
    for path in [path for path in leaves if path[-2:] == ("q", "bias")]:
        kernel = leaves[(*path[:-2], "o", "kernel")]
        leaves.setdefault((*path[:-2], "o", "bias"), np.zeros(kernel.shape[1], kernel.dtype))


def speculators_config(method: str, tokens: int, target: str | None) -> dict[str, Any]:
    """The key by which vLLM recognises the layout of the speculators library."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": tokens}
    greedy |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "algorithm": method,
        "proposal_methods": [greedy],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": target, "architectures": []},
    }


def facts(where: object, layer: Mapping[str, Any], leaves: Mapping[tuple, Any]) -> dict[str, Any]:
    """What the tensors and config.json give of the decoder layers, under the keys of config.json.

    ``leaves`` maps the paths of the parameters to arrays; ``layer`` has the keys of the decoder
    layers. Raises UserError.
    """
    attention, mlp = ("layers", "0", "attention"), ("layers", "0", "mlp")
    queries, keys = (leaves[(*attention, part, "kernel")].shape[1] for part in ("q", "k"))
    norm = leaves.get((*attention, "q_norm", "scale"))
    width, inner = widths_of(leaves)
    gated, routed = (
        (*path, "kernel") in leaves for path in ((*attention, "gate"), (*mlp, "router"))
    )
    head_dim = head_dim_of(where, layer, norm, queries, keys)
    (theta, scaling), share = rope_of(where, layer), rotated_of(where, layer)
    more: dict[str, Any] = {"attn_output_gate": True} if gated else {}
    more |= {"partial_rotary_factor": share} if share != 1 else {}
    if routed:
        chosen = value_of(layer, "num_experts_per_tok", int, None, where)
        more |= {"num_experts": leaves[(*mlp, "up")].shape[0], "num_experts_per_tok": chosen}
        more["norm_topk_prob"] = value_of(layer, "norm_topk_prob", bool, True, where)
        more["moe_intermediate_size"] = inner
        more[SHARED] = leaves[(*mlp, "shared", "up", "kernel")].shape[1]
        inner = value_of(layer, "intermediate_size", int, inner, where)
    positions = value_of(layer, "max_position_embeddings", int, POSITIONS, where)
    return {
        "hidden_size": width,
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "num_hidden_layers": len({path[1] for path in leaves if path[0] == "layers"}),
        "max_position_embeddings": positions,
        "rms_norm_eps": value_of(layer, "rms_norm_eps", float, EPS, where),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": (*attention, "q", "bias") in leaves,
        "qk_norm": norm is not None,
        "hidden_act": layer.get("hidden_act"),
    } | more


def widths_of(leaves: Mapping[tuple, Any]) -> tuple[int, int]:
    """(D, F) of layer 0, or (D, I) if it has experts."""
    up = ("layers", "0", "mlp", "up")
    return leaves[up].shape[1:] if up in leaves else leaves[(*up, "kernel")].shape


def decoder(where: object, config: Mapping[str, Any]) -> TransformerConfig:
    """The shape of the decoder layers that ``Head.config`` describes.

    ``where`` is named in messages. Raises UserError for layers that cannot be computed.
    """
    own = ("model_type", "bias", "qk_norm", "rope_parameters", "attn_output_gate", *_EXPERTS)
    raw = {key: value for key, value in config.items() if key not in own}
    raw |= {"architectures": ["LlamaForCausalLM"], "vocab_size": config.get("vocab_size") or 1}
    raw |= {"tie_word_embeddings": False, "mlp_bias": False, "eos_token_id": None}
    shape = translated(where, raw, config_from_hf)
    if shape.activation != "silu":
        given = config["hidden_act"]
        raise UserError(f"{where}: hidden_act {given!r} is not supported; supported: silu")
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        raise UserError(
            f"{where}: rope type {scaling.kind!r} is not supported; supported: default, llama3"
        )
    experts = None
    if "num_experts" in config:
        sizes = {field: config[key] for key, field in _EXPERTS.items()}
        experts = Experts(**sizes, layers=tuple(range(shape.num_layers)))
    return dataclasses.replace(
        shape,
        qk_norm=bool(config.get("qk_norm")),
        bos_token_id=None,
        attention_gate=bool(config.get("attn_output_gate")),
        experts=experts,
    )


def head_dim_of(where: object, layer: Mapping[str, Any], norm: Any, queries: int, keys: int) -> int:
    """The width of an attention head: of its norm, or from config.json.

    ``queries`` and ``keys`` are the widths of all heads. Raises UserError.
    """
    if norm is not None:
        head_dim = np.size(norm)
    elif layer.get("head_dim") is not None:
        head_dim = value_of(layer, "head_dim", int, None, where)
    elif layer.get("num_attention_heads") is not None:
        heads = value_of(layer, "num_attention_heads", int, None, where)
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
    given = translated(where, dict(layer), rope_config.settings)
    own = ("rope_theta", "partial_rotary_factor")
    thetas = {"rope_theta": layer.get("rope_theta"), "that of the scaling": given.get("rope_theta")}
    agreed(where, thetas)
    kind = given.get("rope_type", given.get("type", "default"))
    scaling = {key: value for key, value in given.items() if key not in own}
    theta = value_of(given, "rope_theta", float, THETA, where)
    return theta, None if kind == "default" else scaling


def rotated_of(where: object, layer: Mapping[str, Any]) -> float:
    """The share of each head that is rotated; ``layer`` as in ``rope_of``. Raises UserError."""
    given = translated(where, dict(layer), rope_config.settings)
    return value_of(given, "partial_rotary_factor", float, 1.0, where)


def check_rotated(where: object, layer: Mapping[str, Any]) -> None:
    """Raises UserError unless heads are rotated whole."""
    if (share := rotated_of(where, layer)) != 1:
        raise UserError(f"{where}: partial_rotary_factor {share} is not supported; supported: 1")
