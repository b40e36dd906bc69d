"""Reads models, and writes them as Hugging Face style directories.

A model is a directory (config.json, safetensors, tokenizer.json), a name of the Hub or a .gguf
file. ``sources`` makes the last two look like the first; ``hf_config`` translates the
configuration, ``hf_weights`` the tensors, ``hf_tokenizer`` the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from tokenizers import Tokenizer

from specjax import files
from specjax.errors import UserError
from specjax.files import buckets
from specjax.models import lm, memory, t5_config, tensor_files
from specjax.models.config_values import token_id
from specjax.models.hf_config import config_from_hf, config_to_hf, eos_ids, translated
from specjax.models.hf_config import read_json as read_json
from specjax.models.hf_tokenizer import fingerprint as fingerprint
from specjax.models.hf_tokenizer import load_tokenizer as load_tokenizer
from specjax.models.hf_tokenizer import read_tokenizer_config as read_tokenizer_config
from specjax.models.hf_tokenizer import save_tokenizer
from specjax.models.hf_weights import check_sizes, has_tensor, read_params, write_params
from specjax.models.layers import in_int8
from specjax.models.sources import compressed_tensors, gguf_config, gguf_file, hub
from specjax.models.t5_config import T5Config
from specjax.models.tensor_files import Tensor
from specjax.models.token_bytes import TokenBytes
from specjax.models.transformer_config import TransformerConfig
from specjax.types import LM

WEIGHTS = ("", "int8")
MAX_SHARD_BYTES = 5_000_000_000


class Loaded(NamedTuple):
    """A model in memory."""

    lm: LM
    params: dict
    config: Any  # TransformerConfig or T5Config; None: the model was not read from files
    tokenizer: Tokenizer | None
    # Or the .gguf file; of a Hub name the directory in the cache. "": it was not read from files.
    directory: str

    @property
    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer, of a model that needs one. Raises UserError if there is none."""
        if self.tokenizer is None:
            where = f"{self.directory} has no tokenizer.json" if self.directory else "there is none"
            raise UserError(f"{where}; text needs a tokenizer")
        return self.tokenizer

    @property
    def spell(self) -> Callable[[list[int]], str]:
        """Token ids to text; of a model without a tokenizer, the ids."""
        return _numbers if self.tokenizer is None else self.tokenizer.decode

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a text, by the model's files; none if it was not read from files."""
        return () if self.config is None else self.config.eos_token_id


def _numbers(ids: list[int]) -> str:
    return "".join(f" {token}" for token in ids)


def resolve(
    directory: str | os.PathLike, *, weights: bool = True, names: Sequence[str] = ()
) -> Path:
    """The directory or the .gguf file of a model.

    A path that exists is that path, or the folder ``model`` of a trained run's workdir. Otherwise
    organisation/model or organisation/model@revision is a name of the Hub, whose files are in the
    cache or downloaded into it. Of gs://bucket/model there is a copy (``files.buckets``).

    Args:
        directory: a directory, a workdir, a .gguf file, a name of the Hub, or an address.
        weights: False: of a Hub name only the configuration and the tokenizer are fetched.
        names: of a Hub name, config.json and the first of these files that exists are fetched
            instead, for any architecture.

    Raises UserError if there is no such model, or the run is not finished.
    """
    try:
        path = buckets.local(directory)
        path.exists()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{directory} is no path of a model ({error})") from None
    if gguf_file.is_gguf(path) and not path.is_dir():
        if not path.is_file():
            raise UserError(f"there is no file {path}; give the path of a .gguf file")
        return path
    if not path.exists() and hub.is_name(text := os.fspath(directory)):
        return hub.fetch_one_of(text, names) if names else hub.fetch(text, weights)
    if not path.is_dir():
        raise UserError(
            f"{path} is no directory; give a Hugging Face style directory, a name of the Hub "
            "(organisation/model), a .gguf file or a trained run's workdir"
        )
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"training in {path} is not finished; run it again with the same command to resume it"
        )
    return path


def load(
    directory: str | os.PathLike,
    *,
    dtype: Any = None,
    taps: tuple[int, ...] = (),
    on_host: bool = False,
    weights: str = "",
) -> Loaded:
    """Reads a model: a directory, a name of the Hub, a .gguf file or a trained run's workdir.

    Args:
        directory: see ``resolve``.
        dtype: of parameters and activations; None: see ``parameter_dtype``.
        taps: see ``lm.from_config``.
        on_host: leave the parameters in the memory of the host, as NumPy arrays: for models that
            are divided among devices (``specjax.sharding``).
        weights: "int8": the kernels of layers are rounded to 8 bits with a scale for each output
            channel, and stay so in memory (``layers.Int8``). "": they have ``dtype``.

    Raises UserError if a file is missing, damaged or not supported, and OutOfMemory if the device
    has too little memory for the parameters.
    """
    if weights not in WEIGHTS:
        raise UserError(f"weights is {weights!r}; it must be 'int8', or empty for those of dtype")
    path = resolve(directory)
    config = _config(path)
    check_sizes(path, config)
    dtype, tokenizer = parameter_dtype(dtype), load_tokenizer(path, config.vocab_size)
    if not on_host:
        leaves: Any = flatten_dict(lm.abstract_params(config, dtype)).items()
        item = lambda path: 1 if weights and in_int8(path) else dtype.itemsize  # noqa: E731
        need = sum(leaf.size * item(path) for path, leaf in leaves)
        right = "take a smaller model, or divide it among devices (mesh=tensor:N)"
        memory.check(need, f"{path.name} in {weights or dtype}", right)
    model = lm.from_config(config, dtype, tuple(taps))
    if tokenizer is not None:
        name, ends = fingerprint(tokenizer), tuple(config.eos_token_id)
        spelled = TokenBytes(name, tokenizer, config.bos_token_id, ends)
        model = model._replace(vocabulary=name, token_bytes=spelled)
    with memory.errors():
        params = read_params(path, config, dtype, on_host, bool(weights))
    return Loaded(model, params, config, tokenizer, str(path))


def parameter_dtype(dtype: Any) -> Any:
    """``dtype`` as a NumPy dtype.

    None is float32 on CPUs, where the others are slow, float16 on NVIDIA GPUs that do not compute
    in bfloat16 (of a compute capability below 8, such as a T4), and bfloat16 elsewhere.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
        capability = getattr(jax.devices()[0], "compute_capability", None)
        # An AMD GPU names its architecture, such as "gfx942".
        if re.fullmatch(r"[0-7]\.\d+", str(capability)):
            dtype = jnp.float16
    return jnp.dtype(dtype)


def save(
    directory: str | os.PathLike,
    config: TransformerConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    more: dict[str, Any] | None = None,
) -> None:
    """Writes a directory for ``load`` and transformers, all at once; ``params`` keep their dtype.

    ``more`` are further keys of config.json.

    Parameters that are divided among devices are gathered one tensor at a time. With several
    processes all must call it, and the first one writes.

    Raises UserError if the parameters do not fit the config or the directory holds something else
    than a model, and OSError; the directory then stays unchanged.
    """
    check_params(params, lm.abstract_params(config))
    raw = config_to_hf(config) | {"torch_dtype": str(params["embed"]["embedding"].dtype)}
    raw |= more or {}
    write(directory, config, params, raw, tokenizer, max_shard_bytes=max_shard_bytes)


def check_params(params: dict, like: dict) -> None:
    """Raises UserError for parameters with other names or shapes than those of a configuration."""
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, like):
        raise UserError(
            "the parameters are not those of the config; "
            "save a model with the config it was made with"
        )


def write(
    directory: str | os.PathLike,
    config: TransformerConfig,
    params: dict,
    raw: dict[str, Any],
    tokenizer: Tokenizer | None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """``save`` with the config.json ``raw`` and further files of tensors; checks no parameters."""
    path = Path(directory).expanduser().resolve()
    # Refuse to overwrite a directory that is not a model.
    if path.is_file() or (any(path.glob("*")) and not any(path.glob("model*.safetensors"))):
        raise UserError(
            f"{path} exists and is not a model directory; name a new one to save a model"
        )
    if jax.process_index() > 0:
        write_params(None, config, params, max_shard_bytes)
        for named in (tensors or {}).values():
            tensor_files.write(None, named)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path) as fresh:
        fresh.mkdir()
        files.write_json(fresh / "config.json", raw)
        write_params(fresh, config, params, max_shard_bytes)
        for file, named in (tensors or {}).items():
            tensor_files.write(fresh / file, named)
        if tokenizer is not None:
            save_tokenizer(fresh, tokenizer, config)


def read_config(path: Path) -> dict:
    """config.json of what ``resolve`` returns; that of a .gguf file is made from its metadata.

    Raises UserError if it is missing, damaged, or of a .gguf file that is not supported.
    """
    if gguf_file.is_gguf(path):
        return gguf_config.of_file(gguf_file.read(path))
    return read_json(path / "config.json")


def token_bytes(path: Path, tokenizer: Tokenizer) -> TokenBytes:
    """The bytes of the tokens of what ``resolve`` returns, of any architecture, without weights.

    Raises UserError for ids that begin or end a text and are no ids.
    """
    raw = read_config(path)
    first = token_id(raw, "bos_token_id", where=path / "config.json")
    ends = _of_generation(path, eos_ids, translated(path / "config.json", raw, eos_ids))
    return TokenBytes(fingerprint(tokenizer), tokenizer, first, ends)


def _config(path: Path) -> TransformerConfig:
    """config.json, with the end-of-sequence ids of generation_config.json where that exists.

    As in transformers 5, that file alone decides where a text ends: without ids in it, texts have
    no end, whatever config.json names. Without the file, the ids are those of config.json; where it
    names none, there are none.
    """
    where = path if gguf_file.is_gguf(path) else path / "config.json"
    config = translated(where, read_config(path), config_from_hf)
    # Chat models name the token that ends a turn only in this file.
    eos = _of_generation(path, eos_ids, config.eos_token_id)
    config = dataclasses.replace(config, eos_token_id=eos)
    if not isinstance(config, T5Config):
        return config
    # Of T5 the start token may be there, and the tensors show whether there is a head.
    read = functools.partial(token_id, key="decoder_start_token_id", least=0)
    if (start := _of_generation(path, read, None)) is not None:
        config = dataclasses.replace(config, start_token_id=start)
    return t5_config.with_head(config, has_tensor(path, "lm_head.weight"))


def _of_generation(path: Path, translate: Callable[[dict], Any], default: Any) -> Any:
    """``translate`` of generation_config.json; ``default`` where there is none."""
    file = path / "generation_config.json"
    return translated(file, read_json(file), translate) if file.exists() else default


class Origin(NamedTuple):
    """What is known about a model's files."""

    name: str  # of a directory, of a trained run, of a repository, or of a file
    source: str  # "directory", "hub" or "gguf"
    revision: str | None  # the commit of a repository of the Hub
    # Types such as "Q4_1" and "int8": the weights were rounded to them.
    dequantised_from: tuple[str, ...]


def origin(directory: str | os.PathLike) -> Origin:
    """The origin of what ``resolve`` returns. Raises UserError for a damaged file."""
    path = Path(directory).absolute()
    if gguf_file.is_gguf(path) and path.is_file():
        return Origin(path.name, "gguf", None, gguf_file.read(path).quantised())
    config = path / "config.json"
    raw = read_json(config) if config.is_file() else {}
    how = translated(config, raw, compressed_tensors.scheme)
    types = tuple(compressed_tensors.NAMES[each] for each in (how.types if how else ()))
    if (snapshot := hub.snapshot_of(path)) is not None:
        name, commit = snapshot
        return Origin(name, "hub", commit, types)
    # A run keeps its model in the folder "model".
    return Origin(path.parent.name if path.name == "model" else path.name, "directory", None, types)
