"""The tensor names of draft networks: EAGLE-1, EAGLE-2 and HASS; EAGLE-3; ReDrafter.

The tables are those of ``head_layouts``. Their letters:

    D  hidden width of the network     V  vocabulary of the target     W  draft vocabulary
    O  one
    T  width of all taps together      E  of one tap                   H  of an attention head
    A  width of all queries            C  of all keys                  F  of the feed-forward

ReDrafter's D is the target's hidden width and F its ``exit_dim``.

Sources: SafeAILab/EAGLE (eagle/model/cnets1.py and cnets.py), sgl-project/SpecForge
(llama3_eagle.py), vllm-project/speculators (models/eagle3), vllm/model_executor/models/
llama_eagle3.py, apple/ml-recurrent-drafter (modeling_drafter.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from specjax.models.head_places import Layout, Place, linear, listed

# Kind -> the ways in which a directory of it can be written; the first is the default.
LAYOUTS = {
    "eagle": ("eagle",),
    "eagle3": ("eagle3", "specforge", "speculators"),
    "redrafter": ("redrafter",),
}
KINDS = tuple(LAYOUTS)
# The tensors of a draft vocabulary. They are no parameters: ``draft_vocabulary`` reads them.
MAPS = ("d2t", "t2d")
_SMALL = ("q", "k", "v")
_MLP = {"gate": "D F", "up": "D F", "down": "F D"}


class Parts(NamedTuple):
    """Which of the optional parts a network has."""

    layers: int
    biases: bool = False  # of q, k and v
    output_bias: bool = False  # of the attention's output
    qk_norm: bool = False  # Qwen3's norms of each head's queries and keys
    embed: bool = False
    fc_bias: bool = False  # EAGLE-1
    fc_norms: int = 0  # EAGLE-3.1: norms of each tap before fc
    input_norm: bool = False  # one norm of all taps before fc
    masked: bool = False  # P-EAGLE: taps of masks


def eagle(parts: Parts) -> Layout:
    """EAGLE-1: the first layer has no norm before its attention, and there is none at the end."""
    layout = linear("fc", ("fc",), (), "2D D", parts.fc_bias) | _embedding(parts)
    for i in range(parts.layers):
        norm = {"attention_norm": "input_layernorm"} if i else {}
        layout |= decoder_layer(f"layers.{i}", ("layers", str(i)), parts, "D", norm)
    return layout


def eagle3(parts: Parts, first: str = "midlayer") -> Layout:
    """EAGLE-3; ``first`` is the name of the first layer, whose attention reads 2D."""
    layout = linear("fc", ("fc",), (), "T D", False) | _embedding(parts)
    for i in range(parts.fc_norms):
        layout[f"fc_norm.{i}.weight"] = Place(("fc_norm", "scale"), (i,), "E")
    if parts.masked:
        layout["mask_hidden"] = Place(("mask_hidden",), (), "O O T")
    if parts.input_norm:
        layout["input_norm.weight"] = Place(("input_norm", "scale"), (), "T")
    wide = {"token_norm": "input_layernorm", "feature_norm": "hidden_norm"}
    layout |= decoder_layer(first, ("layers", "0"), parts, "2D", wide)
    for i in range(1, parts.layers):
        norm = {"attention_norm": "input_layernorm"}
        layout |= decoder_layer(f"layers.{i}", ("layers", str(i)), parts, "D", norm)
    layout["norm.weight"] = Place(("norm", "scale"), (), "D")
    return layout | linear("lm_head", ("head",), (), "D W", False)


def redrafter(blocks: int, rnn: bool, projection: bool) -> Layout:
    """``blocks`` residual blocks and the head; without ``rnn`` the state is a running sum.

    Without ``projection`` the blocks have the width 2D of [feature ; state].
    """
    layout: Layout = {}
    width = "F" if projection else "2D"
    if rnn:
        layout |= linear("rnn_u", ("rnn", "u"), (), "D D", True)
        layout |= linear("rnn_w", ("rnn", "w"), (), "D D", False)
    if projection:
        layout |= linear("input_proj", ("input_proj",), (), "2D F", True)
    for i in range(blocks):
        layout |= linear(f"lm_head.{i}.linear", ("block", str(i)), (), f"{width} {width}", True)
    return layout | linear(f"lm_head.{blocks}", ("head",), (), f"{width} V", False)


def clean_names(names: Collection[str]) -> dict[str, str]:
    """Name in the table -> name in the file, without buffers.

    Some programs put "model." in front of all names but that of the head.
    """
    kept = [name for name in names if not name.endswith("rotary_emb.inv_freq")]
    return {name.removeprefix("model."): name for name in kept}


def of_names(kind: str, names: Collection[str]) -> Layout:
    """The complete layout of a file with these names; some may be missing in the file."""

    def count(pattern: str) -> int:
        return len({match[1] for name in names if (match := re.match(pattern, name))})

    if kind == "redrafter":
        return redrafter(
            max(count(r"lm_head\.(\d+)\.linear\."), 1),
            any(name.startswith("rnn_") for name in names),
            any(name.startswith("input_proj.") for name in names),
        )
    middle = count(r"(midlayer)\.")
    more = r"layers\.([1-9]\d*)\." if middle else r"layers\.(\d+)\."
    parts = Parts(
        layers=max(count(more) + middle, 1),
        biases=any(re.search(r"\.self_attn\.[qkv]_proj\.bias$", name) for name in names),
        output_bias=any(name.endswith(".self_attn.o_proj.bias") for name in names),
        qk_norm=any(re.search(r"\.self_attn\.[qk]_norm\.", name) for name in names),
        embed="embed_tokens.weight" in names,
        fc_bias="fc.bias" in names,
        fc_norms=count(r"fc_norm\.(\d+)\."),
        input_norm="input_norm.weight" in names,
        masked="mask_hidden" in names,
    )
    if kind == "eagle":
        return eagle(parts)
    return eagle3(parts, "midlayer" if middle else "layers.0")


def of_leaves(kind: str, leaves: Mapping[tuple, Any], layout: str = "") -> Layout:
    """The layout for these parameters in one of ``LAYOUTS``; KeyError if they are others."""
    if kind == "redrafter":
        rnn = any(path[0] == "rnn" for path in leaves)
        return redrafter(listed(leaves, "block"), rnn, ("input_proj", "kernel") in leaves)
    paths = set(leaves)
    attention = ("layers", "0", "attention")
    norms = leaves["fc_norm", "scale"].shape[0] if ("fc_norm", "scale") in leaves else 0
    parts = Parts(
        layers=len({path[1] for path in paths if path[0] == "layers"}),
        biases=(*attention, "q", "bias") in paths,
        output_bias=(*attention, "o", "bias") in paths,
        qk_norm=(*attention, "q_norm", "scale") in paths,
        embed=("embed", "embedding") in paths,
        fc_bias=("fc", "bias") in paths,
        fc_norms=norms,
        input_norm=("input_norm", "scale") in paths,
        masked=("mask_hidden",) in paths,
    )
    if kind == "eagle":
        return eagle(parts)
    return eagle3(parts, "layers.0" if layout == "speculators" else "midlayer")


def is_eagle3(names: Collection[str]) -> bool:
    """Whether these are the names of an EAGLE-3 network, not of an EAGLE-1 network."""
    return any(name.endswith(".hidden_norm.weight") for name in names)


def is_whole_model(names: Collection[str]) -> bool:
    """Whether these are the names of a language model: a head has fc, or no embedding and norm."""
    own = {re.sub(r"^(model|transformer|gpt_neox)\.", "", name) for name in names}
    first = "layers.0.self_attn.o_proj.weight"
    whole = {"embed_tokens.weight", "norm.weight", first} <= own
    gpt2 = {"wte.weight", "wpe.weight", "ln_f.weight"} <= own
    neox = {"embed_in.weight", "final_layer_norm.weight"} <= own
    return (whole or gpt2 or neox) and "fc.weight" not in own and not is_eagle3(own)


def _embedding(parts: Parts) -> Layout:
    if not parts.embed:
        return {}
    return {"embed_tokens.weight": Place(("embed", "embedding"), (), "V D")}


def decoder_layer(
    name: str, path: tuple[str, ...], parts: Parts, read: str, norms: Mapping[str, str]
) -> Layout:
    """A decoder layer whose attention reads the width ``read``; ``norms`` are those before it."""
    layout: Layout = {}
    for module, stored in norms.items():
        layout[f"{name}.{stored}.weight"] = Place((*path, module, "scale"), (), "D")
    for part in _SMALL:
        dims = f"{read} {'A' if part == 'q' else 'C'}"
        module = (*path, "attention", part)
        layout |= linear(f"{name}.self_attn.{part}_proj", module, (), dims, parts.biases)
    module = (*path, "attention", "o")
    layout |= linear(f"{name}.self_attn.o_proj", module, (), "A D", parts.output_bias)
    for part in ("q_norm", "k_norm") if parts.qk_norm else ():
        layout[f"{name}.self_attn.{part}.weight"] = Place(
            (*path, "attention", part, "scale"), (), "H"
        )
    layout[f"{name}.post_attention_layernorm.weight"] = Place((*path, "mlp_norm", "scale"), (), "D")
    for part, dims in _MLP.items():
        layout |= linear(f"{name}.mlp.{part}_proj", (*path, "mlp", part), (), dims, False)
    return layout
