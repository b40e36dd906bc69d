"""Penalties, biases and bans: the maps against a reference, their settings, and real models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, logit_maps, rng, sampling
from specjax.errors import UserError
from specjax.models.lm import forward
from specjax.testing import tiny
from specjax.testing.laws import mapped_logits
from specjax.types import ModelParams

V = 9
MAPS = {
    "repetition_penalty": [1.0, 1.8, 0.6],
    "presence_penalty": [0.0, 0.7, -0.4],
    "frequency_penalty": [0.3, 0.0, 0.9],
    "logit_bias": [None, {3: 1.5, 4: -np.inf}, {0: -2.0}],
    "banned": [[], [1], [2, 5]],
    "min_new_tokens": [0, 3, 5],
    "end_ids": [7, 8],
    "vocab_size": V,
}
PROMPTS = [[1, 1, 2], [4], [5, 6, 7, 3, 0, 3]]
OUTPUTS = [[], [2, 2, 6], [3, 3]]
# A tree: two children of the pending token, a chain below the first, and a node that is no token.
PARENTS = [-1, -1, 0, 2, 0]


def text_of(maps):
    """What the maps read, of texts with tokens beyond their length."""
    tokens = np.full((3, 12), 4, np.int32)
    for row, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        tokens[row, : len(prompt + output)] = prompt + output
    prompt, length = (
        jnp.asarray([len(x) for x in each])
        for each in (PROMPTS, [p + o for p, o in zip(PROMPTS, OUTPUTS, strict=True)])
    )
    maps = maps.replace(prompt=prompt)
    return maps, jax.jit(logit_maps.read, static_argnums=3)(maps, jnp.asarray(tokens), length, V)


@pytest.mark.fast
@jax.enable_x64(True)
def test_the_maps_of_every_node_are_those_of_its_path():
    maps, text = text_of(sampling.make_sampling(3, **MAPS).maps)
    # Ends of each row's own, padded.
    maps = maps.replace(ends=jnp.asarray([[7, 8], [6, -1], [-1, 8]]))
    draw = np.random.default_rng(0)
    nodes = draw.integers(0, V, (3, 5))
    # A token twice on a path, and two that are outside of the vocabulary.
    nodes[:, 2], nodes[:, 4] = nodes[:, 0], [-7, -1, V + 2]
    logits = draw.normal(size=(3, 6, V))
    paths = [[], [0], [1], [0, 2], [0, 2, 3], [0, 4]]
    visible = np.array([[node in path for node in range(5)] for path in paths])
    args = (jnp.asarray(logits), jnp.asarray(nodes), jnp.asarray(visible)[None])
    result = np.asarray(jax.jit(logit_maps.mapped)(maps, text, *args))
    for row in range(3):
        # A node without a token of the vocabulary adds to the length alone.
        written = [OUTPUTS[row] + [int(nodes[row, n]) for n in path] for path in paths]
        for place, output in enumerate(written):
            right = mapped_logits(maps, row, logits[row, place], PROMPTS[row], output)
            np.testing.assert_allclose(result[row, place], right, rtol=1e-12)
    assert np.isneginf(result).any() and np.isfinite(result.max(-1)).all()


@pytest.mark.fast
@jax.enable_x64(True)
def test_a_text_has_the_maps_of_each_prefix():
    maps, _ = text_of(sampling.make_sampling(3, **MAPS).maps)
    tokens = np.random.default_rng(1).integers(0, V, (3, 8))
    logits = np.random.default_rng(2).normal(size=(3, 8, V))
    result = logit_maps.along_text(maps, jnp.asarray(logits), jnp.asarray(tokens))
    for row, begins in enumerate(np.asarray(maps.prompt).tolist()):
        for place in range(begins - 1, 8):
            text = tokens[row, : place + 1].tolist()
            right = mapped_logits(maps, row, logits[row, place], text[:begins], text[begins:])
            np.testing.assert_allclose(result[row, place], right, rtol=1e-12)


@pytest.mark.fast
def test_a_draft_without_an_allowed_token_keeps_its_logits():
    maps = sampling.make_sampling(1, banned=[0, 1], vocab_size=3).maps
    assert maps is not None
    read = jax.jit(logit_maps.read, static_argnums=3)
    text = read(maps, jnp.zeros((1, 2), jnp.int32), jnp.asarray([2]), 3)
    few = jnp.asarray([[[0.5, 0.2, -jnp.inf]]])
    np.testing.assert_array_equal(jax.jit(logit_maps.for_draft)(maps, text, few), few)
    assert np.isneginf(jax.jit(logit_maps.mapped)(maps, text, few)).all()


@pytest.mark.fast
def test_settings_without_an_effect_are_no_maps():
    assert sampling.make_sampling(2).maps is None
    off = {"presence_penalty": [0, 0], "logit_bias": {}, "banned": (), "end_ids": 3}
    assert sampling.make_sampling(2, **off, repetition_penalty=1).maps is None


WRONG = {
    "repetition_penalty is 0": {"repetition_penalty": 0},
    "repetition_penalty is nan": {"repetition_penalty": np.nan},
    "presence_penalty has shape": {"presence_penalty": [1, 2, 3]},
    "frequency_penalty is inf": {"frequency_penalty": np.inf},
    "min_new_tokens is 1.5": {"min_new_tokens": 1.5, "end_ids": 1},
    "min_new_tokens is given without end_ids": {"min_new_tokens": 2},
    "banned needs the size": {"banned": [1]},
    "logit_bias needs the size": {"logit_bias": {1: 2.0}},
    "banned has the id 4": {"banned": 4, "vocab_size": 4},
    "logit_bias has the id -1": {"logit_bias": {-1: 1.0}, "vocab_size": 4},
    "end_ids has the id": {"min_new_tokens": 1, "end_ids": -2},
    "it must have token ids": {"banned": [0.5], "vocab_size": 4},
    "a logit_bias is inf": {"logit_bias": {1: np.inf}, "vocab_size": 4},
    "a logit_bias has shape": {"logit_bias": np.zeros(3), "vocab_size": 4},
    "banned has 3 entries": {"banned": [[1], [2], [3]], "vocab_size": 4},
    "all tokens are banned in row 1": {"banned": [[1], [0, 1, 2, 3]], "vocab_size": 4},
    "lets these wait": {"banned": [0, 1], "min_new_tokens": 1, "end_ids": [2, 3], "vocab_size": 4},
}


@pytest.mark.fast
@pytest.mark.parametrize("message", WRONG)
def test_wrong_settings_are_one_line(message):
    with pytest.raises(UserError, match=message) as error:
        sampling.make_sampling(2, **WRONG[message])
    assert "\n" not in str(error.value)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"banned": [1], "vocab_size": 4}, "made for 4 tokens, and the target has 512"),
        ({"min_new_tokens": 1, "end_ids": 512}, "end_ids has the id 512.*at most 511"),
    ],
)
def test_settings_for_another_vocabulary(settings, message, stories):
    drafter, how = drafters.make("none", stories.lm), sampling.make_sampling(1, **settings)
    given = (stories.lm, drafter, ModelParams(stories.params), *decode.pack_prompts([[1]]))
    with pytest.raises(UserError, match=message):
        decode.prefill(*given, rng.row_keys(0, 1), max_len=4, sampling=how)


TEXTS = ["Once upon a time", "Tom had a", "The little girl liked to", "One day, a big"]
NEW, BANNED = 60, 430  # 430 is a frequent token
PENALTIES = {
    "repetition_penalty": [1.0, 1.3, 1.1, 1.6],
    "presence_penalty": [0.5, 0.0, 1.0, -0.2],
    "frequency_penalty": [0.2, 0.4, 0.0, 0.1],
    "min_new_tokens": [0, 40, 10, 20],
    "end_ids": [1, 2],
    "banned": [BANNED],
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("name", "keys"),
    by_default(
        [
            ("prompt_lookup", (("min_ngram", 1),)),
            ("draft_model", (("gamma", 3),)),
            ("draft_tree", (("tree", "3x2x1"), ("siblings", "top_k"))),
            ("dynamic_tree", (("nodes", 10), ("depth", 3), ("top_k", 3))),
            ("jacobi", ()),
        ],
        {("prompt_lookup", (("min_ngram", 1),))},
    ),
)
def test_greedy_text_with_penalties_is_that_of_plain_decoding(name, keys, stories):
    prompts = [[1, *stories.tokenizer.encode(text, add_special_tokens=False).ids] for text in TEXTS]
    model, chosen = stories.lm, dict(keys)
    if "draft" in name or "tree" in name:
        # The target with other weights: a draft that is often wrong, with the same tokens.
        draw = np.random.default_rng(0)
        noise = lambda x: x * (1 + 0.3 * draw.normal(size=x.shape)).astype(x.dtype)  # noqa: E731
        chosen |= {"model": model, "params": jax.tree.map(noise, stories.params)}
    drafter = drafters.make(name, model, **chosen)
    params = ModelParams(stories.params, drafter.init_params(jax.random.key(0)))
    lengths, loop = [len(p) for p in prompts], {"max_steps": NEW, "eos_id": (1, 2)}

    def begin(maps):
        packed, length = decode.pack_prompts(prompts)
        given = (model, drafter, params, packed, length, rng.row_keys(0, 4))
        how = sampling.make_sampling(4, 0.0, **maps)
        limit = {"max_len": packed.shape[1] + NEW, "limit": length + NEW}
        return decode.prefill(*given, **limit, sampling=how, logprobs=True)

    plain = decode.autoregressive(model, params, begin(PENALTIES), **loop)
    rule = accept.load(accept.default_rule(drafter))
    state, records = decode.generate(model, drafter, rule, params, begin(PENALTIES), **loop)
    texts = []
    for each in (plain, state):
        decode.check(each)
        texts.append(decode.outputs(each, lengths))
        check_logprobs(stories, prompts, texts[-1], decode.logprobs(each, lengths))
    assert texts[0] == texts[1]
    # Penalties avoid repetitions, which is all that prompt lookup can guess.
    assert name == "prompt_lookup" or int(records.accepted.sum()) > 0
    assert int(records.drafted.sum()) > 0
    assert not any(BANNED in text for text in texts[0])
    # Other penalties give other texts: they have an effect. The program is the same.
    off = PENALTIES | {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
    other = decode.autoregressive(model, params, begin(off), **loop)
    pairs = zip(texts[0], decode.outputs(other, lengths), strict=True)
    assert all(one != another for one, another in pairs)


@pytest.mark.parametrize(
    ("name", "keys", "rule", "temperature"),
    [
        ("draft_model", {"gamma": 4}, "chain", 1.0),
        *[
            pytest.param(*slow, marks=pytest.mark.slow)
            for slow in (
                (
                    "draft_tree",
                    {"tree": "2x1x1", "siblings": "without_replacement"},
                    "recursive",
                    1.0,
                ),
                ("draft_model", {"gamma": 4}, "block", 0.7),
            )
        ],
    ],
)
def test_a_draft_model_that_is_the_target_has_every_token_accepted(name, keys, rule, temperature):
    """Target and draft have the same maps: without them in the draft, tokens are rejected."""
    model, params = tiny(vocab_size=V)
    drafter = drafters.make(name, model, model=model, params=params, **keys)
    pair = ModelParams(params, drafter.init_params(jax.random.key(0)))
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        *(model, drafter, pair, packed, lengths, rng.row_keys(0, 3)),
        max_len=packed.shape[1] + 18,
        limit=lengths + 18,
        sampling=sampling.make_sampling(3, temperature, **MAPS),
    )
    _, records = decode.generate(model, drafter, accept.load(rule), pair, state, max_steps=18)
    ran = np.asarray(records.emitted) > 0
    assert (np.asarray(records.accepted)[ran] == drafter.longest).all()


def check_logprobs(loaded, prompts, outputs, logprobs):
    """They are those of the model's own logits, from one pass over the whole text."""
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        # Padded: one program for all rows.
        text = jnp.asarray([(prompt + output + [0] * 99)[:99]])
        own = jax.nn.log_softmax(forward(loaded.lm, loaded.params, text).logits, -1)[0]
        places = len(prompt) - 1 + np.arange(len(output))
        np.testing.assert_allclose(logprobs[row], own[places, np.array(output)], atol=2e-4)


def test_the_maps_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers").generation.logits_process
    draw = np.random.default_rng(3)
    prompt, output = draw.integers(0, V, (1, 4)), draw.integers(0, V, (1, 3))
    text, logits = np.concatenate([prompt, output], 1), draw.normal(size=(1, V))
    logits = logits.astype(np.float32)
    bias = {(2,): 1.5, (6,): -0.7}
    theirs = torch.tensor(logits)
    for each in (
        processors.SequenceBiasLogitsProcessor(bias),
        processors.NoBadWordsLogitsProcessor([[1]], eos_token_id=8),
        processors.MinNewTokensLengthLogitsProcessor(4, 4, 8, device="cpu"),
        processors.RepetitionPenaltyLogitsProcessor(1.7),
    ):
        theirs = each(torch.tensor(text), theirs)
    maps = sampling.make_sampling(
        1,
        repetition_penalty=1.7,
        min_new_tokens=4,
        end_ids=8,
        banned=1,
        logit_bias={2: 1.5, 6: -0.7},
        vocab_size=V,
    ).maps
    assert maps is not None
    maps = maps.replace(prompt=jnp.asarray([4]))
    read = jax.jit(logit_maps.read, static_argnums=3)(maps, jnp.asarray(text), jnp.asarray([7]), V)
    ours = jax.jit(logit_maps.mapped)(maps, read, jnp.asarray(logits)[:, None])[:, 0]
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
