"""Falcon in decoding and in training against the plain reference; mutants."""

from __future__ import annotations

import functools
from typing import NamedTuple

import cases
import falcon_reference as reference
import jax
import numpy as np
import pytest
import reference_cases as shared
from eagle_reference import log_softmax
from internals import heads_falcon_loss as _falcon_loss
from mutants.falcon_heads import ALONG, LOSS, MISTAKES, PASS, ROUNDS

from specjax import drafters

SIZE, DEPTH = 2, 6
KEYS = {
    **{"block": SIZE, "head_dim": 8, "heads": 4, "kv_heads": 2, "qk_norm": True},
    **{"tree": "2x1x1x1x1x1", "siblings": "without_replacement"},
}
WEIGHTS = {"feature": 1.0, "weight": 0.7, "hard": 0.2, "noise": 0.0, "dropout": 0.0}


@functools.cache
def made():
    target, params = shared.target_of()
    drafter = cases.random_heads("falcon", target, params, scale=0.3, **KEYS)
    return drafters.make(
        "falcon", target, params=shared.sharpened(drafter.init_params(None)), **KEYS
    )


@functools.cache
def plain_of() -> reference.FalconNet:
    params, embedding = shared.wide(made().init_params(None)), shared.embedding()
    return reference.FalconNet(params, KEYS["head_dim"], SIZE, embedding, embedding.T)


def after(text, path):
    """The logits f64[V] of the reference; a text must have SIZE + 1 tokens."""
    return reference.after(plain_of(), text, shared.target_along(text).hidden[:-1], path)


def error_of_drafts(drafter) -> float:
    return shared.error_of_drafts(drafter, after, "recursive", SIZE + 1)


def error_along(drafter) -> float:
    """Of the drafts' and the target's logits along packed texts."""

    @jax.jit
    def along(params, batch):
        texts = _falcon_loss.along(*drafter.training.loss.args, params, batch, DEPTH)
        return [(logits, teacher) for _, logits, teacher in texts]

    found = jax.device_get(along(shared.pair_of(drafter), shared.batch_of()))
    logits, teachers = zip(*found, strict=True)
    worst = 0.0
    for each in shared.compared(after, DEPTH, SIZE + 1):
        worst = max(worst, shared.error_of_logits(logits, each.logits, each))
        worst = max(worst, shared.error_of_logits(teachers, each.teacher, each))
    return worst


class Row(NamedTuple):
    """The slots of a row of text: slot t has token t + 1 and the feature of token t."""

    documents: np.ndarray  # [T]
    tokens: np.ndarray  # [T]
    features: np.ndarray  # f64[T,D]
    labels: np.ndarray  # f64[T,V] the target's logits of token t + SIZE + 1
    ahead: np.ndarray  # f64[T,D] the target's feature of token t + SIZE
    inside: np.ndarray  # bool[T] whether that token is in the document


def row_of(row) -> Row:
    documents, tokens = np.array(shared.DOCUMENTS[row]), shared.TEXTS[row]
    features, logits = np.zeros((len(tokens), shared.WIDTH)), np.zeros((len(tokens), shared.VOCAB))
    for each in set(documents.tolist()):
        found = shared.target_along(tokens[documents == each])
        features[documents == each], logits[documents == each] = found.hidden, found.logits
    slots = np.arange(len(tokens) - 1)
    later = np.minimum(slots + SIZE, len(slots))
    inside = slots + SIZE + 1 < len(tokens)
    inside &= documents[np.minimum(slots + SIZE + 1, len(slots))] == documents[slots]
    own = documents[slots], tokens[1:], features[slots]
    return Row(*own, logits[later], features[later], inside)


class Blocks(NamedTuple):
    number: list[int]
    place: list[int]
    whole: np.ndarray


def blocks_of(documents, phase) -> Blocks:
    """The first whole block of a document begins at its slot ``phase``."""
    number, place, whole, slot = [], [], [], 0
    for index, document in enumerate(documents):
        slot = slot + 1 if index and document == documents[index - 1] else 0
        place.append((slot - phase) % SIZE)
        number.append(len(set(number)) - (place[-1] > 0 and slot > 0))
        whole.append(slot >= phase)
    return Blocks(number, place, np.array(whole))


def outputs(row: Row, blocks: Blocks, given):
    """[T,D]: the network's outputs; slots that are ``given`` read what they are to predict."""
    read = np.where(given, np.arange(len(given)) + SIZE, np.arange(len(given)))
    tokens, features = row.tokens[read], row.features[read]
    hidden = np.zeros_like(features)
    for document in set(row.documents.tolist()):
        slots = np.flatnonzero(row.documents == document)
        number = np.array(blocks.number)[slots]
        ends = [int(np.flatnonzero(number == each).max()) for each in number]
        hidden[slots] = reference.run(plain_of(), tokens[slots], features[slots], ends)
    return hidden


def answers(blocks: Blocks, counted, order, runs, count):
    """The slots that are given: the first of blocks in ``order``, until there are ``count``."""
    given = np.zeros(len(counted), bool)
    for block in np.argsort(order):
        for slot in np.flatnonzero(np.array(blocks.number) == block):
            if counted[slot] and blocks.place[slot] < runs[block] and given.sum() < count:
                given[slot] = True
    return given


def loss_of_reference(key, glancing: float) -> float:
    """The formula, with the reference's outputs and the random numbers of specjax."""
    keys, (count, length) = jax.random.split(key, 4), shared.TEXTS.shape
    phases = np.asarray(jax.random.randint(keys[0], (count,), 0, SIZE))
    drawn, ordered = jax.random.split(keys[2])
    order = np.asarray(jax.random.uniform(ordered, (count, length - 1)))
    runs = np.asarray(jax.random.randint(drawn, (count, length - 1), 1, max(SIZE - 1, 1) + 1))
    values, table = [], shared.embedding().T
    for number in range(count):
        row = row_of(number)
        blocks = blocks_of(row.documents, phases[number])
        counted, best = row.inside & blocks.whole, row.labels.argmax(-1)
        first = outputs(row, blocks, np.zeros(length - 1, bool)) @ table
        wrong = counted & (first.argmax(-1) != best)
        most = int(glancing * wrong.sum())
        given = answers(blocks, counted, order[number], runs[number], most)
        hidden = outputs(row, blocks, given)
        p, q = log_softmax(row.labels), log_softmax(hidden @ table)
        far = np.abs(hidden - row.ahead)
        value = np.where(far < 1, far * far / 2, far - 0.5).mean(-1)
        value += 0.7 * 0.8 * (np.exp(p) * (p - q)).sum(-1)
        value -= 0.7 * 0.2 * q[np.arange(length - 1), best]
        values += value[counted].tolist()
    return float(np.mean(values))


def error_of_loss(drafter) -> float:
    """Relative, without answers and with some of them."""
    loss = jax.jit(functools.partial(drafter.training.loss, **WEIGHTS, glancing=0.6))
    params, worst = shared.pair_of(drafter), 0.0
    for seed in (2, 5):  # the blocks of both documents of a row begin at slots 0 and 1
        key = jax.random.key(seed)
        value = loss(params.draft, params.target, shared.batch_of(), key)[0]
        worst = max(worst, abs(float(value) / loss_of_reference(key, 0.6) - 1))
    return worst


ERRORS = {PASS: error_along, ROUNDS: error_of_drafts, ALONG: error_along, LOSS: error_of_loss}


@pytest.mark.parametrize("part", [ROUNDS, ALONG, LOSS])
def test_drafts_and_training_are_those_of_the_reference(part):
    """Rounds with rejections; drafts along packed texts; the loss with answers."""
    assert ERRORS[part](made()) < 1e-4


def test_names_are_unique():
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_mistakes_are_detected(mistake, monkeypatch):
    """By the tests above, whose limit is 1e-4."""
    plain_of()
    mistake.change(monkeypatch)
    # Another name: the programs of the right drafter are not used again.
    drafter = made.__wrapped__()._replace(name=mistake.name)
    assert ERRORS[mistake.caught_by](drafter) > 5e-4
