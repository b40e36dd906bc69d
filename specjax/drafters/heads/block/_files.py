"""Block drafters in directories: DFlash, DFlash 2, DSpark, Domino, DFlare and xPress.

Programs differ in where the keys are and in how layers are numbered:

    dflash        flat keys, or some of them in ``dflash_config`` (z-lab, JetSpec)
    specforge     ``dflash_config`` with ``projector_type`` (SpecForge, SGLang)
    deepspec      flat keys, embeddings and LM head of its own (DeepSpec)
    speculators   ``speculators_model_type``: the keys of the layers in ``transformer_layer_config``

``target_layer_ids`` i is the output of layer i; ``aux_hidden_state_layer_ids`` i is entry i of
``hidden_states``, the output of layer i - 1. The name of the masks' own embedding is specjax's;
released files take that of a token. Letters of the table, with those of ``decoder_layers``:

    T  width of all taps      N  layers      M  taps      O  one      W  draft vocabulary
    R  rank      G  width of the GRU      J, K, P, Q  sums such as D + R
    X  places of a convolution      Y  numbers that its kernels change by      2  before and after
    B  places of a block      I  inner width of the refiner

Sources: z-lab/dflash, sgl-project/SpecForge (modeling/draft), Tencent/AngelSlim,
vllm-project/speculators (models/dflash, dflash2, dspark, xpress), vllm (spec_decode/utils).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flax.traverse_util import unflatten_dict

from specjax.drafters.files import decoder_layers, draft_vocabulary
from specjax.drafters.files.codec import (
    ENGINES,
    OWN,
    Codec,
    Config,
    Facts,
    Found,
    Leaves,
    Rule,
    Rules,
    Sizes,
    Suited,
    Tensors,
    Written,
    linear,
    scale,
)
from specjax.drafters.heads.block._corrections import sizes_of
from specjax.errors import UserError
from specjax.models.config_values import (
    MASK_IDS,
    OF_LAYERS,
    agreed,
    agreed_layers,
    check_equal,
    check_method,
    check_only,
    check_part,
    mask_id_of,
    names_of,
    object_of,
    switch,
    value_of,
)

IDS, AUX = "target_layer_ids", "aux_hidden_state_layer_ids"
_SLIDING = "sliding_window_non_causal"
# Key of this program <- names in files, for keys with several.
_ALIASES = {
    "block_size": ("block_size", "dspark_block_size"),
    IDS: (IDS, "dspark_target_layer_ids"),
    AUX: (AUX, "eagle_aux_hidden_state_layer_ids"),
}
# Method -> its name in ``architectures``.
_METHODS = {
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2DraftModel",
    "xpress": "XPressSpeculator",
}
# Engines without biases, and engines in which the place before the masks of DFlash may predict.
_SIMPLE = ("tpu-inference", "sglang-jax", "llama.cpp")
_ANCHORED = ("sglang-jax", "speculators")
# ``projector_type`` -> the parameters of its correction; ``markov_head_type`` -> those beside.
_PROJECTORS = {"dflash": None, "dspark": "markov", "domino": "gru"}
_KINDS = {"vanilla": None, "gated": "gate", "rnn": "joint"}
# Whether the pending token's place predicts, as SpecForge and vLLM, DFlash and Domino name it.
_ANCHOR = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
# Whether all layers are causal inside a block, as JetSpec, SGLang and vLLM name it.
_CAUSAL = ("causal_head", "is_causal", "causal")
# Values of ``attention_mode`` that name ordinary attention.
_ATTENTION = ("gqa", "mha")
# Keys that are made anew, or that this program does not use.
_MADE = (
    *("dflash_config", "transformer_layer_config", "rope_parameters", "architectures"),
    *("speculators_model_type", "speculators_config", "speculators_version", "auto_map", OWN),
    *("dspark_block_size", "dspark_target_layer_ids", "dspark_markov_rank", *MASK_IDS, *_CAUSAL),
    *(AUX, "eagle_aux_hidden_state_layer_ids", "draft_vocab_size", *_ANCHOR, "draft_ids"),
    *("causal_sliding", _SLIDING),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "xpress_rank", "xpress_mlp_ratio"),
)


# Name of a map of the refiner -> its place, its dimensions.
_REFINER = (
    ("down_h", "hidden", "D R"),
    ("down_g", "mean", "D R"),
    ("in_proj", "in", "3R R"),
    ("mlp_gate", "gate", "R I"),
    ("mlp_up", "up", "R I"),
    ("mlp_down", "down", "I R"),
)


def _rules() -> Rules:
    rules = (
        *linear("fc", "fc", "T D", parts="!mix"),
        Rule("layer_fusion_weights", "mix", "N M", parts="mix"),
        *scale("hidden_norm", "hidden_norm"),
        *scale("norm", "norm"),
        Rule("embed_tokens.weight", "embed.embedding", "V D", parts="embed"),
        *linear("lm_head", "head", "D W", parts="head"),
        Rule("mask_embedding", "mask", "D", parts="mask"),
    )
    for layer in ("layers.0", "layers.{i+1}"):
        rules += decoder_layers.decoder_layer(f"{layer}.", f"{layer}.")
        for part in ("k", "v"):
            name = f"{layer}.self_attn.{part}_proj_target"
            rules += linear(name, f"{layer}.context_{part}", "D C", "?biases", "mix")
        for part in ("attention_conv", "mlp_conv"):
            own, place = f"{layer}.{part}", f"{layer}.{part}"
            rules += (Rule(f"{own}.base_kernel", f"{place}.base", "2 X D", parts="conv"),)
            rules += linear(f"{own}.kernel_projection", f"{place}.project", "D Y", parts="conv")
    rules += (
        Rule("markov_head.markov_w1.weight", "markov.table", "V R", parts="markov"),
        *linear("markov_head.gate_proj", "markov.gate", "J R", "", "gate"),
        *linear("markov_head.joint_proj", "markov.joint", "K 3R", "", "joint"),
        Rule("prefix_gru.weight_ih_l0", "gru.w", "D 3G", True, "gru"),
        Rule("prefix_gru.weight_hh_l0", "gru.u", "G 3G", True, "gru"),
        *linear("embed_proj.0", "prefix.in", "P R", parts="gru"),
        *linear("confidence_head.proj", "confidence", "Q O", "", "confidence"),
    )
    own = "candidate_selector"
    rules += (
        Rule(f"{own}.predecessor_codebook", "selector.before", "V R", parts="selector"),
        Rule(f"{own}.successor_codebook", "selector.after", "V R", parts="selector"),
        *linear(f"{own}.hidden_projection", "selector.hidden", "D R", parts="selector"),
        Rule("refiner_head.token_embed.weight", "refiner.table", "V R", parts="refiner"),
        Rule("refiner_head.mix_l", "refiner.mix", "R B B", parts="refiner"),
    )
    for name, part, dims in _REFINER:
        rules += linear(f"refiner_head.{name}", f"refiner.{part}", dims, parts="refiner")
    # A map to the draft vocabulary, which is the target's without a head of its own.
    for vocabulary, head in (("W", "?head"), ("V", "!head")):
        dims = f"R {vocabulary}"
        rules += linear("markov_head.markov_w2", "markov.out", dims, parts=f"markov {head}")
        rules += linear("embed_proj.2", "prefix.out", dims, parts=f"gru {head}")
        rules += linear("refiner_head.readout", "refiner.readout", dims, parts=f"refiner {head}")
    return rules


class BlockFiles(Codec):
    """Four layouts with the same tensors."""

    layouts = ("dflash", "specforge", "deepspec", "speculators")
    engines: ClassVar = dict.fromkeys(ENGINES, "specforge") | {"speculators": "speculators"}
    tables: ClassVar = {"": _rules()}
    maps = draft_vocabulary.TENSORS
    open: ClassVar = {
        IDS: (),
        "rope_theta": (10000.0,),
        **dict.fromkeys(("sample_from_anchor", "causal_head", "causal_sliding"), (False, True)),
    }
    numbered = IDS

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        return {
            name.removeprefix("model.").removeprefix("logit_head."): read
            for name, read in tensors.items()
            if not name.endswith("rotary_emb.inv_freq")
        }

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        path, raw = found.where, found.config
        method = check_method(path, raw, self.kind, _METHODS)
        flat, layer = _flat(path, raw)
        _check_declared(path, layer | flat, leaves)
        config = {key: value for key, value in (layer | flat).items() if key not in _MADE}
        decoder_layers.check_rotated(path, layer)
        theta, scaling = decoder_layers.rope_of(path, layer)
        config |= {"rope_theta": theta, "rope_scaling": scaling}
        config["block_size"] = flat.get("block_size", 8 if method else 16)
        taps = _taps(path, flat, object_of(raw, OWN, path))
        config |= _given({IDS: taps, "mask_token_id": mask_id_of(path, flat)})
        causal = agreed(path, {key: switch(path, flat, key) for key in _CAUSAL})
        # Where it is not stated, programs take sliding layers for causal and full ones not.
        stated = causal is not None
        if method:
            # The library's default for DFlash 2 is true.
            stated = switch(path, {_SLIDING: method == "dflash2"} | flat, _SLIDING)
        sliding = "sliding_attention" in names_of(path, layer | flat, "layer_types")
        config["causal_head"] = bool(causal)
        if sliding and not (stated or causal):
            config["causal_sliding"] = True
        config["sample_from_anchor"] = _anchor(path, flat, leaves, method)
        config |= _vocabulary(path, layer, leaves, found.maps)
        return leaves, config | {"hidden_size": sizes["D"], "model_type": self.kind}

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        parts, attention = _parts(leaves), ("layers", "0", "attention")
        markov, gru, anchor = "markov" in parts, "gru" in parts, config.get("sample_from_anchor")
        sliding = "sliding_attention" in (config.get("layer_types") or ())
        simple, sglang = engine in _SIMPLE, "sglang" in engine
        # Of engines that have DFlash 2 or xPress it is not known which keys they read.
        unread = parts & {"conv", "selector", "refiner"} and engine != "speculators"
        late = gru and config.get("pure_draft_prefix_len") != 1
        kinds = parts & {"gate", "joint"} and engine in ("vllm", "sglang-jax")
        masks = anchor and not markov and not gru and engine not in _ANCHORED
        causal = config.get("causal_head") and engine != "vllm"
        full = sliding and engine == "sglang" and not config.get("causal_sliding")
        ends = parts & {"head", "embed"} and engine not in ("vllm", "speculators")
        return {
            "it has no convolutions, selector or refiner that it reads from such files": unread,
            "its layer has norms of queries and keys; train with qk_norm=true": (
                (*attention, "q_norm", "scale") not in leaves
            ),
            "its attention has no biases": simple and (*attention, "q", "bias") in leaves,
            "it has no correction by a GRU": gru and engine != "sglang",
            "its GRU corrects from the second place on; train with plain=1": late,
            "it has no correction": markov and simple and engine != "sglang-jax",
            "its correction has no gate and no state; train with correction=markov": kinds,
            "the place before the masks predicts where it corrects; train with anchor=true": (
                markov and sglang and not anchor
            ),
            "its first mask predicts; train with anchor=false": masks,
            "its blocks are not causal; train with causal=false": causal,
            "its layers have no window; train with window=0": sliding and simple,
            "its sliding layers are causal; train with causal_sliding=true": full,
            "it takes the target's embedding and LM head, and these have their own": ends,
        }

    def suit(self, engine: str, leaves: Leaves, config: Config) -> Suited:
        suited = super().suit(engine, leaves, config)
        if ("markov", "table") in leaves:
            return suited._replace(layout="deepspec" if "sglang" in engine else "speculators")
        if engine == "sglang-jax" and config.get("sample_from_anchor"):
            return suited._replace(note="start it with --speculative-sample-from-anchor")
        return suited

    def encode(self, layout: str, leaves: Leaves, config: Config, facts: Facts) -> Written:
        maps = {}
        if (ids := config.get("draft_ids")) is not None:
            width = leaves["head", "kernel"].shape[1]
            maps = draft_vocabulary.tensors_of(ids, width, config["vocab_size"])
        own = {OWN: {"kind": self.kind, "layout": layout, "taps": config.get(IDS)}}
        if layout == "dflash":
            flat = {key: x for key, x in config.items() if key != "draft_ids"} | facts()
            if flat.pop("causal_sliding", False):
                flat.pop("causal_head", None)
            if _only_here(leaves, config) or not config.get(IDS):
                return flat, maps
            # Other programs read these, and recognise it by them.
            nested = {IDS: list(config[IDS]), "mask_token_id": config["mask_token_id"]}
            nested |= _added(leaves, config)
            flat |= _layer(leaves, config) | {"dflash_config": nested}
            name = "DFlash2DraftModel" if "selector_rank" in nested else "DFlashDraftModel"
            return flat | {"architectures": [name]} | own, maps
        if not config.get(IDS):
            raise UserError(f"{IDS} is missing; give the layers that the network reads")
        taps = [int(tap) for tap in config[IDS]]
        method, layer = _method(layout, leaves, config), _layer(leaves, config)
        # The speculators library takes another number for a missing key.
        head = leaves.get(("head", "kernel"))
        vocab = layer.get("vocab_size") if head is None else head.shape[1]
        method |= _given({"draft_vocab_size": vocab})
        made = {*_MADE, IDS, *layer, *method}
        kept = {key: value for key, value in config.items() if key not in made}
        if layout == "speculators":
            name = _library_name(leaves)
            method |= {"speculators_model_type": name, AUX: [tap + 1 for tap in taps]}
            method |= {_SLIDING: not config.get("causal_sliding"), **_added(leaves, config)}
            base = config.get("base_model_name_or_path")
            block = config["block_size"] - (not method["sample_from_anchor"])
            method["speculators_config"] = decoder_layers.speculators_config(name, block, base)
            method["architectures"] = [_METHODS[name]]
            return kept | method | {"transformer_layer_config": layer} | own, maps
        if added := _added(leaves, config):
            raise UserError(
                f"the layout {layout} has no place for {', '.join(added)}; write it as dflash or "
                "speculators"
            )
        method[IDS] = taps
        if layout == "deepspec":
            return kept | layer | method | {"architectures": ["Qwen3DSparkModel"]} | own, maps
        outside = {"block_size": method.pop("block_size"), "dflash_config": method}
        return kept | layer | outside | {"architectures": ["DFlashDraftModel"]} | own, maps


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {key: value for key, value in values.items() if value is not None}


def _flat(path: Path, raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the keys of the method, the keys of the layers). Raises UserError if they differ."""
    nested = object_of(raw, "dflash_config", path)
    check_equal(path, raw, "dflash_config", nested, nested)
    flat = _given(raw) | _given(nested)
    for key, names in _ALIASES.items():
        flat |= _given({key: agreed(path, {name: flat.get(name) for name in names})})
    if "transformer_layer_config" not in raw:
        return flat, flat
    # The library stores what differs from the defaults of transformers.
    layer = {"num_attention_heads": 32, **object_of(raw, "transformer_layer_config", path)}
    check_equal(path, flat, "transformer_layer_config", layer, OF_LAYERS)
    return flat, layer


def _taps(path: Path, flat: Mapping[str, Any], own: Mapping[str, Any]) -> list[int] | None:
    """The layers whose outputs are read; None: not in the file. Raises UserError."""
    stated = {key: flat.get(key) for key in (IDS, AUX)} | {f"{OWN}.taps": own.get("taps")}

    def meanings(key: str, ids: list[int]) -> list[list[int]]:
        return [[i - (key == AUX) for i in ids]]

    return agreed_layers(path, stated, meanings, f"{AUX} must be larger by 1")


def _anchor(path: Path, flat: Mapping[str, Any], leaves: Leaves, method: str | None) -> bool:
    """Whether the pending token's place predicts."""
    stated = agreed(path, {key: switch(path, flat, key) for key in _ANCHOR})
    if stated is not None or method:
        # The speculators library writes the key where it is true; files without it are older.
        return bool(stated)
    return ("markov", "table") in leaves or flat.get("projector_type") in ("dspark", "domino")


def _check_declared(path: Path, flat: Mapping[str, Any], leaves: Leaves) -> None:
    """Raises UserError for switches that cannot be honoured or that the tensors contradict."""
    parts = _parts(leaves)
    declared = (
        ("projector_type", _PROJECTORS, ("markov", "gru")),
        ("markov_head_type", _KINDS, ("gate", "joint") if "markov" in parts else ()),
    )
    for key, known, others in declared:
        value = flat.get(key)
        if value is not None and value not in known:
            raise UserError(
                f"{path}: {key} {value!r} is not supported; supported: {', '.join(known)}"
            )
        has = next((part for part in others if part in parts), None)
        if value is not None and others and known[value] != has:
            raise UserError(
                f"{path}: {key} is {value!r}, and the tensors are those of "
                f"{next(name for name, part in known.items() if part == has)}; correct config.json"
            )
    shown = (("enable_confidence_head", "confidence"), ("markov_rank", "markov"))
    shown += (("conv_kernel_size", "conv"), ("selector_rank", "selector"))
    for key, part in (*shown, ("xpress_rank", "refiner")):
        check_part(path, flat, key, part in parts, "such a part")
    for key, value in _added(leaves, flat).items():
        if flat.get(key) not in (None, value):
            raise UserError(
                f"{path}: {key} is {flat[key]!r}, and the tensors have {value}; correct config.json"
            )
    check_only(path, flat, {"output_multiplier": 1})
    modes = names_of(path, flat, "attention_modes") or [flat.get("attention_mode") or "gqa"]
    if wrong := [mode for mode in modes if mode not in _ATTENTION]:
        known = ", ".join(_ATTENTION)
        raise UserError(f"{path}: attention_mode {wrong[0]!r} is not supported; supported: {known}")


def _parts(leaves: Leaves) -> set[str]:
    """The parts of a network, and those of its correction."""
    inner = {leaf[1] for leaf in leaves if leaf[0] == "markov"}
    conv = {"conv"} if ("layers", "0", "attention_conv", "base") in leaves else set()
    return {leaf[0] for leaf in leaves} | inner | conv


def _added(leaves: Leaves, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of DFlash 2 or xPress for these tensors; {}: they are neither's."""
    names = {"conv_kernel_size": "conv", "conv_group_size": "conv_group"}
    names["xpress_mlp_ratio"] = "expansion"
    sizes = sizes_of(unflatten_dict(leaves))
    found = {key: sizes[name] for key, name in names.items() if sizes.get(name)}
    if ("selector", "before") in leaves:
        found["selector_rank"] = leaves["selector", "before"].shape[1]
        found["selector_top_k"] = config.get("selector_top_k", 16)
    if ("refiner", "table") in leaves:
        found["xpress_rank"] = leaves["refiner", "table"].shape[1]
        found["num_jacobi_passes"] = config.get("num_jacobi_passes", 6)
    return found


def _library_name(leaves: Leaves) -> str:
    """The method's name in the speculators library. Raises UserError for one that it lacks."""
    parts = _parts(leaves)
    if len(parts & {"conv", "selector"}) == 1 or {"conv", "refiner"} <= parts:
        raise UserError(
            "the layout speculators has convolutions with a selector only, and a selector with "
            "them; write it as dflash, or train with conv=2 and correction=selector"
        )
    names = {"markov": "dspark", "selector": "dflash2", "refiner": "xpress"}
    return next((name for part, name in names.items() if part in parts), "dflash")


def _shown_vocabulary(leaves: Leaves) -> int | None:
    """The size of the target's vocabulary, if a tensor shows it."""
    tables = (("embed", "embedding"), ("markov", "table"))
    tables += (("selector", "before"), ("refiner", "table"))
    return next((len(leaves[path]) for path in tables if path in leaves), None)


def _vocabulary(
    path: Path, layer: Mapping[str, Any], leaves: Leaves, maps: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The target's vocabulary if a tensor shows it, and the tokens of a head of its own."""
    shown, head = _shown_vocabulary(leaves), leaves.get(("head", "kernel"))
    if head is None:
        if maps:
            raise UserError(f"{path} has {next(iter(maps))} and no lm_head; copy the tensors again")
        return {"vocab_size": shown}
    width, vocab = head.shape[1], shown or (len(maps["t2d"]) if "t2d" in maps else None)
    if vocab is None and layer.get("vocab_size") is not None:
        vocab = value_of(layer, "vocab_size", int, None, path)
    ids = draft_vocabulary.ids_of(path, maps.get("d2t"), maps.get("t2d"), width, vocab)
    return {"vocab_size": vocab or width} | _given({"draft_ids": ids})


def _only_here(leaves: Leaves, config: Mapping[str, Any]) -> bool:
    """Whether other programs have no place for parts of the network."""
    return bool(_parts(leaves) & {"mask", "mix"}) or config.get("mask_token_id") is None


def _method(layout: str, leaves: Leaves, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the method. Raises UserError for a network that other programs cannot read."""
    parts = _parts(leaves)
    if _only_here(leaves, config):
        what = "mixtures of taps" if "mix" in parts else "an embedding of its masks, and no mask_id"
        raise UserError(
            f"the layout {layout} has no place for {what}; write it as dflash, or train with "
            "mask_id and context=shared"
        )
    kind = next((name for name, part in _KINDS.items() if part in parts), "vanilla")
    projector = "dspark" if "markov" in parts else "domino" if "gru" in parts else "dflash"
    made: dict[str, Any] = {
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "projector_type": projector,
        "sample_from_anchor": bool(config.get("sample_from_anchor")),
        "enable_confidence_head": "confidence" in parts,
    }
    if not config.get("causal_sliding"):
        made["causal_head"] = bool(config.get("causal_head"))
    if "markov" in parts:
        rank = leaves["markov", "table"].shape[1]
        made |= {"markov_rank": rank, "markov_head_type": kind}
        width = leaves["hidden_norm", "scale"].shape[0]
        wide = "confidence" in parts and len(leaves["confidence", "kernel"]) > width
        made["confidence_head_with_markov"] = wide
    if "gru" in parts:
        rank, state = leaves["prefix", "in", "kernel"].shape[1], leaves["gru", "u"].shape[0]
        made |= {"pure_draft_prefix_len": config.get("pure_draft_prefix_len", 0), "emb_dim": rank}
        made |= {"gru_hidden_dim": state, "shift_label": made["sample_from_anchor"]}
    return made


def _layer(leaves: Leaves, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the decoder layers."""
    made = decoder_layers.facts("the parameters", config, leaves)
    norm = made.pop("qk_norm")
    made |= {"model_type": "qwen3" if norm else "llama", "hidden_act": "silu"}
    for key in ("layer_types", "sliding_window"):
        if config.get(key):
            made[key] = list(config[key]) if key == "layer_types" else config[key]
            made["use_sliding_window"] = True
    # vLLM takes sliding layers for causal and full ones not, unless this is stated.
    if config.get("causal_head") or ("layer_types" in made and not config.get("causal_sliding")):
        made["is_causal"] = bool(config.get("causal_head"))
    vocab = _shown_vocabulary(leaves) or config.get("vocab_size")
    return made | _given({"vocab_size": vocab})
