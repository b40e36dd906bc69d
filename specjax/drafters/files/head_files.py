"""Directories of draft heads, released or trained here: config.json and the tensors.

No code from a file is ever run. Released configs are often wrong (Medusa's state two heads and have
five): every number that follows from the tensors is taken from them. What is a method's own is in
its ``Codec``. The tensors of drafters outside the package are named by their place in the tree;
config.json then has ``model_type`` = ``TREE``, the drafter's name and its ``Training.facts``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError

from specjax import files
from specjax.drafters.files import codec as codecs
from specjax.drafters.files.codec import OWN, Codec, Found, Layout, Place, Tensors, bind
from specjax.errors import UserError, on_disk
from specjax.models import hf, hf_weights, tensor_files, torch_pickle
from specjax.models.tensor_files import Tensor

TREE, TREE_FILE = "specjax_drafter", "model.safetensors"
_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)


class Head(NamedTuple):
    """A directory of heads in memory.

    Of a drafter outside the package ``params`` are the tree that was written. With K heads of L
    blocks, D the hidden width, V the vocabulary size, I the inner width, n stages or taps, E the
    target's width, W the draft vocabulary, d the width of an attention head, and kernels [in, out],
    ``params`` is

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
        eagle: fc {kernel [2D,D], bias [D]}, layers {"0", "1", ...}, embed {embedding [V,D]}
        eagle3: fc {kernel [nE,D]}, fc_norm {scale [n,E]} or input_norm {scale [nE]},
                layers {"0", "1", ...}, norm {scale [D]}, head {kernel [D,W]},
                embed {embedding [V,D]}, mask_hidden [1,1,nE]
        block_head: fc {kernel [nD,D]} or mix [layers,n], hidden_norm {scale [D]}, mask [D],
                layers {"0", "1", ...}, norm {scale [D]}; of the corrections
                markov {table [V,R], out {kernel}, gate or joint {kernel, bias}},
                gru {w [D,3G], u [G,3G]}, prefix {in, out: {kernel}}, confidence {kernel, bias};
                embed {embedding [V,D]} and head {kernel [D,W]} of its own
        falcon: lstm {"0", "1": {input, hidden: {kernel, bias [4D]}}}, layers {"0"}
        mtp_module: modules {"0", "1", ...: fc {kernel [2D,D]},
                token_norm, feature_norm, norm {scale [D]}, layers {"0": a layer with
                attention_norm}}, embed {embedding [V,D]}, head {kernel [D,V]}
        spec_drafter: embed {embedding [V,D]}, masks [K,D],
                source_bias and bias {table {embedding [R,N]}},
                source_layers and layers {"0", "1", ...: attention, cross {q, k, v, o: {kernel}},
                mlp, attention_norm, cross_norm, mlp_norm {scale [D]}}, source_norm,
                norm {scale [D]}, head {kernel [D,V]}
        a layer: attention {q, k, v, o: {kernel, bias}, q_norm, k_norm: {scale [d]}},
                mlp_norm {scale [D]}, mlp {gate, up, down: {kernel}};
                in mtp_module also attention {gate: {kernel}}, and with N experts
                mlp {router {kernel [D,N]}, gate, up [N,D,I], down [N,I,D],
                shared {gate, up, down: {kernel}}, shared_gate {kernel [D,1]}};
                from layer 1: attention_norm {scale [D]};
                in block_head with mix: context_k, context_v {kernel};
                layer 0 of eagle3: token_norm {scale [D]}, feature_norm {scale [D]}

    Biases of networks, ``q_norm`` and ``k_norm``, the norms before ``fc`` and the embedding are
    optional. Empty leaves are left out. Medusa's ``head`` is left out if the file has none (the old
    "version 2") or its config has vLLM's ``original_lm_head``: the target's LM head is used
    instead. Copies of one module stay separate; ``config["tied"]`` is then true.

    ``config`` has the keys of config.json, corrected by the tensors: ``hidden_size``,
    ``target_hidden_size`` and ``vocab_size`` (None: no tensor shows it), the sizes of the layers,
    and

    - eagle3: ``taps``, numbers of layers from 0, missing if the file names none; ``norm_output``,
      ``norm_before_residual``, in the meaning of vLLM; ``parallel``, tokens of one pass (8 if the
      file names no number), and ``mask_token_id``;
    - block_head: ``block_size``, ``target_layer_ids``, ``causal_head``, ``causal_sliding``,
      ``sample_from_anchor``, in the meaning of DFlash;
    - eagle3, block_head: ``draft_ids`` i32[W], ascending, missing if the head gives all tokens;
    - mtp_module: ``hidden_first``, ``hidden``, ``recycled``, ``zero_first``, the keys of the
      drafter; the last three are missing if no file states them; of layers with a gate and experts
      ``attn_output_gate``, ``partial_rotary_factor`` and the keys of Qwen3-Next's experts;
    - ``read_as``: of mtp_module the layout, of eagle3 the dialect and how ambiguous keys were read.
    """

    params: dict
    config: dict  # config.json, corrected by the tensors
    directory: str


def kinds() -> list[str]:
    """The methods whose heads are stored under names of their own."""
    return list(codecs.every())


def read(directory: str | os.PathLike, kind: str, *, dtype: Any = None) -> Head:
    """Reads the heads of a method: of a directory, a name of the Hub or a run's workdir.

    ``dtype`` None as in ``hf.load``.

    Raises UserError: a directory without such heads; missing, unexpected or empty tensors, by name;
    sizes that differ.
    """
    with on_disk(f"{directory} cannot be read", "look after the disk", SafetensorError):
        codec, dtype = codecs.of(kind), hf.parameter_dtype(dtype)
        path = hf.resolve(directory, names=[TREE_FILE] if codec is None else codec.files)
        config = hf.read_json(path / "config.json") if (path / "config.json").exists() else {}
        if codec is None:
            return Head(*_read_tree(path, kind, config, dtype), str(path))
        return Head(*_read(path, codec, config, dtype), str(path))


def _read(path: Path, codec: Codec, config: dict, dtype: np.dtype) -> tuple[dict, dict]:
    _check_kind_of_files(path, codec, config)
    with contextlib.ExitStack() as stack:
        tensors = dict(codec.select(path, open_file(path, codec, stack), config))
        maps = {name: tensors.pop(name)() for name in codec.maps if name in tensors}
        layout = codec.layout_of_names(tensors)
        _check_names(path, codec.kind, tensors, layout)
        tied = _all_copies_equal(codec.repeated, layout, tensors)
        found = codec.reduce(Found(path, config, layout, maps, tied))
        leaves, sizes = _stack_leaves(path, found.layout, tensors, dtype)
    leaves, config = codec.decode(found, leaves, sizes)
    return unflatten_dict({leaf: jnp.asarray(value) for leaf, value in leaves.items()}), config


def _read_tree(path: Path, name: str, config: dict, dtype: Any) -> tuple[dict, dict]:
    """(parameters, config.json) of the drafter ``name``; floating-point tensors get ``dtype``."""
    if config.get("model_type") != TREE or config.get("drafter") != name:
        raise UserError(
            f"{path} has no parameters of the drafter {name}; give a directory that its training "
            "wrote"
        )
    leaves = {}
    with contextlib.ExitStack() as stack:
        opened = hf_weights.open_weights(path / TREE_FILE, stack)
        for key in opened.keys():  # noqa: SIM118
            value = np.asarray(opened.get_tensor(key))
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            leaves[tuple(key.split("."))] = jnp.asarray(value, dtype if floating else None)
    return unflatten_dict(leaves), config


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
        kind: the name of a method, or of a drafter outside the package, whose tensors are named by
            their place in the tree.
        params: as ``read`` returns them.
        config: keys of config.json: ``base_model_name_or_path``; for mlp_speculator ``scale_input``
            and others, for draft networks what no tensor shows, as ``read`` returns it. Numbers
            that follow from the parameters are taken from them.
        tokenizer_fingerprint: ``LM.vocabulary``, stored as "vocabulary".
        extra: further keys of config.json.
        layout: one of the ``Codec.layouts`` of the method; "" is ``Codec.usual_layout``.

    Raises:
        UserError: the parameters are not of this kind, the directory holds anything but heads, or
            the operating system reports an error; the directory then stays unchanged.
    """
    raw = config | (extra or {})
    raw |= {"vocabulary": tokenizer_fingerprint} if tokenizer_fingerprint else {}
    codec = codecs.of(kind)
    if codec is None:
        raw |= {"model_type": TREE, "drafter": kind}
        _write(directory, raw, TREE_FILE, tree_tensors(kind, params))
        return
    arrays = _arrays(params)
    layout = codec.check_layout(layout) or codec.usual_layout(arrays)
    leaves = codec.arrange(layout, arrays, config)
    table = codec.layout_of_leaves(leaves, layout, config)
    tensors, sizes = _to_write(table, leaves), {}
    for name, place in table.items():
        _check_tensor("the parameters", sizes, name, place, tensors[name])

    def facts() -> dict[str, Any]:
        readers: Tensors = {name: tensor.read for name, tensor in tensors.items()}
        tied = _all_copies_equal(codec.repeated, table, readers)
        return codec.facts(Found("the parameters", config, table, {}, tied), leaves, sizes)

    raw, maps = codec.encode(layout, leaves, raw, facts)
    raw |= {"torch_dtype": str(next(iter(tensors.values())).dtype)}
    raw |= {"architectures": list(codec.architectures)} if codec.architectures else {}
    tensors |= {name: tensor_files.tensor(value) for name, value in maps.items()}
    _write(directory, raw, codec.files[0], tensors)


def _write(path: str | os.PathLike, raw: dict, file: str, tensors: Mapping[str, Tensor]) -> None:
    path = Path(path).expanduser().resolve()
    with on_disk(f"{path} cannot be written", "name another directory", SafetensorError):
        _check_replaceable(path)
        if jax.process_index() > 0:
            tensor_files.write(None, tensors)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as fresh:
            fresh.mkdir()
            files.write_json(fresh / "config.json", raw)
            tensor_files.write(fresh / file, tensors)


def _check_kind_of_files(path: Path, codec: Codec, config: dict) -> None:
    """Raises UserError for other heads."""
    own = config.get(OWN)
    stated = own.get("kind") if isinstance(own, dict) else None
    other = stated if stated in kinds() else _kind_of_type(config)
    # vLLM writes the model_type eagle for EAGLE-3 too.
    if other not in (None, codec.kind) and (other == stated or other not in codec.alike):
        raise UserError(f"{path} has {other} heads; give a directory of {codec.kind} heads")


def _kind_of_type(config: dict) -> str | None:
    """The method whose heads config.json names."""
    name = str(config.get("model_type"))
    return next((kind for kind, codec in codecs.every().items() if name in codec.types), None)


def _check_replaceable(path: Path) -> None:
    """Raises UserError for a file, and for a directory of something else than heads."""
    file = path / "config.json"
    config = hf.read_json(file) if file.exists() else {}
    ours = OWN in config or config.get("model_type") == TREE or _kind_of_type(config)
    if path.is_file() or (any(path.glob("*")) and not ours):
        raise UserError(f"{path} exists and is no directory of heads; name a new one to save heads")


def open_file(path: Path, codec: Codec, stack: contextlib.ExitStack) -> Tensors:
    """The tensors of the first of the files that exists; ``stack`` closes it. Raises UserError."""
    for name in codec.files:
        exist = any((path / f"{name}{end}").exists() for end in ("", ".index.json"))
        if name == "model.safetensors" and exist:
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
    raise UserError(
        f"{path} has no {codec.kind} heads; such a directory has {' or '.join(codec.files)}"
    )


def _check_names(path: Path, kind: str, names: Collection[str], layout: Layout) -> None:
    """Raises UserError unless the tensors are exactly those of ``layout``."""
    missing = [name for name in layout if name not in names]
    extra = [name for name in names if name not in layout]
    if len(missing) == len(layout):
        first = f"; its first tensor is {next(iter(names))}" if names else ""
        raise UserError(f"{path} has no {kind} heads{first}; give a directory of {kind} heads")
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


def _all_copies_equal(repeated: Collection[str], layout: Layout, tensors: Tensors) -> bool:
    """Whether there are tensors that may be copies of one module, and all of them are equal."""
    groups = collections.defaultdict(list)
    for name, place in layout.items():
        depth = next((i for i, part in enumerate(place.path) if part in repeated), None)
        if depth is None:
            continue
        inside = place.path[depth + 1 :]
        if inside[:1] and inside[0].isdigit():  # one of the modules "0", "1", ...
            groups[place.path[: depth + 1], inside[1:]].append(name)
        elif place.at:
            groups[place.path, place.at[:-1]].append(name)
    copies = [names for names in groups.values() if len(names) > 1]
    return bool(copies) and all(
        _same_bits(tensors[first](), tensors[name]()) for first, *rest in copies for name in rest
    )


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares bits: NaN equals NaN, and 0 differs from -0."""
    first, second = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
    return a.dtype == b.dtype and np.array_equal(first, second)


def _check_tensor(
    where: object, sizes: dict[str, int], name: str, place: Place, tensor: Tensor | np.ndarray
) -> None:
    """Checks a tensor as it is in the file, and adds to ``sizes`` the letters that it defines.

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
    expected = bind(sizes, place.dims, tensor.shape[::order])[::order]
    if tensor.shape != expected:
        raise UserError(
            f"{where}: {name} is {list(tensor.shape)}, expected {list(expected)}; "
            "heads of one file must agree in their sizes"
        )


def _stack_leaves(
    path: Path, layout: Layout, tensors: Tensors, dtype: np.dtype
) -> tuple[dict[tuple, np.ndarray], dict[str, int]]:
    """(leaves, size of each letter).

    Reads one tensor at a time: a file is never in memory as a whole.
    Raises UserError for a tensor that cannot be read, and what ``_check_tensor`` raises.
    """
    leaves, sizes, indices = {}, {}, collections.defaultdict(list)
    for place in layout.values():
        indices[place.path].append(place.at)
    stacked = {path: tuple(np.max(at, 0) + 1) for path, at in indices.items()}
    for name, place in layout.items():
        try:
            tensor = tensors[name]()
        except (SafetensorError, TypeError, KeyError) as error:
            raise UserError(
                f"{path}: {name} cannot be read ({error}); convert it to float32"
            ) from None
        _check_tensor(path, sizes, name, place, tensor)
        tensor = tensor.T if place.transposed else tensor
        leaf = leaves.setdefault(place.path, np.empty(stacked[place.path] + tensor.shape, dtype))
        leaf[place.at] = tensor
    return leaves, sizes


def _arrays(params: dict) -> dict[tuple, Any]:
    """The leaves that are not empty, where they are stored."""
    leaves: dict[tuple, Any] = {
        leaf: value if isinstance(value, jax.Array) else np.asarray(value)
        for leaf, value in flatten_dict(params).items()
    }
    return {leaf: value for leaf, value in leaves.items() if value.size}


def _to_write(layout: Layout, leaves: Mapping[tuple, Any]) -> dict[str, Tensor]:
    """Name in the file -> tensor as the file stores it, gathered when it is read."""

    def one(place: Place) -> Tensor:
        leaf = leaves[place.path]

        def read() -> np.ndarray:
            part = tensor_files.gather(leaf[place.at] if place.at else leaf)
            return part.T if place.transposed else part

        shape = tuple(leaf.shape[len(place.at) :])
        return Tensor(shape[::-1] if place.transposed else shape, np.dtype(leaf.dtype), read)

    return {name: one(place) for name, place in layout.items()}


def tree_tensors(name: str, params: Any) -> dict[str, Tensor]:
    """The tensors of a tree of arrays by name. Raises UserError for another object."""
    if not isinstance(params, Mapping):
        raise UserError(
            f"the parameters of {name} are an object of type {type(params).__name__}; to be saved "
            "they must be a dict of arrays, or of such dicts"
        )
    found = {}
    for place, value in flatten_dict(dict(params), keep_empty_nodes=True).items():
        path = ".".join(map(str, place))
        texts = all(isinstance(part, str) and part and "." not in part for part in place)
        if not texts or path == "__metadata__":  # that of the file itself
            raise UserError(f"a parameter of {name} is called {path!r}; use texts without dots")
        dtype = str(getattr(value, "dtype", None))
        if dtype not in tensor_files.DTYPES or dtype in ("int64", "uint64"):
            kind = f"object of type {type(value).__name__}" if dtype == "None" else f"array {dtype}"
            raise UserError(
                f"the parameter {path} of {name} is an {kind}; to be saved it must be an array of "
                "floating-point numbers, of integers of up to 32 bits, or of bool"
            )
        found[path] = tensor_files.tensor(value)
    if not found:
        raise UserError(f"{name} has no parameters that can be saved")
    return found
