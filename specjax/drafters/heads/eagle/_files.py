"""EAGLE heads in directories: names of tensors, and the dialects of config.json.

The same key means different things in the files of different programs; a wrong reading lowers
acceptance and never changes text. The dialect follows from ``architectures`` and from the keys of
the vLLM speculators library:

    published     "LlamaForCausalLM" and other decoders: flat keys, as the authors of EAGLE write
    vllm          "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM": flat keys
    specforge     "LlamaForCausalLMEagle3": flat keys and ``eagle_config`` (SpecForge, SGLang)
    speculators   ``speculators_model_type``: the keys of the layers in ``transformer_layer_config``

P-EAGLE's files are those of EAGLE-3 with ``mask_hidden`` and the id of a mask.

Directories that specjax wrote also have the key ``specjax``, which states its facts without a
dialect. Sizes come from the tensors. Letters of the tables, with those of ``decoder_layers``:

    W  draft vocabulary     T  width of all taps together     E  of one tap     O  one

Sources: SafeAILab/EAGLE (eagle/model/cnets1.py and cnets.py, traineagle3/config.json),
sgl-project/SpecForge (llama3_eagle.py, configs, pull request 879), sgl-project/sglang (pull request
25454), vllm (model_executor/models/llama_eagle3.py, transformers_utils/configs/speculators,
worker/gpu_model_runner.py), vllm-project/speculators (models/eagle3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specjax.checks import whole
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
from specjax.drafters.files.decoder_layers import DIMS, WITHOUT_NORM, decoder_layer
from specjax.drafters.heads import _shape
from specjax.errors import UserError
from specjax.models.config_values import (
    MASK_IDS,
    agreed,
    agreed_layers,
    check_equal,
    check_layers,
    check_method,
    check_only,
    check_part,
    mask_id_of,
    names_of,
    object_of,
    switch,
    value_of,
    whole_of,
)

# Tokens of one pass of P-EAGLE in a file that names no number: the default of its training.
DEPTHS = 8
# The layers of a file that names none: entries 2, L / 2 and L - 3 of the target's hidden_states.
DEFAULT_TAPS = 3
IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM"), "published"),
    **dict.fromkeys(("Qwen2ForCausalLM", "Qwen3ForCausalLM"), "published"),
    "LlamaForCausalLMEagle": "published",
    **dict.fromkeys(("EagleLlamaForCausalLM", "Eagle3LlamaForCausalLM"), "vllm"),
    "Eagle3Qwen3ForCausalLM": "vllm",
    "LlamaForCausalLMEagle3": "specforge",
    **dict.fromkeys(("Eagle3Speculator", "Eagle3DraftModel", "PEagleSpeculator"), "speculators"),
    "PEagleDraftModel": "specforge",
}
_METHODS = ("eagle3", "peagle")
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "eagle", "eagle3", "speculators")
# Keys of ``eagle_config`` with the only value that is read; None: any (they are read elsewhere).
_EAGLE_CONFIG = {
    **dict.fromkeys((IDS, "num_aux_hidden_states", "norm_before_fc", "norm_before_residual")),
    **dict.fromkeys(("fc_norm", "norm_output")),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer"), True),
    **dict.fromkeys(("use_last_layernorm", "next_layer_regular"), True),
}
# Keys of the top level or of the layers, with the only value that is computed.
_ONLY: dict[str, Any] = {
    "logit_scale": 1.0,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "use_sliding_window": False,
}
# Names of layer numbers in the files of other methods, which count in another way.
_FOREIGN_IDS = ("target_layer_ids", "aux_hidden_state_layer_ids", "dflash_config")
# The note of a file whose norm_output may have been meant in another way.
AMBIGUOUS = "true is plain EAGLE-3 (SpecForge before 2026-09-15)"


def _dialect_of(where: object, kind: str, raw: Mapping[str, Any]) -> str:
    """The dialect of a config.json; UserError for a kind of heads that cannot be read."""
    names = names_of(where, raw, "architectures")
    method = check_method(where, raw, kind, _METHODS)
    if method or any(key in raw for key in ("speculators_config", "transformer_layer_config")):
        if kind != "eagle3":
            raise UserError(f"{where} has eagle3 heads; give a directory of {kind} heads")
        return "speculators"
    for name in names:
        if name not in _ARCHITECTURES:
            raise UserError(
                f"{where}: architecture {name} is not supported for {kind} heads; supported: "
                f"{', '.join(_ARCHITECTURES)}"
            )
    return _ARCHITECTURES[names[0]] if names else "published"


def _stated(
    where: object, raw: Config, dialect: str, own: Config, flat: Config, notes: dict[str, str]
) -> dict[str, Any]:
    """What a config.json of EAGLE-3 states and no tensor shows; None: not in the file.

    The keys are those of ``Head.config`` and, for what the tensors must agree with, the width E and
    whether there are some parts. ``notes`` are how ambiguous keys were read. Raises UserError for
    keys that cannot be honoured.
    """
    read = where, dialect, own, flat, notes
    taps, output = _taps(*read), _norm_output(*read)
    residual = switch(where, flat, "norm_before_residual")
    if residual is None and dialect == "speculators" and not own:
        raise UserError(
            f"{where} has no norm_before_residual; programs differ in its default, so write true "
            "or false into config.json"
        )
    parts = {key: switch(where, flat, key) for key in ("fc_norm", "norm_before_fc")}
    facts = {
        "norm_output": output,
        "norm_before_residual": bool(residual),
        "taps": taps,
        "parallel": _tokens(where, raw, own),
        "mask_token_id": mask_id_of(where, flat),
    }
    masked = switch(where, flat, "parallel_drafting")
    parts["masked"] = True if raw.get("speculators_model_type") == "peagle" else masked
    return facts | parts | {"target_hidden_size": whole_of(where, raw, "target_hidden_size")}


def _read(where: object, kind: str, raw: Mapping[str, Any]) -> tuple[str, dict, dict, dict]:
    """The dialect, and the keys of specjax, of EAGLE-3 and of the decoder layers.

    Raises UserError for keys that cannot be honoured.
    """
    dialect = _dialect_of(where, kind, raw)
    return dialect, object_of(raw, OWN, where), _flat(where, raw), _layer(where, dialect, raw)


def _tokens(where: object, raw: Mapping[str, Any], own: Mapping[str, Any]) -> int | None:
    """How many tokens a network drafts in one pass (P-EAGLE)."""
    methods = object_of(raw, "speculators_config", where).get("proposal_methods") or [{}]
    if not (isinstance(methods, list) and isinstance(methods[0], dict)):
        raise UserError(
            f"{where}: speculators_config.proposal_methods is {methods!r}; it must be a list of "
            "objects"
        )
    given = [own.get("parallel"), raw.get("num_depths"), raw.get("para_depths")]
    given.append(methods[0].get("speculative_tokens"))
    value = next((each for each in given if each is not None), None)
    return None if value is None else whole(f"{where}: the number of tokens", value, 1)


def _flat(where: object, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of EAGLE-3, of the top level and of ``eagle_config``; UserError if they differ."""
    for key in _FOREIGN_IDS:
        if raw.get(key) is not None:
            raise UserError(
                f"{where}: {key} is not a key of EAGLE heads, and numbers layers in another way; "
                f"give {IDS}, in which number i is the output of layer i - 1"
            )
    nested = object_of(raw, "eagle_config", where)
    known = {key: _EAGLE_CONFIG.get(key, False) for key in nested}
    only = {key: value for key, value in known.items() if value is not None}
    check_only(where, nested, only, "eagle_config.")
    check_equal(where, raw, "eagle_config", nested, nested.keys() - only.keys())
    return {**nested, **raw}


def _layer(where: object, dialect: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the decoder layers; UserError for layers that are computed in another way."""
    layer: Any = dict(raw)
    if dialect == "speculators":
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise UserError(
                f"{where}: transformer_layer_config is {layer!r}; it must be an object with the "
                "keys of the layers"
            )
        # The library leaves out keys that have transformers' default values.
        inside = (layer.get("rope_parameters") or {}).get("rope_theta")
        if raw.get("rope_theta") not in (None, layer.get("rope_theta", inside)):
            raise UserError(
                f"{where}: rope_theta is outside of transformer_layer_config, where the layers do "
                "not read it; move it there"
            )
        layer = {"model_type": "llama", "num_attention_heads": 32, **layer}
    kind = layer.get("model_type")
    if kind not in (None, *_MODEL_TYPES):
        raise UserError(
            f"{where}: layers of model_type {kind!r} are not supported; supported: "
            f"{', '.join(_MODEL_TYPES[:4])}"
        )
    only = _ONLY | ({"sliding_window": None} if kind == "mistral" else {})
    check_only(where, {**layer, **raw}, only)
    windows = set(names_of(where, layer, "layer_types")) - {"full_attention"}
    if windows:
        raise UserError(
            f"{where}: layer_types has {sorted(windows)[0]!r}; supported: 'full_attention'"
        )
    return layer


def _taps(
    where: object, dialect: str, own: Config, flat: Config, notes: dict[str, str]
) -> list[int] | None:
    """The layers whose outputs are read.

    ``hidden_states`` of transformers begin with the embeddings, so entry i is the output of layer
    i - 1. SGLang's rule separates the two conventions of "LlamaForCausalLMEagle3": a list that
    begins with 1 numbers outputs of layers, any other entries of ``hidden_states``.
    """
    ids, stated = flat.get(IDS) or None, own.get("taps")

    def meanings(key: str, ids: list[int]) -> list[list[int]]:
        entries = [i - 1 for i in ids]
        if key == IDS:
            return [ids, entries] if dialect == "specforge" and ids[0] == 1 else [entries]
        return [ids]

    hint = "the first must be larger by 1, or be left out"
    taps = agreed_layers(where, {IDS: ids, f"{OWN}.taps": stated}, meanings, hint)
    count = flat.get("num_aux_hidden_states")
    if ids and count not in (None, len(ids)):
        raise UserError(
            f"{where}: num_aux_hidden_states is {count!r} and {IDS} has {len(ids)} layers; they "
            "must agree"
        )
    if ids:
        notes["layer_ids"] = "outputs of layers" if taps == ids else "entries of hidden_states"
    else:
        notes["layer_ids"] = "not in the file" if stated is None else f"{OWN}.taps"
    return taps


def _norm_output(
    where: object, dialect: str, own: Config, flat: Config, notes: dict[str, str]
) -> bool:
    """Whether the normed feature is recycled (EAGLE-3.1).

    SpecForge wrote true for plain EAGLE-3 until 2026-09-15. Its files have no version, so true in
    them is plain EAGLE-3 unless ``specjax.norm_output`` states otherwise. Before that day false
    left out the norm before the head; no such network is known, and it cannot be read.
    """
    value, stated = switch(where, flat, "norm_output"), switch(where, own, "norm_output")
    if stated is not None:
        if dialect != "specforge":
            agreed(where, {"norm_output": value, f"{OWN}.norm_output": stated})
        notes["norm_output"] = "specjax.norm_output"
        return stated
    if value and dialect == "specforge":
        notes["norm_output"] = AMBIGUOUS
        return False
    notes["norm_output"] = {
        None: "not in the file",
        True: "true recycles the normed state",
        False: "false is plain EAGLE-3",
    }[value]
    return bool(value)


# Keys that are made anew for every file; all others of a config are copied.
_LAYER = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "vocab_size"),
)
_MADE = {
    *_LAYER,
    *("architectures", "auto_map", "rope_parameters", "tie_word_embeddings", "torch_dtype"),
    *("dtype", "qk_norm", "layer_types", "sliding_window", "use_sliding_window", "bias"),
    *("max_window_layers", "pretraining_tp", "attention_dropout", "logit_scale"),
    *("speculators_model_type", "speculators_version", "transformer_layer_config"),
    *("eagle_config", IDS, "draft_vocab_size", "target_hidden_size", "embed_requires_grad"),
    *("norm_output", "norm_before_residual", "norm_before_fc", "fc_norm", "read_as"),
    *("taps", "draft_ids", "speculators_config", "parallel_drafting", "parallel", OWN),
    "num_aux_hidden_states",
    *MASK_IDS,
}
# The number of draft tokens in speculators files, for programs that read it there.
_SPECULATIVE_TOKENS = 5


# Keys of config.json whose content is in ``Head.config`` under other keys.
_REPLACED = (OWN, IDS, "rope_parameters", "eagle_config", "target_vocab_size")
_EMBED = (Rule("embed_tokens.weight", "embed.embedding", "V D", parts="embed"),)
_OTHERS = decoder_layer("layers.{l+1}.", "layers.{l+1}.")


def _eagle3(first: str) -> Rules:
    """``first`` is the name of the first layer, whose attention reads 2D."""
    norms = {"token_norm": "input_layernorm", "feature_norm": "hidden_norm"}
    wide = {f"attention.{part}": f"2{DIMS[f'attention.{part}']}" for part in "qkv"}
    dims = DIMS | dict.fromkeys(norms, "D") | wide
    return (
        *linear("fc", "fc", "T D"),
        *_EMBED,
        *scale("fc_norm.{n}", "fc_norm[{n}]", "E"),
        Rule("mask_hidden", "mask_hidden", "O O T", parts="masked"),
        *scale("input_norm", "input_norm", "T", parts="input_norm"),
        *decoder_layer(f"{first}.", "layers.0.", norms | WITHOUT_NORM, dims),
        *_OTHERS,
        *scale("norm", "norm"),
        *linear("lm_head", "head", "D W"),
    )


class Eagle(Codec):
    """EAGLE-1, EAGLE-2 and HASS: no norm before the first attention, and none at the end."""

    files = ("model.safetensors", "pytorch_model.bin")
    alike = ("eagle", "eagle3")
    layouts: ClassVar[tuple[str, ...]] = ("eagle", "sglang")
    engines: ClassVar[Mapping[str, str]] = {"vllm": "eagle", "sglang": "sglang"}
    open: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rope_theta": (10000.0,)}
    tables: ClassVar[Mapping[str, Rules]] = {
        "eagle": (
            *linear("fc", "fc", "2D D", "fc_bias"),
            *_EMBED,
            *decoder_layer("layers.0.", "layers.0.", WITHOUT_NORM),
            *_OTHERS,
        )
    }

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        named = decoder_layers.plain_names(where, self.kind, tensors)
        kind = "eagle3" if decoder_layers.is_eagle3(named) else "eagle"
        if "fc.weight" in named and kind != self.kind:
            raise UserError(f"{where} has {kind} heads; give a directory of {self.kind} heads")
        if (read := named.get("mask_hidden")) is not None:
            # Some programs store it with two axes.
            named["mask_hidden"] = lambda: read().reshape(1, 1, -1)
        return named

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        where, raw = found.where, found.config
        decoder_layers.add_output_biases(leaves)
        *_, layer = _read(where, self.kind, raw)
        vocab = sizes.get("V")
        # Read only if specjax wrote the file: in released ones it is often wrong.
        if vocab is None and OWN in raw and raw.get("vocab_size"):
            vocab = value_of(raw, "vocab_size", int, None, where)
        facts = _decoder(where, self.kind, leaves, layer, {})
        return leaves, _kept(raw, _REPLACED) | facts | {"vocab_size": vocab}

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        bias = engine == "vllm" and np.any(leaves.get(("fc", "bias"), 0))
        return _of_llama(leaves, config) | {"its fc has no bias; train with fc_bias=false": bias}

    def arrange(self, layout: str, leaves: Leaves, config: Mapping[str, Any]) -> Leaves:
        # vLLM has no fc.bias, and SGLang always has one.
        kernel, bias = leaves["fc", "kernel"], leaves.get(("fc", "bias"))
        if layout == "sglang" and bias is None:
            return {**leaves, ("fc", "bias"): np.zeros(kernel.shape[1], kernel.dtype)}
        return leaves

    def encode(self, layout: str, leaves: Leaves, config: Config, facts: Facts) -> Written:
        made = config | _decoder("the parameters", self.kind, leaves, config, {})
        name = "Qwen3ForCausalLM" if made["qk_norm"] else "LlamaForCausalLM"
        name = "LlamaForCausalLMEagle" if layout == "sglang" else name
        flat = {"architectures": [name], **_layer_keys(made)}
        # The authors read a missing key as true, vLLM and SGLang true as biases of the attention.
        flat |= {} if ("fc", "bias") in leaves else {"bias": False}
        own = {OWN: {"kind": self.kind, "layout": layout}}
        return _kept(made, _MADE) | flat | {"tie_word_embeddings": False} | own, {}


class Eagle3(Eagle):
    """EAGLE-3 and P-EAGLE."""

    layouts = ("eagle3", "specforge", "speculators")
    engines: ClassVar[Mapping[str, str]] = dict.fromkeys(ENGINES, "specforge") | {
        "vllm": "eagle3",
        "speculators": "speculators",
    }
    tables: ClassVar[Mapping[str, Rules]] = {
        "eagle3": _eagle3("midlayer"),
        "speculators": _eagle3("layers.0"),
    }
    maps = draft_vocabulary.TENSORS
    doubts = (AMBIGUOUS,)
    open: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **Eagle.open,
        "taps": (),
        **dict.fromkeys(("norm_output", "norm_before_residual"), (False, True)),
    }
    numbered = "taps"

    def check(self, params: Any, sizes: Sizes) -> None:
        sizes = {**sizes, "E": sizes["D"]}
        if isinstance(params, dict) and "embed" in params:
            sizes.pop("D")  # with embeddings of its own it may have another width
        super().check(params, sizes)

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        where, raw, maps = found.where, found.config, found.maps
        decoder_layers.add_output_biases(leaves)
        dialect, own, flat, layer = _read(where, self.kind, raw)
        notes: dict[str, str] = {}
        stated = _stated(where, raw, dialect, own, flat, notes)
        vocab, width = sizes.get("V"), sizes["W"]
        part = "d2t" in maps or raw.get("draft_vocab_size") == width
        if vocab is None and "t2d" not in maps and part:
            vocab = value_of(layer, "vocab_size", int, width, where)
        ids = draft_vocabulary.ids_of(where, maps.get("d2t"), maps.get("t2d"), width, vocab)
        config = _kept(raw, _REPLACED)
        if dialect == "speculators":
            config = {**layer, **config}
            verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
            if verifier.get("name_or_path"):
                config.setdefault("base_model_name_or_path", verifier["name_or_path"])
        config |= self._facts(where, leaves, layer, stated)
        config["vocab_size"] = vocab or (len(maps["t2d"]) if "t2d" in maps else width)
        config["read_as"] = {"dialect": dialect, **notes}
        return leaves, config | ({} if ids is None else {"draft_ids": ids})

    def obstacles(self, engine: str, leaves: Leaves, config: Config) -> dict[str, Any]:
        if engine in ("vllm", "speculators"):
            return _of_all(config)
        taps, normed = config.get("taps"), config.get("norm_output")
        first, fixed = (taps or (1,))[0], engine in ("tpu-inference", "llama.cpp")
        others = fixed and taps and tuple(taps) != _shape.default_taps(taps[-1] + 4)
        residual = config.get("norm_before_residual") and "sglang" in engine
        norms = {("fc_norm", "scale"), ("input_norm", "scale")} & leaves.keys()
        count = len(leaves["fc", "kernel"]) // config["target_hidden_size"]
        return _of_llama(leaves, config) | {
            "it drafts one token in a pass; train without parallel": config.get("parallel"),
            "it reads one layer": ("layers", "1", "mlp_norm", "scale") in leaves,
            "its attention has no biases": ("layers", "0", "attention", "q", "bias") in leaves,
            "it has no norms of taps; train with fc_norm=false": norms,
            "it recycles the output before the last norm; train with norm_output=false": normed,
            "its residual is the feature before the norm; train with norm_before_residual=false": (
                residual
            ),
            f"its fc reads {DEFAULT_TAPS} taps, and these read {count}": count != DEFAULT_TAPS,
            f"it reads layers 1, L / 2 - 1 and L - 4 of L, and these read {taps}": others,
            f"it takes a list that begins with layer 0 for one of layer 1; taps are {taps}": (
                engine == "sglang" and first == 0
            ),
            f"it reads the layers before these unless the first is 1; taps are {taps}": (
                engine == "sglang-jax" and first != 1
            ),
        }

    def suit(self, engine: str, leaves: Leaves, config: Config) -> Suited:
        suited = super().suit(engine, leaves, config)
        if engine == "vllm" and config.get("parallel"):
            return suited._replace(note="give parallel_drafting=true in speculative_config")
        if engine in ("tpu-inference", "sglang-jax") and config.get("draft_ids") is None:
            # They have no default for d2t.
            width = leaves["head", "kernel"].shape[1]
            config = config | {"draft_ids": np.arange(width), "vocab_size": width}
        return suited._replace(config=config)

    def encode(self, layout: str, leaves: Leaves, config: Config, facts: Facts) -> Written:
        where, taps = "the parameters", config.get("taps")
        switches = ("norm_output", "norm_before_residual")
        stated: dict[str, Any] = {key: bool(switch(where, config, key)) for key in switches}
        stated["taps"] = None if taps is None else [int(tap) for tap in taps]
        if taps is not None:
            check_layers(where, "taps", stated["taps"])
        stated |= {key: config.get(key) for key in ("parallel", "mask_token_id")}
        made = config | self._facts(where, leaves, config, stated)
        width, ids, maps = leaves["head", "kernel"].shape[1], config.get("draft_ids"), {}
        if ids is None:
            made["vocab_size"] = width
        elif not made.get("vocab_size"):
            raise UserError(
                "vocab_size is missing; heads with a draft vocabulary need the size of the target's"
            )
        else:
            maps = draft_vocabulary.tensors_of(ids, width, made["vocab_size"])
        return self._config(layout, leaves, made), maps

    def _config(self, layout: str, leaves: Leaves, config: dict[str, Any]) -> dict[str, Any]:
        """The config.json of heads with these facts."""
        own = {"kind": self.kind, "layout": layout, "taps": config.get("taps")}
        own["norm_output"] = config["norm_output"]
        switches = {
            "draft_vocab_size": leaves["head", "kernel"].shape[1],
            "norm_output": config["norm_output"],
            "norm_before_residual": config["norm_before_residual"],
            "norm_before_fc": ("input_norm", "scale") in leaves,
            "fc_norm": ("fc_norm", "scale") in leaves,
            "tie_word_embeddings": False,
        }
        if config.get("parallel"):
            own["parallel"] = config["parallel"]
            # vLLM reads the second name.
            switches |= dict.fromkeys(("mask_token_id", "ptd_token_id"), config["mask_token_id"])
        layer, count = _layer_keys(config), len(leaves["fc", "kernel"])
        # vLLM takes 3 taps where the key is missing.
        count //= config["target_hidden_size"]
        layer |= {} if count == DEFAULT_TAPS else {"num_aux_hidden_states": count}
        if layout == "speculators":
            body = _container(config, layer)
        else:
            body = layer | _layer_ids(layout, config.get("taps"))
            body |= {"target_hidden_size": config["target_hidden_size"]}
            name = "Qwen3ForCausalLM" if config["qk_norm"] else "LlamaForCausalLM"
            name = "LlamaForCausalLMEagle3" if layout == "specforge" else name
            body |= {"architectures": [name]}
        return _kept(config, _MADE) | body | switches | {OWN: own}

    def _facts(self, where: object, leaves: Leaves, layer: Config, stated: Config) -> Config:
        """What follows from the tensors, and what is ``_stated``. Raises UserError."""
        width = _target_width(where, leaves, stated)
        own = {"target_hidden_size": width}
        own |= {key: stated[key] for key in ("norm_output", "norm_before_residual")}
        own |= {} if stated["taps"] is None else {"taps": stated["taps"]}
        own |= _parallel(where, leaves, stated)
        inner = leaves["fc", "kernel"].shape[1]
        if width != inner and ("embed", "embedding") not in leaves:
            raise UserError(
                f"{where} lacks embed_tokens.weight; heads of width {inner} cannot use the "
                f"embeddings of a target of width {width}"
            )
        return _decoder(where, self.kind, leaves, layer, own)


def _of_all(config: Config) -> dict[str, Any]:
    """``Codec.obstacles`` of all programs."""
    return {"it reads the token after the feature; train with shift=1": config.get("shift", 1) != 1}


def _of_llama(leaves: Leaves, config: Config) -> dict[str, Any]:
    """``Codec.obstacles`` of programs whose layer is Llama's."""
    norm = ("layers", "0", "attention", "q_norm", "scale") in leaves
    problem = "its layer has no norm of queries and keys; train with qk_norm=false"
    return _of_all(config) | {problem: norm}


def _kept(config: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in without}


def _layer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the decoder layers."""
    layer = {key: config.get(key) for key in _LAYER} | {"hidden_act": "silu", "mlp_bias": False}
    if layer["vocab_size"] is None:
        del layer["vocab_size"]
    return layer | {"model_type": "qwen3" if config["qk_norm"] else "llama"}


def _decoder(
    where: object, kind: str, leaves: Leaves, layer: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts of a network from its tensors and config.json; those in ``own`` replace them."""
    decoder_layers.check_rotated(where, layer)
    facts = {"model_type": kind, **decoder_layers.facts(where, layer, leaves)}
    facts |= {"target_hidden_size": facts["hidden_size"], **own}
    if ("embed", "embedding") in leaves:
        facts["vocab_size"] = len(leaves["embed", "embedding"])
    shape, scaling = decoder_layers.decoder(where, facts), facts["rope_scaling"]
    if scaling is not None and shape.rope_scaling is not None:
        original = shape.rope_scaling.original_max_positions
        facts["rope_scaling"] = {"original_max_position_embeddings": original, **scaling}
    return facts


def _layer_ids(layout: str, taps: list[int] | None) -> dict[str, Any]:
    """The layer numbers of a flat config.json.

    SpecForge and SGLang take a list that begins with 1 for outputs of layers, as SpecForge trains
    with them. In all other lists, number i is the output of layer i - 1.
    """
    if taps is None:
        return {}
    if layout == "specforge":
        ids = list(taps) if taps[0] == 1 else [tap + 1 for tap in taps]
        return {"eagle_config": {IDS: ids, "use_aux_hidden_state": True}}
    return {IDS: [tap + 1 for tap in taps]}


def _container(config: Mapping[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """The keys of the vLLM speculators library, without its version: it did not write the file."""
    width, taps = config["target_hidden_size"], config.get("taps")
    tokens = config.get("parallel")
    method = "peagle" if tokens else "eagle3"
    base = config.get("base_model_name_or_path")
    made = decoder_layers.speculators_config(method, tokens or _SPECULATIVE_TOKENS, base)
    return {
        "architectures": ["PEagleSpeculator" if tokens else "Eagle3Speculator"],
        "speculators_model_type": method,
        "speculators_config": config.get("speculators_config") or made,
        "transformer_layer_config": layer,
        IDS: None if taps is None else [tap + 1 for tap in taps],
        "target_hidden_size": None if width == config["hidden_size"] else width,
        "embed_requires_grad": False,
    }


def _parallel(where: object, leaves: Leaves, stated: Config) -> dict[str, Any]:
    """How a network drafts in one pass (P-EAGLE). Raises UserError."""
    has, masked = ("mask_hidden",) in leaves, stated.get("masked")
    if masked not in (None, has):
        raise UserError(
            f"{where}: config.json is that of {'P-EAGLE' if masked else 'EAGLE-3'}, and "
            f"the tensors {'have' if has else 'lack'} mask_hidden; correct config.json"
        )
    if not has:
        return {}
    if stated["mask_token_id"] is None:
        raise UserError(
            f"{where} has mask_hidden and no id of a mask; give mask_token_id in config.json"
        )
    return {"parallel": stated["parallel"] or DEPTHS, "mask_token_id": stated["mask_token_id"]}


def _target_width(where: object, leaves: Leaves, stated: Config) -> int:
    """E. Raises UserError unless fc reads the taps that config.json names."""
    total, width = leaves["fc", "kernel"].shape
    norms, taps = leaves.get(("fc_norm", "scale")), stated["taps"]
    declared = stated.get("target_hidden_size")
    if norms is not None:
        own = norms.shape[1]
    elif declared or taps is None or ("embed", "embedding") not in leaves:
        own = declared or width
    else:
        own = total // len(taps)
    count = total // own
    if count * own != total or count == 0 or declared not in (None, own):
        raise UserError(
            f"{where}: fc reads {total} values, which are not taps of width {declared or own}; "
            "correct target_hidden_size"
        )
    if norms is not None and len(norms) != count:
        raise UserError(
            f"{where}: fc reads {count} taps, and {len(norms)} of them have a norm; "
            "copy the tensors again"
        )
    if count != (DEFAULT_TAPS if taps is None else len(taps)):
        names = "does not name their" if taps is None else f"names {len(taps)}"
        raise UserError(
            f"{where}: fc reads {count} taps, and config.json {names} layers; "
            f"{'give' if taps is None else 'correct'} {IDS}"
        )
    for key, part in (("fc_norm", "fc_norm"), ("norm_before_fc", "input_norm")):
        check_part(where, stated, key, (part, "scale") in leaves, "this norm")
    return own
