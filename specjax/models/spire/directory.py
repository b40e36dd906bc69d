"""Directories of SPIRe draft models: config.json, the decoder's tensors, the memory's weights.

config.json names an architecture that only this module reads: a loader of plain decoders would
compute full attention with these weights. Its key "decoder" is the config.json of the layers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from specjax import files
from specjax.errors import UserError
from specjax.models import hf, tensor_files
from specjax.models.hf_config import config_from_hf, config_to_hf
from specjax.models.hf_tokenizer import fingerprint, load_tokenizer, save_tokenizer
from specjax.models.hf_weights import read_params, write_params
from specjax.models.spire.config import SpireConfig, check
from specjax.models.spire.model import MEMORY, abstract_params, from_config
from specjax.types import LM

ARCHITECTURE = "SpireDraftModel"
_KEYS = ("sinks", "window", "feedback", "own")
_MEMORY_FILE = "memory.safetensors"
_SHARD = 5_000_000_000  # bytes


class Loaded(NamedTuple):
    """A SPIRe draft model in memory."""

    lm: LM
    params: dict
    config: SpireConfig
    tokenizer: Tokenizer | None
    directory: str


def load(directory: str | os.PathLike, *, dtype: Any = None, on_host: bool = False) -> Loaded:
    """Reads a directory that ``save`` wrote, or the workdir of the run that trained it.

    ``dtype`` and ``on_host`` as in ``hf.load``. Raises UserError if it is something else, or a file
    is missing or damaged.
    """
    path = hf.resolve(directory)
    if not path.is_dir():
        raise UserError(f"{path} is no directory of a SPIRe draft model; train one first")
    config, dtype = read_config(path), hf.parameter_dtype(dtype)
    tokenizer = load_tokenizer(path, config.decoder.vocab_size)
    params = read_params(path, config.decoder, dtype, on_host)
    if config.feedback:
        params[MEMORY] = {"weights": jnp.asarray(_read_weights(path, config), dtype)}
    model = from_config(config, dtype)
    if tokenizer is not None:
        model = model._replace(vocabulary=fingerprint(tokenizer))
    return Loaded(model, params, config, tokenizer, str(path))


def read_config(path: Path) -> SpireConfig:
    """The shape in config.json. Raises UserError if it is that of something else, or wrong."""
    file, raw = path / "config.json", hf.read_json(path / "config.json")
    if raw.get("architectures") != [ARCHITECTURE]:
        raise UserError(
            f"{path} is no SPIRe draft model; give one that configs/spire.py trained, or another "
            "drafter (draft_model takes plain decoders)"
        )
    missing = [key for key in (*_KEYS, "decoder") if key not in raw]
    if missing or not isinstance(raw["decoder"], dict):
        wrong = missing[0] if missing else "decoder"
        raise UserError(f"{file} has no {wrong}; train the model again, or copy it again")
    try:
        config = SpireConfig(config_from_hf(raw["decoder"]), *(raw[key] for key in _KEYS))
        check(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    return config


def save(
    directory: str | os.PathLike,
    config: SpireConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    layers: str = "",
) -> None:
    """Writes a directory for ``load``, all at once; ``params`` keep their dtype.

    ``layers``: those of the target that it started from, for the reader of config.json. With
    several processes all must call it, and the first one writes.

    Raises UserError if the parameters do not fit the config or the directory holds something else
    than a model, and OSError; the directory then stays unchanged.
    """
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, abstract_params(config)):
        raise UserError(
            "the parameters are not those of the config; "
            "save a model with the config it was made with"
        )
    path = Path(directory).expanduser().resolve()
    if path.is_file() or (any(path.glob("*")) and not any(path.glob("model*.safetensors"))):
        raise UserError(
            f"{path} exists and is not a model directory; name a new one to save a model"
        )
    own = {key: value for key, value in params.items() if key != MEMORY}
    weights = {MEMORY: tensor_files.tensor(params[MEMORY]["weights"])} if config.feedback else {}
    if jax.process_index() > 0:
        write_params(None, config.decoder, own, _SHARD)
        tensor_files.write(None, weights)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as fresh:
        fresh.mkdir()
        files.write_json(fresh / "config.json", _to_json(config, own, layers))
        write_params(fresh, config.decoder, own, _SHARD)
        if weights:
            tensor_files.write(fresh / _MEMORY_FILE, weights)
        if tokenizer is not None:
            save_tokenizer(fresh, tokenizer, config.decoder)


def _to_json(config: SpireConfig, params: dict, layers: str) -> dict:
    raw: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "spire"}
    raw |= {key: getattr(config, key) for key in _KEYS}
    raw |= {"target_layers": layers} if layers else {}
    dtype = str(params["embed"]["embedding"].dtype)
    return raw | {"torch_dtype": dtype, "decoder": config_to_hf(config.decoder)}


def _read_weights(path: Path, config: SpireConfig) -> Any:
    """The weights of the mixture, f[layers+1]. Raises UserError."""
    file, size = path / _MEMORY_FILE, config.decoder.num_layers + 1
    if not file.is_file():
        raise UserError(f"{path} lacks {_MEMORY_FILE}; copy the directory again")
    try:
        with safe_open(str(file), framework="np") as opened:
            weights = opened.get_tensor(MEMORY)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or incomplete ({error}); copy it again") from None
    if weights.shape != (size,):
        raise UserError(
            f"{file}: {MEMORY} is {list(weights.shape)}, expected {[size]}; the weights do not "
            "belong to this config.json"
        )
    return weights
