"""Where a loaded model comes from, for tables and results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from specjax.models.sources import gguf_file, hub


class Origin(NamedTuple):
    """What is known about a model's files."""

    name: str  # of a directory, of a trained run, of a repository, or of a file
    source: str  # "directory", "hub" or "gguf"
    revision: str | None  # the commit of a repository of the Hub
    dequantised_from: tuple[str, ...]  # types such as "Q4_1": the weights were rounded to them


def origin(directory: str | os.PathLike) -> Origin:
    """The origin of what ``hf.resolve`` returns. Raises UserError for a damaged .gguf file."""
    path = Path(directory).absolute()
    if gguf_file.is_gguf(path) and path.is_file():
        return Origin(path.name, "gguf", None, gguf_file.read(path).quantised())
    if (snapshot := hub.snapshot_of(path)) is not None:
        return Origin(snapshot.name, "hub", snapshot.commit, ())
    # A run keeps its model in the folder "model".
    return Origin(path.parent.name if path.name == "model" else path.name, "directory", None, ())
