"""The shape of a draft network: from the keys for a new one, from its tensors for a stored one.

What tensors do not show (the width of attention heads, the rotary base, which layers are tapped,
which output is recycled) is in config.json, or in the keys if there are parameters without files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax.checks import whole, yes_or_no
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import _eagle_layers, _given, _prefix
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._network import Shape
from specjax.errors import UserError
from specjax.models import eagle_shape, rope_config
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Params

# The keys for the sizes of a new network; 0: not given.
SIZES = ("layers", "heads", "kv_heads", "head_dim", "inner")


class _Object(dict):
    """A JSON object that is a static value: it has a hash."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


def matrix(name: str, params: Params, path: str) -> tuple[int, int]:
    """The shape of the matrix at a path "fc.kernel" of the parameters. Raises UserError."""
    value = params
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UserError(
                f"the parameters are not those of {name}: {path} is missing; give the "
                "parameters of one"
            )
        value = value[part]
    shape = np.shape(value)
    if len(shape) != 2:
        raise UserError(
            f"{path} of the {name} network is {list(shape)}, and it must be a matrix; give the "
            "parameters of one"
        )
    return shape


def config_of(name: str, given: Given, width: int, keys: NetworkKeys) -> TransformerConfig:
    """The shape of the layers of ``given``, or of new ones; ``width`` is D. Raises UserError."""
    for key in SIZES:
        whole(key, getattr(keys, key, 0), 0)
    yes_or_no("qk_norm", keys.qk_norm)
    if given.params is None:
        head_dim = keys.head_dim or _prefix.default_head_dim(width)
        heads = keys.heads or max(width // head_dim, 1)
        kv_heads = keys.kv_heads or heads
        if heads % kv_heads:
            raise UserError(
                f"heads is {heads} and kv_heads {kv_heads}; heads must be a multiple of kv_heads"
            )
        inner = keys.inner or _prefix.default_inner(width)
        config = _prefix.layer(
            width, head_dim, heads, kv_heads, inner, getattr(keys, "layers", 0) or 1
        )
        return dataclasses.replace(config, qk_norm=keys.qk_norm)
    return _stored_config(name, given, width, keys)


def _stored_config(name: str, given: Given, width: int, keys: NetworkKeys) -> TransformerConfig:
    layer, where = given.config, f"the {name} network"
    for path in ("attention.k.kernel", "mlp.up.kernel"):
        matrix(name, given.params, f"layers.0.{path}")
    queries = matrix(name, given.params, "layers.0.attention.q.kernel")[-1]
    if not layer:
        divided = queries // keys.heads if keys.heads and queries % keys.heads == 0 else 0
        layer = {"head_dim": keys.head_dim or divided or _prefix.default_head_dim(width)}
    leaves = flatten_dict(given.params)
    config = eagle_shape.decoder(where, eagle_shape.facts(where, layer, leaves))
    own = (
        *(config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim),
        config.intermediate_size,
    )
    _given.sizes(own, **{key: (getattr(keys, key, 0), 0) for key in SIZES})
    agreed("qk_norm", keys.qk_norm, config.qk_norm)
    return config


def agreed(key: str, value: bool, stored: bool) -> None:
    """Raises UserError if a key is set that stored parameters do not have."""
    if value and not stored:
        raise UserError(f"{key} is set, and the given network does not have it; leave it out")


def check(name: str, target: LM, shape: Shape, params: Params) -> None:
    """Raises UserError unless ``params`` have exactly the leaves of a network of this shape."""
    wanted: dict[Any, Any] = flatten_dict(
        nnx.to_pure_dict(_eagle_layers.abstract(shape, jnp.dtype(jnp.float32))[1])
    )
    has: dict[Any, Any] = flatten_dict(params)
    if ("embed", "embedding") in has:
        size = (target.vocab_size, shape.config.hidden_size)
        wanted["embed", "embedding"] = jax.ShapeDtypeStruct(size, jnp.float32)
    check_leaves(name, wanted, has)


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


def check_width(name: str, width: int, target: LM, embed: bool = False) -> None:
    """Raises UserError if a network of this width cannot read the target's embeddings."""
    if width != target.width and not embed:
        raise UserError(
            f"the {name} network has the width {width}, and the target's embeddings have "
            f"{target.width}; use one made for this target, or one with embeddings"
        )


def shift_of(given: Given, value: int) -> int:
    """The key ``shift``, or that of files. Raises UserError."""
    stored = given.config.get("shift", 1) if given.config else value
    for number in (value, stored):
        if whole("shift", number, 0) > 1:
            raise UserError(f"shift is {number}; it must be 1, or 0 for the ablation")
    if value not in (1, stored):
        raise UserError(f"shift is {value}, and the given network has {stored}; leave it out")
    return stored


def facts(shape: Shape) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about the layers in addition to their tensors."""
    config = shape.config
    result = _prefix.facts(config)
    if config.rope_scaling is not None:
        written = rope_config.write(config.rope_of_full(), config.head_dim)
        result += (("rope_scaling", _Object(written["rope_scaling"])),)
    return result if shape.shift else (*result, ("shift", 0))


def dtype_of(params: Params) -> Any:
    """The dtype of a network with these parameters; float32 for a new one."""
    return jnp.float32 if params is None else jnp.dtype(params["fc"]["kernel"].dtype)


def taps_of(value: Any) -> tuple[int, ...]:
    """The layers that the key ``taps`` names: "1,5,9" or a sequence; (): not given."""
    if isinstance(value, str):
        try:
            value = [int(part) for part in value.split(",")] if value.strip() else []
        except ValueError:
            raise UserError(
                f"taps is {value!r}; give the numbers of layers, from 0, as 1,5,9"
            ) from None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, Sequence):
        raise UserError(f"taps is {value!r}; give the numbers of layers, from 0, as 1,5,9")
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


def listed(ids: Any) -> np.ndarray | None:
    """The key ``draft_ids`` as an array; None: not given. Raises UserError."""
    if ids is None:
        return None
    array = np.asarray(ids)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError("draft_ids must be a list of token ids")
    return array


def ids_of(value: np.ndarray | None, size: int, vocab_size: int) -> np.ndarray | None:
    """The draft vocabulary i32[V_d]; ``size`` is V_d of the head. Raises UserError."""
    if value is None:
        if size != vocab_size:
            raise UserError(
                f"the network's head has {size} tokens and the vocabulary {vocab_size}; give "
                "draft_ids, the token of each"
            )
        return None
    ids = value
    if len(ids) != size:
        raise UserError(
            f"draft_ids has {len(ids)} tokens and the network's head {size}; give one token each"
        )
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise UserError(
            f"draft_ids has the token {wrong}; the target's tokens are 0..{vocab_size - 1}"
        )
    if (np.diff(ids) <= 0).any():
        raise UserError("draft_ids is not ascending; give each token once, in ascending order")
    # All tokens in order: the logits need no gather.
    return None if size == vocab_size else ids.astype(np.int32)
