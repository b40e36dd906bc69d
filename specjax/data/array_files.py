"""Arrays that were built for one tokenizer, on disk: ``<name>.safetensors``, and ``<name>.json`` that says what they are.

The manifest is written last and holds a checksum of every array: what looks complete is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.errors import UserError
from specjax.types import LM


def write(
    directory: str | os.PathLike,
    name: str,
    schema: int,
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> None:
    """Writes both files into ``directory``, each all at once; ``facts`` go into the manifest (``vocabulary`` among them)."""
    folder = Path(directory).expanduser()
    # safetensors writes the bytes as they lie: it would store a transposed view untransposed.
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    sums = {key: _checksum(value) for key, value in arrays.items()}
    manifest = {"format": f"specjax {name}", "schema": schema, **facts, "sha256": sums}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=folder) as beside:
            save_file(arrays, Path(beside) / f"{name}.safetensors")
            (Path(beside) / f"{name}.json").write_text(
                json.dumps(manifest, indent=2) + "\n", encoding="utf-8"
            )
            for file in (f"{name}.safetensors", f"{name}.json"):
                os.replace(Path(beside) / file, folder / file)
    except OSError as error:
        raise UserError(
            f"cannot write into {folder}: {error.strerror}; choose another directory"
        ) from None


def read(
    directory: str | os.PathLike, name: str, schema: int, target: LM, build: str
) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, manifest) of what ``write`` wrote under that name.

    ``build`` is how to make it, for the messages. Raises UserError: there is none, it is damaged or not ours, it was
    written by another version, or it was built with another tokenizer than the target's.
    """
    folder, what = Path(directory).expanduser(), name.replace("_", " ")
    path = folder / f"{name}.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        named = manifest["format"] == f"specjax {name}"
        version, sums = manifest["schema"], dict(manifest["sha256"])
        vocabulary, size = manifest["vocabulary"], int(manifest["vocab_size"])
    except OSError:
        raise UserError(f"{folder} has no {path.name}; build the {what} with {build}") from None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise UserError(
            f"{path} is damaged, or no {what} of specjax; build it with {build}"
        ) from None
    if not named:
        raise UserError(f"{path} is no {what} of specjax; build one with {build}")
    if version != schema:
        raise UserError(
            f"{path} is of format version {version!r} and this is {schema}; build it again with {build}"
        )
    # Equal fingerprints are equal ids; where one is unknown, the number of tokens is all there is to compare.
    if (
        vocabulary and target.vocabulary and vocabulary != target.vocabulary
    ) or size > target.vocab_size:
        raise UserError(
            f"{folder}: the {what} was built with another tokenizer than the target's; build it with {build}"
        )
    file = folder / f"{name}.safetensors"
    try:
        arrays = load_file(file)
    except (
        OSError,
        SafetensorError,
        AttributeError,
    ) as error:  # the last: a dtype that numpy has not
        raise UserError(
            f"{file} is missing or damaged ({error}); build it again with {build}"
        ) from None
    if {key: _checksum(value) for key, value in arrays.items()} != sums:
        raise UserError(
            f"{file} does not fit {path.name}: it was damaged or replaced; build both again with {build}"
        )
    return arrays, manifest


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()
