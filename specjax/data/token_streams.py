"""From text to batches: tokenizers, token streams, crops, held-out batches and prompts.

``text_files`` reads the text. ``packing`` makes batches of whole documents with masks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from specjax import files
from specjax.errors import UserError, on_disk
from specjax.types import Batch

# Id 0 of the tokenizers made here: it starts every document, ends it, and pads.
SEPARATOR = "<|endoftext|>"
# More text hardly changes the merges, and training time is linear in it.
_TOKENIZER_CHARACTERS = 4_000_000
# A shorter stream is not stored: tokenising it again is fast.
_SMALLEST_STORED = 100_000


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = (SEPARATOR,)
) -> Tokenizer:
    """A byte-level BPE tokenizer with these special tokens, whose ids are 0, 1, ...

    The same texts give the same tokenizer. Of a large corpus every n-th text is used. Raises
    UserError if ``vocab_size`` cannot hold the 256 bytes and the special tokens.
    """
    if vocab_size < 256 + len(special):
        raise UserError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {' and '.join(special)} need at "
            f"least {256 + len(special)}"
        )
    texts = list(texts)
    stride = -(-sum(map(len, texts)) // _TOKENIZER_CHARACTERS) or 1
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def first_id(tokenizer: Tokenizer, names: Iterable[str], used: Collection[int] = ()) -> int | None:
    """The id of the first of these tokens that there is and that is not in ``used``; or None."""
    ids = map(tokenizer.token_to_id, names)
    return next((token for token in ids if token is not None and token not in used), None)


def separator_id(tokenizer: Tokenizer) -> int | None:
    """The id that starts a document: ours, else a usual name of other tokenizers, else None."""
    return first_id(tokenizer, (SEPARATOR, "<s>", "<|begin_of_text|>", "<bos>", "</s>"))


def opening(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts before every text: usually one for its beginning, or none.

    If there is one, the model was trained on texts with it only, and every prompt begins with it.
    """
    encoding = tokenizer.encode("a")
    special = itertools.takewhile(bool, encoding.special_tokens_mask)
    return encoding.ids[: sum(special)]


def closing(tokenizer: Tokenizer) -> list[int]:
    """The ids that the tokenizer puts after every text: of T5 the one for its end."""
    encoding = tokenizer.encode("a")
    special = list(itertools.takewhile(bool, reversed(encoding.special_tokens_mask)))
    return encoding.ids[len(encoding.ids) - len(special) :]


def documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """The ids of each text, preceded by the separator."""
    start = separator_id(tokenizer)
    head = [] if start is None else [start]
    # "fast" leaves out the offsets, which are not needed here: four times faster.
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [head + encoding.ids for encoding in encodings]


def tokenise(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """i32[n]: one flat stream of ``documents``."""
    parts = [np.asarray(ids, np.int32) for ids in documents(tokenizer, texts)]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def cached_tokens(tokenizer: Tokenizer, texts: Sequence[str], folder: str | Path) -> np.ndarray:
    """``tokenise``, stored in ``folder`` under a hash of the tokenizer and the texts.

    Raises UserError if it cannot be stored.
    """
    digest = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = Path(folder) / f"tokens-{digest.hexdigest()[:16]}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged
        return np.load(path)
    tokens = tokenise(tokenizer, texts)
    if len(tokens) < _SMALLEST_STORED:
        return tokens
    problem = f"the tokens of the text cannot be stored in {folder}"
    with on_disk(problem, "make room, or choose another --workdir"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path) as fresh, open(fresh, "wb") as file:
            np.save(file, tokens)
    return tokens


@dataclasses.dataclass(frozen=True)
class Batches:
    """Random crops of a token stream.

    A batch is a pure function of (seed, step): a resumed run sees the same data. Raises UserError
    if the stream is shorter than one crop.
    """

    tokens: np.ndarray  # i32[n]
    batch_size: int
    length: int  # T; a crop holds one token more, so that every position has its label
    seed: int = 0

    def __post_init__(self):
        _check_size(self.tokens, self.length)

    def batch(self, step: int) -> Batch:
        """The batch of a step: tokens i32[B,T+1] (NumPy). Every token is a label; a row is one
        document."""
        random = np.random.default_rng([self.seed, step])
        starts = random.integers(0, len(self.tokens) - self.length, self.batch_size)
        return _crops(self.tokens, starts, self.length)


def held_out_batches(tokens: np.ndarray, batch_size: int, length: int, count: int) -> list[Batch]:
    """``count`` batches of tokens i32[B,T+1] of evenly spaced crops, always the same.

    There are fewer if ``count`` batches would read a token twice. Raises UserError if the stream
    is shorter than one crop.
    """
    _check_size(tokens, length)
    count = max(1, min(count, len(tokens) // (batch_size * (length + 1))))
    starts = np.linspace(0, len(tokens) - length - 1, count * batch_size).astype(np.int64)
    return [_crops(tokens, part, length) for part in starts.reshape(count, batch_size)]


def held_out_prompts(
    texts: Sequence[str], tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[list[int]]:
    """``count`` prompts: ``opening``, then ``length`` token ids from the start of a line of a text.

    Give the texts of the test split. Lines are drawn uniformly, without replacement. Raises
    UserError if there are not enough of them.
    """
    head = opening(tokenizer)
    lines = [
        (index, match.start())
        for index, text in enumerate(texts)
        for match in re.finditer(r"(?m)^.*\S", text)
    ]
    prompts: list[list[int]] = []
    for pick in np.random.default_rng([seed, count, length]).permutation(len(lines)):
        index, start = lines[int(pick)]
        # Sixteen characters per token are plenty: the rest of the file need not be tokenised.
        text = texts[index][start : start + 16 * length]
        if len(text.encode()) <= length:  # a token has at least one byte
            continue
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) > length:  # strictly: the last token of a cut text may be half a word
            prompts.append(head + ids[:length])
        if len(prompts) == count:
            return prompts
    raise UserError(
        f"only {len(prompts)} lines begin prompts of {length} tokens, {count} wanted; "
        "give more or longer text"
    )


def _crops(tokens: np.ndarray, starts: np.ndarray, length: int) -> Batch:
    # Any: a NumPy array, which the training loop places on the devices.
    crops: Any = np.ascontiguousarray(tokens[starts[:, None] + np.arange(length + 1)])
    return Batch(crops)


def _check_size(tokens: np.ndarray, length: int) -> None:
    if len(tokens) <= length:
        raise UserError(
            f"the corpus has {len(tokens)} tokens, fewer than one crop of {length + 1}; "
            "give more text or a shorter length"
        )


def most_frequent(
    counts: np.ndarray, size: int, vocab_size: int, always: Iterable[int] = ()
) -> np.ndarray:
    """i32[size] ascending: the tokens with the highest counts, for a head with a small vocabulary.

    EAGLE-3 (Li et al. 2025, 2503.01840) and its code: the tokens that are labels most often.

    Args:
        counts: i64[n], n at most ``vocab_size``: how often each token is a label.
        size: of the draft vocabulary.
        vocab_size: V.
        always: tokens that are in it at any count: those that end a text.

    Of tokens with equal counts the lowest ids come first, so tokens that do not occur fill the rest
    from id 0 on. Raises UserError for a size that does not fit.
    """
    first = sorted({int(token) for token in always if 0 <= token < vocab_size})
    if not max(len(first), 1) <= size <= vocab_size:
        raise UserError(
            f"draft_vocab is {size}; it must be at least {max(len(first), 1)} and at most the "
            f"target's {vocab_size} tokens"
        )
    whole = np.zeros(vocab_size, np.int64)
    whole[: len(counts)] = counts
    whole[first] = np.iinfo(np.int64).max
    # Stable: equal counts stay in the order of their ids.
    return np.sort(np.argsort(-whole, kind="stable")[:size]).astype(np.int32)
