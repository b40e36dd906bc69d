"""Writes a directory of draft heads in another layout.

python -m specjax.convert_heads SOURCE DESTINATION --kind=eagle3 --layout=speculators
python -m specjax.convert_heads SOURCE DESTINATION --kind=eagle3 --for=vllm
python -m specjax.convert_heads SOURCE DESTINATION --kind=mtp_module --for=vllm --into=TARGET
python -m specjax.convert_heads SOURCE --kind=eagle3 --probe=TARGET
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from specjax import files
from specjax.bound import Bound
from specjax.drafters.files import codec as codecs
from specjax.drafters.files import head_files, probe
from specjax.drafters.files.codec import ENGINES, Codec
from specjax.errors import Parser, UserError, one_line
from specjax.models import hf, hf_weights, tensor_files

# The file of heads that lie inside their target, and tensors of a Qwen2 that have a bias.
_INSIDE = "prediction_modules.safetensors"
_QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    kind: str,
    layout: str = "",
    *,
    engine: str = "",
    norm_output: bool | None = None,
    changes: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    into: str | os.PathLike = "",
) -> head_files.Head:
    """Reads heads and writes them in another layout, in the dtype of their tensors.

    Args:
        source: a directory of heads, or a trained run's workdir.
        destination: a new directory, or one of heads, which is replaced.
        kind: one of ``head_files.kinds()``.
        layout: one of the ``Codec.layouts`` of the kind; "" is the first.
        engine: one of ``codec.ENGINES``, in place of a layout: writes what this program reads.
        norm_output: for eagle3, whether the normed feature is recycled, instead of what config.json
            means (``docs/head_files.md``); None: as in the files.
        changes: keys of ``Head.config`` to write instead of those of the files, as
            ``files.probe.Reading.changes``.
        base_model: the target's name for ``base_model_name_or_path``; None: as in the files.
        into: a target's directory, for heads that may lie inside it: the new directory is a copy of
            it with the heads among its tensors.

    Returns the heads as they were read from ``source``. Raises UserError, also for heads that the
    engine cannot compute.
    """
    codec, path = _checked(source, destination, kind, layout, engine, norm_output, into)
    head = head_files.read(path, kind, dtype=_stored_dtype(path, codec))
    config = dict(head.config)
    if config["vocab_size"] is None:
        # No tensor shows it; the file's own statement is passed on.
        config |= {"vocab_size": hf.read_json(path / "config.json").get("vocab_size")}
    config |= changes or {}
    if norm_output is not None:
        config["norm_output"] = norm_output
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
        config.pop("speculators_config", None)
    if engine:
        layout, config, note = codec.suit(engine, flatten_dict(head.params), config)
        head.config["read_as"] = head.config.get("read_as", {}) | ({engine: note} if note else {})
    if not into:
        head_files.write(destination, kind, head.params, config, layout=layout)
        return head
    with tempfile.TemporaryDirectory() as temporary:
        alone = Path(temporary) / "heads"
        head_files.write(alone, kind, head.params, config, layout=layout)
        _merge(codec, hf.resolve(into), alone, Path(destination).expanduser().resolve(), engine)
    return head


def _merge(codec: Codec, target: Path, heads: Path, destination: Path, engine: str) -> None:
    """Writes a copy of a target's directory in which the heads are a further shard."""
    raw, own = (hf.read_json(path / "config.json") for path in (target, heads))
    raw = codec.in_target(target, raw, own, engine)
    names = {path: path.name for path in hf_weights.weight_files(target)}
    if len(names) == 1:
        # A reader that finds model.safetensors does not look for further files.
        names = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    inside = _INSIDE if _INSIDE not in names.values() else f"more_{_INSIDE}"
    weight_map, whole = {}, {}
    with contextlib.ExitStack() as stack:
        added = _tensors(hf_weights.open_weights(heads / codec.files[0], stack))
        for path, name in names.items():
            tensors = _tensors(hf_weights.open_weights(path, stack))
            weight_map |= dict.fromkeys(tensors, name)
            whole |= tensors
        # A bias may be in another shard than its weight.
        added |= _zero_biases(whole) if engine else {}
        if twice := sorted(added.keys() & weight_map.keys()):
            raise UserError(f"{target} has heads already (first {twice[0]}); give one without")
        weight_map |= dict.fromkeys(added, inside)
        size = sum(each.size * each.dtype.itemsize for each in (*whole.values(), *added.values()))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        destination.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(destination) as fresh:
            fresh.mkdir()
            for path in target.iterdir():
                if path.is_file() and path not in names and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, fresh / path.name)
            for path, name in names.items():
                shutil.copyfile(path, fresh / name)
            tensor_files.write(fresh / inside, added)
            files.write_json(fresh / "model.safetensors.index.json", index)
            files.write_json(fresh / "config.json", raw)


def _tensors(opened: Any) -> dict[str, tensor_files.Tensor]:
    """The tensors of an open safetensors file, which are not read yet."""
    dtypes = {text: np.dtype(name) for name, text in tensor_files.DTYPES.items()}
    result = {}
    for name in opened.keys():  # noqa: SIM118
        shape, dtype = opened.shape_of(name)
        if dtype not in dtypes:
            raise UserError(f"{name} is stored as {dtype}; supported: {', '.join(sorted(dtypes))}")
        read = Bound(opened.get_tensor, name)
        result[name] = tensor_files.Tensor(tuple(shape), dtypes[dtype], read)
    return result


def _zero_biases(tensors: Mapping[str, tensor_files.Tensor]) -> dict[str, tensor_files.Tensor]:
    """Zeros for the biases of Qwen2's attention that a file with these tensors lacks."""
    result = {}
    for name, tensor in tensors.items():
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(_QKV) and bias not in tensors:
            shape = tensor.shape[:1]
            zeros = Bound(np.zeros, shape, tensor.dtype)
            result[bias] = tensor_files.Tensor(shape, tensor.dtype, zeros)
    return result


def _checked(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    kind: str,
    layout: str,
    engine: str,
    norm_output: bool | None,
    into: str | os.PathLike,
) -> tuple[Codec, Path]:
    """The codec, and where the source is. Raises UserError for what ``convert`` cannot do."""
    codec = codecs.of(kind)
    if layout and engine:
        raise UserError(f"{engine} decides the layout; leave out layout, or the engine")
    if codec is None or not (codec.layouts or engine):
        raise UserError(
            f"heads of kind {kind!r} have one layout; kinds with a choice of layouts are "
            f"{', '.join(_layouts())}"
        )
    if norm_output is not None and kind != "eagle3":
        raise UserError(f"norm_output is for eagle3, and these are {kind} heads; leave it out")
    path = hf.resolve(source, names=codec.files)
    if Path(destination).expanduser().resolve() == path.resolve():
        raise UserError(f"{path} is both source and destination; name another destination")
    if into and not codec.inside:
        inside = ", ".join(name for name, other in codecs.every().items() if other.inside)
        raise UserError(f"{kind} heads do not lie inside their target; into is for {inside}")
    if into and Path(destination).expanduser().exists():
        raise UserError(f"{destination} exists; name a new directory for the copy of the target")
    codec.check_layout(layout)
    return codec, path


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    try:
        args: dict[str, Any] = vars(_parser().parse_args(argv))
        args["norm_output"] = {"true": True, "false": False}.get(args["norm_output"])
        target = args.pop("probe")
        if args["destination"]:
            own = ("source", "destination", "kind", "layout", "engine", "norm_output", "into")
            _checked(**{name: args[name] for name in own})
        elif not target:
            raise UserError("there is no destination; give one, or --probe=TARGET")
        else:
            for name in ("layout", "engine", "norm_output", "base_model", "into"):
                if args[name] not in ("", None):
                    raise UserError(f"{name} is for writing; give a destination, or leave it out")
        if target:
            args["changes"] = _probed(target, args["source"], args["kind"])
        if not args["destination"]:
            return 0
        head = convert(**args)
    except (UserError, OSError) as error:
        print(f"specjax: {one_line(error)}", file=sys.stderr)
        return 2
    for key, note in head.config.get("read_as", {}).items():
        print(f"{key}: {note}")
    print(f"wrote {args['destination']}")
    return 0


def _probed(target: str, source: str, kind: str) -> dict[str, Any]:
    """What the best reading changes; prints all readings. Raises UserError."""
    codec = codecs.of(kind)
    path = hf.resolve(source, names=() if codec is None else codec.files)
    model = hf.load(target)
    ids = probe.prompts_of(model)
    found = probe.probe(model.lm, model.params, kind, path, ids, note=print)
    print(f"best: {found.best}")
    return found.best.changes


def _parser() -> Parser:
    parser = Parser(prog="python -m specjax.convert_heads", description=__doc__)
    parser.add_argument("source", help="a directory of heads, or a trained run's workdir")
    replaced = "a new directory, or one of heads, which is replaced"
    parser.add_argument("destination", nargs="?", help=replaced)
    parser.add_argument("--kind", required=True, choices=head_files.kinds())
    layouts = sorted({name for names in _layouts().values() for name in names})
    parser.add_argument("--layout", default="", choices=layouts)
    engine = "writes what this program reads, in place of --layout"
    parser.add_argument("--for", dest="engine", default="", choices=ENGINES, help=engine)
    feature = "eagle3: whether the normed feature is recycled; default as in the files"
    parser.add_argument("--norm_output", choices=("true", "false"), help=feature)
    parser.add_argument(
        "--probe",
        metavar="TARGET",
        help="decodes with this target under each reading that the files leave open, prints tau of "
        "each, and writes the best one if there is a destination",
    )
    inside = "mtp_module: writes a copy of the target's directory with the modules inside"
    parser.add_argument("--into", default="", metavar="TARGET", help=inside)
    parser.add_argument("--base_model", help="the target's name; default as in the files")
    return parser


def _layouts() -> dict[str, tuple[str, ...]]:
    """Method -> its layouts, for methods with a choice."""
    return {kind: codec.layouts for kind, codec in codecs.every().items() if codec.layouts}


def _stored_dtype(path: Path, codec: Codec) -> np.dtype:
    """The dtype that holds all floats of the files exactly, at most float32."""
    with contextlib.ExitStack() as stack:
        tensors = codec.select(path, head_files.open_file(path, codec, stack), {})
        kinds = {read().dtype for name, read in tensors.items() if name not in codec.maps}
    floats = [dtype for dtype in kinds if jnp.issubdtype(dtype, jnp.floating)]
    joined = jnp.result_type(*floats) if floats else np.dtype(np.float32)
    return np.dtype(np.float32) if joined == np.float64 else np.dtype(joined)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
