"""Text from TFDS, without TensorFlow: the embedded corpus, and the datasets that a user names.

The embedded corpus is the Python source of the interpreter's standard library: it is on every
machine, so no download is needed. It is an ordinary TFDS dataset, which
``tfds.builder_from_directory`` can open. TFDS is imported when a dataset is opened or built.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from specjax.errors import UserError
from specjax.files import buckets

if TYPE_CHECKING:
    import tensorflow_datasets as tfds

# What works with protobuf 5 and later. tensorflow-metadata 1.21 needs protobuf 6.31, which
# TensorFlow 2.19 does not take; pip reports no conflict.
INSTALL = 'pip install "tensorflow-datasets>=4.9.9" "tensorflow-metadata>=1.17.2,<1.18"'

SPLITS = ("train", "valid", "test")

# Our split -> its names in datasets, the most usual first.
_NAMES = {"train": ("train",), "valid": ("validation", "valid"), "test": ("test",)}

Text = tuple[str, str]  # (source, content)

# Folders that are not the library, or hold no programs: "encodings" is character tables (a sixth of
# all files; most prompts would be rows of them), "pydoc_data" is one string of 750 KB.
_SKIPPED = {
    *("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"),
    *("test", "tests", "idle_test"),
}


def stdlib_sources(root: str | Path | None = None) -> Iterator[Text]:
    """Yields (relative posix path, text) of the standard library's modules, in path order.

    Tests and files that are not UTF-8 are left out. ``root`` is another folder to read.
    """
    root = Path(root or sysconfig.get_path("stdlib"))
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED]
        # _sysconfigdata_*: a dictionary of the settings with which this interpreter was compiled.
        modules = [name for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
        paths += [Path(folder, name).relative_to(root).as_posix() for name in modules]
    for path in sorted(paths):
        with contextlib.suppress(UnicodeDecodeError):
            yield path, (root / path).read_bytes().decode("utf-8")


def split_of(path: str) -> str:
    """The split of a file, by a hash of its path: about 90 % train, 5 % valid, 5 % test.

    It is the same on every machine.
    """
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") % 100
    return "train" if bucket < 90 else "valid" if bucket < 95 else "test"


def load_library(wanted: str) -> Any:
    """The module ``tensorflow_datasets``; ``wanted`` begins the message: what needs it.

    Raises UserError if it cannot be imported, with the reason and what to install.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)  # TFDS prints the traceback of its own import
    try:
        # The package alone can be imported although its parts cannot.
        importlib.import_module("tensorflow_datasets.core")
        return importlib.import_module("tensorflow_datasets")
    except Exception as error:  # protobuf has an exception of its own for versions
        why = " ".join(str(error).split()).partition(". ")[0] or type(error).__name__
        raise UserError(
            f"{wanted} needs TensorFlow Datasets, which cannot be imported ({why}); run {INSTALL} "
            "and start Python again, or give text files (config.data.files)"
        ) from None
    finally:
        logging.set_verbosity(verbosity)


@functools.cache
def _stdlib_builder() -> type[tfds.core.GeneratorBasedBuilder]:
    """The class of the embedded corpus. TFDS knows its name as soon as it exists."""
    tfds = load_library("the embedded corpus")

    class PythonStdlib(tfds.core.GeneratorBasedBuilder):
        """The standard library of this interpreter as a TFDS dataset, stored as array_record.

        TFDS reads and writes array_record without TensorFlow.
        """

        # The interpreter's version: two interpreters in one folder use separate datasets.
        VERSION = tfds.core.Version(".".join(str(part) for part in sys.version_info[:3]))

        def _info(self) -> tfds.core.DatasetInfo:
            text = tfds.features.Text
            return tfds.core.DatasetInfo(
                builder=self,
                description=(
                    "Python source files of the interpreter's standard library, without its tests."
                ),
                features=tfds.features.FeaturesDict({"path": text(), "text": text()}),
                disable_shuffling=True,  # path order
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in SPLITS}

        def _generate_examples(self, split):
            chosen = (each for each in stdlib_sources() if split_of(each[0]) == split)
            for index, (path, text) in enumerate(chosen):
                yield index, {"path": path, "text": text}

    return PythonStdlib


def build(data_dir: str | Path) -> tfds.core.DatasetBuilder:
    """Builds the embedded corpus in ``data_dir`` if it does not exist.

    An interrupted build leaves no corpus that looks complete. Raises UserError without TFDS.
    """
    tfds, given = load_library("the embedded corpus"), {"data_dir": os.fspath(data_dir)}
    builder: Any = _stdlib_builder()(**given, file_format="array_record")
    if builder.data_path.exists():
        return builder
    tfds.disable_progress_bar()
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=1)
    # TFDS prints a message about a download and creates a folder for it; there is no download.
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as downloads:
        try:
            builder.download_and_prepare(download_dir=downloads, download_config=config)
        except OSError:
            # TFDS renames the finished dataset; that fails if another process was faster.
            if not builder.data_path.exists():
                raise
    return _stdlib_builder()(**given, file_format="array_record")


def load_texts(data_dir: str | Path, split: str) -> list[Text]:
    """(path, text) of every file in a split ("train", "valid", "test") of the embedded corpus.

    The corpus is built if it does not exist.
    """
    # Any: the decorators of TFDS hide the signatures from type checkers.
    builder: Any = build(data_dir)
    source = builder.as_data_source(split)
    return [(example["path"].decode(), example["text"].decode()) for example in source]


def load_tfds(name: str, data_dir: str | Path, split: str, text_key: str) -> list[Text]:
    """(source, text) of every example in a split of a TFDS dataset stored as array_record.

    A missing test or valid split is taken from the end of the train split, 5 % each.

    Args:
        name: a registered dataset, or the directory of a prepared one.
        data_dir: where registered datasets are stored; empty: the default of TFDS. A dataset
            that is not there is downloaded.
        split: "train", "valid" or "test".
        text_key: the feature to read.

    Raises:
        UserError: an unknown dataset, a failed download, another storage format, a ``text_key``
            that is not a text feature; TFDS cannot be imported.
    """
    tfds = load_library("config.data.tfds")
    builder: Any = _tfds_builder(tfds, name, data_dir)
    features = dict(builder.info.features or {})
    texts = sorted(key for key in features if isinstance(features[key], tfds.features.Text))
    if text_key not in texts:
        raise UserError(
            f"config.data.text_key is {text_key!r}; "
            f"the text features of {name} are {', '.join(texts) or 'none'}"
        )
    part = _split_parts(name, builder)[split]
    with _one_line(f"{name} cannot be read as array_record"):
        examples = enumerate(builder.as_data_source(part))
        return [(f"{name} {part} {n}", each[text_key].decode()) for n, each in examples]


def _split_parts(name: str, builder: Any) -> dict[str, str]:
    """Our split -> the TFDS expression for it, "train[:90%]" for example. Raises UserError."""
    available = set(builder.info.splits)
    parts = {split: next(filter(available.__contains__, _NAMES[split]), None) for split in SPLITS}
    if parts["train"] is None:
        raise UserError(
            f"{name} has no train split (its splits: {', '.join(sorted(available)) or 'none'}); "
            "give another dataset"
        )
    missing = [each for each in ("test", "valid") if parts[each] is None]
    end = 100 - 5 * len(missing)
    if missing:
        parts["train"] = f"train[:{end}%]"
    for start, each in zip(range(end, 100, 5), missing, strict=True):
        parts[each] = f"train[{start}%:{start + 5}%]"
    return {split: part for split, part in parts.items() if part is not None}


def _tfds_builder(tfds: Any, name: str, data_dir: str | Path) -> tfds.core.DatasetBuilder:
    """The builder of a dataset, which is downloaded and prepared if it does not exist."""
    folder = buckets.local(name)
    if folder.is_dir():
        with _one_line(f"{folder} is no directory of a TFDS dataset (it has dataset_info.json)"):
            return tfds.builder_from_directory(folder)
    if name.startswith((".", "/", "~")):
        raise UserError(
            f"config.data.tfds: there is no directory {folder}; give one, or a registered name"
        )
    root = os.path.expanduser(data_dir) if data_dir else None  # TFDS knows buckets
    _stdlib_builder()  # TFDS knows the embedded corpus by its name then
    with _one_line(f"config.data.tfds: {name!r} is no dataset of TFDS"):
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
    if not builder.is_prepared():
        config = tfds.download.DownloadConfig(try_download_gcs=False)
        with _one_line(f"{name} is not in {builder.data_path} and cannot be prepared"):
            builder.download_and_prepare(download_config=config)
    return builder


@contextlib.contextmanager
def _one_line(problem: str) -> Iterator[None]:
    """Turns any error (dataset builders can raise all kinds) into a UserError of one line."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # TFDS warns about every place where it searched
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{problem}: {lines[0].strip()}") from None
    finally:
        logging.set_verbosity(verbosity)
