"""The tensor names of released heads: one table per kind, used for reading and writing.

An entry gives the place of a file's tensor among our parameters: the leaf, the index along the
leaf's stacked axes (heads, blocks, stages), and the tensor's own dimensions as letters. The first
tensor with a letter defines its size. Linear weights are (out, in) in files and (in, out) here.

    D  hidden width of the target      V  vocabulary size      I  inner width (mlp_speculator, bpd)
    A  width of a prefix layer's queries      C  of its keys and values      F  of its feed-forward
    L  number of look-ahead embeddings (pass)

Sources: FasterDecoding/Medusa, zankner/Hydra, foundation-model-stack/fms-extras,
vllm/model_executor/models/medusa.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from specjax.errors import UserError
from specjax.models import eagle_layouts, network_layouts
from specjax.models.head_places import Layout, Place, factors, linear, listed, stacked_shapes

# Kind -> the ways in which a directory of it can be written; the first is the default.
LAYOUTS = eagle_layouts.LAYOUTS | network_layouts.LAYOUTS
_TABLES = network_layouts.TABLES
PREFIX = "prefix_embeding_layer."  # (sic)
# Module here -> (module in the file, dimensions, the part of ``hydra`` that has its optional bias).
_PREFIX_LINEAR = {
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


def medusa(
    heads: int, layers: int, own_head: bool, biases: bool = True, vllm: bool = False
) -> Layout:
    """K heads of L residual blocks each; without ``own_head`` they use the target's LM head."""
    layout: Layout = {}
    for i in range(heads):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if vllm else f"{i}.{j}.linear"
            layout |= linear(name, ("block",), (i, j), "D D", biases)
        if own_head:
            name = f"lm_heads.{i}" if vllm else f"{i}.{layers}"
            layout |= linear(name, ("head",), (i,), "D V", False)
    return layout


def hydra(heads: int, layers: int, dropout: bool, prefix: Collection[str] = ()) -> Layout:
    """K heads of L blocks each; the first block of head i reads the feature and i + 1 embeddings.

    ``dropout`` layers between the blocks have no tensors, but make the numbers of the others odd.
    ``prefix`` has the parts of the decoder layer before the heads: some of "layer", "gate",
    "attention bias", "mlp bias" and "norm bias".
    """
    layout: Layout = {}
    first, step, last = (1, 2, ".1") if dropout else (0, 1, "")
    for i in range(heads):
        name, path, dims = f"hydra_mlp.{i}", ("mlp", str(i)), f"{i + 2}D D"
        layout |= linear(f"{name}.{first}.linear", (*path, "in"), (), dims, True)
        layout |= linear(f"{name}.{first}.res_connection", (*path, "skip"), (), dims, True)
        for j in range(1, layers):
            block = f"{name}.{first + j * step}.linear"
            layout |= linear(block, (*path, "blocks", str(j - 1)), (), "D D", True)
    for i in range(heads):
        layout |= linear(f"hydra_lm_head.{i}{last}", ("head", str(i)), (), "D V", True)
    if "layer" in prefix:
        for module, (name, dims, part) in _PREFIX_LINEAR.items():
            if module != "mlp.gate" or "gate" in prefix:
                path, bias = ("prefix", *module.split(".")), f"{part} bias" in prefix
                layout |= linear(PREFIX + name, path, (), dims, bias)
        for module, name in _PREFIX_NORMS.items():
            layout[f"{PREFIX}{name}.weight"] = Place(("prefix", module, "scale"), (), "D")
            if "norm bias" in prefix:
                layout[f"{PREFIX}{name}.bias"] = Place(("prefix", module, "bias"), (), "D")
    return layout


def mlp_speculator(stages: int, projections: int) -> Layout:
    """``stages`` embeddings, heads and norms; ``projections`` from one state to the next.

    n and n - 1 of them, or 1 and 1 if tied.
    """
    layout: Layout = {}
    for i in range(stages):
        layout[f"emb.{i}.weight"] = Place(("emb",), (i,), "V I")
        layout[f"head.{i}.weight"] = Place(("head", str(i)), (), "I V", True)
        layout[f"ln.{i}.weight"] = Place(("ln", "scale"), (i,), "I")
        layout[f"ln.{i}.bias"] = Place(("ln", "bias"), (i,), "I")
    layout["proj.0.weight"] = Place(("proj_in",), (), "D I", True)
    layout |= {
        f"proj.{i + 1}.weight": Place(("proj", str(i)), (), "I I", True) for i in range(projections)
    }
    return {f"speculator.{name}": place for name, place in layout.items()}


def bpd(heads: int, joint: bool = False) -> Layout:
    """K - 1 feed-forward layers or a joint one; no files were released: the names are specjax's."""
    layout: Layout = {}
    name, inner = ("joint_down", f"{heads}I") if joint else ("down", "I")
    for i in range(heads):
        layout |= linear(f"bpd.{i}.up", ("up",), (i,), "D I", True)
        layout |= linear(f"bpd.{i}.{name}", ("down",), (i,), f"{inner} D", True)
    return layout


# Parts of an early exit's adapter, for ``early_exit``: a leaf and a tensor that show them.
_EXIT_MARKS = {
    "layer": (("attention", "q", "kernel"), "layers.0.self_attn.q_proj.weight"),
    "linear": (("linear", "kernel"), "linear.weight"),
    "norm": (("norm", "scale"), "norm.weight"),
    "head": (("head", "kernel"), "lm_head.weight"),
}


def early_exit(parts: Collection[str]) -> Layout:
    """An adapter of some of the parts of ``_EXIT_MARKS``; the names are specjax's."""
    layout: Layout = {}
    if "layer" in parts:
        layout["layers.0.input_layernorm.weight"] = Place(("attention_norm", "scale"), (), "D")
        for module in ("q", "k", "v", "o"):
            name, dims, _ = _PREFIX_LINEAR[f"attention.{module}"]
            layout |= linear(name, ("attention", module), (), dims, False)
    if "linear" in parts:
        layout |= linear("linear", ("linear",), (), "D D", False)
    if "norm" in parts:
        layout["norm.weight"] = Place(("norm", "scale"), (), "D")
    return layout | (linear("lm_head", ("head",), (), "D V", False) if "head" in parts else {})


def look_ahead() -> Layout:
    """L input embeddings; there are no released files, so the name is specjax's."""
    return {"look_ahead.weight": Place(("look_ahead",), (), "L D")}


def of_names(kind: str, names: Collection[str]) -> Layout:
    """The complete layout of a file with these tensor names; some may be missing in the file."""
    if kind in eagle_layouts.KINDS:
        return eagle_layouts.of_names(kind, names)
    if kind in _TABLES:
        return _TABLES[kind].of_names(names)

    def count(pattern: str) -> int:
        # Counts different matches instead of using the highest index: a wrong index can be huge.
        return len({match[1] for name in names if (match := re.match(pattern, name))})

    if kind == "medusa":
        if any(name.startswith("blocks.") for name in names):
            heads = count(r"blocks\.(\d+)\.")
            layers = count(r"blocks\.\d+\.layers\.(\d+)\.")
            own_head = count(r"(lm_heads)\.") > 0
            biases = any(name.endswith(".bias") for name in names)
            return medusa(heads, layers, own_head, biases, vllm=True)
        own_head = count(r"\d+\.\d+\.(weight)$") > 0
        return medusa(count(r"(\d+)\."), count(r"\d+\.(\d+)\.linear\."), own_head)
    if kind == "pass":
        return look_ahead()
    if kind == "hydra":
        layers = count(r"hydra_mlp\.\d+\.(\d+)\.linear\.")
        dropout = count(r"hydra_lm_head\.\d+\.(1)\.") > 0
        return hydra(count(r"hydra_mlp\.(\d+)\."), layers, dropout, _prefix_of_names(names))
    if kind == "mlp_speculator":
        stages = max(count(rf"speculator\.{part}\.(\d+)\.") for part in ("emb", "head", "ln"))
        projections = count(r"speculator\.proj\.(\d+)\.")
        # Tied, without the duplicates.
        if (stages, projections) == (1, 2):
            return mlp_speculator(1, 1)
        stages = max(stages, projections)
        return mlp_speculator(stages, stages - 1)
    if kind == "early_exit":
        return early_exit({part for part, (_, name) in _EXIT_MARKS.items() if name in names})
    return bpd(count(r"bpd\.(\d+)\."), any(".joint_down." in name for name in names))


def of_leaves(kind: str, leaves: Mapping[tuple, np.ndarray], name: str = "") -> Layout:
    """The layout of the file for these parameters.

    ``name`` is one of ``LAYOUTS`` of the kind; "" is its first.
    Raises UserError if they are not those of such heads.
    """
    problem = f"the parameters are not those of {kind} heads"
    solution = "give the parameters of such heads"
    try:
        layout = _layout_of_leaves(kind, leaves, name)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{problem} ({type(error).__name__}: {error}); {solution}") from None
    expected = stacked_shapes(layout)
    for leaf in sorted(leaves.keys() | expected.keys()):
        known = leaf in leaves and leaf in expected
        if not known or leaves[leaf].shape[: len(expected[leaf])] != expected[leaf]:
            raise UserError(
                f"{problem} ({'.'.join(leaf)} is missing, unexpected or of the wrong length); "
                f"{solution}"
            )
    return layout


def _layout_of_leaves(kind: str, leaves: Mapping[tuple, np.ndarray], name: str) -> Layout:
    if kind in eagle_layouts.KINDS:
        return eagle_layouts.of_leaves(kind, leaves, name)
    if kind in _TABLES:
        return _TABLES[kind].of_leaves(leaves, name)
    if kind == "medusa":
        heads, layers = leaves["block", "kernel"].shape[:2]
        return medusa(heads, layers, ("head", "kernel") in leaves)
    if kind == "pass":
        return look_ahead()
    if kind == "hydra":
        heads, layers, prefix = hydra_sizes(leaves)
        return hydra(heads, layers, bool(prefix), prefix)
    if kind == "mlp_speculator":
        stages = len(leaves["emb",])
        tied = stages == 1 and ("proj", "0") in leaves
        return mlp_speculator(stages, 1 if tied else stages - 1)
    if kind == "early_exit":
        parts = {part for part, (leaf, _) in _EXIT_MARKS.items() if leaf in leaves}
        if not parts:
            raise KeyError("norm.scale")
        return early_exit(parts)
    up, down = leaves["up", "kernel"], leaves["down", "kernel"]
    return bpd(len(up), up.shape[2] != down.shape[1])


def check(kind: str, params: Any, sizes: Mapping[str, int]) -> None:
    """Raises UserError unless ``params`` are the parameters of such heads.

    ``sizes`` has the expected size of some letters; other letters may have any size.
    """
    flat = flatten_dict(params) if isinstance(params, dict) else {}
    # Only names and shapes matter; a leaf without a shape counts as a number.
    leaves = {
        path: np.broadcast_to(np.int8(0), getattr(leaf, "shape", ())) for path, leaf in flat.items()
    }
    leaves = leaves if all(isinstance(key, str) for path in leaves for key in path) else {}
    known = dict(sizes)
    for place in of_leaves(kind, leaves).values():
        stacked, own = np.split(leaves[place.path].shape, [len(place.at)])
        dims = factors(place.dims)
        for (factor, letter), size in zip(dims, own, strict=False):
            if factor == 1:
                known.setdefault(letter, int(size))
        for (factor, letter), size in zip(dims, own, strict=False):
            if letter not in known and size % factor == 0:
                known[letter] = int(size // factor)
        expected = [factor * known.get(letter, 0) for factor, letter in dims]
        if own.tolist() != expected:
            name, shape = ".".join(place.path), [*stacked.tolist(), *own.tolist()]
            raise UserError(
                f"{name} of the {kind} heads is {shape}, and on this target it must be "
                f"{[*stacked.tolist(), *expected]}; use heads made for this target"
            )


def _prefix_of_names(names: Iterable[str]) -> set[str]:
    """The parts of a prefix layer in a file, for ``hydra``.

    A prefix layer without a gate is a GPT-2 layer, so its norms have biases.
    """
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
    """(number of heads, blocks of each head, parts of the prefix layer), for ``hydra``."""
    prefix = {"layer"} if any(leaf[0] == "prefix" for leaf in leaves) else set()
    prefix |= {"gate"} if ("prefix", "mlp", "gate", "kernel") in leaves else set()
    biases = {"attention": ("attention", "q"), "mlp": ("mlp", "up"), "norm": ("norm",)}
    prefix |= {
        f"{part} bias" for part, module in biases.items() if ("prefix", *module, "bias") in leaves
    }
    blocks = ("mlp", "0", "blocks")
    more = listed(leaves, *blocks) if any(leaf[:3] == blocks for leaf in leaves) else 0
    return listed(leaves, "head"), 1 + more, prefix
