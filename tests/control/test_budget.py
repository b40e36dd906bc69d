"""The controller ``budget``: its choice against NumPy, exact laws, widths, and its mistakes."""

from __future__ import annotations

import functools
import itertools
import json

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default
from sized_cases import (
    DEPTH,
    KEYS,
    NODES,
    accepted_path,
    ancestors_of,
    check_texts,
    exist_of,
    made,
    random_tree,
    two_rounds,
)

from specjax import accept, control, drafters, sampling, testing
from specjax.control import budget, costs
from specjax.errors import UserError
from specjax.testing import claims, exact, loop
from specjax.topology import dynamic
from specjax.types import Context, Draft, ModelParams, Verdict

ROWS = 3
VERIFY, DRAFT, WEIGHT, MEMORY = 0.12, 0.15, 2.0, 0.8
PATIENCE = 1.0
TEXT = f"budget:draft={DRAFT},verify={VERIFY},weight={WEIGHT},memory={MEMORY},explore=0.2"
TEXT += f",patience={PATIENCE}"
SIZES = costs.sizes(NODES)[1:]


@pytest.mark.fast
def test_the_first_nodes_are_the_best_tree():
    """Against all trees of n nodes, for every n; equal chances too; any order of the nodes."""
    draw, order_of = np.random.default_rng(0), jax.jit(dynamic.by_chance)
    for case in range(12):
        parents, valid = random_tree(draw)
        chance = draw.random(NODES) if case % 3 else draw.choice([0.25, 0.5, 1.0], NODES)
        given = jnp.log(jnp.asarray([chance], jnp.float32)), jnp.asarray([parents])
        order, reached = (np.asarray(x)[0] for x in order_of(*given, jnp.asarray([valid])))
        assert sorted(order) == list(range(NODES))
        exist = exist_of(parents, valid)
        path = [np.prod([chance[a] for a in ancestors_of(parents, n)]) * exist[n] for n in range(9)]
        np.testing.assert_allclose(reached, np.array(path)[order], rtol=1e-3, atol=1e-6)
        here = [n for n in range(NODES) if exist[n]]
        for size in range(1, len(here) + 1):
            first = set(order[:size].tolist())
            assert all(parents[n] in first | {-1} for n in first)
            closed = (
                some
                for some in itertools.combinations(here, size)
                if all(parents[n] in (-1, *some) for n in some)
            )
            best = max(sum(path[n] for n in some) for some in closed)
            np.testing.assert_allclose(reached[:size].sum(), best, rtol=1e-3)


class Reference:
    """``budget`` for linear costs, in NumPy, row by row and node by node."""

    def __init__(self):
        self.passed, self.tested = np.zeros((2, ROWS, budget.CLASSES))
        self.live, self.gained, self.spent, self.lost = np.ones(ROWS, bool), 0, 0, 0
        self.idle = self.due = 0

    def rests(self):
        return self.lost >= PATIENCE and self.idle < self.due

    def chance(self, row, prob):
        own = int(np.clip(np.floor(np.log(prob / (1 - prob))) + 6, 0, 11))
        others = self.live & (np.arange(ROWS) != row)
        passed, tested = (x[others, own].sum() for x in (self.passed, self.tested))
        known = (passed + WEIGHT * prob) / (tested + WEIGHT)
        return own, (self.passed[row, own] + WEIGHT * known) / (self.tested[row, own] + WEIGHT)

    def size(self, parents, valid, probs):
        """For each row the nodes that are verified, in order; and how many at most."""
        self.classes, path = np.zeros((ROWS, NODES), int), np.zeros((ROWS, NODES))
        orders = []
        for row in range(ROWS):
            exist = exist_of(parents[row], valid[row])
            own = [self.chance(row, prob) for prob in probs[row]]
            self.classes[row] = [each[0] for each in own]
            for n in range(NODES):
                above = ancestors_of(parents[row], n)
                path[row, n] = np.prod([own[a][1] for a in above]) * exist[n]
            # Of ties the lower index, where rounding may have made one.
            orders.append(sorted(range(NODES), key=lambda n, row=row: (-path[row, n], n)))
        sums = np.cumsum(-np.sort(-path, 1), 1)[self.live].mean(0)
        tokens = 1 + sums[np.array(SIZES) - 1]
        times = 1 + DEPTH * DRAFT + VERIFY * np.array(SIZES)
        first = np.argmax(tokens / times)
        pace = (self.gained + WEIGHT * tokens[first]) / (self.spent + WEIGHT * times[first])
        best = np.argmax(tokens - max(pace, 1) * times)
        self.gained = MEMORY * self.gained + tokens[best]
        self.spent = MEMORY * self.spent + times[best]
        self.lost = np.clip(self.lost + times[best] - tokens[best], 0, PATIENCE)
        loss = (1 - self.gained / self.spent) * times[best]
        self.idle, self.due = 0, max(np.ceil(loss / 0.2 - 1e-5), 1)
        return orders, SIZES[best]

    def update(self, orders, parents, valid, count, paths, live):
        self.live = live
        self.idle += 1
        for row in np.flatnonzero(live):
            kept = orders[row][:count]
            exist = exist_of(parents[row], valid[row])
            fresh = np.zeros((2, budget.CLASSES))
            for n in kept:
                if exist[n] and (parents[row][n] < 0 or parents[row][n] in paths[row]):
                    fresh[:, self.classes[row, n]] += [n in paths[row], 1]
            keep = np.where(fresh[1] > 0, MEMORY, 1)
            self.passed[row] = keep * self.passed[row] + fresh[0]
            self.tested[row] = keep * self.tested[row] + fresh[1]


def play(rounds=60):
    """``budget`` beside its reference for so many rounds of random trees."""
    own, right, draw = control.parse(TEXT), Reference(), np.random.default_rng(1)
    settings = sampling.make_sampling(ROWS, [0.0, 1.0, 1.0])
    context = Context(jnp.zeros((ROWS, 3), jnp.int32), jnp.full((ROWS,), 3), settings)
    state, seen, rests = own.init(context), set(), 0
    sized = jax.jit(functools.partial(control.sized, own))
    update = jax.jit(own.update)
    for number in range(rounds):
        live = np.arange(ROWS) < 3 - number // 25
        if right.rests():
            assert own.limit(state).max() == 0
            nothing = Draft(jnp.zeros((ROWS, 0), jnp.int32), jnp.zeros((ROWS, 0), bool))
            verdict = Verdict(jnp.zeros((ROWS, 1)), jnp.asarray(live * 1), jnp.zeros((ROWS, 0)))
            state, right.idle, right.live = update(state, nothing, verdict), right.idle + 1, live
            rests += 1
            continue
        assert own.limit(state).min() > DEPTH
        parents, valid = zip(*[random_tree(draw) for _ in range(ROWS)], strict=True)
        probs = draw.beta(0.8, 0.8, (ROWS, NODES)).clip(0.001, 0.999)
        tokens = jnp.broadcast_to(jnp.arange(NODES), (ROWS, NODES))
        draft = Draft(tokens, jnp.asarray(valid), jnp.asarray(parents), depth=DEPTH)
        small, order, state = sized(state, draft, jnp.log(jnp.asarray(probs, jnp.float32)))
        orders, count = right.size(parents, valid, probs)
        seen.add(count)
        good, paths = (0.9 if number < 20 else 0.05), []
        for row in range(ROWS):
            exist = np.array(exist_of(parents[row], valid[row]))
            many = int(exist.sum())
            assert np.asarray(small.tokens)[row, :many].tolist() == orders[row][:many], number
            kept = [n for n, one in zip(orders[row], small.valid[row], strict=True) if one]
            expected = [n for n in orders[row][:count] if exist[n]]
            assert [n for n in kept if exist[n]] == expected, number
            above = np.asarray(small.parents)[row]
            assert (above < np.arange(NODES)).all()
            named = [-1 if a < 0 else int(order[row][a]) for a in above]
            assert named == [parents[row][n] for n in np.asarray(order)[row]]
            paths.append(accepted_path(draw, parents[row], kept, exist, good))
        place = np.argsort(np.asarray(order), 1)
        ids = np.full((ROWS, DEPTH), -1)
        for row, path in enumerate(paths):
            ids[row, : len(path)] = place[row][path]
        lengths = jnp.asarray(
            [(1 + len(path)) * one for path, one in zip(paths, live, strict=True)]
        )
        state = update(state, small, Verdict(jnp.zeros((ROWS, 5)), lengths, jnp.asarray(ids)))
        right.update(orders, parents, valid, count, paths, live)
        for name in ("passed", "tested"):
            np.testing.assert_allclose(getattr(state, name), getattr(right, name), rtol=1e-4)
        np.testing.assert_allclose(state.lost, right.lost, atol=1e-3)
        np.testing.assert_allclose(
            state.gained[0] / state.spent[0], right.gained / right.spent, 1e-3
        )
    return seen, rests


@pytest.mark.fast
def test_budget_is_what_its_page_says():
    """Sixty rounds of three rows that end one after another: trees, sizes, counts and rests."""
    seen, rests = play()
    assert len(seen) >= 3 and rests > 3


def _alone(log_chance, parents, valid):
    """Nodes by their own chance, so a child may come before its parent."""
    return _by_chance(log_chance, jnp.full_like(parents, -1), valid)


def _one_more(right, *args):
    order, count, state = right(*args)
    return order, count + 1, state


def _of_another_row(right, state, weight, classes, prior):
    return right(state, weight, classes[::-1], prior[::-1])


def _all_are_tested(right, setup, state, draft, verdict):
    """Nodes below a rejected one count as tested."""
    flat = draft.parents if draft.parents is None else jnp.full_like(draft.parents, -1)
    return right(setup, state, draft.replace(parents=flat), verdict)


def _instead(name, wrong):
    right = getattr(budget, name)
    return budget, name, lambda *args: wrong(right, *args)


_by_chance = dynamic.by_chance
MISTAKES = {
    "a node without its parent": (dynamic, "by_chance", _alone),
    "one node more": _instead("_size", _one_more),
    "probabilities of another row": _instead("_observed", _of_another_row),
    "untested nodes are counted": _instead("_update", _all_are_tested),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name, monkeypatch):
    monkeypatch.setattr(*MISTAKES[name])
    with pytest.raises(AssertionError):
        play()


@pytest.mark.fast
def test_rows_of_others_and_what_a_model_missed(tmp_path):
    """A row that was put in, a round that another drafter wrote, and tokens to read first."""
    kind = costs.linear(4, 0.0, 0.4, 0.7, costs.NODES)
    kind = kind._replace(greedy=kind.greedy._replace(missed=0.004))
    measured = costs.Profile(costs.device(), "t", "d", {2: kind}, costs.NODES)
    (tmp_path / "p.json").write_text(json.dumps(measured.to_json()))
    own = control.load("budget", profile=str(tmp_path / "p.json"), explore=0.01)
    settings = sampling.make_sampling(2, 0.0)
    context = Context(jnp.zeros((2, 3), jnp.int32), jnp.full((2,), 3), settings)
    tokens = jnp.broadcast_to(jnp.arange(2), (2, 2))
    draft = Draft(tokens, tokens >= 0, jnp.full((2, 2), -1), depth=1)
    log_prob = jnp.full((2, 2), jnp.log(0.05))
    sized = jax.jit(functools.partial(control.sized, own))
    *_, state = sized(jax.jit(own.init)(context), draft, log_prob)
    # ``spent`` is the time of this round. 0.006 of a round without a draft are for a trial.
    loss = float(state.spent[0] - state.gained[0])
    assert state.due.tolist() == [np.ceil(loss / 0.006)] * 2 and loss > 0.1
    lost = jnp.asarray([3.0, 0.0])
    *_, later = sized(state.replace(lost=lost), draft, log_prob)
    np.testing.assert_allclose(later.lost, min(3 + loss, 4), atol=0.1)
    assert later.lost[0] == later.lost[1] > 3
    nothing = Verdict(jnp.full((2, 3), -1), jnp.zeros((2,), jnp.int32), jnp.full((2, 2), -1))
    after = jax.jit(own.update)(later, draft, nothing)
    assert after.live.all()
    np.testing.assert_array_equal(after.tested, later.tested)


# Exact laws and texts.

# Sizes 1 and 3, and rests, occur on the small tables.
CONTROL = "budget:draft=0.05,verify=0.15,weight=0.5,patience=0.2,explore=1"


@pytest.mark.xdist_group("enumeration")
@pytest.mark.parametrize("name", by_default(KEYS, ("dynamic",)))
def test_two_rounds_have_the_law_of_the_target(name):
    """The second round has what the controller learned of any first one."""
    found = two_rounds(name, CONTROL)
    assert testing.total_variation(found.law, found.truth) < 1e-12
    # The first round of ``token_recycling`` knows no successor.
    assert found.drafted > 0 or name == "token_recycling"


def _with_probs(right, controller, state, draft, log_prob):
    """``control.sized`` for drawn nodes: their probs move with them."""
    probs = draft.probs
    draft, order, state = right(controller, state, draft.replace(probs=None), log_prob)
    return draft.replace(probs=jnp.take_along_axis(probs, order[..., None], 1)), order, state


def _by_place(right, controller, state, draft, log_prob):
    """The same, and the chances do not depend on the tokens."""
    return _with_probs(right, controller, state, draft, jnp.zeros_like(log_prob) - 1)


@pytest.mark.xdist_group("enumeration")
@pytest.mark.parametrize(
    ("siblings", "sized", "exactly"),
    by_default(
        [
            ("without_replacement", _with_probs, False),
            ("without_replacement", _by_place, True),
            ("iid", _with_probs, False),
            ("iid", _by_place, True),
        ],
        [("without_replacement", _with_probs, False)],
    ),
)
def test_drawn_nodes_would_change_the_law(siblings, sized, exactly, monkeypatch):
    """Nodes left out by their own tokens: why drawn trees are refused. By their places: exact."""
    monkeypatch.setattr(control, "check_tree", lambda *_: None)
    monkeypatch.setattr(control, "sized", functools.partial(sized, control.sized))
    target, draft, _ = cases.models()
    keys = {"tree": "2x1", "siblings": siblings, "control": "budget:most=1,draft=0"}
    drafter = drafters.make("draft_model", target, model=draft, **keys)
    with jax.enable_x64(True):
        params = ModelParams(*(claims.widen(cases.table(n)) for n in (0, 1)))
        given = target, drafter, accept.load("recursive"), params, cases.PROMPT, 3
        found = exact.enumerated(*given, rounds=1)
    error = testing.total_variation(found.law, found.truth)
    assert error < 1e-12 if exactly else error > 0.01


@pytest.mark.slow
def test_the_compiled_loop_at_temperature_one():
    """Counted over several rounds; rows of one batch share the number of nodes."""
    target, draft, _ = cases.models()
    params = ModelParams(cases.table(0), cases.table(1))
    drafter = made("dynamic", target, draft, params.target, CONTROL)
    given = target, drafter, accept.load("deterministic"), params
    fit = loop.loop_fit(*given, cases.REPEATED, 5, 60_000)
    assert fit.p_value > 1e-4 and fit.detectable < 0.025


@pytest.mark.parametrize("name", by_default(KEYS, ("dynamic", "top_k")))
def test_greedy_texts_and_widths(name):
    """Ragged rows: the texts of plain decoding, at widths of the sizes, and small ones too."""
    for widths, accepted in check_texts(name, "budget:draft=0,verify=0.05"):
        # Some tree is not verified whole.
        assert min(widths) < 7 and (name != "dynamic" or (len(widths) > 1 and accepted > 20))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("method", "keys", "what"),
    [
        ("draft_model", {"tree": "2x2"}, "draft_model drafts drawn nodes; give tree='dynamic'"),
        ("draft_model", {"gamma": 3}, "draft_model drafts a chain, which has no nodes to choose"),
        ("draft_model", {"tree": "2x1", "siblings": "coupled"}, "drafts drawn nodes"),
        ("specinfer", {"tree": "2x1"}, "specinfer drafts drawn nodes"),
        ("prompt_lookup", {}, "prompt_lookup drafts a chain"),
        ("pass", {"tree": "dynamic", "nodes": 2, "depth": 2, "calls": 1}, "give calls=2"),
    ],
)
def test_refused(method, keys, what):
    target, draft, _ = cases.models()
    own = {"draft_model": {"model": draft}, "specinfer": {"models": (draft, draft)}}.get(method, {})
    with pytest.raises(UserError, match=what):
        drafters.make(method, target, control="budget", **keys, **own)


@pytest.mark.fast
def test_profiles_have_a_unit(tmp_path):
    """Times by draft length are no times by tree size, and the reverse; sizes are interpolated."""
    kind = costs.RoundCosts((1.0, 1.25, 1.5), (0.7,) * 5)
    measured = {2: costs.Costs((0, 1, 5), kind, kind)}
    for unit, right, wrong in (("levels", "goodput", "budget"), ("nodes", "budget", "goodput")):
        path = tmp_path / f"{unit}.json"
        own = costs.Profile(costs.device(), "target", "drafter", measured, unit)
        path.write_text(json.dumps(own.to_json()))
        loaded = control.parse(f"{right}:profile={path}")
        assert loaded.check_rows is not None
        with pytest.raises(UserError, match="needs them by"):
            control.parse(f"{wrong}:profile={path}")
    assert control.parse(f"budget:profile={tmp_path}/nodes.json").sizes(9) == (0, 1, 3, 5)


@pytest.mark.fast
def test_sizes():
    assert costs.sizes(1) == (0, 1) and costs.sizes(2) == (0, 1, 2)
    assert costs.sizes(32) == (0, 1, 3, 7, 15, 32) and costs.sizes(60) == (0, 1, 3, 7, 15, 31, 60)
