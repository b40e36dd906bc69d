"""The shape of modules for multi-token prediction: from keys, or from their tensors and files."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax.checks import one_of, whole, yes_or_no
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import _eagle_shape, _given, _mtp_layers
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._mtp_layers import NORMED, RAW, MtpShape
from specjax.errors import UserError
from specjax.types import LM, Params

# Ends of the target of which files may have copies.
ENDS = ("embed", "head")


class Switches(NamedTuple):
    """The keys for what no tensor shows; "" and False: not given."""

    hidden_first: bool
    hidden: str
    recycled: str
    zero_first: bool


def read(
    name: str, target: LM, given: Given, keys: NetworkKeys, modules: int, asked: Switches
) -> MtpShape:
    """The shape of ``given``, or of new modules. Raises UserError."""
    whole("modules", modules, 0)
    for key in ("hidden", "recycled"):
        one_of(key, getattr(asked, key) or NORMED, (NORMED, RAW))
    for key in ("hidden_first", "zero_first"):
        yes_or_no(key, getattr(asked, key))
    width, count, first = given.ends.width, modules or 1, given
    if given.params is not None:
        count = _count(name, given.params)
        _given.sizes((count,), modules=(modules, 0))
        first = given._replace(params=given.params["modules"]["0"])
        rows, own = _eagle_shape.matrix(name, first.params, "fc.kernel")
        if (rows, own) != (2 * width, width):
            raise UserError(
                f"the {name} network reads hidden states of width {rows - own} and gives {own}, "
                f"and the target's have {width}; use one made for this target"
            )
    config = _eagle_shape.config_of(name, first, width, keys)
    if config.num_layers != 1:
        raise UserError(
            f"a module of {name} has {config.num_layers} decoder layers; only modules of one layer "
            "can be computed"
        )
    own = {key: _switch(given, key, value) for key, value in asked._asdict().items()}
    shape = MtpShape(config, count, **own)
    if shape.hidden == RAW:
        _eagle_shape.layers_of(name, target)
    if given.params is not None:
        _check(name, target, shape, given.params)
    return shape


def _count(name: str, params: Params) -> int:
    """How many modules there are. Raises UserError."""
    modules = params.get("modules") if isinstance(params, dict) else None
    if not isinstance(modules, dict) or set(modules) != {str(i) for i in range(len(modules))}:
        raise UserError(
            f'the parameters are not those of {name}: modules "0", "1", ... are '
            "missing; give the parameters of one"
        )
    if not modules:
        raise UserError(f"the {name} network has no module; give the parameters of one")
    return len(modules)


def _switch(given: Given, key: str, value: Any) -> Any:
    """A switch: of the files where they state it, else the key, else the default."""
    default = False if isinstance(value, bool) else NORMED
    stored = given.config.get(key)
    if stored is None:
        return value or default
    if value and value != stored:
        raise UserError(f"{key} is {value}, and the given network has {stored}; leave it out")
    return stored


def _check(name: str, target: LM, shape: MtpShape, params: Params) -> None:
    """Raises UserError unless ``params`` have exactly the leaves of modules of this shape."""
    one = nnx.to_pure_dict(_mtp_layers.abstract(shape, jnp.dtype(jnp.float32))[1])
    wanted: dict[str, Any] = {"modules": {str(i): one for i in range(shape.modules)}}
    sizes = {"embed": (target.vocab_size, target.width), "head": (target.width, target.vocab_size)}
    for key, leaf in zip(ENDS, ("embedding", "kernel"), strict=True):
        if key in params:
            wanted[key] = {leaf: jax.ShapeDtypeStruct(sizes[key], jnp.float32)}
    _eagle_shape.check_leaves(name, flatten_dict(wanted), flatten_dict(params))


def facts(target: LM, shape: MtpShape) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about the modules in addition to their tensors."""
    layer = _eagle_shape.facts(_eagle_layer(shape))
    own = tuple((key, getattr(shape, key)) for key in Switches._fields)
    layers = () if target.layers is None else (("num_hidden_layers", target.layers),)
    return (*layer, *own, *layers)


def _eagle_layer(shape: MtpShape) -> _eagle_shape.Shape:
    return _eagle_shape.Shape(shape.config, shape.config.hidden_size)


def dtype_of(params: Params) -> Any:
    """The dtype of modules with these parameters; float32 for new ones."""
    if params is None:
        return jnp.float32
    return _eagle_shape.dtype_of(params["modules"]["0"])
