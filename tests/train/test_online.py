"""Learning from corrections: the wrong places, the loss at them, output laws, resumed streams."""

from __future__ import annotations

import functools
import json
from typing import NamedTuple

import cases
import jax
import jax.numpy as jnp
import marks
import numpy as np
import pytest
from train_cases import equal

from specjax import accept, decode, drafters, testing
from specjax.bench import passes
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import laws, loop
from specjax.theory import statistics
from specjax.train import objectives, online, optimise, stream
from specjax.train.settings import OnlineKeys
from specjax.types import Batch, ModelParams, Records

NEW, SIZE = 10, 15
PROMPTS = [[2, 1], [0, 2, 1, 1, 0], [1], [0, 0, 2]] * 8


class Played(NamedTuple):
    """A decoded batch, round by round."""

    state: object
    records: Records
    lengths: list[np.ndarray]  # of the rows before each round
    rounds: list  # StepInfo of each round


def play(case, temperature=1.0, eos=None, rule=None, seed=0) -> Played:
    rule = accept.load(rule or accept.default_rule(case.drafter))
    new = np.array([NEW, NEW, NEW - 3, NEW - 1] * 8)  # rows end in different rounds
    state = loop.begin(
        case.target, case.drafter, case.params, PROMPTS, new, seed, temperature=temperature
    )
    lengths, rounds = [np.asarray(state.length)], []
    for after, info in decode.stream(
        case.target, case.drafter, rule, case.params, state, eos_id=eos
    ):
        rounds.append(jax.device_get(info))
        lengths.append(np.asarray(after.length))
        state = after
    counts = [
        decode.Records(*(getattr(info, name) for name in decode.Records._fields)) for info in rounds
    ]
    records = Records(*(jnp.asarray(np.stack(each)) for each in zip(*counts, strict=True)))
    return Played(state, records, lengths, rounds)


def wrong_of(played: Played) -> dict[tuple[int, int], tuple[int, np.ndarray | None]]:
    """(row, place) -> (depth, the probs of the first rejected node), by walking the drafts."""
    result = {}
    for before, info in zip(played.lengths, played.rounds, strict=False):
        draft, (rows, nodes) = info.draft, info.draft.tokens.shape
        parents = np.arange(nodes)[None] - 1 if draft.parents is None else draft.parents
        parents = np.broadcast_to(parents, (rows, nodes))
        for b in range(rows):
            here, exists = {-1}, {-1}
            for n in range(nodes):
                exists |= {n} if draft.valid[b, n] and parents[b, n] in exists else set()
            for depth, token in enumerate(info.tokens[b, : info.emitted[b]]):
                children = [n for n in sorted(exists - {-1}) if parents[b, n] in here]
                if not children:
                    break
                here = {n for n in children if draft.tokens[b, n] == token}
                if not here:
                    probs = None if draft.probs is None else draft.probs[b, children[0]]
                    result[b, int(before[b]) + depth] = depth, probs
                    break
    return result


def as_dict(places: online.Places) -> dict[tuple[int, int], int]:
    wrong, depth = np.asarray(places.wrong), np.asarray(places.depth)
    assert ((depth >= 0) == wrong).all()
    return {(int(b), int(s)): int(depth[b, s]) for b, s in np.argwhere(wrong)}


STARTS = jnp.asarray([len(prompt) for prompt in PROMPTS], jnp.int32)
# Name of the case -> the end-of-sequence token and the temperature.
PLAYS = {
    "chain": (None, 1.0),
    "eagle3 chain": (None, 1.0),  # a draft stops early
    "without_replacement": (0, 1.0),
    "iid": (None, 1.0),  # siblings may be copies
    "dynamic": (None, 1.0),
    "ragged": (2, 1.0),
}


@functools.cache
def played_table(name: str) -> Played:
    eos, temperature = PLAYS[name]
    return play(cases.case(name), temperature, eos)


@pytest.mark.parametrize("name", marks.by_default(PLAYS, ("chain", "without_replacement")))
def test_wrong_places_are_those_where_a_draft_ended_by_rejection(name):
    played = played_table(name)
    found = as_dict(online.wrong_places(played.records, STARTS, SIZE))
    expected = {place: depth for place, (depth, _) in wrong_of(played).items()}
    assert found == expected and len(expected) > 4
    # At least one round ended with a bonus token.
    rounds = int((np.asarray(played.records.emitted) > 0).sum())
    assert len(expected) < rounds


def _mutant(change):
    """``wrong_places`` with other records or starts."""
    return lambda records, starts, size: online.wrong_places(*change(records, starts), size)


def _shift(by):
    def shifted(records, starts, size):
        places = online.wrong_places(records, starts, size)
        return online.Places(*(jnp.roll(x, by, 1) for x in places))

    return shifted


def _uncut(records, starts, size):
    before = starts + jnp.cumsum(records.emitted, 0) - records.emitted
    place = jnp.where(records.tested > records.accepted, before + records.accepted, size)
    wrong = jnp.zeros((len(starts), size), bool)
    wrong = wrong.at[jnp.arange(len(starts)), place].set(True, mode="drop")
    return online.Places(wrong, wrong - 1)


# Mistakes, some of them of published code.
MUTANTS = {
    # The bonus token of an accepted draft counts as wrong.
    "bonus": _mutant(lambda r, starts: (r._replace(tested=r.accepted + (r.emitted > 0)), starts)),
    # The token after the corrected one, and the one before it.
    "after": _shift(1),
    "before": _shift(-1),
    # A rejection behind the end of the text.
    "cut": _uncut,
    "first": _mutant(lambda r, starts: (r._replace(accepted=0 * r.accepted), starts)),
    "prompt": _mutant(lambda r, starts: (r, 0 * starts)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_other_wrong_places_are_detected(name):
    played = played_table("without_replacement")
    places = MUTANTS[name](played.records, STARTS, SIZE)
    found = {tuple(map(int, at)) for at in np.argwhere(np.asarray(places.wrong))}
    assert found != set(wrong_of(played))


def ring_of(played: Played, positions="wrong") -> online.Ring:
    ring, wrong = online.remember(
        online.empty(len(PROMPTS), SIZE),
        played.state.tokens,
        played.state.length,
        played.records,
        STARTS,
        jnp.ones(len(PROMPTS), bool),
        positions=positions,
    )
    assert int(wrong.sum()) == len(wrong_of(played))
    return ring


# The keys that make a loss the mean of the divergence, and nothing else.
PURE = {"eagle": {"feature": 0.0, "weight": 1.0}, "eagle3": {"decay": 1.0}}
# Each learns at the very probs that the rejected token was drawn from.
LEARNING = ("chain", "eagle chain", "spire", "redrafter chain", "mlp_speculator")
LEARNING += ("early_exit layer", "pass", "eagle3 chain", "eagle", "hydra")


def case_of(name):
    """A case with real decoders; heads are scaled, so that no probability is 0 in float32."""
    case = cases.real(name)
    if name in ("chain", "spire"):
        return case
    draft = jax.tree.map(lambda x: 0.2 * x, case.params.draft)
    return case._replace(params=case.params._replace(draft=draft))


def loss_of(case, at_depths=True):
    """The loss as a function of a ring; compiled once."""
    loss = online.loss_of(case.target, case.drafter, SIZE, keys=PURE.get(case.drafter.name))

    def value(pair, ring):
        batch = online.batch_of(ring, "wrong" if at_depths else "emitted")
        return loss(pair.draft, pair.target, batch, jax.random.key(0))

    return functools.partial(jax.jit(value), case.params)


def kl(p, q):
    return float((p * (np.log(p) - np.log(q))).sum())


def expected_loss(case, played: Played) -> float:
    """The mean divergence from the target to the probs of the rejected tokens."""
    tokens = jnp.maximum(played.state.tokens, 0)
    forward = jax.jit(functools.partial(lm.forward, case.target))
    probs = np.asarray(jax.nn.softmax(forward(case.params.target, tokens).logits), np.float64)
    each = [
        kl(probs[b, place - 1], np.asarray(q, np.float64))
        for (b, place), (_, q) in wrong_of(played).items()
    ]
    assert len(each) > 4
    return float(np.mean(each))


@pytest.mark.parametrize("name", marks.by_default(LEARNING, ("eagle chain",)))
def test_the_loss_is_at_the_probs_that_were_rejected(name):
    """As drafted, in the cached rounds: not the probs before or behind, nor of another depth."""
    case = case_of(name)
    played = play(case)
    ring, expected, loss = ring_of(played), expected_loss(case, played), loss_of(case)
    value, metrics = loss(ring)
    assert float(value) == pytest.approx(expected, rel=2e-4)
    weight = metrics["weight"]
    weight = weight["loss"] if isinstance(weight, dict) else weight
    assert int(weight) == len(wrong_of(played))
    # The published mask: the prediction after the corrected token.
    late = ring.replace(labelled=jnp.roll(ring.labelled, 1, 1), depths=jnp.roll(ring.depths, 1, 1))
    assert float(loss(late)[0]) != pytest.approx(expected, rel=1e-3)
    # What follows the text does not count, and nothing depends on it.
    after = jnp.arange(SIZE) >= played.state.length[:, None]
    other = ring.replace(tokens=jnp.where(after, 2, ring.tokens))
    assert not (after & ring.labelled).any() and after.any()
    assert float(loss(other)[0]) == pytest.approx(expected, rel=2e-4)
    padded = ring.replace(labelled=ring.labelled | after, depths=jnp.where(after, 0, ring.depths))
    assert float(loss(padded)[0]) != pytest.approx(expected, rel=1e-3)
    if name == "eagle chain":  # the mutant: every depth learns at every wrong place
        assert float(loss_of(case, False)(ring)[0]) != pytest.approx(expected, rel=1e-3)


def test_all_emitted_tokens_as_labels():
    played = played_table("chain")
    ring, length = ring_of(played, "emitted"), np.asarray(played.state.length)
    index = np.arange(SIZE)
    expected = (index >= np.asarray(STARTS)[:, None]) & (index < length[:, None])
    assert (
        np.array_equal(ring.labelled, expected) and online.batch_of(ring, "emitted").depths is None
    )
    # Without the end of the texts, padding would count.
    assert not np.array_equal(ring.labelled, index >= np.asarray(STARTS)[:, None])


def test_the_ring_keeps_the_last_texts():
    """Batches of two, the last with one request, in a ring of three."""
    ring = online.empty(3, 4)
    zeros = jnp.zeros((1, 2), jnp.int32)
    for first, real in ((0, [1, 1]), (2, [1, 1]), (4, [1, 0])):
        tokens = jnp.broadcast_to(jnp.asarray([[10 + first], [11 + first]]), (2, 6))
        ring, wrong = online.remember(
            ring,
            tokens,
            jnp.asarray([3, 2]),
            Records(zeros + 1, zeros, zeros + 1, zeros + 1, zeros + 2),
            jnp.asarray([2, 1]),
            jnp.asarray(real, bool),
        )
        assert wrong.tolist() == [1, 1]
    assert ring.tokens.tolist() == [[13, 13, 0, 0], [14, 14, 14, 0], [12, 12, 12, 0]]
    assert int(ring.newest) == 2
    assert np.argwhere(np.asarray(ring.labelled)).tolist() == [[0, 1], [1, 2], [2, 2]]


# Streams ------------------------------------------------------------------------------------------

V = 3


def job_of(count, batch_size=4, temperature=1.0, prompts=None, new=4, target=None):
    model, params = target or (testing.tabular(V), cases.table(0, V))
    prompts = [[2, 1]] * count if prompts is None else prompts
    settings = {"temperature": temperature}
    return passes.Job(model, params, prompts, settings, batch_size, new, (), 5, 1)


def method_of(job, drafter, params, rule=""):
    rule = accept.load(rule or accept.default_rule(drafter))
    return passes.Method("draft", drafter, rule, ModelParams(job.params, params))


@functools.cache
def tabular_drafter(gamma=2):
    return drafters.make(
        "draft_model", testing.tabular(V), model=testing.tabular(V, "draft"), gamma=gamma, params={}
    )


def learner_of(job, method, rate=0.2, keys=None, **options):
    loss = online.loss_of(job.target, method.drafter, job.width + job.max_new_tokens, keys=keys)
    optimiser = optimise.optimiser(
        name="adamw", steps=100, learning_rate=rate, schedule="constant", warmup=0.0
    )
    return online.learner(job, method, loss, optimiser, OnlineKeys(**options))


def outputs_of(job, method, learner):
    """All outputs, the last state, and alpha of the first and of the last ten batches."""
    outputs, alphas = [], []
    state = learner.begin()
    for after, served in online.serve(job, method, learner, state):
        state = after
        outputs += served.outputs
        tested, passed = (
            sum(getattr(c, name).sum() for c in served.counts) for name in ("tested", "passed")
        )
        alphas.append(passed / tested)
    return outputs, state, np.mean(alphas[:10]), np.mean(alphas[-10:])


def fit_of(outputs, steps=4):
    law = laws.sequence_law(testing.tabular(V), cases.table(0, V), [2, 1], steps)
    tokens = np.asarray(outputs)
    shape = (V,) * steps
    counts = np.bincount(np.ravel_multi_index(tuple(tokens.T), shape), minlength=V**steps)
    return statistics.chi_square(counts.reshape(shape), law)[2], loop.detectable(law, len(tokens))


def test_the_output_law_with_updates_is_the_targets():
    """4096 requests, an update after every 128, at a rate that changes the draft at once."""
    job = job_of(4096, 128)
    method = method_of(job, tabular_drafter(), cases.table(1, V))
    learner = learner_of(job, method, 0.3, every=128)
    outputs, state, first, last = outputs_of(job, method, learner)
    p_value, detectable = fit_of(outputs)
    assert p_value > 1e-3 and detectable < 0.08
    assert int(state.train["step"]) == 32 and last > first + 0.15
    moved = np.abs(np.asarray(state.train["params"]) - np.asarray(cases.table(1, V))).max()
    assert moved > 1


def test_probs_of_other_parameters_than_those_drawn_from_are_detected():
    """The mutant: parameters change between the draft of a round and its verification."""
    drafter, target, params = tabular_drafter(), testing.tabular(V), cases.table(0, V)

    def propose(pair, keys, context, state):
        old, new = (ModelParams(pair.target, each) for each in pair.draft)
        draft, after = drafter.propose(old, keys, context, state)
        return draft.replace(probs=drafter.propose(new, keys, context, state)[0].probs), after

    def first(function):
        return lambda pair, *rest: function(ModelParams(pair.target, pair.draft[0]), *rest)

    mutant = drafter._replace(
        propose=propose, init=first(drafter.init), update=first(drafter.update)
    )
    # Parameters before and after one update.
    both = ModelParams(params, (cases.table(1, V), 0.7 * cases.table(1, V)))
    fit = testing.loop_fit(target, mutant, accept.load("chain"), both, [2, 1], 4, 4096)
    assert fit.p_value < 1e-4


@pytest.mark.parametrize("real", marks.by_default((False, True), (False,)))
def test_greedy_outputs_are_those_of_plain_decoding(real):
    """Bit for bit, whatever the updates do: here they make the draft arbitrary."""
    target = testing.tabular(V), cases.table(0, V)
    draft, params = testing.tabular(V, "draft"), cases.table(1, V)
    if real:
        target = testing.tiny("llama", 0, vocab_size=V, width=16)
        draft, params = testing.tiny("gpt2", 1, layers=1, vocab_size=V, width=16)
    prompts = [[i % V, (i // V) % V, 1] for i in range(12)]
    job = job_of(12, 4, 0.0, prompts, 8, target)
    drafter = drafters.make("draft_model", target[0], model=draft, gamma=2, params=params)
    method = method_of(job, drafter, params)
    learner = learner_of(job, method, 0.5, every=4)
    outputs, state, *_ = outputs_of(job, method, learner)
    assert outputs == passes.run_pass(job, None).outputs
    assert not equal(state.train["params"], params) and int(state.train["step"]) == 3


class Killed(Exception):
    """Stands for a signal."""


def follow(job, method, learner, workdir, every=8):
    return stream.follow(job, method, learner, workdir, {"a": 1}, every)


def timeless(lines):
    """The lines without their times."""

    def changed(line):
        update = line["update"] and {**line["update"], "seconds": 0}
        return {**line, "seconds": 0, "update": update}

    return [changed(line) for line in lines]


def test_a_killed_stream_goes_on_with_the_same_bits(tmp_path, monkeypatch, capfd):
    job = job_of(24, 4)
    method = method_of(job, tabular_drafter(), cases.table(1, V))
    learner = learner_of(job, method, every=8, buffer=12)
    state, lines = follow(job, method, learner, tmp_path / "a")
    assert [line["request"] for line in lines] == list(range(24))
    assert [line["updates"] for line in lines] == sorted([0, 1, 2] * 8)
    assert [bool(line["update"]) for line in lines] == [i % 8 == 7 for i in range(24)]
    assert all(line["wrong"] <= line["tested"] - line["accepted"] for line in lines)
    assert all(line["wrong"] > 0 for line in lines[:8])
    real = stream.serve

    def killed(*arguments):
        for count, each in enumerate(real(*arguments)):
            yield each
            if count == 4:  # twenty requests are decoded, and the checkpoint has sixteen
                raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(stream, "serve", killed)
        follow(job, method, learner, tmp_path / "b")
    with open(tmp_path / "b" / stream.JOURNAL, "a") as file:
        file.write('{"request": 20, "alp')
    resumed, more = follow(job, method, learner, tmp_path / "b")
    assert "resuming from request 16 of 24" in capfd.readouterr().err
    assert equal(resumed, state) and timeless(more) == timeless(lines)
    stored = (tmp_path / "b" / stream.JOURNAL).read_text().splitlines()
    assert [json.loads(line) for line in stored] == more
    # A finished stream is left as it is.
    again, same = follow(job, method, learner, tmp_path / "b")
    assert equal(again, state) and same == more
    (tmp_path / "b" / stream.JOURNAL).unlink()
    with pytest.raises(UserError, match="does not have the 24 requests of the checkpoint"):
        follow(job, method, learner, tmp_path / "b")


def test_parts_of_the_ring_make_the_same_update():
    job = job_of(8, 4)
    method = method_of(job, tabular_drafter(), cases.table(1, V))
    states = [
        outputs_of(job, method, learner_of(job, method, every=8, accumulate=parts))[1]
        for parts in (1, 4)
    ]
    one, other = (np.asarray(state.train["params"]) for state in states)
    assert np.allclose(one, other, atol=1e-5) and not np.allclose(one, cases.table(1, V))


@pytest.mark.parametrize("divergence", marks.by_default(objectives.DIVERGENCES, ()))
def test_every_divergence_raises_acceptance(divergence):
    job = job_of(640, 64)
    method = method_of(job, tabular_drafter(), cases.table(1, V))
    learner = learner_of(job, method, 0.2, {"divergence": divergence}, every=64)
    outputs, alphas = [], []
    for _, served in online.serve(job, method, learner, learner.begin()):
        outputs += served.outputs
        alphas.append(
            sum(c.passed.sum() for c in served.counts) / sum(c.tested.sum() for c in served.counts)
        )
    assert alphas[-1] > alphas[0] + 0.05


@pytest.mark.fast
def test_mistakes():
    job = job_of(8, 4)
    method = method_of(job, tabular_drafter(), cases.table(1, V))
    for options, message in (
        ({"every": 0}, "config.online.every is 0"),
        ({"every": 6}, "every is 6 and config.batch_size is 4"),
        ({"every": 8, "buffer": 4}, "buffer is 4, fewer than the 8 requests"),
        ({"every": 8, "accumulate": 3}, "accumulate is 3, which does not divide the 8 texts"),
        ({"every": 8, "positions": "right"}, "positions is 'right'"),
        ({"every": 16}, "the stream has 8 requests and the first update is after"),
        ({"every": 8, "learn": 1}, "learn is 1; it must be True or False"),
    ):
        with pytest.raises(UserError, match=message):
            learner_of(job, method, **options)
    for keys, message in (
        ({"divergence": "kl"}, "loss.divergence is 'kl'"),
        ({"teacher": 1.0}, "config.loss.teacher is not a key of the loss of draft_model"),
        ({"temperature": 0.0}, "loss.temperature is 0.0"),
    ):
        with pytest.raises(UserError, match=message):
            learner_of(job, method, keys=keys, every=8)
    for name in ("prompt_lookup", "early_exit", "deterministic"):
        case = cases.case(name)
        if name == "deterministic":  # a tree of a draft model has what to train
            assert online.loss_of(case.target, case.drafter, SIZE)
            continue
        with pytest.raises(UserError, match="has no parameters that a loss trains"):
            online.loss_of(case.target, case.drafter, SIZE)


@pytest.mark.fast
def test_labels_of_one_depth():
    """A batch whose labels are for all depths in turn has the loss of the whole."""
    case = cases.case("medusa")
    loss = functools.partial(case.drafter.training.loss, ce=0.0, teacher=1.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, 8)))

    def value(**fields):
        result, metrics = loss(
            case.params.draft, case.params.target, Batch(tokens, **fields), jax.random.key(0)
        )
        return float(result) * float(metrics["weight"]["loss"])

    every = jnp.zeros(tokens.shape, jnp.int32)
    assert value(depths=every) + value(depths=every + 1) == pytest.approx(value(), rel=1e-5)
    assert value(depths=every - 1) == 0
