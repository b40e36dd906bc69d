"""EAGLE's networks in decoding and in training against the plain references; mutants."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cases
import eagle_reference as reference
import jax
import mtp_reference
import numpy as np
import pytest
import reference_cases as shared
from internals import heads_masked_text as _masked_text
from internals import heads_rollout as _rollout
from internals import network_of
from marks import by_default
from mutants.eagle_heads import DRAFTING, MISTAKES
from reference_cases import VOCAB

from specjax import drafters

SMALL = {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": True}
IDS = (0, 2, 3, 5, 7, 8, 11, 13, 14)
CHAIN = {"gamma": 3, "siblings": "iid"}
ODD = {"hidden_first": True, "hidden": "raw", "recycled": "raw", "zero_first": True}
DEPTH, MASK = 3, 6


class Form(NamedTuple):
    """A drafter of a network."""

    name: str
    keys: dict[str, Any]
    loss: dict[str, Any]  # the keys of the loss
    rule: str = "chain"


FORMS = {
    "eagle": Form("eagle", CHAIN, {"steps": 3, "decay": 0.5, "feature": 2.0, "weight": 0.7}),
    "eagle3": Form(
        "eagle3",
        {
            **SMALL,
            **{"fc_norm": True, "norm_output": True, "draft_ids": IDS, "taps": "3,0"},
            **{"tree": "2x1x1", "siblings": "without_replacement"},
        },
        {"steps": 3, "decay": 0.5, "weight": 0.7, "ce": 0.3},
        "recursive",
    ),
    "p_eagle": Form(
        "eagle3",
        {"parallel": DEPTH, "layers": 2, "draft_ids": IDS, "mask_id": MASK, "taps": "1,2"},
        {"ce": 0.3, "teacher": 0.7, "decay": 0.5, "keep": 1.0},
    ),
    "mtp_module": Form(
        "mtp_module", {"modules": 2, **ODD, **CHAIN}, {"steps": 3, "decay": 0.5, "weight": 0.7}
    ),
}


@functools.cache
def made(label):
    target, params = shared.target_of()
    name, keys = FORMS[label][:2]
    scale = 0.12 if label == "eagle" else 0.3  # its outputs have no norm
    drafter = cases.random_heads(name, target, params, scale=scale, **keys)
    return drafters.make(name, target, params=shared.sharpened(drafter.init_params(None)), **keys)


@functools.cache
def plain_of(label):
    """The same network for the reference, with the keys of ``FORMS``."""
    keys, embedding = FORMS[label].keys, shared.embedding()
    own = shared.wide(made(label).init_params(None)), keys.get("head_dim", 8)
    ends = embedding, embedding.T
    if label == "mtp_module":
        return mtp_reference.Modules(*own, *ends, True, "raw", True)
    return reference.Plain(
        *own, *ends, keys.get("draft_ids"), norm_output=keys.get("norm_output", False)
    )


def features_of(label, text):
    """[n-1,D]: what the network reads of the target for all tokens but the pending one."""
    found, keys = shared.target_along(text), FORMS[label].keys
    if label == "mtp_module":
        return found.taps[:-1, -1]
    taps = [int(tap) for tap in keys["taps"].split(",")] if "taps" in keys else []
    return reference.read(plain_of(label), found.hidden[:-1], found.taps[:-1, taps])


def after(label, text, path):
    """The logits f64[V] of the reference."""
    net, features = plain_of(label), features_of(label, text)
    if label == "mtp_module":
        return mtp_reference.after(net, text, features, path)
    if label != "p_eagle":
        return reference.after(net, text, features, path)
    # One causal pass over the slots of the text and masks.
    unknown = np.asarray(net.params["mask_hidden"]).reshape(1, 2, -1)
    masks = reference.read(net, None, unknown).repeat(len(path), 0)
    tokens = [*text[1:], *[MASK] * len(path)]
    hidden, _ = reference.run(net, tokens, np.concatenate([features, masks]))
    return reference.logits(net, hidden[-1], VOCAB)


def error_of_drafts(label, drafter) -> float:
    return shared.error_of_drafts(drafter, functools.partial(after, label), FORMS[label].rule)


def smooth_l1(x):
    return np.where(np.abs(x) < 1, x * x / 2, np.abs(x) - 0.5).mean()


def term(label, each: shared.Compared) -> float:
    """What a label adds to the loss."""
    keys, ids = FORMS[label].loss, list(FORMS[label].keys.get("draft_ids", range(VOCAB)))
    known, best = each.label in ids, each.target.argmax() in ids
    q, p = each.draft[ids], reference.log_softmax(each.target[ids])
    ce = -keys.get("ce", 0) * q[ids.index(each.label)] if known else 0
    value = keys.get("weight", keys.get("teacher", 0)) * (np.exp(p) * (p - q)).sum() * best
    if label == "p_eagle":
        # One that is left out by one of the terms is left out by both.
        return keys["decay"] ** each.depth * (ce + value) * (known and best)
    if "feature" in keys:
        text, path = each.where.text, each.where.rest[: each.depth]
        features = features_of(label, text)
        _, recycled = reference.newest(plain_of(label), text, features, path)
        label_of = shared.target_along([*text, *path]).hidden[-1]
        value += keys["feature"] * smooth_l1(recycled - label_of)
    return keys["decay"] ** each.depth * (ce + value)


def error_of_training(label, drafter) -> float:
    """Of the logits along packed texts, and of the loss."""
    keys = FORMS[label].loss | ({} if label == "p_eagle" else {"noise": 0.0})

    @jax.jit
    def train(params, batch):
        own, target = network_of(drafter), shared.target_of()[0]
        if label == "p_eagle":
            texts = _masked_text.along(own, params, batch, DEPTH)
        else:
            tapped = target.with_taps(own.shape.taps) if own.shape.taps else target
            texts = _rollout.along(own, tapped, params, batch, DEPTH)
        read = params.draft, params.target, batch, jax.random.key(0)
        return [logits for _, logits, _ in texts], drafter.training.loss(*read, **keys)[0]

    logits, loss = jax.device_get(train(shared.pair_of(drafter), shared.batch_of()))
    return shared.error_of_training(
        logits, loss, functools.partial(after, label), DEPTH, functools.partial(term, label)
    )


@pytest.mark.parametrize("label", by_default(FORMS, ("eagle3", "p_eagle", "mtp_module")))
def test_drafts_in_rounds_are_those_of_the_reference(label):
    """After a prefill of ragged rows, and after rounds in which tokens were rejected."""
    assert error_of_drafts(label, made(label)) < 1e-4


@pytest.mark.parametrize("label", FORMS)
def test_training_sees_the_logits_of_the_reference(label):
    """In packed texts, at every place of a document; the loss is the formula."""
    assert error_of_training(label, made(label)) < 1e-4


def test_names_are_unique():
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names) >= 30


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_mistakes_are_detected(mistake, monkeypatch):
    """By the tests above, whose limit is 1e-4."""
    error = error_of_drafts if mistake in DRAFTING else error_of_training
    assert shared.error_with(mistake, monkeypatch, made, plain_of, error) > 5e-4
