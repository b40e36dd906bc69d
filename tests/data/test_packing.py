"""Whole documents packed into rows with masks."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import testing
from specjax.data import packing
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import Batch

fast = pytest.mark.fast


def document(start: int, labels: str) -> Document:
    """Token ids that no other document has; "x" marks those to learn."""
    return Document(
        np.arange(start, start + len(labels), dtype=np.int32),
        np.array([c == "x" for c in labels], bool),
    )


@st.composite
def corpus(draw) -> list[Document]:
    masks = draw(st.lists(st.text("x.", max_size=40), min_size=1, max_size=30))
    return [document(1000 * n + 1, mask) for n, mask in enumerate([*masks, "xxx"])]


def same(first, second) -> bool:
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def learnt(batch) -> list[int]:
    return batch.tokens[batch.labelled].tolist()


def expected(documents) -> list[int]:
    """Every labelled token except the first of a document, which has no context."""
    return sorted(int(i) for ids, labelled in documents for i in ids[1:][labelled[1:]])


@fast
@settings(max_examples=60, deadline=None)
@given(corpus(), st.integers(1, 20), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_an_epoch_has_every_label_once(documents, length, seed, batch_size, windows):
    context = length // 2 if windows else 0
    try:
        packed = packing.Packed(documents, batch_size, length, seed, context)
    except UserError as error:
        assert "fewer than one batch" in str(error)
        return
    batches = [packed.batch(step) for step in range(2 * packed.rows)]  # batch_size epochs, twice
    for epochs in (batches[: packed.rows], batches[packed.rows :]):
        assert sorted(token for batch in epochs for token in learnt(batch)) == sorted(
            expected(documents) * batch_size
        )
    following = {int(b): int(a) for ids, _ in documents for a, b in itertools.pairwise(ids)}
    for batch in batches:
        arrays = (batch.tokens, batch.labelled, batch.segments)
        assert {array.shape for array in arrays} == {(batch_size, length + 1)}
        assert [array.dtype for array in arrays] == [np.int32, bool, np.int32]
        for tokens, labelled, segments in zip(*arrays, strict=True):
            # Padding is at the end.
            used = int((segments > 0).sum())
            assert (segments[used:] == 0).all() and not labelled[segments == 0].any()
            # The numbers of the documents are 1, 2, ...
            steps = np.diff(segments[:used])
            assert segments[0] == 1 and set(steps.tolist()) <= {0, 1}
            # The context of a label is in its own document.
            for place in np.flatnonzero(labelled):
                assert place > 0 and segments[place] == segments[place - 1]
                assert following[int(tokens[place])] == tokens[place - 1]
                # A document before it is as long as the context, or begins with its first token.
                start = place - int((segments[:place] == segments[place]).sum())
                assert tokens[start] % 1000 == 1 or place - start > context
    again = packing.Packed(documents, batch_size, length, seed, context)
    for step in (len(batches) - 1, 0):  # a batch does not depend on the batches made before
        assert same(again.batch(step), batches[step])


@fast
def test_documents_stay_whole_and_long_ones_are_cut():
    documents = [
        document(100, "x" * 5),
        document(200, ".x" * 3),
        document(300, "x"),
        document(400, "x" * 12),
    ]
    parts = packing.pieces(documents, 5)
    assert [part.ids.tolist() for part in parts] == [
        [*range(100, 105)],
        [*range(200, 206)],
        [*range(400, 406)],
        [*range(405, 411)],  # begins with the last token of the piece before it
        [410, 411],
    ]
    assert not any(part.labelled[0] for part in parts)
    assert documents[0].labelled[0]  # the argument is not changed
    packed = packing.Packed(documents, 1, 5)
    assert packed.rows == 5
    rows = {tuple(packed.batch(step).tokens[0]) for step in range(5)}
    assert (410, 411, 0, 0, 0, 0) in rows and tuple(range(400, 406)) in rows


@fast
def test_windows_have_context():
    documents = [document(100, "x" * 5), document(200, "." * 4 + "x" * 8)]
    parts = packing.pieces(documents, 6, 3)
    assert [part.ids.tolist() for part in parts] == [
        [*range(100, 105)],
        [*range(200, 207)],
        [*range(203, 210)],
        [*range(206, 212)],
    ]
    learnt = [part.ids[part.labelled].tolist() for part in parts]
    assert learnt == [[101, 102, 103, 104], [204, 205, 206], [207, 208, 209], [210, 211]]
    assert packing.about_windows(documents, 6, 3) == (
        "1 of 2 texts have more than 7 tokens: 5 of 12 labels are in later windows, behind 4 tokens"
    )
    assert packing.about_windows(documents, 12, 6) == ""


@fast
def test_rows_of_a_text():
    """Rows of one text follow each other, and begin with the last token of the row before."""
    batch = Batch(np.arange(26).reshape(2, 13), np.arange(26).reshape(2, 13) % 2 == 0)
    cut = packing.cut(batch, 4)
    assert cut.tokens.tolist() == [[*range(start, start + 5)] for start in (0, 4, 8, 13, 17, 21)]
    np.testing.assert_array_equal(cut.labelled, cut.tokens % 2 == 0)
    assert cut.segments is None


@fast
def test_epochs_and_seeds_differ():
    documents = [document(100 * n + 1, "x" * (3 + n % 3)) for n in range(40)]
    first, second = packing.Packed(documents, 2, 8, seed=0), packing.Packed(documents, 2, 8, seed=1)
    epochs = first.rows // 2 + 1
    assert not np.array_equal(first.batch(0).tokens, first.batch(epochs).tokens)
    assert not np.array_equal(first.batch(0).tokens, second.batch(0).tokens)


@fast
def test_little_is_wasted():
    random = np.random.default_rng(0)
    for sizes in (
        random.integers(10, 512, 3000),
        np.clip(random.lognormal(5, 0.6, 3000), 2, 513).astype(int),
    ):
        plan = packing.best_fit(sizes, 513)
        ordered = -np.sort(-sizes)
        assert max(sum(ordered[rank] for rank in row) for row in plan) <= 513
        assert sorted(rank for row in plan for rank in row) == list(range(3000))
        assert 1 - sizes.sum() / (len(plan) * 513) < 0.05


@fast
def test_too_few_documents():
    with pytest.raises(UserError, match="fill 1 rows of 9 tokens, fewer than one batch of 2"):
        packing.Packed([document(1, "xxx")] * 3, 2, 8)
    with pytest.raises(UserError, match="length of a row is 0"):
        packing.Packed([document(1, "xxx")], 1, 0)
    for documents in ([], [document(1, "x")], [document(1, "x..")]):
        for make in (lambda d: packing.Packed(d, 1, 8), lambda d: packing.held_out(d, 1, 8, 1)):
            with pytest.raises(UserError, match="no document has a token to learn"):
                make(documents)


@fast
def test_held_out_documents():
    documents = [document(100 * n + 1, "." + "x" * (2 + n % 7)) for n in range(50)]
    whole = packing.held_out(documents, 2, 8, 1000)
    assert all(batch.tokens.shape == (2, 9) for batch in whole)
    seen = [token for batch in whole for token in learnt(batch)]
    # All labels except those of an incomplete batch.
    assert len(set(seen)) == len(seen) and len(seen) > 0.9 * len(expected(documents))
    some = packing.held_out(documents, 2, 8, 3)
    assert len(some) == 3
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(some, whole, strict=False))
    [one] = packing.held_out(documents[:2], 4, 8, 3)  # fewer than a batch: rows of padding
    assert one.tokens.shape == (4, 9) and sorted(learnt(one)) == expected(documents[:2])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_row_reads_as_each_document_alone(family):
    model, params = testing.tiny(family, scale=2.0, layers=1)
    random = np.random.default_rng(0)
    documents = [
        Document(random.integers(1, 32, n).astype(np.int32), np.ones(n, bool))
        for n in (9, 4, 7, 5, 11, 3)
    ]
    packed = packing.Packed(documents, 2, 19)
    batch = packed.batch(0)
    assert batch.segments.max() >= 2 and packed.rows == 2
    forward = jax.jit(
        lambda tokens, segments=None: lm.forward(model, params, tokens, segments).logits
    )
    packed_logits, alone = forward(batch.tokens, batch.segments), np.zeros((1, 20), np.int32)
    for row, segments in enumerate(batch.segments):
        for number in range(1, segments.max() + 1):
            there = segments == number
            alone[0, : there.sum()] = batch.tokens[row, there]
            own_logits = forward(alone)[0, : there.sum()]
            assert np.allclose(own_logits, packed_logits[row, there], atol=1e-5)
