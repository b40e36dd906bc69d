"""The dialects of config.json of EAGLE heads, and what their keys mean.

The same key means different things in the files of different programs; a wrong reading lowers
acceptance and never changes text. The dialect follows from ``architectures`` and from the keys of
the vLLM speculators library:

    published     "LlamaForCausalLM" and other decoders: flat keys, as the authors of EAGLE write
    vllm          "Eagle3LlamaForCausalLM", "EagleLlamaForCausalLM": flat keys
    specforge     "LlamaForCausalLMEagle3": flat keys and ``eagle_config`` (SpecForge, SGLang)
    speculators   ``speculators_model_type``: the keys of the layers in ``transformer_layer_config``

P-EAGLE's files are those of EAGLE-3 with ``mask_hidden`` and the id of a mask.

Directories that specjax wrote also have the key ``specjax``, which states its facts without a
dialect. Sources: SafeAILab/EAGLE (traineagle3/config.json), sgl-project/SpecForge (configs, pull
request 879), sgl-project/sglang (pull request 25454), vllm (transformers_utils/configs/speculators,
worker/gpu_model_runner.py), vllm-project/speculators (models/eagle3/config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.checks import whole
from specjax.errors import UserError
from specjax.models.config_values import check_layers, mask_id_of, names_of, object_of, switch

OWN = "specjax"
IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURES = {
    "LlamaForCausalLM": "published",
    "MistralForCausalLM": "published",
    "Qwen2ForCausalLM": "published",
    "Qwen3ForCausalLM": "published",
    "EagleLlamaForCausalLM": "vllm",
    "Eagle3LlamaForCausalLM": "vllm",
    "Eagle3Qwen3ForCausalLM": "vllm",
    "LlamaForCausalLMEagle3": "specforge",
    "Eagle3Speculator": "speculators",
    "Eagle3DraftModel": "speculators",
    "PEagleSpeculator": "speculators",
    "PEagleDraftModel": "specforge",
}
_METHODS = ("eagle3", "peagle")
_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "eagle", "eagle3", "speculators")
# Keys of ``eagle_config`` with the only value that is read; None: any (they are read elsewhere).
_EAGLE_CONFIG = {
    IDS: None,
    "norm_before_fc": None,
    "fc_norm": None,
    "norm_output": None,
    "norm_before_residual": None,
    "num_aux_hidden_states": None,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
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


class Meaning(NamedTuple):
    """What the keys of a config.json mean, in specjax's words."""

    dialect: str
    layer: dict[str, Any]  # the keys of the decoder layers
    taps: list[int] | None  # layers whose output is read, from 0; None: not in the file
    norm_output: bool  # whether the next slot reads the feature after the last norm
    norm_before_residual: bool
    fc_norm: bool | None  # what the file declares; None: nothing
    input_norm: bool | None
    notes: dict[str, str]  # how ambiguous keys were read
    parallel: int | None = None  # P-EAGLE: tokens of one pass; None: not in the file
    mask_id: int | None = None  # P-EAGLE: the token of masks
    masked: bool | None = None  # whether the file declares P-EAGLE; None: nothing


def dialect_of(where: object, kind: str, raw: Mapping[str, Any]) -> str:
    """The dialect of a config.json; UserError for a kind of heads that cannot be read."""
    names = raw.get("architectures") or []
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{where}: architectures is {names!r}; it must be a list of names")
    method = raw.get("speculators_model_type")
    if method not in (None, *_METHODS):
        raise UserError(
            f"{where}: speculators_model_type {method!r} is not supported for {kind} heads; "
            f"supported: {', '.join(_METHODS)}"
        )
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


def read(where: object, kind: str, raw: Mapping[str, Any]) -> Meaning:
    """The meaning of a config.json. Raises UserError for keys that cannot be honoured."""
    dialect = dialect_of(where, kind, raw)
    own = raw.get(OWN, {})
    if not isinstance(own, dict):
        raise UserError(f"{where}: {OWN} is {own!r}; it must be an object, or be left out")
    flat = _flat(where, raw)
    layer = _layer(where, dialect, raw)
    if kind == "eagle":
        return Meaning(dialect, layer, [], False, False, None, None, {})
    notes: dict[str, str] = {}
    taps = _taps(where, dialect, flat, own, notes)
    output = _norm_output(where, dialect, flat, own, notes)
    residual = switch(where, flat, "norm_before_residual")
    if residual is None and dialect == "speculators" and not own:
        raise UserError(
            f"{where} has no norm_before_residual; programs differ in its default, so write true "
            "or false into config.json"
        )
    fc_norm, input_norm = (switch(where, flat, key) for key in ("fc_norm", "norm_before_fc"))
    switches = (output, bool(residual), fc_norm, input_norm)
    tokens, mask = _tokens(where, raw, own), mask_id_of(where, flat)
    masked = switch(where, flat, "parallel_drafting")
    masked = True if raw.get("speculators_model_type") == "peagle" else masked
    return Meaning(dialect, layer, taps, *switches, notes, tokens, mask, masked)


def _tokens(where: object, raw: Mapping[str, Any], own: Mapping[str, Any]) -> int | None:
    """How many tokens a network drafts in one pass (P-EAGLE)."""
    container = object_of(dict(raw), "speculators_config")
    methods = container.get("proposal_methods") or [{}]
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
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise UserError(f"{where}: eagle_config is {nested!r}; it must be an object")
    for key, value in nested.items():
        expected = _EAGLE_CONFIG.get(key, False)
        if expected is not None and value not in (expected, None):
            raise UserError(
                f"{where}: eagle_config.{key} {value!r} is not supported; supported: {expected!r}"
            )
        if key in raw and raw[key] != value and expected is None:
            raise UserError(
                f"{where}: {key} is {raw[key]!r} and eagle_config.{key} is {value!r}; "
                "they must be equal"
            )
    return {**nested, **raw}


def _layer(where: object, dialect: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the decoder layers; UserError for layers that are computed in another way."""
    layer = dict(raw)
    if dialect == "speculators":
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            raise UserError(
                f"{where}: transformer_layer_config is {layer!r}; it must be an object with the "
                "keys of the layers"
            )
        # The library stores what differs from the defaults of transformers.
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
    for key, expected in only.items():
        value = raw.get(key, layer.get(key))
        if value not in (None, expected):
            raise UserError(f"{where}: {key} {value!r} is not supported; supported: {expected!r}")
    windows = set(names_of(where, layer, "layer_types")) - {"full_attention"}
    if windows:
        raise UserError(
            f"{where}: layer_types has {sorted(windows)[0]!r}; supported: 'full_attention'"
        )
    return layer


def _taps(
    where: object,
    dialect: str,
    flat: Mapping[str, Any],
    own: Mapping[str, Any],
    notes: dict[str, str],
) -> list[int] | None:
    """The layers whose outputs are read.

    ``hidden_states`` of transformers begin with the embeddings, so entry i is the output of layer
    i - 1. SGLang's rule separates the two conventions of "LlamaForCausalLMEagle3": a list that
    begins with 1 numbers outputs of layers, any other entries of ``hidden_states``.
    """
    ids, stated = flat.get(IDS), own.get("taps")
    if stated is not None:
        check_layers(where, f"{OWN}.taps", stated)
    if not ids:
        notes["layer_ids"] = "not in the file" if stated is None else f"{OWN}.taps"
        return stated
    check_layers(where, IDS, ids)
    count = flat.get("num_aux_hidden_states")
    if count not in (None, len(ids)):
        raise UserError(
            f"{where}: num_aux_hidden_states is {count!r} and {IDS} has {len(ids)} layers; they "
            "must agree"
        )
    readings = {"entries of hidden_states": [i - 1 for i in ids]}
    if dialect == "specforge" and ids[0] == 1:
        readings = {"outputs of layers": list(ids)} | readings
    if stated is not None and stated not in readings.values():
        raise UserError(
            f"{where}: {IDS} {ids} and {OWN}.taps {stated} name different layers; the first must "
            "be larger by 1, or be left out"
        )
    note, taps = next(item for item in readings.items() if stated in (None, item[1]))
    notes["layer_ids"] = note
    if min(taps) < 0:
        raise UserError(
            f"{where}: {IDS} has 0, the embeddings of the tokens; only outputs of layers can be "
            "read, from 1"
        )
    return taps


def _norm_output(
    where: object,
    dialect: str,
    flat: Mapping[str, Any],
    own: Mapping[str, Any],
    notes: dict[str, str],
) -> bool:
    """Whether the normed feature is recycled (EAGLE-3.1).

    SpecForge wrote true for plain EAGLE-3 until 2026-09-15. Its files have no version, so true in
    them is plain EAGLE-3 unless ``specjax.norm_output`` states otherwise. Before that day false
    left out the norm before the head; no such network is known, and it cannot be read.
    """
    value, stated = switch(where, flat, "norm_output"), switch(where, own, "norm_output")
    if stated is not None:
        if value is not None and value != stated and dialect != "specforge":
            raise UserError(
                f"{where}: norm_output is {value} and {OWN}.norm_output is {stated}; they must be "
                "equal"
            )
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
