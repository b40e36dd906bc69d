"""The tensor names of multi-token prediction modules inside released models.

    layout    names                                                     fc reads
    deepseek  model.layers.{L + i}.{enorm,hnorm,eh_proj,shared_head.norm}  [token ; hidden]
    mimo      model.mtp_layers.{i}.{token_layernorm,hidden_layernorm,
              input_proj,final_layernorm}                               [hidden ; token]
    qwen3     mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm},
              mtp.layers.0                                              [token ; hidden]

and those of a decoder layer. L is the number of the model's own layers. "deepseek" is also GLM's.
Files of this layout may have copies of the model's ends, shared_head.head and embed_tokens.
"qwen3" (Qwen3-Next, Qwen3.5) has one module, and norms whose factor is 1 + the tensor.

The tables are those of ``head_layouts``, with the letters of ``eagle_layouts``. Sources:
vllm/model_executor/models (deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py, qwen3_next_mtp.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from specjax.errors import UserError
from specjax.models.eagle_layouts import Parts, decoder_layer
from specjax.models.head_places import Layout, Place, linear, listed

KIND = "mtp_module"
LAYOUTS = {KIND: ("deepseek", "mimo", "qwen3")}


class ModuleNames(NamedTuple):
    """The names of one layout; "{i}" is the number of a module."""

    module: str  # in front of the names of a module
    layer: str  # in front of those of its decoder layer
    token_norm: str
    feature_norm: str
    fc: str
    norm: str
    hidden_first: bool = False
    around_one: bool = False  # the factor of a norm is 1 + the tensor
    one: bool = False  # there is one module only
    ends: bool = False  # files may have copies of the model's ends


NAMES = {
    "deepseek": ModuleNames(
        *("model.layers.{i}.", "model.layers.{i}"),
        *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        ends=True,
    ),
    "mimo": ModuleNames(
        *("model.mtp_layers.{i}.", "model.mtp_layers.{i}"),
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
    "qwen3": ModuleNames(
        *("mtp.", "mtp.layers.0"),
        *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        around_one=True,
        one=True,
    ),
}
# Parts of names that show a layer which the decoder here cannot compute, and what it has.
_OTHER = {
    r"\.self_attn\.(q_a|kv_a|kv_b)_": "multi-head latent attention (MLA)",
    r"\.mlp\.(experts|shared_expert|shared_experts|gate)\.": "experts",
    r"\.linear_attn\.": "linear attention",
    r"\.weight_scale": "quantised weights",
}


def layout_of(names: Iterable[str]) -> str:
    """The layout of a file with these names; "" if it has no module."""
    every = list(names)
    for layout, own in NAMES.items():
        pattern = re.escape(own.module + own.fc + ".weight").replace(r"\{i\}", r"\d+")
        if any(re.fullmatch(pattern, name) for name in every):
            return layout
    return ""


def numbers(layout: str, names: Iterable[str]) -> list[int]:
    """The numbers of the modules in a file, ascending."""
    own = NAMES[layout]
    if own.one:
        return [0]
    pattern = re.escape(own.module + own.fc + ".weight").replace(r"\{i\}", r"(\d+)")
    return sorted({int(m[1]) for name in names if (m := re.fullmatch(pattern, name))})


def fronts(names: Collection[str]) -> tuple[str, ...]:
    """What the names of the modules' tensors begin with, in a file with these names."""
    layout = layout_of(names)
    if not layout:
        return ()
    return tuple(NAMES[layout].module.format(i=i) for i in numbers(layout, names))


def of_modules(where: object, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the modules alone, of the files of a whole model or of modules.

    Copies of the model's ends in modules after the first are left out; they must be those of the
    first. Raises UserError for modules that cannot be computed, by the name of what they have.
    """
    layout = layout_of(tensors)
    if not layout:
        return dict(tensors)
    own, of_each = NAMES[layout], fronts(tensors)
    kept = {
        name: read
        for name, read in tensors.items()
        if name.startswith(of_each) and not name.endswith("rotary_emb.inv_freq")
    }
    for pattern, what in _OTHER.items():
        name = next((name for name in kept if re.search(pattern, name)), None)
        if name is not None:
            raise UserError(
                f"{where}: the {KIND} layer has {what} ({name}), which is not supported; supported "
                "are dense layers with grouped-query attention"
            )
    for end in ("embed_tokens.weight", "shared_head.head.weight") if own.ends else ():
        for front in of_each[1:]:
            first, name = kept.get(of_each[0] + end), front + end
            if name in kept and (first is None or (first() != kept[name]()).any()):
                raise UserError(
                    f"{where}: {name} is not that of the first module; modules with ends of their "
                    "own are not supported"
                )
            kept.pop(name, None)
    return kept


def of_names(names: Collection[str]) -> Layout:
    """The complete table of a file with these names; some may be missing in the file."""
    layout = layout_of(names) or "deepseek"
    found = numbers(layout, names) or [0]
    own = NAMES[layout]
    first, front = own.layer.format(i=found[0]), own.module.format(i=found[0])
    parts = Parts(
        layers=1,
        biases=f"{first}.self_attn.q_proj.bias" in names,
        output_bias=f"{first}.self_attn.o_proj.bias" in names,
        qk_norm=f"{first}.self_attn.q_norm.weight" in names,
    )
    ends = {
        key
        for key, name in (("embed", "embed_tokens.weight"), ("head", "shared_head.head.weight"))
        if own.ends and front + name in names
    }
    return table(layout, found, parts, ends)


def of_leaves(leaves: Mapping[tuple, Any], layout: str) -> Layout:
    """The table of these parameters in a layout, as if the model had no layers of its own.

    ``at_layer`` moves the names. KeyError if they are other parameters.
    """
    paths, count = set(leaves), listed(leaves, "modules")
    attention = ("modules", "0", "layers", "0", "attention")
    parts = Parts(
        layers=1,
        biases=(*attention, "q", "bias") in paths,
        output_bias=(*attention, "o", "bias") in paths,
        qk_norm=(*attention, "q_norm", "scale") in paths,
    )
    ends = {path[0] for path in paths} & {"embed", "head"}
    own = NAMES[layout or LAYOUTS[KIND][0]]
    if ends and not own.ends:
        raise UserError(
            f"the layout {layout} has no place for an embedding or a head of the modules; write "
            "the layout deepseek"
        )
    if own.one and count > 1:
        raise UserError(f"the layout {layout} has one module, and there are {count}")
    return table(layout or LAYOUTS[KIND][0], list(range(count)), parts, ends)


def table(layout: str, found: list[int], parts: Parts, ends: Collection[str]) -> Layout:
    """The table of modules with these numbers; ``ends``: "embed", "head" of the first."""
    own, result = NAMES[layout], Layout()
    for module, number in enumerate(found):
        front, path = own.module.format(i=number), ("modules", str(module))
        for key in ("token_norm", "feature_norm", "norm"):
            result[f"{front}{getattr(own, key)}.weight"] = Place((*path, key, "scale"), (), "D")
        result |= linear(f"{front}{own.fc}", (*path, "fc"), (), "2D D", False)
        name = own.layer.format(i=number)
        norms = {"attention_norm": "input_layernorm"}
        result |= decoder_layer(name, (*path, "layers", "0"), parts, "D", norms)
    front = own.module.format(i=found[0])
    if "embed" in ends:
        result[f"{front}embed_tokens.weight"] = Place(("embed", "embedding"), (), "V D")
    if "head" in ends:
        result |= linear(f"{front}shared_head.head", ("head",), (), "D V", False)
    return result


def at_layer(layout: str, tensors: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Tensors of ``of_leaves`` with the names that they have behind ``layers`` layers."""
    if layout != "deepseek":
        return dict(tensors)

    def moved(match: re.Match) -> str:
        return f"model.layers.{int(match[1]) + layers}."

    return {re.sub(r"^model\.layers\.(\d+)\.", moved, name): x for name, x in tensors.items()}
