"""Weights of 8 bits in a Hugging Face style directory, as compressed-tensors stores them.

A quantised matrix [out, in] is stored as integers or as float8 (e4m3) with a scale for each row, or
one for the whole matrix; its values are their products. They are computed in float32 for the rows
that are read and rounded once to the dtype of the parameters, so the model is the quantised one, in
the memory of that dtype. config.json says how weights are stored (``quantization_config``), and the
names of the tensors say which matrices are: ``X.weight`` or ``X.weight_packed`` (four integers in
an int32, with 128 added to each), with ``X.weight_scale``. Format: the documentation of
compressed-tensors (github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError

KEY, METHOD = "quantization_config", "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
# Keys -> the values that are read, the first one if the key is missing: of the model, of a group of
# matrices, of its weights.
_OFF = (None, {})
_MODEL = {"format": _FORMATS, "quantization_status": (None, "compressed")}
_MODEL |= {"kv_cache_scheme": _OFF, "transform_config": _OFF}
_GROUP = {"format": (None, *_FORMATS), "input_activations": _OFF, "output_activations": _OFF}
_WEIGHTS = {
    "num_bits": (8,),
    "type": ("int", "float"),
    "symmetric": (True,),
    "group_size": (None,),
    "strategy": ("tensor", "channel"),
    "block_structure": (None,),
    "dynamic": (False,),
    "actorder": (None, False),
}
# Stored elements by the type of the weights, and their names in results.
_STORED = {"int": "I8", "float": "F8_E4M3"}
NAMES = {"int": "int8", "float": "float8_e4m3fn"}
_WEIGHT, _PACKED, _SCALE, _SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
# An int32 has four integers, each with this number added.
_PER_WORD, _OFFSET = 4, 128


class Scheme(NamedTuple):
    """How the matrices of a model are quantised."""

    types: tuple[str, ...]  # "int", "float"
    strategies: tuple[str, ...]  # "channel", "tensor"


def scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """The quantisation that a config.json states; None: there is none.

    Raises UserError for what is not read: other programs, fewer bits, groups and blocks, zero
    points, quantised activations or caches, sparse weights.
    """
    if not (stated := raw.get(KEY)):
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if not isinstance(stated, dict) or method != METHOD:
        raise _unsupported(repr(method))
    _check(stated, _MODEL, "")
    sparsity = stated.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _unsupported("with sparsity_config")
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported("without config_groups")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unsupported(f"with {name} of no weights")
        _check(group, _GROUP, f" in {name}")
        _check(weights, _WEIGHTS, f" in {name}")
    weights = [group["weights"] for group in groups.values()]
    values = [[own.get(key, _WEIGHTS[key][0]) for own in weights] for key in ("type", "strategy")]
    return Scheme(*(tuple(dict.fromkeys(own)) for own in values))


def _check(stated: Mapping[str, Any], read: Mapping[str, tuple], where: str) -> None:
    for key, known in read.items():
        value = stated.get(key, known[0] if key != "format" else None)
        if value not in known:
            raise _unsupported(f"with {key} {value!r}{where}")


def _unsupported(what: str) -> UserError:
    return UserError(
        f"{KEY} {what} is not supported; give the model with weights in float32, bfloat16 or "
        "float16, a .gguf file, or weights alone in 8 bits (int or float) by compressed-tensors, "
        "symmetric, with a scale per channel or tensor"
    )


Opened = dict[str, tuple[Any, str]]  # name -> the open file, and the name in it


def joined(where: object, opened: Opened, how: Scheme) -> Opened:
    """The tensors of a model, with one in the place of each quantised matrix and its scale.

    ``where`` begins the messages. Raises UserError for a matrix without a scale, a scale of another
    shape, elements of another type, and for zero points and orders of columns.
    """
    result = {name: own for name, own in opened.items() if not name.endswith((_SCALE, _SHAPE))}
    for name in opened:
        module = name.rpartition(".")[0]
        if name.endswith((".weight_zero_point", ".weight_g_idx", ".input_scale", ".output_scale")):
            raise UserError(f"{where}: {name} is not supported; {_RIGHT}")
        if name.endswith((_PACKED, _SCALE)):
            result.pop(module + _PACKED, None)
            result[module + _WEIGHT] = _Matrix(where, module, opened, how), module + _WEIGHT
    return result


_RIGHT = "a quantised matrix has X.weight or X.weight_packed, and X.weight_scale"


class _Matrix:
    """A quantised matrix, with the methods of an open file that one tensor needs."""

    def __init__(self, where: object, module: str, opened: Opened, how: Scheme):
        self._packed = module + _PACKED in opened
        name = module + (_PACKED if self._packed else _WEIGHT)
        if name not in opened or (scale := module + _SCALE) not in opened:
            lacks = f"lacks {name}" if name not in opened else f"{name} has no scale"
            raise UserError(f"{where}: {lacks}; {_RIGHT}")
        (self._file, self._name), self._scale = opened[name], opened[scale]
        shape, stored = self._file.shape_of(self._name)
        allowed = ["I32"] * ("int" in how.types) if self._packed else [*map(_STORED.get, how.types)]
        if len(shape) != 2 or stored not in allowed:
            raise UserError(
                f"{where}: {name} is {shape} of {stored}, and {KEY} states a matrix of "
                f"{' or '.join(map(str, allowed)) or 'float8, which is not packed'}"
            )
        self._rows, self._columns = shape
        if self._packed:
            self._columns = _columns(where, module, opened, shape)
        shape, stored = self._scale[0].shape_of(scale)
        expected = [[self._rows, 1]] * ("channel" in how.strategies)
        expected += [[1], [], [1, 1]] * ("tensor" in how.strategies)
        if shape not in expected or stored not in ("F32", "BF16", "F16"):
            raise UserError(
                f"{where}: {scale} is {shape} of {stored}, expected {expected[0]} of F32, BF16 or "
                f"F16 (strategy {' or '.join(how.strategies)})"
            )

    def shape_of(self, name: str) -> tuple[list[int], str]:
        """The shape and the type of the values."""
        return [self._rows, self._columns], "F32"

    def get_tensor(self, name: str, dtype: Any = None) -> np.ndarray:
        """The values as ``dtype``; None: float32."""
        file, stored = self._scale
        scale = file.get_tensor(stored, np.float32).reshape(-1, 1)

        def values(rows: np.ndarray, begin: int) -> np.ndarray:
            own = scale if len(scale) == 1 else scale[begin : begin + len(rows)]
            return self._integers(rows).astype(np.float32) * own

        return self._file.get_tensor(self._name, dtype or np.float32, values)

    def _integers(self, rows: np.ndarray) -> np.ndarray:
        """The stored numbers; those of float8 are no integers."""
        if not self._packed:
            return rows
        words = np.ascontiguousarray(rows).astype("<i4", copy=False).view(np.uint8)
        return words[:, : self._columns].astype(np.int16) - _OFFSET


def _columns(where: object, module: str, opened: Opened, packed: list[int]) -> int:
    """The columns of a packed matrix, from ``weight_shape``. Raises UserError."""
    name = module + _SHAPE
    if name not in opened:
        raise UserError(f"{where} lacks {name}, which states the columns of a packed matrix")
    file, stored = opened[name]
    values = np.asarray(file.get_tensor(stored)).reshape(-1).tolist()
    if len(values) != 2 or values[0] != packed[0] or -(-values[1] // _PER_WORD) != packed[1]:
        raise UserError(
            f"{where}: {name} is {values}, and {module}{_PACKED} is {packed}; the columns are "
            f"{_PER_WORD} to a word"
        )
    return int(values[1])
