"""The tensor names of block drafters: DFlash's, and those of DSpark, Domino and DFlare.

Sources: z-lab/dflash, sgl-project/SpecForge, Tencent/AngelSlim. The name of the masks' own
embedding is specjax's; released files take that of a token.

    T  width of all taps      A  width of the queries      C  of keys and values
    F  width of the feed-forward      H  of an attention head      N  layers      M  taps
    R  rank      G  width of the GRU      J, K, P, Q  sums such as D + R      O  one
    V  vocabulary of the target      W  draft vocabulary, of an LM head of its own
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from specjax.models import eagle_layouts
from specjax.models.head_places import Layout, Place, linear

KIND = "block_head"
# The ways in which a directory can be written; the first is the default.
LAYOUTS = {KIND: ("dflash", "specforge", "deepspec", "speculators")}
# Parts of a network: a leaf and a tensor that show them.
_MARKS = {
    "embed": (("embed", "embedding"), "embed_tokens.weight"),
    "head": (("head", "kernel"), "lm_head.weight"),
    "shared": (("fc", "kernel"), "fc.weight"),
    "mixed": (("mix",), "layer_fusion_weights"),
    "mask": (("mask",), "mask_embedding"),
    "markov": (("markov", "table"), "markov_head.markov_w1.weight"),
    "gate": (("markov", "gate", "kernel"), "markov_head.gate_proj.weight"),
    "joint": (("markov", "joint", "kernel"), "markov_head.joint_proj.weight"),
    "gru": (("gru", "w"), "prefix_gru.weight_ih_l0"),
    "confidence": (("confidence", "kernel"), "confidence_head.proj.weight"),
    "qk_norm": (
        ("layers", "0", "attention", "q_norm", "scale"),
        "layers.0.self_attn.q_norm.weight",
    ),
    "biases": (("layers", "0", "attention", "q", "bias"), "layers.0.self_attn.q_proj.bias"),
    "output_bias": (("layers", "0", "attention", "o", "bias"), "layers.0.self_attn.o_proj.bias"),
}


class Parts(NamedTuple):
    """What a network consists of."""

    layers: int
    has: frozenset[str]  # keys of ``_MARKS``


def of_names(names: Collection[str]) -> Layout:
    """The complete layout of a file with these tensor names; some may be missing in the file."""
    layers = len({name.split(".")[1] for name in names if name.startswith("layers.")})
    has = frozenset(part for part, (_, name) in _MARKS.items() if name in names)
    return _layout(Parts(max(layers, 1), has))


def of_leaves(leaves: Mapping[tuple, Any], layout: str = "") -> Layout:
    """The layout for these parameters, in all of ``LAYOUTS``; KeyError if they are others."""
    del layout
    layers = len({path[1] for path in leaves if path[0] == "layers"})
    has = frozenset(part for part, (leaf, _) in _MARKS.items() if leaf in leaves)
    if not layers:
        raise KeyError("layers")
    return _layout(Parts(layers, has))


def _layout(parts: Parts) -> Layout:
    layout: Layout = {}
    has = parts.has
    if "mixed" in has:
        layout["layer_fusion_weights"] = Place(("mix",), (), "N M")
    else:
        layout |= linear("fc", ("fc",), (), "T D", False)
    for name in ("hidden_norm", "norm"):
        layout[f"{name}.weight"] = Place((name, "scale"), (), "D")
    if "embed" in has:
        layout["embed_tokens.weight"] = Place(("embed", "embedding"), (), "V D")
    if "head" in has:
        layout |= linear("lm_head", ("head",), (), "D W", False)
    if "mask" in has:
        layout["mask_embedding"] = Place(("mask",), (), "D")
    own = eagle_layouts.Parts(
        layers=parts.layers,
        biases="biases" in has,
        output_bias="output_bias" in has,
        qk_norm="qk_norm" in has,
        embed=False,
        fc_bias=False,
        fc_norms=0,
        input_norm=False,
    )
    norms = {"attention_norm": "input_layernorm"}
    for i in range(parts.layers):
        name, path = f"layers.{i}", ("layers", str(i))
        layout |= eagle_layouts.decoder_layer(name, path, own, "D", norms)
        for part in ("k", "v") if "mixed" in has else ():
            module = (*path, f"context_{part}")
            layout |= linear(f"{name}.self_attn.{part}_proj_target", module, (), "D C", own.biases)
    return layout | _corrections(has)


def _corrections(has: frozenset[str]) -> Layout:
    layout: Layout = {}
    drafted = "W" if "head" in has else "V"
    if "markov" in has:
        layout["markov_head.markov_w1.weight"] = Place(("markov", "table"), (), "V R")
        layout |= linear("markov_head.markov_w2", ("markov", "out"), (), f"R {drafted}", False)
    if "gate" in has:
        layout |= linear("markov_head.gate_proj", ("markov", "gate"), (), "J R", True)
    if "joint" in has:
        layout |= linear("markov_head.joint_proj", ("markov", "joint"), (), "K 3R", True)
    if "gru" in has:
        layout["prefix_gru.weight_ih_l0"] = Place(("gru", "w"), (), "D 3G", True)
        layout["prefix_gru.weight_hh_l0"] = Place(("gru", "u"), (), "G 3G", True)
        layout |= linear("embed_proj.0", ("prefix", "in"), (), "P R", False)
        layout |= linear("embed_proj.2", ("prefix", "out"), (), f"R {drafted}", False)
    if "confidence" in has:
        layout |= linear("confidence_head.proj", ("confidence",), (), "Q O", True)
    return layout
