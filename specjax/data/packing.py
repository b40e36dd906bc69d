"""Packs whole documents into rows of one length: several per row, each with a segment number.

Best-fit decreasing decides once which lengths share a row. An epoch only permutes documents of
equal length, and the order of the rows. All epochs have the same number of rows, so a batch is a
function of (seed, step) that needs no earlier batches: a resumed run sees the same data.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import UserError
from specjax.types import Batch


class Document(NamedTuple):
    """Token ids, and which of them are labels for training."""

    ids: np.ndarray  # i32[n]
    labelled: np.ndarray  # bool[n]


def pieces(documents: Sequence[Document], length: int, context: int = 0) -> list[Document]:
    """``documents`` in pieces that fit into a row of ``length`` + 1 tokens; each piece has a label.

    A piece of a longer document begins with the last ``context`` + 1 tokens of the piece before,
    which are labels there and context here: every label is used exactly once. The first token of a
    document is never a label. Raises UserError if ``length`` is below 1.
    """
    if length < 1:
        raise UserError(f"the length of a row is {length}; it must be at least 1")
    parts = []
    for ids, labelled in documents:
        last = len(ids) - 1
        for start in range(0, max(last - context, min(last, 1)), length - context):
            stop = start + length + 1
            part = Document(ids[start:stop], np.array(labelled[start:stop]))
            part.labelled[: 1 + (context if start else 0)] = False
            if part.labelled.any():
                parts.append(part)
    return parts


def about_windows(documents: Sequence[Document], length: int, context: int) -> str:
    """One line on documents that are longer than a row of ``pieces``; "" if there are none."""
    longer = [each for each in documents if len(each.ids) > length + 1]
    if not longer:
        return ""
    number = sum(int(each.labelled[1:].sum()) for each in documents)
    later = sum(int(each.labelled[length + 1 :].sum()) for each in longer)
    return (
        f"{len(longer):,} of {len(documents):,} texts have more than {length + 1:,} tokens: "
        f"{later:,} of {number:,} labels are in later windows, behind {context + 1:,} tokens"
    )


@dataclasses.dataclass(eq=False)
class Packed:
    """Batches of whole documents; a batch is a pure function of (seed, step).

    An epoch has each piece exactly once. Raises UserError if the documents do not fill one batch.
    """

    documents: Sequence[Document]
    batch_size: int
    length: int  # T; a row has one token more, so that every position has a label
    seed: int = 0
    context: int = 0  # as of ``pieces``

    def __post_init__(self):
        self._pieces = pieces(self.documents, self.length, self.context)
        _check_some(self._pieces)
        self._sizes = np.array([len(piece.ids) for piece in self._pieces])
        self._plan = best_fit(self._sizes, self.length + 1)
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffle)
        if self.rows < self.batch_size:
            raise UserError(
                f"the documents fill {self.rows} rows of {self.length + 1} tokens, fewer than one "
                f"batch of {self.batch_size}; give more text, or lower the batch size or the length"
            )

    @property
    def rows(self) -> int:
        """Number of rows in an epoch."""
        return len(self._plan)

    def batch(self, step: int) -> Batch:
        """tokens i32[B,T+1], labelled bool[B,T+1], segments i32[B,T+1], all NumPy.

        The segments of each row are 1, 2, ...; padding has segment 0.
        """
        rows = []
        for epoch, place in places(step, self.batch_size, self.rows):
            chosen, order = self._epoch(epoch)
            rows.append([self._pieces[chosen[rank]] for rank in self._plan[order[place]]])
        return _fill(rows, self.length)

    def _shuffle(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(piece of each rank in decreasing length, row at each position) of an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        shuffled = random.permutation(len(self._sizes))
        by_length = shuffled[np.argsort(-self._sizes[shuffled], kind="stable")]
        return by_length, random.permutation(self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class OnePerRow:
    """Batches of documents, each in a row of its own; a batch is a pure function of (seed, step).

    For encoder-decoder models, which read the source of a row before they write. An epoch has each
    document exactly once. Raises UserError if there are fewer documents than rows in a batch.
    """

    documents: Sequence[Document]  # of at most length + 1 tokens
    batch_size: int
    length: int  # T; a row has one token more, so that every position has a label
    seed: int = 0

    def __post_init__(self):
        if len(self.documents) < self.batch_size:
            raise UserError(
                f"there are {len(self.documents)} texts of at most {self.length + 1} tokens, fewer "
                f"than one batch of {self.batch_size}; give more, lower the batch size, or raise "
                "config.train.length"
            )

    def batch(self, step: int) -> Batch:
        """tokens i32[B,T+1], padded with 0, labelled bool[B,T+1], all NumPy."""
        chosen = numbers(self.seed, step, self.batch_size, len(self.documents))
        return _fill([[self.documents[n]] for n in chosen], self.length).replace(segments=None)


def places(step: int, batch_size: int, rows: int) -> list[tuple[int, int]]:
    """(epoch, place in it) of each row of a batch, which may cross the end of an epoch."""
    return [divmod(step * batch_size + row, rows) for row in range(batch_size)]


@functools.lru_cache(maxsize=4)
def order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """i64[rows]: the row at each place of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


def numbers(seed: int, step: int, batch_size: int, rows: int) -> list[int]:
    """The rows of the batch of a step, which may cross the end of an epoch."""
    return [int(order(seed, epoch, rows)[n]) for epoch, n in places(step, batch_size, rows)]


def held_out_rows(
    documents: Sequence[Document], batch_size: int, length: int, count: int
) -> list[Batch]:
    """``count`` batches of documents, each in a row of its own, the same on every call.

    Fewer batches if there are not enough documents, but at least one (with rows of padding if
    needed). Raises UserError if there is no document.
    """
    _check_some(documents)
    rows = [[each] for each in documents]
    return [each.replace(segments=None) for each in _some(rows, batch_size, length, count)]


def held_out(
    documents: Sequence[Document], batch_size: int, length: int, count: int, context: int = 0
) -> list[Batch]:
    """``count`` batches of whole documents, the same on every call; shapes as in ``Packed.batch``.

    Fewer batches if there are not enough documents, but at least one (with rows of padding if
    needed). Raises UserError if no document has a label.
    """
    parts = pieces(documents, length, context)
    _check_some(parts)
    order = np.argsort([-len(part.ids) for part in parts], kind="stable")
    plan = best_fit(np.array([len(part.ids) for part in parts]), length + 1)
    rows = [[parts[order[rank]] for rank in row] for row in plan]
    return _some(rows, batch_size, length, count)


def _some(rows: list[list[Document]], batch_size: int, length: int, count: int) -> list[Batch]:
    """``count`` batches of these rows, or fewer; at least one, with rows of padding if needed."""
    # Best-fit puts long documents first: a random choice of rows has documents of all lengths.
    chosen = np.random.default_rng(0).permutation(len(rows))
    chosen = chosen[: batch_size * max(1, min(count, len(rows) // batch_size))]
    picked = [rows[number] for number in chosen]
    picked += [[] for _ in range(-len(picked) % batch_size)]
    starts = range(0, len(picked), batch_size)
    return [_fill(picked[start : start + batch_size], length) for start in starts]


def best_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Packs sizes i64[n], each at most ``room``, into rows: lists of ranks (0 is the longest size).

    Each size, in decreasing order, goes into the row that then has the least room left. Johnson
    1973, best-fit decreasing: at most 11/9 of the minimal number of rows.
    """
    rows: list[list[int]] = []
    free: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room they have left
    # Bit r is set if there are rows with r left. ``x & -x`` is the lowest set bit of x, so it finds
    # the smallest room that is enough.
    some = 0
    for rank, size in enumerate(-np.sort(-sizes)):
        size = int(size)
        enough = some >> size
        if enough:
            left = size + (enough & -enough).bit_length() - 1
            row = free[left].pop()
            some &= ~(0 if free[left] else 1 << left)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(rank)
        free[left - size].append(row)
        some |= 1 << left - size
    return rows


def cut(batch: Batch, length: int) -> Batch:
    """A batch of rows of n * ``length`` + 1 tokens as one of rows of ``length`` + 1 tokens.

    The rows of [B,...] are [B*n,...], those of one text after each other. A row begins with the
    last token of the row before.
    """
    whole = batch.tokens.shape[1] - 1

    def rows(x: Any) -> Any:
        parts = [x[:, start : start + length + 1] for start in range(0, whole, length)]
        return np.stack(parts, 1).reshape(-1, length + 1)

    return jax.tree.map(rows, batch)


def _fill(rows: Sequence[Sequence[Document]], length: int) -> Batch:
    shape = len(rows), length + 1
    # Any: Batch declares jax.Array; the training loop moves these arrays to the devices.
    tokens: Any = np.zeros(shape, np.int32)
    labelled: Any = np.zeros(shape, bool)
    segments: Any = np.zeros(shape, np.int32)
    for number, row in enumerate(rows):
        start = 0
        for segment, piece in enumerate(row, 1):
            place = np.s_[number, start : start + len(piece.ids)]
            tokens[place], labelled[place], segments[place] = piece.ids, piece.labelled, segment
            start += len(piece.ids)
    return Batch(tokens, labelled, segments)


def _check_some(parts: Sequence[Document]) -> None:
    if not parts:
        raise UserError(
            "no document has a token to learn; give documents of two tokens or more, with labels"
        )
