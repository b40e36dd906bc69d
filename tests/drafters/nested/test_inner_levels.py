"""The inner levels of nested drafters: their caches, their probs, and what may draft inside.

A wrong cache at an inner level changes neither the law nor, if the level is exact, the acceptance
of the levels above. So these tests count the rounds of every level.
"""

from __future__ import annotations

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import nested_inner_rounds as _inner_rounds

from specjax import accept, decode, drafters, rng, sampling, step, testing
from specjax.errors import UserError
from specjax.testing import loop
from specjax.testing.claims import widen
from specjax.theory import statistics
from specjax.types import Context, ModelParams

PROMPTS = [[1, 2, 0, 3, 1, 2], [4], [0, 0, 4, 0, 0], [3, 3]]
VOCAB, NEW = 5, 22


def partly(drafter):
    """Some of its last nodes are invalid, by row and by the length of the text.

    The target then draws a token at the place of a draft token that is right.
    """

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        kept = (5 * context.length + 3 * jnp.arange(len(context.length))) % (drafter.nodes + 1)
        return draft.replace(valid=draft.valid & (jnp.arange(drafter.nodes) < kept[:, None])), state

    return drafter._replace(propose=propose, whole=False)


def played(target, drafter, params, monkeypatch, heat=(1.0, 0.0, 0.6, 1.0)):
    """The records of ragged rows, and the inner rounds of each system: {(depth, offset): set}."""
    seen: dict[tuple[int, int], set[int]] = {}
    run = _inner_rounds.run

    def counted(system, *args):
        end = run(system, *args)
        place = seen.setdefault((system.depth, system.offset), set())
        jax.debug.callback(lambda number: place.add(int(number)), end.number)
        return end

    monkeypatch.setattr(_inner_rounds, "run", counted)
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(
        *(target, drafter, params, packed, lengths, rng.row_keys(0, 4)),
        max_len=packed.shape[1] + NEW,
        limit=lengths + NEW - jnp.asarray([0, 3, 5, 0]),
        sampling=sampling.make_sampling(4, heat),
    )
    rule = accept.load("chain")
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=NEW)
    decode.check(state)
    assert bool(state.done.all())
    jax.effects_barrier()
    return jax.tree.map(np.asarray, records), seen


def assert_all_are_accepted(records):
    """All valid tokens are, and several rounds had some valid and some invalid ones."""
    assert np.array_equal(records.accepted, records.drafted)
    part = (records.drafted > 0) & (records.drafted < records.drafted.max())
    assert part.sum() > 8


@pytest.mark.parametrize(
    ("lengths", "rounds"),
    [
        # Three levels: three tokens and one of the model above them in a round.
        ("4,0,0;3,0;0", {(1, 0): 1, (2, 0): 3}),
        # Parts: the second model continues the drafts of the first one.
        pytest.param("2,2,0;1,0;0", {(1, 0): 1, (2, 0): 1, (1, 2): 2}, marks=pytest.mark.slow),
    ],
)
def test_equal_models_accept_every_token_at_every_level(lengths, rounds, monkeypatch):
    """Every cache has exactly the text, also after drafts of which a part was accepted."""
    model = testing.whole_text(cases.models(VOCAB)[0])
    table = cases.table(0, VOCAB)
    keys = {"models": [model, model], "params": [table, table], "lengths": lengths}
    drafter = drafters.make("cascade", model, **keys)
    params = ModelParams(table, drafter.init_params(None))
    records, seen = played(model, partly(drafter), params, monkeypatch)
    assert_all_are_accepted(records)
    assert seen == {place: {number} for place, number in rounds.items()}


def test_triforce_with_whole_views_accepts_every_token_at_every_level(monkeypatch):
    """The small model is the target: its cache has exactly the text too."""
    model, table = testing.keyed(VOCAB), cases.table(0, VOCAB)
    whole = {"budget": 40, "model_budget": 40, "sinks": 2, "gamma": 4, "model_gamma": 3}
    drafter = drafters.make("triforce", model, model=model, params=table, **whole)
    records, seen = played(model, partly(drafter), ModelParams(table, table), monkeypatch)
    assert_all_are_accepted(records)
    assert seen == {(1, 0): {1}, (2, 0): {3}}


ROWS = 6_000
MAPS = {
    "repetition_penalty": 1.7,
    "frequency_penalty": 0.9,
    "logit_bias": {0: 0.3},
    "vocab_size": 3,
}


def drafts(target, drafter, params, prompt, **settings):
    """(draft, state) of the first round in ROWS rows with the same text and other noise."""
    packed, lengths = decode.pack_prompts([prompt] * ROWS)
    state = decode.prefill(
        *(target, drafter, params, packed, lengths, rng.row_keys(7, ROWS)),
        max_len=packed.shape[1] + 8,
        sampling=sampling.make_sampling(ROWS, **settings),
    )
    return jax.jit(lambda state: loop.propose(drafter, params, state))(state), state


@pytest.mark.parametrize("siblings", ["iid", pytest.param("top_k", marks=pytest.mark.slow)])
def test_with_a_tree_inside_tokens_are_drawn_from_the_probs_after_their_path(siblings):
    """With penalties: those declared are the model's, and the tokens have their law."""
    target, draft, other = cases.models(3)
    keys = {"tree": "2x1", "siblings": siblings, "gaps": True}
    inner = drafters.make("draft_tree", target, model=other, params=cases.table(2), **keys)
    own = {"model": draft, "params": cases.table(1)}
    drafter = drafters.make("staged", target, drafters=[inner], gamma=3, width=1, **own)
    params, prompt = ModelParams(cases.table(0), drafter.init_params(None)), [0, 1, 1]
    found, state = drafts(target, drafter, params, prompt, temperature=0.6, **MAPS)
    every = jnp.asarray(list(np.ndindex(3, 3, 3)), jnp.int32)
    # The model's probs along all 27 continuations, with the settings of the first rows.
    text = jnp.concatenate([jnp.tile(jnp.asarray(prompt, jnp.int32), (27, 1)), every], 1)
    how = jax.tree.map(lambda x: x[:27], state.sampling)
    assert drafter.probs is not None
    probs = jax.jit(drafter.probs)(params, Context(text, jnp.full((27,), 6), how))[:, 2:5]
    cell = np.ravel_multi_index(tuple(np.asarray(found.tokens).T), (3, 3, 3))
    np.testing.assert_allclose(found.probs, np.asarray(probs)[cell], atol=1e-6)
    law = np.take_along_axis(np.asarray(probs, np.float64), np.asarray(every)[..., None], 2)
    counts = np.bincount(cell, minlength=27)
    assert statistics.chi_square(counts, law[..., 0].prod(1))[2] > 1e-4


def test_rounds_parts_and_levels_share_no_noise():
    """Tokens of uniform models are independent; with the same noise they would be equal."""
    target, *models = cases.models(4)
    flat = jnp.zeros((5, 4, 4))
    keys = {"models": models, "params": [flat, flat], "lengths": "3,3,0;1,0;0"}
    drafter = drafters.make("cascade", target, **keys)
    params = ModelParams(cases.table(0, 4), drafter.init_params(None))
    found, _ = drafts(target, drafter, params, [0, 1], temperature=1.0)
    tokens = np.asarray(found.tokens)
    for first, second in itertools.combinations(range(6), 2):
        pairs = np.bincount(4 * tokens[:, first] + tokens[:, second], minlength=16)
        assert statistics.chi_square(pairs, np.full(16, 1 / 16))[2] > 1e-5


def begun(target, drafter, params, **settings):
    """The state after the prompts."""
    packed, lengths = decode.pack_prompts(PROMPTS)
    return decode.prefill(
        *(target, drafter, params, packed, lengths, rng.row_keys(0, 4)),
        max_len=packed.shape[1] + 8,
        sampling=sampling.make_sampling(4, **settings),
    )


def test_drafters_that_cannot_be_inside_are_refused():
    """They read the target, learn from verdicts, or take drafts for committed text."""
    model = cases.models(VOCAB)[1]
    lm, weights = testing.tiny(vocab_size=VOCAB, width=16)
    own = {"model": model, "params": cases.table(1, VOCAB)}
    parts = {"models": [model, model], "params": [own["params"]] * 2, "lengths": "1,1,0;1,0;1"}
    learns = {"gamma": 2, "control": "matchness:0.4,0.4,0.3,0.3", "gaps": True, **own}
    reads = "reads the target's weights or its cache"
    lookups = [{"prompt_lookup": {"control": control}} for control in ("goodput", "bandit")]
    forgets = "prompt_lookup learns from verdicts"
    for name, keys, inner, message in [
        *[("staged", own, each, forgets) for each in lookups],
        ("cascade", parts, lookups[0], forgets),
        ("staged", own, {"escalate": {"drafters": lookups[0]}}, "escalate learns from verdicts"),
        ("staged", own, {"escalate": {"drafters": {"sam": {}}, "least": 0.5}}, "escalate learns"),
        ("staged", own, {"magicdec": {"budget": 8}}, f"staged: magicdec {reads}"),
        ("staged", own, {"early_exit": {"exit_layer": 1}}, f"staged: early_exit {reads}"),
        ("staged", own, {"draft_model": learns}, "controller of draft_model learns from verdicts"),
        ("cascade", parts, {"sam": {"gamma": 1}}, "take prompt_lookup or ngram_lm"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            drafter = drafters.make(name, lm, drafters=inner, **keys)
            begun(lm, drafter, ModelParams(weights, drafter.init_params(jax.random.key(0))))
        assert "\n" not in str(error.value)


def test_a_model_without_the_allowed_tokens_does_not_fail():
    """Its vocabulary is smaller, and all its tokens are banned in some rows."""
    target, params = cases.models(VOCAB)[0]._replace(vocabulary="v"), cases.table(0, VOCAB)
    small, table = cases.models(3)[1]._replace(vocabulary="v"), cases.table(1, 3)
    drafter = drafters.make("cascade", target, models=[small], params=[table], lengths="2,0;0")
    pair = ModelParams(params, drafter.init_params(None))
    bans = {"banned": [[0, 1, 2], [0, 1, 2], [], [3]], "vocab_size": VOCAB}
    state = begun(target, drafter, pair, temperature=[1.0, 0.0, 1.0, 0.7], **bans)
    state, _ = decode.generate(target, drafter, accept.load("chain"), pair, state, max_steps=8)
    decode.check(state)
    texts = decode.outputs(state, [len(prompt) for prompt in PROMPTS])
    assert {*texts[0], *texts[1]} == {3, 4} and 3 not in texts[3]


@pytest.mark.parametrize("name", ["cascade", "staged", "triforce"])
def test_states_keep_their_types_with_64_bit_numbers(name):
    """Two rounds are traced as in exactness tests; loops refuse a state whose types change."""
    _, target, drafter, params = cases.case(name)
    rule, packed = accept.load("match"), decode.pack_prompts(PROMPTS)

    def two_rounds(params):
        keys, how = rng.row_keys(0, 4), sampling.make_sampling(4, repetition_penalty=1.7)
        state = decode.prefill(target, drafter, params, *packed, keys, max_len=16, sampling=how)
        state = step.speculative_step(target, drafter, rule, params, state)[0]
        return state.draft, step.speculative_step(target, drafter, rule, params, state)[0].draft

    with jax.enable_x64(True):
        first, second = jax.eval_shape(two_rounds, jax.tree.map(widen, params))
    assert jax.tree.map(lambda x: x.dtype, first) == jax.tree.map(lambda x: x.dtype, second)
