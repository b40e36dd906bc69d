"""From ``config.data`` to batches, held-out batches and held-out prompts.

The text has one source: local files, a TFDS dataset, dialogues, pairs, text that the target wrote,
stored features of the target, or the embedded corpus. Crops of one long stream do not separate
documents; packed documents have masks, and only their labelled tokens count. Encoder-decoder models
learn pairs (``pair_material``), one in a row. ``config.data.features`` names stored features.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax import sharding
from specjax.config import Config
from specjax.data import (
    chat,
    dialogues,
    feature_store,
    generated_text,
    packing,
    text_files,
    token_streams,
)
from specjax.data.feature_store import FeatureStore, HeldOut, Stored
from specjax.data.generated_text import SPLITS
from specjax.data.packing import Document
from specjax.data.pairs import OutputEnds
from specjax.data.text_files import TextSource
from specjax.errors import UserError
from specjax.files import buckets
from specjax.models import hf
from specjax.train.display import report
from specjax.train.loop import Source
from specjax.train.recipes import checks, pair_material, shapes
from specjax.types import Batch


class Material(NamedTuple):
    """The text of a run."""

    batches: Source
    held_out: Sequence[Batch]
    prompts: list[list[int]]  # for ``examine``: of the valid split; [] if none are wanted
    digest: str  # of all tokens and labels, held-out ones too; a resumed run must have the same
    tokens_per_byte: float | None  # of the valid split; None if only some tokens are labels
    counts: np.ndarray  # i64[n]: how often each token id is a label of the train split

    def tapped(self, layers: Sequence[int]) -> Material:
        """With these taps in ``Batch.features``, if features are stored.

        Raises UserError if they are stored without these taps.
        """
        if not isinstance(self.batches, feature_store.Stored):
            return self
        assert isinstance(self.held_out, feature_store.HeldOut)
        places = self.batches.store.chosen(layers)
        batches, held_out = (
            dataclasses.replace(each, places=places) for each in (self.batches, self.held_out)
        )
        return self._replace(batches=batches, held_out=held_out)


class Text(NamedTuple):
    """Both splits as token ids: one stream each, or documents."""

    streams: dict[str, np.ndarray]  # {}: there are documents
    documents: dict[str, list[Document]]
    prompts: list[list[int]]
    tokens_per_byte: float | None

    @property
    def digest(self) -> str:
        """Of all tokens and labels."""
        documents = itertools.chain.from_iterable(self.documents.values())
        labelled = itertools.chain.from_iterable(documents)  # ids and labels of each
        digest = hashlib.sha256()
        for array in itertools.chain(self.streams.values(), labelled):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    @property
    def counts(self) -> np.ndarray:
        """i64[n]: how often each token id is a label of the train split."""
        if self.streams:
            return np.bincount(self.streams["train"][1:])
        # The first token of a document is no label.
        parts = [each.ids[1:][each.labelled[1:]] for each in self.documents["train"]]
        return np.bincount(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


def text_source(data: Config) -> TextSource:
    """The source of plain text in ``config.data``. Raises UserError if there are two."""
    return TextSource(text_files.split_names(data.files), data.tfds, data.dir, data.text_key)


def texts(config: Config, workdir: Path, split: str) -> list[str]:
    """The texts of a split of plain text. Raises UserError."""
    return [text for _, text in text_files.load(text_source(config.data), workdir, split)]


def tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """``config.tokenizer``, or a new one trained on the text. Raises UserError."""
    if config.tokenizer:
        return _given_tokenizer(config)
    if shapes.has_encoder(config.model):
        return pair_material.new_tokenizer(config, workdir)
    if config.data.dialogues or config.data.generated:
        raise UserError(
            "a new tokenizer is trained on plain text; "
            "give config.tokenizer for dialogues and generated text"
        )
    with sharding.first_alone():
        train = texts(config, workdir, "train")
    return token_streams.train_tokenizer(train, config.model.vocab_size)


def _given_tokenizer(config: Config) -> Tokenizer:
    size, path = config.model.vocab_size, buckets.local(config.tokenizer)
    if not path.is_file():
        path = hf.resolve(config.tokenizer, weights=False)
    result = hf.load_tokenizer(path)
    if result is None:
        raise UserError(f"config.tokenizer: {path} has no tokenizer.json; give another model")
    own = result.get_vocab_size()
    # A model to start from may have more rows than its tokenizer has tokens.
    if size and size != own and not (size > own and config.init):
        raise UserError(
            f"config.model.vocab_size is {size}, but {path} has {own} tokens; leave it 0"
        )
    return result


def gather(
    config: Config,
    workdir: Path,
    tokenizer: Tokenizer,
    directory: str | None,
    ends: OutputEnds | None = None,
) -> Material:
    """The tokenised material of ``config.data``.

    ``directory`` is the model directory whose chat template dialogues may use, and which stored
    features must be of; ``ends`` are the tokens around the outputs of an encoder-decoder model.
    Raises UserError for two sources at once, for keys that belong to another source, for text that
    this model cannot learn, and for too little text.
    """
    if checks.text_kind(config.data) == "features":
        return Material(*_open_store(config, directory))
    text = read(config, workdir, tokenizer, directory, ends)
    digest, counts = text.digest, text.counts
    size, length, count = config.train.batch_size, config.train.length, config.train.eval_batches
    if text.streams:
        batches: Source = token_streams.Batches(text.streams["train"], size, length, config.seed)
        held_out = token_streams.held_out_batches(text.streams["valid"], size, length, count)
    elif ends is not None:
        # Rows are padded to the longest pair.
        longest = max(len(each.ids) for own in text.documents.values() for each in own)
        length = min(length, longest - 1)
        batches = packing.OnePerRow(text.documents["train"], size, length, config.seed)
        held_out = packing.held_out_rows(text.documents["valid"], size, length, count)
    else:
        # A target reads the text before; a model that is trained from nothing needs none.
        context = 0 if config.objective == "pretrain" else length // 2
        documents = text.documents["train"]
        batches = packing.Packed(documents, size, length, config.seed, context)
        held_out = packing.held_out(text.documents["valid"], size, length, count, context)
        if context and (line := packing.about_windows(documents, length, context)):
            report(line)
            # Earlier versions had other rows.
            digest = f"{digest}, context {context}"
    return Material(batches, held_out, text.prompts, digest, text.tokens_per_byte, counts)


def read(
    config: Config,
    workdir: Path,
    tokenizer: Tokenizer,
    directory: str | None,
    ends: OutputEnds | None = None,
) -> Text:
    """The text of any source but stored features; every process has all of it. Raises UserError."""
    with sharding.first_alone():
        if ends is not None:
            documents = pair_material.documents(config, workdir, tokenizer, ends)
            return Text({}, documents, pair_material.prompts(config, documents["valid"]), None)
        return _read(config, workdir, tokenizer, directory)


def _read(config: Config, workdir: Path, tokenizer: Tokenizer, directory: str | None) -> Text:
    kind = checks.text_kind(config.data)
    if kind == "pairs":
        raise UserError(
            "config.data.pairs are learnt by encoder-decoder models, and this one is a decoder; "
            "give text, or start from configs/t5.py"
        )
    if kind in ("dialogues", "generated"):
        splits = {split: _documents(config, kind, tokenizer, directory, split) for split in SPLITS}
        return Text({}, splits, _document_prompts(splits["valid"], config, tokenizer), None)
    plain = {split: texts(config, workdir, split) for split in SPLITS}
    prompts = _line_prompts(plain["valid"], config, tokenizer)
    if config.data.packing == "crops":
        # Long streams are stored here.
        folder = text_files.folder(text_source(config.data), workdir) / "tokens"
        streams = {
            split: token_streams.cached_tokens(tokenizer, plain[split], folder) for split in SPLITS
        }
        size = max(1, sum(len(text.encode()) for text in plain["valid"]))
        return Text(streams, {}, prompts, len(streams["valid"]) / size)
    splits = {
        split: _unmasked(token_streams.tokenise(tokenizer, [text]) for text in plain[split])
        for split in SPLITS
    }
    return Text({}, splits, prompts, None)


def _documents(
    config: Config, kind: str, tokenizer: Tokenizer, directory: str | None, split: str
) -> list[Document]:
    """The documents of dialogues, or of generated text."""
    data = config.data
    if kind == "generated":
        return generated_text.load(
            data.generated, hf.fingerprint(tokenizer), split, data.temperature, data.labels
        )
    if directory is None:
        raise UserError(
            "config.data.dialogues needs the chat template of a model; give config.target"
        )
    template = chat.load(data.template, directory, tokenizer)
    files = text_files.split_names(data.dialogues)
    documents = dialogues.load(files, split, tokenizer, template)
    if data.labels == "all":
        return [Document(each.ids, np.ones_like(each.labelled)) for each in documents]
    return documents


def _unmasked(streams: Iterable[np.ndarray]) -> list[Document]:
    """Documents in which every token is learnt."""
    return [Document(ids, np.ones(len(ids), bool)) for ids in streams if len(ids)]


def _line_prompts(valid: Sequence[str], config: Config, tokenizer: Tokenizer) -> list[list[int]]:
    """Starts of lines, after the tokens that the tokenizer puts before a text."""
    wanted = config.examine
    if not wanted.prompts:
        return []
    return token_streams.held_out_prompts(
        valid, tokenizer, wanted.prompts, wanted.prompt_tokens, config.seed
    )


def _document_prompts(
    documents: Sequence[Document], config: Config, tokenizer: Tokenizer
) -> list[list[int]]:
    """Starts of documents, up to the first labelled token, all different and evenly spaced.

    Each has at most the last ``prompt_tokens``, after the tokens that the tokenizer puts before a
    text. Raises UserError if there are too few.
    """
    wanted, head, unique = config.examine, token_streams.opening(tokenizer), {}
    for document in documents:
        first = int(np.argmax(document.labelled)) if document.labelled.any() else 0
        first = first or min(wanted.prompt_tokens, len(document.ids) - 1)
        ids = document.ids[:first].tolist()
        begins = head if head and ids[: len(head)] == head else []
        ids = begins + ids[len(begins) :][-wanted.prompt_tokens :]
        if len(ids) > len(begins):
            unique[tuple(ids)] = ids
    if len(unique) < wanted.prompts:
        raise UserError(
            f"the valid split has {len(unique)} different prompts, and config.examine.prompts is "
            f"{wanted.prompts}; lower it, or give more text"
        )
    return pair_material.spaced(list(unique.values()), wanted.prompts)


def _open_store(config: Config, directory: str | None) -> tuple[Any, ...]:
    """The fields of ``Material``, without taps; ``directory`` is that of the target.

    Raises UserError for the features of another target, rows of another length than
    ``config.train.length``, and too few rows or prompts.
    """
    asked = config.data.features
    store = FeatureStore(*text_files.split_names(asked) or [asked])
    where, target = store.directory, store.manifest["target"]
    if directory is None or target["sha256"] != feature_store.target_fingerprint(directory):
        raise UserError(
            f"{where} has the features of {target['name']}, and config.target is another model; "
            f"store those of this target with {feature_store.BUILD}"
        )
    size, length = config.train.batch_size, config.train.length
    if length != store.layout.length:
        raise UserError(
            f"config.train.length is {length}, and the rows of {where} have "
            f"{store.layout.length} tokens; give {store.layout.length}"
        )
    batches = Stored(store, size, config.seed)
    held_out = HeldOut(store, size, config.train.eval_batches)
    return batches, held_out, _stored_prompts(config, store), store.digest, None, store.counts


def _stored_prompts(config: Config, store: FeatureStore) -> list[list[int]]:
    wanted, known = config.examine, store.manifest["prompts"]
    if not wanted.prompts:
        return []
    if wanted.prompts > len(known["ids"]) or wanted.prompt_tokens != known["tokens"]:
        raise UserError(
            f"config.examine asks for {wanted.prompts} prompts of {wanted.prompt_tokens} tokens, "
            f"and {store.directory} has {len(known['ids'])} of {known['tokens']}; ask for these, "
            "or for none (config.examine.prompts=0)"
        )
    return known["ids"][: wanted.prompts]
