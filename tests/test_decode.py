"""The decode loop: greedy identity, ends and limits, frozen rows, independent rows, no retrace."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import (
    NEW,
    PROMPTS,
    begin,
    oracle,
    pair,
    run,
    speculate,
    stops,
    tabular,
    texts,
    tiny,
)
from marks import by_default

from specjax import accept, decode, drafters, testing
from specjax.errors import UserError
from specjax.types import ModelParams


@pytest.fixture(scope="module")
def targets(request):
    """name -> (LM, params), for two random models and a trained one."""

    def get(name):
        if name == "stories260K":
            loaded = request.getfixturevalue("stories")
            return loaded.lm, loaded.params
        return tiny(name)

    return get


MODELS = ["llama", "gpt2", "stories260K"]
DRAFTS = ["stranger", "itself", "itself, gamma 1", "lookup", "lookup, original rule"]
ALL = list(itertools.product(MODELS, DRAFTS))
# The drafters that differ most on one model, and one drafter on the others.
QUICK = [("llama", "itself"), ("llama", "lookup")]


@pytest.mark.parametrize(("name", "draft"), by_default(ALL, QUICK))
def test_greedy_equals_autoregressive(targets, name, draft):
    model, params = targets(name)
    drafter, both = pair(model, params, draft)
    expected = oracle(model, ModelParams(params))
    output, state, records = speculate(model, drafter, "chain", both)
    assert output == expected
    assert all(len(row) == NEW for row in output)
    np.testing.assert_array_equal(records.emitted.sum(0), [NEW] * len(PROMPTS))
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    assert (np.asarray(records.accepted) <= np.asarray(records.drafted)).all()


ALONE = itertools.product(MODELS, ("itself", "lookup"))


@pytest.mark.parametrize(("name", "draft"), by_default(ALONE, []))
def test_greedy_equals_autoregressive_with_one_row(targets, name, draft):
    model, params = targets(name)
    drafter, both = pair(model, params, draft)
    for prompt in (PROMPTS[1], PROMPTS[2]):
        expected = oracle(model, ModelParams(params), [prompt], max_len=50)
        assert speculate(model, drafter, "chain", both, [prompt], max_len=50)[0] == expected


@pytest.mark.parametrize("name", by_default(MODELS, ("llama",)))
def test_a_perfect_draft_is_always_accepted(targets, name):
    """The draft cache is right in every round: a drafter with the target's weights never errs."""
    model, params = targets(name)
    drafter, both = pair(model, params, "itself")
    for settings in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
    ):
        _, _, records = speculate(model, drafter, "chain", both, **settings)
        np.testing.assert_array_equal(records.accepted, records.drafted)
        assert int(records.emitted.sum()) == NEW * len(PROMPTS)


@pytest.mark.parametrize("name", by_default(MODELS, ("llama",)))
def test_eos_inside_accepted_drafts(targets, name):
    """Output ends right after the first end-of-sequence token, also inside an accepted draft."""
    model, params = targets(name)
    full = oracle(model, ModelParams(params))
    drafts = ("itself", "itself, gamma 1", "lookup") if name == "gpt2" else ("itself", "lookup")
    for eos in (full[0][1], full[2][6], (full[1][3], full[3][9])):
        expected = oracle(model, ModelParams(params), eos_id=eos)
        for row, tokens in zip(full, expected, strict=True):
            ends = [i for i, t in enumerate(row) if t in stops(eos)]
            assert tokens == (row[: ends[0] + 1] if ends else row)
        for draft in drafts:
            drafter, both = pair(model, params, draft)
            assert speculate(model, drafter, "chain", both, eos_id=eos)[0] == expected


@pytest.mark.parametrize("rule", by_default(["chain", "match", "traversal"], ["chain"]))
def test_limits_per_row(rule):
    """Each row stops at its own limit, also inside an accepted draft; no slot after it is used."""
    model, params = tiny("llama")
    drafter, both = pair(model, params, "itself")
    full = oracle(model, both)
    new = [0, 1, 2, 6, 13]
    state, _ = run(model, drafter, rule, both, begin(model, drafter, both, new=jnp.asarray(new)))
    assert texts(state, PROMPTS) == [row[:n] for row, n in zip(full, new, strict=True)]
    for row in range(5):
        assert (state.tokens[row, int(state.length[row]) :] == -1).all()


def test_greedy_and_sampled_rows_in_one_batch():
    """Settings are per row: the greedy rows of a mixed batch are those of a greedy batch."""
    model, params = tiny("llama")
    drafter, both = pair(model, params, "itself")
    greedy = oracle(model, both)
    mixed = speculate(model, drafter, "chain", both, temperature=[0.0, 1.0, 0.0, 2.0, 0.0])[0]
    assert [mixed[i] for i in (0, 2, 4)] == [greedy[i] for i in (0, 2, 4)]


@pytest.mark.parametrize(
    ("name", "draft"),
    by_default(
        itertools.product(MODELS, ("itself", "lookup", "stranger")),
        [("llama", "itself")],
    ),
)
def test_match_is_seeded_plain_decoding(targets, name, draft):
    """Sample-then-match emits, token for token, what plain sampling emits with the same keys."""
    model, params = targets(name)
    drafter, both = pair(model, params, draft)
    for settings in ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}):
        expected = oracle(model, ModelParams(params), **settings)
        assert speculate(model, drafter, "match", both, **settings)[0] == expected


def test_a_tiny_top_p_keeps_the_best_token():
    """Also a top_p that underflows in float32."""
    model, params = tiny("llama")
    drafter, both = pair(model, params, "lookup")
    greedy = oracle(model, both)
    assert speculate(model, drafter, "chain", both, temperature=1.0, top_p=1e-40)[0] == greedy


@functools.cache
def of_a_table(name):
    """A drafter for the model ``tabular(7)``."""
    keys = {"model": tabular(7, "draft")} if name == "draft_model" else {}
    return drafters.make(name, tabular(7), gamma=3, **keys)


@pytest.mark.parametrize("rule", by_default(["chain", "match"], ["chain"]))
@pytest.mark.parametrize("name", by_default(["draft_model", "prompt_lookup"], ["prompt_lookup"]))
def test_a_row_alone_equals_that_row_in_a_batch(name, rule):
    """Sampled, ragged, with rows that end early: the other rows of the batch have no effect."""
    model, drafter = tabular(7), of_a_table(name)
    both = ModelParams(testing.random_table(0, 7, 3.0), testing.random_table(1, 7, 3.0))
    prompts = [[p % 7 for p in prompt] for prompt in PROMPTS]
    keys = {"temperature": 0.8, "top_p": 0.9, "width": 7, "max_len": 50, "eos_id": 6}
    together = speculate(model, drafter, rule, both, prompts, **keys)[0]
    assert len({len(row) for row in together}) > 1
    for row, prompt in enumerate(prompts):
        alone = speculate(model, drafter, rule, both, [prompt], ids=[row], **keys)[0]
        assert alone == [together[row]]
    order = [3, 0, 4, 2, 1]
    moved = [prompts[i] for i in order]
    shuffled = speculate(model, drafter, rule, both, moved, ids=order, **keys)[0]
    assert shuffled == [together[i] for i in order]


@pytest.mark.slow
def test_finished_rows_are_frozen():
    model, params = tiny("llama")
    drafter, both = pair(model, params, "stranger")
    start = begin(model, drafter, both, new=jnp.asarray([2, 20, 2, 20, 20]))
    seen = {}
    rounds = 0
    loop = decode.stream(model, drafter, accept.load("chain"), both, start, eos_id=stops(None))
    for state, info in loop:
        rounds += 1
        now = jax.device_get((state.tokens, state.length, state.cache.length))
        assert (np.asarray(state.draft.kept.length) <= np.asarray(state.length)).all()
        for row in (0, 2):
            if row in seen:
                jax.tree.map(np.testing.assert_array_equal, seen[row], [x[row] for x in now])
                counts = (info.emitted[row], info.accepted[row], info.drafted[row])
                assert [int(count) for count in counts] == [0, 0, 0]
            elif bool(state.done[row]):
                seen[row] = [x[row] for x in now]
    assert rounds > 3 and set(seen) == {0, 2}


def test_stream_equals_generate():
    model, params = tiny("llama")
    drafter, both = pair(model, params, "stranger")
    expected, _, records = speculate(model, drafter, "chain", both, temperature=1.0)
    pieces = [[] for _ in PROMPTS]
    start = begin(model, drafter, both, temperature=1.0)
    loop = decode.stream(model, drafter, accept.load("chain"), both, start, eos_id=stops(None))
    for step, (_, info) in enumerate(loop):
        for row, tokens in enumerate(np.asarray(info.tokens)):
            pieces[row] += tokens[: int(info.emitted[row])].tolist()
        np.testing.assert_array_equal(info.accepted, records.accepted[step])
    assert pieces == expected


def test_generate_continues_after_max_steps():
    model, params = tiny("llama")
    drafter, both = pair(model, params, "lookup")
    rule = accept.load("chain")
    expected = speculate(model, drafter, "chain", both, temperature=1.0)[0]
    state = begin(model, drafter, both, temperature=1.0)
    with pytest.raises(UserError, match="max_steps is 0; it must be a whole number >= 1"):
        decode.generate(model, drafter, rule, both, state, max_steps=0)
    while not bool(state.done.all()):
        state, records = decode.generate(model, drafter, rule, both, state, max_steps=3)
        # Room for the next multiple of 64 rounds; those beyond the limit are unused.
        assert records.emitted.shape == (decode.ROUNDS, 5)
        assert not np.asarray(records.verified)[3:].any()
    assert texts(state, PROMPTS) == expected


@pytest.mark.parametrize(
    "name", by_default(["draft_model", "prompt_lookup", "none"], ["prompt_lookup", "none"])
)
def test_no_retrace(name):
    """New settings, seeds and texts of the same shape run the existing program."""
    # A real decoder for one drafter; a table, which compiles faster, for the others.
    model, params = (
        tiny("llama") if name == "draft_model" else (tabular(12), testing.random_table(0, 12))
    )
    traces = []

    def counted(*args):
        traces.append(1)
        return model.apply(*args)

    watched = model._replace(apply=counted)
    keys = {"model": watched, "gamma": 3} if name == "draft_model" else {}
    drafter, both = drafters.make(name, watched, **keys), ModelParams(params, params)
    speculate(watched, drafter, "chain", both, temperature=1.0)
    oracle(watched, both, temperature=1.0)
    first = len(traces)
    assert first
    other = [[2, 2, 9], [1], [1, 1, 1, 1, 1, 1, 1], [4, 3, 3, 3], [9, 9, 9, 9, 9]]
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 3},
    ):
        speculate(watched, drafter, "chain", both, other, seed=9, **settings)
        oracle(watched, both, other, seed=9, **settings)
    assert len(traces) == first


def test_a_state_is_for_its_drafter():
    """Buffers are sized for the drafter's nodes: another drafter would write beyond them."""
    model, params = tiny("llama")
    drafter, both = pair(model, params, "lookup")
    state = begin(model, drafters.make("none", model), both)
    with pytest.raises(UserError) as error:
        run(model, drafter, "chain", both, state)
    assert str(error.value) == (
        "the state was prefilled for none with 0 nodes (depth 0, chain), and the drafter is "
        "prompt_lookup with 5 nodes (depth 5, chain); prefill a state for this drafter"
    )
