"""Translates the keys of config.json about rotary positions to and from ``Rope``.

transformers 4 has ``rope_theta``, ``rope_scaling`` and ``partial_rotary_factor`` next to the other
keys; transformers 5 has them in ``rope_parameters``, for some families one object per kind of layer
(``full_attention``, ``sliding_attention``). GPT-NeoX writes ``rotary_emb_base``, ``rotary_pct``.
"""

from __future__ import annotations

import math
from typing import Any

from specjax.errors import UserError
from specjax.models.config_values import agreed, check_supported, object_of, value_of
from specjax.models.rope import Rope, RopeScaling

# For each kind its keys in config.json, in the order in which they are written.
_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*_LLAMA3, _ORIGINAL),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("short_factor", "long_factor", _ORIGINAL, "attention_factor"),
}
# The fields of RopeScaling that have another name.
_FIELDS = {_ORIGINAL: "original_max_positions"}
_FIELDS |= {"short_factor": "short_factors", "long_factor": "long_factors"}
# Keys that a file may have and that are not written: others follow from them.
_READ = {"yarn": {"mscale", "mscale_all_dim"}, "longrope": {"factor"}}
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", _ORIGINAL}


def read(
    raw: dict,
    head_dim: int,
    positions: int,
    layer_type: str | None = None,
    *,
    theta: float = 10000.0,
    local_theta: float | None = None,
    partial: float = 1.0,
    long: bool = False,
    unread: tuple[str, ...] = (),
) -> Rope:
    """The rotary positions in a config.json.

    Args:
        raw: the object in the file.
        head_dim: dimensions of a head.
        positions: ``max_position_embeddings`` of the model.
        layer_type: "full_attention" or "sliding_attention" for a family whose kinds of layers
            differ (Gemma 3, OLMo 3). Keys that do not name a kind are those of full attention;
            other kinds then have no scaling and the base ``rope_local_base_freq``.
        theta: the family's base where the file has none.
        local_theta: the same for kinds other than full attention; None: as for full attention.
        partial: the family's ``partial_rotary_factor`` where the file has none.
        long: which factors of longrope are used (see ``RopeScaling``); no key holds it.
        unread: keys that change nothing in a text.

    Raises UserError: a value of the wrong type or range, an unknown kind or key.
    """
    given = {key: x for key, x in settings(raw, layer_type).items() if key not in unread}
    if layer_type not in (None, "full_attention") and not _per_layer(raw):
        local = value_of(given, "rope_theta", float, theta) if local_theta is None else local_theta
        given = {key: x for key, x in given.items() if key == "partial_rotary_factor"}
        given["rope_theta"] = value_of(raw, "rope_local_base_freq", float, local)
    theta = float(value_of(given, "rope_theta", float, theta))
    if theta <= 1:
        raise UserError(f"rope_theta is {theta}; it must be a number above 1")
    share = value_of(given, "partial_rotary_factor", float, partial)
    dim = int(head_dim * share)
    if share > 1 or dim < 2 or dim % 2:
        odd = f"head_dim {head_dim} is odd; rotary positions need an even one"
        turned = f"partial_rotary_factor {share} of head_dim {head_dim} turns {dim} dimensions"
        right = f"it must be an even number between 2 and {head_dim}"
        raise UserError(odd if share == 1 else f"{turned}; {right}")
    return Rope(theta, dim, _scaling(given, dim, positions, long))


def _per_layer(raw: dict) -> bool:
    """Whether ``rope_parameters`` has one object per kind of layer."""
    return any(isinstance(value, dict) for value in object_of(raw, "rope_parameters").values())


def settings(raw: dict, layer_type: str | None = None) -> dict[str, Any]:
    """The keys of one kind of layer; those that are not null."""
    inner = object_of(raw, "rope_parameters")
    if _per_layer(raw):
        if layer_type is None:
            raise UserError(
                f"rope_parameters has an object per kind of layer ({', '.join(inner)}); "
                "this architecture has one kind"
            )
        if not isinstance(inner.get(layer_type), dict):
            raise UserError(f"rope_parameters has no object {layer_type}; add it")
        inner = inner[layer_type]
    both = object_of(raw, "rope_scaling")
    for key in inner.keys() & both.keys():
        agreed("", {f"rope_parameters.{key}": inner[key], f"rope_scaling.{key}": both[key]})
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    top = {name: raw.get(other) for name, other in names.items()}
    top |= {key: raw[key] for key in (*names, _ORIGINAL) if raw.get(key) is not None}
    given = {key: value for key, value in (inner | both).items() if value is not None}
    inside = {f"{_ORIGINAL} of the rotary settings": given.get(_ORIGINAL)}
    agreed("", {_ORIGINAL: top.get(_ORIGINAL)} | inside)
    return {key: value for key, value in top.items() if value is not None} | given


def _scaling(given: dict, dim: int, positions: int, long: bool) -> RopeScaling | None:
    """None for the kind "default"."""
    kind = given.get("rope_type", given.get("type", "default"))
    # The first name of longrope, in the first files of Phi-3.
    kind = "longrope" if kind == "su" else kind
    check_supported("rope type", kind, _KEYS)
    known = _COMMON | set(_KEYS[kind]) | _READ.get(kind, set())
    if kind == "yarn" and "attn_factor" in given:
        raise UserError(
            f"attn_factor {given['attn_factor']!r} has no fixed meaning: transformers ignores it, "
            "others multiply the usual factor by it; put the whole factor under attention_factor "
            "in its place (the usual one is 1 + 0.1 log(factor))"
        )
    for key in given:
        if key not in known:
            raise UserError(f"{key} {given[key]!r} is not supported for the rope type {kind!r}")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind, value_of(given, "factor", float))
    original = value_of(given, _ORIGINAL, int, positions)
    if kind == "llama3":
        fields = _llama3(given)
    elif kind == "yarn":
        fields = _yarn(given, positions / original)
    else:
        fields = _longrope(given, dim, original, positions / original)
        fields["long"] = long
    return RopeScaling(kind, original_max_positions=original, **fields)


def _llama3(given: dict) -> dict[str, Any]:
    values = {key: value_of(given, key, float) for key in _LLAMA3}
    _, low, high = values.values()
    if low >= high:
        raise UserError(f"low_freq_factor {low} must be below high_freq_factor {high}")
    return values


def _yarn(given: dict, ratio: float) -> dict[str, Any]:
    usual = {"factor": ratio, "beta_fast": 32.0, "beta_slow": 1.0}
    values = {key: value_of(given, key, float, default) for key, default in usual.items()}
    factor, fast, slow = values.values()
    if fast < slow:
        raise UserError(f"beta_fast {fast} must not be below beta_slow {slow}")

    def scale(factor: float, weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention = scale(factor)
    if "mscale" in given and "mscale_all_dim" in given:
        above, below = (value_of(given, key, float) for key in ("mscale", "mscale_all_dim"))
        attention = scale(factor, above) / scale(factor, below)
    values["truncate"] = value_of(given, "truncate", bool, True)
    return values | {"attention_factor": value_of(given, "attention_factor", float, attention)}


def _longrope(given: dict, dim: int, original: int, ratio: float) -> dict[str, Any]:
    lists = {}
    for key in ("short_factor", "long_factor"):
        values = given.get(key)
        if not isinstance(values, list) or len(values) != dim // 2:
            shape = f"a list of {len(values)}" if isinstance(values, list) else repr(values)
            raise UserError(
                f"{key} is {'missing' if values is None else shape}; it must be a list of "
                f"{dim // 2} numbers, one per pair of dimensions"
            )
        lists[_FIELDS[key]] = tuple(value_of({key: value}, key, float) for value in values)
    factor = value_of(given, "factor", float, ratio)
    attention = 1.0
    if factor > 1 and original > 1:
        attention = math.sqrt(1 + math.log(factor) / math.log(original))
    return lists | {"attention_factor": value_of(given, "attention_factor", float, attention)}


def write(rope: Rope | dict[str, Rope], head_dim: int) -> dict[str, Any]:
    """The keys of a config.json: those of transformers 4, which transformers 5 also reads.

    A dict, from kind of layer to its rotary positions, is written as transformers 5 does. Not
    written is ``long``: no key holds it.
    """
    if isinstance(rope, dict):
        objects = {}
        for layer_type, each in rope.items():
            flat = write(each, head_dim)
            scaling = flat.pop("rope_scaling") or {"rope_type": "default"}
            flat.pop(_ORIGINAL, None)
            objects[layer_type] = scaling | flat
        return {"rope_parameters": objects}
    raw: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": None}
    if rope.dim != head_dim:
        share = rope.dim / head_dim
        exact = int(head_dim * share) == rope.dim
        raw["partial_rotary_factor"] = share if exact else math.nextafter(share, 1.0)
    if rope.scaling is not None:
        kind = rope.scaling.kind
        scaling: dict[str, Any] = {"rope_type": kind}
        for key in _KEYS[kind]:
            value = getattr(rope.scaling, _FIELDS.get(key, key))
            scaling[key] = list(value) if isinstance(value, tuple) else value
        raw["rope_scaling"] = scaling
        if kind == "longrope":
            # Phi-3 has it next to the other keys.
            raw[_ORIGINAL] = rope.scaling.original_max_positions
    return raw
