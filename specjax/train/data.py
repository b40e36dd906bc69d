"""From text to batches: the embedded corpus, local files, the tokenizer, token streams, crops and prompts.

The embedded corpus is the Python source of the interpreter's own standard library: it is on every machine, so nothing
is ever downloaded. It is an ordinary TFDS dataset; point ``tfds.builder_from_directory`` at it and look.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax import jsonl
from specjax.errors import UserError

SPLITS = ("train", "valid", "test")
SEPARATOR = "<|endoftext|>"  # id 0 of our tokenizers: starts every document, ends it, and pads
_TOKENIZER_BYTES = 4_000_000  # merges hardly change beyond this, and training them is linear in it
_WORTH_A_FILE = 100_000  # fewer tokens are made again in no time

Text = tuple[str, str]  # (where it comes from, what it says)


# --- the embedded corpus ---------------------------------------------------------------------------------------------


# Not the library itself, or not programs: "encodings" is character tables (a sixth of all files, and most prompts would
# be rows of them), "pydoc_data" is one 750 KB string.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}


def stdlib_sources(root: str | Path | None = None) -> Iterator[Text]:
    """Yields (relative posix path, text) of the standard library's modules, in path order, without its tests."""
    root = Path(root or sysconfig.get_path("stdlib"))
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED]
        # _sysconfigdata_*: the settings this interpreter was compiled with, a dictionary of paths.
        found += [Path(folder, name) for name in files if name.endswith(".py") and "_sysconfigdata" not in name]
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
            features=tfds.features.FeaturesDict({"path": tfds.features.Text(), "text": tfds.features.Text()}),
            disable_shuffling=True,  # path order
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split):
        chosen = (source for source in stdlib_sources() if split_of(source[0]) == split)
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


# --- local files -----------------------------------------------------------------------------------------------------


def load_files(files: str | Sequence[str], split: str) -> list[Text]:
    """(path, text) of ``split`` of local .txt files and .jsonl files with a "text" key, in the order given.

    The last 5 % of each file's characters are "valid", the 5 % before them "test", the rest "train", cut where a line
    (in a .jsonl file a record) begins. Raises ``UserError`` for a file that is missing, empty, malformed or not UTF-8.
    """
    texts: list[Text] = []
    for path in map(Path, [files] if isinstance(files, str) else files):
        pieces = _pieces(path)
        starts = np.cumsum([0, *map(len, pieces)])
        test, valid = np.searchsorted(starts, [starts[-1] * 0.90, starts[-1] * 0.95])
        first, last = {"train": (0, test), "test": (test, valid), "valid": (valid, len(pieces))}[split]
        chosen = pieces[first:last]
        if path.suffix != ".jsonl":
            chosen = ["".join(chosen)]
        texts += [(str(path), text) for text in chosen if text]
    return texts


def _pieces(path: Path) -> list[str]:
    """What may not be cut in two: the lines of a .txt file, the texts of a .jsonl file."""
    where = f"data file {path}"
    text = jsonl.read(path, where)
    if not text.strip():
        raise UserError(f"{where} is empty; give a file with text")
    if path.suffix != ".jsonl":
        return text.splitlines(keepends=True)
    return [each["text"] for each in jsonl.objects(text, "text", where)]


# --- tokens ----------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with exactly one special token, ``<|endoftext|>`` (id 0); the same texts give the same one.

    Longer corpora are sampled by taking every n-th text. Raises ``UserError`` when ``vocab_size`` cannot hold the bytes.
    """
    if vocab_size < 257:
        raise UserError(f"vocab_size={vocab_size} is too small: 256 bytes and {SEPARATOR} need at least 257")
    texts = list(texts)
    stride = -(-sum(map(len, texts)) // _TOKENIZER_BYTES) or 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def separator_id(tokenizer: Tokenizer) -> int | None:
    """The id that starts a document: ours, else the usual names of other tokenizers, else none."""
    known = (tokenizer.token_to_id(name) for name in (SEPARATOR, "<s>", "<|begin_of_text|>", "<bos>", "</s>"))
    return next((token for token in known if token is not None), None)


def tokenise(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """i32[n]: one flat stream, each document preceded by the separator."""
    start = separator_id(tokenizer)
    head = [] if start is None else [start]
    # "fast" leaves out the offsets, which nobody wants here: four times quicker.
    parts = [head + encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
    return np.concatenate([np.asarray(part, np.int32) for part in parts]) if parts else np.zeros(0, np.int32)


def cached_tokens(tokenizer: Tokenizer, texts: Sequence[str], folder: str | Path) -> np.ndarray:
    """``tokenise``, remembered in ``folder`` under a name that holds the tokenizer's and the texts' hash."""
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = Path(folder) / f"tokens-{digest.hexdigest()[:16]}.npy"
    if path.exists():
        return np.load(path)
    tokens = tokenise(tokenizer, texts)
    if len(tokens) < _WORTH_A_FILE:
        return tokens
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with open(partial, "wb") as file:
        np.save(file, tokens)
    os.replace(partial, path)
    return tokens


@dataclasses.dataclass(frozen=True)
class Batches:
    """Random crops of a token stream. A batch is a pure function of (seed, step): a resumed run sees the same data."""

    tokens: np.ndarray  # i32[n]
    batch_size: int
    length: int  # T; a crop holds one token more, so that every position has its label
    seed: int = 0

    def __post_init__(self):
        _check_size(self.tokens, self.length)

    def batch(self, step: int) -> np.ndarray:
        """i32[B,T+1]"""
        random = np.random.default_rng([self.seed, step])
        return _crops(self.tokens, random.integers(0, len(self.tokens) - self.length, self.batch_size), self.length)


def held_out_batches(tokens: np.ndarray, batch_size: int, length: int, count: int) -> list[np.ndarray]:
    """``count`` batches i32[B,T+1] of evenly spaced crops, always the same; fewer where that would read anything twice."""
    _check_size(tokens, length)
    count = max(1, min(count, len(tokens) // (batch_size * (length + 1))))
    starts = np.linspace(0, len(tokens) - length - 1, count * batch_size).astype(np.int64)
    return [_crops(tokens, part, length) for part in starts.reshape(count, batch_size)]


def held_out_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[list[int]]:
    """``count`` prompts of ``length`` token ids, each from the start of a line of one of ``texts`` (give the test split).

    Lines are drawn uniformly and without replacement. Raises ``UserError`` when there are not enough of them.
    """
    lines = [(index, match.start()) for index, text in enumerate(texts) for match in re.finditer(r"(?m)^.*\S", text)]
    prompts: list[list[int]] = []
    for pick in np.random.default_rng([seed, count, length]).permutation(len(lines)):
        index, start = lines[int(pick)]
        # Sixteen characters a token are plenty: no need to tokenise the rest of the file.
        text = texts[index][start : start + 16 * length]
        if len(text.encode()) <= length:  # a token is at least a byte
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > length:  # strictly: the last token of a cut text may be half a word
            prompts.append(ids[:length])
        if len(prompts) == count:
            return prompts
    raise UserError(
        f"only {len(prompts)} held-out prompts of {length} tokens, {count} wanted; give more or longer text"
    )


def _crops(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return np.ascontiguousarray(tokens[starts[:, None] + np.arange(length + 1)])


def _check_size(tokens: np.ndarray, length: int) -> None:
    if len(tokens) <= length:
        raise UserError(
            f"the corpus has {len(tokens)} tokens, fewer than one crop of {length + 1}; give more text or a shorter length"
        )
