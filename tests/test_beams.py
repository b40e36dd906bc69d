"""Beam search: plain beams against plain Python, speculative beams against both, and mistakes."""

from __future__ import annotations

import dataclasses
import itertools

import beam_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from beam_cases import BEAMS, MODEL, NEW, ROWS, VOCAB, expected, params, searched
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import decode_hypotheses as hypotheses
from marks import by_default

import specjax as sj
from specjax import testing
from specjax.decode import beams
from specjax.errors import NonFiniteLogits, UserError
from specjax.models import lm
from specjax.types import ModelParams

STEP = jax.jit(hypotheses.step)
GAMMA, DRAFT = 2, sj.BeamDraft(MODEL, gamma=2, beams=5)
# What arrays decide, so that no setting compiles another program.
ENDS = (2, 7)
CASES = (
    {"length_penalty": 1.0, "early_stopping": False},
    {"length_penalty": 1.0, "early_stopping": True},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": False},
    {"length_penalty": -1.0, "early_stopping": False},
)


def assert_same(found, others, score=1e-4):
    assert found.outputs() == others.outputs()
    np.testing.assert_allclose(found.scores, others.scores, rtol=0, atol=score)


def differs(found, wanted) -> bool:
    same = found.outputs() == [[text for text, _ in row] for row in wanted]
    scores = [[score for _, score in row] for row in wanted]
    return not (same and np.allclose(found.scores, scores, rtol=0, atol=1e-4))


def fewest(steps):
    return -(-np.asarray(steps) // (GAMMA + 1))


def test_hypotheses_are_those_of_plain_python():
    """Plain and speculative, with ends at all places; a row alone has the beams of the batch."""
    lengths, early = set(), 0
    for own, case in itertools.product((params(1, 0.2), params(2, 0.2)), CASES):
        wanted = [expected(own, row, eos_id=ENDS, **case) for row in ROWS]
        plain = searched(own, eos_id=ENDS, **case)
        drafted = searched(own, eos_id=ENDS, draft=DRAFT, **case)
        assert not differs(plain, wanted), case
        assert not differs(drafted, wanted), case
        assert (plain.passes == plain.steps).all()
        assert (drafted.steps == plain.steps).all()
        assert (drafted.passes >= fewest(plain.steps)).all()
        lengths |= {len(text) for row in plain.outputs() for text in row}
        early += int((plain.steps < NEW).sum())
    assert lengths == set(range(1, NEW + 1))
    assert early > 2


def reference_step(row, logprobs, stop, divisors, early, most):
    """One step of one row, candidate by candidate; ``row`` is (beams, finished), best first."""
    (beams, finished), count = row, len(row[0])
    every = [
        (score + logprobs[beam][token], beam, [*text, token])
        for beam, (score, text) in enumerate(beams)
        for token in range(len(logprobs[beam]))
    ]
    every = sorted(every, key=lambda each: -each[0])[: count * max(2, 1 + len(stop))]
    size = len(every[0][2])
    ends = [text[-1] in stop or size == most for _, _, text in every]
    running = [(score, text) for (score, _, text), end in zip(every, ends, strict=True) if not end]
    finished = finished + [
        (score / divisors[0][size], text)
        for (score, _, text), end in zip(every[:count], ends[:count], strict=True)
        if end
    ]
    finished = sorted(finished, key=lambda each: -each[0])[:count]
    full = len(finished) == count
    better = not full or (running and running[0][0] / divisors[1][size] > finished[-1][0])
    done = size == most or not better or (early and full)
    return (running[:count], finished), bool(done)


@pytest.mark.parametrize("stop", [(), (2,), (1, 2, 0)])
def test_a_step_is_that_of_plain_python(stop):
    """Without a model. Scores are few numbers, so that candidates of equal scores are common."""
    rows, most, draw = 24, 4, np.random.default_rng(len(stop))
    for early, penalty in ((True, 0.0), (False, 1.0), ("never", 2.0)):
        rules = hypotheses.rules(jnp.asarray(stop, jnp.int32), most, penalty, early)
        divisors = np.asarray(rules.divisor), np.asarray(rules.best_divisor)
        own = hypotheses.start(rows, 2, most, jnp.float32)
        wanted, going = [([(0.0, []), (hypotheses.NONE, [])], [])] * rows, [*range(rows)]
        for _ in range(most):
            logprobs = -draw.integers(1, 4, (rows, 2, 5)).astype(np.float32)
            own = STEP(own, jnp.asarray(logprobs), rules)[0]
            text, scores, done = map(np.asarray, (own.tokens, own.scores, own.done))
            for row in list(going):
                args = logprobs[row].tolist(), stop, divisors, early is True, most
                wanted[row], ended = reference_step(wanted[row], *args)
                assert done[row] == ended
                for beam, (score, tokens) in enumerate(wanted[row][0] if not ended else ()):
                    assert text[row, beam, : len(tokens)].tolist() == tokens
                    assert scores[row, beam] == pytest.approx(score, rel=1e-6)
                kept = int(np.asarray(own.finished)[row].sum())
                assert kept == len(wanted[row][1])
                for place, (score, tokens) in enumerate(wanted[row][1]):
                    assert np.asarray(own.ended)[row, place, : len(tokens)].tolist() == tokens
                    assert np.asarray(own.ended_scores)[row, place] == pytest.approx(score)
                if ended:
                    going.remove(row)
        assert not going


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    noise=st.sampled_from((0.0, 0.05, 0.2, 1.0)),
    penalty=st.sampled_from((-1.0, 0.0, 0.7, 1.0, 3.0)),
    early=st.sampled_from((True, False, "never")),
    ends=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2, unique=True),
    rows=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        min_size=len(ROWS),
        max_size=len(ROWS),
    ),
)
def test_speculative_beams_are_the_plain_ones(seed, noise, penalty, early, ends, rows):
    own = params(seed, noise)
    how = {"rows": rows, "eos_id": ends, "length_penalty": penalty, "early_stopping": early}
    plain, drafted = searched(own, **how), searched(own, **how, draft=DRAFT)
    assert_same(drafted, plain)
    assert (drafted.steps == plain.steps).all()
    if noise == 0:
        # The draft is the target: every step of a pass is decided.
        assert (drafted.passes == fewest(plain.steps)).all()


@pytest.mark.parametrize("drafted", by_default([False, True], [True]))
def test_a_batch_of_one_row(drafted):
    """All steps are written by another operation than those of several rows."""
    own = params(4, 0.2)
    found = searched(own, ROWS[:1], draft=DRAFT if drafted else None)
    wanted = expected(own, ROWS[0])
    assert found.outputs()[0] == [text for text, _ in wanted]
    np.testing.assert_allclose(found.scores[0], [score for _, score in wanted], atol=1e-4)


def test_a_row_does_not_depend_on_the_batch():
    own = params(3, 0.2)
    how = {"eos_id": ENDS, "early_stopping": True}
    for draft in (None, DRAFT):
        every = searched(own, draft=draft, **how)
        for number in range(len(ROWS)):
            others = [ROWS[number], *(ROWS[(number + i) % 3] for i in range(1, len(ROWS)))]
            alone = searched(own, others, draft=draft, **how)
            assert alone.outputs()[0] == every.outputs()[number]
            assert alone.passes[0] == every.passes[number]


MISTAKES = {
    "a step is accepted if the best beam is among the draft's": (
        "rounds",
        ("same.any(-1).all(-1)", "same.any(-1)[:, 0]"),
    ),
    "a step is accepted if some beam is among the draft's": (
        "rounds",
        ("same.any(-1).all(-1)", "same.any(-1).any(-1)"),
    ),
    "a beam reads the places of the beam with its own number": (
        "rounds",
        ("_of(now.front.before, parent) | here", "now.front.before | here"),
    ),
    "a beam reads the last token of the beam with its own number": (
        "rounds",
        ("* beams + parent)[..., None]", "* beams + jnp.arange(beams))[..., None]"),
    ),
    "only beams of the draft go on": (
        "rounds",
        (
            "_log_softmax(own_logits), rules)",
            "jnp.where(_drafted(nodes, level, node, logits.shape[-1]), "
            "_log_softmax(own_logits), -1e6), rules)",
        ),
        (
            "def _propose(",
            "def _drafted(nodes, level, node, vocab):\n"
            "    if level + 1 >= len(nodes.tokens):\n"
            "        return True\n"
            "    own = nodes.parents[level + 1][:, None] == node[..., None]\n"
            "    token = nodes.tokens[level + 1][:, None, :, None] == jnp.arange(vocab)\n"
            "    return (own[..., None] & token).any(2)\n\n\n"
            "def _propose(",
        ),
    ),
    "accepted steps finish nothing": (
        "rounds",
        (
            "        here = jnp.arange(sizes.places)",
            "        if level:\n"
            "            old = now.own\n"
            "            own = own.replace(ended=old.ended, ended_scores=old.ended_scores,\n"
            "                              finished=old.finished)\n"
            "        here = jnp.arange(sizes.places)",
        ),
    ),
    "steps are taken after the end": ("rounds", (" & ~now.own.done\n    return", "\n    return")),
    "a finished row goes on": ("rounds", ("_where(live & ~bad,", "_where(live | True,")),
    "the keys of a pass are written at the wrong step": (
        "rounds",
        ("at, read = now.own.steps *", "at, read = after.own.steps *"),
    ),
    "the penalty counts no last token": (
        "hypotheses",
        ("rules.divisor[own.steps]", "rules.divisor[own.steps - 1]"),
    ),
    "no penalty": ("hypotheses", ("/ rules.divisor[own.steps][:, None]", "/ rules.divisor[0]")),
    "the test for the end has another length": (
        "hypotheses",
        ("rules.best_divisor[count]", "rules.best_divisor[0]"),
    ),
    "every candidate may finish": ("hypotheses", ("ends & (jnp.arange(kept) < beams)", "ends")),
    "as many candidates as beams": (
        "hypotheses",
        ("beams * max(2, 1 + len(rules.stop))", "beams"),
    ),
}


# By default one mistake of a further step, and one that forgets what it finishes.
COMMON = (
    "a step is accepted if the best beam is among the draft's",
    "accepted steps finish nothing",
)


@pytest.mark.parametrize("mistake", by_default(MISTAKES, COMMON))
def test_mistakes_are_detected(mistake, monkeypatch):
    """On the cases of the first test."""
    name, *changes = MISTAKES[mistake]
    beam_cases.with_mistake(monkeypatch, name, *changes)
    try:
        detected = [
            differs(
                searched(own, eos_id=ENDS, draft=DRAFT, **case),
                [expected(own, row, eos_id=ENDS, **case) for row in ROWS],
            )
            for own in (params(1, 0.2), params(2, 0.2))
            for case in CASES
        ]
    finally:
        monkeypatch.undo()
        beam_cases.forget()
    assert any(detected)


DRAFT_MISTAKES = {
    "the last step is not fed again": (
        "tree.join(again, rest)",
        "tree.join(jax.tree.map(jnp.zeros_like, again), rest)",
    ),
    "the draft has no scores": (
        "_roots(sizes, now.front), now.own.scores\n",
        "_roots(sizes, now.front), 0 * now.own.scores\n",
    ),
    "the draft's keys are written a step late": (
        "tree.join(again, rest), at)",
        "tree.join(again, rest), at + sizes.beams)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", DRAFT_MISTAKES)
def test_mistakes_of_the_draft_cost_passes(mistake, monkeypatch):
    """They change no hypothesis; a draft that is the target itself needs more passes."""
    beam_cases.with_mistake(monkeypatch, "rounds", DRAFT_MISTAKES[mistake])
    try:
        found = [searched(params(seed), eos_id=ENDS, draft=DRAFT) for seed in range(3)]
    finally:
        monkeypatch.undo()
        beam_cases.forget()
    assert any((each.passes > fewest(each.steps)).any() for each in found)


def test_other_settings_compile_nothing():
    own = params(4, 0.1)
    for draft in (None, DRAFT):
        searched(own, eos_id=ENDS, draft=draft)
        before = beams._beam_search._cache_size()
        searched(params(5, 0.1), ROWS[::-1], eos_id=(1, 3), draft=draft, **CASES[3])
        assert beams._beam_search._cache_size() == before


def test_wrong_arguments_are_errors():
    own = params(0)
    other, _ = testing.tiny(vocab_size=VOCAB + 1)
    for changes, message in (
        ({"beams": 1}, "greedy"),
        ({"beams": 0}, "beams is 0"),
        ({"returned": BEAMS + 1}, "return at most"),
        ({"beams": VOCAB, "eos_id": 2}, "take at most 12 beams"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 500}, "positions"),
        ({"early_stopping": "always"}, "True, False or 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": -20.0}, "scores would be divided by more than 1e"),
        ({"draft": sj.BeamDraft(MODEL, gamma=0)}, "gamma is 0"),
        ({"draft": sj.BeamDraft(MODEL, beams=BEAMS - 1)}, "from 3 to 13 beams"),
        ({"draft": sj.BeamDraft(other)}, "the same vocabulary"),
        ({"draft": other}, "it must be a BeamDraft or None"),
    ):
        with pytest.raises(UserError, match=message):
            searched(own, **changes)
    prompt, lengths = sj.pack_prompts([[1, 2], [3]])
    for arrays, message in (
        (([[1, 2]], [2]), "prompt is of type list"),
        ((prompt * 1.5, lengths), "prompt is .*; it must be integers"),
        ((prompt, lengths[:1]), "lengths is .* one for each row"),
    ):
        with pytest.raises(UserError, match=message):
            sj.beam_search(MODEL, own, *arrays, beams=BEAMS, max_new_tokens=4)
    with pytest.raises(UserError, match="params is"):
        sj.beam_search(MODEL, own.target, prompt, lengths, beams=BEAMS, max_new_tokens=4)


def test_logits_that_are_not_finite_end_their_row_alone():
    own = params(1, 0.2)
    bad = jax.tree.map(jnp.array, own.target)
    bad["embed"]["embedding"] = bad["embed"]["embedding"].at[ROWS[1][-1]].set(jnp.nan)
    packed, lengths = sj.pack_prompts(ROWS, beam_cases.WIDTH)
    kw = {"beams": BEAMS, "max_new_tokens": NEW, "returned": BEAMS, "eos_id": ENDS}
    for draft in (None, DRAFT):
        found = sj.beam_search(
            MODEL, ModelParams(bad, own.draft), packed, lengths, **kw, draft=draft
        )
        clean = searched(own, eos_id=ENDS, draft=draft)
        assert int(found.failed[1]) == 0
        with pytest.raises(NonFiniteLogits, match="row"):
            sj.check(found)
        # Another row fails if one of its beams has the token.
        good = np.flatnonzero(found.failed < 0)
        assert len(good)
        for row in good:
            assert found.outputs()[row] == clean.outputs()[row]


def test_equal_scores_are_in_the_order_of_beams_and_tokens():
    """All logits are equal. The first beam has all best candidates: it ends in the third place."""
    equal = jax.tree.map(jnp.zeros_like, params(0))
    for draft in (None, DRAFT):
        found = searched(equal, eos_id=ENDS, length_penalty=0.0, draft=draft)
        assert found.outputs() == [[[2], [0, 2], [0, 0, 2]]] * len(ROWS)
        # The best beam is as good as the worst of them, and not better.
        assert (found.steps == 3).all()
        assert (found.passes == (3 if draft is None else 1)).all()


def broken(own, token):
    """The parameters of a model whose logits after this token are not finite."""
    own = jax.tree.map(jnp.array, own)
    own["embed"]["embedding"] = own["embed"]["embedding"].at[token].set(jnp.nan)
    return own


def test_the_pass_in_which_a_row_failed():
    """A later one too: the steps before it stay."""
    own, kw = params(1, 0.2), {"beams": BEAMS, "max_new_tokens": NEW, "eos_id": ENDS}
    packed, lengths = sj.pack_prompts(ROWS, beam_cases.WIDTH)
    clean = {draft: searched(own, eos_id=ENDS, draft=draft) for draft in (None, DRAFT)}
    seen = set()
    for token in (0, 6, 10):
        pair = ModelParams(broken(own.target, token), own.draft)
        for draft in (None, DRAFT):
            found = sj.beam_search(MODEL, pair, packed, lengths, **kw, draft=draft)
            bad = np.asarray(found.failed) >= 0
            np.testing.assert_array_equal(found.failed[bad] + 1, found.passes[bad])
            np.testing.assert_array_equal(found.passes[~bad], clean[draft].passes[~bad])
            assert (np.asarray(found.failed)[~bad] == -1).all()
            if draft is None:
                # Each pass before it took a step.
                np.testing.assert_array_equal(found.steps[bad], found.failed[bad])
            seen |= set(np.asarray(found.failed)[bad].tolist())
    assert max(seen) > 0


def test_drafts_that_are_not_finite_are_reported():
    """Of a draft model that fails after one token, and of one that always does."""
    own = params(1, 0.2)
    packed, lengths = sj.pack_prompts(ROWS, beam_cases.WIDTH)
    kw = {"beams": BEAMS, "max_new_tokens": NEW, "returned": BEAMS, "eos_id": ENDS, "draft": DRAFT}
    never = ModelParams(own.target, jax.tree.map(lambda x: x + jnp.nan, own.draft))
    found = sj.beam_search(MODEL, never, packed, lengths, **kw)
    assert (found.failed == 0).all() and (found.passes == 1).all()
    with pytest.raises(NonFiniteLogits, match="of the draft model"):
        sj.check(found)
    one = ModelParams(own.target, broken(own.draft, ROWS[1][-1]))
    found = sj.beam_search(MODEL, one, packed, lengths, **kw)
    assert found.failed[1] == 0
    clean = searched(own, eos_id=ENDS, draft=DRAFT)
    for row in np.flatnonzero(np.asarray(found.failed) < 0):
        assert found.outputs()[row] == clean.outputs()[row]


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_scores_in_float64(drafted, recurrent):
    """Beams change places: keys, values and states move with them."""
    with jax.enable_x64(True):
        own, config = params(2, 0.1), beam_cases.CONFIG
        if recurrent:
            config = testing.tiny_config("qwen3_next", vocab_size=VOCAB)
            first, second = (lm.init_params(config, jax.random.key(n)) for n in range(2))
            near = jax.tree.map(lambda a, b: a + 0.1 * b, first, second)
            own = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, ModelParams(first, near))
        model = lm.from_config(config, jnp.float64)
        own = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), own)
        packed, lengths = sj.pack_prompts(ROWS, beam_cases.WIDTH)
        sizes = {"beams": BEAMS, "max_new_tokens": NEW, "returned": BEAMS, "length_penalty": 0.7}
        draft = sj.BeamDraft(model, 2, 5) if drafted else None
        found = sj.beam_search(model, own, packed, lengths, **sizes, draft=draft)
        assert found.scores.dtype == jnp.float64
        forward = jax.jit(lambda tokens: lm.forward(model, own.target, tokens).logits)
        for prompt, row, scores in zip(ROWS, found.outputs(), found.scores, strict=True):
            for text, score in zip(row, scores, strict=True):
                whole = np.zeros((1, beam_cases.WIDTH + NEW), np.int32)
                whole[0, : len(prompt) + NEW] = [*prompt, *text]
                logprobs = jax.nn.log_softmax(forward(whole)[0])
                places = len(prompt) - 1 + np.arange(NEW)
                total = float(logprobs[places, np.asarray(text)].sum())
                assert abs(total / NEW**0.7 - float(score)) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t5", "windowed"])
def test_a_draft_that_is_the_target_decides_every_step(kind):
    """Models with an encoder and with windows: their draft passes have the right positions."""
    if kind == "t5":
        target, own = testing.tiny_t5(0, vocab_size=VOCAB, num_layers=1, encoder_layers=1)
    else:
        sizes = {"vocab_size": VOCAB, "layers": 2, "width": 16}
        config = testing.tiny_config("mistral", **sizes)
        target = lm.from_config(dataclasses.replace(config, windows=(4, 4)))
        own = testing.tiny("mistral", 0, **sizes)[1]
    rows = [target.prompt([token for token in row if token]) for row in ROWS]
    packed, lengths = sj.pack_prompts(rows)
    sizes = {"beams": BEAMS, "max_new_tokens": NEW, "returned": BEAMS}
    plain, drafted = (
        sj.beam_search(target, ModelParams(own, own), packed, lengths, **sizes, draft=draft)
        for draft in (None, sj.BeamDraft(target, GAMMA))
    )
    assert_same(drafted, plain)
    np.testing.assert_array_equal(drafted.passes, fewest(plain.steps))


@pytest.mark.slow
@pytest.mark.parametrize("drafted", [4, 8])
def test_a_real_model_has_the_plain_beams(stories, drafted):
    """stories260K; the draft has noise in its weights."""
    rng = np.random.default_rng(0)
    near = jax.tree.map(
        lambda x: x + 0.1 * x.std() * rng.normal(size=x.shape).astype(np.float32), stories.params
    )
    texts = ("Once upon a time", "The little dog wanted", "Lily said")
    packed, lengths = sj.pack_prompts([stories.tokenizer.encode(text).ids for text in texts])
    own = (stories.lm, ModelParams(stories.params, near), packed, lengths)
    kw = {"beams": 4, "returned": 4, "max_new_tokens": 48, "eos_id": stories.config.eos_token_id}
    plain = sj.beam_search(*own, **kw)
    found = sj.beam_search(*own, **kw, draft=sj.BeamDraft(stories.lm, 4, drafted))
    assert_same(found, plain)
    # There were accepted steps, and rejected ones.
    assert -(-48 // 5) * len(texts) < int(found.passes.sum()) < int(found.steps.sum())
