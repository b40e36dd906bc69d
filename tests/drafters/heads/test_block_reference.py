"""The block network against a reference in plain NumPy: rounds, training, and mutants."""

from __future__ import annotations

import functools
import json

import block_golden_cases as goldens
import block_reference as reference
import cases
import golden_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_cases as shared
from eagle_reference import log_softmax
from internals import heads_block as _block
from internals import network_of
from marks import by_default
from mutants.block_heads import DRAFTING, MISTAKES
from reference_cases import VOCAB, WIDTH

from specjax import accept, drafters, step
from specjax.models import hf
from specjax.testing import loop
from specjax.types import Batch, ModelParams

# Programs are shared with test_block_head.py.
pytestmark = pytest.mark.xdist_group("block_head")

GROUPED = {"heads": 4, "kv_heads": 2, "head_dim": 8}
ANCHORED = {"block": 3, "anchor": True, "rank": 4}
# Method -> keys of a network as it is published, in small.
METHODS = {
    "dflash": {"block": 4, "layers": 2, "qk_norm": True, "window": 3, "taps": "0,2", **GROUPED},
    "dspark": {"correction": "markov", "confidence": True, "mask_id": 5, **ANCHORED},
    "gated": {"correction": "gated", "taps": "3", **ANCHORED},
    "rnn": {"correction": "rnn", "qk_norm": True, "confidence": True, **ANCHORED},
    "domino": {"correction": "gru", "state": 6, "causal": True, **ANCHORED},
    "dflare": {
        "block": 4,
        "layers": 2,
        "causal": True,
        "context": "mixed",
        "taps": "3,0,1",
        "qk_norm": True,
        **GROUPED,
    },
    "dflash2": {
        "block": 4,
        "layers": 2,
        "conv": 2,
        "conv_group": 8,
        "correction": "selector",
        "rank": 4,
        "candidates": 5,
        "taps": "0,2",
    },
    "xpress": {"block": 4, "correction": "refiner", "rank": 4, "mask_id": 5},
    "xpress anchored": {"correction": "refiner", "taps": "3", "expansion": 1, **ANCHORED},
}
# Method -> further keys of the loss.
LOSSES = {
    "dspark": {"confidence": 1.0},
    "rnn": {"confidence": 1.0},
    "dflash2": {"selector": 0.8},
    "xpress": {"uncorrected": 0.6, "consistency": 0.3, "passes": 2},
    "xpress anchored": {"consistency": 0.3, "passes": 1},
}
# Their drafts are compared by default; the others draft with the same functions.
DRAFTED = ("dflash", "domino", "dflash2", "xpress")


@functools.cache
def made(method):
    """The drafter with random parameters; that of DSpark has its own embeddings and head."""
    target, params = shared.target_of()
    keys = {"siblings": "iid"} | METHODS[method]
    drafter = cases.random_heads("block_head", target, params, scale=0.4, **keys)
    params = shared.sharpened(drafter.init_params(None))
    if method == "dspark":
        draw = 0.2 * np.random.default_rng(1).normal(size=(2, VOCAB, WIDTH)).astype(np.float32)
        params |= {"embed": {"embedding": draw[0]}, "head": {"kernel": draw[1].T}}
    return drafters.make("block_head", target, params=params, **keys)


@functools.cache
def plain_of(method) -> reference.BlockNet:
    """The same network for the reference, with the keys of ``METHODS``."""
    keys, embedding = METHODS[method], shared.embedding()
    anchor, layers = keys.get("anchor", False), keys.get("layers", 1)
    return reference.BlockNet(
        shared.wide(made(method).init_params(None)),
        keys.get("head_dim", 8),
        embedding,
        embedding.T,
        tokens=keys["block"] - (not anchor),
        anchor=anchor,
        causal=keys.get("causal", False),
        windows=(*(keys.get("window"),) * (layers - 1), None),
        mask_id=keys.get("mask_id"),
        plain=1 if keys.get("correction") == "gru" else 0,
        candidates=keys.get("candidates", 0),
    )


def expected(method, text, path) -> reference.Drafted:
    """The draft after a text, of which ``path`` are the first tokens."""
    net, taps = plain_of(method), [int(tap) for tap in METHODS[method].get("taps", "2").split(",")]
    context, tokens = shared.target_along(text).taps[:-1, taps], [*path, *[0] * net.tokens]
    return reference.draft(net, context, *text[-2:], tokens[: net.tokens])


def error_of_drafts(method, drafter) -> float:
    return shared.error_of_drafts(
        drafter, lambda text, path: expected(method, text, path).logits[len(path)]
    )


def term(method, weights, each) -> float:
    """The loss of one label with these weights beside ``shared.WEIGHTS``."""
    path, text, depth = each.where.rest[: each.depth], each.where.text, each.depth
    drafted, decay = expected(method, text, path), 0.5**each.depth

    def of(logits) -> float:
        return shared.depth_term(each._replace(draft=log_softmax(logits)))

    if "selector" in weights:
        block, best = drafted.block[depth], each.teacher.argmax()
        ids = np.argsort(-block, kind="stable")[: METHODS[method]["candidates"]]
        ids[-1] = ids[-1] if best in ids else best
        wrong = -log_softmax(drafted.every[depth][ids])[list(ids).index(best)]
        return of(block) + decay * weights["selector"] * wrong
    total = of(drafted.logits[depth])
    if "confidence" in weights:
        # The cross-entropy with the probability that the target accepts.
        alpha, sure = np.minimum(np.exp(each.target), np.exp(each.draft)).sum(), drafted.confidence
        total += decay * (np.log1p(np.exp(sure[depth])) - alpha * sure[depth])
    total += weights.get("uncorrected", 0) * of(drafted.block[depth])
    preferred = drafted.block.argmax(-1)
    for _ in range(weights.get("passes", 0)):
        own = expected(method, text, preferred).logits
        preferred = own.argmax(-1)
        total += weights["consistency"] / weights["passes"] * of(own[depth])
    return total


def error_of_training(method, drafter) -> float:
    """Of the logits along packed texts, and of the loss."""
    net, more = plain_of(method), LOSSES.get(method, {})
    weights = shared.WEIGHTS | more

    @jax.jit
    def train(params, batch):
        tapped = shared.target_of()[0].with_taps(drafter.taps)
        texts = _block.along(network_of(drafter), tapped, params, batch, net.tokens)
        own = params.draft, params.target, batch, jax.random.key(0)
        return [logits for _, logits, _ in texts], drafter.training.loss(*own, **weights)[0]

    def value(each):
        return term(method, more, each)

    logits, loss = jax.device_get(train(shared.pair_of(drafter), shared.batch_of()))
    return shared.error_of_training(
        logits,
        loss,
        lambda text, path: expected(method, text, path).logits[len(path)],
        net.tokens,
        value,
    )


@pytest.mark.parametrize("method", by_default(METHODS, DRAFTED))
def test_drafts_in_rounds_are_those_of_the_reference(method):
    """After a prefill of ragged rows, and after rounds in which tokens were rejected."""
    assert error_of_drafts(method, made(method)) < 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_training_sees_the_logits_of_the_reference(method):
    """In packed texts, at every place of a document; the loss is the formula."""
    assert error_of_training(method, made(method)) < 1e-4


def test_names_are_unique():
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names) >= 40


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_mistakes_are_detected(mistake, monkeypatch):
    """By the tests above, whose limit is 1e-4."""
    error = error_of_drafts if mistake in DRAFTING else error_of_training
    assert shared.error_with(mistake, monkeypatch, made, plain_of, error) > 5e-4


GOLDENS = json.loads(goldens.FILE.read_text())


@pytest.mark.parametrize("method", goldens.METHODS)
def test_drafts_are_those_of_the_speculators_library(method, tmp_path):
    """In greedy rounds of ragged rows, and the logits after the tokens of each draft."""
    case, texts = GOLDENS[method], GOLDENS["texts"]
    for name, own in (("target", GOLDENS["target"]), ("head", case)):
        golden_cases.write(tmp_path / name, own["config"], own["shapes"])
    target, own, *_ = hf.load(tmp_path / "target", dtype=jnp.float32)
    drafter = drafters.make("block_head", target, model=tmp_path / "head")
    params, new = ModelParams(own, drafter.init_params(None)), goldens.ROUNDS
    state = loop.begin(target, drafter, params, goldens.PROMPTS, new, 0, temperature=0.0)
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, accept.load("chain")))
    compared = 0
    for _ in range(new):
        before = state
        state, info = play(params, state)
        lengths, tokens = np.asarray(before.length), np.asarray(before.tokens)
        for row in np.flatnonzero(~np.asarray(before.done)):
            assert tokens[row, : lengths[row]].tolist() == texts[row][: lengths[row]]
            right = case["drafts"][row][str(lengths[row])]["tokens"]
            assert np.asarray(info.draft.tokens[row]).tolist() == right
            compared += 1
    assert compared >= 9 and np.asarray(state.done).all()
    rows = zip(texts, case["drafts"], strict=True)
    flat = [(text, *each) for text, drafts in rows for each in drafts.items()]
    padded = np.zeros((len(flat), max(map(len, texts)) + goldens.BLOCK), np.int32)
    for row, (text, length, right) in enumerate(flat):
        path = [*text[: int(length)], *right["tokens"]]
        padded[row, : len(path)] = path

    @jax.jit
    def along(params, tokens):
        tapped, depth = target.with_taps(drafter.taps), drafter.longest
        found = _block.along(network_of(drafter), tapped, params, Batch(tokens), depth)
        return jnp.stack([logits for _, logits, _ in found], 2)

    found = np.asarray(along(params, padded))
    for row, (_, length, right) in enumerate(flat):
        expected = np.array(right["logits"], float)
        expected[np.isnan(expected)] = -np.inf
        np.testing.assert_allclose(found[row, int(length) - 2], expected, rtol=0, atol=1e-4)
