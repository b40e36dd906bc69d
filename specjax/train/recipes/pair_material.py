"""The text of encoder-decoder models: pairs of ``config.data``, one in a row.

The pairs are given ones, answers in dialogues, functions of the embedded corpus with their
docstrings, or sources with the outputs that the target wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from specjax import sharding
from specjax.config import Config
from specjax.data import generated_text, pairs, text_files
from specjax.data.generated_text import SPLITS
from specjax.data.packing import Document
from specjax.data.pairs import DOCSTRINGS, OutputEnds, Pair
from specjax.errors import UserError
from specjax.models import hf
from specjax.train.display import report
from specjax.train.recipes import checks

Item = TypeVar("Item")


def texts(config: Config, workdir: Path, split: str) -> list[Pair]:
    """The pairs of ``config.data`` as text, without the sources of later splits.

    Raises UserError for other text.
    """
    return pairs.split_of(functools.partial(_texts, config, workdir), split)


def _texts(config: Config, workdir: Path, split: str) -> list[Pair]:
    data = config.data
    kind = checks.text_kind(data)
    if kind == "dialogues":
        if data.template:
            raise UserError(
                "config.data.template is for decoders; an encoder-decoder model reads the turns "
                "before an answer as plain text, leave it out"
            )
        return pairs.turns(text_files.split_names(data.dialogues), split)
    if kind != "pairs":
        raise UserError(
            "an encoder-decoder model learns pairs of a source and its output; give "
            "config.data.pairs (a .jsonl file, or docstrings), dialogues or generated"
        )
    if data.pairs == DOCSTRINGS:
        source = text_files.TextSource(dir=data.dir)
        return pairs.docstrings(text_files.load(source, workdir, split))
    return pairs.load(text_files.split_names(data.pairs), split)


def new_tokenizer(config: Config, workdir: Path) -> Tokenizer:
    """A tokenizer trained on the pairs. Raises UserError."""
    if config.data.generated:
        raise UserError(
            "a new tokenizer is trained on pairs; give config.tokenizer for generated text"
        )
    with sharding.first_alone():
        train = texts(config, workdir, "train")
    return pairs.train_tokenizer(train, config.model.vocab_size)


def documents(
    config: Config, workdir: Path, tokenizer: Tokenizer, ends: OutputEnds
) -> dict[str, list[Document]]:
    """Both splits. Raises UserError for pairs that are too long, unless they are left out."""
    if config.data.labels != "output":
        raise UserError(
            "config.data.labels is 'all', and the decoder of an encoder-decoder model writes "
            "outputs alone; leave it out"
        )
    return {split: _split(config, workdir, tokenizer, ends, split) for split in SPLITS}


def _split(
    config: Config, workdir: Path, tokenizer: Tokenizer, ends: OutputEnds, split: str
) -> list[Document]:
    data, length = config.data, config.train.length
    if checks.text_kind(data) == "generated":
        own = hf.fingerprint(tokenizer), split, data.temperature, data.labels
        every = generated_text.load(data.generated, *own)
        result = [each for each in every if len(each.ids) <= length + 1 and each.labelled.any()]
        left_out = len(every) - len(result)
    else:
        given = texts(config, workdir, split)
        leave_out = data.pairs in ("", DOCSTRINGS) or data.long_pairs == "leave_out"
        result, left_out = pairs.documents(given, tokenizer, ends, length, leave_out)
    if left_out:
        report(
            f"{left_out} of {left_out + len(result)} pairs of the {split} split have more than "
            f"{length + 1} tokens or no output, and are left out"
        )
    if not result:
        raise UserError(
            f"the {split} split has no pair that can be learnt ({left_out} are too long or have no "
            "output); give more pairs, whose sources are not all in a later split"
        )
    return result


def prompts(config: Config, valid: Sequence[Document]) -> list[list[int]]:
    """Sources with the start token, all different and evenly spaced, for ``config.examine``.

    They have at most ``prompt_tokens`` tokens. Raises UserError if there are too few.
    """
    wanted, every = config.examine, starts(valid)
    some = [ids for ids in every if len(ids) <= wanted.prompt_tokens]
    if len(some) < wanted.prompts:
        raise UserError(
            f"the valid split has {len(some)} different sources of at most {wanted.prompt_tokens} "
            f"tokens (of any length {len(every)}), and config.examine.prompts is "
            f"{wanted.prompts}; lower it, raise config.examine.prompt_tokens, or give more pairs"
        )
    return spaced(some, wanted.prompts)


def spaced(items: list[Item], count: int) -> list[Item]:
    """``count`` of the items, evenly spaced."""
    return [items[i] for i in np.linspace(0, len(items) - 1, count).astype(int)]


def starts(documents: Sequence[Document]) -> list[list[int]]:
    """The different sources, each with the start token: what comes before the first label."""
    every = (tuple(each.ids[: int(np.argmax(each.labelled))].tolist()) for each in documents)
    return [list(ids) for ids in dict.fromkeys(every)]
