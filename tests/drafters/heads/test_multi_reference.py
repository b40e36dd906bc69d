"""Heads on the target's last feature against the plain references; mutants."""

from __future__ import annotations

import functools

import cases
import jax
import multi_reference as reference
import numpy as np
import pytest
import reference_cases as shared
from internals import heads_heads as _heads
from marks import by_default
from mutants.multi_heads import DRAFTING, MISTAKES

from specjax import drafters

DEPTH = 3
CHAIN = {"heads": DEPTH, "gamma": DEPTH, "siblings": "iid"}
# Label -> keys of the heads.
FORMS = {
    "medusa": {"layers": 2},
    "bpd": {"inner": 6},
    "bpd, joint": {"inner": 6, "layer": "joint"},
    "hydra": {"layers": 2, "prefix": True, "head_dim": 8},
    "mlp_speculator": {"scale_input": True},
    "redrafter": {"layers": 2},
    "mtp": {},
}
# Their drafts are compared by default; the others draft with the same functions.
DRAFTED = ("medusa", "hydra", "mtp")


@functools.cache
def made(label):
    (target, params), name = shared.target_of(), label.split(",")[0]
    keys = CHAIN | FORMS[label]
    own = cases.random_heads(name, target, params, scale=0.3, **keys).init_params(None)
    return drafters.make(name, target, params=shared.sharpened(own), **keys)


@functools.cache
def plain_of(label) -> reference.Heads:
    drafter, embedding = made(label), shared.embedding()
    facts = dict(drafter.training.facts)
    return reference.Heads(
        shared.wide(drafter.init_params(None)),
        embedding,
        embedding.T,
        facts.get("head_dim", 0),
        np.asarray(shared.target_of()[1]["norm"]["scale"], np.float64),
        scale_input=label == "mlp_speculator",
        stages=DEPTH,
    )


def after(label, text, path):
    """The logits f64[V] of the reference."""
    found = shared.target_along(text)
    features = found.taps[:-1, -2] if label == "mtp" else found.hidden[:-1]
    read = getattr(reference, label.split(",")[0])
    return read(plain_of(label), features, [text[-1], *path])


def error_of_drafts(label, drafter) -> float:
    return shared.error_of_drafts(drafter, functools.partial(after, label))


def error_of_training(label, drafter) -> float:
    """Of the logits along packed texts, and of the loss."""

    @jax.jit
    def train(params, batch):
        texts = _heads.along(*drafter.training.loss.args, params, batch, DEPTH)
        read = params.draft, params.target, batch, jax.random.key(0)
        loss = drafter.training.loss(*read, **shared.WEIGHTS)[0]
        return [logits for _, logits, _ in texts], loss

    logits, loss = jax.device_get(train(shared.pair_of(drafter), shared.batch_of()))
    read = functools.partial(after, label)
    return shared.error_of_training(logits, loss, read, DEPTH, shared.depth_term)


@pytest.mark.parametrize("label", by_default(FORMS, DRAFTED))
def test_drafts_in_rounds_are_those_of_the_reference(label):
    """After a prefill of ragged rows, and after rounds in which tokens were rejected."""
    assert error_of_drafts(label, made(label)) < 1e-4


@pytest.mark.parametrize("label", FORMS)
def test_training_sees_the_logits_of_the_reference(label):
    """In packed texts, at every place of a document; the loss is the formula."""
    assert error_of_training(label, made(label)) < 1e-4


def test_names_are_unique():
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_mistakes_are_detected(mistake, monkeypatch):
    """By the tests above, whose limit is 1e-4."""
    error = error_of_drafts if mistake in DRAFTING else error_of_training
    assert shared.error_with(mistake, monkeypatch, made, plain_of, error) > 5e-4
