"""The weights of Hugging Face style directories: safetensors files in, safetensors files out.

``tensors_of`` gives the tensors of each family and is used in both directions. Linear kernels are
[in, out] here and in GPT-2, and [out, in] everywhere else. Some families store several of our
parameters in one tensor: side by side (GPT-2, Phi-3), or the parts of each head together
(GPT-NeoX, Qwen3-Next). Experts are stored one by one, and are one array here. Nothing is ever
unpickled.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open

from specjax import files
from specjax.errors import UserError, on_disk
from specjax.models import lm, t5_config, tensor_files
from specjax.models.families import FAMILIES, Family
from specjax.models.hf_config import read_json
from specjax.models.layers import Int8, in_int8
from specjax.models.sources import compressed_tensors, gguf_file, gguf_tensors, tensors
from specjax.models.t5_config import T5Config
from specjax.models.tensor_files import Tensor
from specjax.models.transformer_config import TransformerConfig

# Buffers that old versions of transformers stored; they are not weights.
_BUFFERS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")
# The first map of a multi-token prediction module of DeepSeek and GLM, MiMo, and Qwen3-Next.
_PREDICTION = re.compile(
    r"(model\.layers\.\d+\.(?=eh_proj)|model\.mtp_layers\.\d+\.(?=input_proj)|mtp\.(?=fc))"
    r"\w+\.weight$"
)
_MISMATCH = "the weights do not belong to this config.json, or the copy is incomplete"


def weight_files(path: Path) -> Iterator[Path]:
    """The safetensors files of a model directory: one file, or the shards that its index names.

    Of a .gguf file: itself.

    Raises UserError if there are none, or one is missing.
    """
    index = path / "model.safetensors.index.json"
    if gguf_file.is_gguf(path):
        yield path
    elif (path / "model.safetensors").is_file():
        yield path / "model.safetensors"
    elif index.exists():
        for shard in tensors.shard_names(index):
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
    """The open safetensors or .gguf file; ``stack`` closes it. Raises UserError if damaged."""
    if gguf_file.is_gguf(file):
        return gguf_tensors.Tensors(file)
    with on_disk(f"{file} is damaged or incomplete", "copy it again", SafetensorError):
        return tensors.Safetensors(file, stack.enter_context(safe_open(str(file), framework="np")))


def has_tensor(path: Path, name: str) -> bool:
    """Whether a model directory has a tensor of this name. Raises UserError as ``read_params``."""
    with contextlib.ExitStack() as stack:
        return any(name in open_weights(file, stack).keys() for file in weight_files(path))  # noqa: SIM118


def check_sizes(path: Path, config: TransformerConfig) -> None:
    """Compares the sizes of a configuration with the headers of the weights; nothing is built.

    Raises UserError for more layers or experts than the tensors have, for a size that is larger
    than every extent of every tensor, and for weights that cannot be opened.
    """
    layers, experts, largest = set(), set(), 0
    ignored = family_of(config).ignored
    with contextlib.ExitStack() as stack:
        for file in weight_files(path):
            weights = open_weights(file, stack)
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                largest = max(largest, *weights.shape_of(name)[0], 0)
                numbers = [] if name.startswith(ignored) else re.findall(r"\.(\d+)\.", f".{name}")
                layers |= set(numbers[:1])
                experts |= set(numbers[1:2])
    sizes = {
        "layers": (max(config.num_layers, getattr(config, "encoder_layers", 0)), len(layers)),
        "tokens": (config.vocab_size, largest),
        "hidden units": (config.hidden_size, largest),
    }
    if config.recurrent is None or len(config.recurrent.layers) < config.num_layers:
        sizes["units of queries"] = config.num_heads * config.head_dim, largest
        sizes["units of keys"] = config.num_kv_heads * config.head_dim, largest
    if config.recurrent is not None:
        sizes["channels of the convolution"] = config.recurrent.channels, largest
    if config.experts is None and len(config.without_mlp) < config.num_layers:
        sizes["inner units"] = config.intermediate_size, largest
    if config.experts is not None:
        sizes["experts"] = config.experts.experts, len(experts)
        sizes["inner units of experts"] = config.experts.intermediate_size, largest
    if config.positions == "learned":
        sizes["positions"] = config.max_positions, largest
    for units, (asked, most) in sizes.items():
        if asked > most:
            raise UserError(
                f"{path}: the configuration asks for {asked} {units}, and the tensors have at most "
                f"{most}; {_MISMATCH}"
            )


def read_params(
    path: Path, config: TransformerConfig, dtype: np.dtype, on_host: bool, int8: bool = False
) -> dict:
    """The parameters of a model directory as a nested dict of ``dtype``.

    ``on_host``: NumPy arrays. ``int8``: the kernels of layers are ``layers.Int8``. Reads one tensor
    at a time, the largest first, while little else is in memory.
    Raises UserError if the tensors are not those of ``config``.
    """
    layout, params = tensors_of(config), {}
    with contextlib.ExitStack() as stack:
        opened = _open_all(path, config, layout, stack)
        _check_names(path, layout, opened)
        for name, (weights, stored_name) in opened.items():
            _check_tensor(path, name, weights.shape_of(stored_name), layout[name].shape)
        for name in sorted(opened, key=lambda name: -np.prod(layout[name].shape)):
            (weights, stored_name), stored = opened[name], layout[name]
            rounded = int8 and all(map(in_int8, stored.paths))
            tensor = weights.get_tensor(stored_name, np.float32 if rounded else dtype)
            # Arrays in C order, so that the tensor of the file is released.
            arrays = [np.asarray(part, order="C") for part in stored.split(tensor)]
            for leaf in stored.paths:
                array = arrays.pop(0)
                _place(params, leaf, Int8.of(array) if rounded else array, stored, on_host)
    # Each array of experts is released when its copy is made.
    for leaf in [] if on_host else list(params):
        params[leaf] = jax.tree.map(jnp.asarray, params[leaf])
    return unflatten_dict(params)


def _place(params: dict, leaf: tuple, array: Any, stored: Stored, on_host: bool) -> None:
    """Adds a part of a tensor to ``params``; an expert's is a row of its leaf."""
    if stored.expert is None:
        params[leaf] = array if on_host else jax.tree.map(jnp.asarray, array)
        return
    if leaf not in params:
        params[leaf] = np.empty((stored.experts, *array.shape), array.dtype)
    params[leaf][stored.expert] = array


def _open_all(
    path: Path, config: TransformerConfig, layout: Collection[str], stack: contextlib.ExitStack
) -> dict[str, tuple[Any, str]]:
    """Name in the layout -> the open file and the name in it; without what is not read."""
    family, opened = family_of(config), {}
    # Checkpoints exist with and without this prefix.
    prefix = family.names["layers"].partition(".")[0] + "."
    for name, (weights, stored) in _stored(path, stack).items():
        own = _usual_name(family, name)
        tied_head = config.tie_embeddings and own == f"{family.names['head']}.weight"
        if _BUFFERS.search(own) or tied_head or own.startswith(family.ignored):
            continue
        opened[prefix + own if prefix + own in layout else own] = (weights, stored)
    modules = prediction_modules(opened)
    return {name: each for name, each in opened.items() if not name.startswith(modules)}


def _stored(path: Path, stack: contextlib.ExitStack) -> dict[str, tuple[Any, str]]:
    """Name -> the open file and the name in it; quantised matrices with their values."""
    opened = {}
    for file in weight_files(path):
        weights = open_weights(file, stack)
        opened |= {name: (weights, name) for name in weights.keys()}  # noqa: SIM118  (not a dict)
    if gguf_file.is_gguf(path):
        return opened
    how = compressed_tensors.scheme(read_json(path / "config.json"))
    return opened if how is None else compressed_tensors.joined(path, opened, how)


def prediction_modules(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of multi-token prediction modules begin with, in a file with these names.

    Such modules are in the files of a model and are no part of it: they draft.
    """
    found = {match[1] for name in names if (match := _PREDICTION.match(name))}
    return tuple(sorted(found, key=lambda front: [int(x) for x in re.findall(r"\d+", front)]))


def _usual_name(family: Family, name: str) -> str:
    """The name under which the family stores a tensor that a file has under ``name``."""
    other = next((other for other in family.renamed if name.startswith(other)), "")
    return family.renamed.get(other, "") + name.removeprefix(other)


def write_params(
    path: Path | None, config: TransformerConfig, params: dict, max_shard_bytes: int
) -> None:
    """Writes model.safetensors, or shards of at most ``max_shard_bytes`` and an index.

    The host holds one tensor at a time. A tensor that is larger than a shard gets its own. ``path``
    None: writes nothing, and takes part in gathering parameters that are divided among processes.
    Raises OSError.
    """
    leaves: Any = flatten_dict(params)
    layout, weight_map = tensors_of(config), {}
    sizes = {
        name: sum(leaves[leaf].nbytes for leaf in stored.paths) // stored.experts
        for name, stored in layout.items()
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


def _to_write(stored: Stored, leaves: Mapping[tuple, Any]) -> Tensor:
    """The tensor as the file has it, gathered when it is read."""

    def read() -> np.ndarray:
        own = (leaves[leaf] for leaf in stored.paths)
        parts = own if stored.expert is None else (leaf[stored.expert] for leaf in own)
        return stored.join([tensor_files.gather(part) for part in parts])

    return Tensor(stored.shape, np.dtype(leaves[stored.paths[0]].dtype), read)


def _check_names(path: Path, layout: Collection[str], names: Collection[str]) -> None:
    if missing := [name for name in layout if name not in names]:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; {_MISMATCH}"
        )
    if extra := [name for name in names if name not in layout]:
        raise UserError(f"{path} has {len(extra)} tensors too many, first {extra[0]}; {_MISMATCH}")


def _check_tensor(
    path: Path, name: str, stored: tuple[list[int], str], expected: tuple[int, ...]
) -> None:
    """``stored``: the shape and the dtype of an open file's tensor, which cost no reading."""
    shape, dtype = stored
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


# The order of the parts of a fused tensor.
_ORDER = ("q", "k", "v", "z", "gate", "up", "x", "b", "a", "c", "dt")
_ORDER += tuple(f"{part}_conv" for part in _ORDER)
_RANK = {part: rank for rank, part in enumerate(_ORDER)}
# The ends of names; that of other parameters is "weight".
_ENDS = {"bias": "bias", "a_log": "A_log", "dt_bias": "dt_bias", "d": "D"}


class Stored(NamedTuple):
    """A tensor of a checkpoint; ``paths`` are our leaves, its parts along the last axis."""

    paths: list[tuple]
    widths: list[int]  # of the parts
    shape: tuple[int, ...]  # in the file, after the transposition
    transposed: bool
    heads: int = 0  # of a tensor that has the parts of each head together; 0: it has whole parts
    expert: int | None = None  # the tensor is this one of the ``experts`` of the leaf
    experts: int = 1

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """The parts of the tensor of the file."""
        # Of a convolution of single channels, the middle axis has length 1.
        tensor = tensor[:, 0] if len(self.shape) == 3 else tensor
        tensor = tensor.T if self.transposed else tensor
        if len(self.paths) == 1:
            return [tensor]
        cuts = np.cumsum(self.widths)[:-1]
        if not self.heads:
            return np.split(tensor, cuts, axis=-1)
        lead = tensor.shape[:-1]
        by_head = np.split(tensor.reshape(*lead, self.heads, -1), cuts // self.heads, axis=-1)
        return [part.reshape(*lead, -1) for part in by_head]

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor of the file; the inverse of ``split``."""
        if len(parts) == 1:
            whole = parts[0]
        elif not self.heads:
            whole = np.concatenate(parts, axis=-1)
        else:
            lead = parts[0].shape[:-1]
            by_head = [part.reshape(*lead, self.heads, -1) for part in parts]
            whole = np.concatenate(by_head, axis=-1).reshape(*lead, -1)
        whole = whole.T if self.transposed else whole
        return whole[:, None] if len(self.shape) == 3 else whole


def family_of(config: TransformerConfig) -> Family:
    """How checkpoints of the model are read and written."""
    return t5_config.FAMILY if isinstance(config, T5Config) else FAMILIES[config.family]


def tensors_of(config: TransformerConfig) -> dict[str, Stored]:
    """Name in the checkpoint -> tensor, for every parameter of the model."""
    family, layout = family_of(config), {}
    leaves: Any = flatten_dict(lm.abstract_params(config))
    grouped: dict[str, list[tuple]] = {}
    for path in sorted(leaves, key=lambda path: _RANK.get(path[-2], -1)):
        if len(leaves[path].shape) == 3:
            layout |= _experts(family, path, leaves[path].shape)
        else:
            t5 = isinstance(config, T5Config)
            name = t5_config.name_of(path, config.gated) if t5 else _name(family, path, config)
            grouped.setdefault(name, []).append(path)
    for name, paths in grouped.items():
        first, leaf = paths[0][0], paths[0][-1]
        transposed = leaf == "kernel" and (family.transposed or first == "head")
        widths = [leaves[path].shape[-1] for path in paths]
        shape = (*leaves[paths[0]].shape[:-1], sum(widths))
        heads = _heads_of(family, name, config) if len(paths) > 1 else 0
        shape = shape[::-1] if transposed else shape
        if leaf == "kernel" and str(paths[0][-2]).endswith("_conv"):
            shape = (shape[0], 1, shape[1])
        layout[name] = Stored(paths, widths, shape, transposed, heads)
    return layout


def _heads_of(family: Family, name: str, config: TransformerConfig) -> int:
    """The heads whose parts are next to each other in a fused tensor; 0: it has whole parts."""
    field = next((own for part, own in family.by_head.items() if f".{part}." in name), None)
    sizes = config.recurrent if hasattr(config.recurrent, field or "") else config
    return 0 if field is None else getattr(sizes, field)


def _name(family: Family, path: tuple, config: TransformerConfig) -> str:
    """The name of the tensor that has the parameter at this path."""
    first, *inner, leaf = path
    module = family.names[".".join(map(str, inner[1:])) if inner else first]
    prefix = ""
    if inner:
        number = int(inner[0])
        if family.apart:
            earlier = sum(layer < number for layer in config.without_mlp)
            number = 2 * number - earlier + str(inner[1]).startswith("mlp")
        prefix = f"{family.names['layers']}.{number}."
    return f"{prefix}{module}.{_ENDS.get(leaf, 'weight')}"


def _experts(family: Family, path: tuple, shape: tuple[int, ...]) -> dict[str, Stored]:
    """The tensors of the experts whose kernels are the leaf ("layers", i, "mlp", "gate")."""
    _, layer, *_, leaf = path
    module = family.names[f"mlp.{leaf}"].removeprefix("mlp.")
    experts, inner, outer = shape
    prefix = f"{family.names['layers']}.{layer}.{family.names['experts']}"
    each = Stored([path], [outer], (outer, inner), True, experts=experts)
    return {f"{prefix}.{i}.{module}.weight": each._replace(expert=i) for i in range(experts)}
