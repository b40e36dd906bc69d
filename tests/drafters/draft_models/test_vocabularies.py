"""Draft models whose vocabulary is not the target's: TLI, SLEM and SLRS."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_cases import wrong
from cases import spelled
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import draft_models_intersection as _intersection
from internals import draft_models_small_model as _small_model
from internals import draft_models_string_law as _string_law
from internals import draft_models_string_match as _string_match
from internals import draft_models_vocabularies as _vocabularies
from internals import draft_models_vocabulary_maps as vocabulary_maps
from internals import drafters_growth_stepper, setup_of
from marks import by_default
from mutants.drafters import with_draft
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import specjax as sj
from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.bench import replay
from specjax.bench.methods import MethodChoice
from specjax.data.recordings import Trace
from specjax.errors import UserError
from specjax.models import lm, token_bytes
from specjax.models.token_bytes import TokenBytes
from specjax.testing import state_checks
from specjax.types import ModelParams, Verdict

OURS = (b"a", b"b", b"ab")
PROMPTS = ([2, 1, 0], [0], [2, 2, 1, 0, 1, 2])
TREE = {"tree": "2x1", "siblings": "without_replacement"}


def pair(theirs, ours=OURS):
    """Tables with these tokens: target, draft model, and the draft's logits."""
    target = spelled(cases.tabular(len(ours)), tuple(ours))
    draft = spelled(cases.tabular(len(theirs), "draft"), tuple(theirs))
    return target, draft, cases.table(1, len(theirs))


def decoded(target, drafter, params, temperature, new=12, seed=0):
    """The texts i32[B,S] of ragged prompts in one batch, and the tokens per round."""
    tokens, lengths = decode.pack_prompts(PROMPTS)
    how, keys = sampling.make_sampling(3, temperature), rng.row_keys(seed, 3)
    size = tokens.shape[1] + new
    state = decode.prefill(
        target, drafter, params, tokens, lengths, keys, max_len=size, sampling=how
    )
    rule = accept.load(accept.default_rule(drafter))
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=2 * size)
    decode.check(state)
    rounds = (records.emitted > 0).sum()
    return np.asarray(state.tokens[:, :size]), float(records.emitted.sum() / rounds)


@pytest.mark.parametrize(
    "keys",
    by_default([{"gamma": 3}, TREE, {"gamma": 2, "control": "threshold:0.4"}], [{"gamma": 3}]),
)
def test_equal_tokens_under_other_ids_give_the_same_bits(keys):
    """The intersection of a vocabulary with itself in another order: the plain draft model."""
    order = np.array([2, 0, 3, 1])  # the target's token of each draft token
    ours = (*OURS, b"c")
    target, draft, _ = pair([ours[i] for i in order], ours)
    table, plain = cases.table(0, 4), cases.table(1, 4)
    first = np.append(order, 4)
    own = plain[first][:, order][:, :, order]
    drafter = drafters.make("draft_model", target, model=draft, vocabulary="tli", **keys)
    same = drafters.make("draft_model", target, model=cases.tabular(4, "plain"), **keys)
    for temperature in (1.0, [0.0, 0.7, 1.3]):
        expected = decoded(target, same, ModelParams(table, plain), temperature)
        result = decoded(target, drafter, ModelParams(table, own), temperature)
        np.testing.assert_array_equal(result[0], expected[0])
        assert result[1] == expected[1]
    # An error of the table of ids by one is seen here alone: the law of the output stays exact.
    wrong = jnp.roll(own, 1, -1)
    assert decoded(target, drafter, ModelParams(table, wrong), 1.0)[1] != expected[1]


def test_one_tokenizer_is_the_plain_draft_model():
    target, draft, own = pair(OURS)
    drafter = drafters.make("draft_model", target, model=draft, params=own, vocabulary="tli")
    plain = drafters.make("draft_model", target, model=draft, params=own)
    assert drafter.propose.func is plain.propose.func
    assert drafter.training is not None and drafter.whole


def round_error(drafter, target, rule=""):
    """The total variation of the law of one round, with the draft's table of ``pair``."""
    rule = accept.load(rule or accept.default_rule(drafter))
    with jax.enable_x64(True):
        own = cases.table(1, drafter.init_params(None).shape[-1])
        params = ModelParams(cases.table(0, target.vocab_size), own)
        steps, how = drafter.longest + 1, {"temperature": 0.9}
        emitted = testing.exact_law(target, drafter, rule, params, [1, 2], steps, rounds=1, **how)
        truth = testing.sequence_law(target, params.target, [1, 2], steps, **how)
    assert abs(emitted.sum() - 1) < 1e-12
    return testing.total_variation(emitted, truth)


SHARED = (b"b", b"a", b"?")
STRINGS = (b"b", b"a", b"ab", b"ba")
# The conformance of the case "tli" has a chain of two with all settings.
LAWS = [
    ("tli", SHARED, {"gamma": 1}),
    ("tli", SHARED, TREE),
    ("slem", STRINGS, {"gamma": 2}),
    ("slrs", STRINGS, {"gamma": 2}),
]


@pytest.mark.parametrize(("how", "theirs", "keys"), by_default(LAWS, LAWS[:1]))
def test_the_law_is_exact_where_vocabularies_overlap_in_part(how, theirs, keys):
    target, draft, own = pair(theirs)
    keys = {"vocabulary": how, **keys}
    drafter = drafters.make("draft_model", target, model=draft, params=own, **keys)
    assert round_error(drafter, target) < 1e-12
    if how == "slem":
        assert round_error(drafter, target, rule="match") < 1e-12
    elif how == "tli":
        # Declared without dividing by the probability of the shared tokens.
        lost = with_draft(lambda draft, keys, context: draft.replace(probs=0.8 * draft.probs))
        assert round_error(lost(drafter), target) > 1e-3


@pytest.mark.slow
def test_probs_that_tokens_are_not_drawn_from_are_found(monkeypatch):
    """The draft model's probabilities declared as they are, before the intersection."""
    monkeypatch.setattr(_intersection, "shared", lambda maps, logits: logits)
    target, draft, own = pair(SHARED)
    drafter = drafters.make("draft_model", target, model=draft, params=own, vocabulary="tli")
    assert round_error(drafter, target) < 1e-12  # drawn from what it declares
    flat = with_draft(
        lambda draft, keys, context: draft.replace(probs=jnp.roll(draft.probs, 1, -1))
    )
    assert round_error(flat(drafter), target) > 1e-2


@pytest.mark.parametrize("name", by_default(("tli", "tli tree", "slem", "slrs"), ("tli", "slrs")))
def test_the_cache_follows_the_text(name):
    """Its entries are compared; some tokens are two tokens of the draft model."""
    _, target, drafter, params = cases.case(name)
    finding = state_checks.state_follows_text(drafter, target, params)
    assert finding.passed, str(finding)


def strings(theirs, text, own, before):
    """The log-probability of the bytes ``text`` after two draft tokens, over all spellings."""
    total, law = 0.0, np.exp(np.float64(own))
    law /= law.sum(-1, keepdims=True)
    for count in range(1, len(text) + 1):
        for tokens in itertools.product(range(len(theirs)), repeat=count):
            if b"".join(theirs[i] for i in tokens) != text:
                continue
            history, chance = list(before), 1.0
            for token in tokens:
                chance *= law[history[-2], history[-1], token]
                history.append(token)
            total += float(chance)
    return np.log(total) if total else -np.inf


def test_slrs_adds_up_all_spellings():
    ours = (b"a", b"b", b"ab", b"aba", b"c", b"ac")
    theirs = (b"ba", b"a", b"ab", b"b")
    target, draft, own = pair(theirs, ours)
    maps = vocabulary_maps.between(target.token_bytes, draft.token_bytes, 6, 4)
    ways = vocabulary_maps.spellings(target.token_bytes, draft.token_bytes, 6, 4, 100)
    drafter = drafters.make("draft_model", target, model=draft, vocabulary="slrs", gamma=4)
    params = ModelParams(cases.table(0, 6), own)
    prompt = [2, 0, 1]  # in draft tokens ab, a, b
    tokens, lengths = decode.pack_prompts([prompt])
    state = decode.prefill(
        target,
        drafter,
        params,
        tokens,
        lengths,
        rng.row_keys(0, 1),
        max_len=12,
        sampling=sampling.make_sampling(1, 1.0),
    )
    proposed = testing.loop.propose(drafter, params, state)
    history = [2, 1, 3]
    for node, token in enumerate(np.asarray(proposed.tokens[0])):
        scores = np.array([strings(theirs, text, own, history[-2:]) for text in ours])
        expected = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(proposed.probs[0, node], expected, rtol=2e-5)
        history += [int(i) for i in maps.pieces[token, : maps.sizes[token]]]
    assert len(history) > 3 + 3  # a token of several draft tokens was read
    # aba has the spellings a-b-a, ab-a and a-ba; with the first one alone it is too rare.
    assert (ways.completes == 3).sum() == 3
    one = np.unique(ways.completes, return_index=True)[1]
    less = ways._replace(
        sources=ways.sources[one], last=ways.last[one], completes=ways.completes[one]
    )
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, len(ways.tokens) + 1, 4)))
    every, few = (_string_law.weights(w, logits, 6) for w in (ways, less))
    assert (few <= every + 1e-6).all() and few[0, 3] < every[0, 3] - 0.1


def begun(target, drafter, params, prompt, temperature=1.0):
    """The state after a prompt, with room for 16 tokens."""
    tokens, lengths = decode.pack_prompts([prompt])
    how = {"max_len": 16, "sampling": sampling.make_sampling(1, temperature)}
    return decode.prefill(target, drafter, params, tokens, lengths, rng.row_keys(0, 1), **how)


def ragged_pair():
    """A target of tables, and a real decoder whose positions count, with tokens of two texts."""
    ours, theirs = (b"a", b"b", b"ab", b"ca"), (b"b", b"a", b"c", b"ab", b"bc")
    target = spelled(cases.tabular(4), ours)
    draft, own = testing.tiny("gpt2", 1, scale=25.0, vocab_size=5, layers=1, width=16)
    return target, spelled(draft, theirs), ModelParams(cases.table(0, 4), own)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tli", "slrs"])
def test_positions_count_draft_tokens(how):
    """A node's probs are those of the first node after a prompt with the nodes before it."""
    target, draft, params = ragged_pair()
    drafter = drafters.make("draft_model", target, model=draft, vocabulary=how, gamma=3)
    prompt = [3, 2, 0, 3, 1]
    draft_tokens = testing.loop.propose(drafter, params, begun(target, drafter, params, prompt))
    for depth in range(3):
        longer = [*prompt, *draft_tokens.tokens[0, :depth].tolist()]
        state = begun(target, drafter, params, longer)
        first = testing.loop.propose(drafter, params, state).probs[0, 0]
        np.testing.assert_allclose(draft_tokens.probs[0, depth], first, rtol=1e-4, atol=1e-6)


def slem_by_hand(target, draft, params, text, steps, gamma):
    """The draft of SLEM, each draft token from the whole text."""
    ours, theirs = target.token_bytes, draft.token_bytes
    maps = vocabulary_maps.between(ours, theirs, target.vocab_size, draft.vocab_size)
    ids = [int(i) for token in text for i in maps.pieces[token, : maps.sizes[token]]]
    data, tokens = b"", []
    for _ in range(steps):
        padded = jnp.asarray([ids + [0] * (40 - len(ids))])
        ids.append(int(FORWARD(params.draft, padded)[0, len(ids) - 1].argmax()))
        data += theirs.tokens[ids[-1]]
    while data and len(tokens) < gamma:
        fits = [each for each in ours.ids if data.startswith(each)]
        if not fits:
            break
        tokens.append(ours.ids[max(fits, key=len)])
        data = data[len(max(fits, key=len)) :]
    return tokens


FORWARD = jax.jit(lambda own, tokens: lm.forward(ragged_pair()[1], own, tokens).logits)


@pytest.mark.slow
def test_slem_continues_the_text_in_the_tokens_of_the_draft_model(monkeypatch):
    """Also after another drafter's rounds, and with one pass less than draft tokens."""
    target, draft, params = ragged_pair()
    passes = []

    def counted(own, tokens, *rest):
        if tokens.shape[1] == 1:
            jax.debug.callback(lambda: passes.append(1))
        return draft.apply(own, tokens, *rest)

    model = draft._replace(apply=counted)
    drafter = drafters.make("draft_model", target, model=model, vocabulary="slem", gamma=4)
    assert drafter.gaps and not drafter.constant_cost
    steps = setup_of(drafter).steps
    texts = [[3, 2, 0, 3, 1], [0], [2, 2], [3, 1, 0], [3, 3, 3], [1, 1, 3, 0, 2, 2, 3]]
    seen = []
    for text in texts:
        state = begun(target, drafter, params, text)
        jax.effects_barrier()
        passes.clear()
        found = testing.loop.propose(drafter, params, state)
        jax.effects_barrier()
        assert len(passes) == steps - 1
        tokens = np.asarray(found.tokens[0])[np.asarray(found.valid[0])].tolist()
        assert tokens == slem_by_hand(target, draft, params, text, steps, 4)
        seen += tokens
    assert len(set(seen)) > 1
    # The state of a beginning of the text, which missed the rounds since.
    early, late = (begun(target, drafter, params, text) for text in (texts[-1][:2], texts[-1]))
    again = testing.loop.propose(drafter, params, late.replace(draft=early.draft))
    np.testing.assert_array_equal(again.tokens, found.tokens)
    for change in MISTAKES:
        monkeypatch.setattr(_vocabularies, "string_match", wrong(_string_match, change))
        other = drafters.make("draft_model", target, model=draft, vocabulary="slem", gamma=4)
        found = [
            testing.loop.propose(other, params, begun(target, drafter, params, text)).tokens[0]
            for text in texts
        ]
        by_hand = [slem_by_hand(target, draft, params, text, steps, 4) for text in texts]
        assert any(
            own.tolist()[: len(expected)] != expected
            for own, expected in zip(found, by_hand, strict=True)
        ), change


LAYOUT = "layout = growth.next_layout(len(token), setup.steps - 1, index)"
MISTAKES = (
    (LAYOUT, f"{LAYOUT}.replace(depth=jnp.zeros((len(token), setup.steps), jnp.int32))"),
    (LAYOUT, f"{LAYOUT}.replace(visible=jnp.arange(setup.steps)[None, None] == setup.steps - 1)"),
    ("tree.put(block, own, index)", "block"),
)


def test_tokens_that_the_draft_model_lacks_end_what_it_keeps(monkeypatch):
    """Accepted ones too: the cache then reads them from the text."""
    target, draft, _ = pair(SHARED)
    maps = vocabulary_maps.between(target.token_bytes, draft.token_bytes, 3, 3)
    assert maps.draft_of.tolist() == [1, 0, -1]
    monkeypatch.setattr(
        _small_model, "commit", lambda model, params, cache, drafted, *rest: drafted.count
    )
    reader = _intersection.Reader(draft, maps, 2, 2)
    for tokens, expected in (([0, 1, 0], 2), ([0, 2, 0], 1), ([2, 0, 1], 0)):
        drafted = drafters_growth_stepper.Drafted(None, jnp.asarray([2]), None)
        verdict = Verdict(jnp.asarray([tokens]), jnp.asarray([3]), jnp.asarray([[0, 1]]))
        own = _intersection.Kept(None, None)
        own = _intersection._commit(reader, ModelParams({}), own, drafted, verdict, None)
        assert int(own.cache[0]) == expected, tokens


def test_probabilities_that_are_not_finite_are_reported():
    """Also if they are those of one node of the tree of spellings."""
    target, draft, own = pair(STRINGS)
    drafter = drafters.make("draft_model", target, model=draft, vocabulary="slrs", gamma=1)
    ways = setup_of(drafter).stepper.step.args[0].ways
    for text, bad in (([0], False), ([0], True)):
        # After the token "a", which is draft token 1, the tree's nodes follow.
        broken = own.at[1, int(ways.tokens[0])].set(jnp.nan) if bad else own
        params = ModelParams(cases.table(0, 3), broken)
        found = testing.loop.propose(drafter, params, begun(target, drafter, params, text))
        assert bool(found.finite[0]) is not bad


EDGES = (b"a", b"ab", b"b", b"", None)


def test_the_spellings_of_unusual_tokens():
    """A token that begins another one, one without bytes, and the ends of texts."""
    ours = TokenBytes("ours", EDGES, None, (4,))
    theirs = TokenBytes("theirs", (b"", b"b", None, b"a", b"ab", b"abb"), None, (2,))
    maps = vocabulary_maps.between(ours, theirs, 5, 6)
    assert maps.draft_of.tolist() == [3, 4, 1, -1, 2]
    ways = vocabulary_maps.spellings(ours, theirs, 5, 6, 10)
    paths = [()]
    for token, parent in zip(ways.tokens, ways.parents, strict=True):
        paths.append((*paths[parent + 1], int(token)))
    found = {
        (paths[source + 1] + (int(last),), int(token))
        for source, last, token in zip(ways.sources, ways.last, ways.completes, strict=True)
    }
    wanted = {((3,), 0), ((4,), 1), ((3, 1), 1), ((1,), 2), ((2,), 4)}
    assert found == wanted and len(ways.completes) == len(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tli", "slem", "slrs"])
def test_the_law_with_tokens_that_end_a_text(how):
    ours = TokenBytes("ours", (b"a", b"ab", None), None, (2,))
    theirs = TokenBytes("theirs", (None, b"a", b"b"), None, (0,))
    target = cases.tabular(3)._replace(token_bytes=ours)
    draft = cases.tabular(3, "draft")._replace(token_bytes=theirs)
    own = cases.table(1, 3)
    drafter = drafters.make("draft_model", target, model=draft, params=own, vocabulary=how, gamma=2)
    assert round_error(drafter, target) < 1e-12
    if how != "slem":
        params = ModelParams(cases.table(0, 3), own)
        found = testing.loop.propose(drafter, params, begun(target, drafter, params, [0, 1]))
        assert found.probs[0, 0, 2] > 0.01  # the end is drafted too


def test_advice_is_given_where_it_can_be_followed():
    target, draft, own = pair(OURS)
    named = [model._replace(vocabulary=name) for model, name in ((target, "a"), (draft, "b"))]
    for name, keys in (("draft_model", {}), ("draft_tree", {"tree": "2x1"})):
        with pytest.raises(UserError, match="they must share one tokenizer") as error:
            drafters.make(name, named[0], model=named[1], params=own, **keys)
        assert ("vocabulary=" in str(error.value)) is (name == "draft_model")


def test_a_recording_with_a_tokenizer_takes_another_vocabulary():
    target, draft, own = pair(SHARED)
    keys = {"name": "draft_model", "model": draft, "params": own, "vocabulary": "tli", "gamma": 2}
    choice = MethodChoice(keys, "", {})
    mute = replay.recorded(3)
    with pytest.raises(UserError, match=r"the recording has ids alone; give config\.target"):
        replay.method(mute, choice, 0, "x", guessed=True)
    known = replay.recorded(3, "x", target.token_bytes)
    assert known is replay.recorded(3, "x", target.token_bytes)
    method = replay.method(known, choice, 0, "x")
    texts = [Trace([0, 1], [0, 1, 2, 1, 0, 0], None)]
    [(counts, _)] = replay.measure_rounds(method, texts, batch_size=1)
    assert counts.tokens == 6 and 2 <= counts.rounds <= 6


def byte_level(words=()):
    """A byte-level BPE of all bytes, with merges that make these words."""
    style = token_bytes._Style(byte_level=True, marker=False, fallback=False)
    pieces = [style.write(bytes([byte])) for byte in range(256)]
    vocabulary, merges = {piece: i for i, piece in enumerate(pieces)}, []
    for word in words:
        text = style.write(word.encode())
        for end in range(2, len(text) + 1):
            merge = text[: end - 1], text[end - 1]
            if "".join(merge) not in vocabulary:
                vocabulary["".join(merge)] = len(vocabulary)
                merges.append(merge)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(words=()):
    """A BPE in the style of SentencePiece, with byte fallback."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    merges = []
    for word in words:
        text = word.replace(" ", "▁")
        for piece in text:
            vocabulary.setdefault(piece, len(vocabulary))
        for end in range(2, len(text) + 1):
            merge = text[: end - 1], text[end - 1]
            if "".join(merge) not in vocabulary:
                vocabulary["".join(merge)] = len(vocabulary)
                merges.append(merge)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


WORDS = ("the", " there", " naïve", "日本", "🙂", "ing", "  ")
STYLES = {
    "bytes": TokenBytes("bytes", byte_level()),
    "byte level": TokenBytes("byte level", byte_level(WORDS)),
    "sentencepiece": TokenBytes("sentencepiece", sentencepiece(("the ", " day", "é", "日", "re"))),
}
TABLES = {
    (a, b): vocabulary_maps.between(STYLES[a], STYLES[b], 600, 600) for a in STYLES for b in STYLES
}
TRIES = {name: vocabulary_maps.trie(style, 600, 24) for name, style in STYLES.items()}


def text_of(name, ids):
    return b"".join(STYLES[name].tokens[i] or b"" for i in ids)


@settings(max_examples=60, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12), st.sampled_from(list(TABLES))
)
def test_no_byte_of_a_text_is_lost(text, names):
    """From the target's tokens, which may be parts of characters, to the draft's, and back."""
    target, draft = names
    ids = STYLES[target].source.encode(text, add_special_tokens=False).ids
    assert text_of(target, ids) == text.encode()
    maps = TABLES[names]
    pieces = [int(i) for token in ids for i in maps.pieces[token, : maps.sizes[token]]]
    assert text_of(draft, pieces) == text.encode()
    shared = [token for token in ids if maps.draft_of[token] >= 0]
    same = [int(maps.draft_of[token]) for token in shared]
    assert text_of(target, shared) == text_of(draft, same)
    data = text.encode()[:24]
    padded = jnp.asarray([list(data) + [0] * (24 - len(data))], jnp.int32)
    tokens, valid = CUT[target](padded, jnp.asarray([len(data)], jnp.int32))
    assert text_of(target, np.asarray(tokens)[np.asarray(valid)].tolist()) == data


CUT = {
    name: jax.jit(lambda text, size, words=words: _string_match.cut(words, text, size, 24))
    for name, words in TRIES.items()
}


def test_bytes_that_are_no_text_are_written_too():
    for data in (b"\xf0\x9f", b"\x99\x82", b"a\xffb", bytes(range(256))):
        for name, style in STYLES.items():
            assert text_of(name, style.encode(data)) == data
    words = {b"a": 0, b"ab": 1, b"bca": 2, b"b": 3, b"c": 4}
    assert token_bytes.fewest(b"abcab", words) == [1, 4, 1]
    assert token_bytes.fewest(b"abca", words) == [0, 2]
    assert token_bytes.fewest(b"x?x", {b"x": 7}) == [7, 7]


def test_special_tokens_are_paired_by_name_and_by_role():
    ours, theirs = byte_level(), sentencepiece()
    ours.add_special_tokens(["<|end|>", "<tool>"])
    theirs.add_special_tokens(["<tool>", "</s>"])
    a = TokenBytes("a", ours, None, (256,))
    b = TokenBytes("b", theirs, None, (theirs.token_to_id("</s>"),))
    maps = vocabulary_maps.between(a, b, 258, 300)
    assert maps.draft_of[256] == theirs.token_to_id("</s>")
    assert maps.draft_of[257] == theirs.token_to_id("<tool>")
    # Without a partner its name is read as text.
    alone = vocabulary_maps.between(a, TokenBytes("c", byte_level()), 258, 256)
    assert alone.sizes[257] == len("<tool>") and alone.draft_of[257] == -1


def test_a_text_without_room_is_not_drafted_for():
    """Token 0 is six draft tokens, twice the average: a text of it fills the room."""
    target, draft, own = pair((b"a", b"b", b"?"), (b"aaaaaa", b"a", b"b"))
    table = cases.table(0, 3).at[..., 0].add(1.5)
    plain = drafters.make("none", target)
    for how in ("tli", "slem", "slrs"):
        drafter = drafters.make(
            "draft_model", target, model=draft, params=own, vocabulary=how, gamma=2
        )
        assert not drafter.whole
        params = ModelParams(table, own)
        result, expected = (decoded(target, each, params, 0.0, 30)[0] for each in (drafter, plain))
        np.testing.assert_array_equal(result, expected)
        assert (expected == 0).sum() > 30


OTHER = (b"x", b"y", b"z")
BAD = [
    (OURS, {"vocabulary": "text"}, "vocabulary is 'text'"),
    (OTHER, {"vocabulary": "tli"}, "the vocabularies must overlap"),
    (OTHER, {"vocabulary": "slem"}, "the vocabularies must overlap"),
    (SHARED, {"vocabulary": "slem", "tree": "2x1"}, "drafts a chain"),
    (SHARED, {"vocabulary": "slrs", "nodes": 4}, "drafts a chain"),
    (SHARED, {"vocabulary": "slem", "siblings": "iid"}, "siblings is 'iid' and has"),
    (SHARED, {"vocabulary": "slem", "control": "threshold:0.4"}, "reads the probabilities"),
    (SHARED, {"vocabulary": "tli", "tree": "3x1"}, "3"),
    (None, {"vocabulary": "tli"}, "the draft model has no tokenizer"),
]


@pytest.mark.parametrize(("theirs", "keys", "message"), BAD)
def test_wrong_pairs_are_refused_in_one_line(theirs, keys, message):
    target, draft, own = pair(theirs or SHARED)
    draft = draft if theirs else draft._replace(token_bytes=None)
    with pytest.raises(UserError, match=message) as error:
        drafters.make("draft_model", target, model=draft, params=own, **keys)
    assert "\n" not in str(error.value)


def test_large_draft_vocabularies_and_encoders_are_refused():
    products = (itertools.product("ab", repeat=n) for n in range(1, 8))
    words = tuple("".join(letters).encode() for each in products for letters in each)
    target, draft = (spelled(cases.tabular(len(words)), own) for own in (words, words[::-1]))
    with pytest.raises(UserError, match="more than 2048"):
        drafters.make("draft_model", target, model=draft, params={}, vocabulary="slrs")
    small, params = testing.tiny_t5(0, vocab_size=3)
    with pytest.raises(UserError, match="is for decoders"):
        drafters.make(
            "draft_model", spelled(small, OURS), model=draft, params=params, vocabulary="tli"
        )


DATA = Path(os.environ.get("SPECJAX_TEST_DATA", "missing")) / "models"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="SPECJAX_TEST_DATA has no models")
@pytest.mark.parametrize("how", ["tli", "slem", "slrs"])
def test_a_real_pair_gives_plain_text(how):
    """Two trained models with two vocabularies of 512 tokens; ragged prompts, greedy."""
    from specjax.models import hf

    target, draft = (hf.load(DATA / name) for name in ("stories260K", "aidreams260K"))
    keys = {"model": draft.lm, "params": draft.params, "vocabulary": how, "gamma": 3}
    # With "slrs" a pass of the draft model reads 1475 tokens.
    new = 10 if how == "slrs" else 24
    drafter, plain = (
        drafters.make("draft_model", target.lm, **keys),
        drafters.make("none", target.lm),
    )
    (texts, tau), (expected, _) = (
        decoded(target.lm, each, ModelParams(target.params, each.init_params(None)), 0.0, new)
        for each in (drafter, plain)
    )
    np.testing.assert_array_equal(texts, expected)
    assert tau > 1


def test_tokenizers_without_bytes_are_refused():
    words = Tokenizer(models.WordPiece({"a": 0, "##b": 1}, unk_token="a"))
    with pytest.raises(UserError, match="WordPiece"):
        _ = TokenBytes("words", words).tokens
    assert TokenBytes("x", (b"a", None)).ids == {b"a": 0}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="SPECJAX_TEST_DATA has no models")
def test_a_loaded_pair_with_two_vocabularies():
    model = sj.load(DATA / "stories260K", draft=DATA / "aidreams260K")
    with pytest.raises(UserError, match='take vocabulary="tli"'):
        model.method()
    keys = {"name": "draft_model", "vocabulary": "tli", "gamma": 3}
    texts = [
        sj.generate_text(model, ["Once upon a time"], max_new_tokens=20, drafter=drafter)
        for drafter in (keys, "none")
    ]
    assert texts[0][0][0].text == texts[1][0][0].text


@pytest.mark.fast
def test_a_text_is_written_in_draft_tokens():
    """Token 1 is two draft tokens, and none alone. What follows the text is not read."""
    pieces = np.asarray([[3, 0], [4, 5], [6, 0]])
    maps = SimpleNamespace(
        sizes=np.asarray([1, 2, 1]), pieces=pieces, draft_of=np.asarray([3, -1, 6])
    )
    tokens = np.asarray([[0, 1, 2, 1], [1, 1, 0, 0]], np.int32)

    @jax.jit
    def both(tokens, length, logits):
        text = _intersection.draft_text.write(maps, tokens, length, 6)
        return text, _intersection.shared(maps, logits)

    text, logits = both(tokens, np.asarray([3, 2], np.int32), np.arange(7.0))
    assert np.array_equal(text.tokens, [[3, 4, 5, 6, 0, 0], [4, 5, 4, 5, 0, 0]])
    assert np.array_equal(text.size, [4, 4]) and np.array_equal(text.read, [3, 2])
    assert np.array_equal(logits, [3, -np.inf, 6])


@pytest.mark.fast
def test_the_pending_token_of_several_pieces_is_not_in_the_cache():
    """And the logits after a token are those after its last piece."""
    pieces = np.asarray([[3, 0], [4, 2], [1, 0]])
    maps = vocabulary_maps.Maps(np.asarray([3, -1, 1]), pieces, np.asarray([1, 2, 1]), True)
    model, table = testing.tabular(5, "draft"), cases.table(1, 5)
    reader = _intersection.draft_text.Reader(model, maps, 2, 2)
    tokens = np.asarray([[0, 1, 1, 0], [1, 2, 0, 0], [2, 1, 1, 1]], np.int32)

    @jax.jit
    def begun(tokens, length):
        context = sj.Context(tokens, length, sampling.make_sampling(3))
        kept = _intersection.draft_text.init(reader, ModelParams({}, table), context, None, 6)
        along = _intersection.draft_text.logits_along(reader, table, tokens)
        return kept.cache.length, kept.text.size, along

    length, size, along = begun(tokens, np.asarray([3, 2, 1], np.int32))
    assert (size.tolist(), length.tolist()) == ([5, 3, 1], [3, 2, 0])
    # The table's rows are the last two tokens of a text.
    right = [table[5, 3], table[4, 2], table[4, 2], table[2, 3]]
    np.testing.assert_allclose(along[0], right, rtol=1e-6)
    np.testing.assert_allclose(along[2, 3], table[4, 2], rtol=1e-6)


@pytest.mark.fast
def test_the_last_pieces_of_a_long_token_are_kept():
    letters = tuple(bytes([97 + number]) for number in range(20))
    whole, draft = TokenBytes("long", (b"".join(letters), b"c")), TokenBytes("letters", letters)
    found = vocabulary_maps.between(whole, draft, 2, 20)
    assert found.pieces.tolist() == [[*range(4, 20)], [2, *[-1] * 15]]
    assert (found.sizes.tolist(), found.draft_of.tolist()) == ([16, 1], [-1, 2])
    # Of equal tokens the first is paired.
    twice = TokenBytes("twice", (b"a", b"b", b"a"))
    assert vocabulary_maps.between(TokenBytes("a", (b"a",)), twice, 1, 3).draft_of.tolist() == [0]
