"""What a run trains on and is judged by: from ``config.data`` to batches, held-out batches and held-out prompts.

There is one source of text: local files, a TFDS dataset, dialogues, text that the target wrote, or the embedded corpus. Crops
of one long stream keep nothing apart; documents are packed with masks, and only their labelled tokens count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from specjax import decode, sampling
from specjax.config import Config
from specjax.data import chat, dialogues, packing, token_streams
from specjax.data.packing import Document
from specjax.drafters import none
from specjax.errors import UserError
from specjax.models import hf
from specjax.train import generated
from specjax.train.loop import Source
from specjax.types import LM, Batch, ModelParams

KINDS = ("files", "tfds", "dialogues", "generated")


class Material(NamedTuple):
    """What a run needs to know of its text."""

    batches: Source
    held_out: list[Batch]
    prompts: list[list[int]]  # for ``examine``: from the valid split, or [] if none are wanted
    digest: str  # of all tokens and labels, held-out ones too: what a resumed run must share
    tokens_per_byte: float | None  # of the valid split; None where only some tokens are labels


def texts(config: Config, workdir: Path, split: str) -> list[str]:
    """The texts of a split, of plain sources. Raises UserError."""
    return [text for _, text in token_streams.load(config.data, workdir, split)]


def tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """``config.tokenizer``, or a new one made of the text. Raises UserError."""
    size = config.model.vocab_size
    if config.tokenizer:
        path = Path(config.tokenizer).expanduser()
        path = hf.resolve(path) / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(
                f"config.tokenizer: {path} is no file; give a tokenizer.json or a directory with one"
            )
        try:
            found = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"config.tokenizer: {path} is no tokenizer ({error})") from None
        if size not in (0, found.get_vocab_size()):
            told = (
                f"config.model.vocab_size is {size}, but {path} has {found.get_vocab_size()} tokens"
            )
            raise UserError(f"{told}; leave it 0")
        found.no_truncation()
        found.no_padding()
        return found
    if config.data.get("dialogues") or config.data.get("generated"):
        raise UserError(
            "a new tokenizer is made from plain text; give config.tokenizer for dialogues and generated text"
        )
    return token_streams.train_tokenizer(texts(config, workdir, "train"), size)


def gather(config: Config, workdir: Path, tokenizer: Tokenizer, directory: str | None) -> Material:
    """The material of ``config.data``, tokenised; ``directory`` is the model whose chat template dialogues may use.

    Raises UserError: two sources at once, options that belong to another source, too little text.
    """
    source, size, length = config.data, config.train.batch_size, config.train.length
    given = [name for name in KINDS if source.get(name)]
    if len(given) > 1:
        raise UserError(f"config.data names {' and '.join(given)}; give one of them")
    kind = given[0] if given else "files"
    _only(source, kind)
    if kind in ("dialogues", "generated"):
        splits = {
            split: _documents(config, kind, tokenizer, directory, split)
            for split in ("train", "valid")
        }
        prompts = _begun(splits["valid"], config, tokenizer) if config.examine.prompts else []
    else:
        found = {split: texts(config, workdir, split) for split in ("train", "valid")}
        folder = _folder(config, workdir) / "tokens"
        streams = {
            split: token_streams.cached_tokens(tokenizer, found[split], folder) for split in found
        }
        prompts = _prompts(config, found["valid"], tokenizer) if config.examine.prompts else []
        if source.packing == "crops":
            batches = token_streams.Batches(streams["train"], size, length, config.seed)
            held_out = token_streams.held_out_batches(
                streams["valid"], size, length, config.train.eval_batches
            )
            per_byte = len(streams["valid"]) / sum(len(text.encode()) for text in found["valid"])
            return Material(batches, held_out, prompts, _digest(list(streams.values())), per_byte)
        splits = {
            split: _whole(token_streams.tokenise(tokenizer, [text]) for text in found[split])
            for split in found
        }
    batches = packing.Packed(splits["train"], size, length, config.seed)
    held_out = packing.held_out(splits["valid"], size, length, config.train.eval_batches)
    parts = [
        array for split in splits.values() for each in split for array in (each.ids, each.labelled)
    ]
    return Material(batches, held_out, prompts, _digest(parts), None)


def _only(source: Config, kind: str) -> None:
    """Raises UserError for a key of ``config.data`` that would be ignored."""
    if source.packing not in ("crops", "documents"):
        raise UserError(
            f"config.data.packing is {source.packing!r}; it must be 'crops' or 'documents'"
        )
    owners = {"template": "dialogues", "temperature": "generated", "text_key": "tfds"}
    unset = {"template": "", "temperature": None, "text_key": "text"}
    for key, owner in owners.items():
        if source.get(key, unset[key]) != unset[key] and kind != owner:
            raise UserError(
                f"config.data.{key} belongs to config.data.{owner}, which is not given; leave it out"
            )
    if source.labels not in ("output", "all"):
        raise UserError(f"config.data.labels is {source.labels!r}; it must be 'output' or 'all'")
    if kind in ("dialogues", "generated") and (source.packing != "crops" or source.dir):
        name = "dir" if source.dir else "packing"
        raise UserError(
            f"config.data.{name} belongs to plain text, and {kind} are packed documents; leave it out"
        )
    if kind in ("files", "tfds") and source.labels != "output":
        raise UserError("config.data.labels belongs to dialogues and generated text; leave it out")


def _folder(config: Config, workdir: Path) -> Path:
    return Path(config.data.dir).expanduser() if config.data.dir else workdir / "data"


def _documents(
    config: Config, kind: str, tokenizer: Tokenizer, directory: str | None, split: str
) -> list[Document]:
    source = config.data
    if kind == "generated":
        words = hf.fingerprint(tokenizer)
        return generated.load(
            source.generated, words, split, source.temperature, labels=source.labels
        )
    if directory is None:
        raise UserError(
            "config.data.dialogues needs the chat template of a model; give config.target"
        )
    template = chat.load(source.template, directory, tokenizer)
    files = [name.strip() for name in source.dialogues.split(",") if name.strip()]
    found = dialogues.load(files, split, tokenizer, template).documents
    if source.labels == "all":
        found = [Document(each.ids, np.ones_like(each.labelled)) for each in found]
    return found


def _whole(streams: Any) -> list[Document]:
    return [Document(ids, np.ones(len(ids), bool)) for ids in streams if len(ids)]


def _prompts(config: Config, valid: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Held-out beginnings, with whatever the tokenizer puts before a text."""
    wanted = config.examine
    head = tokenizer.encode("").ids
    found = token_streams.held_out_prompts(
        valid, tokenizer, wanted.prompts, wanted.prompt_tokens, config.seed
    )
    return [head + ids for ids in found]


def _begun(documents: Sequence[Document], config: Config, tokenizer: Tokenizer) -> list[list[int]]:
    """The beginnings of documents, up to their first labelled token, all different and spread evenly.

    Of each at most the last ``prompt_tokens``, after whatever the tokenizer puts before a text.
    """
    wanted, head, unique = config.examine, tokenizer.encode("").ids, {}
    for document in documents:
        first = int(np.argmax(document.labelled)) if document.labelled.any() else 0
        first = first or min(wanted.prompt_tokens, len(document.ids) - 1)
        ids = document.ids[:first].tolist()
        begins = head if head and ids[: len(head)] == head else []
        ids = begins + ids[len(begins) :][-wanted.prompt_tokens :]
        if len(ids) > len(begins):
            unique[tuple(ids)] = ids
    found = list(unique.values())
    if len(found) < wanted.prompts:
        raise UserError(
            f"the valid split has {len(found)} different prompts, and config.examine.prompts is {wanted.prompts}; lower it, "
            "or give more text"
        )
    return [found[i] for i in np.linspace(0, len(found) - 1, wanted.prompts).astype(int)]


def _digest(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def on_policy(model: LM, share: float, prompt: int, temperature: float):
    """A function (params, target_params, Batch, key) -> Batch: in about ``share`` of the rows ``model`` writes on by itself.

    Of such a row the first ``prompt`` tokens stay, and only what follows is labelled, up to the end of the row: an end of
    sequence is a token like any other, as it is in crops. A packed row becomes one document. The model writes at
    ``temperature``, with the parameters it has just then: on-policy distillation, DistillSpec (2310.08461), algorithm 1, and
    GKD (2306.13649).
    """
    drafter = none.make(model)

    def rewrite(params, target_params, batch, key):
        del target_params
        rows, width = batch.tokens.shape
        if not 0 < prompt < width:
            raise UserError(
                f"config.data.on_policy_prompt is {prompt}; it must be in 1..config.train.length"
            )
        pick, noise = jax.random.split(key)
        chosen = jax.random.bernoulli(pick, share, (rows,))
        if batch.segments is not None:
            chosen &= (batch.segments[:, :prompt] > 0).all(-1)  # nobody writes on from padding
        state = decode.prefill(
            model,
            drafter,
            ModelParams(params),
            batch.tokens[:, :prompt],
            jnp.full((rows,), prompt, jnp.int32),
            jax.vmap(lambda row: jax.random.fold_in(noise, row))(jnp.arange(rows)),
            max_len=width,
            sampling=sampling.make_sampling(rows, temperature),
        )
        state = decode.autoregressive(model, ModelParams(params), state, max_steps=width - prompt)
        tokens = jnp.where(chosen[:, None], jnp.maximum(state.tokens[:, :width], 0), batch.tokens)
        old = jnp.ones(tokens.shape, bool) if batch.labelled is None else batch.labelled
        labelled = jnp.where(chosen[:, None], jnp.arange(width) >= prompt, old)
        segments = batch.segments
        if segments is not None:
            segments = jnp.where(chosen[:, None], 1, segments)
        return Batch(tokens, labelled, segments)

    return rewrite
