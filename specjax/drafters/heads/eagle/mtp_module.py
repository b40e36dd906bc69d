"""Multi-token prediction modules: a decoder layer for each further token.

DeepSeek-V3 (DeepSeek-AI 2024, 2412.19437, section 2.2). Slot t of the first module reads fc([norm
of the embedding of token t + 1 ; norm of the target's hidden state of token t]) and predicts token
t + 2; the next module reads its output and token t + 2, and so on. The embedding and the LM head
are the target's. Drafts may be deeper than there are modules: the last one then reads its own
output, as serving programs do with the one released module.

Without keys the draft is a chain of one token per module, and of 3 with fewer modules. Siblings
"top_k" are deterministic: L1 with "deterministic", "match" and other rules for such drafts. Drafts
sampled from the modules' probabilities ("without_replacement", "iid") are L1 with "chain",
"recursive" and their variants.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax import declare
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.files import decoder_layers
from specjax.drafters.files.codec import (
    OWN,
    Codec,
    Config,
    Facts,
    Found,
    Leaves,
    Rule,
    Rules,
    Shapes,
    Sizes,
    Suited,
    Tensors,
    Written,
    linear,
    scale,
)
from specjax.drafters.heads import _shape
from specjax.drafters.heads.eagle import _drafter, _loss
from specjax.drafters.heads.eagle._network import Fed, Layer, Layers, Network, layer_facts
from specjax.drafters.objectives import Pretrained
from specjax.drafters.shared_keys import NetworkKeys
from specjax.errors import UserError
from specjax.models.config_values import check_only, object_of, switch, whole_of
from specjax.models.families import FAMILIES
from specjax.models.hf_config import text_model
from specjax.models.hf_weights import prediction_modules
from specjax.models.layers import Linear, Module, Norm, dtype_of, linear_options
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "deepseekai2024v3"

NAME = "mtp_module"
# Tokens of a chain without keys, if there are fewer modules.
GAMMA = 3
NORMED, RAW = "normed", "raw"


class Keys(NetworkKeys):
    """The keys of ``mtp_module``."""

    modules: int = key(0, "how many", least=0, new=1, size=lambda params: len(params["modules"]))
    hidden_first: bool = key(
        False, "the linear map reads [hidden ; token], not [token ; hidden]", fact="hidden_first"
    )
    hidden: str = key(
        "",
        'which hidden state of the target is read: "normed", after its last norm, or "raw", '
        'before it; "": as in the files, or "normed"',
        choices=("", "normed", "raw"),
        fact="hidden",
    )
    recycled: str = key(
        "",
        'which output of a module the next one reads: "normed", after its last norm, or "raw"; '
        '"": as in the files, or "normed"',
        choices=("", "normed", "raw"),
        fact="recycled",
    )
    zero_first: bool = key(False, "the token of slot 0 is read as zeros (vLLM)", fact="zero_first")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with multi-token prediction modules.

    The switches are for new modules, and for files that do not state them: no tensor shows them,
    and a wrong one makes drafts worse and never changes the text.

    Raises:
        UserError: files without modules or of another target, a decoder layer that cannot be
            computed, sizes that differ from the files, a tree that does not fit.
    """
    given, keys = files.read(NAME, target, keys)
    module = None if given.params is None else given.params["modules"]["0"]
    config = _shape.config_of(NAME, target, given, keys, module)
    hidden, recycled = keys.hidden or NORMED, keys.recycled or NORMED
    taps = (_shape.layers_of(NAME, target) - 1,) if hidden == RAW else ()
    switches = keys.hidden_first, hidden, recycled, keys.zero_first
    shape = MtpShape(config, taps, keys.modules, *switches)
    leaves = MODULE.leaves(shape)
    _shape.check(NAME, given, {"modules": {str(i): leaves for i in range(shape.modules)}})
    layers = () if target.layers is None else (("num_hidden_layers", target.layers),)
    facts = (*layer_facts(config), *files.facts(Keys, shape), *layers)
    network = MtpNetwork(NAME, shape, given.ends, dtype_of(given.params), facts=facts)
    training = Bound(_loss.training, network, target, defaults=_loss.MTP | {"steps": shape.modules})
    chain = shapes.chain(max(shape.modules, GAMMA))
    return _drafter.build(target, network, keys, given, training, chain)


# In a module x = fc([norm(token) ; norm(hidden)]) is the input of a decoder layer; its normed
# output goes to the LM head. Checkpoints and programs differ in the order of the two, in the hidden
# state that is read, and in the one that is handed on.
#
# Parameters: {modules: {"0", "1", ...: {token_norm, feature_norm, norm: {scale}, fc: {kernel},
# layers: {"0": a decoder layer}}}}, and, where files have copies of the target's, {embed:
# {embedding}, head: {kernel}}.


@dataclasses.dataclass(frozen=True)
class MtpShape:
    """The static facts of the modules."""

    config: TransformerConfig  # of the decoder layer of each; ``hidden_size`` is the target's width
    taps: tuple[int, ...] = ()  # the last layer of the target, for its raw hidden state
    modules: int = 1
    hidden_first: bool = False  # fc reads [norm(hidden) ; norm(token)]
    hidden: str = NORMED  # the target's hidden state, after its last norm or before it
    recycled: str = NORMED  # a module's output for the next one, after its last norm or before it
    zero_first: bool = False  # the token at position 0 is read as zeros
    # As in ``_network.Shape``.
    vocab: ClassVar[int | None] = None
    shift: ClassVar[int] = 1
    parallel: ClassVar[int] = 0


class MtpModule(Layers):
    """One module."""

    def __init__(self, shape: MtpShape, dtype, rngs: nnx.Rngs):
        config = shape.config
        super().__init__(Layer(config, dtype, rngs, first=False), config, dtype, rngs)
        self.shape, size = shape, config.hidden_size
        self.token_norm, self.feature_norm = Norm(config, dtype), Norm(config, dtype)
        self.fc = Linear(2 * size, size, **linear_options(False, dtype, rngs))
        self.norm = Norm(config, dtype)

    def read(self, taps: Array) -> Array:
        """Taps [B,T,1,D] -> [B,T,D]."""
        return taps[..., 0, :]

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        read = [self.token_norm(embedded), self.feature_norm(features)]
        x = self.fc(jnp.concatenate(read[::-1] if self.shape.hidden_first else read, -1))
        x, own = self.run(x, angle, past, cache, block)
        hidden = self.norm(x)
        return Fed(hidden, hidden if self.shape.recycled == NORMED else x), own


MODULE = Module(MtpModule)


class MtpNetwork(Network):
    """Modules in sequence."""

    def module(self, params: ModelParams, number: int = 0) -> MtpModule:
        return MODULE.merge(self.shape, params.draft["modules"][str(number)], self.dtype)

    def start(self, target_params: Params, key: Array) -> Params:
        keys = jax.random.split(key, self.shape.modules)
        return {"modules": {str(i): MODULE.new(self.shape, each) for i, each in enumerate(keys)}}


# What no tensor shows, under the keys of the drafter and of ``Head.config``.
SWITCHES = {"hidden": ("normed", "raw"), "recycled": ("normed", "raw"), "zero_first": (False, True)}
# Keys of config.json with the only value that is computed.
_ONLY = {"use_sliding_window": False, "logit_scale": 1.0}
_MADE = (
    *(OWN, "hidden_first", *SWITCHES, "read_as", "rope_parameters", "qk_norm"),
    *("auto_map", "architectures", "layer_types", "sliding_window", "draft_ids", "taps"),
)


class ModuleNames(NamedTuple):
    """The names of one layout; "{L}" is the number of the model's own layers."""

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
    gated: bool = False  # the layer may have a gate after its attention, and experts


NAMES = {
    "deepseek": ModuleNames(
        *("model.layers.{{i+{L}}}.", "model.layers.{{i+{L}}}."),
        *("enorm", "hnorm", "eh_proj", "shared_head.norm"),
        ends=True,
    ),
    "mimo": ModuleNames(
        *("model.mtp_layers.{{i}}.", "model.mtp_layers.{{i}}."),
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
    "qwen3": ModuleNames(
        *("mtp.", "mtp.layers.0."),
        *("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        around_one=True,
        one=True,
        gated=True,
    ),
}
_EXPERTS = "experts"
# Parts of names that show a layer which the decoder here cannot compute, and what it has.
_OTHER = {
    r"\.self_attn\.(q_a|kv_a|kv_b)_": "multi-head latent attention (MLA)",
    r"\.mlp\.(experts|shared_expert|shared_experts|gate)\.": _EXPERTS,
    r"\.linear_attn\.": "linear attention",
    r"\.weight_scale": "quantised weights",
}

# Of the target's own layers and of modules inside it.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# Models whose layers are Qwen2's, apart from biases.
_QWEN2 = ("llama", "mistral", "qwen2")


def _rules(layout: str, layers: int, joined: bool = False) -> Rules:
    """The table of a layout behind ``layers`` layers of the model.

    ``joined``: whether the queries of a head are followed by its gate.
    """
    own = NAMES[layout]
    front, name = (each.format(L=layers) for each in (own.module, own.layer))
    place = "modules.0" if own.one else "modules.{i}"
    rules: Rules = ()
    for norm in ("token_norm", "feature_norm", "norm"):
        rules += scale(front + getattr(own, norm), f"{place}.{norm}")
    rules += linear(front + own.fc, f"{place}.fc", "2D D")
    layer, dims, parts = f"{place}.layers.0.", decoder_layers.DIMS, decoder_layers.PARTS
    if own.gated:
        dims = dims | ({"attention.q": "D 2A"} if joined else {})
        parts = parts | dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), "!experts")
        rules += decoder_layers.gate_and_experts(name, layer)
    rules += decoder_layers.decoder_layer(name, layer, dims=dims, parts=parts)
    if own.ends:
        first = front.replace("{i+", "").replace("}", "")
        embed = Rule(f"{first}embed_tokens.weight", "embed.embedding", "V D", parts="embed")
        rules += (embed, *linear(f"{first}shared_head.head", "head", "D V", parts="head"))
    return rules


def _layout_of(names: Collection[str]) -> str:
    """The layout of a file with these names; the first, if it has no module."""
    front = "".join(prediction_modules(names)[:1])
    return "qwen3" if front == "mtp." else "mimo" if ".mtp_layers." in front else "deepseek"


class ModuleFiles(Codec):
    """Modules in the files of their model, or alone.

        layout    names                                                     fc reads
        deepseek  model.layers.{L + i}.{enorm,hnorm,eh_proj,shared_head.norm}  [token ; hidden]
        mimo      model.mtp_layers.{i}.{token_layernorm,hidden_layernorm,
                  input_proj,final_layernorm}                               [hidden ; token]
        qwen3     mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc,norm},
                  mtp.layers.0                                              [token ; hidden]

    and those of a decoder layer. L is the number of the model's own layers. "deepseek" is also
    GLM's. Files of this layout may have copies of the model's ends, shared_head.head and
    embed_tokens. "qwen3" (Qwen3-Next, Qwen3.5) has one module, and norms whose factor is 1 + the
    tensor; its layer may have a gate after its attention, a part of each head that is rotated,
    and Qwen3-Next's experts. The letters are those of ``decoder_layers``. Sources:
    vllm/model_executor/models (deepseek_mtp.py, glm4_moe_mtp.py, mimo_mtp.py, qwen3_next_mtp.py).
    """

    files = ("model.safetensors", "pytorch_model.bin")
    layouts = tuple(NAMES)
    engines: ClassVar = {"vllm": "mimo"}
    inside = True
    open: ClassVar = SWITCHES | {"hidden_first": (False, True), "rope_theta": (10000.0,)}

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        norm = ("modules", "0", "layers", "0", "attention", "q_norm", "scale") in leaves
        hidden, raw = config.get("hidden"), config.get("recycled") == RAW
        return {
            "it computes one module; train with modules=1": _modules(leaves) > 1,
            "it reads hidden states before the last norm; train with hidden=raw": hidden != RAW,
            "it reads zeros at slot 0; train with zero_first=true": not config.get("zero_first"),
            "it recycles the output after its norm; train with recycled=normed": raw,
            "its layer has no norm of queries and keys; train with qk_norm=false": norm,
            "its layer has no gate and no experts": bool(_needs_gated(leaves)),
            "it rotates heads whole": config.get("partial_rotary_factor", 1) != 1,
        }

    def suit(self, engine: str, leaves: Leaves, config: Config) -> Suited:
        note = "it reads modules inside a copy of their target: --into=TARGET writes one"
        # Its layer is Qwen2's, which has biases.
        config = config | {"attention_bias": True}
        return super().suit(engine, leaves, config)._replace(note=note)

    def in_target(self, where: Path, raw: Config, own: Config, engine: str) -> Config:
        for size in _SIZES:
            if size in raw and own.get(size) not in (None, raw[size]):
                raise UserError(
                    f"{where}: {size} is {raw[size]}, and that of the modules is {own[size]}; "
                    "modules inside a target have its sizes, so give their target, or train others"
                )
        gated = own.get("attn_output_gate", False)
        if own[OWN]["layout"] == "qwen3" and _has_gate(where, _flat(raw)) != gated:
            theirs, ours = ("lacks", "has") if gated else ("has", "lacks")
            raise UserError(
                f"{where}: the attention of the target {theirs} a gate, and that of the modules "
                f"{ours} one; write another layout"
            )
        added = {key: own[key] for key in ("num_nextn_predict_layers", OWN)}
        if engine:
            if raw.get("model_type") not in _QWEN2:
                raise UserError(
                    f"{where} is a {raw.get('model_type')} model; as MiMo, {engine} reads modules "
                    f"in {', '.join(_QWEN2)}"
                )
            added |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}
        return raw | added

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        fronts = prediction_modules(tensors)
        if not fronts:
            return tensors
        kept = {
            name: read
            for name, read in tensors.items()
            if name.startswith(fronts) and not name.endswith("rotary_emb.inv_freq")
        }
        gated, config = NAMES[_layout_of(kept)].gated, _flat(config)
        if gated and _has_gate(where, config):
            kept = decoder_layers.split_gates(where, kept, config)
        for pattern, what in _OTHER.items():
            if gated and what == _EXPERTS:
                continue
            name = next((name for name in kept if re.search(pattern, name)), None)
            if name is not None:
                raise UserError(
                    f"{where}: the {self.kind} layer has {what} ({name}), which is not supported; "
                    "supported are dense layers with grouped-query attention"
                )
        # Copies of the model's ends in modules after the first must be those of the first.
        ends = ("embed_tokens.weight", "shared_head.head.weight")
        for end in ends if NAMES[_layout_of(kept)].ends else ():
            for front in fronts[1:]:
                first, name = kept.get(fronts[0] + end), front + end
                if name in kept and (first is None or (first() != kept[name]()).any()):
                    raise UserError(
                        f"{where}: {name} is not that of the first module; modules with ends of "
                        "their own are not supported"
                    )
                kept.pop(name, None)
        return kept

    def tables_of(self, names: Collection[str]) -> tuple[Rules]:
        numbers = [int(each) for each in re.findall(r"\d+", " ".join(prediction_modules(names)))]
        return (_rules(_layout_of(names), min(numbers, default=0)),)

    def usual_layout(self, paths: Collection[tuple]) -> str:
        return "qwen3" if _needs_gated(paths) else self.layouts[0]

    def table(self, layout: str, shapes: Shapes, config: Mapping[str, Any]) -> Rules:
        needs = _needs_gated(shapes)
        layout = layout or self.usual_layout(shapes)
        own, parts = NAMES[layout], {path[0] for path in shapes}
        modules = len({path[1] for path in shapes if path[:1] == ("modules",)})
        if parts & {"embed", "head"} and not own.ends:
            raise UserError(
                f"the layout {layout} has no place for an embedding or a head of the modules; "
                "write the layout deepseek"
            )
        if own.one and modules > 1:
            raise UserError(f"the layout {layout} has one module, and there are {modules}")
        if config.get("partial_rotary_factor", 1) != 1:
            needs = needs or "a part of each head that is rotated"
        if needs and not own.gated:
            raise UserError(f"the layout {layout} has no place for {needs}; write the layout qwen3")
        layers = whole_of("the parameters", config, "num_hidden_layers") or 0
        return _rules(layout, layers, _is_joined(shapes))

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        path, config, layout = found.where, _flat(found.config), _layout_of(found.layout)
        own = object_of(config, OWN, path)
        check_only(path, config, _ONLY)
        if not NAMES[layout].gated:
            check_only(path, config, {"attn_output_gate": False})
            decoder_layers.check_rotated(path, config)
        for name, values in SWITCHES.items():
            if name in own and own[name] not in values:
                raise UserError(
                    f"{path}: {OWN}.{name} is {own[name]!r}; it must be one of {values}"
                )
        stated = whole_of(path, config, "num_nextn_predict_layers")
        count = _modules(leaves)
        if stated not in (None, count):
            raise UserError(
                f"{path}: num_nextn_predict_layers is {stated}, and the tensors have {count} "
                "modules; correct config.json"
            )
        decoder_layers.add_output_biases(leaves)
        leaves = _norms(layout, leaves, 1)
        result = {"vocab_size": None} | {x: y for x, y in config.items() if x not in _MADE}
        result |= _layer(path, config, leaves) | {key: own[key] for key in SWITCHES if key in own}
        result |= {"hidden_first": NAMES[layout].hidden_first, "read_as": {"layout": layout}}
        return leaves, result | {"num_hidden_layers": whole_of(path, config, "num_hidden_layers")}

    def arrange(self, layout: str, leaves: Leaves, config: Mapping[str, Any]) -> Leaves:
        result = _norms(layout, leaves, -1)
        if NAMES[layout].gated:
            result = decoder_layers.join_gates(result, config["head_dim"])
        if bool(config.get("hidden_first")) != NAMES[layout].hidden_first:
            for path, leaf in leaves.items():
                if path[2:] == ("fc", "kernel"):
                    both = (leaf[leaf.shape[1] :], leaf[: leaf.shape[1]])
                    own = np if isinstance(leaf, np.ndarray) else jnp
                    result[path] = own.concatenate(both, 0)
        for path, leaf in leaves.items() if config.get("attention_bias") else ():
            if path[-1] == "kernel" and path[-2] in ("q", "k", "v"):
                result.setdefault((*path[:-1], "bias"), np.zeros(leaf.shape[1], leaf.dtype))
        return result

    def encode(self, layout: str, leaves: Leaves, config: Config, facts: Facts) -> Written:
        where = "the parameters"
        layers = whole_of(where, config, "num_hidden_layers") or 0
        if not layers and layout == "deepseek":
            raise UserError(
                "num_hidden_layers is missing; the names of the layout deepseek need the number of "
                "layers of the target"
            )
        made = _layer(where, config, leaves)
        own = {"kind": self.kind, "layout": layout}
        own |= {key: config[key] for key in SWITCHES if key in config}
        kept = {key: value for key, value in config.items() if key not in _MADE}
        result = kept | made | {"model_type": "qwen3" if made["qk_norm"] else "llama"}
        result |= {"num_nextn_predict_layers": _modules(leaves)}
        del result["qk_norm"]
        return result | {"num_hidden_layers": layers or None, OWN: own}, {}


def _flat(config: Mapping[str, Any]) -> Config:
    """config.json; of a model that also reads images with the keys of its text model."""
    result = {**config, **text_model(dict(config))}
    if _is_qwen(result) and result.get("rope_parameters") is None:
        # The default of transformers.
        result.setdefault("partial_rotary_factor", FAMILIES["qwen3_next"].rope["partial"])
    return result


def _has_gate(where: object, config: Mapping[str, Any]) -> bool:
    """Whether config.json says that files have a gate inside of the queries. Raises UserError."""
    stated = switch(where, config, "attn_output_gate")
    return _is_qwen(config) if stated is None else stated


def _is_qwen(config: Mapping[str, Any]) -> bool:
    """Whether it is the config.json of a Qwen3-Next or Qwen3.5."""
    return str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))


def _needs_gated(paths: Collection[tuple]) -> str:
    """What of these parameters only layouts with ``ModuleNames.gated`` have; "": nothing."""
    found = {path[4:6] for path in paths if path[2:4] == ("layers", "0")}
    gate, experts = (("attention", "gate") in found, ("mlp", "router") in found)
    return "a gate after the attention" if gate else _EXPERTS if experts else ""


def _is_joined(shapes: Shapes) -> bool:
    """Whether the queries of each head are followed by its gate."""
    layer = ("modules", "0", "layers", "0", "attention")
    queries, output = ((*layer, part, "kernel") for part in ("q", "o"))
    return {queries, output} <= {*shapes} and shapes[queries][1] == 2 * shapes[output][0]


def _modules(leaves: Leaves) -> int:
    return len({path[1] for path in leaves if path[0] == "modules"})


def _layer(where: object, config: Mapping[str, Any], leaves: Leaves) -> dict[str, Any]:
    """What the tensors and config.json give of the decoder layers. Raises UserError."""
    first = {path[2:]: leaf for path, leaf in leaves.items() if path[:2] == ("modules", "0")}
    output = first["layers", "0", "attention", "o", "kernel"]
    queries, gate = (("layers", "0", "attention", part, "kernel") for part in ("q", "gate"))
    if _is_joined({path: leaf.shape for path, leaf in leaves.items()}):
        first |= {queries: output.T, gate: output.T}  # only their shapes are read
    facts = decoder_layers.facts(where, config, first)
    decoder_layers.decoder(where, facts)
    return facts


def _norms(layout: str, leaves: Leaves, by: int) -> Leaves:
    """The leaves with ``by`` added to the factors of all norms, where the layout needs it."""
    if not NAMES[layout].around_one:
        return dict(leaves)
    return {path: leaf + by if path[-1] == "scale" else leaf for path, leaf in leaves.items()}


CODEC = ModuleFiles(NAME)
PRETRAINED = Pretrained({"ce": 1.0, "weight": 0.0}, ("steps", "decay", "detach"))
