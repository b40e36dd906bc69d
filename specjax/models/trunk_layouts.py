"""The tensor names of the further last layers of ``mtp``.

    layout       names                      a layer's
    huggingface  extra_heads.{j}.           Llama's in Hugging Face files, specjax's for other parts
    meta         extra_heads.{j}.           Meta's (attention.wq, feed_forward.w1, attention_norm)

``extra_heads`` is the name in Meta's release (facebook/multi-token-prediction), whose
consolidated.pth also has the target. There the rotary pairs of a head are (2i, 2i + 1) and here
(i, i + d/2), so the columns of queries and keys have another order.

The table is one of ``head_layouts``: D the width, A of all queries, C of keys and values, F of the
feed-forward, Q and K of the norms of queries and keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import UserError
from specjax.models.head_places import Layout, Place, listed
from specjax.models.hf_config import read_json

KIND, META = "mtp", "meta"
LAYOUTS = {KIND: ("huggingface", META)}
# Module here -> (module in the file, dimensions of its kernel or "" for a norm, letter of its bias
# or scale).
_MODULES = {
    ("attention_norm",): ("input_layernorm", "", "D"),
    ("attention", "q"): ("self_attn.q_proj", "D A", "A"),
    ("attention", "k"): ("self_attn.k_proj", "D C", "C"),
    ("attention", "v"): ("self_attn.v_proj", "D C", "C"),
    ("attention", "o"): ("self_attn.o_proj", "A D", "D"),
    ("attention", "q_norm"): ("self_attn.q_norm", "", "Q"),
    ("attention", "k_norm"): ("self_attn.k_norm", "", "K"),
    ("attention_post_norm",): ("self_attn.output_layernorm", "", "D"),
    ("mlp_norm",): ("post_attention_layernorm", "", "D"),
    ("mlp", "gate"): ("mlp.gate_proj", "D F", "F"),
    ("mlp", "up"): ("mlp.up_proj", "D F", "F"),
    ("mlp", "down"): ("mlp.down_proj", "F D", "D"),
    ("mlp_post_norm",): ("mlp.output_layernorm", "", "D"),
}


def _of_layer() -> Layout:
    """All tensors that a layer may have."""
    layout: Layout = {}
    for module, (name, kernel, letter) in _MODULES.items():
        if kernel:
            layout[f"{name}.weight"] = Place((*module, "kernel"), (), kernel, True)
        else:
            layout[f"{name}.weight"] = Place((*module, "scale"), (), letter)
        layout[f"{name}.bias"] = Place((*module, "bias"), (), letter)
    return layout


_LAYER = _of_layer()
# What every layer has.
_ALWAYS = tuple(f"self_attn.{part}_proj.weight" for part in "qkvo")
_META_NAMES = {
    **{f"self_attn.{part}_proj.weight": f"attention.w{part}.weight" for part in "qkvo"},
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}


def layout_of(names: Iterable[str]) -> str:
    """The layout of a file with these names."""
    meta = any(name.endswith(".attention.wq.weight") for name in names)
    return META if meta else LAYOUTS[KIND][0]


def of_heads(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the heads alone, of the files of a whole model or of heads."""
    whole = "tok_embeddings.weight" in tensors
    return {x: y for x, y in tensors.items() if not whole or x.startswith("extra_heads.")}


def of_names(names: Collection[str]) -> Layout:
    """The table of a file with these names; what every layer has may be missing in the file."""
    heads = {name.split(".")[1] for name in names if name.startswith("extra_heads.")} or {"0"}
    if layout_of(names) == META:
        every = ((head, name) for head in map(str, range(len(heads))) for name in _META_NAMES)
        return _table(every, META)
    return _table(
        (head, name)
        for head in map(str, range(len(heads)))
        for name in _LAYER
        if name in _ALWAYS or f"extra_heads.{head}.{name}" in names
    )


def of_leaves(leaves: Mapping[tuple, Any], layout: str = "") -> Layout:
    """The table of these parameters; KeyError if they are others.

    Raises UserError for parts that the layout has no name for.
    """
    parts = [
        (head, name)
        for head in map(str, range(listed(leaves, "layers")))
        for name, place in _LAYER.items()
        if name in _ALWAYS or ("layers", head, *place.path) in leaves
    ]
    other = next((name for _, name in parts if name not in _META_NAMES), None)
    if layout == META and other is not None:
        raise UserError(
            f"the layout {META} has no name for {other}; write the layout {LAYOUTS[KIND][0]}"
        )
    return _table(parts, layout)


def _table(parts: Iterable[tuple[str, str]], layout: str = "") -> Layout:
    """The table of these (head, name in a layer of the first layout)."""
    names = _META_NAMES if layout == META else {name: name for name in _LAYER}
    return {
        f"extra_heads.{head}.{names[name]}": _LAYER[name]._replace(
            path=("layers", head, *_LAYER[name].path)
        )
        for head, name in parts
    }


def after_reading(
    kind: str, where: Path, names: Iterable[str], config: Mapping[str, Any], leaves: dict
) -> dict:
    """The leaves of heads of any kind, those of Meta's files in the order of columns used here.

    Raises UserError if the width of an attention head is not known.
    """
    if kind != KIND or layout_of(names) != META:
        return leaves
    width, sizes = config.get("head_dim"), where / "params.json"
    if width is None and sizes.is_file():
        width = _width_in(sizes)
    if width is None:
        raise UserError(
            f"{where}: the width of an attention head is missing; give params.json, or head_dim in "
            "config.json"
        )
    return _ordered(leaves, (-1, width // 2, 2))


def _width_in(sizes: Path) -> int:
    """The width of an attention head in Meta's params.json. Raises UserError."""
    values = read_json(sizes)
    for key in ("dim", "n_heads"):
        if type(values.get(key)) is not int or values[key] < 1:
            raise UserError(f"{sizes}: {key} is {values.get(key)!r}; it must be a whole number > 0")
    if values["dim"] % values["n_heads"] or values["dim"] // values["n_heads"] % 2:
        raise UserError(
            f"{sizes}: dim is {values['dim']} and n_heads {values['n_heads']}; the width of a "
            "head, dim / n_heads, must be an even number"
        )
    return values["dim"] // values["n_heads"]


def before_writing(kind: str, layout: str, leaves: dict, config: Mapping[str, Any]) -> dict:
    """The leaves of heads of any kind, in the order of columns of the layout."""
    if kind != KIND or layout != META:
        return leaves
    if "head_dim" not in config:
        raise UserError(f"head_dim is missing; the layout {META} needs the width of a head")
    return _ordered(leaves, (-1, 2, config["head_dim"] // 2))


def _ordered(leaves: dict, shape: tuple[int, int, int]) -> dict:
    """The leaves; columns of queries and keys, as (heads, a, b), in the order (heads, b, a)."""

    def one(path: tuple, leaf: Any) -> Any:
        if path[-3:] not in (("attention", "q", "kernel"), ("attention", "k", "kernel")):
            return leaf
        return leaf.reshape(len(leaf), *shape).swapaxes(-1, -2).reshape(leaf.shape)

    return {path: one(path, leaf) for path, leaf in leaves.items()}
