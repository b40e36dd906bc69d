"""What released heads call their tensors: one table a kind, read in both directions.

A row says where a tensor of a file has its place among our parameters: the leaf, the index along the leaf's stacked axes
(heads, blocks, stages), and the tensor's own dimensions as letters, which the first tensor that has them binds to numbers.
Linear weights are (out, in) in files and (in, out) here.

    D  hidden width of the target      V  vocabulary      I  inner width (mlp_speculator, bpd)
    A, C, F  widths of a prefix layer's queries, of its keys and values, of its feed-forward

Sources: FasterDecoding/Medusa, zankner/Hydra, foundation-model-stack/fms-extras, vllm/model_executor/models/medusa.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from specjax.errors import UserError

PREFIX = "prefix_embeding_layer."  # (sic)
_PREFIX_LINEAR = {  # module here -> module there, dimensions, which of the optional biases it has
    "attention.q": ("layers.0.self_attn.q_proj", "D A", "attention"),
    "attention.k": ("layers.0.self_attn.k_proj", "D C", "attention"),
    "attention.v": ("layers.0.self_attn.v_proj", "D C", "attention"),
    "attention.o": ("layers.0.self_attn.o_proj", "A D", "attention"),
    "mlp.gate": ("layers.0.mlp.gate_proj", "D F", "mlp"),
    "mlp.up": ("layers.0.mlp.up_proj", "D F", "mlp"),
    "mlp.down": ("layers.0.mlp.down_proj", "F D", "mlp"),
}
_PREFIX_NORMS = {
    "attention_norm": "layers.0.input_layernorm",
    "mlp_norm": "layers.0.post_attention_layernorm",
    "norm": "norm",
}


class Place(NamedTuple):
    """Where a tensor of a file belongs."""

    path: tuple[str, ...]  # the leaf
    at: tuple[int, ...]  # index along its leading axes
    dims: str  # of the tensor as it is here: letters, "3D" is three times D
    transposed: bool = False  # whether the file has it the other way round


Layout = dict[str, Place]


def medusa(
    heads: int, layers: int, own_head: bool, biases: bool = True, vllm: bool = False
) -> Layout:
    """K heads of L residual blocks each; without ``own_head`` they end in the target's LM head."""
    layout: Layout = {}
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            layout |= _linear(name, ("block",), (i, j), "D D", biases)
        if own_head:
            layout |= _linear(
                f"lm_heads.{i}" if vllm else f"{i}.{layers}", ("head",), (i,), "D V", False
            )
    return layout


def hydra(heads: int, layers: int, dropout: bool, prefix: Collection[str] = ()) -> Layout:
    """K heads of L blocks each, the first of which reads the feature and i + 1 embeddings.

    With ``dropout`` layers in between, which have no tensors, a module's number is odd. ``prefix`` are the parts of the decoder
    layer before the heads, of "layer", "gate", "attention bias", "mlp bias" and "norm bias".
    """
    layout: Layout = {}
    first, step, last = (1, 2, ".1") if dropout else (0, 1, "")
    for i in range(heads):
        name, path = f"hydra_mlp.{i}", ("mlp", str(i))
        layout |= _linear(f"{name}.{first}.linear", (*path, "in"), (), f"{i + 2}D D", True)
        layout |= _linear(
            f"{name}.{first}.res_connection", (*path, "skip"), (), f"{i + 2}D D", True
        )
        for j in range(1, layers):
            layout |= _linear(
                f"{name}.{first + j * step}.linear", (*path, "blocks"), (j - 1,), "D D", True
            )
    for i in range(heads):
        layout |= _linear(f"hydra_lm_head.{i}{last}", ("head",), (i,), "D V", True)
    if "layer" in prefix:
        for module, (name, dims, part) in _PREFIX_LINEAR.items():
            if module != "mlp.gate" or "gate" in prefix:
                layout |= _linear(
                    PREFIX + name,
                    ("prefix", *module.split(".")),
                    (),
                    dims,
                    f"{part} bias" in prefix,
                )
        for module, name in _PREFIX_NORMS.items():
            layout[f"{PREFIX}{name}.weight"] = Place(("prefix", module, "scale"), (), "D")
            if "norm bias" in prefix:
                layout[f"{PREFIX}{name}.bias"] = Place(("prefix", module, "bias"), (), "D")
    return layout


def mlp_speculator(stages: int, projections: int) -> Layout:
    """``stages`` embeddings, heads and norms, ``projections`` of one state to the next: n and n - 1, or 1 and 1 if tied."""
    layout: Layout = {}
    for i in range(stages):
        layout[f"emb.{i}.weight"] = Place(("emb",), (i,), "V I")
        layout[f"head.{i}.weight"] = Place(("head",), (i,), "I V", True)
        layout[f"ln.{i}.weight"] = Place(("ln", "scale"), (i,), "I")
        layout[f"ln.{i}.bias"] = Place(("ln", "bias"), (i,), "I")
    layout["proj.0.weight"] = Place(("proj_in",), (), "D I", True)
    layout |= {
        f"proj.{i + 1}.weight": Place(("proj",), (i,), "I I", True) for i in range(projections)
    }
    return {f"speculator.{name}": place for name, place in layout.items()}


def bpd(heads: int) -> Layout:
    """K - 1 feed-forward layers; no framework has released any, so the names are ours."""
    layout: Layout = {}
    for i in range(heads):
        layout |= _linear(f"bpd.{i}.up", ("up",), (i,), "D I", True)
        layout |= _linear(f"bpd.{i}.down", ("down",), (i,), "I D", True)
    return layout


def of_names(kind: str, names: Collection[str]) -> Layout:
    """What a file with these tensors should have; where some are missing, with all that the others call for."""

    def count(pattern: str) -> int:  # not the highest number: that could be anything
        return len({found[1] for name in names if (found := re.match(pattern, name))})

    if kind == "medusa":
        if any(name.startswith("blocks.") for name in names):
            sizes = (
                count(r"blocks\.(\d+)\."),
                count(r"blocks\.\d+\.layers\.(\d+)\."),
                count(r"(lm_heads)\.") > 0,
            )
            return medusa(*sizes, any(name.endswith(".bias") for name in names), vllm=True)
        return medusa(
            count(r"(\d+)\."), count(r"\d+\.(\d+)\.linear\."), count(r"\d+\.\d+\.(weight)$") > 0
        )
    if kind == "hydra":
        layers, dropout = (
            count(r"hydra_mlp\.\d+\.(\d+)\.linear\."),
            count(r"hydra_lm_head\.\d+\.(1)\.") > 0,
        )
        return hydra(count(r"hydra_mlp\.(\d+)\."), layers, dropout, _prefix_of_names(names))
    if kind == "mlp_speculator":
        stages = max(count(rf"speculator\.{part}\.(\d+)\.") for part in ("emb", "head", "ln"))
        projections = count(r"speculator\.proj\.(\d+)\.")
        if (stages, projections) == (1, 2):  # tied: the duplicates are left out
            return mlp_speculator(1, 1)
        stages = max(stages, projections)
        return mlp_speculator(stages, stages - 1)
    return bpd(count(r"bpd\.(\d+)\."))


def of_leaves(kind: str, leaves: Mapping[tuple, np.ndarray]) -> Layout:
    """What is written of these parameters. Raises UserError if they are not those of such heads."""
    told = f"the parameters are not those of {kind} heads"
    try:
        if kind == "medusa":
            heads, layers = leaves["block", "kernel"].shape[:2]
            layout = medusa(heads, layers, ("head", "kernel") in leaves)
        elif kind == "hydra":
            heads, layers, prefix = hydra_sizes(leaves)
            layout = hydra(heads, layers, bool(prefix), prefix)
        elif kind == "mlp_speculator":
            stages = len(leaves["emb",])
            layout = mlp_speculator(
                stages, 1 if stages == 1 and ("proj",) in leaves else stages - 1
            )
        else:
            layout = bpd(len(leaves["up", "kernel"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{told} ({type(error).__name__}: {error}); give what such heads train"
        ) from None
    wanted = leading(layout)
    for leaf in sorted(leaves.keys() | wanted.keys()):
        if (
            leaf not in leaves
            or leaf not in wanted
            or leaves[leaf].shape[: len(wanted[leaf])] != wanted[leaf]
        ):
            raise UserError(
                f"{told} ({'.'.join(leaf)} is missing, too much or of another length); give what such heads train"
            )
    return layout


def check(kind: str, params: Any, sizes: Mapping[str, int]) -> None:
    """Raises UserError unless these are the parameters of such heads, of these ``sizes`` (by letter; others may be any)."""
    found = flatten_dict(params) if isinstance(params, dict) else {}
    # Only names and shapes matter; whatever has none is a number.
    leaves = {
        path: np.broadcast_to(np.int8(0), getattr(leaf, "shape", ()))
        for path, leaf in found.items()
    }
    leaves = leaves if all(isinstance(key, str) for path in leaves for key in path) else {}
    known = dict(sizes)
    for place in of_leaves(kind, leaves).values():
        stacked, own = np.split(leaves[place.path].shape, [len(place.at)])
        dims = [(int(dim[:-1] or 1), dim[-1]) for dim in place.dims.split()]
        for (factor, letter), size in zip(dims, own, strict=False):
            if factor == 1:
                known.setdefault(letter, int(size))
        right = [factor * known.get(letter, 0) for factor, letter in dims]
        if own.tolist() != right:
            name, shape = ".".join(place.path), [*stacked.tolist(), *own.tolist()]
            told = f"{name} of the {kind} heads is {shape}, and on this target it must be {[*stacked.tolist(), *right]}"
            raise UserError(f"{told}; take heads made for it")


def _prefix_of_names(names: Iterable[str]) -> set[str]:
    """What of a prefix layer is in a file, for ``hydra``. Layers without a gate are those of GPT-2, whose norms have biases."""
    names = [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]
    biased = {"attention": "self_attn", "mlp": ".mlp.", "norm": "norm."}
    parts = {
        f"{part} bias"
        for part, mark in biased.items()
        if any(mark in n and n.endswith(".bias") for n in names)
    }
    if names:
        parts.add("layer")
        if "norm bias" not in parts or any(".gate_proj." in name for name in names):
            parts.add("gate")
    return parts


def hydra_sizes(leaves: Mapping[tuple, np.ndarray]) -> tuple[int, int, set[str]]:
    """Heads, blocks of each, and the parts of the prefix layer, for ``hydra``."""
    prefix = {"layer"} if any(leaf[0] == "prefix" for leaf in leaves) else set()
    prefix |= {"gate"} if ("prefix", "mlp", "gate", "kernel") in leaves else set()
    biases = {"attention": ("attention", "q"), "mlp": ("mlp", "up"), "norm": ("norm",)}
    prefix |= {
        f"{part} bias" for part, module in biases.items() if ("prefix", *module, "bias") in leaves
    }
    return (
        len(leaves["head", "kernel"]),
        1 + len(leaves.get(("mlp", "0", "blocks", "kernel"), ())),
        prefix,
    )


def leading(layout: Layout) -> dict[tuple, tuple[int, ...]]:
    """Leaf -> shape of its stacked axes."""
    shapes: dict[tuple, tuple[int, ...]] = {}
    for place in layout.values():
        before = shapes.get(place.path, (0,) * len(place.at))
        shapes[place.path] = tuple(
            max(size, at + 1) for size, at in zip(before, place.at, strict=True)
        )
    return shapes


def _linear(
    name: str, path: tuple[str, ...], index: tuple[int, ...], dims: str, bias: bool
) -> Layout:
    layout = {f"{name}.weight": Place((*path, "kernel"), index, dims, True)}
    if bias:
        layout[f"{name}.bias"] = Place((*path, "bias"), index, dims.split()[-1])
    return layout
