"""Translates config.json to and from ``TransformerConfig``.

``families`` has the keys of each family. Windows, rotary positions and experts may differ by layer.
A setting that the decoder does not support raises a UserError that names the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax import files
from specjax.checks import whole
from specjax.errors import UserError, on_disk
from specjax.models import rope_config, t5_config
from specjax.models.config_values import (
    check_read,
    check_supported,
    names_of,
    token_id,
    value_of,
)
from specjax.models.families import ACTIVATIONS, FAMILIES, INTERVAL, SHARED, Family, shape
from specjax.models.sources import compressed_tensors
from specjax.models.t5_config import T5Config
from specjax.models.transformer_config import Experts, Recurrent, TransformerConfig

_KINDS = {
    **dict.fromkeys(("tie_embeddings", "attention_bias", "mlp_bias", "parallel"), bool),
    **dict.fromkeys(("norm_eps", "query_scalar", "attention_softcap", "final_softcap"), float),
}
# What a missing key means, unless the family has another default.
_DEFAULTS = {"tie_embeddings": True, "norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False}
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
_NESTED = {
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text"),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
}


def read_json(path: Path) -> dict:
    """The JSON object in a file of a model directory.

    Raises UserError if the file is missing, cannot be read or holds no JSON object.
    """
    # It may be a directory of this name.
    with on_disk(f"{path} cannot be read", "give a file of this name"):
        if not path.exists():
            raise UserError(
                f"{path.parent} has no {path.name}; give a Hugging Face style model directory"
            )
        data = path.read_bytes()
    # It may be not JSON, or not UTF-8.
    with on_disk(f"{path} is not valid JSON", "copy it again", ValueError):
        value = files.parsed(data.decode())
        if not isinstance(value, dict):
            raise ValueError("not an object")
    return value


def translated(where: object, raw: Any, translate: Callable[[Any], Any]) -> Any:
    """``translate`` of a JSON object. Raises UserError, which begins with ``where`` it is."""
    try:
        return translate(raw)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def config_from_hf(raw: dict) -> TransformerConfig:
    """The decoder that a config.json describes, with the keys of transformers 4 or 5.

    Of a Gemma 3 with a vision tower, the text model; of T5 a ``T5Config``. Raises UserError:
    unsupported architecture or setting, missing or wrong values.
    """
    compressed_tensors.scheme(raw)
    if t5_config.is_t5(raw):
        return t5_config.read(raw, eos_ids(raw))
    raw = text_model(raw)
    name = _family(raw)
    family = FAMILIES[name]
    raw = _joined(raw) if family.apart else raw
    for key, allowed in family.only.items():
        value = raw.get(key, family.defaults.get(key))
        if value is not None:
            check_supported(key, value, allowed)
    _check_unread(raw, family)
    values = _values(raw, family)
    values |= _read_layers(raw, family, values)
    begin = token_id(raw, "bos_token_id")
    return shape(name, bos_token_id=begin, eos_token_id=eos_ids(raw), **values)


def _values(raw: dict, family: Family) -> dict[str, Any]:
    """The fields with one value for all layers; some follow from others if the file has no key."""
    keys, defaults = family.keys, {**_DEFAULTS, **family.defaults}

    def value(field: str) -> Any:
        return value_of(raw, keys[field], _KINDS.get(field, int), defaults.get(field))

    hidden, heads, layers = (value(field) for field in ("hidden_size", "num_heads", "num_layers"))
    if layers > _MOST_LAYERS:
        raise UserError(
            f"{keys['num_layers']} is {layers}; decoders with at most {_MOST_LAYERS} are built"
        )
    given = raw.get(keys.get("head_dim", ""), defaults.get("head_dim"))
    if given is None and hidden % heads:
        raise UserError(
            f"the hidden size {hidden} is not a multiple of the {heads} attention heads"
        )
    values: dict[str, Any] = {"num_kv_heads": heads, "head_dim": hidden // heads}
    for field in [field for field in values if field in keys]:
        # null in the file means the value that follows, not the default of the family.
        own = values[field] if keys[field] in raw else defaults.get(field, values[field])
        values[field] = value_of(raw, keys[field], int, own)
    if heads % values["num_kv_heads"]:
        raise UserError(
            f"{heads} attention heads are not a multiple of {values['num_kv_heads']} key/value "
            "heads"
        )
    for field, key in keys.items():
        if field == "activation":
            name = raw.get(key) or defaults.get(field) or "silu"
            check_supported(key, name, ACTIVATIONS)
            values[field] = ACTIVATIONS[name]
        elif key == "n_inner" and raw.get(key) is None:
            values[field] = 4 * hidden
        elif field in _NULLABLE and raw.get(key, defaults.get(field)) is None:
            values[field] = None
        elif field not in values:
            values[field] = value(field)
    return values


def _check_unread(raw: dict, family: Family) -> None:
    """Raises UserError for a key that changes the computation and that the family does not read."""
    own = {*family.keys.values(), *family.only}
    own |= {"sliding_window"} if family.windows != "none" else set()
    own |= {"use_sliding_window"} if family.windows in ("after", "unrotated") else set()
    own |= set(_ROTARY) if family.switches.get("positions") is None else set()
    if "experts" in family.names:
        own |= {"num_experts", "num_local_experts", "use_sliding_window"}
    if family.apart:  # files state the number of experts without layers that have them
        own |= {"n_routed_experts", "num_local_experts"}
    for key in sorted((_CHANGING | _FACTORS) - own):
        value = raw.get(key)
        if value in (None, False, 0) or (key in _FACTORS and value == 1):
            continue
        # A switch that every model of the family has.
        if value is True and family.switches.get(_SPELLINGS.get(key, key)) is True:
            continue
        raise UserError(f"{key} {value!r} is not supported for {family.architecture}")
    kinds = names_of("", raw, "layer_types") if family.windows == "none" else []
    if not {*kinds} <= {_FULL, _LINEAR if "delta" in family.names else _FULL}:
        raise UserError(f"layer_types {kinds!r} is not supported for {family.architecture}")


def eos_ids(raw: dict) -> tuple[int, ...]:
    """The end-of-sequence ids of a config.json or generation_config.json, each once.

    Raises UserError for a value that is neither an id nor a list of ids.
    """
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or abs(i) >= 2**31 for i in ids):
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
    raw |= _write_layers(config, family)
    check_read(config, config_from_hf(raw), family.architecture)
    return raw


def _written_activation(value: str, family: Family) -> str:
    names = [family.defaults.get("activation", "silu"), *ACTIVATIONS]
    return next((name for name in names if ACTIVATIONS[name] == value), value)


def text_model(raw: dict) -> dict:
    """The configuration of the text model in the file of a model that also reads images."""
    nested, names = raw.get("text_config"), raw.get("architectures")
    kinds = [raw.get("model_type"), *(names if isinstance(names, list) else [])]
    texts = [text for kind, (name, text) in _NESTED.items() if kind in kinds or name in kinds]
    if not isinstance(nested, dict) or not texts:
        return raw
    kept = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    outer = {key: raw[key] for key in kept if raw.get(key) is not None and nested.get(key) is None}
    return nested | outer | {"architectures": [FAMILIES[texts[0]].architecture]}


# Other architectures that are those of a family; MiMo has prediction modules beside its layers.
_SAME = {"MiMoForCausalLM": "qwen2"}


def _family(raw: dict) -> str:
    """The family of a config.json, from its architectures or its model_type."""
    kind, given = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(given, list) or not all(isinstance(x, str | None) for x in (kind, *given)):
        wrong = given if isinstance(kind, str | None) else kind
        raise UserError(
            f"model_type and architectures must be a name and a list of names, not {wrong!r}"
        )
    known = {family.architecture: name for name, family in FAMILIES.items()} | _SAME
    if not given and kind in FAMILIES:
        return kind
    names = given or ([kind] if kind else [])
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


_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def _read_layers(raw: dict, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` that differ by layer, and the rotary positions.

    ``values`` are the fields with one value. Raises UserError.
    """
    layers = values["num_layers"]
    result: dict[str, Any] = {"unrotated": _unrotated(raw, family, layers)}
    result["windows"] = _windows(raw, family, layers, result["unrotated"])
    if "experts" in family.names:
        result["experts"] = _experts(raw, family, layers)
    if "delta" in family.names:
        result["recurrent"] = _recurrent(raw, layers)
    if "mamba" in family.names:
        result["without_mlp"] = tuple(i for i, (_, feeds) in enumerate(raw[_LAYERS]) if not feeds)
        result["recurrent"] = _mamba(raw)
    if family.switches.get("positions") is not None:
        return result
    head_dim, positions, keys = values["head_dim"], values["max_positions"], dict(family.rope)
    by_kind = "local_theta" in keys
    full = rope_config.read(raw, head_dim, positions, _FULL if by_kind else None, **keys)
    result |= {
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "rotary_dim": None if full.dim == head_dim else full.dim,
    }
    if by_kind and result["windows"]:
        result["local_rope"] = rope_config.read(raw, head_dim, positions, _SLIDING, **keys)
    return result


def _write_layers(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json for ``_read_layers``."""
    raw, layers = _write_windows(config, family), range(config.num_layers)
    if family.windows == "unrotated":
        raw["no_rope_layers"] = [int(i not in config.unrotated) for i in layers]
    if "delta" in family.names:
        raw["layer_types"] = [_LINEAR if config.is_recurrent(i) else _FULL for i in layers]
        if config.recurrent is not None:
            raw |= {key: getattr(config.recurrent, own) for own, (key, _) in _RECURRENT.items()}
    if "mamba" in family.names:
        raw |= _write_mamba(config)
    own = config.experts
    if own is None:
        raw |= {"num_experts": 0} if "experts" in family.names else {}
    else:
        raw |= {
            "num_experts": own.experts,
            "num_experts_per_tok": own.chosen,
            "moe_intermediate_size": own.intermediate_size,
            "norm_topk_prob": own.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in layers if i not in own.layers],
        }
        raw |= {} if own.shared_size is None else {SHARED: own.shared_size}
    if config.positions != "rotary":
        return raw
    full = config.rope_of_full()
    if "local_theta" in family.rope:
        local = config.local_rope or full
        return raw | rope_config.write({_FULL: full, _SLIDING: local}, config.head_dim)
    rotary = rope_config.write(full, config.head_dim)
    if "delta" in family.names:
        # The default of transformers is a part of each head.
        rotary.setdefault("partial_rotary_factor", 1.0)
    elif "partial" in family.rope:
        # GPT-NeoX's own names; its default is a part of each head.
        rotary["rotary_pct"] = rotary.pop("partial_rotary_factor", 1.0)
        rotary["rotary_emb_base"] = rotary.pop("rope_theta")
    return raw | rotary


def _windows(
    raw: dict, family: Family, layers: int, unrotated: tuple[int, ...]
) -> tuple[int | None, ...]:
    if family.windows == "none":
        return ()
    size = raw.get("sliding_window", family.defaults.get("sliding_window"))
    optional = family.windows in ("after", "unrotated") or "experts" in family.names
    if optional and not value_of(raw, "use_sliding_window", bool, False):
        size = None
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = _default_kinds(raw, family, layers, unrotated) if size is not None else []
    elif not isinstance(kinds, list) or len(kinds) != layers:
        raise UserError(f"layer_types must be a list of {layers} names, one per layer")
    wrong = next((kind for kind in kinds if kind not in (_FULL, _SLIDING)), None)
    if wrong is not None:
        raise UserError(
            f"layer_types has {wrong!r}, which is not supported; supported: {_FULL}, {_SLIDING}"
        )
    if _SLIDING not in kinds:
        return ()
    if size is None:
        raise UserError(
            f"layer_types has {_SLIDING}, and there is no window; "
            "give sliding_window, and use_sliding_window true where the architecture has this key"
        )
    if family.windows == "all" and _FULL in kinds:
        raise UserError(
            f"layer_types has {_FULL} and {_SLIDING}; the layers of a {family.architecture} are of "
            "one kind"
        )
    size = value_of({"sliding_window": size}, "sliding_window")
    return tuple(size if kind == _SLIDING else None for kind in kinds)


def _default_kinds(raw: dict, family: Family, layers: int, unrotated: tuple[int, ...]) -> list[str]:
    """The kinds of layers without the key ``layer_types``."""
    if family.windows == "all":
        sliding = set(range(layers))
    elif family.windows == "after":
        first = raw.get("max_window_layers")
        first = whole("max_window_layers", 28 if first is None else first, 0)
        sliding = set(range(first, layers))
    elif family.windows == "unrotated":
        sliding = set(unrotated)
    else:
        every = int(family.windows)
        if every == 6:
            every = value_of(raw, "sliding_window_pattern", int, every)
        sliding = {i for i in range(layers) if (i + 1) % every}
    return [_SLIDING if i in sliding else _FULL for i in range(layers)]


def _write_windows(config: TransformerConfig, family: Family) -> dict[str, Any]:
    if family.windows == "none":
        return {}
    size = next((window for window in config.windows if window is not None), None)
    raw: dict[str, Any] = {"sliding_window": size}
    if family.windows in ("after", "unrotated") or "experts" in family.names:
        raw["use_sliding_window"] = size is not None
    if family.windows != "all":
        windows = [config.window(i) for i in range(config.num_layers)]
        raw["layer_types"] = [_FULL if window is None else _SLIDING for window in windows]
    return raw


def _unrotated(raw: dict, family: Family, layers: int) -> tuple[int, ...]:
    if family.windows != "unrotated":
        return ()
    rotated = raw.get("no_rope_layers")
    if rotated is None:
        # Every n-th layer of SmolLM3 has no rotary positions.
        every = value_of(raw, "no_rope_layer_interval", int, 4)
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    complete = isinstance(rotated, list) and len(rotated) >= layers
    if not complete or any(value not in (0, 1) for value in rotated):
        raise UserError(f"no_rope_layers must be a list of {layers} numbers 0 or 1, one per layer")
    return tuple(i for i, value in enumerate(rotated[:layers]) if not value)


# Field of ``Recurrent`` -> key of config.json, and the default of transformers.
_RECURRENT = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "kernel": ("linear_conv_kernel_dim", 4),
}


def _recurrent(raw: dict, layers: int) -> Recurrent | None:
    """The recurrent layers; ``layer_types`` has known names (``_check_unread``)."""
    kinds = raw.get("layer_types")
    if kinds is None:
        every = value_of(raw, "full_attention_interval", int, INTERVAL)
        kinds = [_FULL if (i + 1) % every == 0 else _LINEAR for i in range(layers)]
    if len(kinds) != layers:
        raise UserError(f"layer_types must be a list of {layers} names, one per layer")
    sizes = _state_sizes(raw, _RECURRENT)
    recurrent = tuple(i for i in range(layers) if kinds[i] == _LINEAR)
    return Recurrent(layers=recurrent, **sizes) if recurrent else None


def _state_sizes(raw: dict, keys: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Field of ``Recurrent`` -> size; ``keys`` as ``_RECURRENT``. Raises UserError."""
    sizes = {field: value_of(raw, key, int, usual) for field, (key, usual) in keys.items()}
    if sizes["value_heads"] % sizes["key_heads"]:
        raise UserError(
            f"{keys['value_heads'][0]} {sizes['value_heads']} is no multiple of "
            f"{keys['key_heads'][0]}, which is {sizes['key_heads']}"
        )
    return sizes


# The pairs of kinds of a file's layers: (kind, whether a feed-forward part follows).
_LAYERS = "layers"
_KINDS_OF, _PATTERN = "layers_block_type", "hybrid_override_pattern"
# The letters of hybrid_override_pattern, and older names of the kinds.
_LETTERS = {"M": _LINEAR, "*": _FULL, "-": "mlp", "E": "moe"}
_OLDER = {"mamba": _LINEAR, "attention": _FULL}
# As ``_RECURRENT``.
_MAMBA = {
    "key_heads": ("n_groups", 8),
    "value_heads": ("mamba_num_heads", 128),
    "key_dim": ("ssm_state_size", 128),
    "value_dim": ("mamba_head_dim", 64),
    "kernel": ("conv_kernel", 4),
}
_LEAST_STEP = "time_step_min"


def _joined(raw: dict) -> dict:
    """The keys of a file whose layers are parts of ours: a mixer, and an MLP that follows it."""
    kinds = names_of("", raw, _KINDS_OF) or names_of("", raw, "layer_types")
    if not kinds:
        kinds = [_LETTERS.get(letter, letter) for letter in str(raw.get(_PATTERN) or "ME*-")]
    layers: list[tuple[str, bool]] = []
    for number, kind in enumerate(_OLDER.get(kind, kind) for kind in kinds):
        if kind in (_LINEAR, _FULL):
            layers.append((kind, False))
        elif kind == "mlp" and layers and not layers[-1][1]:
            layers[-1] = (layers[-1][0], True)
        else:
            what = "a feed-forward part after another one" if kind == "mlp" else repr(kind)
            raise UserError(
                f"layer {number} of the file is {what}, which is not supported; supported: "
                f"{_LINEAR}, {_FULL}, each with or without an mlp after it"
            )
    return raw | {"num_hidden_layers": len(layers), _LAYERS: layers, "layer_types": None}


def _mamba(raw: dict) -> Recurrent | None:
    """The recurrent layers of a file that ``_joined`` has read."""
    sizes, stated = _state_sizes(raw, _MAMBA), raw.get(_LEAST_STEP)
    zero = stated == 0 and stated is not False
    least = 0.0 if zero else value_of(raw, _LEAST_STEP, float, 0.001)
    layers = tuple(i for i, (kind, _) in enumerate(raw[_LAYERS]) if kind == _LINEAR)
    return Recurrent(**sizes, layers=layers, kind="mamba2", least_step=least) if layers else None


def _write_mamba(config: TransformerConfig) -> dict[str, Any]:
    """The keys of config.json for ``_joined`` and ``_mamba``."""
    kinds: list[str] = []
    for layer in range(config.num_layers):
        kinds.append(_LINEAR if config.is_recurrent(layer) else _FULL)
        kinds += [] if layer in config.without_mlp else ["mlp"]
    raw: dict[str, Any] = {"num_hidden_layers": len(kinds), _KINDS_OF: kinds}
    if (own := config.recurrent) is not None:
        raw |= {key: getattr(own, field) for field, (key, _) in _MAMBA.items()}
        raw[_LEAST_STEP] = own.least_step
    return raw


def _experts(raw: dict, family: Family, layers: int) -> Experts | None:
    def value(key: str, kind: type = int) -> Any:
        return value_of(raw, key, kind, family.defaults[key])

    numbers = (raw.get(key) for key in ("num_experts", "num_local_experts"))
    raw = raw | {"num_experts": next((own for own in numbers if own is not None), None)}
    if raw["num_experts"] == 0:
        return None
    count, chosen = value("num_experts"), value("num_experts_per_tok")
    if chosen > count:
        raise UserError(
            f"num_experts_per_tok is {chosen}; it must be at most num_experts, which is {count}"
        )
    step, dense = value_of(raw, "decoder_sparse_step", int, 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(i, int) for i in dense):
        raise UserError(f"mlp_only_layers is {dense!r}; it must be a list of layer numbers")
    sparse = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if not sparse:
        return None
    size, renormalise = value("moe_intermediate_size"), value("norm_topk_prob", bool)
    shared = value(SHARED) if SHARED in family.defaults else None
    return Experts(count, chosen, size, renormalise, sparse, shared)
