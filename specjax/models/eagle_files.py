"""EAGLE heads in directories: what follows from their tensors, and the config.json to write.

``eagle_dialects`` reads config.json, ``eagle_layouts`` has the names of the tensors,
``draft_vocabulary`` the tensors d2t and t2d. Sizes come from the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.models import (
    draft_vocabulary,
    eagle_configs,
    eagle_dialects,
    eagle_layouts,
    eagle_shape,
)
from specjax.models.eagle_dialects import Meaning
from specjax.models.eagle_shape import checked
from specjax.models.head_places import listed
from specjax.models.head_tensors import Tensors

# Tokens of one pass of P-EAGLE in a file that names no number: the default of its training.
DEPTHS = 8
# The layers of a file that names none: entries 2, L / 2 and L - 3 of the target's hidden_states.
DEFAULT_TAPS = 3

# Keys of config.json whose content is in ``Head.config`` under other keys.
_REPLACED = (
    *(eagle_dialects.OWN, eagle_dialects.IDS, "rope_parameters", "eagle_config"),
    "target_vocab_size",
)

Leaves = dict[tuple, np.ndarray]


def split_maps(path: Path, kind: str, tensors: Tensors) -> tuple[Tensors, dict[str, np.ndarray]]:
    """(tensors under the names of the table, the tensors d2t and t2d).

    Raises UserError for EAGLE-3 heads read as EAGLE-1, the reverse, and for a target.
    """
    if eagle_layouts.is_whole_model(tensors):
        raise UserError(
            f"{path} is a whole model, not {kind} heads; give a directory of {kind} heads that "
            "were trained for such a model"
        )
    clean = eagle_layouts.clean_names(tensors)
    if len(clean) < sum(not name.endswith("rotary_emb.inv_freq") for name in tensors):
        raise UserError(f'{path} has tensors with and without "model." in front; copy it again')
    named = {name: tensors[stored] for name, stored in clean.items()}
    other = {"eagle": "eagle3", "eagle3": "eagle"}.get(kind)
    if other and "fc.weight" in named and eagle_layouts.is_eagle3(named) != (kind == "eagle3"):
        raise UserError(f"{path} has {other} heads; give a directory of {kind} heads")
    if (read := named.get("mask_hidden")) is not None:
        # Some programs store it with two axes.
        named["mask_hidden"] = lambda: read().reshape(1, 1, -1)
    maps = eagle_layouts.MAPS if kind == "eagle3" else ()
    return named, {name: named.pop(name)() for name in maps if name in named}


def redrafter_facts(
    where: object, leaves: Leaves, sizes: Mapping[str, int], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What follows from the tensors of ReDrafter, under the keys of its config.json."""
    rnn = ("rnn", "w", "kernel") in leaves
    stated = eagle_dialects.switch(where, config, "rnn")
    if stated not in (None, rnn):
        raise UserError(
            f"{where}: rnn is {str(stated).lower()}, and the tensors "
            f"{'have' if rnn else 'lack'} a recurrent layer; correct config.json"
        )
    width = leaves["block", "0", "bias"].shape[0]
    return {"exit_dim": width, "num_draft_layers": listed(leaves, "block"), "rnn": rnn}


def add_output_biases(leaves: Leaves) -> None:
    """Adds zeros for the attention's output bias where q, k and v have biases (Qwen2)."""
    for path in [path for path in leaves if path[-2:] == ("q", "bias")]:
        kernel = leaves[(*path[:-2], "o", "kernel")]
        leaves.setdefault((*path[:-2], "o", "bias"), np.zeros(kernel.shape[1], kernel.dtype))


def config_of_files(
    path: Path, kind: str, raw: Mapping[str, Any], leaves: Leaves, maps: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """``Head.config`` of a directory. Raises UserError."""
    meaning = eagle_dialects.read(path, kind, raw)
    embedding = leaves.get(("embed", "embedding"))
    vocab, ids = None if embedding is None else len(embedding), None
    # Released configs are often wrong; a directory of specjax is not.
    if vocab is None and kind == "eagle" and eagle_dialects.OWN in raw and raw.get("vocab_size"):
        vocab = checked(path, raw, "vocab_size", int, None)
    if kind == "eagle3":
        width = leaves["head", "kernel"].shape[1]
        if vocab is None and "t2d" not in maps and ("d2t" in maps or _is_part(raw, width)):
            vocab = checked(path, meaning.layer, "vocab_size", int, width)
        ids = draft_vocabulary.ids_of(path, maps.get("d2t"), maps.get("t2d"), width, vocab)
        vocab = vocab or (len(maps["t2d"]) if "t2d" in maps else width)
    config = {key: value for key, value in raw.items() if key not in _REPLACED}
    if meaning.dialect == "speculators":
        config = {**meaning.layer, **config}
        verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
        if verifier.get("name_or_path"):
            config.setdefault("base_model_name_or_path", verifier["name_or_path"])
    config |= facts(path, kind, leaves, meaning, _declared_width(path, raw))
    config |= {"vocab_size": vocab}
    if kind == "eagle3":
        config["read_as"] = {"dialect": meaning.dialect, **meaning.notes}
        config |= {} if ids is None else {"draft_ids": ids}
    return config


def _declared_width(path: Path, raw: Mapping[str, Any]) -> int | None:
    if raw.get("target_hidden_size") is None:
        return None
    return checked(path, raw, "target_hidden_size", int, None)


def _is_part(raw: Mapping[str, Any], width: int) -> bool:
    """Whether config.json states that the head gives a part of the vocabulary."""
    return raw.get("draft_vocab_size") == width


def to_write(
    kind: str, layout: str, leaves: Leaves, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config.json, the tensors d2t and t2d) of heads with these parameters. Raises UserError."""
    where, taps = "the parameters", config.get("taps")
    meaning = Meaning(
        dialect=layout,
        layer=dict(config),
        taps=None if taps is None else [int(tap) for tap in taps],
        norm_output=bool(eagle_dialects.switch(where, config, "norm_output")),
        norm_before_residual=bool(eagle_dialects.switch(where, config, "norm_before_residual")),
        fc_norm=None,
        input_norm=None,
        notes={},
        parallel=config.get("parallel"),
        mask_id=config.get("mask_token_id"),
    )
    if meaning.taps is not None:
        eagle_dialects.check_layers(where, "taps", meaning.taps)
    result = {**config, **facts(where, kind, leaves, meaning, None)}
    embedding = leaves.get(("embed", "embedding"))
    if embedding is not None:
        result["vocab_size"] = len(embedding)
    parts: dict[str, Any] = {"bias": ("fc", "bias") in leaves}
    if kind == "eagle":
        return eagle_configs.compose(kind, layout, result, parts), {}
    width, ids = leaves["head", "kernel"].shape[1], config.get("draft_ids")
    if ids is None:
        result["vocab_size"] = width
    elif not result.get("vocab_size"):
        raise UserError(
            "vocab_size is missing; heads with a draft vocabulary need the size of the target's"
        )
    parts |= {
        "draft_vocab_size": width,
        "fc_norm": ("fc_norm", "scale") in leaves,
        "norm_before_fc": ("input_norm", "scale") in leaves,
    }
    maps: dict[str, np.ndarray] = {}
    if ids is not None or layout == "specforge":
        maps = draft_vocabulary.tensors_of(ids, width, result["vocab_size"])
    return eagle_configs.compose(kind, layout, result, parts), maps


def facts(
    where: object, kind: str, leaves: Leaves, meaning: Meaning, target_width: int | None
) -> dict[str, Any]:
    """What follows from the tensors, and what no tensor shows, under the keys of ``Head.config``.

    ``target_width`` is what config.json states about E. Raises UserError.
    """
    fc = leaves["fc", "kernel"]
    result = {"model_type": kind, **eagle_shape.facts(where, meaning.layer, leaves)}
    result["target_hidden_size"] = fc.shape[1]
    if kind == "eagle3":
        width = _target_width(where, leaves, meaning, target_width)
        result |= {
            "target_hidden_size": width,
            "norm_output": meaning.norm_output,
            "norm_before_residual": meaning.norm_before_residual,
        }
        result |= {} if meaning.taps is None else {"taps": meaning.taps}
        result |= _parallel(where, leaves, meaning)
        if width != fc.shape[1] and ("embed", "embedding") not in leaves:
            raise UserError(
                f"{where} lacks embed_tokens.weight; heads of width {fc.shape[1]} cannot use the "
                f"embeddings of a target of width {width}"
            )
    shape, scaling = eagle_shape.decoder(where, result), result["rope_scaling"]
    if scaling is not None and shape.rope_scaling is not None:
        original = shape.rope_scaling.original_max_positions
        result["rope_scaling"] = {"original_max_position_embeddings": original, **scaling}
    return result


def _parallel(where: object, leaves: Leaves, meaning: Meaning) -> dict[str, Any]:
    """How a network drafts in one pass (P-EAGLE). Raises UserError."""
    has = ("mask_hidden",) in leaves
    if meaning.masked not in (None, has):
        raise UserError(
            f"{where}: config.json is that of {'P-EAGLE' if meaning.masked else 'EAGLE-3'}, and "
            f"the tensors {'have' if has else 'lack'} mask_hidden; correct config.json"
        )
    if not has:
        return {}
    if meaning.mask_id is None:
        raise UserError(
            f"{where} has mask_hidden and no id of a mask; give mask_token_id in config.json"
        )
    return {"parallel": meaning.parallel or DEPTHS, "mask_token_id": meaning.mask_id}


def _target_width(where: object, leaves: Leaves, meaning: Meaning, declared: int | None) -> int:
    """E. Raises UserError unless fc reads the taps that config.json names."""
    total, width = leaves["fc", "kernel"].shape
    norms, taps = leaves.get(("fc_norm", "scale")), meaning.taps
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
    if taps is None and count != DEFAULT_TAPS:
        raise UserError(
            f"{where}: fc reads {count} taps, and config.json does not name their layers; give "
            f"{eagle_dialects.IDS}"
        )
    if taps is not None and len(taps) != count:
        raise UserError(
            f"{where}: fc reads {count} taps, and config.json names {len(taps)} layers; correct "
            f"{eagle_dialects.IDS}"
        )
    for key, present, stated in (
        ("fc_norm", norms is not None, meaning.fc_norm),
        ("norm_before_fc", ("input_norm", "scale") in leaves, meaning.input_norm),
    ):
        if stated not in (None, present):
            raise UserError(
                f"{where}: {key} is {str(stated).lower()}, and the tensors "
                f"{'have' if present else 'lack'} this norm; correct config.json"
            )
    return own
