"""Multi-token prediction modules in directories: config.json, and what layouts store otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.errors import UserError
from specjax.models import eagle_dialects, eagle_files, eagle_shape, mtp_layouts
from specjax.models.eagle_shape import checked
from specjax.models.mtp_layouts import KIND, NAMES

# What no tensor shows, under the keys of the drafter and of ``Head.config``.
SWITCHES = {"hidden": ("normed", "raw"), "recycled": ("normed", "raw"), "zero_first": (False, True)}
# Keys of config.json with the only value that is computed.
_ONLY = {"use_sliding_window": False, "attn_output_gate": False, "logit_scale": 1.0}
_MADE = (
    *(eagle_dialects.OWN, "hidden_first", *SWITCHES, "read_as", "rope_parameters", "qk_norm"),
    *("auto_map", "architectures", "layer_types", "sliding_window", "draft_ids", "taps"),
)

Leaves = dict[tuple, Any]


def of_files(
    path: object, names: Any, config: Mapping[str, Any], leaves: Leaves
) -> tuple[Leaves, dict[str, Any]]:
    """(leaves, ``Head.config``) of modules in files with these tensors. Raises UserError."""
    layout = mtp_layouts.layout_of(names)
    own = config.get(eagle_dialects.OWN, {})
    if not isinstance(own, dict):
        raise UserError(f"{path}: {eagle_dialects.OWN} is {own!r}; it must be an object")
    for key, only in _ONLY.items():
        if config.get(key) not in (None, only):
            raise UserError(f"{path}: {key} {config[key]!r} is not supported; supported: {only!r}")
    for key, values in SWITCHES.items():
        if key in own and own[key] not in values:
            raise UserError(
                f"{path}: {eagle_dialects.OWN}.{key} is {own[key]!r}; it must be one of {values}"
            )
    stated = _whole(path, config, "num_nextn_predict_layers")
    count = len(mtp_layouts.numbers(layout, names))
    if stated not in (None, count):
        raise UserError(
            f"{path}: num_nextn_predict_layers is {stated}, and the tensors have {count} modules; "
            "correct config.json"
        )
    eagle_files.add_output_biases(leaves)
    leaves = _norms(layout, leaves, 1)
    result = {"vocab_size": None} | {x: y for x, y in config.items() if x not in _MADE}
    result |= _layer(path, config, leaves) | {key: own[key] for key in SWITCHES if key in own}
    result |= {"hidden_first": NAMES[layout].hidden_first, "read_as": {"layout": layout}}
    return leaves, result | {"num_hidden_layers": _whole(path, config, "num_hidden_layers")}


def before_writing(layout: str, leaves: Leaves, config: Mapping[str, Any]) -> Leaves:
    """The leaves as the layout stores them: the order of fc's rows, the factors of norms."""
    layout = layout or mtp_layouts.LAYOUTS[KIND][0]
    result = _norms(layout, leaves, -1)
    if bool(config.get("hidden_first")) != NAMES[layout].hidden_first:
        for path, leaf in leaves.items():
            if path[2:] == ("fc", "kernel"):
                both = (leaf[leaf.shape[1] :], leaf[: leaf.shape[1]])
                own = np if isinstance(leaf, np.ndarray) else jnp
                result[path] = own.concatenate(both, 0)
    return result


def to_write(
    layout: str, tensors: Mapping[str, Any], leaves: Leaves, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config.json, the tensors under their names). Raises UserError."""
    where, layout = "the parameters", layout or mtp_layouts.LAYOUTS[KIND][0]
    layers = _whole(where, config, "num_hidden_layers") or 0
    if not layers and layout == "deepseek":
        raise UserError(
            "num_hidden_layers is missing; the names of the layout deepseek need the number of "
            "layers of the target"
        )
    made = _layer(where, config, leaves)
    own = {"kind": KIND, "layout": layout}
    own |= {key: config[key] for key in SWITCHES if key in config}
    kept = {key: value for key, value in config.items() if key not in _MADE}
    result = kept | made | {"model_type": "qwen3" if made["qk_norm"] else "llama"}
    result |= {
        "num_nextn_predict_layers": len({path[1] for path in leaves if path[0] == "modules"})
    }
    result |= {"num_hidden_layers": layers or None, eagle_dialects.OWN: own}
    del result["qk_norm"]
    return result, mtp_layouts.at_layer(layout, tensors, layers)


def _whole(where: object, config: Mapping[str, Any], key: str) -> int | None:
    """A number of config.json, above 0; None: not given. Raises UserError."""
    return None if config.get(key) is None else checked(where, config, key, int, None)


def _layer(where: object, config: Mapping[str, Any], leaves: Leaves) -> dict[str, Any]:
    """What the tensors and config.json give of the decoder layers. Raises UserError."""
    first = {path[2:]: leaf for path, leaf in leaves.items() if path[:2] == ("modules", "0")}
    facts = eagle_shape.facts(where, config, first)
    eagle_shape.decoder(where, facts)
    return facts


def _norms(layout: str, leaves: Leaves, by: int) -> Leaves:
    """The leaves with ``by`` added to the factors of all norms, where the layout needs it."""
    if not NAMES[layout].around_one:
        return dict(leaves)
    return {path: leaf + by if path[-1] == "scale" else leaf for path, leaf in leaves.items()}
