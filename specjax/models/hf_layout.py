"""The tensors of a checkpoint: their names, their shapes, and the parameters that are in them.

Linear kernels are [in, out] here and in GPT-2, and [out, in] everywhere else. Some families store
several of our parameters in one tensor: side by side (GPT-2, Phi-3), or the parts of each head
together (GPT-NeoX). Experts are stored one by one, and are one array here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from specjax.models import lm, t5_names
from specjax.models.families import FAMILIES, Family
from specjax.models.t5_config import T5Config
from specjax.models.transformer_config import TransformerConfig

# The order of the parts of a fused tensor.
_ORDER = ("q", "k", "v", "gate", "up")


class Stored(NamedTuple):
    """A tensor of a checkpoint; ``paths`` are our leaves, its parts along the last axis."""

    paths: list[tuple]
    widths: list[int]  # of the parts
    shape: tuple[int, ...]  # in the file, after the transposition
    transposed: bool
    heads: int = 0  # of a tensor that has the parts of each head together; 0: it has whole parts
    expert: int | None = None  # the tensor is this one of the ``experts`` of the leaf
    experts: int = 1

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The parts of the tensor of the file."""
        tensor = tensor.T if self.transposed else tensor
        if len(self.paths) == 1:
            return [tensor]
        if not self.heads:
            return np.split(tensor, np.cumsum(self.widths)[:-1], axis=-1)
        lead = tensor.shape[:-1]
        by_head = tensor.reshape(*lead, self.heads, len(self.paths), -1)
        return [by_head[..., i, :].reshape(*lead, -1) for i in range(len(self.paths))]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor of the file; the inverse of ``split``."""
        if len(parts) == 1:
            whole = parts[0]
        elif not self.heads:
            whole = np.concatenate(parts, axis=-1)
        else:
            lead = parts[0].shape[:-1]
            by_head = [part.reshape(*lead, self.heads, -1) for part in parts]
            whole = np.stack(by_head, axis=-2).reshape(*lead, -1)
        return whole.T if self.transposed else whole


def family_of(config: TransformerConfig) -> Family:
    """How checkpoints of the model are read and written."""
    return t5_names.FAMILY if isinstance(config, T5Config) else FAMILIES[config.family]


def tensors_of(config: TransformerConfig) -> dict[str, Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the model."""
    family, layout = family_of(config), {}
    leaves: Any = flatten_dict(lm.abstract_params(config))
    grouped: dict[str, list[tuple]] = {}
    for path in sorted(leaves, key=_order):
        if len(leaves[path].shape) == 3:
            layout |= _experts(family, path, leaves[path].shape)
        else:
            t5 = isinstance(config, T5Config)
            name = t5_names.name_of(path, config.gated) if t5 else _name(family, path)
            grouped.setdefault(name, []).append(path)
    for name, paths in grouped.items():
        first, leaf = paths[0][0], paths[0][-1]
        transposed = leaf == "kernel" and (family.transposed or first == "head")
        widths = [leaves[path].shape[-1] for path in paths]
        shape = (*leaves[paths[0]].shape[:-1], sum(widths))
        heads = config.num_heads if family.by_head and len(paths) > 1 else 0
        shape = shape[::-1] if transposed else shape
        layout[name] = Stored(paths, widths, shape, transposed, heads)
    return layout


def _order(path: tuple) -> int:
    part = path[-2] if len(path) > 1 else ""
    return _ORDER.index(part) if part in _ORDER else -1


def _name(family: Family, path: tuple) -> str:
    """The name of the tensor that has the parameter at this path."""
    first, *inner, leaf = path
    module = family.names[".".join(map(str, inner[1:])) if inner else first]
    prefix = f"{family.names['layers']}.{inner[0]}." if inner else ""
    return f"{prefix}{module}.{'bias' if leaf == 'bias' else 'weight'}"


def _experts(family: Family, path: tuple, shape: tuple[int, ...]) -> dict[str, Stored]:
    """The tensors of the experts whose kernels are the leaf ("layers", i, "mlp", "gate")."""
    _, layer, *_, leaf = path
    module = family.names[f"mlp.{leaf}"].removeprefix("mlp.")
    experts, inner, outer = shape
    prefix = f"{family.names['layers']}.{layer}.{family.names['experts']}"
    return {
        f"{prefix}.{i}.{module}.weight": Stored(
            [path], [outer], (outer, inner), True, expert=i, experts=experts
        )
        for i in range(experts)
    }
