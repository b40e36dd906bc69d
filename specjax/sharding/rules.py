"""Which axis of the mesh divides which parameter: one table for all models and drafters.

A rule is a pattern for the path of a parameter ("layers/0/attention/q/kernel") and the axes of its
last dimensions. The first rule that fits counts; a parameter without a rule is whole on every
device. A decoder's layer is divided as in Megatron-LM (Shoeybi et al. 2019, 1909.08053, section 3):
the first matrix of a pair by columns and the second by rows, with one sum over the devices after
each pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import tree
from specjax.cache import KVCache, RecurrentState
from specjax.errors import UserError
from specjax.sharding.mesh import DATA, FSDP, TENSOR, with_all_axes
from specjax.types import LM, ModelParams


class Rule(NamedTuple):
    """How parameters with such a path are divided."""

    pattern: str  # a regular expression, found anywhere in the path
    axes: tuple[str | None, ...]  # of the last dimensions; None: not divided
    # Whether a size that cannot be divided is an error in a target. Otherwise, and in drafters,
    # such a parameter is whole on every device.
    needed: bool = False


_COLUMNS, _ROWS, _LAST = (None, TENSOR), (TENSOR, None), (TENSOR,)
RULES = (
    # Every decoder, draft models, and the layers of eagle and eagle3.
    # "cross" is the attention of T5's decoder to the source.
    Rule(r"(attention|cross|delta)/(q|k|v|z|gate)/kernel$", _COLUMNS, needed=True),
    Rule(r"attention/(q|k|v|gate)/bias$", _LAST),
    Rule(r"mamba/(z|x)/kernel$", _COLUMNS, needed=True),
    Rule(r"(attention|cross|delta|mamba)/o/kernel$", _ROWS, needed=True),
    # Recurrent layers, by heads.
    Rule(r"(delta/(a|b|(q|k|v)_conv)|mamba/(dt|x_conv))/kernel$", _COLUMNS),
    Rule(r"mamba/(x_conv/bias|norm/scale)$", _LAST),
    Rule(r"(delta|mamba)/(a_log|dt_bias|d)$", _LAST),
    Rule(r"(mlp/(shared/)?|^)(gate|up)/kernel$", _COLUMNS, needed=True),  # without mlp/: bpd
    Rule(r"(mlp/|^)up/bias$", _LAST),
    Rule(r"(mlp/(shared/)?|^)down/kernel$", _ROWS, needed=True),
    # Experts: every device has a part of each of them.
    Rule(r"mlp/(gate|up)$", _COLUMNS, needed=True),
    Rule(r"mlp/down$", _ROWS, needed=True),
    # Tables by tokens. A vocabulary that cannot be divided stays whole.
    Rule(r"(^|/)embed/embedding$", _ROWS),
    Rule(r"^emb$", _ROWS),  # mlp_speculator
    # LM heads: decoders, eagle3, medusa (stacked), redrafter, hydra and mlp_speculator (numbered).
    Rule(r"(^|/)head(/\d+)?(/kernel)?$", _COLUMNS),
    Rule(r"(^|/)head/\d+/bias$", _LAST),
)


def param_specs(
    params: Any, sizes: Mapping[str, int], *, strict: bool = False, fsdp: bool = False
) -> Any:
    """The ``PartitionSpec`` of every parameter, a pytree as ``params``.

    Args:
        params: arrays or ``jax.ShapeDtypeStruct``.
        sizes: of the axes of the mesh.
        strict: a parameter of a needed rule that cannot be divided is an error.
        fsdp: also divide the largest other dimension that can be divided by the axis "fsdp".

    Raises UserError if ``strict``.
    """

    def one(path, leaf) -> PartitionSpec:
        # "layers/0/attention/q/kernel"
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = _tensor_axes(name, leaf.shape, sizes[TENSOR], strict)
        return PartitionSpec(*(_with_fsdp(axes, leaf.shape, sizes[FSDP]) if fsdp else axes))

    return jax.tree_util.tree_map_with_path(one, params)


def _whole(name: str) -> str:
    """The name of a kernel. In int8 it has values, and a scale for each of its columns."""
    return re.sub(r"(/kernel)/(values|scale)$", r"\1", name)


def _tensor_axes(name: str, shape: tuple[int, ...], size: int, strict: bool) -> list[str | None]:
    axes: list[str | None] = [None] * len(shape)
    found = (rule for rule in RULES if re.search(rule.pattern, _whole(name)))
    rule = next(found, Rule("", ()))
    own = rule.axes[-1:] if name.endswith("/kernel/scale") else rule.axes
    if len(own) > len(shape):
        return axes
    for number, axis in enumerate(own, len(shape) - len(own)):
        if axis is None or shape[number] % size == 0:
            axes[number] = axis
        elif strict and rule.needed:
            raise UserError(
                f"parameter {name} has shape {shape}, and {shape[number]} cannot be divided among "
                f"tensor:{size}; take a divisor of {shape[number]}"
            )
    return axes


def _with_fsdp(axes: list[str | None], shape: tuple[int, ...], size: int) -> list[str | None]:
    free = [i for i, axis in enumerate(axes) if axis is None and shape[i] % size == 0]
    if size > 1 and free:
        axes[max(free, key=lambda i: shape[i])] = FSDP
    return axes


def shardings(mesh: Mesh, specs: Any) -> Any:
    """``NamedSharding`` for every ``PartitionSpec`` of a pytree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def check_decoding(mesh: Mesh, target: LM) -> None:
    """Raises UserError for a mesh on which the target cannot decode."""
    sizes = dict(mesh.shape)
    if sizes[FSDP] > 1:
        raise UserError(
            f"the mesh has fsdp:{sizes[FSDP]}, which divides parameters in training; decoding "
            f"takes {DATA} and {TENSOR}"
        )
    cache = jax.eval_shape(lambda: target.init_cache(1, 1))
    heads = {x.shape[1] for own in tree.of_type(cache, KVCache) for x in own.k}
    states = {own.memory.shape[1] for own in tree.of_type(cache, RecurrentState)}
    for kind, counts in (("key/value heads", heads), ("heads with a state", states)):
        for count in sorted(counts):
            if count % sizes[TENSOR]:
                raise UserError(
                    f"the target has {count} {kind}, which cannot be divided among "
                    f"tensor:{sizes[TENSOR]}; take a divisor of {count}"
                )


def place(mesh: Mesh, target: LM, params: ModelParams) -> ModelParams:
    """The parameters of target and drafter on the devices of a mesh.

    The mesh has any of the axes "data" and "tensor": that of ``make_mesh``, or one of JAX's.
    Those that are on the mesh already stay where they are. Raises UserError for a target whose
    layers cannot be divided, or whose parameters have names of another library.
    """
    return ModelParams(place_target(mesh, target, params.target), place_draft(mesh, params.draft))


def place_target(mesh: Mesh, target: LM, params: Any) -> Any:
    """The target's parameters on the devices of a mesh. Raises UserError: see ``place``."""
    mesh = with_all_axes(mesh)
    check_decoding(mesh, target)
    _check_names(target.name, params, mesh.shape[TENSOR])
    return put(mesh, params, param_specs(params, dict(mesh.shape), strict=True))


def _check_names(name: str, params: Any, size: int) -> None:
    """Raises UserError for names of another library, whose parameters would all stay whole."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [_whole(jax.tree_util.keystr(path, simple=True, separator="/")) for path in paths]
    needed = [rule.pattern for rule in RULES if rule.needed]
    if size > 1 and not any(re.search(each, known) for each in needed for known in names):
        raise UserError(
            f"no parameter of {name} has a name that {TENSOR}:{size} divides (the first is "
            f"{names[0]!r}); rename them first, as models.adapter.mapped does, and place the "
            "result, or divide them with jax.device_put"
        )


def place_draft(mesh: Mesh, params: Any) -> Any:
    """A drafter's parameters on the devices of a mesh."""
    mesh = with_all_axes(mesh)
    return put(mesh, params, param_specs(params, dict(mesh.shape)))


def check_placed(mesh: Mesh, params: Any) -> None:
    """Raises UserError for parameters that are on another mesh."""
    for leaf in jax.tree.leaves(params):
        where = getattr(leaf, "sharding", None)
        if isinstance(where, NamedSharding) and where.mesh != mesh:
            raise UserError(
                "the parameters are on the devices of another mesh; place them with sharding.place"
            )


def put(mesh: Mesh, values: Any, specs: Any) -> Any:
    """Arrays that every process has in full, on the devices of a mesh."""
    return jax.tree.map(put_leaf, values, shardings(mesh, specs))


def put_leaf(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array on devices: one that every process has in full, or one that is on devices."""
    if sharding.is_fully_addressable or not getattr(value, "is_fully_addressable", True):
        return jax.device_put(value, sharding)
    # Every process gives the parts of its own devices.
    return jax.make_array_from_callback(np.shape(value), sharding, lambda index: value[index])
