"""From ``config.data`` to batches, held-out batches and held-out prompts.

The text has one source: local files, a TFDS dataset, dialogues, text that the target wrote, or the
embedded corpus. Crops of one long stream do not separate documents; packed documents have masks,
and only their labelled tokens count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from specjax.config import Config
from specjax.data import chat, dialogues, generated_text, packing, text_files, token_streams
from specjax.data.packing import Document
from specjax.data.text_files import TextSource
from specjax.errors import UserError
from specjax.models import hf
from specjax.train.loop import Source
from specjax.train.recipes import checks
from specjax.types import Batch

_SPLITS = ("train", "valid")


class Material(NamedTuple):
    """The text of a run."""

    batches: Source
    held_out: list[Batch]
    prompts: list[list[int]]  # for ``examine``: of the valid split; [] if none are wanted
    digest: str  # of all tokens and labels, held-out ones too; a resumed run must have the same
    tokens_per_byte: float | None  # of the valid split; None if only some tokens are labels


def text_source(data: Config) -> TextSource:
    """The source of plain text in ``config.data``. Raises UserError if there are two."""
    return TextSource(
        files=text_files.split_names(data.files),
        tfds=data.get("tfds", ""),
        dir=data.dir,
        text_key=data.get("text_key", "text"),
    )


def texts(config: Config, workdir: Path, split: str) -> list[str]:
    """The texts of a split of plain text. Raises UserError."""
    return [text for _, text in text_files.load(text_source(config.data), workdir, split)]


def tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """``config.tokenizer``, or a new one trained on the text. Raises UserError."""
    if config.tokenizer:
        return _given_tokenizer(config)
    if config.data.get("dialogues") or config.data.get("generated"):
        raise UserError(
            "a new tokenizer is trained on plain text; "
            "give config.tokenizer for dialogues and generated text"
        )
    train = texts(config, workdir, "train")
    return token_streams.train_tokenizer(train, config.model.vocab_size)


def _given_tokenizer(config: Config) -> Tokenizer:
    size, path = config.model.vocab_size, Path(config.tokenizer).expanduser()
    path = hf.resolve(path) / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UserError(
            f"config.tokenizer: {path} is no file; give a tokenizer.json or a directory with one"
        )
    try:
        result = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"config.tokenizer: {path} is no tokenizer ({error})") from None
    if size not in (0, result.get_vocab_size()):
        raise UserError(
            f"config.model.vocab_size is {size}, but {path} has {result.get_vocab_size()} tokens; "
            "leave it 0"
        )
    result.no_truncation()
    result.no_padding()
    return result


def gather(config: Config, workdir: Path, tokenizer: Tokenizer, directory: str | None) -> Material:
    """The tokenised material of ``config.data``.

    ``directory`` is the model directory whose chat template dialogues may use. Raises UserError for
    two sources at once, for keys that belong to another source, and for too little text.
    """
    kind = checks.text_kind(config.data)
    if kind in ("dialogues", "generated"):
        splits = {split: _documents(config, kind, tokenizer, directory, split) for split in _SPLITS}
        prompts = _document_prompts(splits["valid"], config, tokenizer)
        return _packed(config, splits, prompts)
    plain = {split: texts(config, workdir, split) for split in _SPLITS}
    if config.data.packing == "crops":
        folder = text_files.folder(text_source(config.data), workdir) / "tokens"
        return _crops(config, plain, tokenizer, folder)
    splits = {
        split: _unmasked(token_streams.tokenise(tokenizer, [text]) for text in plain[split])
        for split in _SPLITS
    }
    return _packed(config, splits, _line_prompts(plain["valid"], config, tokenizer))


def _crops(
    config: Config, plain: dict[str, list[str]], tokenizer: Tokenizer, folder: Path
) -> Material:
    """Crops of one stream per split; ``folder`` is where long streams are stored."""
    size, length = config.train.batch_size, config.train.length
    streams = {
        split: token_streams.cached_tokens(tokenizer, plain[split], folder) for split in _SPLITS
    }
    prompts = _line_prompts(plain["valid"], config, tokenizer)
    batches = token_streams.Batches(streams["train"], size, length, config.seed)
    held_out = token_streams.held_out_batches(
        streams["valid"], size, length, config.train.eval_batches
    )
    tokens_per_byte = len(streams["valid"]) / sum(len(text.encode()) for text in plain["valid"])
    return Material(batches, held_out, prompts, _digest(streams.values()), tokens_per_byte)


def _packed(
    config: Config, splits: dict[str, list[Document]], prompts: list[list[int]]
) -> Material:
    size, length = config.train.batch_size, config.train.length
    batches = packing.Packed(splits["train"], size, length, config.seed)
    held_out = packing.held_out(splits["valid"], size, length, config.train.eval_batches)
    arrays = (
        array
        for documents in splits.values()
        for document in documents
        for array in (document.ids, document.labelled)
    )
    return Material(batches, held_out, prompts, _digest(arrays), None)


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
    documents = dialogues.load(files, split, tokenizer, template).documents
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
    wanted = config.examine
    if not wanted.prompts:
        return []
    head, unique = token_streams.opening(tokenizer), {}
    for document in documents:
        first = int(np.argmax(document.labelled)) if document.labelled.any() else 0
        first = first or min(wanted.prompt_tokens, len(document.ids) - 1)
        ids = document.ids[:first].tolist()
        begins = head if head and ids[: len(head)] == head else []
        ids = begins + ids[len(begins) :][-wanted.prompt_tokens :]
        if len(ids) > len(begins):
            unique[tuple(ids)] = ids
    prompts = list(unique.values())
    if len(prompts) < wanted.prompts:
        raise UserError(
            f"the valid split has {len(prompts)} different prompts, and config.examine.prompts is "
            f"{wanted.prompts}; lower it, or give more text"
        )
    return [prompts[i] for i in np.linspace(0, len(prompts) - 1, wanted.prompts).astype(int)]


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
