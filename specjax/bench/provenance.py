"""What was measured: the target with a hash of its weights, and the commit of specjax."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import files, sharding
from specjax.errors import UserError
from specjax.models import hf_weights
from specjax.models.hf import Origin, origin

PACKAGE = Path(__file__).parents[1]  # specjax/
GIT_SECONDS = 10  # git may wait for a lock or a slow disk


def target(params: Any, *, name: str, directory: str | os.PathLike | None = None) -> dict:
    """What a table says about a target.

    Args:
        params: its parameters.
        name: shown in reports; "" = the name of the directory.
        directory: its directory or .gguf file; None or "": only the arrays are known.

    Returns:
        {"name", "dtype": of most parameters, or "int8" if kernels are, "parameters": their number,
        "source": "directory", "hub", "gguf" or "arrays", "revision": the commit of a repository of
        the Hub, or None, "dequantised_from": the types to which the files had rounded the weights,
        most bytes first, or None, "weights_sha256", "weights_from"}. The hash is that of the weight
        file (the number that ``sha256sum`` prints); of several files the hash of their hashes in
        hexadecimal, joined by line feeds, in the order of their names; without files that of the
        arrays. ``weights_from`` names the files, or is "arrays".
    """
    sizes: Counter[str] = Counter()
    # A single number is a setting, not a parameter.
    for leaf in (x for x in jax.tree.leaves(params) if getattr(x, "ndim", 0)):
        sizes[str(leaf.dtype)] += int(leaf.size)
    most = max(sizes, key=lambda kind: sizes[kind], default=None)
    digest, files_read = _weights(params, Path(directory) if directory else None)
    known = origin(directory) if directory else Origin("", "arrays", None, ())
    return {
        "name": name or known.name,
        "dtype": "int8" if "int8" in sizes else most,
        "parameters": sum(sizes.values()),
        "source": known.source,
        "revision": known.revision,
        "dequantised_from": ", ".join(known.dequantised_from) or None,
        "weights_sha256": digest,
        "weights_from": files_read,
    }


def _weights(params: Any, directory: Path | None) -> tuple[str, str]:
    """(hash, where it comes from)."""
    paths: list[Path] = []
    hashes: list[str] = []
    if directory is not None:
        with contextlib.suppress(UserError):  # the weights are in files of another kind
            paths = sorted(hf_weights.weight_files(directory))
    with contextlib.suppress(OSError):  # removed since they were read
        hashes = [files.sha256(path) for path in paths]
    if not hashes:
        return _of_arrays(params), "arrays"
    names = ", ".join(path.name for path in paths)
    if len(hashes) == 1:
        return hashes[0], names
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest(), names


def _of_arrays(params: Any) -> str:
    """The SHA-256 of the names, shapes, dtypes and bytes of all arrays, one array at a time."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(sharding.fetch(leaf))
        head = f"{jax.tree_util.keystr(path)} {array.shape} {array.dtype}\n"
        digest.update(head.encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def commit() -> dict | None:
    """The git commit of specjax; None if it does not run from a checkout, or git is missing.

    Returns:
        {"commit": 40 hexadecimal digits, "dirty": whether a file of the package differs from it}.
    """
    try:
        top = _git("rev-parse", "--show-toplevel")
        # A package that is installed inside another project's checkout is not part of it.
        if Path(top).resolve() != PACKAGE.parent.resolve():
            return None
        changed = _git("status", "--porcelain", "--", PACKAGE.name)
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None


def _git(*arguments: str) -> str:
    """The output of a git command in the folder of the package. Raises OSError and others."""
    # These variables would name another repository.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    done = subprocess.run(
        ["git", *arguments],
        cwd=PACKAGE.parent,
        env=kept,
        capture_output=True,
        check=True,
        timeout=GIT_SECONDS,
        encoding="utf-8",
    )
    return done.stdout.strip()
