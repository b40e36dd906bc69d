"""The shape of a block network: from the keys for a new one, else from its tensors and config.json.

The keys of config.json are those of DFlash's files, at the top level or in ``dflash_config``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax.checks import one_of, whole, yes_or_no
from specjax.drafters._keys import StackedKeys
from specjax.drafters.heads import _block_corrections as corrections
from specjax.drafters.heads import _block_layers, _eagle_shape, _network
from specjax.drafters.heads._block_layers import BlockShape
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.models.hf_config import value_of
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM, Params

NAME = "block_head"
SLIDING, FULL = "sliding_attention", "full_attention"
# Key of config.json -> (key of ``make``, its value if it was not given, the default of a new one).
KEYS: dict[str, tuple[str, Any, Any]] = {
    "block_size": ("block", 0, 8),
    "context": ("context", "", "shared"),
    "causal_head": ("causal", False, False),
    "sample_from_anchor": ("anchor", None, False),
    "correction": ("correction", "", "none"),
    "rank": ("rank", 0, 256),
    "state": ("state", 0, None),
    "pure_draft_prefix_len": ("plain", None, 1),
    "confidence": ("confidence", False, False),
    "sliding_window": ("window", 0, 0),
    "mask_token_id": ("mask_id", None, None),
}


def of(
    target: LM, given: Given, keys: StackedKeys, taps: Sequence[int] | str, asked: Mapping[str, Any]
) -> BlockShape:
    """The shape of the network; ``asked`` has the keys of ``KEYS``. Raises UserError."""
    _check_values(asked)
    layers, width = _eagle_shape.layers_of(NAME, target), given.ends.width
    raw = given.config
    stored = _stored(given, raw)
    values = {key: _value(key, value, stored) for key, value in asked.items()}
    _check_effects(values, asked)
    own = given
    if given.params is not None and "fc" not in given.params:
        # The layers of a network with mixtures are read as those of others.
        own = given._replace(params=given.params | {"fc": {"kernel": np.zeros((0, width))}})
    config = _eagle_shape.config_of(NAME, own, width, keys)
    config = dataclasses.replace(config, windows=_windows(config, raw, values["sliding_window"]))
    correction, anchor = values["correction"], values["sample_from_anchor"]
    shape = BlockShape(
        config=config,
        taps=_taps(target, raw, taps, layers, config.num_layers),
        positions=values["block_size"] - (not anchor),
        vocab=target.vocab_size,
        context=values["context"],
        causal=values["causal_head"],
        anchor=anchor,
        correction=correction,
        rank=0 if correction == "none" else values["rank"],
        state=(values["state"] or width) if correction == "gru" else 0,
        plain=values["pure_draft_prefix_len"] if correction == "gru" else 0,
        confidence=values["confidence"],
        mask_id=values["mask_token_id"],
        head=_own_head(given),
        sure_of_token=_sure_of_token(given, width),
    )
    _check(target, given, shape)
    return shape


def ids_of(target: LM, given: Given, shape: BlockShape) -> np.ndarray | None:
    """The draft vocabulary i32[V_d]; None: all tokens. Raises UserError."""
    if shape.head is None:
        return None
    ids = _eagle_shape.listed(given.config.get("draft_ids"))
    return _eagle_shape.ids_of(ids, shape.head, target.vocab_size)


def _own_head(given: Given) -> int | None:
    if given.params is None or "head" not in given.params:
        return None
    return _eagle_shape.matrix(NAME, given.params, "head.kernel")[1]


def _sure_of_token(given: Given, width: int) -> bool:
    """Whether a confidence reads the token before: by the width of its kernel."""
    if given.params is None or "confidence" not in given.params:
        return True
    return _eagle_shape.matrix(NAME, given.params, "confidence.kernel")[0] != width


def _check_values(asked: Mapping[str, Any]) -> None:
    one_of("context", asked["context"], ("", *_block_layers.CONTEXTS))
    one_of("correction", asked["correction"], ("", *_block_layers.CORRECTIONS))
    for key in ("causal_head", "sample_from_anchor", "confidence"):
        if asked[key] is not KEYS[key][1]:
            yes_or_no(KEYS[key][0], asked[key])
    for key in ("block_size", "rank", "state", "sliding_window"):
        whole(KEYS[key][0], asked[key], 0)
    for key in ("pure_draft_prefix_len", "mask_token_id"):
        if asked[key] is not None:
            whole(KEYS[key][0], asked[key], 0)


def facts(shape: BlockShape, ids: np.ndarray | None = None) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold in addition to the tensors."""
    own: list[tuple[str, Any]] = [
        ("block_size", shape.fed(shape.positions)),
        ("target_layer_ids", shape.taps),
        ("causal_head", shape.causal),
        ("sample_from_anchor", shape.anchor),
    ]
    if shape.correction == "gru":
        own.append(("pure_draft_prefix_len", shape.plain))
    if shape.mask_id is not None:
        own.append(("mask_token_id", shape.mask_id))
    if ids is not None:
        own += [("draft_ids", tuple(ids.tolist())), ("vocab_size", shape.vocab)]
    windows = shape.config.windows
    if windows:
        own.append(("sliding_window", next(filter(None, windows))))
        own.append(("layer_types", tuple(SLIDING if each else FULL for each in windows)))
    width = shape.config.hidden_size
    return (*_eagle_shape.facts(_network.Shape(shape.config, width)), *own)


def dtype_of(params: Params) -> Any:
    """The dtype of a network with these parameters; float32 for a new one."""
    return jnp.dtype(jnp.float32 if params is None else params["hidden_norm"]["scale"].dtype)


def _stored(given: Given, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an existing network that its tensors and config.json show; {}: a new one."""
    params = given.params
    if params is None:
        return {}
    if not isinstance(params, dict) or not isinstance(params.get("hidden_norm"), dict):
        raise UserError(
            f"the parameters are not those of a {NAME} network: hidden_norm is missing; give the "
            "parameters of one"
        )
    markov = params.get("markov", {})
    kinds = {"gate": "gated", "joint": "rnn"}
    kind = next((name for part, name in kinds.items() if part in markov), "markov")
    stored: dict[str, Any] = {
        "context": "mixed" if "mix" in params else "shared",
        "correction": kind if markov else "gru" if "gru" in params else "none",
        "confidence": "confidence" in params,
    }
    if markov:
        stored["rank"] = np.shape(markov["table"])[-1]
    if "gru" in params:
        stored["rank"] = np.shape(params["prefix"]["out"]["kernel"])[0]
        stored["state"] = np.shape(params["gru"]["u"])[0]
    if "mask" in params:
        stored["mask_token_id"] = None
    if not raw:
        return stored
    for key in ("causal_head", "sample_from_anchor"):
        stored[key] = value_of(dict(raw), key, bool, False)
    stored["block_size"] = value_of(dict(raw), "block_size", int, None)
    key = "pure_draft_prefix_len"
    stored[key] = whole(key, raw.get(key, 0), 0)
    # Where the files do not name the mask, the key does.
    if "mask_token_id" not in stored and raw.get("mask_token_id") is not None:
        stored["mask_token_id"] = whole("mask_token_id", raw["mask_token_id"], 0)
    types = raw.get("layer_types") or ()
    stored["sliding_window"] = (raw.get("sliding_window") or 0) if SLIDING in types else 0
    return stored


def _value(key: str, asked: Any, stored: Mapping[str, Any]) -> Any:
    """The value of a key. Another one than the given network's is a UserError, or a warning."""
    name, unset, default = KEYS[key]
    if key not in stored:
        return default if asked == unset and type(asked) is type(unset) else asked
    if asked in (unset, stored[key]):
        return stored[key]
    differs = f"{name} is {asked!r}, and the given network has {stored[key]!r}"
    if key != "sample_from_anchor":
        raise UserError(f"{differs}; leave it out")
    warnings.warn(f"{differs} by its files; {name} {asked!r} is taken", stacklevel=2)
    return asked


def _check_effects(values: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raises UserError for keys without effect, and for a block that drafts no token."""
    drafts = values["block_size"] - (not values["sample_from_anchor"])
    if drafts < 1:
        raise UserError(
            f"block is {values['block_size']}, which drafts no token; give at least 2, or 1 with "
            "anchor"
        )
    first = values["pure_draft_prefix_len"]
    if values["correction"] == "gru" and first >= drafts:
        raise UserError(
            f"plain is {first} and a block drafts {drafts} tokens: the correction has no effect; "
            f"give less than {drafts} (0: all are corrected), or leave correction out"
        )
    for key, kinds in (
        ("rank", _block_layers.CORRECTIONS[1:]),
        ("state", ("gru",)),
        ("pure_draft_prefix_len", ("gru",)),
    ):
        name, unset, _ = KEYS[key]
        if asked[key] != unset and values["correction"] not in kinds:
            raise UserError(
                f"{name} is {asked[key]} and has no effect on the correction "
                f"{values['correction']!r}; leave it out, or take {' or '.join(kinds)}"
            )


def _windows(
    config: TransformerConfig, raw: Mapping[str, Any], window: int
) -> tuple[int | None, ...]:
    """``TransformerConfig.windows``: as in config.json, or in all layers but the last."""
    if not window:
        return ()
    types = raw.get("layer_types") or (*(SLIDING,) * (config.num_layers - 1), FULL)
    if len(types) != config.num_layers or not set(types) <= {SLIDING, FULL}:
        raise UserError(
            f"layer_types is {list(types)}; it must name {SLIDING} or {FULL} for each of the "
            f"{config.num_layers} layers"
        )
    windows = tuple(window if kind == SLIDING else None for kind in types)
    if not any(windows):
        raise UserError(
            f"window is {window}, and the only layer has none; leave it out, or raise layers"
        )
    return windows


def _taps(target: LM, raw: Mapping[str, Any], asked: Any, layers: int, own: int) -> tuple[int, ...]:
    """The layers that the network reads. Raises UserError."""
    wanted, stored = (
        _eagle_shape.taps_of(value) for value in (asked, raw.get("target_layer_ids", ()))
    )
    if wanted and stored and wanted != stored:
        raise UserError(
            f"taps are {list(wanted)}, and the given network reads {list(stored)}; leave them out"
        )
    taps = wanted or stored or default_taps(layers, own)
    _eagle_shape.check_taps(NAME, target, taps)
    return taps


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers of a target of ``layers``, evenly spaced from 1 to ``layers`` - 3.

    The authors' code of DFlash; a single one is in the middle. Fewer where the target has too few.
    """
    if count == 1 or layers < 5:
        return (layers // 2,)
    spaced = np.round(1 + np.arange(count) * (layers - 4) / (count - 1)).astype(int)
    return tuple(sorted({int(each) for each in spaced}))


def _check(target: LM, given: Given, shape: BlockShape) -> None:
    """Raises UserError for parameters of another shape, and for a wrong mask."""
    if shape.mask_id is not None and not 0 <= shape.mask_id < target.vocab_size:
        raise UserError(
            f"mask_id is {shape.mask_id}; the target's tokens are 0..{target.vocab_size - 1}"
        )
    if given.params is None:
        return
    if shape.mask_id is None and "mask" not in given.params:
        raise UserError(
            f"the {NAME} network has no embedding of its masks; give mask_id, the token that it "
            "was trained with"
        )
    module = nnx.to_pure_dict(_block_layers.abstract(shape, jnp.dtype(jnp.float32))[1])
    wanted: dict[Any, Any] = flatten_dict(module)
    for path, size in flatten_dict(corrections.shapes(shape)).items():
        wanted[path] = jax.ShapeDtypeStruct(size, jnp.float32)
    width = shape.config.hidden_size
    if "embed" in given.params:
        wanted["embed", "embedding"] = jax.ShapeDtypeStruct((shape.vocab, width), jnp.float32)
    if shape.head is not None:
        wanted["head", "kernel"] = jax.ShapeDtypeStruct((width, shape.head), jnp.float32)
    if shape.mask_id is None:
        wanted["mask",] = jax.ShapeDtypeStruct((shape.config.hidden_size,), jnp.float32)
    _eagle_shape.check_leaves(NAME, wanted, flatten_dict(given.params))
