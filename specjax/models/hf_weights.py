"""The weights of Hugging Face style directories: safetensors files in, safetensors files out.

A table gives the module names of each family and is used in both directions. Linear kernels are
[in, out] here and in GPT-2, and [out, in] everywhere else; GPT-2 stores q, k and v side by side in
one tensor. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open

from specjax import files
from specjax.errors import UserError
from specjax.models import lm, tensor_files
from specjax.models.hf_config import read_json, table
from specjax.models.tensor_files import Tensor
from specjax.models.transformer_config import TransformerConfig

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
# Buffers that old versions of transformers stored; they are not weights.
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
_MISMATCH = "the weights do not belong to this config.json, or the copy is incomplete"


class _Stored(NamedTuple):
    """A tensor of a checkpoint; ``paths`` are our leaves, its equal parts along the last axis."""

    paths: list[tuple]
    shape: tuple[int, ...]  # in the file, after the transposition
    transposed: bool


def weight_files(path: Path) -> Iterator[Path]:
    """The safetensors files of a model directory: one file, or the shards that its index names.

    Raises UserError if there are none, or one is missing.
    """
    index = path / "model.safetensors.index.json"
    if (path / "model.safetensors").is_file():
        yield path / "model.safetensors"
    elif index.is_file():
        for shard in sorted(set((read_json(index).get("weight_map") or {}).values())):
            if not (path / shard).is_file():
                raise UserError(
                    f"{path} lacks {shard}, which {index.name} names; copy the directory again"
                )
            yield path / shard
    elif any(path.glob("*.bin")):
        raise UserError(
            f"{path} has pickled weights only, which are never read; "
            "convert them to model.safetensors"
        )
    else:
        raise UserError(
            f"{path} has no weights; a model directory has model.safetensors, "
            f"or shards and {index.name}"
        )


def open_weights(file: Path, stack: contextlib.ExitStack) -> Any:
    """The open safetensors file; ``stack`` closes it. Raises UserError if it is damaged."""
    try:
        return stack.enter_context(safe_open(str(file), framework="np"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is damaged or incomplete ({error}); copy it again") from None


def read_params(
    path: Path, config: TransformerConfig, dtype: np.dtype, on_host: bool = False
) -> dict:
    """The parameters of a model directory as a nested dict of ``dtype``.

    ``on_host``: NumPy arrays. Reads one tensor at a time: a file is never in memory as a whole.
    Raises UserError if the tensors are not those of ``config``.
    """
    layout, opened, params = _layout(config), {}, {}
    # GPT-2 checkpoints exist with and without this prefix.
    prefix = _MODULES[config.family]["layers"].partition(".")[0] + "."
    with contextlib.ExitStack() as stack:
        for file in weight_files(path):
            weights = open_weights(file, stack)
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                tied_head = config.tie_embeddings and name == "lm_head.weight"
                if not _BUFFERS.search(name) and not tied_head:
                    opened[prefix + name if prefix + name in layout else name] = (weights, name)
        _check_names(path, layout, opened)
        for name, (weights, stored_name) in opened.items():
            _check_tensor(path, name, weights.get_slice(stored_name), layout[name].shape)
        for name, (weights, stored_name) in opened.items():
            tensor, paths = weights.get_tensor(stored_name), layout[name].paths
            parts = np.split(tensor.T if layout[name].transposed else tensor, len(paths), axis=-1)
            for leaf, part in zip(paths, parts, strict=True):
                array = np.asarray(part, dtype, order="C")
                params[leaf] = array if on_host else jnp.asarray(array)
    return unflatten_dict(params)


def write_params(
    path: Path | None, config: TransformerConfig, params: dict, max_shard_bytes: int
) -> None:
    """Writes model.safetensors, or shards of at most ``max_shard_bytes`` and an index.

    The host holds one tensor at a time. A tensor that is larger than a shard gets its own. ``path``
    None: writes nothing, and takes part in gathering parameters that are divided among processes.
    Raises OSError.
    """
    leaves: Any = flatten_dict(params)
    layout, weight_map = _layout(config), {}
    sizes = {
        name: sum(leaves[leaf].nbytes for leaf in stored.paths) for name, stored in layout.items()
    }
    shards = _shards(sizes, max_shard_bytes)
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = shard if len(shards) > 1 else "model.safetensors"
        tensors = {name: _to_write(layout[name], leaves) for name in names}
        tensor_files.write(None if path is None else path / file, tensors)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1 and path is not None:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        files.write_json(path / "model.safetensors.index.json", index)


def _to_write(stored: _Stored, leaves: Mapping[tuple, Any]) -> Tensor:
    """The tensor as the file has it, gathered when it is read."""

    def read() -> np.ndarray:
        parts = [tensor_files.gather(leaves[leaf]) for leaf in stored.paths]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return whole.T if stored.transposed else whole

    return Tensor(stored.shape, np.dtype(leaves[stored.paths[0]].dtype), read)


def _layout(config: TransformerConfig) -> dict[str, _Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the decoder."""
    modules, layout = _MODULES[config.family], {}
    leaves: Any = flatten_dict(lm.abstract_params(config))
    # q, k, v: their order in GPT-2's fused tensor.
    for path in sorted(leaves, key=lambda path: "qkv".find(path[-2])):
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


def _check_names(path: Path, layout: Collection[str], names: Collection[str]) -> None:
    missing = [name for name in layout if name not in names]
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; {_MISMATCH}"
        )
    extra = [name for name in names if name not in layout]
    if extra:
        raise UserError(f"{path} has {len(extra)} tensors too many, first {extra[0]}; {_MISMATCH}")


def _check_tensor(path: Path, name: str, tensor: Any, expected: tuple[int, ...]) -> None:
    """``tensor`` is a slice of an open safetensors file: its shape and dtype cost no reading."""
    shape, dtype = tensor.get_shape(), tensor.get_dtype()
    if tuple(shape) != expected:
        raise UserError(f"{path}: {name} is {shape}, expected {list(expected)}; {_MISMATCH}")
    if dtype not in ("F32", "BF16", "F16"):
        raise UserError(f"{path}: {name} is stored as {dtype}; supported: F32, BF16, F16")


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Splits the names, in order, into groups of at most ``most`` bytes (or of one tensor)."""
    shards: list[list[str]] = [[]]
    for name, size in sizes.items():
        if shards[-1] and size + sum(sizes[other] for other in shards[-1]) > most:
            shards.append([])
        shards[-1].append(name)
    return shards
