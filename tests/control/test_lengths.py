"""The controllers of the draft length: their traces, and the output law with each of them."""

from __future__ import annotations

import itertools
import json
import re
from fractions import Fraction

import cases
import growth_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import drafters_limited
from marks import by_default

from specjax import accept, control, drafters, testing
from specjax.control import Ahead, costs, goodput
from specjax.errors import UserError
from specjax.rng import DRAFT
from specjax.sampling import make_sampling
from specjax.types import Context, Draft, Drafter, ModelParams, Verdict

# With numbers that make every answer occur on the small tables.
ADVERSARIAL = (
    "fixed:0",
    "fixed:2",
    "heuristic:1,1,1,0",
    "confidence:0.45",
    "confidence:0.3,1,6",
    "entropy:0.4",
    "adaedl:0.55,0.5,1,0.2,0.2",
    "bass:1,1,3,2",
    "batch_size:1:2/2:1",
    "bandit:ucb,most=3,draft=0.3",
    "bandit:exp3,most=3,draft=0.3,width=0.5",
    "goodput:most=3,draft=0.2,weight=0.5,explore=1",
    "calibrated:most=3,draft=0.15",
    "heuristic:2,1,window=3,above=0.6,below=0.3",
    "pending:table.json",
)
# Of ``pending``: fewer entries than tokens.
TABLE = [2, 0, 3, 1]


def context(rows, temperature=1.0):
    """A context of so many rows."""
    tokens = jnp.arange(rows * 3).reshape(rows, 3)
    return Context(tokens, jnp.full((rows,), 3), make_sampling(rows, temperature))


def played(own, state, drafted, accepted, live=None):
    """The state after a round of chains in which so many tokens were drafted and accepted."""
    drafted, accepted = jnp.asarray(drafted), jnp.asarray(accepted)
    rows, most = len(drafted), 8
    place = jnp.arange(most)
    draft = Draft(jnp.zeros((rows, most), jnp.int32), place < drafted[:, None])
    path = jnp.where(place < accepted[:, None], place, -1)
    count = accepted + 1 if live is None else jnp.where(jnp.asarray(live), accepted + 1, 0)
    tokens = jnp.zeros((rows, most + 1), jnp.int32)
    return own.update(state, draft, Verdict(tokens, count, path))


@pytest.mark.fast
def test_heuristic_as_in_transformers():
    own = control.load("heuristic", start=5, most=8)
    state = own.init(context(3))
    state = played(own, state, [5, 5, 0], [5, 4, 0])
    assert own.limit(state).tolist() == [7, 4, 5]
    for _ in range(9):
        state = played(own, state, own.limit(state), [0, 0, 0])
    assert own.limit(state).tolist() == [1, 1, 1]
    for _ in range(9):
        state = played(own, state, own.limit(state), own.limit(state))
    assert own.limit(state).tolist() == [8, 8, 8]


@pytest.mark.fast
def test_the_window_of_heuristic():
    """Against a list of the last ten accepted shares, per row; rounds without a draft are none."""
    own = control.parse("heuristic:4,up=1,window=10,above=0.8,below=0.5,most=8")
    state, generator = own.init(context(3)), np.random.default_rng(0)
    lengths, seen, ties = [4, 4, 4], [[], [], []], set()
    for turn in range(60):
        rates = [0.95, 0.3, 0.7] if turn < 30 else [0.2, 0.9, 0.0]
        limits = own.limit(state).tolist()
        assert limits == lengths
        drafted = [0 if generator.random() < 0.2 else length for length in limits]
        accepted = [int(generator.binomial(n, p)) for n, p in zip(drafted, rates, strict=True)]
        state = played(own, state, drafted, accepted)
        for row in range(3):
            if drafted[row]:
                seen[row].append(Fraction(accepted[row], drafted[row]))
                mean = sum(seen[row][-10:]) / len(seen[row][-10:])
                ties |= {mean} & {Fraction("0.8"), Fraction("0.5")}
                up, down = mean >= Fraction("0.8"), mean < Fraction("0.5")
                lengths[row] = min(max(lengths[row] + up - down, 1), 8)
    assert len({tuple(each) for each in seen}) == 3 and lengths[2] == 1 and len(ties) == 2


@pytest.mark.fast
def test_bass_as_published():
    """l0 = 7; two more after a row that accepted all; else a tenth less, and less again."""
    own = control.load("bass")
    state = own.init(context(2))
    lengths = []
    for accepted in ([7, 0], [3, 2], [3, 2], [3, 6], [0, 0], [9, 9]):
        drafted = own.limit(state)
        state = played(own, state, drafted, jnp.minimum(jnp.asarray(accepted), drafted))
        lengths.append(own.limit(state).tolist())
        assert lengths[-1][0] == lengths[-1][1]
    # 7 -> 9 -> 8 (a tenth) -> 6 (a tenth, and one) -> 8 (a row accepted all 6) -> 7 -> 9
    assert [row[0] for row in lengths] == [9, 8, 6, 8, 7, 9]
    # Finished rows do not count, and without a live draft nothing changes.
    state = played(own, own.init(context(2)), [7, 7], [7, 3], [False, True])
    assert own.limit(state).tolist() == [6, 6]
    state = played(own, own.init(context(2)), [0, 0], [0, 0])
    assert own.limit(state).tolist() == [7, 7]
    # A row that was put in has the length of the others after one round.
    for _ in range(3):
        state = played(own, state, own.limit(state), own.limit(state))
    state = jax.tree.map(lambda a, b: a.at[1].set(b[0]), state, own.init(context(1)))
    assert own.limit(state).tolist() == [13, 7]
    assert own.limit(played(own, state, [13, 7], [13, 7])).tolist() == [15, 15]


@pytest.mark.fast
def test_batch_size_as_in_vllm():
    """The length of the rows that are left; the last one above the last number of rows."""
    own = control.parse("batch_size:1:4/2:2/3:0/4:1")
    assert own.lengths == (0, 1, 2, 4)
    for rows, live, length in (
        (5, [1, 1, 1, 1, 1], 1),
        (5, [1, 1, 0, 1, 1], 1),
        (4, [1, 1, 0, 1], 0),
        (4, [0, 1, 0, 1], 2),
        (3, [0, 0, 1], 4),
    ):
        state = own.init(context(rows))
        state = played(own, state, [1] * rows, [1] * rows, [bool(x) for x in live])
        assert own.limit(state).tolist() == [length] * rows, live
        # In a round of another drafter no row has a token of this one.
        other = played(own, state, [0] * rows, [0] * rows, [False] * rows)
        assert own.limit(other).tolist() == [length] * rows, live


@pytest.mark.fast
def test_pending_reads_the_last_token_that_was_emitted(tmp_path, monkeypatch):
    """Its entry of the table; a token beyond it has no draft; a row without tokens keeps all."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    own = control.parse("pending:table.json")
    assert own.lengths == (0, 1, 2, 3)
    prompts = jnp.array([[2, 2, 0], [2, 2, 4], [3, 1, 9]])
    lengths = jnp.array([3, 3, 1])
    state = own.init(Context(prompts, lengths, make_sampling(3, 1.0)))
    assert own.limit(state).tolist() == [2, 0, 1]
    tokens = jnp.array([[3, 2, -1], [0, -1, -1], [2, 2, 5]])
    draft = Draft(jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2), bool))
    verdict = Verdict(tokens, jnp.array([2, 1, 3]), jnp.full((3, 2), -1))
    assert own.limit(own.update(state, draft, verdict)).tolist() == [3, 2, 0]
    other = tmp_path / "other.json"
    for text, message in (
        ("{}", "pending's file other.json has no list; it must be one of lengths by token id"),
        ("[1, -1]", "entry 1 of pending's file other.json is -1; it must be a whole number >= 0"),
        ("[3000000000]", "entry 0 of pending's file other.json is 3000000000; it must be"),
        ("[", "pending's file other.json cannot be read"),
    ):
        other.write_text(text)
        with pytest.raises(UserError, match=re.escape(message)):
            control.parse("pending:other.json")


def ahead(depth, probs, tokens=None):
    """What a controller is asked about one place per row with these probabilities f[B,V]."""
    probs = jnp.asarray(probs)[:, None]
    token = jnp.zeros(probs.shape[:2]) if tokens is None else jnp.log(jnp.asarray(tokens))[:, None]
    valid = jnp.ones(probs.shape[:2], bool)
    return Ahead(depth, jnp.log(probs), token, valid, token)


@pytest.mark.fast
def test_entropy_stops_after_the_token_of_a_flat_distribution():
    own = control.load("entropy", most=0.3)
    flat, sharp = [0.4, 0.3, 0.3], [0.98, 0.01, 0.01]
    high = 0.15 * -np.sum(np.array(flat) * np.log(flat))
    assert np.sqrt(high) > 0.3
    state = own.init(context(2))
    # What an earlier round left has no effect on the first token.
    for left in (state, ~state):
        answer, first = own.ask(left, ahead(0, [flat, sharp]))
        assert answer.tolist() == [True, True]
        answer, second = own.ask(first, ahead(1, [sharp, flat]))
        assert answer.tolist() == [False, True]
        assert own.ask(second, ahead(2, [flat, flat]))[0].tolist() == [True, False]


@pytest.mark.fast
def test_adaedl_asks_before_the_token_and_follows_acceptance():
    own = control.load("adaedl", start=0.5, target=0.5, step=0.1, keep=0.0, memory=0.0)
    state = own.init(context(2))
    flat, sharp = [0.4, 0.3, 0.3], [0.9, 0.05, 0.05]
    assert 1 - np.sqrt(0.2 * 1.0889) > 0.5 and 1 - np.sqrt(0.2 * 1.0889) < 0.6
    assert own.ask(state, ahead(0, [flat, sharp]))[0].tolist() == [True, True]
    state = played(own, state, [2, 2], [0, 2])
    np.testing.assert_allclose(state.threshold, [0.6, 0.4], rtol=1e-6)
    assert own.ask(state, ahead(0, [flat, flat]))[0].tolist() == [False, True]
    again = played(own, state, [0, 0], [0, 0])
    np.testing.assert_array_equal(again.threshold, state.threshold)


def reference_threshold(probs, passed, threshold):
    """The rule of transformers, with its own loops."""
    if len(probs) <= 5 or all(passed) or not any(passed):
        return threshold
    best = None
    for candidate in sorted(set(probs), reverse=True):
        wrong = np.mean([p >= candidate for p, ok in zip(probs, passed, strict=True) if not ok])
        missed = np.mean([p < candidate for p, ok in zip(probs, passed, strict=True) if ok])
        cost = wrong + 3 * missed
        if best is None or cost < best[0] - 1e-9:
            best = cost, candidate
    return best[1]


def test_confidence_is_refitted_as_in_transformers():
    """40 rounds of three rows; every tested token with a known probability is recorded."""
    own, draw = (
        control.load("confidence", threshold=0.4, refit=1, memory=64),
        np.random.default_rng(0),
    )
    state = own.init(context(3))
    history: list[list[tuple[float, bool]]] = [[], [], []]
    for _ in range(20):
        probs, accepted = draw.uniform(0.1, 1, (3, 4)), draw.integers(0, 4, 3)
        for depth in range(4):
            # The question about level ``depth`` has the token of the level before it.
            token = np.ones(3) if depth == 0 else probs[:, depth - 1]
            _, state = own.ask(state, ahead(depth, np.full((3, 3), 1 / 3), token))
        state = played(own, state, [4, 4, 4], accepted)
        for row in range(3):
            for level in range(min(accepted[row] + 1, 3)):
                history[row].append((np.float32(probs[row, level]), level < accepted[row]))
            known = history[row][-64:]
            expected = reference_threshold([p for p, _ in known], [a for _, a in known], 0.4)
            np.testing.assert_allclose(state.threshold[row], expected, rtol=1e-5)


@pytest.mark.fast
def test_the_refitted_threshold_in_short():
    """Two rows in one program: as transformers' rule, also where it has too few tokens."""
    own, draw = control.load("confidence", refit=1, memory=8), np.random.default_rng(1)
    step = jax.jit(own.update)

    @jax.jit
    def grown(state, probs):
        for depth in range(4):
            token = jnp.ones(2) if depth == 0 else probs[:, depth - 1]
            logs = jnp.log(token)[:, None]
            asked = Ahead(depth, jnp.zeros((2, 1, 3)), logs, jnp.ones((2, 1), bool), logs)
            _, state = own.ask(state, asked)
        return state

    state, history, last = jax.jit(lambda: own.init(context(2)))(), [[], []], [0.4, 0.4]
    for number in range(14):
        probs = draw.uniform(0.1, 1, (2, 4)).astype(np.float32)
        # Row 0 has exactly five tokens after two rounds, row 1 no rejected one for six.
        first = number + 1 if number < 2 else draw.integers(0, 4)
        accepted = np.array([first, 3 if number < 6 else draw.integers(0, 4)])
        place = np.arange(4)
        draft = Draft(jnp.zeros((2, 4), jnp.int32), jnp.ones((2, 4), bool))
        path = jnp.asarray(np.where(place < accepted[:, None], place, -1))
        verdict = Verdict(jnp.zeros((2, 5), jnp.int32), jnp.asarray(accepted + 1), path)
        state = step(grown(state, jnp.asarray(probs)), draft, verdict)
        for row in range(2):
            for level in range(min(accepted[row] + 1, 3)):
                history[row].append((probs[row, level], level < accepted[row]))
            known = history[row][-8:]
            last[row] = reference_threshold([p for p, _ in known], [a for _, a in known], last[row])
        np.testing.assert_allclose(state.threshold, last, rtol=1e-5)
    # On a tree nothing is recorded, and a place that does not exist does not count.
    logs = jnp.log(jnp.asarray([[0.1, 0.9], [0.8, 0.1]]))
    asked = Ahead(1, jnp.zeros((2, 2, 3)), logs, jnp.asarray([[True, False]] * 2), logs)
    plain = control.load("confidence", threshold=0.4)
    assert jax.jit(plain.ask)((), asked)[0].tolist() == [False, True]
    assert (np.asarray(jax.jit(own.ask)(state, asked)[1].probs) == -1).all()


@pytest.mark.fast
def test_goodput_chooses_the_best_length_of_all_rows():
    """By the closed form, for acceptance that differs by row, and without finished rows."""
    own = control.load(
        "goodput", most=8, draft=0.1, verify=0.1, weight=1e-3, memory=1.0, rows="open"
    )
    state = own.init(context(2))
    for _ in range(40):
        state = played(own, state, [8, 8], [8, 0])
    lengths = np.array([0, 1, 2, 3, 4, 6, 8])
    both = (1 + lengths + 1) / (1 + 0.2 * lengths)
    assert int(own.limit(state)[0]) == lengths[np.argmax(both)] == 8
    # The row that accepts all is finished: the other one drafts nothing.
    state = played(own, state, [8, 8], [0, 0], [False, True])
    assert own.limit(state).tolist() == [0, 0]


@pytest.mark.fast
def test_goodput_tries_again_when_it_has_saved_enough():
    own = control.load("goodput", most=4, draft=0.2, verify=0.3, acceptance=0.1, explore=0.05)
    state, tried = own.init(context(1)), []
    for step in range(44):
        length = int(own.limit(state)[0])
        tried += [step] if length else []
        state = played(own, state, [length], [0])
    # A trial with one token costs 0.5 of a round, so ten rounds without a draft pay for one.
    assert tried == [10, 21, 32, 43]
    never = control.load("goodput", most=4, draft=0.5, acceptance=0.1, explore=0.0)
    state = never.init(context(1))
    for _ in range(50):
        state = played(never, state, [0], [0])
        assert int(never.limit(state)[0]) == 0


class Goodput:
    """The controller's own page, in NumPy: what it keeps, and the length that it chooses."""

    def __init__(self, sampled, lengths, pair, keys, limit, done):
        self.costs = [pair[int(each)] for each in sampled]
        self.lengths, self.keys, rows = np.array(lengths), keys, len(limit)
        self.passed, self.tested = np.zeros((rows, lengths[-1])), np.zeros((rows, lengths[-1]))
        self.found, self.left = np.zeros((rows, 2)), np.array(limit, float)
        self.live, self.bank = ~np.array(done), np.full(rows, keys.credit)
        self.idle, self.failed, self.tries, self.length = 0, 0, False, 0
        self.choose()

    def mean(self, field):
        return np.mean(
            [getattr(c, field) for c, on in zip(self.costs, self.live, strict=True) if on], 0
        )

    def each(self, field):
        return np.array([getattr(cost, field) for cost in self.costs], float)

    def rates(self):
        weight, known, result = self.keys.weight, self.each("acceptance"), []
        for row in range(len(known)):
            others = [r for r in range(len(known)) if r != row and self.live[r]]
            passed = self.passed[others].sum(0) + weight * known[row]
            expected = passed / (self.tested[others].sum(0) + weight)
            own = self.passed[row] + weight * expected
            result.append(own / (self.tested[row] + weight))
        return np.array(result)

    def choose(self):
        if not self.live.any():
            return
        keys, live = self.keys, self.live
        more = np.pad(self.rates().cumprod(1).cumsum(1), ((0, 0), (1, 0)))[:, self.lengths]
        share = self.found[:, 0] + keys.weight * self.each("finds")
        share = share / (self.found[:, 1] + keys.weight)
        empty, times = self.mean("empty"), np.array(self.mean("times"))
        spends = empty + (1 - np.prod(1 - share[live])) * (times - empty)
        spends[0] = 1
        rate = (1 + share[:, None] * more) / spends
        if keys.rows == "open":
            value = rate[live].sum(0)
        else:
            value = -(np.maximum(self.left, 1)[:, None] / rate)[live].max(0)
        best, trial = int(np.argmax(value)), 1 + int(np.argmax(value[1:]))
        spent = np.maximum(self.left, 1) / rate[:, best]
        self.pace, self.early = rate[:, best], 1 - spent / spent[live].max()
        trials = self.failed + 1
        saves = keys.explore - trials * self.mean("missed")
        due = np.inf if saves <= 0 else max(1, np.ceil(trials * (spends[trial] - 1) / saves - 1e-6))
        allowed = self.least() >= -1e-4
        self.tries = bool(allowed and not best and self.idle >= due)
        self.length = self.lengths[trial] if self.tries else self.lengths[best] * allowed

    def within(self, reach):
        if self.tries:
            return self.length
        rates = np.where(np.arange(self.lengths[-1]) < reach[:, None], self.rates(), 0)
        more = np.pad(rates.cumprod(1).cumsum(1), ((0, 0), (1, 0)))[:, self.lengths]
        counts = self.live * (np.exp(-10 * self.early) if self.keys.rows == "closed" else 1)
        times = np.array([self.mean("empty"), *self.mean("times")[1:]])
        gains = (counts[:, None] * (1 + more)).sum(0) - (counts * self.pace).sum() * times
        return self.lengths[np.argmax(gains)]

    def least(self):
        banks = (self.bank + (self.keys.slack - self.mean("missed")) * self.idle)[self.live]
        return banks.mean() if self.keys.rows == "open" else banks.min()

    def update(self, drafted, accepted, live):
        keys, count = self.keys, np.where(live, accepted + 1, 0)
        asked = live & (self.length > 0)
        for row in range(len(live)):
            for depth in range(min(accepted[row] + 1, drafted[row])):
                self.passed[row, depth] *= keys.memory
                self.passed[row, depth] += depth < accepted[row]
                self.tested[row, depth] = self.tested[row, depth] * keys.memory + 1
            if asked[row]:
                self.found[row] = self.found[row] * keys.memory + [drafted[row] > 0, 1]
        self.live = live
        if not live.any():
            return
        idle_gain = keys.slack - self.mean("missed")
        if drafted.max():
            at = int(np.argmax(self.lengths >= drafted.max()))
            gain = idle_gain * self.idle + (1 + keys.slack) * count - self.mean("times")[at]
            self.bank += np.where(live, gain, idle_gain * self.idle)
            self.left = self.left - self.idle - count
            self.idle = self.failed = 0
        else:
            self.bank += np.where(live, 1 - (self.mean("empty") if asked.any() else 1), 0)
            self.failed, self.idle = self.failed + self.tries, self.idle + 1
        self.choose()


@pytest.mark.fast
@pytest.mark.parametrize("rows", ["closed", "open"])
def test_goodput_is_what_its_page_says(rows):
    """120 rounds of three rows, one greedy, that end one after another, and of one that is done."""
    lengths, most = (0, 1, 3, 4), 4
    pair = (
        costs.RoundCosts((1.0, 1.2, 1.5, 1.9), (0.8, 0.7, 0.6, 0.5), empty=1.1, finds=0.8),
        costs.RoundCosts(
            (1.0, 1.4, 1.7, 2.0), (0.6, 0.5, 0.5, 0.4), empty=1.2, finds=0.5, missed=0.004
        ),
    )
    keys = goodput.Keys(weight=3.0, memory=0.9, explore=0.2, slack=0.3, credit=2.0, rows=rows)
    own = goodput.of_costs(costs.Costs(lengths, *pair), keys)
    tokens, limit = jnp.zeros((4, 3), jnp.int32), np.array([150, 260, 90, 300])
    begun = Context(tokens, jnp.full((4,), 3), make_sampling(4, [0.0, 1.0, 1.0, 0.0]))
    begun = begun.replace(limit=jnp.asarray(limit + 3), done=jnp.arange(4) == 3)
    state, step = jax.jit(lambda: own.init(begun))(), jax.jit(lambda *given: played(own, *given))
    within = jax.jit(own.within)
    right = Goodput([0, 1, 1, 0], lengths, pair, keys, limit, np.arange(4) == 3)
    draw, seen = np.random.default_rng(3), []
    left, good = limit * (np.arange(4) < 3), np.array([0.9, 0.5, 0.1, 0.0])
    for number in range(120):
        live = left > 0
        length = int(state.length[0])
        assert length == right.length, number
        assert bool(state.tries[0]) == right.tries
        seen.append((length, bool(state.tries[0]), right.failed))
        # The text changes: what was accepted is rejected, and the reverse.
        chance = good if number // 30 % 2 == 0 else good[::-1] * 0.3
        if live.any():
            reach = draw.integers(0, 5, 4)
            assert int(within(state, reach)[0]) == right.within(reach)
        drafted = np.where(live & (draw.random(4) < 0.7), length, 0)
        accepted = (draw.random((4, most)) < chance[:, None]).cumprod(1).sum(1)
        accepted = np.minimum(accepted, drafted)
        state = step(state, drafted, accepted, live)
        right.update(drafted, accepted, live)
        left = left - np.where(live, accepted + 1, 0)
        for name in ("passed", "tested", "found", "left", "bank"):
            expected = getattr(right, name)
            np.testing.assert_allclose(getattr(state, name), expected, atol=2e-3, err_msg=name)
        if live.any():
            np.testing.assert_allclose(state.rates, right.rates(), atol=1e-4)
        assert (int(state.idle[0]), int(state.failed[0])) == (right.idle, right.failed)
    assert len({each[0] for each in seen}) >= 3 and any(each[1] for each in seen), seen
    # A pause lasts until the next trial, unless the batch or its live rows are others now.
    pause, every = jax.jit(own.pause.rounds), jnp.ones((4,), bool)
    ones = jnp.ones((4,), jnp.int32)
    state = state.replace(live=every, bank=ones * 1.0, idle=ones * 2, due=ones * 9, rows=ones * 4)
    assert pause(state, every).tolist() == [7] * 4
    assert pause(state.replace(rows=ones * 2), every).tolist() == [1] * 4
    assert pause(state, jnp.asarray([True, False, True, True])).tolist() == [1] * 4
    # A trial keeps its length, whatever was found.
    trial = state.replace(tries=every, length=ones)
    assert within(trial, np.full(4, 4)).tolist() == [1] * 4


@pytest.mark.fast
@pytest.mark.parametrize("missed", [0.0, 0.01, 0.018, 0.03])
def test_a_trial_pays_for_what_the_draft_model_missed(missed):
    """Trials, and what is read before them, take at most the share for trials of all rounds."""
    measured = costs.RoundCosts((1.0, 1.5), (0.1,), missed=missed)
    own = goodput.of_costs(costs.Costs((0, 1), measured, measured), goodput.Keys(explore=0.02))
    state, rest, spent, tried = own.init(context(1)), 0, 0.0, []
    for step in range(600):
        length = int(own.limit(state)[0])
        spent += length * (0.5 + missed * rest)
        rest = 0 if length else rest + 1
        tried += [step] if length else []
        state = played(own, state, [length], [0])
        assert spent <= 0.02 * (step + 1) + 1e-6
    # 25, 50, 250 rounds; 2 % can never pay for 3 %.
    assert len(tried) == {0.0: 23, 0.01: 11, 0.018: 2, 0.03: 0}[missed], tried


@pytest.mark.parametrize("policy", ["ucb", pytest.param("exp3", marks=pytest.mark.slow)])
def test_bandit_finds_the_best_arm(policy):
    """Tokens are accepted with probability 0.8: 4 is best."""
    own = control.load("bandit", policy=policy, most=4, draft=0.05, verify=0.0, width=0.2)
    draw, state, counts = np.random.default_rng(1), own.init(context(4)), np.zeros(5)
    update = jax.jit(lambda *args: played(own, *args))
    for step in range(300):
        length = np.asarray(own.limit(state))
        accepted = np.minimum((draw.random((4, 4)) < 0.8).cumprod(1).sum(1), length)
        state = update(state, length, accepted)
        if step >= 150:
            np.add.at(counts, length, 1)
    assert counts.argmax() == 4 and counts[0] < counts[4] / 4


@pytest.mark.fast
def test_bandit_counts_the_time_of_the_longest_draft():
    """A round takes what its longest draft takes, in all rows; a row without tokens learns none."""
    own = control.load("bandit", most=2, draft=1.0, verify=0.0)
    start = own.init(context(3)).replace(arm=jnp.asarray([2, 0, 2]))
    state = played(own, start, [2, 0, 2], [1, 0, 1], [True, True, False])
    gain = np.asarray(state.score).sum(-1)
    # Times are 1, 2, 3 for 0, 1, 2 tokens; the highest gain of any length is 1.
    np.testing.assert_allclose(gain, [2 / 3, 1 / 3, 0], rtol=1e-6)
    # Without a draft another drafter wrote: a token in the time 1.
    first = own.init(context(3))
    assert first.arm.tolist() == [0] * 3
    state = played(own, first, [0] * 3, [0] * 3, [False] * 3)
    assert state.arm.tolist() == [1] * 3 and np.asarray(state.score)[:, 0].tolist() == [1] * 3
    state = played(own, state, [2] * 3, [2] * 3, [False] * 3)
    assert state.arm.tolist() == [1] * 3 and np.asarray(state.rounds).sum() == 3


@pytest.mark.fast
def test_calibrated_stops_at_the_first_fall():
    own = control.load("calibrated", most=4, draft=0.25, verify=0.0)
    state = own.init(context(3))
    sure = np.array([0.9, 0.2, 0.6])
    flat = np.concatenate([sure[:, None], np.repeat((1 - sure)[:, None] / 9, 9, 1)], 1)
    going, answers = np.ones(3, bool), []
    for depth in range(5):
        answer, state = own.ask(state, ahead(depth, flat))
        going &= np.asarray(answer)
        answers.append(going.tolist())
    expected = []
    for s in sure:
        tokens = 1 + np.concatenate([[0], np.cumsum(s ** np.arange(1, 6))])
        rate = tokens[:5] / (1 + 0.25 * np.arange(5))
        rises = [*list(rate[1:] > rate[:-1]), False]
        expected.append(rises.index(False))
    assert [sum(column) for column in zip(*answers, strict=True)] == expected == [4, 0, 2]


@pytest.mark.parametrize("text", by_default(ADVERSARIAL, ADVERSARIAL[4:5]))
def test_exact_law(text, tmp_path, monkeypatch):
    """Two rounds of a draft model, the second one with what the controller learned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    with jax.enable_x64(True):
        target, draft, _ = cases.models()
        params = ModelParams(cases.table(0), cases.table(3))
        drafter = drafters.make("draft_model", target, model=draft, gamma=3, control=text)
        truth = testing.sequence_law(target, params.target, (2, 1), 3, temperature=0.9)
        emitted = testing.exact_law(
            target, drafter, accept.load("chain"), params, (2, 1), 3, temperature=0.9
        )
        assert testing.total_variation(emitted, truth) < shared.EXACT


@pytest.mark.fast
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fixed", "controller fixed needs the key 'length'"),
        ("fixed:-1", "the draft length is -1; it must be a whole number >= 0"),
        ("heuristic:5,most=3", "heuristic's most is 3; it must be a whole number >= 5"),
        ("heuristic:above=0.4,below=0.5", "heuristic's above is 0.4 and below 0.5"),
        ("heuristic:above=1.1", "heuristic's above is 1.1 and below 1.0; they must be shares"),
        ("confidence:1.5", "confidence's threshold is 1.5"),
        ("confidence:0.4,2", "confidence's refit is 2; it must be a number from 0 to 1"),
        ("entropy:-1", "entropy's most is -1"),
        ("adaedl:start=2", "adaedl's start is 2; it must be a number in [0, 1]"),
        ("bass:0", "bass's start is 0; it must be a whole number >= 1"),
        ("batch_size:64:3/32:1", "batch_size's table is '64:3/32:1'; it must be numbers of rows"),
        ("batch_size:64", "batch_size's table is '64'; it must be numbers of rows"),
        ("bandit:greedy", "bandit's policy is 'greedy'; it must be one of"),
        ("goodput:explore=2", "goodput's explore is 2; it must be a number in [0, 1]"),
        ("goodput:draft=-1", "the cost draft is -1; it must be a number of at least 0"),
        ("goodput:no_such_file", "there is no cost profile no_such_file; mode bench writes one"),
    ],
)
def test_errors(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        control.parse(text)


@pytest.mark.fast
def test_lookups_take_only_limits():
    target = cases.models()[0]
    with pytest.raises(UserError, match="has none; take one of bandit, bass, batch_size, fixed"):
        drafters.make("prompt_lookup", target, control="threshold:0.4")
    for text in ("bandit", "bass", "batch_size:2:3", "fixed:1", "goodput", "heuristic"):
        made = drafters.make("prompt_lookup", target, gamma=3, control=text)
        assert made == drafters.make("prompt_lookup", target, gamma=3, control=text)
        assert made.rare.rest is not None and not made.whole


@pytest.mark.fast
def test_goodput_of_a_closed_batch_is_that_of_its_last_row():
    """Row 0 accepts all, row 1 nothing: what counts is which of them is finished last."""
    own = control.load("goodput", most=8, draft=0.1, verify=0.1, weight=1e-3, memory=1.0, slack=1)
    lengths = np.array([0, 1, 2, 3, 4, 6, 8])
    each = np.stack([(1 + lengths) / (1 + 0.2 * lengths), 1 / (1 + 0.2 * lengths)])
    for limit in ((103, 103), (2003, 203), (363, 103), (2003, 4)):
        state = own.init(context(2).replace(limit=jnp.asarray(limit)))
        for _ in range(2):
            state = played(own, state, [8, 8], [8, 0])
        left = np.maximum(np.array(limit) - 3 - 2 * np.array([9, 1]), 1)
        best = lengths[np.argmin((left[:, None] / each).max(0))]
        assert own.limit(state).tolist() == [best] * 2, limit
        # A draft was found in row 0 only, which is finished early where row 1 is the last.
        found = own.within(state, jnp.asarray([8, 0])).tolist()
        assert (found == [0, 0]) == (limit == (103, 103)), limit


@pytest.mark.fast
def test_goodput_counts_the_rows_that_found_a_draft():
    """One of four rows gains from a draft, and all wait for it; a trial is not shortened."""
    own = control.load("goodput", most=8, draft=0.05, verify=0.1, acceptance=0.8, explore=0.5)
    state = own.init(context(4))
    assert own.limit(state).tolist() == [4] * 4

    def best(reach):
        found = own.within(state, jnp.asarray(reach)).tolist()
        assert len(set(found)) == 1
        return found[0]

    lengths, rates = np.array([0, 1, 2, 3, 4, 6, 8]), 0.8 ** np.arange(1, 9)
    times = 1 + 0.15 * lengths
    # The time of a round is taken from rounds in which every row is expected to have a draft.
    pace = 4 * (1 + rates[:4].sum()) / times[4]
    for reach in ([8] * 4, [8, 8, 8, 0], [2, 2, 2, 2], [3, 8, 8, 8], [8, 0, 0, 0], [0] * 4):
        tokens = [1 + rates[: min(n, r)].sum() for r in reach for n in lengths]
        value = np.reshape(tokens, (4, -1)).sum(0) - pace * times
        assert best(reach) == lengths[np.argmax(value)], reach
    assert best([8] * 4) > best([8, 8, 8, 0]) > best([8, 0, 0, 0]) == 0
    trial = state.replace(tries=jnp.ones((4,), bool), length=jnp.full((4,), 2))
    assert own.within(trial, jnp.asarray([1, 0, 0, 0])).tolist() == [2] * 4


@pytest.mark.fast
def test_goodput_counts_what_a_search_for_a_draft_costs():
    """By the formula, for several costs of a search and shares of rounds with a draft."""
    lengths, times, rate, weight = (0, 1, 2), (1.0, 1.5, 1.8), 0.8, 16.0
    for empty, finds, found in itertools.product((1.0, 1.3), (0.05, 0.9), (0, 12)):
        measured = costs.RoundCosts(times, (rate, rate), empty=empty, finds=finds)
        own = goodput.of_costs(
            costs.Costs(lengths, measured, measured),
            goodput.Keys(explore=0.02, memory=1.0, slack=1.0),
        )
        state, failed = own.init(context(1)), 0
        for _ in range(found):
            # As asked for a draft of two tokens, with none.
            failed += int(state.tries[0])
            state = played(own, state.replace(length=jnp.full((1,), 2)), [0], [0])
        share = weight * finds / (found + weight)
        more = np.array([0, rate, rate + rate**2])
        spent = empty + share * (np.array(times) - empty)
        spent[0] = 1
        value = (1 + share * more) / spent
        best, trial = int(np.argmax(value)), 1 + int(np.argmax(value[1:]))
        if best or not state.tries[0]:
            assert own.limit(state).tolist() == [best], (empty, finds, found)
        price = (failed + 1) * (spent[trial] - 1)
        np.testing.assert_allclose(state.due, np.ceil(price / 0.02), atol=1)
        # A round that has looked for a draft costs a search anyway.
        gains = 1 + more - value[best] * np.array([empty, *times[1:]])
        open_state = state.replace(tries=jnp.zeros((1,), bool))
        assert own.within(open_state, jnp.asarray([2])).tolist() == [int(np.argmax(gains))]


@pytest.mark.fast
@pytest.mark.parametrize("finds", [0.02, 0.3])
def test_searches_that_find_nothing_stay_within_their_share(finds):
    """A text without matches: all searches together cost at most the share for trials."""
    measured = costs.RoundCosts((1.0, 1.2), (0.6,), empty=1.1, finds=finds)
    own = goodput.of_costs(costs.Costs((0, 1), measured, measured), goodput.Keys(explore=0.01))

    def round_of(state, _):
        asked = own.limit(state)[0] > 0
        return played(own, state, [0], [0]), asked

    rounds = 4000
    _, asked = jax.lax.scan(round_of, own.init(context(1)), None, rounds)
    asked = np.asarray(asked)
    # The first rounds ask because drafts are still expected.
    assert asked[:1000].any() and asked[1000:].any()
    assert 0.1 * asked[1000:].sum() <= 2 * 0.01 * (rounds - 1000)


def if_two(levels):
    """A controller that drafts only where a draft has two levels."""
    return control.Controller(
        "if two",
        init=lambda context: levels + jnp.zeros_like(context.length),
        limit=lambda state: state,
        within=lambda state, reach: jnp.where(reach == 2, state, 0),
    )


@pytest.mark.parametrize("drawn", [True, False])
def test_the_levels_of_a_drawn_draft_are_not_read(drawn):
    """The second token exists only after a first token of 0; its absence must not drop the first.

    Without noise the draft is a function of the text, and then it may.
    """
    vocab = cases.models()[0].vocab_size
    numbers = np.linspace(3, 1, vocab)

    def propose(params, keys, context, state):
        batch = len(context.length)
        each = jnp.broadcast_to(jnp.asarray(numbers / numbers.sum()), (batch, vocab))
        if drawn:
            first, second = (keys.draw(DRAFT, each, jnp.int32(i)) for i in (0, 1))
        else:
            first, second = context.pending % vocab, jnp.zeros((batch,), jnp.int32)
        valid = jnp.stack([jnp.ones_like(first, bool), first == 0], 1)
        tokens = jnp.stack([first, second], 1)
        each = jnp.stack([each, each], 1)
        return Draft(tokens, valid, probs=each if drawn else None), state

    with jax.enable_x64(True):
        target, params = cases.models()[0], ModelParams(cases.table(0), {})
        drafter = Drafter(
            init_params=lambda key: {},
            init=lambda params, context, target_out, slots: (),
            propose=propose,
            update=lambda params, state, draft, verdict, target_out: state,
            nodes=2,
        )
        own = drafters_limited.limited(drafter, if_two(2))
        emitted = testing.exact_law(
            target, own, accept.load("chain"), params, (2, 1), 3, temperature=0.9
        )
        truth = testing.sequence_law(target, params.target, (2, 1), 3, temperature=0.9)
        assert testing.total_variation(emitted, truth) < shared.EXACT


@pytest.mark.fast
def test_the_choice_of_a_round_with_a_draft_is_the_best_for_the_text():
    """Drafts are in few rounds. Every constant answer to "a draft was found" gives fewer tokens."""
    lengths, times, rate, finds, empty = (0, 1, 4), (1.0, 1.2, 2.2), 0.7, 0.2, 1.05
    measured = costs.RoundCosts(times, (rate,) * 4, empty=empty, finds=finds)
    own = goodput.of_costs(costs.Costs(lengths, measured, measured), goodput.Keys(explore=0))
    state = own.init(context(1)).replace(length=jnp.full((1,), 4))
    chosen = int(own.within(state, jnp.asarray([4]))[0])
    more = {n: (rate ** np.arange(1, n + 1)).sum() for n in lengths}
    spent = dict(zip(lengths, (empty, *times[1:]), strict=True))
    rates = {n: (1 + finds * more[n]) / ((1 - finds) * empty + finds * spent[n]) for n in lengths}
    assert chosen == max(rates, key=rates.__getitem__)
    # The round alone would have chosen another one.
    assert chosen != max(lengths, key=lambda n: (1 + more[n]) / spent[n])
