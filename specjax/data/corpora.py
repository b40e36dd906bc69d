"""Text from TFDS, without TensorFlow: the embedded corpus, and the datasets that a user names.

The embedded corpus is the Python source of the interpreter's own standard library: it is on every machine, so nothing
is ever downloaded. It is an ordinary TFDS dataset; point ``tfds.builder_from_directory`` at it and look.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from absl import logging

from specjax.errors import UserError

SPLITS = ("train", "valid", "test")

_OWN = {
    "train": ("train",),
    "valid": ("validation", "valid"),
    "test": ("test",),
}  # what datasets call our splits

Text = tuple[str, str]  # (where it comes from, what it says)

# Not the library itself, or not programs: "encodings" is character tables (a sixth of all files, and most prompts would
# be rows of them), "pydoc_data" is one 750 KB string.
_SKIPPED = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "encodings",
    "pydoc_data",
}


def stdlib_sources(root: str | Path | None = None) -> Iterator[Text]:
    """Yields (relative posix path, text) of the standard library's modules, in path order, without its tests."""
    root = Path(root or sysconfig.get_path("stdlib"))
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED]
        # _sysconfigdata_*: the settings this interpreter was compiled with, a dictionary of paths.
        found += [
            Path(folder, name)
            for name in files
            if name.endswith(".py") and "_sysconfigdata" not in name
        ]
    for path in sorted(found, key=lambda path: path.relative_to(root).as_posix()):
        try:
            yield path.relative_to(root).as_posix(), path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue


def split_of(path: str) -> str:
    """The split of a file, through a hash of its path: about 90 % train, 5 % valid, 5 % test, the same everywhere."""
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
    return "train" if bucket < 90 else "valid" if bucket < 95 else "test"


class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """The standard library of this interpreter as a TFDS dataset (array_record, so that no TensorFlow is needed)."""

    # The version is the interpreter's: two interpreters never read each other's library.
    VERSION = tfds.core.Version(".".join(str(part) for part in sys.version_info[:3]))

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Python source files of the interpreter's standard library, without its tests.",
            features=tfds.features.FeaturesDict(
                {"path": tfds.features.Text(), "text": tfds.features.Text()}
            ),
            disable_shuffling=True,  # path order
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split):
        chosen = (each for each in stdlib_sources() if split_of(each[0]) == split)
        for index, (path, text) in enumerate(chosen):
            yield index, {"path": path, "text": text}


def build(data_dir: str | Path) -> tfds.core.DatasetBuilder:
    """Builds the embedded corpus in ``data_dir`` unless it is there; a killed build leaves nothing that looks complete."""
    builder = PythonStdlib(data_dir=os.fspath(data_dir), file_format="array_record")
    if builder.data_path.exists():
        return builder
    tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=1)
    # TFDS announces a download on stdout and makes a folder for it; there is none.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as downloads:
        try:
            builder.download_and_prepare(download_dir=downloads, download_config=config)
        except OSError:
            # The dataset is renamed into place, which fails when another process has finished the same build first.
            if not builder.data_path.exists():
                raise
    return PythonStdlib(data_dir=os.fspath(data_dir), file_format="array_record")


def load_texts(data_dir: str | Path, split: str) -> list[Text]:
    """(path, text) of every file of ``split`` ("train", "valid", "test") of the embedded corpus, built if need be."""
    builder: Any = build(data_dir)  # TFDS's decorators hide the signatures from type checkers
    source = builder.as_data_source(split)
    return [(example["path"].decode(), example["text"].decode()) for example in source]


def load_tfds(name: str, data_dir: str | Path, split: str, text_key: str) -> list[Text]:
    """(where, text) of ``split`` of a TFDS dataset: a registered name, or the directory of one that is built.

    A registered one is read from ``data_dir`` (empty: TFDS's own), and downloaded only if it is not there. Splits that the
    dataset has not are taken from the end of its train split, 5 % each. No TensorFlow is needed: the format is array_record.

    Raises:
        UserError: no such dataset, one that cannot be downloaded or is stored in another format, a ``text_key`` that is no
            text feature.
    """
    builder: Any = _tfds_builder(name, data_dir)
    features = builder.info.features
    texts = sorted(
        key for key, value in dict(features or {}).items() if isinstance(value, tfds.features.Text)
    )
    if text_key not in texts:
        told = ", ".join(texts) or "none"
        raise UserError(
            f"config.data.text_key is {text_key!r}; the text features of {name} are {told}"
        )
    there = set(builder.info.splits)
    own = {split: next((each for each in _OWN[split] if each in there), None) for split in SPLITS}
    if own["train"] is None:
        raise UserError(
            f"{name} has no train split but {', '.join(sorted(there)) or 'none'}; give another dataset"
        )
    lacking = [each for each in ("test", "valid") if own[each] is None]
    end = 100 - 5 * len(lacking)
    if lacking:
        own |= {each: f"train[{end + 5 * i}%:{end + 5 * i + 5}%]" for i, each in enumerate(lacking)}
        own["train"] = f"train[:{end}%]"
    with _one_line(f"{name} cannot be read as array_record"):
        source = builder.as_data_source(own[split])
        return [
            (f"{name} {own[split]} {n}", example[text_key].decode())
            for n, example in enumerate(source)
        ]


def _tfds_builder(name: str, data_dir: str | Path) -> tfds.core.DatasetBuilder:
    """The builder of a dataset that is there."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        with _one_line(f"{folder} is no directory of a TFDS dataset (it has dataset_info.json)"):
            return tfds.builder_from_directory(folder)
    if name.startswith((".", "/", "~")):
        raise UserError(
            f"config.data.tfds: there is no directory {folder}; give one, or a registered name"
        )
    root = os.fspath(Path(data_dir).expanduser()) if data_dir else None
    with _one_line(f"config.data.tfds: {name!r} is no dataset of TFDS"):
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
    if not builder.is_prepared():
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        with _one_line(f"{name} is not in {builder.data_path} and cannot be prepared"):
            builder.download_and_prepare(download_config=config)
    return builder


@contextlib.contextmanager
def _one_line(told: str) -> Iterator[None]:
    """Whatever goes wrong inside (dataset builders are programs of many people) becomes one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # TFDS warns of what it looked at in vain
    try:
        yield
    except Exception as error:
        why = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise UserError(f"{told}: {why}") from None
    finally:
        logging.set_verbosity(verbosity)
