"""The tensors of head files: opens the files, checks names and sizes, stacks the leaves."""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors import SafetensorError

from specjax.errors import UserError
from specjax.models import head_layouts as layouts
from specjax.models import head_places as places
from specjax.models import hf_weights, mtp_layouts, tensor_files, torch_pickle, trunk_layouts
from specjax.models.head_places import Layout, Place
from specjax.models.tensor_files import Tensor

# The files of each kind, in the order of preference; the first is the one that is written.
# model.safetensors may have shards.
FILES = {
    "medusa": ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"),
    "hydra": ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    "mlp_speculator": ("model.safetensors",),
    "bpd": ("bpd_heads.safetensors",),
    "eagle": ("model.safetensors", "pytorch_model.bin"),
    "eagle3": ("model.safetensors", "pytorch_model.bin"),
    "mtp_module": ("model.safetensors", "pytorch_model.bin"),
    "mtp": ("mtp_heads.safetensors", "consolidated.pth"),
    "redrafter": ("model.safetensors", "pytorch_model.bin"),
    "early_exit": ("early_exit.safetensors",),
    "pass": ("look_ahead.safetensors",),
    "block_head": ("model.safetensors",),
    "falcon": ("model.safetensors",),
    "spec_drafter": ("model.safetensors",),
}
# Kind -> model_type of config.json, where they differ: "falcon" is that of a language model.
MODEL_TYPE = {"redrafter": "recurrent_drafting_drafter", "falcon": "falcon_drafter"}
KIND_OF_TYPE = {kind: kind for kind in FILES if kind != "falcon"}
KIND_OF_TYPE |= {name: kind for kind, name in MODEL_TYPE.items()}
# Other libraries choose the class to load by this key of config.json.
ARCHITECTURE = {"mlp_speculator": ["MLPSpeculatorPreTrainedModel"], "redrafter": ["Drafter"]}
# Leaves that may hold copies of one module: blocks of a head, or the stages of a tied speculator.
_REPEATED = {
    "medusa": ("block",),
    "hydra": ("blocks",),
    "mlp_speculator": ("emb", "head", "ln", "proj"),
    "bpd": (),
    "eagle": (),
    "eagle3": (),
    "mtp_module": (),
    "mtp": (),
    "redrafter": (),
    "early_exit": (),
    "pass": (),
    "block_head": (),
    "falcon": (),
    "spec_drafter": (),
}
_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)

# Name in the file -> a function that reads the tensor.
Tensors = dict[str, Callable[[], np.ndarray]]


def open_file(path: Path, kind: str, stack: contextlib.ExitStack) -> Tensors:
    """The tensors of the first of ``FILES`` that exists; ``stack`` closes it. Raises UserError."""
    for name in FILES[kind]:
        if name == "model.safetensors" and any(
            (path / f"{name}{end}").is_file() for end in ("", ".index.json")
        ):
            sources = list(hf_weights.weight_files(path))
        elif (path / name).is_file():
            sources = [path / name]
        else:
            continue
        if name.endswith((".pt", ".pth", ".bin")):
            arrays = torch_pickle.load(sources[0])
            return {key: functools.partial(np.asarray, array) for key, array in arrays.items()}
        tensors: Tensors = {}
        for source in sources:
            opened = hf_weights.open_weights(source, stack)
            tensors |= {key: functools.partial(opened.get_tensor, key) for key in opened.keys()}  # noqa: SIM118
        return tensors
    raise UserError(f"{path} has no {kind} heads; such a directory has {' or '.join(FILES[kind])}")


def of_heads(path: Path, kind: str, tensors: Tensors, config: dict) -> Tensors:
    """The tensors of the heads alone, without prefixes that only some files have in their names.

    Raises UserError for heads of a part of the vocabulary, and for modules of another kind.
    """
    if kind == "medusa":
        return _of_medusa(path, tensors, config)
    if kind in mtp_layouts.LAYOUTS:
        return mtp_layouts.of_modules(path, tensors)
    if kind == trunk_layouts.KIND:
        return trunk_layouts.of_heads(tensors)
    if kind == "hydra":
        # The prefix is a whole Llama model of one layer; its embedding is not used.
        unused = re.compile(
            re.escape(layouts.PREFIX) + r"(embed_tokens\.weight|.*rotary_emb\.inv_freq)$"
        )
        return {name: read for name, read in tensors.items() if not unused.match(name)}
    if kind == "mlp_speculator" and not any(name.startswith("speculator.") for name in tensors):
        return {f"speculator.{name}": read for name, read in tensors.items()}
    return tensors


def _of_medusa(path: Path, tensors: Tensors, config: dict) -> Tensors:
    merged = any(name.startswith("medusa_head.") for name in tensors)
    backbone = ("model.", "lm_head.") if merged else ()
    tensors = {
        re.sub(r"^medusa_heads?\.", "", name): read
        for name, read in tensors.items()
        if not name.startswith(backbone)
    }
    if flag(path, config, "original_lm_head"):
        tensors = {
            name: read for name, read in tensors.items() if not re.match(r"lm_heads?\.", name)
        }
    if "token_map" in tensors and "lm_heads.0.weight" in tensors:
        mapped = tensors.pop("token_map")().shape[0]
        # Heads for all tokens may come with a map: then it only names the rows that vLLM keeps.
        if tensors["lm_heads.0.weight"]().shape[0] <= mapped:
            raise UserError(
                f"{path} has heads for the {mapped} tokens of its token_map; "
                "give heads for all tokens"
            )
    return tensors


def flag(where: object, config: dict, name: str) -> bool:
    """A boolean of config.json, False if missing. Raises UserError for any other value."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {name} is {value!r}; it must be true or false")
    return value


def check_names(path: Path, kind: str, names: Collection[str], layout: Layout) -> None:
    """Raises UserError unless the tensors are exactly those of ``layout``."""
    missing = [name for name in layout if name not in names]
    extra = [name for name in names if name not in layout]
    if len(missing) == len(layout):
        first = f"; its first tensor is {next(iter(names))}" if names else ""
        raise UserError(f"{path} has no {kind} heads{first}; give a directory of {kind} heads")
    if kind == "hydra" and not any(".res_connection." in name for name in names):
        raise UserError(
            f"{path} has Hydra heads that read no tokens (not grounded); give grounded ones"
        )
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; "
            "copy it again"
        )
    if extra:
        raise UserError(
            f"{path} has {len(extra)} tensors that are not of {kind} heads, first {extra[0]}; "
            "remove them"
        )


def all_copies_equal(kind: str, layout: Layout, tensors: Tensors) -> bool:
    """Whether there are tensors that may be copies of one module, and all of them are equal."""
    groups = collections.defaultdict(list)
    for name, place in layout.items():
        depth = next((i for i, part in enumerate(place.path) if part in _REPEATED[kind]), None)
        if depth is None:
            continue
        inside = place.path[depth + 1 :]
        if inside[:1] and inside[0].isdigit():  # one of the modules "0", "1", ...
            groups[place.path[: depth + 1], inside[1:]].append(name)
        elif place.at:
            groups[place.path, place.at[:-1]].append(name)
    repeated = [names for names in groups.values() if len(names) > 1]
    return bool(repeated) and all(
        _same_bits(tensors[first](), tensors[name]()) for first, *rest in repeated for name in rest
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares bits: NaN equals NaN, and 0 differs from -0."""
    first, second = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
    return a.dtype == b.dtype and np.array_equal(first, second)


def bind_sizes(
    where: object, sizes: dict[str, int], name: str, place: Place, tensor: Tensor | np.ndarray
) -> None:
    """Adds to ``sizes`` the size of each letter that the tensor, as it is in the file, defines.

    Raises UserError if an earlier tensor gave a letter another size, and for empty tensors and
    tensors that are not floats.
    """
    if not tensor.size:
        raise UserError(
            f"{where}: {name} is empty ({list(tensor.shape)}); leave it out, or copy it again"
        )
    if tensor.dtype not in _FLOATS:
        raise UserError(
            f"{where}: {name} is stored as {tensor.dtype}; supported: 16, 32 and 64 bit floats"
        )
    order = -1 if place.transposed else 1
    dims = places.factors(place.dims)
    for (factor, letter), size in zip(dims, tensor.shape[::order], strict=False):
        if factor == 1:
            sizes.setdefault(letter, size)
    for (factor, letter), size in zip(dims, tensor.shape[::order], strict=False):
        # Some letters have no tensor with the factor 1.
        if letter not in sizes and size % factor == 0:
            sizes[letter] = size // factor
    expected = tuple(factor * sizes.get(letter, 0) for factor, letter in dims)[::order]
    if tensor.shape != expected:
        raise UserError(
            f"{where}: {name} is {list(tensor.shape)}, expected {list(expected)}; "
            "heads of one file must agree in their sizes"
        )


def stack_leaves(
    path: Path, layout: Layout, tensors: Tensors, dtype: np.dtype
) -> tuple[dict[tuple, np.ndarray], dict[str, int]]:
    """(leaves, size of each letter).

    Reads one tensor at a time: a file is never in memory as a whole.
    Raises UserError for a tensor that cannot be read, and what ``bind_sizes`` raises.
    """
    leaves, sizes, stacked = {}, {}, places.stacked_shapes(layout)
    for name, place in layout.items():
        try:
            tensor = tensors[name]()
        except (SafetensorError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: {name} cannot be read ({error}); convert it to float32"
            ) from None
        bind_sizes(path, sizes, name, place, tensor)
        tensor = tensor.T if place.transposed else tensor
        leaf = leaves.setdefault(place.path, np.empty(stacked[place.path] + tensor.shape, dtype))
        leaf[place.at] = tensor
    # vLLM's Medusa heads may have no biases.
    if ("block", "kernel") in leaves:
        kernel = leaves["block", "kernel"]
        leaves.setdefault(("block", "bias"), np.zeros(kernel.shape[:-1], dtype))
    return leaves, sizes


def arrays(params: dict) -> dict[tuple, Any]:
    """The leaves that are not empty, where they are stored."""
    leaves: dict[tuple, Any] = {
        leaf: value if isinstance(value, jax.Array) else np.asarray(value)
        for leaf, value in flatten_dict(params).items()
    }
    return {leaf: value for leaf, value in leaves.items() if value.size}


def to_write(layout: Layout, leaves: Mapping[tuple, Any]) -> dict[str, Tensor]:
    """Name in the file -> tensor as the file stores it, gathered when it is read."""

    def one(place: Place) -> Tensor:
        leaf = leaves[place.path]

        def read() -> np.ndarray:
            part = tensor_files.gather(leaf[place.at] if place.at else leaf)
            return part.T if place.transposed else part

        shape = tuple(leaf.shape[len(place.at) :])
        return Tensor(shape[::-1] if place.transposed else shape, np.dtype(leaf.dtype), read)

    return {name: one(place) for name, place in layout.items()}
