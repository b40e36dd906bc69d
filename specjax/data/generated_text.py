"""Reads the text that a target wrote for training (``config.objective=generate``).

``<workdir>/generated`` holds array_record shards of JSON records, and manifest.json, which is
written last. ``specjax.train.recipes.generated`` writes it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax import checks, files
from specjax.data import shards
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.files import buckets

NAME, SCHEMA = "generated text", 1
BUILD = "configs/self_generate.py"
SPLITS = ("train", "valid")


def load(
    directory: str | Path,
    tokenizer_fingerprint: str,
    split: str,
    temperature: float | None = None,
    labels: str = "all",
) -> list[Document]:
    """The texts of a split, prompt and output, in the order of their prompts.

    Args:
        directory: the workdir of the run that generated them, or its folder ``generated``.
        tokenizer_fingerprint: of the tokenizer that the texts must be made with.
        split: "train" or "valid".
        temperature: of the texts to load; None loads all.
        labels: which tokens are learnt: "all", or "output" (not those of the prompt).

    Raises UserError for text that is unfinished, damaged or made with another tokenizer, and for
    a split or a temperature that it does not have.
    """
    folder = _folder(directory)
    checks.one_of("labels", labels, ("all", "output"))
    if split not in SPLITS:
        raise UserError(
            f"generated text has no split {split!r}; it has {' and '.join(map(repr, SPLITS))}"
        )
    build = f"{BUILD} (the same command resumes a killed run)"
    manifest = files.read_manifest(folder / "manifest.json", NAME, SCHEMA, build)
    if manifest["tokenizer"] != tokenizer_fingerprint:
        raise UserError(
            f"{folder} was made with another tokenizer; generate text with the target of this run"
        )
    stored = manifest["sampling"]["temperatures"]
    if temperature is not None and temperature not in stored:
        listed = ", ".join(f"{each:g}" for each in stored)
        raise UserError(f"{folder} has no text of temperature {temperature:g}; it has {listed}")
    documents = []
    for name, facts in manifest["shards"].items():
        path = folder / name
        if not path.is_file() or files.sha256(path) != facts["sha256"]:
            raise UserError(
                f"{path} is missing or damaged; "
                f"remove it and {folder / 'manifest.json'}, and run the command again"
            )
        documents += [
            _document(record, labels)
            for record in shards.read(path)
            if record["split"] == split and temperature in (None, record["temperature"])
        ]
    return documents


def target_fingerprint(directory: str | Path) -> str | None:
    """The fingerprint of the model that wrote the text; None if there is no finished text.

    Raises UserError if the manifest is damaged.
    """
    path = _folder(directory) / "manifest.json"
    if not path.is_file():
        return None
    return files.read_manifest(path, NAME, SCHEMA, BUILD)["target"]["sha256"]


def _folder(directory: str | Path) -> Path:
    folder = buckets.local(directory)
    return folder / "generated" if (folder / "generated").is_dir() else folder


def _document(record: dict, labels: str) -> Document:
    ids = np.array(record["prompt_ids"] + record["output_ids"], np.int32)
    first = len(record["prompt_ids"]) if labels == "output" else 0
    return Document(ids, np.arange(len(ids)) >= first)
