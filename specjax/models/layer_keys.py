"""Translates the keys of config.json that differ by layer: windows, rotary positions, experts."""

from __future__ import annotations

from typing import Any

from specjax.errors import UserError
from specjax.models import rope_config
from specjax.models.config_values import value_of
from specjax.models.families import Family
from specjax.models.transformer_config import Experts, TransformerConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
# Every n-th layer of SmolLM3 has no rotary positions.
_INTERVAL = 4


def read(raw: dict, family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` that differ by layer, and the rotary positions.

    ``values`` are the fields with one value. Raises UserError.
    """
    layers = values["num_layers"]
    result: dict[str, Any] = {"unrotated": _unrotated(raw, family, layers)}
    result["windows"] = _windows(raw, family, layers, result["unrotated"])
    if "experts" in family.names:
        result["experts"] = _experts(raw, layers)
    if family.switches.get("positions") == "learned":
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


def write(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json for ``read``."""
    raw, layers = _write_windows(config, family), range(config.num_layers)
    if family.windows == "unrotated":
        raw["no_rope_layers"] = [int(i not in config.unrotated) for i in layers]
    own = config.experts
    if own is not None:
        raw |= {
            "num_experts": own.experts,
            "num_experts_per_tok": own.chosen,
            "moe_intermediate_size": own.intermediate_size,
            "norm_topk_prob": own.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in layers if i not in own.layers],
        }
    if config.positions != "rotary":
        return raw
    full = config.rope_of_full()
    if "local_theta" in family.rope:
        local = config.local_rope or full
        return raw | rope_config.write({_FULL: full, _SLIDING: local}, config.head_dim)
    rotary = rope_config.write(full, config.head_dim)
    if "partial" in family.rope:
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
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UserError(f"max_window_layers is {first!r}; it must be a whole number >= 0")
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
        every = value_of(raw, "no_rope_layer_interval", int, _INTERVAL)
        rotated = [int((i + 1) % every != 0) for i in range(layers)]
    if (
        not isinstance(rotated, list)
        or len(rotated) < layers
        or any(value not in (0, 1) for value in rotated)
    ):
        raise UserError(f"no_rope_layers must be a list of {layers} numbers 0 or 1, one per layer")
    return tuple(i for i, value in enumerate(rotated[:layers]) if not value)


def _experts(raw: dict, layers: int) -> Experts | None:
    count = value_of(raw, "num_experts", int, raw.get("num_local_experts") or 128)
    chosen = value_of(raw, "num_experts_per_tok", int, 8)
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
    return Experts(
        count,
        chosen,
        value_of(raw, "moe_intermediate_size", int, 768),
        value_of(raw, "norm_topk_prob", bool, False),
        sparse,
    )
