"""Writes a directory of draft heads in another layout.

python -m specjax.models.convert_heads SOURCE DESTINATION --kind=eagle3 --layout=speculators
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import jax.numpy as jnp
import numpy as np

from specjax.errors import UserError
from specjax.models import eagle_layouts, head_files, head_layouts, head_tensors, hf

_USAGE = (
    "python -m specjax.models.convert_heads SOURCE DESTINATION --kind=KIND [--layout=LAYOUT] "
    "[--norm_output=true|false] [--base_model=NAME]"
)


def convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    kind: str,
    layout: str = "",
    *,
    norm_output: bool | None = None,
    base_model: str | None = None,
) -> head_files.Head:
    """Reads heads and writes them in another layout, in the dtype of their tensors.

    Args:
        source: a directory of heads, or a trained run's workdir.
        destination: a new directory, or one of heads, which is replaced.
        kind: one of ``head_files.KINDS``.
        layout: one of ``head_layouts.LAYOUTS`` of the kind; "" is the first.
        norm_output: for eagle3, whether the normed feature is recycled, instead of what config.json
            means (see ``eagle_dialects``); None: as in the files.
        base_model: the target's name for ``base_model_name_or_path``; None: as in the files.

    Returns the heads as they were read from ``source``. Raises UserError.
    """
    if kind not in tuple(head_layouts.LAYOUTS):
        raise UserError(
            f"heads of kind {kind!r} have one layout; kinds with a choice of layouts are "
            f"{', '.join(tuple(head_layouts.LAYOUTS))}"
        )
    if norm_output is not None and kind != "eagle3":
        raise UserError(f"norm_output is for eagle3, and these are {kind} heads; leave it out")
    path = hf.resolve(source, names=head_tensors.FILES[kind])
    if Path(destination).expanduser().resolve() == path.resolve():
        raise UserError(f"{path} is both source and destination; name another destination")
    head = head_files.read(path, kind, dtype=_stored_dtype(path, kind))
    config = dict(head.config)
    if config["vocab_size"] is None:
        # No tensor shows it; the file's own statement is passed on.
        config |= {"vocab_size": hf.read_json(path / "config.json").get("vocab_size")}
    if norm_output is not None:
        config["norm_output"] = norm_output
    if base_model is not None:
        config["base_model_name_or_path"] = base_model
        config.pop("speculators_config", None)
    head_files.write(destination, kind, head.params, config, layout=layout)
    return head


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    try:
        args = _parser().parse_args(argv)
        switch = None if args.norm_output is None else args.norm_output == "true"
        head = convert(
            args.source,
            args.destination,
            args.kind,
            args.layout,
            norm_output=switch,
            base_model=args.base_model,
        )
    except UserError as error:
        print(f"specjax: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    for key, note in head.config.get("read_as", {}).items():
        print(f"{key}: {note}")
    print(f"wrote {args.destination}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; usage: {_USAGE}")


def _parser() -> _Parser:
    parser = _Parser(prog="python -m specjax.models.convert_heads", description=__doc__)
    parser.add_argument("source", help="a directory of heads, or a trained run's workdir")
    parser.add_argument("destination", help="a new directory, or one of heads, which is replaced")
    parser.add_argument("--kind", required=True, choices=tuple(head_layouts.LAYOUTS))
    layouts = sorted({name for names in head_layouts.LAYOUTS.values() for name in names})
    parser.add_argument("--layout", default="", choices=layouts)
    parser.add_argument(
        "--norm_output",
        choices=("true", "false"),
        help="eagle3: whether the normed feature is recycled; default as in the files",
    )
    parser.add_argument("--base_model", help="the target's name; default as in the files")
    return parser


def _stored_dtype(path: Path, kind: str) -> np.dtype:
    """The dtype that holds all floats of the files exactly, at most float32."""
    with contextlib.ExitStack() as stack:
        tensors = head_tensors.open_file(path, kind, stack)
        tensors = head_tensors.of_heads(path, kind, tensors, {})
        kinds = {read().dtype for name, read in tensors.items() if name not in eagle_layouts.MAPS}
    floats = [dtype for dtype in kinds if jnp.issubdtype(dtype, jnp.floating)]
    joined = jnp.result_type(*floats) if floats else np.dtype(np.float32)
    return np.dtype(np.float32) if joined == np.float64 else np.dtype(joined)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
