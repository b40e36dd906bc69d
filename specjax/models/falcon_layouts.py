"""The tensor names of Falcon's draft network: EAGLE-1's, with an LSTM in the place of fc.

The names are specjax's: those of EAGLE-1's decoder layer, and those that torch gives the parameters
of an LSTM in a module ``lstm``. The letters are those of ``eagle_layouts``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from specjax.models import eagle_layouts
from specjax.models.head_places import Layout, Place

# Module here -> its part of the names in the file.
_PARTS = {"input": "ih", "hidden": "hh"}
_QK_NORM = ("layers", "0", "attention", "q_norm", "scale")


def of_names(names: Collection[str]) -> Layout:
    """The complete layout of a file with these tensor names; some may be missing in the file."""
    return _layout("layers.0.self_attn.q_norm.weight" in names)


def of_leaves(leaves: Mapping[tuple, Any], layout: str = "") -> Layout:
    """The layout for these parameters; there is one."""
    del layout
    return _layout(_QK_NORM in leaves)


def _layout(qk_norm: bool) -> Layout:
    layout: Layout = {}
    for layer in range(2):
        for part, name in _PARTS.items():
            path = ("lstm", str(layer), part)
            width = "2D" if (layer, part) == (0, "input") else "D"
            weight = Place((*path, "kernel"), (), f"{width} 4D", True)
            layout[f"lstm.weight_{name}_l{layer}"] = weight
            layout[f"lstm.bias_{name}_l{layer}"] = Place((*path, "bias"), (), "4D")
    parts = eagle_layouts.Parts(layers=1, qk_norm=qk_norm)
    return layout | eagle_layouts.decoder_layer("layers.0", ("layers", "0"), parts, "D", {})
