"""Hugging Face style directories, in and out: config.json, safetensors, tokenizer.json. Nothing is ever unpickled.

Two tables say how a checkpoint spells our configuration and our modules; both are read in both directions. Linear kernels
are [in, out] here and in GPT-2, and [out, in] everywhere else; GPT-2 keeps q, k and v side by side in one tensor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from specjax.errors import UserError
from specjax.models import lm
from specjax.models.hf_config import config_from_hf, config_to_hf, table
from specjax.models.transformer import TransformerConfig
from specjax.types import LM

_MODULES = table("""
    embed              model.embed_tokens        transformer.wte
    positions          -                         transformer.wpe
    layers             model.layers              transformer.h
    norm               model.norm                transformer.ln_f
    head               lm_head                   lm_head
    attention_norm     input_layernorm           ln_1
    attention.q        self_attn.q_proj          attn.c_attn
    attention.k        self_attn.k_proj          attn.c_attn
    attention.v        self_attn.v_proj          attn.c_attn
    attention.o        self_attn.o_proj          attn.c_proj
    mlp_norm           post_attention_layernorm  ln_2
    mlp.gate           mlp.gate_proj             -
    mlp.up             mlp.up_proj               mlp.c_fc
    mlp.down           mlp.down_proj             mlp.c_proj
""")
_BUFFERS = re.compile(
    r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$"
)  # written by old versions, carry no weights


class Loaded(NamedTuple):
    """A model directory in memory."""

    lm: LM
    params: dict
    config: TransformerConfig
    tokenizer: Tokenizer | None
    directory: str


class _Stored(NamedTuple):
    """A tensor of a checkpoint, and the leaves of ours that are its equal parts along the last axis."""

    paths: list[tuple]
    shape: tuple[int, ...]  # in the file, so after transposing
    transposed: bool


def resolve(directory: str | os.PathLike) -> Path:
    """The model directory meant by ``directory``: itself, or the ``model`` folder of a trained run's workdir."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise UserError(
            f"{path} is no directory; give a Hugging Face style directory or a trained run's workdir"
        )
    if (path / "model" / "config.json").is_file():
        return path / "model"
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"training in {path} is not finished; run it again with the same command to resume it"
        )
    return path


def load(directory: str | os.PathLike, *, dtype: Any = None, taps: tuple[int, ...] = ()) -> Loaded:
    """Reads a model directory. ``dtype`` None is float32 on CPUs, where bfloat16 is slow, and bfloat16 elsewhere."""
    path = resolve(directory)
    raw = _read_json(path / "config.json")
    try:
        config = config_from_hf(raw)
    except UserError as error:
        raise UserError(f"{path / 'config.json'}: {error}") from None
    if (
        path / "generation_config.json"
    ).is_file():  # chat models name further end-of-sequence ids only there
        more = _read_json(path / "generation_config.json").get("eos_token_id")
        more = [] if more is None else more if isinstance(more, list) else [more]
        config = dataclasses.replace(
            config, eos_token_id=tuple(dict.fromkeys((*config.eos_token_id, *more)))
        )
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    dtype, tokenizer = jnp.dtype(dtype), load_tokenizer(path, config.vocab_size)
    model = lm.from_config(config, dtype, tuple(taps))
    if tokenizer is not None:
        model = model._replace(vocabulary=fingerprint(tokenizer))
    return Loaded(model, _read_params(path, config, dtype), config, tokenizer, str(path))


def load_tokenizer(path: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer.json of a model directory, or None. Raises UserError if it is damaged or has more ids than the model."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file} is damaged ({error}); copy it again") from None
    if (size := max(tokenizer.get_vocab().values(), default=-1) + 1) > vocab_size:
        raise UserError(
            f"{file} has ids up to {size - 1} and the model {vocab_size} tokens; they do not match"
        )
    # What a text may be cut to or filled up to for one network is nothing to us: nothing is lost, nothing is added.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """What two tokenizers with the same map from words to ids have in common."""
    words = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(words.encode()).hexdigest()


def save(
    directory: str | os.PathLike,
    config: TransformerConfig,
    params: dict,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a directory that ``load`` and transformers read, all at once; ``params`` keep their dtype."""
    if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, lm.abstract_params(config)):
        raise UserError(
            "the parameters are not those of the config; save a model with the config it was made with"
        )
    raw = config_to_hf(config) | {"torch_dtype": str(params["embed"]["embedding"].dtype)}
    path = Path(directory).expanduser().resolve()
    # A slip of the pen must not replace somebody's home.
    if path.is_file() or (any(path.glob("*")) and not any(path.glob("model*.safetensors"))):
        raise UserError(
            f"{path} exists and is not a model directory; name a new one to save a model"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
        fresh = Path(beside) / "new"
        fresh.mkdir()
        _write_json(fresh / "config.json", raw)
        _write_params(fresh, config, params, max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save(str(fresh / "tokenizer.json"))
            ids = {
                "bos_token": config.bos_token_id,
                "eos_token": next(iter(config.eos_token_id), None),
            }
            tokens = {key: tokenizer.id_to_token(i) for key, i in ids.items() if i is not None}
            tokens["unk_token"] = getattr(tokenizer.model, "unk_token", None)
            tokens = {key: token for key, token in tokens.items() if token is not None}
            kind = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": config.max_positions,
            }
            _write_json(
                fresh / "tokenizer_config.json",
                kind | tokens | {"clean_up_tokenization_spaces": False},
            )
        if path.exists():
            path.rename(Path(beside) / "old")
        fresh.rename(path)


def same_vocabulary(a: Loaded, b: Loaded) -> str | None:
    """None if both models mean the same text by the same token ids; otherwise one sentence saying how they differ."""
    size = a.config.vocab_size
    if size != b.config.vocab_size:
        return f"{a.directory} has {size} tokens and {b.directory} has {b.config.vocab_size}"
    if a.tokenizer is None or b.tokenizer is None:
        return None
    first, second = (
        {i: token for token, i in t.get_vocab().items()} for t in (a.tokenizer, b.tokenizer)
    )
    differ = sum(first.get(i) != second.get(i) for i in first.keys() | second.keys())
    return (
        f"{differ} of {size} token ids differ between {a.directory} and {b.directory}"
        if differ
        else None
    )


def _layout(config: TransformerConfig) -> dict[str, _Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the decoder."""
    modules, layout = _MODULES[config.family], {}
    leaves: Any = flatten_dict(lm.abstract_params(config))
    for path in sorted(
        leaves, key=lambda path: "qkv".find(path[-2])
    ):  # the order within GPT-2's fused tensor
        first, *inner, leaf = path
        name = (
            f"{modules['layers']}.{inner[0]}.{modules['.'.join(inner[1:])]}"
            if inner
            else modules[first]
        )
        name += ".bias" if leaf == "bias" else ".weight"
        transposed = leaf == "kernel" and (config.family == "llama" or first == "head")
        paths = [*layout[name].paths, path] if name in layout else [path]
        shape = (*leaves[path].shape[:-1], leaves[path].shape[-1] * len(paths))
        layout[name] = _Stored(paths, shape[::-1] if transposed else shape, transposed)
    return layout


def _weight_files(path: Path) -> Iterator[Path]:
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        yield path / "model.safetensors"
    elif index.is_file():
        for shard in sorted(set((_read_json(index).get("weight_map") or {}).values())):
            if not (path / shard).is_file():
                raise UserError(
                    f"{path} lacks {shard}, which {index.name} names; copy the directory again"
                )
            yield path / shard
    elif any(path.glob("*.bin")):
        raise UserError(
            f"{path} has pickled weights only, which are never read; convert them to model.safetensors"
        )
    else:
        raise UserError(
            f"{path} has no weights; a model directory has model.safetensors, or shards and {index.name}"
        )


def _read_params(path: Path, config: TransformerConfig, dtype: np.dtype) -> dict:
    """Tensor by tensor, so that a file is never in memory as a whole."""
    layout, found, params = _layout(config), {}, {}
    prefix = (
        _MODULES[config.family]["layers"].partition(".")[0] + "."
    )  # GPT-2 checkpoints come with and without it
    told = "the weights do not belong to this config.json, or the copy is incomplete"
    with contextlib.ExitStack() as stack:
        for file in _weight_files(path):
            try:
                opened = stack.enter_context(safe_open(str(file), framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file} is damaged or incomplete ({error}); copy it again"
                ) from None
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                if not _BUFFERS.search(name) and not (
                    config.tie_embeddings and name == "lm_head.weight"
                ):
                    found[prefix + name if prefix + name in layout else name] = (opened, name)
        missing = [name for name in layout if name not in found]
        if missing:
            raise UserError(
                f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; {told}"
            )
        extra = [name for name in found if name not in layout]
        if extra:
            raise UserError(f"{path} has {len(extra)} tensors too many, first {extra[0]}; {told}")
        for name, (opened, spelled) in found.items():
            part = opened.get_slice(spelled)
            if tuple(part.get_shape()) != layout[name].shape:
                raise UserError(
                    f"{path}: {name} is {part.get_shape()}, expected {list(layout[name].shape)}; {told}"
                )
            if part.get_dtype() not in ("F32", "BF16", "F16"):
                raise UserError(
                    f"{path}: {name} is stored as {part.get_dtype()}; supported: F32, BF16, F16"
                )
        for name, (opened, spelled) in found.items():
            tensor, paths = opened.get_tensor(spelled), layout[name].paths
            parts = np.split(tensor.T if layout[name].transposed else tensor, len(paths), axis=-1)
            for leaf, part in zip(paths, parts, strict=True):
                params[leaf] = jnp.asarray(np.asarray(part, dtype, order="C"))
    return unflatten_dict(params)


def _write_params(
    path: Path, config: TransformerConfig, params: dict, max_shard_bytes: int
) -> None:
    leaves: Any = flatten_dict(params)
    layout, weight_map = _layout(config), {}
    sizes = {
        name: sum(leaves[leaf].nbytes for leaf in stored.paths) for name, stored in layout.items()
    }
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and size + sum(sizes[other] for other in shards[-1]) > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    for number, names in enumerate(shards, 1):
        file = (
            f"model-{number:05}-of-{len(shards):05}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        tensors = {}
        for name in names:
            tensor = np.concatenate(
                [np.asarray(leaves[leaf]) for leaf in layout[name].paths], axis=-1
            )
            # safetensors writes the bytes as they lie: it would store a transposed view untransposed.
            tensors[name] = np.ascontiguousarray(tensor.T if layout[name].transposed else tensor)
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(path / "model.safetensors.index.json", index)


def _read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not an object")
        return value
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} has no {path.name}; give a Hugging Face style model directory"
        ) from None
    except ValueError as error:  # not JSON, or not even UTF-8
        raise UserError(f"{path} is not valid JSON ({error}); copy it again") from None


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
