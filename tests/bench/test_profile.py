"""Cost profiles: the times of rounds by draft length, the acceptance, and the temperatures."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from marks import by_default

from specjax import accept, drafters, sharding, step, testing
from specjax.bench import metrics, passes, profile, timing
from specjax.bench.passes import Job, Method
from specjax.control.costs import RoundCosts
from specjax.types import ModelParams

MODEL, TABLE = testing.tabular(6), testing.random_table(0, 6, 3.0)
NEAR = testing.random_table(0, 6, 2.0)  # a draft whose probabilities are flatter
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 0], [2, 2], [5]]


def job(temperature=0.0, batch=2, **keys):
    return Job(MODEL, TABLE, PROMPTS, {"temperature": temperature}, batch, 40, (), 0, 1, **keys)


def maker(name="draft_model", **keys):
    """The method with a controller."""
    rule = "recursive" if "tree" in keys else "chain"
    own = {"model": MODEL, "params": NEAR} if name == "draft_model" else {}

    def make(control):
        drafter = drafters.make(name, MODEL, **own, **keys, control=control)
        params = ModelParams(TABLE, drafter.init_params(jax.random.key(0)))
        return Method(name, drafter, accept.load(rule), params)

    return make


def forced(make):
    """The method that a profile runs."""
    return profile._with_drafts(make(profile._forced(make("fixed:0").drafter.longest)))


def counts(passed, tested):
    """What the rounds of a sample accepted and tested at each depth."""
    return metrics.Counts(0, 0, 0, np.array(tested), np.array(passed))


def test_times_of_a_round(monkeypatch):
    seconds, order = {0: 2e-4, 1: 2.6e-4, 2: 3.2e-4, 3: 2e-4}, []

    def run(job, method, state, length, rounds=16):
        order.append(length)
        # The first run of each length compiles.
        slow = 100.0 if order.count(length) == 1 else 1.0
        return profile._Sample(slow * seconds[length], counts([3, 1, 0], [4, 3, 1]), None)

    monkeypatch.setattr(profile, "_run", run)
    found = profile._measured(job(), forced(maker(gamma=3)), (0, 1, 2, 3))
    # 1.6 and 1.0 are not in order, so both count as their mean.
    assert found.times == pytest.approx((1.0, 1.3, 1.3, 1.3))
    # After one that says how many rounds are enough, in turns, until they took 0.4 s or 100 times.
    assert order[:9] == [0, 1, 2, 3, 0, 0, 1, 2, 3]
    # 16 rounds each; the last sample of lengths 0 and 1 is the first above 0.4 s.
    assert [order.count(length) for length in (0, 1)] == [2 + 100, 1 + 97]


@pytest.mark.parametrize(("batch", "runs"), [(1, 4), (2, 2), (3, 2)])
def test_acceptance_is_that_of_all_prompts(monkeypatch, batch, runs):
    """A text alone may be unlike the others; a batch that is not full counts its rows."""
    made = iter(range(10))

    def run(job, method, state, length, rounds=16):
        n = next(made)
        return profile._Sample(1.0, counts([3 + n, 1, 0], [4 + n, 3 + n, 1]), (n, 8 + n))

    monkeypatch.setattr(profile, "_run", run)
    rates, finds = profile._accepted(job(batch=batch), forced(maker(gamma=3)), 3)
    more = sum(range(runs))
    pairs = (3 * runs + more, 4 * runs + more), (runs, 3 * runs + more), (0, runs)
    assert rates == pytest.approx([(p + 0.5) / (t + 1) for p, t in pairs])
    assert next(made) == runs and finds == pytest.approx((more + 0.5) / (8 * runs + more + 1))


def test_two_disturbed_samples_of_five(monkeypatch):
    """Of slow rounds few are timed; other programs that run meanwhile do not change the profile."""
    seconds, runs = {0: 0.2, 1: 0.3, 2: 0.4}, []

    def run(job, method, state, length, rounds=16):
        runs.append((length, rounds))
        # After the first runs: others run during the first two samples of 0 and the last two of 2.
        taken = sum(each == length for each, _ in runs) - 1
        disturbed = (length == 0 and taken in (2, 3)) or (length == 2 and taken in (4, 5))
        slow = 4.0 if disturbed else 1.0
        return profile._Sample(slow * seconds[length], counts([1, 1], [1, 1]), None)

    monkeypatch.setattr(profile, "_run", run)
    found = profile._measured(job(), forced(maker(gamma=2)), (0, 1, 2))
    assert found.times == pytest.approx((1.0, 1.5, 2.0))
    assert {rounds for _, rounds in runs} == {4} and len(runs) == 3 + 1 + 5 * 3


def test_lookups_are_measured_with_drafts_in_every_round():
    """The prompts have no earlier occurrence; the acceptance is that of real drafts."""
    own = job()._replace(prompts=[[0, 1], [2, 3]])
    made = maker("prompt_lookup", gamma=3, min_ngram=3, max_ngram=3)(profile._forced(3))
    method = profile._with_drafts(made)
    state = passes.begin(own, method.drafter, method.params, [0, 1], own.prompts)
    for length in (0, 2, 3):
        for drafts in profile.DRAFTS:
            changed = profile.with_drafts(profile.with_length(state.draft, length), drafts)
            known = state.replace(draft=changed)
            context, keys = step.context_of(known), step.keys_of(method.drafter, known)
            draft, after = method.drafter.propose(method.params, keys, context, changed)
            wanted = length if drafts == profile.ALWAYS else 0
            assert np.asarray(draft.valid).sum(1).tolist() == [wanted] * 2
            assert drafts == profile.FOUND or int(draft.tokens.min()) >= 0
            assert after.control.drafts.tolist() == [drafts] * 2
    # What is found is what the drafter finds.
    own = job()
    state = passes.begin(own, method.drafter, method.params, [0, 1], own.prompts[:2])
    context, keys = step.context_of(state), step.keys_of(method.drafter, state)
    found, _ = method.drafter.propose(method.params, keys, context, state.draft)
    real, _ = made.drafter.propose(method.params, keys, context, state.draft)
    assert np.asarray(real.valid).sum(1).tolist() == [3, 0]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), found, real))


def test_rounds_of_a_lookup_that_finds_nothing(monkeypatch):
    """They are measured with the longest draft, between no search and a draft of one token."""
    seconds, methods = {0: 2e-4, 1: 3e-4, 2: 4e-4}, set()

    def run(job, method, state, length, rounds=16):
        methods.add(id(method))
        drafts = int(state.draft.control.drafts[0]) if lookup else profile.FOUND
        assert drafts != profile.NEVER or length == 2
        took = 2.4e-4 if drafts == profile.NEVER else seconds[length]
        return profile._Sample(took, counts([3, 1], [4, 3]), None)

    lookup = True
    monkeypatch.setattr(profile, "_run", run)
    measured = profile._measured(job(), forced(maker("prompt_lookup", gamma=2)), (0, 1, 2))
    assert measured.empty == pytest.approx(1.2)
    assert measured.times == pytest.approx((1.0, 1.5, 2.0))
    assert len(methods) == 1  # so one loop is compiled
    lookup = False
    model = profile._measured(job(), forced(maker(gamma=2)), (0, 1, 2))
    assert model.empty == 1.0


def test_the_share_of_rounds_with_a_draft():
    """The text counts 0 to 5 again and again: one row finds drafts at once, one after a cycle."""
    nexts = np.eye(6)[(np.arange(6) + 1) % 6] * 9.0
    table = np.broadcast_to(nexts, TABLE.shape).astype(np.float32)
    own = job()._replace(prompts=[[0, 1, 2, 3, 4, 5, 0], [1]], params=table)
    method = maker("prompt_lookup", gamma=2, max_ngram=1)("fixed:2")
    method = method._replace(params=method.params._replace(target=table))
    state = passes.begin(own, method.drafter, method.params, [0, 1], own.prompts)
    sample = profile._run(own, method, state, 2)
    # 40 tokens: 14 rounds of 3 tokens. The other row has 17 rounds, 6 of them without a draft.
    assert sample.found == (14 + 11, 14 + 17)


def test_the_first_round_of_a_call_is_left_out(monkeypatch):
    """It touches memory that the others use again: 5 ms here, and 2 ms for every other one."""
    own, clock = job(), [0.0]
    method = maker("prompt_lookup", gamma=2)("fixed:2")
    real = profile._generate

    def generate(job, method, state, rounds):
        after = real(job, method, state, rounds)
        clock[0] += 5e-3 + 2e-3 * (int((np.asarray(after[1].emitted) > 0).any(1).sum()) - 1)
        return after

    monkeypatch.setattr(profile, "_generate", generate)
    monkeypatch.setattr(profile.time, "perf_counter", lambda: clock[0])
    state = passes.begin(own, method.drafter, method.params, *next(passes.batches(own)))
    assert profile._run(own, method, state, 2).seconds == pytest.approx(2e-3)


CHAIN = ("draft_model", {"gamma": 3})
TREE = ("draft_model", {"tree": "2x1x1", "siblings": "iid"})
LOOKUP = ("prompt_lookup", {"gamma": 3, "min_ngram": 1})


@pytest.mark.parametrize(("name", "keys"), by_default([CHAIN, TREE, LOOKUP], [CHAIN]))
def test_measured_in_the_loop(name, keys, monkeypatch):
    """Every length, both kinds of sampling, and the acceptance of a drafter that is near."""
    monkeypatch.setattr(profile, "SAMPLES", (2, 5))
    monkeypatch.setattr(profile, "MISSED_SAMPLES", 2)
    lines = []
    jobs = [job(), job(1.0), job(1.0, 4)]
    measured = profile.measure(jobs, maker(name, **keys), lines.append, names=("m", "d"))
    assert measured[1:3] == ("m", "d")
    found = measured.batches
    assert sorted(found) == [2, 4] and len(lines) == 3
    for costs in found.values():
        assert costs.lengths == (0, 1, 2, 3)
        assert costs.greedy.times[0] == costs.sampled.times[0] == 1
        assert len(costs.greedy.acceptance) == 3 and min(costs.greedy.times) > 0
    # Batch 4 was measured sampled only.
    assert found[4].greedy == found[4].sampled != found[2].greedy
    if name == "prompt_lookup":
        assert found[2].greedy.missed == found[4].sampled.missed == 0
    else:
        # The flatter table has the same most probable tokens.
        assert min(found[2].greedy.acceptance) > 0.9
        assert max(found[2].sampled.acceptance) < min(found[2].greedy.acceptance)


@pytest.mark.slow
def test_what_a_draft_model_missed():
    """The time of a draft after a rest, less that of one without, for each round of the rest."""
    model, params = testing.tiny(vocab_size=6)
    drafter = drafters.make("draft_model", MODEL, model=model, gamma=2, control="fixed:2")
    method = Method("m", drafter, accept.load("chain"), ModelParams(TABLE, params))
    own = job(batch=4)._replace(max_new_tokens=100)
    missed = profile._missed(own, method, 1)
    # 48 tokens are three passes over 16.
    one = timing.of_pass(model, 16)
    state = passes.begin(own, drafter, method.params, *next(passes.batches(own)))
    cache = state.replace(cache=model.init_cache(4, 200))
    seconds = min(one.sample(ModelParams(params), cache) for _ in range(5))
    assert 0.2 < missed * 48 / (3 * seconds) < 5


def test_only_the_controllers_number_changes():
    drafter = maker(gamma=3)("fixed:3").drafter
    params = ModelParams(TABLE, NEAR)
    state = passes.begin(job(), drafter, params, [0, 1], PROMPTS[:2])
    other = profile.with_length(state.draft, 1)
    changed = [
        (np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(state.draft), jax.tree.leaves(other), strict=True)
        if not np.array_equal(a, b)
    ]
    assert [(a.tolist(), b.tolist()) for a, b in changed] == [([3, 3], [1, 1])]


@pytest.mark.slow
def test_temperatures_of_a_drafter_that_is_too_sure():
    """A draft with sharper probabilities than the target needs temperatures above 1."""

    def make(control):
        sharp = jax.tree.map(lambda x: 3 * x, TABLE)
        drafter = drafters.make("draft_model", MODEL, model=MODEL, params=sharp, control=control)
        params = ModelParams(TABLE, drafter.init_params(jax.random.key(0)))
        return Method("sharp", drafter, accept.load("chain"), params)

    prompts = [[a, b] for a in range(6) for b in range(6)]
    own = job(1.0)._replace(prompts=prompts, max_new_tokens=60, batch_size=12)
    heats = profile._heats(own, make, 4)
    assert len(heats) == 4 and heats[0] > 1.5


def test_tokens_that_the_limit_cut_were_not_rejected(monkeypatch):
    """The draft model is the target, greedily: 5 tokens, then 2 of 5."""
    seen = []
    monkeypatch.setattr(profile.calibration, "fit", lambda *both: seen.append(both) or np.ones(4))
    own = job(0.0)._replace(max_new_tokens=7)
    assert profile._heats(own, maker(gamma=4), 4) == (1,) * 4
    [(sure, accepted)] = seen
    assert sorted(accepted.tolist()) == [2] * 4 + [4] * 4
    assert ((sure >= 0).sum(1) == accepted).all()


@pytest.mark.slow
def test_on_a_mesh():
    """The programs of a mesh of one device."""
    mesh = sharding.make_mesh("data:1")

    def make(control):
        one = maker(gamma=3)(control)
        return one._replace(params=sharding.place(mesh, MODEL, one.params))

    own = job(mesh=mesh)
    own = own._replace(params=make("fixed:0").params.target)
    found = profile.measure([own], make, print, names=("m", "d")).batches
    assert found[2].lengths == (0, 1, 2, 3) and found[2].greedy.times[0] == 1
    assert min(found[2].greedy.acceptance) > 0.9


@pytest.mark.parametrize("name", by_default(("draft_model", "trie"), ("draft_model",)))
def test_rounds_with_so_many_nodes(name, monkeypatch):
    """What a profile by nodes runs verifies as many nodes as it says, and the sizes are those."""
    keys = {"nodes": 6, "depth": 2}
    make = maker(name, **keys, **({"tree": "dynamic", "top_k": 3} if name != "trie" else {}))
    one = job()

    def with_rule(control):
        return make(control)._replace(accept=accept.load("deterministic"))

    method = profile._with_drafts(with_rule(profile._forced(6, True)), True)
    state = passes.begin(one, method.drafter, method.params, *next(passes.batches(one)))
    if name == "trie":
        state = state.replace(draft=profile.with_drafts(state.draft, profile.ALWAYS))
    for nodes in (0, 1, 3, 6):
        own = jax.tree.map(lambda x: x.copy(), state)
        own = own.replace(draft=profile.with_length(own.draft, nodes))
        _, records = profile._generate(one, method, own, 4)
        assert set(np.asarray(records.verified).max(1).tolist()) <= {0, 1 + nodes}
    lengths = []

    def measured(job, method, lengths_of_cells):
        lengths.append(lengths_of_cells)
        times = tuple(1.0 + n for n in lengths_of_cells)
        return RoundCosts(times, (0.5,) * 6)

    monkeypatch.setattr(profile, "_measured", measured)
    how = {"names": ("m", "d"), "nodes": True}
    found = profile.measure([one], with_rule, lambda message: None, **how).batches
    assert lengths == [(0, 1, 3, 6)] and found[2].lengths == (0, 1, 3, 6)
    assert found[2].greedy.acceptance == (0.5,) * 6
    assert profile.by_nodes("budget") and not profile.by_nodes("goodput")
    assert not profile.by_nodes("budget:draft=0.1") and not profile.by_nodes(None)
