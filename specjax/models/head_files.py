"""Directories of draft heads, released or trained here: config.json and the tensors. No file is ever asked to run anything.

Released configs are often wrong (Medusa's say two heads and have five): every number that tensors can tell is taken from them.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.errors import UserError
from specjax.models import head_layouts as layouts
from specjax.models import hf, torch_pickle
from specjax.models.head_layouts import Layout, Place

_FILES = {  # in the order of preference; the first is the one that is written. The model's own file may have shards.
    "medusa": ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "model.safetensors"),
    "hydra": ("hydra_lm_head.safetensors", "hydra_lm_head.pt"),
    "mlp_speculator": ("model.safetensors",),
    "bpd": ("bpd_heads.safetensors",),
}
KINDS = tuple(_FILES)
# Leaves of which a file may hold copies of one module: blocks of a head, or the stages of a tied speculator.
_REPEATED = {
    "medusa": ("block",),
    "hydra": ("blocks",),
    "mlp_speculator": ("emb", "head", "ln", "proj"),
    "bpd": (),
}
_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
_ARCHITECTURE = {
    "mlp_speculator": ["MLPSpeculatorPreTrainedModel"]
}  # by which others choose the class to load

_Fetch = dict[str, Callable[[], np.ndarray]]  # name in the file -> its tensor, read when asked for


class Head(NamedTuple):
    """A directory of heads in memory."""

    params: dict
    config: dict  # config.json, corrected by the tensors
    directory: str


def read(directory: str | os.PathLike, kind: str, *, dtype: Any = None) -> Head:
    """Reads heads of one of ``KINDS``, from a directory or a trained run's workdir; ``dtype`` None as in ``hf.load``.

    With K heads of L blocks, D the hidden width, V the vocabulary, I the inner width, n stages, ``params`` is

        medusa: {block: {kernel [K,L,D,D], bias [K,L,D]}, head: {kernel [K,D,V]}}
        hydra: {mlp: {"0", "1", ...: {in, skip: {kernel [(i+2)D,D], bias [D]}, blocks: {kernel [L-1,D,D], bias [L-1,D]}}},
            head: {kernel [K,D,V], bias [K,V]}, prefix: a layer of ``models.transformer`` and its norm}
        mlp_speculator: {emb [n,V,I], proj_in [D,I], proj [n-1,I,I], head [n,I,V], ln: {scale [n,I], bias [n,I]}}; what its
            stages share has the leading axis 1
        bpd: {up: {kernel [K-1,D,I], bias [K-1,I]}, down: {kernel [K-1,I,D], bias [K-1,D]}}

    Leaves that would be empty are left out, and so is ``head`` where Medusa's old files ("version 2") have none, or vLLM's say
    ``original_lm_head``: it is then the target's. Blocks that are copies of one module stay separate; ``config["tied"]`` says
    that they were. ``config`` always has ``hidden_size`` and ``vocab_size`` (None where nothing depends on it). Raises
    UserError for a directory without such heads, for tensors too many, too few or empty, by name, and for sizes that differ.
    """
    if kind not in KINDS:
        raise UserError(f"there are no heads of kind {kind!r}; there are {', '.join(KINDS)}")
    with _system(Path(directory), "read"):
        return _read(hf.resolve(directory), kind, dtype)


def _read(path: Path, kind: str, dtype: Any) -> Head:
    config = hf._read_json(path / "config.json") if (path / "config.json").is_file() else {}
    if config.get("model_type") in KINDS and config["model_type"] != kind:
        raise UserError(
            f"{path} has {config['model_type']} heads; give a directory of {kind} heads"
        )
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    with contextlib.ExitStack() as stack:
        fetch = _trim(path, kind, _open(path, kind, stack), config)
        layout = layouts.of_names(kind, list(fetch))
        _check_names(path, kind, list(fetch), layout)
        tied = _identical(kind, layout, fetch)
        if kind == "mlp_speculator" and _flag(path, config, "tie_weights") and tied:
            stages = sum(place.path == ("emb",) for place in layout.values())
            config, layout = config | {"n_predict": stages}, layouts.mlp_speculator(1, 1)
        leaves, sizes = _gather(path, layout, fetch, jnp.dtype(dtype))
    config = config | _facts(path, kind, leaves, sizes, tied, config)
    params = unflatten_dict({leaf: jnp.asarray(value) for leaf, value in leaves.items()})
    return Head(params, config, str(path))


def write(
    directory: str | os.PathLike,
    kind: str,
    params: dict,
    config: dict,
    tokenizer_fingerprint: str | None = None,
    extra: dict | None = None,
) -> None:
    """Writes what ``read`` reads, all at once, under the names of the released files; ``params`` keep their dtype.

    ``config`` are keys of config.json (``base_model_name_or_path``; for mlp_speculator ``scale_input``, ``n_candidates``,
    ``top_k_tokens_per_head``, and ``n_predict`` if tied); numbers that the parameters tell are taken from them. ``extra`` goes
    beside them. Raises UserError if the parameters are none of this kind, the directory holds anything but heads, or the system
    refuses; then what was there is there.
    """
    if kind not in KINDS:
        raise UserError(f"there are no heads of kind {kind!r}; there are {', '.join(KINDS)}")
    leaves = {leaf: np.asarray(value) for leaf, value in flatten_dict(params).items()}
    leaves = {leaf: value for leaf, value in leaves.items() if value.size}
    layout = layouts.of_leaves(kind, leaves)
    tensors = {name: leaves[place.path][place.at] for name, place in layout.items()}
    # safetensors writes the bytes as they lie: it would store a transposed view untransposed.
    tensors = {
        name: np.ascontiguousarray(x.T if layout[name].transposed else x)
        for name, x in tensors.items()
    }
    fetch: _Fetch = {
        name: functools.partial(np.asarray, tensor) for name, tensor in tensors.items()
    }
    sizes = {}
    for name, place in layout.items():
        _bind("the parameters", sizes, name, place, tensors[name])
    raw = (
        config
        | (extra or {})
        | ({"vocabulary": tokenizer_fingerprint} if tokenizer_fingerprint else {})
    )
    raw |= _facts("the parameters", kind, leaves, sizes, _identical(kind, layout, fetch), config)
    raw |= {"torch_dtype": str(next(iter(tensors.values())).dtype)}
    raw |= {"architectures": _ARCHITECTURE[kind]} if kind in _ARCHITECTURE else {}
    path = Path(directory).expanduser().resolve()
    with _system(path, "written"):
        # A slip of the pen must not replace somebody's model.
        ours = (path / "config.json").is_file() and hf._read_json(path / "config.json").get(
            "model_type"
        ) in KINDS
        if path.is_file() or (any(path.glob("*")) and not ours):
            raise UserError(
                f"{path} exists and is no directory of heads; name a new one to save heads"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
            fresh, old = Path(beside) / "new", Path(beside) / "old"
            fresh.mkdir()
            hf._write_json(fresh / "config.json", raw)
            save_file(tensors, fresh / _FILES[kind][0], metadata={"format": "pt"})
            if path.exists():
                path.rename(old)
            try:
                fresh.rename(path)
            except BaseException:
                if old.exists():
                    old.rename(path)
                raise


@contextlib.contextmanager
def _system(path: Path, what: str) -> Iterator[None]:
    """A refusal of the system, in one line; safetensors has an error of its own for a full disk."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be {what} ({getattr(error, 'strerror', None) or error})"
        ) from None


def _open(path: Path, kind: str, stack: contextlib.ExitStack) -> _Fetch:
    """The tensors of the first file there is."""
    for name in _FILES[kind]:
        if name == "model.safetensors" and any(
            (path / f"{name}{end}").is_file() for end in ("", ".index.json")
        ):
            files = list(hf._weight_files(path))
        elif (path / name).is_file():
            files = [path / name]
        else:
            continue
        if name.endswith(".pt"):
            return {
                key: functools.partial(np.asarray, x)
                for key, x in torch_pickle.load(files[0]).items()
            }
        found: _Fetch = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(str(file), framework="np"))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{file} is damaged or incomplete ({error}); copy it again"
                ) from None
            found |= {key: functools.partial(opened.get_tensor, key) for key in opened.keys()}  # noqa: SIM118
        return found
    raise UserError(f"{path} has no {kind} heads; such a directory has {' or '.join(_FILES[kind])}")


def _trim(path: Path, kind: str, fetch: _Fetch, config: dict) -> _Fetch:
    """What belongs to the heads, without the prefixes that only some files have."""
    if kind == "medusa":
        merged = any(name.startswith("medusa_head.") for name in fetch)
        backbone = ("model.", "lm_head.") if merged else ()
        fetch = {
            re.sub(r"^medusa_heads?\.", "", name): x
            for name, x in fetch.items()
            if not name.startswith(backbone)
        }
        if _flag(path, config, "original_lm_head"):
            fetch = {name: x for name, x in fetch.items() if not re.match(r"lm_heads?\.", name)}
        if "token_map" in fetch and "lm_heads.0.weight" in fetch:
            known = fetch.pop("token_map")().shape[0]
            # Whole heads beside a map are whole heads: the map only says which rows others keep in memory.
            if fetch["lm_heads.0.weight"]().shape[0] <= known:
                raise UserError(
                    f"{path} has heads for the {known} tokens of its token_map; give heads for all tokens"
                )
    elif (
        kind == "hydra"
    ):  # the prefix is a whole Llama model of one layer there, whose embedding nobody uses
        unused = re.compile(
            re.escape(layouts.PREFIX) + r"(embed_tokens\.weight|.*rotary_emb\.inv_freq)$"
        )
        fetch = {name: x for name, x in fetch.items() if not unused.match(name)}
    elif kind == "mlp_speculator" and not any(name.startswith("speculator.") for name in fetch):
        fetch = {f"speculator.{name}": x for name, x in fetch.items()}
    return fetch


def _check_names(path: Path, kind: str, names: list[str], layout: Layout) -> None:
    found = set(names)
    missing, extra = (
        [name for name in layout if name not in found],
        [name for name in names if name not in layout],
    )
    if len(missing) == len(layout):
        first = f"; its first tensor is {names[0]}" if names else ""
        raise UserError(f"{path} has no {kind} heads{first}; give a directory of {kind} heads")
    if kind == "hydra" and not any(".res_connection." in name for name in names):
        raise UserError(
            f"{path} has Hydra heads that read no tokens (not grounded); give grounded ones"
        )
    if missing:
        raise UserError(
            f"{path} lacks {len(missing)} of {len(layout)} tensors, first {missing[0]}; copy it again"
        )
    if extra:
        raise UserError(
            f"{path} has {len(extra)} tensors that are not of {kind} heads, first {extra[0]}; remove them"
        )


def _identical(kind: str, layout: Layout, fetch: _Fetch) -> bool:
    """Whether everything that may be copies of one module is, to the last bit."""
    groups = collections.defaultdict(list)
    for name, place in layout.items():
        if place.at and set(place.path) & set(_REPEATED[kind]):
            groups[place.path, place.at[:-1]].append(name)
    repeated = [names for names in groups.values() if len(names) > 1]

    def alike(a: np.ndarray, b: np.ndarray) -> bool:  # in bits: NaN is NaN, and 0 is not -0
        first, second = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
        return a.dtype == b.dtype and np.array_equal(first, second)

    return bool(repeated) and all(
        alike(fetch[first](), fetch[x]()) for first, *rest in repeated for x in rest
    )


def _bind(
    where: object, sizes: dict[str, int], name: str, place: Place, tensor: np.ndarray
) -> None:
    """Learns from a tensor, as files have it, what its letters stand for. Raises UserError if others told otherwise."""
    if not tensor.size:
        raise UserError(
            f"{where}: {name} is empty ({list(tensor.shape)}); leave it out, or copy it again"
        )
    if tensor.dtype not in _FLOATS:
        raise UserError(
            f"{where}: {name} is stored as {tensor.dtype}; supported: 16, 32 and 64 bit floats"
        )
    order = -1 if place.transposed else 1
    dims = [(int(dim[:-1] or 1), dim[-1]) for dim in place.dims.split()]
    for (factor, letter), size in zip(dims, tensor.shape[::order], strict=False):
        if factor == 1:
            sizes.setdefault(letter, size)
    expected = tuple(factor * sizes.get(letter, 0) for factor, letter in dims)[::order]
    if tensor.shape != expected:
        told = "heads of one file must agree in their sizes"
        raise UserError(
            f"{where}: {name} is {list(tensor.shape)}, expected {list(expected)}; {told}"
        )


def _gather(
    path: Path, layout: Layout, fetch: _Fetch, dtype: np.dtype
) -> tuple[dict[tuple, np.ndarray], dict[str, int]]:
    """Tensor by tensor, so that a file is never in memory as a whole; gives the leaves and the sizes by letter."""
    leaves, sizes, leading = {}, {}, layouts.leading(layout)
    for name, place in layout.items():
        try:
            tensor = fetch[name]()
        except (SafetensorError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: {name} cannot be read ({error}); convert it to float32"
            ) from None
        _bind(path, sizes, name, place, tensor)
        tensor = tensor.T if place.transposed else tensor
        leaf = leaves.setdefault(place.path, np.empty(leading[place.path] + tensor.shape, dtype))
        leaf[place.at] = tensor
    if ("block", "kernel") in leaves:  # vLLM's Medusa heads may do without
        kernel = leaves["block", "kernel"]
        leaves.setdefault(("block", "bias"), np.zeros(kernel.shape[:-1], dtype))
    return leaves, sizes


def _flag(where: object, config: dict, name: str) -> bool:
    """A switch of config.json, off if it is not there. Raises UserError unless it is true or false ("false" is neither)."""
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {name} is {value!r}; it must be true or false")
    return value


def _facts(
    where: object,
    kind: str,
    leaves: dict[tuple, np.ndarray],
    sizes: dict[str, int],
    tied: bool,
    config: dict,
) -> dict:
    """What the tensors say about themselves, in the keys of released configs."""
    facts: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": sizes["D"],
        "vocab_size": sizes.get("V"),
    }
    if kind == "medusa":
        heads, layers = leaves["block", "kernel"].shape[:2]
        return facts | {"medusa_num_heads": heads, "medusa_num_layers": layers, "tied": tied}
    if kind == "hydra":
        heads, layers, prefix = layouts.hydra_sizes(leaves)
        facts |= {
            "hydra_num_heads": heads,
            "hydra_num_layers": layers,
            "grounded_heads": True,
            "tied": tied,
        }
        return facts | {"hydra_head_arch": "prefix-mlp" if prefix else "mlp"}
    if kind == "bpd":
        return facts | {"bpd_num_heads": len(leaves["up", "kernel"]), "inner_dim": sizes["I"]}
    stages, shared = len(leaves["emb",]), len(leaves["emb",]) == len(leaves.get(("proj",), ())) == 1
    if shared:
        stages = config.get("n_predict")
        if type(stages) is not int or stages < 2:
            raise UserError(
                f"{where}: n_predict is {stages!r}; of tied stages config.json must say how many there are"
            )
    facts |= {
        "emb_dim": sizes["D"],
        "inner_dim": sizes["I"],
        "n_predict": stages,
        "tie_weights": shared,
    }
    return facts | {"scale_input": _flag(where, config, "scale_input")}
