"""PARD: the masks in the draft model's input, ragged rounds, law, training, errors."""

from __future__ import annotations

import functools

import cases
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from internals import heads_masked_text as _masked_text

from specjax import accept, drafters, step, testing
from specjax.drafters.draft_models import pard
from specjax.errors import UserError
from specjax.models import hf, lm
from specjax.testing import loop
from specjax.testing.claims import widen
from specjax.types import Batch, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "pard": ("pard", {"model": "@draft", "gamma": 2, "mask_id": 0}, ("block",)),
    "pard tree": (
        "pard",
        {"model": "@draft", "mask_id": 0, "tree": "best_first", "nodes": 4, "depth": 2},
        (),
    ),
}

VOCAB, MASK, GAMMA = 16, 15, 3
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3]]


@functools.cache
def models():
    target = testing.tiny("llama", 0, 8.0, vocab_size=VOCAB)
    return *target, *testing.tiny("llama", 1, 8.0, layers=2, vocab_size=VOCAB)


def made(**keys):
    target, params, model, own = models()
    keys = {"gamma": GAMMA} | keys
    drafter = drafters.make("pard", target, model=model, mask_id=MASK, params=own, **keys)
    return drafter, ModelParams(params, own)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens):
    return lm.forward(model, params, tokens).logits[0]


def test_masks_follow_the_text_in_ragged_rounds():
    """The probs of a draft are those of the text with masks behind it, read at once."""
    drafter, params = made()
    target, _, model, own = models()
    state = loop.begin(target, drafter, params, PROMPTS, 24, 0, temperature=1.0)
    rule = accept.load("chain")
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, rule))
    accepted = 0
    for _ in range(5):
        before = state
        state, info = play(params, state)
        accepted += int(info.accepted.sum())
        for row, length in enumerate(np.asarray(before.length)):
            text = np.zeros((1, 48), np.int32)
            text[0, :length] = before.tokens[row, :length]
            text[0, length : length + GAMMA - 1] = MASK
            right = jax.nn.softmax(_logits(model, own, jnp.asarray(text)))
            np.testing.assert_allclose(
                info.draft.probs[row], right[length - 1 : length + GAMMA - 1], atol=3e-5
            )
    assert accepted


def test_layout_of_a_ragged_block():
    layout = _masked_text.layout_of_draft(jnp.asarray([1, 3]), 3, 2)
    assert layout.depth.tolist() == [[0, 1, 2, 1, 2], [0, 1, 2, 3, 4]]
    assert layout.visible[0, 3].tolist() == [True, False, False, True, False]
    assert layout.visible[0, 4].tolist() == [True, False, False, True, True]
    assert layout.visible[1, 4].tolist() == [True] * 5
    assert layout.visible[1, 1].tolist() == [True, True, False, False, False]


def test_forecast_is_that_of_drafting():
    """Along a text, at every place: the logits of the text with masks behind it."""
    _, params = made()
    target, _, model, own = models()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 10)).astype(np.int32)
    reader = pard.reader_of(target, model, MASK)
    texts = jax.jit(
        lambda params, batch, depth: list(_masked_text.along(reader, params, batch, depth)),
        static_argnums=2,
    )
    every = list(texts(params, Batch(jnp.asarray(tokens)), GAMMA))
    for place in (0, 4, 8):
        text = np.zeros((1, 48), np.int32)
        text[0, : place + 1] = tokens[0, : place + 1]
        text[0, place + 1 : place + GAMMA] = MASK
        right = _logits(model, own, jnp.asarray(text))
        for depth, (_, logits, _) in enumerate(every):
            np.testing.assert_allclose(logits[0, place], right[place + depth], atol=1e-4)
    # Inside a document: the second one, read alone.
    packed = Batch(jnp.asarray(tokens), segments=jnp.asarray([[0] * 4 + [1] * 6]))
    alone = Batch(jnp.asarray(tokens[:, 4:]))
    for (_, ours, _), (_, right, _) in zip(
        texts(params, packed, GAMMA), texts(params, alone, GAMMA), strict=True
    ):
        np.testing.assert_allclose(ours[0, 6], right[0, 2], atol=1e-4)


LAWS = {
    "chain": ({"gamma": 3}, "chain"),
    "tree": ({"tree": "2x1", "siblings": "without_replacement"}, "recursive"),
    "best first": ({"tree": "best_first", "nodes": 4, "depth": 2}, "traversal"),
    "control": ({"gamma": 2, "control": "threshold:0.4"}, "block"),
}


def law_error(keys, rule, change=lambda drafter: drafter, **settings) -> float:
    target, draft, _ = cases.models()
    with jax.enable_x64(True):
        drafter = change(drafters.make("pard", target, model=draft, mask_id=1, **keys))
        params = jax.tree.map(widen, ModelParams(cases.table(0), cases.table(1)))
        return growth_cases.law_error(drafter, rule, target, params, **settings)


# The kit proves the law of the cases of testing/cases.py by default.
@pytest.mark.slow
@pytest.mark.parametrize("label", list(LAWS))
def test_exact_law(label):
    keys, rule = LAWS[label]
    for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
        assert law_error(keys, rule, **settings) < growth_cases.EXACT


def test_probs_of_another_depth_are_caught():
    """A wrong drafter declares the probs of the first depth for all."""

    def wrong(drafter):
        def propose(params, keys, context, state):
            draft, new = drafter.propose(params, keys, context, state)
            return draft.replace(probs=jnp.broadcast_to(draft.probs[:, :1], draft.probs.shape)), new

        return drafter._replace(propose=propose)

    assert law_error({"gamma": 2}, "chain", wrong, temperature=1.0) > 1e-3


# Training ---------------------------------------------------------------------------------------


def test_deeper_masks_are_dropped_together_with_those_below():
    """Shares are of the entries with a label; other masks are after the last entry."""
    labelled = np.ones((2, 11), bool)
    labelled[1, :6] = False  # entries 5 to 9 have a label
    batch, made = Batch(jnp.zeros((2, 11), jnp.int32), jnp.asarray(labelled)), []

    def draw(key):
        made.append(_masked_text.random_masks(key, batch, 1, [0.7, 0.49, 0.2, 0.2]))
        return made[0].places

    places, depths = np.asarray(jax.jit(draw)(jax.random.key(0))), made[0].depths
    assert [int((depths == depth).sum()) for depth in range(1, 5)] == [7, 5, 2, 2]
    for row, above, counts in (
        (places[0], set(range(10)), [7, 5, 2, 2]),
        (places[1], set(range(5, 10)), [4, 2, 1, 1]),
    ):
        for depth, count in enumerate(counts, 1):
            every = row[depths == depth].tolist()
            here, others = every[:count], every[count:]
            assert len(set(here)) == count and set(here) <= above and set(others) <= {9}
            above = set(here)


@pytest.mark.slow
def test_learns_to_count():
    """The masks predict the tokens at their own distance; before training they do not."""
    vocab, size = 7, 12
    target = testing.tabular(vocab)
    table = jnp.broadcast_to(
        8 * jax.nn.one_hot((jnp.arange(vocab) + 1) % (vocab - 1), vocab), (vocab + 1, vocab, vocab)
    )
    model, start = testing.tiny("llama", 0, 2.0, layers=1, vocab_size=vocab, width=16)
    drafter = drafters.make("pard", target, model=model, gamma=3, mask_id=vocab - 1, params=start)
    batch = Batch((jnp.arange(6)[:, None] + jnp.arange(size + 1)) % (vocab - 1))
    rule = optax.adam(0.02)

    @jax.jit
    def trained(params):
        def one(carry, key):
            params, state = carry
            (value, metrics), gradient = jax.value_and_grad(
                lambda own: drafter.training.loss(own, table, batch, key, keep=0.8), has_aux=True
            )(params)
            updates, state = rule.update(gradient, state)
            return (optax.apply_updates(params, updates), state), (value, metrics["agreement_3"])

        keys = jax.random.split(jax.random.key(1), 120)
        return jax.lax.scan(one, (params, rule.init(params)), keys)

    (params, _), (values, agreement) = trained(start)
    assert values[-1] < 0.2 * values[0] and agreement[-1] > 0.95
    for own, right in ((start, False), (params, True)):
        ranks = np.asarray(drafter.training.ranks(ModelParams(table, own), batch))
        shares = [(ranks[:, : size - d, d] == 0).mean() for d in range(3)]
        assert all((share > 0.95) == right for share in shares), shares


# Files and errors -------------------------------------------------------------------------------


def test_files_hold_the_mask_and_the_length(tmp_path):
    target, _, _, own = models()
    config = testing.models.tiny_config("llama", layers=2, vocab_size=VOCAB)
    hf.save(tmp_path / "model", config, own, more={pard.MASK: MASK, pard.TOKENS: 4})
    drafter = drafters.make("pard", target, model=tmp_path / "model")
    assert drafter.nodes == 4
    for keys, message in (
        ({"gamma": 5}, "gamma is 5, and pard drafts at most 4 tokens ahead; give at most 4"),
        ({"mask_id": 3}, "mask_id is 3, and the model was trained with 15"),
        ({"tree": "chain:5"}, "the tree is 5 levels deep"),
    ):
        with pytest.raises(UserError, match=message):
            drafters.make("pard", target, model=tmp_path / "model", **keys)
    # Files and parameters: the latter would be dropped.
    for name in ("pard", "draft_model", "spire"):
        with pytest.raises(UserError, match="params are for a model that is an LM, and .* its own"):
            drafters.make(name, target, model=tmp_path / "model", params=own)


def test_the_mask_is_a_token_of_the_draft_model():
    """Its embeddings may be padded to more or fewer rows than the target's."""
    target = cases.tabular(4)._replace(vocabulary="tokens")
    for size in (3, 5):
        draft = cases.tabular(size, "draft")._replace(vocabulary="tokens")
        keys = {"model": draft, "params": cases.table(1, size)}
        assert drafters.make("pard", target, mask_id=size - 1, **keys).nodes == 5
        with pytest.raises(UserError, match=f"mask_id is {size}; the draft model's tokens are"):
            drafters.make("pard", target, mask_id=size, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "pard needs the token that stands for unknown ones"),
        ({"mask_id": 16}, r"mask_id is 16; the draft model's tokens are 0..15"),
        ({"mask_id": -1}, "mask_id is -1; it must be a whole number >= 0"),
        ({"mask_id": 1, "gamma": 0}, "gamma is 0"),
        (
            {"mask_id": 1, "gamma": 2, "tree": "chain:2"},
            "pard was given gamma=2, a chain, and tree=",
        ),
    ],
    ids=str,
)
def test_errors(keys, message):
    target, _, model, own = models()
    with pytest.raises(UserError, match=message) as caught:
        drafters.make("pard", target, model=model, params=own, **keys)
    assert "\n" not in str(caught.value)
