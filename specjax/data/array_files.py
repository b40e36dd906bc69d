"""Arrays built for one tokenizer: ``<name>.safetensors`` and a manifest ``<name>.json``.

The manifest is written last and holds a checksum of every array, so an incomplete or damaged pair
of files is detected.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax import files
from specjax.errors import UserError, on_disk
from specjax.files import buckets
from specjax.types import LM


def write(
    directory: str | os.PathLike,
    name: str,
    schema: int,
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
) -> None:
    """Writes both files into ``directory``, which is created if it does not exist.

    Args:
        directory: where to write.
        name: of the files, without suffix.
        schema: version of the format.
        arrays: any shapes and dtypes.
        facts: further keys of the manifest; ``read`` needs ``vocabulary`` and ``vocab_size``.

    Raises UserError if the directory cannot be written.
    """
    folder = Path(directory).expanduser()
    # safetensors ignores strides: it would store a transposed view untransposed.
    arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
    sums = {key: _checksum(value) for key, value in arrays.items()}
    manifest = {"format": f"specjax {name}", "schema": schema, **facts, "sha256": sums}
    contents = {
        f"{name}.safetensors": lambda path: save_file(arrays, path),
        f"{name}.json": json.dumps(manifest, indent=2) + "\n",
    }
    with on_disk(f"cannot write into {folder}", "choose another directory", SafetensorError):
        files.write_all(folder, contents)


def read(
    directory: str | os.PathLike, name: str, schema: int, target: LM, build: str
) -> tuple[dict[str, np.ndarray], dict]:
    """(arrays, manifest) that ``write`` stored under ``name``.

    ``build`` is the command that builds the arrays, for the messages.

    Raises UserError: missing or damaged files, files of another program or format version, arrays
    for another tokenizer than the target's.
    """
    folder, what = buckets.local(directory), name.replace("_", " ")
    path = folder / f"{name}.json"
    manifest = files.read_manifest(path, name, schema, build)
    try:
        # Raises for missing keys and wrong types.
        manifest |= {"sha256": dict(manifest["sha256"]), "vocabulary": manifest["vocabulary"]}
        manifest |= {"vocab_size": int(manifest["vocab_size"])}
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UserError(
            f"{path} is damaged, or no {what} of specjax; build it with {build}"
        ) from None
    # Equal fingerprints mean equal ids; without fingerprints only the sizes can be compared.
    vocabulary = manifest["vocabulary"]
    differ = vocabulary and target.vocabulary and vocabulary != target.vocabulary
    if differ or manifest["vocab_size"] > target.vocab_size:
        raise UserError(
            f"{folder}: the {what} was built with another tokenizer than the target's; "
            f"build it with {build}"
        )
    file = folder / f"{name}.safetensors"
    # safetensors raises an AttributeError for a dtype that NumPy does not have.
    again = f"build it again with {build}"
    with on_disk(f"{file} is missing or damaged", again, SafetensorError, AttributeError):
        arrays = load_file(file)
    if {key: _checksum(value) for key, value in arrays.items()} != manifest["sha256"]:
        raise UserError(
            f"{file} does not fit {name}.json: it was damaged or replaced; "
            f"build both again with {build}"
        )
    return arrays, manifest


def _checksum(array: np.ndarray) -> str:
    return hashlib.sha256(f"{array.dtype.str}{array.shape}".encode() + array.tobytes()).hexdigest()
