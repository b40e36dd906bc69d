"""The decode loop's contract: greedy identity, ends and limits, frozen rows, row independence, no retrace, bad input."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.draft_models import draft_model
from specjax.errors import NonFiniteLogits, UserError
from specjax.types import Draft, ModelParams

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3, 3, 3], [1, 2, 1, 2, 1]]
NEW = 40


@pytest.fixture(scope="session", params=["llama", "gpt2", "stories260K"])
def target(request):
    """Three models: (LM, params)."""
    if request.param == "stories260K":
        loaded = request.getfixturevalue("stories")
        return loaded.lm, loaded.params
    return testing.tiny(request.param, 0)


def begin(
    model,
    drafter,
    params,
    prompts=PROMPTS,
    new=NEW,
    seed=0,
    ids=None,
    max_len=None,
    chunk=256,
    **settings,
):
    packed, lengths = decode.pack_prompts(prompts)
    settings = settings or {"temperature": 0.0}
    return decode.prefill(
        model,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(seed, ids or len(prompts)),
        max_len=max_len or packed.shape[1] + new,
        limit=lengths + new,
        sampling=sampling.make_sampling(len(prompts), **settings),
        chunk=chunk,
    )


def stops(eos_id):
    """Always two ids, so that tests with and without share their programs; -2 is nobody's id."""
    return (*((eos_id,) if isinstance(eos_id, int) else eos_id or ()), -2, -2)[:2]


def oracle(model, params, prompts=PROMPTS, new=NEW, eos_id=None, **kw):
    state = begin(model, drafters.make("none", model), params, prompts, new, **kw)
    state = decode.autoregressive(model, params, state, max_steps=new, eos_id=stops(eos_id))
    return decode.outputs(state, [len(p) for p in prompts])


def speculate(model, drafter, rule, params, prompts=PROMPTS, new=NEW, eos_id=None, **kw):
    state = begin(model, drafter, params, prompts, new, **kw)
    rule = accept.load(rule)
    state, records = decode.generate(
        model, drafter, rule, params, state, max_steps=NEW, eos_id=stops(eos_id)
    )
    decode.check(state)
    assert bool(state.done.all())
    return decode.outputs(state, [len(p) for p in prompts]), state, records


@functools.cache  # compiling is what takes the time: tests share these
def makes(model):
    """Drafters for a target: a stranger, the target itself (always accepted), and prompt lookup both ways."""
    stranger = testing.tiny("gpt2", 7, layers=1, vocab_size=model.vocab_size)
    return {
        "stranger": (draft_model.make(model, model=stranger[0], gamma=3), stranger[1]),
        "itself": (draft_model.make(model, model=model, gamma=4), None),
        "itself, gamma 1": (draft_model.make(model, model=model, gamma=1), None),
        "lookup": (drafters.make("prompt_lookup", model, gamma=5), {}),
        "lookup, original rule": (
            drafters.make("prompt_lookup", model, gamma=3, match="latest", partial=False),
            {},
        ),
    }


def pair(model, params, name):
    drafter, draft_params = makes(model)[name]
    return drafter, ModelParams(params, params if draft_params is None else draft_params)


EVERY = ["stranger", "itself", "itself, gamma 1", "lookup", "lookup, original rule"]


@pytest.mark.parametrize("name", EVERY)
def test_greedy_equals_autoregressive(target, name):
    model, params = target
    drafter, both = pair(model, params, name)
    expected = oracle(model, ModelParams(params))
    got, state, records = speculate(model, drafter, "chain", both)
    assert got == expected
    assert all(len(row) == NEW for row in got)
    np.testing.assert_array_equal(records.emitted.sum(0), [NEW] * len(PROMPTS))
    np.testing.assert_array_equal(state.cache.length, state.length - 1)
    assert (np.asarray(records.accepted) <= np.asarray(records.drafted)).all()


@pytest.mark.parametrize("name", ["itself", "lookup"])
def test_greedy_equals_autoregressive_alone(target, name):
    model, params = target
    drafter, both = pair(model, params, name)
    for prompt in (PROMPTS[1], PROMPTS[2]):
        expected = oracle(model, ModelParams(params), [prompt], max_len=50)
        assert speculate(model, drafter, "chain", both, [prompt], max_len=50)[0] == expected


def test_a_perfect_draft_is_always_accepted(target):
    """The draft cache is right in every round: a drafter with the target's weights is never rejected."""
    model, params = target
    drafter, both = pair(model, params, "itself")
    for settings in (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
    ):
        _, _, records = speculate(model, drafter, "chain", both, **settings)
        np.testing.assert_array_equal(records.accepted, records.drafted)
        assert int(records.emitted.sum()) == NEW * len(PROMPTS)


def test_eos_inside_accepted_drafts(target):
    """Output stops right after the first end-of-sequence token, also in the middle of an accepted draft."""
    model, params = target
    full = oracle(model, ModelParams(params))
    for eos in (full[0][1], full[2][6], (full[1][3], full[3][9])):
        expected = oracle(model, ModelParams(params), eos_id=eos)
        for row, tokens in zip(full, expected, strict=True):
            ends = [i for i, t in enumerate(row) if t in stops(eos)]
            assert tokens == (row[: ends[0] + 1] if ends else row)
        for name in ("itself", "itself, gamma 1", "lookup"):
            drafter, both = pair(model, params, name)
            assert speculate(model, drafter, "chain", both, eos_id=eos)[0] == expected


@pytest.mark.parametrize("rule", ["chain", "match", "traversal"])
def test_limits_per_row(rule):
    """Each row stops at its own limit, even inside an accepted draft, and nothing is written beyond."""
    model, params = testing.tiny("llama", 0)
    drafter, both = pair(model, params, "itself")
    packed, lengths = decode.pack_prompts(PROMPTS)
    new = jnp.asarray([0, 1, 2, 6, 13])
    full = oracle(model, both)
    state = decode.prefill(
        model,
        drafter,
        both,
        packed,
        lengths,
        rng.row_keys(0, 5),
        max_len=packed.shape[1] + 13,
        limit=lengths + new,
        sampling=sampling.make_sampling(5, 0.0),
    )
    state, _ = decode.generate(model, drafter, accept.load(rule), both, state, max_steps=20)
    got = decode.outputs(state, [len(p) for p in PROMPTS])
    assert got == [row[:n] for row, n in zip(full, new.tolist(), strict=True)]
    for row in range(5):
        assert (state.tokens[row, int(state.length[row]) :] == -1).all()


def test_the_smallest_buffer_is_enough():
    """Prompt + 1 new token, and a prompt that fills the model's positions: no slot is written past the end."""
    model, params = testing.tiny("gpt2", 3)
    drafter, both = draft_model.make(model, model=model, gamma=6), ModelParams(params, params)
    long = [i % 32 for i in range(127)]
    for prompts in ([long], [long, [5]]):
        assert speculate(model, drafter, "chain", both, prompts, 1)[0] == oracle(
            model, both, prompts, 1
        )


@pytest.mark.parametrize("chunk", [1, 3, 5, 256])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_chunked_prefill_fills_the_same_cache(family, chunk):
    model, params = testing.tiny(family, 0)
    drafter = drafters.make("none", model)
    whole = begin(model, drafter, ModelParams(params))
    pieces = begin(model, drafter, ModelParams(params), chunk=chunk)
    np.testing.assert_array_equal(whole.cache.length, pieces.cache.length)
    for a, b in zip(whole.cache.k + whole.cache.v, pieces.cache.k + pieces.cache.v, strict=True):
        for row, prompt in enumerate(PROMPTS):
            np.testing.assert_allclose(
                a[row, :, : len(prompt) - 1], b[row, :, : len(prompt) - 1], atol=2e-5
            )


@pytest.mark.parametrize("rule", ["chain", "match"])
@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup"])
def test_a_row_alone_equals_that_row_in_a_batch(name, rule):
    """Sampled, ragged, with rows that end early: the company a row keeps changes nothing."""
    model, table = testing.tabular(7), testing.random_table(0, 7, 3.0)
    keys = (
        {"model": testing.tabular(7, "draft"), "gamma": 3}
        if name == "draft_model"
        else {"gamma": 3}
    )
    drafter, both = (
        drafters.make(name, model, **keys),
        ModelParams(table, testing.random_table(1, 7, 3.0)),
    )
    prompts = [[p % 7 for p in prompt] for prompt in PROMPTS]
    kw = {"temperature": 0.8, "top_p": 0.9, "max_len": 50, "eos_id": 6}
    together = speculate(model, drafter, rule, both, prompts, **kw)[0]
    assert len({len(row) for row in together}) > 1
    for row, prompt in enumerate(prompts):
        alone = speculate(model, drafter, rule, both, [prompt], ids=[row], **kw)[0]
        assert alone == [together[row]]
    order = [3, 0, 4, 2, 1]
    shuffled = speculate(model, drafter, rule, both, [prompts[i] for i in order], ids=order, **kw)[
        0
    ]
    assert shuffled == [together[i] for i in order]


def test_greedy_and_sampled_rows_in_one_batch():
    """Settings are per row: the greedy rows of a mixed batch are the greedy rows of a greedy batch."""
    model, params = testing.tiny("llama", 0)
    drafter, both = pair(model, params, "itself")
    greedy = oracle(model, both)
    mixed = speculate(model, drafter, "chain", both, temperature=[0.0, 1.0, 0.0, 2.0, 0.0])[0]
    assert [mixed[i] for i in (0, 2, 4)] == [greedy[i] for i in (0, 2, 4)]


def test_match_is_seeded_plain_decoding(target):
    """Sample-then-match emits, token for token, what plain sampling emits with the same keys."""
    model, params = target
    for settings in ({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20}):
        expected = oracle(model, ModelParams(params), **settings)
        for name in ("stranger", "lookup"):
            drafter, both = pair(model, params, name)
            assert speculate(model, drafter, "match", both, **settings)[0] == expected


def test_finished_rows_are_frozen():
    model, params = testing.tiny("llama", 0)
    drafter, both = pair(model, params, "itself")
    start = begin(model, drafter, both)
    start = start.replace(limit=start.length + jnp.asarray([2, 20, 2, 20, 20]))
    seen = {}
    rounds = 0
    for state, info in decode.stream(model, drafter, accept.load("chain"), both, start):
        rounds += 1
        now = jax.device_get((state.tokens, state.length, state.cache.length))
        assert (np.asarray(state.draft.length) <= np.asarray(state.length)).all()
        for row in (0, 2):
            if row in seen:
                jax.tree.map(np.testing.assert_array_equal, seen[row], [x[row] for x in now])
                assert (
                    int(info.emitted[row]) == int(info.accepted[row]) == int(info.drafted[row]) == 0
                )
            elif bool(state.done[row]):
                seen[row] = [x[row] for x in now]
    assert rounds > 3 and set(seen) == {0, 2}


def test_stream_equals_generate():
    model, params = testing.tiny("gpt2", 0)
    drafter, both = drafters.make("prompt_lookup", model, gamma=4), ModelParams(params)
    expected, _, records = speculate(model, drafter, "chain", both, temperature=1.0)
    pieces = [[] for _ in PROMPTS]
    streamed = begin(model, drafter, both, temperature=1.0)
    for step, (_, info) in enumerate(
        decode.stream(model, drafter, accept.load("chain"), both, streamed)
    ):
        for row, tokens in enumerate(np.asarray(info.tokens)):
            pieces[row] += tokens[: int(info.emitted[row])].tolist()
        np.testing.assert_array_equal(info.accepted, records.accepted[step])
    assert pieces == expected


def test_max_steps_stops_and_goes_on():
    model, params = testing.tiny("llama", 0)
    drafter, both = draft_model.make(model, model=model, gamma=2), ModelParams(params, params)
    rule = accept.load("chain")
    expected = speculate(model, drafter, "chain", both, temperature=1.0)[0]
    state = begin(model, drafter, both, temperature=1.0)
    while not bool(state.done.all()):
        state, records = decode.generate(model, drafter, rule, both, state, max_steps=3)
        assert records.emitted.shape == (3, 5)
    assert decode.outputs(state, [len(p) for p in PROMPTS]) == expected


@pytest.mark.parametrize("name", ["draft_model", "prompt_lookup", "none"])
def test_no_retrace(name):
    """New settings, seed and texts of the same shape run the program that is there."""
    model, params = testing.tiny("llama", 0)
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
    other = [[2, 2, 9], [1], [1, 1, 1, 1, 1, 1, 1], [4, 3, 3, 3], [9, 9, 9, 9, 9]]
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 3},
    ):
        speculate(watched, drafter, "chain", both, other, seed=9, **settings)
        oracle(watched, both, other, seed=9, **settings)
    assert len(traces) == first


def test_the_state_is_donated_and_inputs_survive():
    model, params = testing.tiny("llama", 0)
    drafter, both = drafters.make("none", model), ModelParams(params)
    keys, settings = rng.row_keys(0, 5), sampling.make_sampling(5, 0.0)
    packed, lengths = decode.pack_prompts(PROMPTS)
    for _ in range(2):  # the second time everything handed in must still be alive
        state = decode.prefill(
            model, drafter, both, packed, lengths, keys, max_len=20, sampling=settings
        )
        decode.generate(model, drafter, accept.load("chain"), both, state, max_steps=3)
        assert state.cache.k[0].is_deleted()
    assert (
        not keys.is_deleted() and not packed.is_deleted() and not settings.temperature.is_deleted()
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_non_finite_logits_name_row_and_round(temperature, poison):
    """Never turned into a token: the row stops where it was, the others go on."""
    model = testing.tabular(7)
    table = (
        testing.random_table(0, 7, 1.0).at[:, 6].set(poison)
    )  # after token 6 the logits are broken
    good = testing.random_table(0, 7, 1.0).at[:, :, 6].add(-1e4)
    table = jnp.where(jnp.isfinite(table), good, table)  # and the model never says 6 by itself
    both = ModelParams(table)
    rule, prompts = accept.load("chain"), [[1, 2], [3, 6], [4]]
    for name in ("none", "prompt_lookup"):
        drafter = drafters.make(name, model)
        state = begin(model, drafter, both, prompts, temperature=temperature)
        state, _ = decode.generate(model, drafter, rule, both, state, max_steps=NEW)
        assert decode.outputs(state, [2, 2, 1])[1] == []
        assert state.failed.tolist() == [-1, 0, -1]
        with pytest.raises(NonFiniteLogits, match="row 1, round 0"):
            decode.check(state)
        assert [len(r) for r in decode.outputs(state, [2, 2, 1])] == [NEW, 0, NEW]
    state = begin(model, drafters.make("none", model), both, prompts, temperature=temperature)
    state = decode.autoregressive(model, both, state, max_steps=NEW)
    assert state.failed.tolist() == [-1, 0, -1]
    with pytest.raises(NonFiniteLogits):
        list(decode.stream(model, drafter, rule, both, begin(model, drafter, both, prompts)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_draft_logits_are_reported(temperature):
    model, table = testing.tabular(7), testing.random_table(0, 7, 1.0)
    both = ModelParams(table, table.at[:, 3].set(jnp.nan))
    drafter = draft_model.make(model, model=testing.tabular(7, "draft"), gamma=2)
    state = begin(model, drafter, both, [[1, 3], [3, 1]], temperature=temperature)
    state, _ = decode.generate(model, drafter, accept.load("chain"), both, state, max_steps=NEW)
    assert int(state.failed[0]) == 0
    with pytest.raises(NonFiniteLogits, match="row 0, round 0"):
        decode.check(state)


def test_bad_input_is_one_clear_line():
    model, params = testing.tiny("llama", 0)
    drafter, both = drafters.make("none", model), ModelParams(params)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        decode.pack_prompts([[1], []])
    with pytest.raises(UserError, match="no prompt"):
        decode.pack_prompts([])
    with pytest.raises(UserError, match="need 200 positions, and the model has 128"):
        begin(model, drafter, both, max_len=200)
    with pytest.raises(UserError, match="the prompt has 7 tokens and max_len is 5"):
        begin(model, drafter, both, max_len=5)
    with pytest.raises(UserError, match="prompt 1 has the token id 32; ids must be in 0..31"):
        begin(model, drafter, both, [[1], [2, 32]])
    for gamma in (0, -1, 2.5):
        with pytest.raises(UserError, match="gamma is .*whole number >= 1"):
            draft_model.make(model, model=model, gamma=gamma)
        with pytest.raises(UserError, match="gamma is"):
            drafters.make("prompt_lookup", model, gamma=gamma)
    with pytest.raises(UserError, match="vocabulary of 40 and the target of 32"):
        draft_model.make(model, model=testing.tiny("llama", vocab_size=40)[0])
    with pytest.raises(UserError, match="not the same ones"):
        draft_model.make(model._replace(vocabulary="a"), model=model._replace(vocabulary="b"))
    with pytest.raises(
        UserError,
        match="unknown drafter 'ngrams'; there is bpd, .*draft_model, .*escalate",
    ):
        drafters.make("ngrams", model)
    with pytest.raises(UserError, match="does not take the key 'gama'; it takes gamma, max_ngram"):
        drafters.make("prompt_lookup", model, gama=3)
    with pytest.raises(UserError, match="needs the key 'model'"):
        drafters.make("draft_model", model)
    with pytest.raises(UserError, match="match is 'newest'"):
        drafters.make("prompt_lookup", model, match="newest")
    short = model._replace(max_positions=16)
    with pytest.raises(UserError, match="the draft model has 16"):
        begin(model, draft_model.make(model, model=short), ModelParams(params, params))


def test_tiny_settings_do_not_break_the_law():
    """A top_p that underflows in float32 keeps the best token, as any top_p does."""
    model, params = testing.tiny("llama", 0)
    drafter, both = pair(model, params, "lookup")
    greedy = oracle(model, both)
    assert speculate(model, drafter, "chain", both, temperature=1.0, top_p=1e-40)[0] == greedy
    with pytest.raises(UserError, match="temperature is 3e"):
        sampling.make_sampling(1, 3e38)


def test_a_draft_of_another_size_is_refused():
    model, params = testing.tiny("llama", 0)
    drafter, both = pair(model, params, "lookup")
    with pytest.raises(UserError, match=r"gave tokens of shape \(5, 5\); with 2 nodes: \(5, 2\)"):
        speculate(model, drafter._replace(nodes=2), "chain", both)


def test_what_follows_a_rejected_draft_does_not_matter():
    """A law that is broken only after a token which plain decoding never says: speculation goes on as well."""
    model, table = (
        testing.tabular(7),
        testing.random_table(0, 7, 1.0).at[:, :, 6].add(-1e4).at[:, 6].set(jnp.nan),
    )
    prompts, both = [[1, 2, 6, 3, 1, 2]], ModelParams(table)
    expected = oracle(model, both, prompts)
    assert len(expected[0]) == NEW
    assert (
        speculate(model, drafters.make("prompt_lookup", model, gamma=3), "chain", both, prompts)[0]
        == expected
    )


def test_a_state_is_for_its_drafter():
    """Buffers are sized for the drafter's nodes: another one would write beyond them."""
    model, params = testing.tiny("llama", 0)
    both = ModelParams(params)
    state = begin(model, drafters.make("none", model), both)
    with pytest.raises(UserError) as error:
        decode.generate(
            model,
            drafters.make("prompt_lookup", model, gamma=3),
            accept.load("chain"),
            both,
            state,
            max_steps=3,
        )
    assert (
        "the state was prefilled for none with 0 nodes, and the drafter is prompt_lookup with 3 nodes"
        in str(error.value)
    )


@pytest.mark.parametrize("rule", ["chain", "block", "traversal"])
def test_nan_matters_where_the_rule_looked(rule):
    """After token 1 the target is broken, and one token is asked for. A rule that judges token by token never looks there;
    one that judges the tree as a whole does, and must not decide on what it saw."""
    model, draft, rows = testing.tabular(3), testing.tabular(3, "draft"), 600
    both = ModelParams(jnp.zeros((4, 3, 3)).at[:, 1].set(jnp.nan), jnp.zeros((4, 3, 3)))
    drafter = draft_model.make(model, model=draft, gamma=2)
    state = begin(model, drafter, both, [[0, 2]] * rows, new=1, temperature=1.0)
    state, _ = decode.generate(model, drafter, accept.load(rule), both, state, max_steps=2)
    failed = np.asarray(state.failed) >= 0
    if rule == "chain":
        assert not failed.any()
        seen = np.bincount(np.asarray(state.tokens)[:, 2], minlength=3)
        assert testing.chi_square(seen, np.ones(3) / 3)[2] > 1e-3
    else:
        assert abs(failed.mean() - 5 / 9) < 0.1  # a drafted 1 in either place


def test_an_id_that_is_no_token_is_no_draft():
    """A table or a text of another vocabulary: such a draft is not there, whatever the rule, and is never said."""
    target = testing.tabular(3)

    def propose(params, keys, context, state):
        tokens = jnp.broadcast_to(jnp.asarray([3, -2, 1], jnp.int32), (context.length.shape[0], 3))
        return Draft(tokens, jnp.ones_like(tokens, bool)), state

    foreign = drafters.make("prompt_lookup", target, gamma=3)._replace(propose=propose)
    params = ModelParams(testing.random_table(0, 3), {})
    packed, lengths = decode.pack_prompts([[0, 1]] * 64)
    for rule in ("chain", "deterministic", "match"):
        state = decode.prefill(
            target, foreign, params, packed, lengths, rng.row_keys(0, 64), max_len=10
        )
        state, records = decode.generate(
            target, foreign, accept.load(rule), params, state, max_steps=9
        )
        assert (records.accepted == 0).all() and (
            (state.tokens[:, :10] >= 0) & (state.tokens[:, :10] < 3)
        ).all()
