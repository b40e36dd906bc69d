"""Replay gives the counts of the decoding that was recorded."""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import metrics, replay
from specjax.bench.passes import Method
from specjax.data.recordings import Trace
from specjax.errors import UserError
from specjax.types import ModelParams

PROMPTS = [[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]]
RECORDED, NEW = 20, 9  # tokens of a recorded text, and new tokens in a replay of it


def conversations(count, seed=0, longest=110):
    """Texts over few tokens, in lengths for two buffer sizes; every third has no category."""
    random = np.random.default_rng(seed)
    result = []
    for i in range(count):
        prompt, output = (
            random.integers(0, 6, random.integers(1, longest // 2)).tolist() for _ in range(2)
        )
        result.append(Trace(prompt, output, [None, "b", "a"][i % 3]))
    return result


def simulate(conversation, gamma, ngram):
    """Prompt lookup in plain Python: (rounds, accepted, tested by depth, passed by depth)."""
    text, at = conversation.prompt + conversation.output, len(conversation.prompt)
    rounds, tested, passed = 0, np.zeros(gamma, int), np.zeros(gamma, int)
    while at < len(text):
        draft = []
        for n in range(min(ngram, at - 1), 0, -1):
            starts = [i for i in range(at - n) if text[i : i + n] == text[at - n : at]]
            if starts:
                draft = text[:at][starts[0] + n : starts[0] + n + gamma]
                break
        known = draft[: len(text) - at]
        accepted = 0
        while accepted < len(known) and known[accepted] == text[at + accepted]:
            accepted += 1
        passed[:accepted] += 1
        tested[: min(accepted + 1, len(known))] += 1
        at, rounds = at + accepted + 1, rounds + 1
    return rounds, int(passed.sum()), tested, passed


def measure(*arguments, **options):
    """The counts of each conversation."""
    return [counts for counts, _ in replay.measure_rounds(*arguments, **options)]


def test_prompt_lookup_against_plain_python_in_every_batch():
    """Every count of a chain, of each conversation; the same with another batch size."""
    target, texts = replay.recorded(6), conversations(10)
    drafter = drafters.make("prompt_lookup", target, gamma=4, max_ngram=2)
    method = Method("lookup", drafter, accept.load("chain"), ModelParams({}, {}))
    counted = measure(method, texts, batch_size=4)
    for text, counts in zip(texts, counted, strict=True):
        rounds, accepted, tested, passed = simulate(text, 4, 2)
        assert counts.tokens == len(text.output)
        assert (counts.rounds, counts.accepted) == (rounds, accepted)
        assert counts.tested.tolist() == tested.tolist()
        assert counts.passed.tolist() == passed.tolist()
    assert metrics.total(counted).accepted > 20
    single = measure(method, texts[::-1], batch_size=1)[::-1]
    jax.tree.map(np.testing.assert_array_equal, single, counted)


def begin(target, drafter, params, **more):
    packed, lengths = decode.pack_prompts(PROMPTS)
    settings, keys = sampling.make_sampling(4, 0.0), rng.row_keys(0, 4)
    return decode.prefill(target, drafter, params, packed, lengths, keys, sampling=settings, **more)


@pytest.fixture(scope="module")
def record():
    """i32[4,RECORDED]: what the target of all cases decodes greedily after the prompts."""
    case = cases.case("none")
    state = begin(case.target, case.drafter, case.params, max_len=RECORDED)
    state = decode.autoregressive(case.target, case.params, state, max_steps=RECORDED)
    return np.asarray(state.tokens)[:, :RECORDED]


@pytest.mark.parametrize(
    "name, rule",
    by_default(
        [("escalate", "chain"), ("suffix", "deterministic"), ("independent", "recursive")],
        [("suffix", "deterministic")],
    ),
)
def test_a_replay_has_the_counts_of_the_decoding(name, rule, record):
    """Three ways of decoding agree in every count of every row: the replay, the loop with the table
    that was recorded, and the loop with the recording as an ``LM``.

    The drafters have states and caches, and draft chains and trees. The recording is longer than
    the replayed text, so no draft extends beyond it.
    """
    case, rule = cases.case(name), accept.load(rule)
    table, draft = case.params
    if name == "independent":  # closer to the target, so that some drafts are accepted
        draft = jax.tree.map(lambda own: table + 0.7 * own, draft)
    counts = [
        counts_of_a_loop(case.target, case.drafter, rule, ModelParams(table, draft), record),
        counts_of_a_loop(
            replay.recorded(cases.VOCAB),
            case.drafter,
            rule,
            ModelParams(jnp.asarray(record), draft),
            record,
        ),
    ]
    texts = [
        Trace(prompt, text[len(prompt) :].tolist(), str(row))
        for row, (prompt, text) in enumerate(zip(PROMPTS, record, strict=True))
    ]
    method = Method(name, case.drafter, rule, ModelParams(table, draft))
    replayed = measure(method, texts, batch_size=4, max_new_tokens=NEW)
    for row in range(4):
        for own in counts:
            # A recording is not fed: a replay has no such count.
            mine = own[row]._replace(verified=None)
            jax.tree.map(np.testing.assert_array_equal, mine, replayed[row])
    total = metrics.total(replayed)
    assert total.tokens == 4 * NEW and total.accepted > 6


@pytest.mark.parametrize("name", ["heuristic", "bandit", "batch_size:2:3/64:1"])
def test_a_replay_with_a_controller_that_rests_has_the_counts_of_the_decoding(name, record):
    target, rule = replay.recorded(cases.VOCAB), accept.load("chain")
    drafter = drafters.make("prompt_lookup", target, gamma=4, max_ngram=2, control=name)
    params = ModelParams(jnp.asarray(record), {})
    pairs = zip(PROMPTS, record, strict=True)
    texts = [Trace(prompt, text[len(prompt) :].tolist(), "") for prompt, text in pairs]
    method = Method(name, drafter, rule, params)
    replayed = measure(method, texts, batch_size=4, max_new_tokens=NEW)
    decoded = counts_of_a_loop(target, drafter, rule, params, record)
    for mine, own in zip(decoded, replayed, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine._replace(verified=None), own)
    assert metrics.total(replayed).accepted > 0


def counts_of_a_loop(target, drafter, rule, params, record):
    """The counts of every row of greedy decoding, whose text must be the recorded one."""
    # A greedy loop does not use the rule for draws; without it less is compiled.
    rule = rule._replace(sampled=lambda keys, draft, probs: rule.greedy(draft, probs))
    limit = jnp.asarray([len(prompt) + NEW for prompt in PROMPTS], jnp.int32)
    state = begin(target, drafter, params, max_len=14, limit=limit)
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=NEW)
    tokens = np.asarray(state.tokens)
    for row, length in enumerate(limit.tolist()):
        assert (tokens[row, :length] == record[row, :length]).all()
    return [metrics.count(records, np.arange(4) == row, drafter.longest) for row in range(4)]


def test_methods_that_need_more_than_a_recording_are_refused():
    case = cases.case("chain")
    reader = case.drafter._replace(features=True)
    for drafter, rule, message in (
        (reader, "chain", "draft_model reads what the target computes"),
        (case.drafter, "tolerance", "the rule tolerance is lossy"),
        (case.drafter, "lenient", "the rule lenient is lossy"),
        (cases.case("iid").drafter, "chain", "rules for it are"),
    ):
        with pytest.raises(UserError, match=message):
            replay.fold(drafter, accept.load(rule))
    reader = case.drafter._replace(init=lambda params, *rest: params.target["embed"])
    method = Method("", reader, accept.load("chain"), case.params)
    with pytest.raises(UserError, match="draft_model reads the target's weights"):
        measure(method, [Trace([1], [1])], batch_size=1)
