"""The shape of a draft network: from the keys for a new one, from its tensors for a stored one.

What tensors do not show (the width of attention heads, the rotary base, which layers are tapped,
which output is recycled) is in config.json, or in the keys if there are parameters without files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from specjax.checks import whole
from specjax.drafters.files import Given, decoder_layers
from specjax.drafters.heads import _prefix
from specjax.drafters.shared_keys import NetworkKeys
from specjax.errors import UserError
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Params


def config_of(
    name: str, target: LM, given: Given, keys: NetworkKeys, module: Params | None = None
) -> TransformerConfig:
    """The shape of the layers of ``given``, or of new ones for a target. Raises UserError.

    ``module``: the part of the parameters that has the layers; None: all.
    """
    width = getattr(keys, "width", 0) or given.ends.width
    if given.params is None:
        one = _prefix.new(width, target, keys.head_dim, keys.heads, keys.kv_heads, keys.inner)
        layers = getattr(keys, "layers", 0) or 1
        return dataclasses.replace(one, num_layers=layers, qk_norm=keys.qk_norm)
    leaves: dict[Any, Any] = flatten_dict(given.params if module is None else module)
    layer, where = given.config, f"the {name} network"
    if not layer:
        queries = leaves["layers", "0", "attention", "q", "kernel"].shape[1]
        width, _ = decoder_layers.widths_of(leaves)
        divided = queries // keys.heads if keys.heads and queries % keys.heads == 0 else 0
        layer = {"head_dim": keys.head_dim or divided or _prefix.default_head_dim(width, target)}
    config = decoder_layers.decoder(where, decoder_layers.facts(where, layer, leaves))
    given.agree(
        name,
        keys,
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        qk_norm=config.qk_norm,
    )
    return config


def check(name: str, given: Given, wanted: Params) -> None:
    """Raises UserError unless parameters that are given have exactly the leaves ``wanted``.

    The codec has checked an embedding and a head that not all networks have.
    """
    if given.params is not None:
        ends = {end: given.params[end] for end in ("embed", "head") if end in given.params}
        check_leaves(name, flatten_dict(ends | wanted), flatten_dict(given.params))


def leaves_of(start: Callable[..., Params]) -> Params:
    """The leaves that ``start(target_params, key)`` makes, without the target's parameters."""
    return jax.eval_shape(start, None, jax.eval_shape(lambda: jax.random.key(0)))


def check_leaves(name: str, wanted: dict[Any, Any], has: dict[Any, Any]) -> None:
    """Raises UserError unless the leaves of ``has`` are those of ``wanted``, of one dtype."""
    for path in sorted({*wanted, *has}, key=str):
        path_name = ".".join(map(str, path))
        if path not in wanted or path not in has:
            state = "missing" if path in wanted else "unexpected"
            raise UserError(
                f"the parameters are not those of {name}: {path_name} is {state}; give "
                "the parameters of one"
            )
        if np.shape(has[path]) != wanted[path].shape:
            raise UserError(
                f"{path_name} of the {name} network is {list(np.shape(has[path]))}, and on this "
                f"target it must be {list(wanted[path].shape)}; use one made for this target"
            )
    dtypes = {str(leaf.dtype) for leaf in has.values() if hasattr(leaf, "dtype")}
    if len(dtypes) != 1 or not jnp.issubdtype(jnp.dtype(dtypes.copy().pop()), jnp.floating):
        raise UserError(
            f"the parameters of the {name} network are of {', '.join(sorted(dtypes)) or 'no'} "
            "dtype; give floating-point arrays of one dtype"
        )


def taps_of(value: Any) -> tuple[int, ...]:
    """The layers that the key ``taps`` names: "1,5,9" or a sequence; (): not given."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    wrong = f"taps is {value!r}; give the numbers of layers, from 0, as 1,5,9"
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.split(",")] if value.strip() else []
        except ValueError:
            raise UserError(wrong) from None
    if not isinstance(value, Sequence):
        raise UserError(wrong)
    taps = tuple(whole("taps", tap, 0) for tap in value)
    if len(set(taps)) < len(taps):
        raise UserError(f"taps are {list(taps)}; each layer may be named once")
    return taps


def default_taps(layers: int) -> tuple[int, ...]:
    """EAGLE-3's low, middle and high layer of a target with this number of layers.

    The authors' code reads the hidden states that enter the layers 2, L // 2 and L - 3: these are
    the outputs of layers 1, L // 2 - 1 and L - 4. With fewer than 8 layers: the first, the middle
    and the last one.
    """
    if layers >= 8:
        return 1, layers // 2 - 1, layers - 4
    return tuple(sorted({0, (layers - 1) // 2, layers - 1}))


def layers_of(name: str, target: LM) -> int:
    """How many layers the target has. Raises UserError if they cannot be read."""
    if target.tapping is None or target.layers is None:
        raise UserError(
            f"{name} reads hidden states of layers of its target, and {target.name} gives none; "
            "take a target with hidden states"
        )
    return target.layers


def check_taps(name: str, target: LM, taps: tuple[int, ...]) -> None:
    """Raises UserError if the target does not have these layers."""
    layers = layers_of(name, target)
    if max(taps) >= layers:
        raise UserError(
            f"{name} reads the layers {list(taps)}, and the target's are 0..{layers - 1}; "
            "give other taps, or a network made for this target"
        )
