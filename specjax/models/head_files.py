"""Directories of draft heads, released or trained here: config.json and the tensors.

No code from a file is ever run. Released configs are often wrong (Medusa's state two heads and have
five): every number that follows from the tensors is taken from them. ``head_layouts`` has the names
of the tensors, ``head_tensors`` reads them, ``eagle_files`` adds what only the files of EAGLE have.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from safetensors import SafetensorError

from specjax import files
from specjax.errors import UserError
from specjax.models import (
    block_files,
    eagle_dialects,
    eagle_files,
    eagle_layouts,
    head_tensors,
    hf,
    mtp_files,
    tensor_files,
    trunk_layouts,
)
from specjax.models import head_layouts as layouts
from specjax.models.head_places import Layout
from specjax.models.head_tensors import ARCHITECTURE, FILES, KIND_OF_TYPE, MODEL_TYPE
from specjax.models.tensor_files import Tensor

KINDS = tuple(FILES)
_EAGLE, _MTP, _BLOCK = ("eagle", "eagle3"), mtp_files.KIND, block_files.KIND


class Head(NamedTuple):
    """A directory of heads in memory."""

    params: dict
    config: dict  # config.json, corrected by the tensors
    directory: str


def read(directory: str | os.PathLike, kind: str, *, dtype: Any = None) -> Head:
    """Reads heads of one of ``KINDS``: of a directory, a name of the Hub or a run's workdir.

    ``dtype`` None as in ``hf.load``. With K heads of L blocks, D the hidden width, V the vocabulary
    size, I the inner width, n stages, ``params`` is

        medusa: {block: {kernel [K,L,D,D], bias [K,L,D]}, head: {kernel [K,D,V]}}
        hydra: {mlp: {"0", "1", ...: {
                    in, skip: {kernel [(i+2)D,D], bias [D]},
                    blocks: {"0", "1", ...: {kernel [D,D], bias [D]}}}},
                head: {"0", "1", ...: {kernel [D,V], bias [V]}},
                prefix: a layer of ``models.transformer`` and its norm}
        mlp_speculator: {emb [n,V,I], proj_in [D,I], proj {"0", "1", ...: [I,I]},
                head {"0", "1", ...: [I,V]}, ln: {scale [n,I], bias [n,I]}}; shared stages have the
                leading axis 1, and "0" only
        bpd: {up: {kernel [K-1,D,I], bias [K-1,I]}, down: {kernel [K-1,J,D], bias [K-1,D]}},
                J = I, or (K-1)I with a joint layer
        redrafter: {rnn: {w: {kernel [D,D]}, u: {kernel [D,D], bias [D]}},
                input_proj: {kernel [2D,F], bias [F]},
                block: {"0", "1", ...: {kernel [F,F], bias [F]}}, head: {kernel [F,V]}};
                without rnn the state is a running sum, without input_proj F is 2D
        early_exit: some of attention_norm: {scale [D]}, attention: {q, k, v, o: {kernel}},
                linear: {kernel [D,D]}, norm: {scale [D]}, head: {kernel [D,V]}
        pass: {look_ahead [L,D]}, L embeddings
        mtp: {layers: {"0", "1", ...: a layer of ``models.transformer``}}
        block_head, eagle, eagle3, falcon, mtp_module, spec_drafter: as in ``docs/head_files.md``

    Empty leaves are left out. Medusa's ``head`` is left out if the file has none (the old "version
    2") or its config has vLLM's ``original_lm_head``: the target's LM head is used instead. Copies
    of one module stay separate; ``config["tied"]`` is then true. ``config`` always has
    ``hidden_size`` and ``vocab_size`` (None: unknown); ``docs/head_files.md`` has further keys.

    Raises UserError: a directory without such heads; missing, unexpected or empty tensors, by name;
    sizes that differ.
    """
    _check_kind(kind)
    with _one_line(Path(directory), "read"):
        return _read(hf.resolve(directory, names=FILES[kind]), kind, dtype)


def _read(path: Path, kind: str, dtype: Any) -> Head:
    config = hf.read_json(path / "config.json") if (path / "config.json").is_file() else {}
    _check_kind_of_files(path, kind, config)
    dtype = hf.parameter_dtype(dtype)
    maps: dict[str, np.ndarray] = {}
    with contextlib.ExitStack() as stack:
        tensors = head_tensors.open_file(path, kind, stack)
        if kind in eagle_layouts.KINDS:
            tensors, maps = eagle_files.split_maps(path, kind, tensors)
        elif kind == _BLOCK:
            tensors, maps = block_files.split_maps(tensors)
        tensors = head_tensors.of_heads(path, kind, tensors, config)
        layout = layouts.of_names(kind, list(tensors))
        head_tensors.check_names(path, kind, tensors, layout)
        tied = head_tensors.all_copies_equal(kind, layout, tensors)
        if kind == "mlp_speculator" and head_tensors.flag(path, config, "tie_weights") and tied:
            stages = sum(place.path == ("emb",) for place in layout.values())
            config, layout = config | {"n_predict": stages}, layouts.mlp_speculator(1, 1)
        leaves, sizes = head_tensors.stack_leaves(path, layout, tensors, dtype)
        leaves = trunk_layouts.after_reading(kind, path, tensors, config, leaves)
    if kind in _EAGLE:
        eagle_files.add_output_biases(leaves)
        config = eagle_files.config_of_files(path, kind, config, leaves, maps)
    elif kind == _BLOCK:
        config = block_files.config_of_files(path, config, leaves, maps)
        config |= {"hidden_size": sizes["D"], "model_type": kind}
    elif kind == _MTP:
        leaves, config = mtp_files.of_files(path, list(tensors), config, leaves)
    else:
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
    layout: str = "",
) -> None:
    """Writes heads for ``read``, all at once, with the released names; ``params`` keep their dtype.

    Divided parameters are gathered one at a time. Of several processes all must call it.

    Args:
        directory: a new directory, or one of heads, which is replaced.
        kind: one of ``KINDS``.
        params: as ``read`` returns them.
        config: keys of config.json: ``base_model_name_or_path``; for mlp_speculator ``scale_input``
            and others, for draft networks what no tensor shows, as ``read`` returns it. Numbers
            that follow from the parameters are taken from them.
        tokenizer_fingerprint: ``LM.vocabulary``, stored as "vocabulary".
        extra: further keys of config.json.
        layout: one of ``head_layouts.LAYOUTS`` of the kind; "" is the first.

    Raises:
        UserError: the parameters are not of this kind, the directory holds anything but heads, or
            the operating system reports an error; the directory then stays unchanged.
    """
    layout = _check_layout(kind, layout)
    leaves = trunk_layouts.before_writing(kind, layout, head_tensors.arrays(params), config)
    leaves = mtp_files.before_writing(layout, leaves, config) if kind == _MTP else leaves
    table = layouts.of_leaves(kind, leaves, layout)
    tensors = head_tensors.to_write(table, leaves)
    raw = config | (extra or {})
    raw |= {"vocabulary": tokenizer_fingerprint} if tokenizer_fingerprint else {}
    made = _facts_to_write(kind, layout, table, leaves, tensors, config)
    kept = str(next(iter(tensors.values())).dtype)
    if kind in _EAGLE:
        raw, maps = eagle_files.to_write(kind, layout, leaves, raw)
        tensors |= {name: tensor_files.tensor(value) for name, value in maps.items()}
    elif kind == _BLOCK:
        raw, maps = block_files.to_write(layout, leaves, raw)
        tensors |= {name: tensor_files.tensor(value) for name, value in maps.items()}
    elif kind == _MTP:
        raw, tensors = mtp_files.to_write(layout, tensors, leaves, raw)
    raw |= made | {"torch_dtype": kept}
    raw |= {"architectures": ARCHITECTURE[kind]} if kind in ARCHITECTURE else {}
    path = Path(directory).expanduser().resolve()
    with _one_line(path, "written"):
        _check_replaceable(path)
        if jax.process_index() > 0:
            tensor_files.write(None, tensors)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as fresh:
            fresh.mkdir()
            files.write_json(fresh / "config.json", raw)
            tensor_files.write(fresh / FILES[kind][0], tensors)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(f"there are no heads of kind {kind!r}; there are {', '.join(KINDS)}")


def _check_layout(kind: str, layout: str) -> str:
    """The layout, or the kind's default. Raises UserError."""
    _check_kind(kind)
    names = layouts.LAYOUTS.get(kind, ())
    if layout and layout not in names:
        solution = f"there is {', '.join(names)}" if names else "leave it out"
        raise UserError(f"{kind} heads have no layout {layout!r}; {solution}")
    return layout or next(iter(names), "")


def _check_kind_of_files(path: Path, kind: str, config: dict) -> None:
    """Raises UserError for other heads."""
    own = config.get(eagle_dialects.OWN)
    # vLLM writes the model_type eagle for EAGLE-3 too.
    other = KIND_OF_TYPE.get(str(config.get("model_type")))
    if isinstance(own, dict) and own.get("kind") in KINDS:
        other = own["kind"]
    elif kind in _EAGLE and other in _EAGLE:
        other = kind
    if other not in (None, kind):
        raise UserError(f"{path} has {other} heads; give a directory of {kind} heads")


def _check_replaceable(path: Path) -> None:
    """Raises UserError for a file, and for a directory of something else than heads."""
    file, config = path / "config.json", {}
    if file.is_file():
        config = hf.read_json(file)
    ours = eagle_dialects.OWN in config or str(config.get("model_type")) in KIND_OF_TYPE
    if path.is_file() or (any(path.glob("*")) and not ours):
        raise UserError(f"{path} exists and is no directory of heads; name a new one to save heads")


@contextlib.contextmanager
def _one_line(path: Path, action: str) -> Iterator[None]:
    """Turns OSErrors, and the SafetensorError of a full disk, into a UserError of one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be {action} ({getattr(error, 'strerror', None) or error})"
        ) from None


def _facts_to_write(
    kind: str,
    name: str,
    layout: Layout,
    leaves: dict[tuple, Any],
    tensors: Mapping[str, Tensor],
    config: dict,
) -> dict:
    """``_facts`` of parameters in memory, after a check of their sizes."""
    sizes: dict[str, int] = {}
    for tensor, place in layout.items():
        head_tensors.bind_sizes("the parameters", sizes, tensor, place, tensors[tensor])
    if kind in (*_EAGLE, _MTP) or (kind == _BLOCK and name != "dflash"):
        return {}
    readers: head_tensors.Tensors = {name: tensor.read for name, tensor in tensors.items()}
    tied = head_tensors.all_copies_equal(kind, layout, readers)
    return _facts("the parameters", kind, leaves, sizes, tied, config)


def _facts(
    where: object,
    kind: str,
    leaves: dict[tuple, np.ndarray],
    sizes: dict[str, int],
    tied: bool,
    config: dict,
) -> dict:
    """What follows from the tensors, under the keys of released configs."""
    facts: dict[str, Any] = {
        "model_type": MODEL_TYPE.get(kind, kind),
        "hidden_size": sizes["D"],
        "vocab_size": sizes.get("V"),
    }
    if kind == "medusa":
        heads, layers = leaves["block", "kernel"].shape[:2]
        return facts | {"medusa_num_heads": heads, "medusa_num_layers": layers, "tied": tied}
    if kind == "hydra":
        heads, layers, prefix = layouts.hydra_sizes(leaves)
        return facts | {
            "hydra_num_heads": heads,
            "hydra_num_layers": layers,
            "grounded_heads": True,
            "tied": tied,
            "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        }
    if kind == "redrafter":
        return facts | eagle_files.redrafter_facts(where, leaves, sizes, config)
    if kind == "bpd":
        return facts | {"bpd_num_heads": len(leaves["up", "kernel"]), "inner_dim": sizes["I"]}
    if kind in ("early_exit", "pass", "mtp", "falcon", "spec_drafter", _BLOCK):
        return facts
    stages = len(leaves["emb",])
    shared = stages == 1 and ("proj", "0") in leaves
    if shared:
        stages = config.get("n_predict")
        if type(stages) is not int or stages < 2:
            raise UserError(
                f"{where}: n_predict is {stages!r}; config.json must give the number of tied stages"
            )
    return facts | {
        "emb_dim": sizes["D"],
        "inner_dim": sizes["I"],
        "n_predict": stages,
        "tie_weights": shared,
        "scale_input": head_tensors.flag(where, config, "scale_input"),
    }
