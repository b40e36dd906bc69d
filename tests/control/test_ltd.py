"""The controller ``ltd``: its decisions against NumPy, its fit, recorded rounds, laws, mistakes."""

from __future__ import annotations

import functools
import json
import pathlib
import types

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commandline import ROOT
from marks import by_default
from sized_cases import (
    DEPTH,
    KEYS,
    NODES,
    WIDTHS,
    ancestors_of,
    answer,
    check_texts,
    exist_of,
    made,
    random_tree,
    two_rounds,
    weights,
    written,
)

from specjax import accept, control, drafters, sampling, step, testing
from specjax.bench import profile
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Job, Method
from specjax.control import Ahead, costs, ltd
from specjax.errors import UserError
from specjax.run import bench
from specjax.testing import loop
from specjax.types import Context, Draft, ModelParams, Verdict

ROWS = 3


def paths_of(parents, valid, log_prob):
    """The log-probability of each node's path; -20 at least for each node, -inf: no such node."""
    exist, total = exist_of(parents, valid), []
    for node, above in enumerate(parents):
        own = max(log_prob[node], -20) + (total[above] if above >= 0 else 0)
        total.append(own if exist[node] else -np.inf)
    return total


def features(best, count, depth, length):
    best = [*best, *[-np.inf] * count][:count]
    return np.array([max(x, -20) / 10 for x in best] + [depth / 10, length / 1000], np.float32)


def play(folder):
    """``ltd`` beside NumPy: depths and nodes of random trees, in rounds of three rows.

    What is recorded for the fit are the values that are read.
    """
    text, known = written(folder, NODES)
    own, draw, lengths = control.parse(text), np.random.default_rng(1), np.array([3, 500, 2000])
    greedy = np.array([True, False, False])
    settings = sampling.make_sampling(ROWS, [0.0, 1.0, 1.0])
    context = Context(jnp.zeros((ROWS, 3), jnp.int32), jnp.asarray(lengths), settings)
    recorder = ltd.recorder(DEPTH, NODES)
    state, records = own.init(context), recorder.init(context)
    record = jax.jit(recorder.ask)
    record_nodes = jax.jit(functools.partial(control.sized, recorder))
    close = functools.partial(np.testing.assert_allclose, atol=1e-4)
    ask, sized = jax.jit(own.ask), jax.jit(functools.partial(control.sized, own))
    update, seen = jax.jit(own.update), set()
    for _ in range(12):
        for depth, places in ((0, 1), (1, 4), (3, 4)):
            logits = draw.normal(size=(ROWS, places, 7)) * 2
            above, valid = -draw.random((ROWS, places)) * 4, draw.random((ROWS, places)) > 0.2
            given = (jnp.asarray(x, jnp.float32) for x in (logits, above))
            ahead = Ahead(jnp.int32(depth), *given, jnp.asarray(valid), jnp.zeros(valid.shape))
            goes, state = ask(state, ahead)
            every, records = record(records, ahead)
            assert every.all()
            prob = logits - np.logaddexp.reduce(logits, -1, keepdims=True) + above[..., None]
            for row in range(ROWS):
                best = sorted(prob[row][valid[row]].ravel(), reverse=True)
                policy = known.greedy.policy if greedy[row] else known.sampled.policy
                values = features(best, ltd.CANDIDATES, depth, lengths[row])
                close(records.candidates[row, depth], values)
                assert goes[row] == (depth == 0 or answer(policy[0], values)[0] > 0)
                seen.add(bool(goes[row]))
        parents, valid = zip(*[random_tree(draw) for _ in range(ROWS)], strict=True)
        log_prob = np.log(draw.beta(0.8, 0.8, (ROWS, NODES)).clip(0.001, 0.999))
        tokens = jnp.broadcast_to(jnp.arange(NODES), (ROWS, NODES))
        draft = Draft(tokens, jnp.asarray(valid), jnp.asarray(parents), depth=DEPTH)
        small, order, state = sized(state, draft, jnp.asarray(log_prob, jnp.float32))
        whole, _, records = record_nodes(records, draft, jnp.asarray(log_prob, jnp.float32))
        assert np.asarray(whole.valid).sum(1).tolist() == np.sum(valid, 1).tolist()
        for row in range(ROWS):
            paths = paths_of(parents[row], valid[row], log_prob[row])
            ranked = sorted(range(NODES), key=lambda n, paths=paths: (-paths[n], n))
            best, exist = sorted(paths, reverse=True), np.isfinite(paths)
            chosen = [best[place] if place < NODES else -np.inf for place in ltd.PLACES]
            levels = np.array([len(list(ancestors_of(parents[row], n))) for n in range(NODES)])
            deepest = max(levels[exist], default=0)
            policy = known.greedy.policy if greedy[row] else known.sampled.policy
            values = features(chosen, len(ltd.PLACES), deepest, lengths[row])
            close(records.nodes[row], values)
            size = known.lengths[1 + int(answer(policy[1], values).argmax())]
            many = min(size, int(exist.sum()))
            assert np.asarray(order)[row, :many].tolist() == ranked[:many]
            assert np.asarray(small.valid)[row].sum() <= size
            assert np.asarray(small.valid)[row, :many].all()
            seen.add(size)
        counts = draw.integers(0, 3, ROWS)
        lengths = lengths + counts
        path = jnp.full((ROWS, DEPTH), -1)
        verdict = Verdict(jnp.zeros((ROWS, 5)), jnp.asarray(counts), path)
        state, records = update(state, small, verdict), recorder.update(records, whole, verdict)
        assert state.length.tolist() == lengths.tolist()
    return seen


@pytest.mark.fast
def test_decisions_are_those_of_the_networks(tmp_path):
    seen = play(tmp_path)
    assert seen >= {False, True} and len(seen) >= 4


def _other_row(right, *args):
    network, values = args
    return right(network, values[::-1])


def _one_more(right, known, state, *args):
    order, count, state = right(known, state, *args)
    return order, count + 1, state


def _same_length(right, state, draft, verdict):
    return right(state, draft, verdict.replace(count=verdict.count * 0))


def _sampled(right, known, state, *args):
    return right(known, state.replace(greedy=~state.greedy), *args)[0], state


def _accepted_alone(right, state, draft, verdict):
    """The bonus token is forgotten."""
    return right(state, draft, verdict.replace(count=(verdict.count - 1).clip(0)))


MISTAKES = {
    "answers of another row": ("apply", _other_row),
    "one node more": ("_size", _one_more),
    "the length stands still": ("_update", _same_length),
    "the policy of other rows": ("_ask", _sampled),
    "the bonus token is not counted": ("_update", _accepted_alone),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found(name, monkeypatch, tmp_path):
    place, wrong = MISTAKES[name]
    right = getattr(ltd, place)
    monkeypatch.setattr(ltd, place, lambda *args: wrong(right, *args))
    with pytest.raises(AssertionError):
        play(tmp_path)


# The fit.


def rounds_of(count=60, depth=3, sizes=2, seed=0):
    """Random rounds: acceptance follows the first candidate of each level."""
    draw = np.random.default_rng(seed)
    candidates = draw.normal(size=(count, depth, WIDTHS[0])).astype(np.float32)
    nodes = draw.normal(size=(count, depth, WIDTHS[1])).astype(np.float32)
    deep = (candidates[:, 1:, 0] > 0).cumprod(1)
    levels = np.concatenate([np.ones((count, 1)), deep], 1).cumsum(1)
    tokens = 1 + np.minimum(levels[..., None], 1 + 2 * np.arange(sizes))
    return ltd.Rounds(candidates, nodes, tokens.astype(np.float32))


@pytest.mark.fast
def test_expected_values_are_sums_over_all_actions():
    """Against every depth and size with its probability; the greedy choice of each round too."""
    rounds, draw = rounds_of(40), np.random.default_rng(3)
    policy = tuple(map(functools.partial(weights, draw), WIDTHS, (1, 2)))
    times = draw.random((3, 2)) + 1
    tokens, spent = jax.jit(ltd.value)(policy, rounds, times)
    levels, sizes = ltd.chosen(policy, rounds)
    for m in range(40):
        logits = answer(policy[0], rounds.candidates[m])[:, 0]
        goes, total = 1 / (1 + np.exp(-logits)), np.zeros(2)
        for d in range(3):
            ends = np.prod(goes[1 : d + 1]) * (1 - goes[d + 1] if d < 2 else 1)
            scores = answer(policy[1], rounds.nodes[m, d])
            share = np.exp(scores - np.logaddexp.reduce(scores))
            for s in range(2):
                total += ends * share[s] * np.array([rounds.tokens[m, d, s], times[d, s]])
        np.testing.assert_allclose([tokens[m], spent[m]], total, rtol=1e-4)
        level = 1 if goes[1] <= 0.5 else 2 if goes[2] <= 0.5 else 3
        assert levels[m] == level
        assert sizes[m] == answer(policy[1], rounds.nodes[m, level - 1]).argmax()


def _never_ends_early(right, policy, rounds, times):
    """The chance to go on from one level is taken for that of the next one."""
    return right(policy, rounds._replace(candidates=np.roll(rounds.candidates, 1, 1)), times)


def _free(right, policy, rounds, times):
    tokens, spent = right(policy, rounds, times)
    return tokens, jnp.ones_like(spent)


def check_fit():
    """Where levels are accepted is known from the candidates: the fit is near the best policy."""
    rounds, times = rounds_of(900), 2 + np.array([[0.4], [0.8], [1.2]]) + np.array([0, 0.2])
    policy = ltd.fit(rounds, times)
    test = rounds_of(400, seed=1)
    fixed = (test.tokens.sum(0) / (len(test.tokens) * times)).max()
    # The rate of the policy that knows what is accepted, by Dinkelbach's iteration.
    best = 1.0
    for _ in range(20):
        flat = (test.tokens - best * times).reshape(len(test.tokens), -1).argmax(1)
        at = np.arange(len(flat)), flat // 2, flat % 2
        best = test.tokens[at].sum() / times[at[1:]].sum()
    found = ltd.rate(policy, test, times)
    assert fixed < 0.9 * best and found > 0.94 * best


@pytest.mark.fast
def test_the_fit_finds_what_pays():
    check_fit()


@pytest.mark.fast
def test_rounds_that_are_held_out_choose(monkeypatch):
    """The steps see the first four fifths; of the policies the best one in the others is taken."""
    monkeypatch.setattr(ltd, "STEPS", 1)
    monkeypatch.setattr(ltd, "LOOKS", 3)
    rounds, times = rounds_of(21), 1 + np.array([[0.4, 0.6], [0.8, 1.0], [1.2, 1.4]])
    # Other fixed trees are the best ones in the two parts.
    rounds.tokens[:17, 2, 1] += 5
    rounds.tokens[17:] += [[9, 0], [0, 0], [0, 1]]
    stepped, policies, value = [], [], ltd.value
    monkeypatch.setattr(ltd, "value", lambda *args: stepped.append(args[1]) or value(*args))

    def rate(policy, *args):
        policies.append((policy, *args))
        return [1.0, 3.0, 2.0][len(policies) - 1]

    monkeypatch.setattr(ltd, "rate", rate)
    messages = []
    found = ltd.fit(rounds, times, messages.append)
    assert found is policies[1][0]
    for seen, part in ((stepped[0], slice(17)), (policies[0][1], slice(17, 21))):
        assert all((x == y[part]).all() for x, y in zip(seen, rounds, strict=True))
    level, size = divmod(int((rounds.tokens[:17].mean(0) / times).argmax()), 2)
    fixed = rounds.tokens[17:, level, size].mean() / times[level, size]
    assert messages[0].endswith(f"the best fixed tree, {level + 1} levels: {fixed:.2f}")
    assert messages[0].startswith("ltd: 3.00 tokens")


@pytest.mark.fast
def test_the_fit_is_for_the_speed_of_a_text(monkeypatch):
    """Half of the rounds get 1 token in any case; a round of the others gets 2, or 5.8 in 3 times
    the time: less for this round alone, and more for the text."""
    monkeypatch.setattr(ltd, "LOOKS", 4)
    rounds = rounds_of(300, 2, 1)
    good = rounds.candidates[:, 1, 0] > 0
    rounds.tokens[:, :, 0] = np.where(good[:, None], [2, 5.8], 1)
    times = np.array([[1.0], [3.0]])
    levels, _ = ltd.chosen(ltd.fit(rounds, times), rounds)
    assert (levels == 1 + good).mean() > 0.95


@pytest.mark.parametrize("wrong", [_never_ends_early, _free])
def test_mistakes_of_the_fit_are_found(wrong, monkeypatch):
    monkeypatch.setattr(ltd, "value", functools.partial(wrong, ltd.value))
    with pytest.raises(AssertionError):
        check_fit()


# Recorded rounds of the compiled loop.

MODEL, TABLE = testing.tabular(6), testing.random_table(0, 6, 3.0)
NEAR = testing.random_table(0, 6, 2.0)
TREE = {"tree": "dynamic", "nodes": 6, "depth": 3, "top_k": 2}


def job(temperature=0.0):
    prompts = [[1, 2, 3, 1], [4, 5, 0], [2, 2], [5]]
    return Job(MODEL, TABLE, prompts, {"temperature": temperature}, 2, 20, (), 0, 1)


def maker(text):
    drafter = drafters.make("draft_model", MODEL, model=MODEL, params=NEAR, control=text, **TREE)
    params = ModelParams(TABLE, drafter.init_params(jax.random.key(0)))
    return Method("tree", drafter, accept.load("deterministic"), params)


def test_recorded_rounds_are_those_of_the_loop(monkeypatch):
    """What each depth and size would bring, against rounds with this depth and size.

    One row is greedy, and one is sampled; the last batch has one row that is finished.
    """
    one, before, real = job([0.0, 1.0]), [], profile._generate
    one = one._replace(prompts=one.prompts[:3])

    def generate(job, method, state, rounds):
        before.append(jax.tree.map(jnp.copy, state))
        return real(job, method, state, rounds)

    monkeypatch.setattr(profile, "_generate", generate)
    monkeypatch.setattr(profile, "POLICY_ROUNDS", 12)
    sizes = costs.sizes(6)[1:]
    found = profile._rounds(one, maker(ltd.recorder(3, 6)), sizes)
    monkeypatch.setattr(profile, "_generate", real)
    assert found.candidates.shape[1:] == (3, WIDTHS[0]) and found.nodes.shape[1:] == (3, WIDTHS[1])
    assert found.tokens.shape[1:] == (3, len(sizes)) and len(found.tokens) > 8
    method = maker(profile._forced(6, True))
    row = 0
    for start in before[::3]:
        state = begun(start)
        counts = np.zeros((3, len(sizes), 2), int)
        for d, s in np.ndindex(3, len(sizes)):
            draft = profile._changed(state.draft, profile.Forced, "deepest", d + 1)
            own = state.replace(draft=profile.with_length(draft, sizes[s]))
            after, _ = real(one, method, jax.tree.map(jnp.copy, own), 1)
            counts[d, s] = np.asarray(after.length - state.length)
        live = counts.any((0, 1))
        for each in np.flatnonzero(live):
            # The last round of a text ends at its limit.
            left = int(state.limit[each] - state.length[each])
            expected = np.minimum(found.tokens[row], left)
            assert counts[..., each].tolist() == expected.tolist()
            # What the policies read is of this round, and in the order of the levels.
            read = found.candidates[row, :, -2:], found.nodes[row, :, -2:] - np.array([0.1, 0])
            depths, length = np.arange(3) / 10, np.full(3, state.length[each] / 1000)
            for values in read:
                np.testing.assert_allclose(values, np.stack([depths, length], 1), atol=1e-6)
            row += 1
    assert row == len(found.tokens)
    assert len(np.unique(found.tokens)) > 2


def begun(like):
    """The state with the controller of forced depths and sizes."""
    fresh = profile._forced(6, True).init(step.context_of(like))

    def change(x):
        return fresh if isinstance(x, ltd.Recorded) else x

    draft = jax.tree.map(change, like.draft, is_leaf=lambda x: isinstance(x, ltd.Recorded))
    return like.replace(draft=draft)


def test_a_profile_has_the_policies(monkeypatch, tmp_path):
    """Measured, written, read, and used; its times are those of levels and nodes."""
    monkeypatch.setattr(profile, "POLICY_ROUNDS", 24)
    timed, seen = [], []

    def seconds(job, cells):
        timed.append(cells)
        return {cell: 1.0 + 0.2 * cell for cell in cells}

    monkeypatch.setattr(profile, "_seconds", seconds)
    right = ltd.fit
    monkeypatch.setattr(
        ltd, "fit", lambda rounds, times, say: seen.append(times) or right(rounds, times)
    )
    how = {"names": ("m", "d"), "nodes": True, "policies": True}
    found = profile.measure([job()], maker, lambda message: None, **how)
    # One node more costs 0.2, and one level more 0.2; all levels were there when nodes were timed.
    np.testing.assert_allclose(seen[0], 1.2 + 0.2 * (np.arange(3)[:, None] + np.array([0, 2, 5])))
    # Of the trees of so many levels one node is verified.
    for level, (_, state, nodes) in timed[1].items():
        leaves = jax.tree.leaves(state.draft, is_leaf=lambda x: isinstance(x, profile.Forced))
        [forced] = [x for x in leaves if isinstance(x, profile.Forced)]
        assert (forced.deepest == level).all() and nodes == min(level, 1)
    assert list(timed[1]) == [0, 1, 2, 3]
    path = tmp_path / "ltd.json"
    path.write_text(json.dumps(found.to_json()))
    loaded = costs.read(path, costs.NODES).batches[2]
    for read, fitted in zip(loaded.greedy.policy, found.batches[2].greedy.policy, strict=True):
        assert all(
            (x == y).all() and x.dtype == np.float32 for x, y in zip(read, fitted, strict=True)
        )
    assert profile.by_nodes("ltd") and control.wants_policies("ltd")
    assert not control.wants_policies("budget") and not control.wants_policies(
        f"ltd:profile={path}"
    )
    assert control.parse(f"ltd:profile={path}").sizes(6) == (0, 1, 3, 6)


# Exact laws and texts.

TREES = {name: keys for name, keys in KEYS.items() if name not in ("trie", "token_recycling")}


@pytest.mark.xdist_group("enumeration")
@pytest.mark.parametrize("name", by_default(TREES, ("dynamic",)))
def test_two_rounds_have_the_law_of_the_target(name, tmp_path):
    nodes = made(name, *cases.models()[:2], cases.table(0), "").nodes
    found = two_rounds(name, written(tmp_path, nodes)[0])
    assert testing.total_variation(found.law, found.truth) < 1e-12 and found.drafted > 0


@pytest.mark.slow
def test_the_compiled_loop_at_temperature_one(tmp_path):
    """Counted over several rounds."""
    target, draft, _ = cases.models()
    params = ModelParams(cases.table(0), cases.table(1))
    drafter = made("dynamic", target, draft, params.target, written(tmp_path, 6)[0])
    given = target, drafter, accept.load("deterministic"), params
    fit = loop.loop_fit(*given, cases.REPEATED, 5, 60_000)
    assert fit.p_value > 1e-4 and fit.detectable < 0.025


@pytest.mark.parametrize("name", by_default(TREES, ("dynamic",)))
def test_greedy_texts_and_widths(name, tmp_path):
    nodes = made(name, *cases.models()[:2], cases.table(0), "").nodes
    found = check_texts(name, written(tmp_path, nodes, seed=2)[0])
    assert name != "dynamic" or (found[0][0] == {2, 4} and found[1][0] == {7})


@pytest.mark.fast
def test_refused(tmp_path):
    """Without policies, from Python and from a configuration; lookups; drawn trees."""
    target, draft, _ = cases.models()
    own = {"model": draft, "tree": "dynamic", "nodes": 6, "depth": 2, "top_k": 2}
    drafter = drafters.make("draft_model", target, control="ltd", **own)
    with pytest.raises(UserError, match="policies were not fitted; give ltd:profile=FILE: mode"):
        drafter.rare.check_rows(1)
    with pytest.raises(UserError, match="has no policies of ltd; measure one anew"):
        control.parse(written(tmp_path, 6, policies=False)[0])
    text = written(tmp_path, 6)[0]
    for name, keys, what in (
        ("draft_model", {"model": draft, "tree": "2x2"}, "drafts drawn nodes"),
        ("draft_model", {"model": draft, "gamma": 3}, "drafts a chain"),
        ("draft_model", own | {"nodes": 5}, "fitted to trees of 6 nodes, and draft_model drafts 5"),
        ("trie", {}, "reads the probabilities of a draft as it grows, and trie has none"),
    ):
        with pytest.raises(UserError, match=what):
            drafters.make(name, target, control=text, **keys)
    drafters.make("draft_model", target, control=text, **own)


def _changed(network, array, change):
    def changed(policy):
        policy[network][array] = change(policy[network][array])

    return changed


@pytest.mark.fast
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed(0, 1, lambda x: [float("nan"), *x[1:]]), "weights of policies must be finite"),
        (_changed(1, 3, lambda x: [1e300, *x[1:]]), "weights of policies must be finite"),
        (_changed(0, 0, lambda x: x[1:]), "other shapes; measure one anew"),
        (_changed(0, 1, lambda x: [*x, 0.0]), "other shapes"),
        (_changed(1, 3, lambda x: x[1:]), "other shapes"),
        (lambda policy: policy.reverse(), "other shapes"),
        (lambda policy: policy.pop(), "other shapes"),
        (lambda policy: policy[1].pop(), "other shapes"),
    ],
)
def test_wrong_policies_are_refused(change, message, tmp_path):
    text, _ = written(tmp_path, 6)
    path = pathlib.Path(text.partition("=")[2])
    profile_of = json.loads(path.read_text())
    # Those of one kind of rows alone, in the last batch size.
    change(profile_of["batches"]["8"]["sampled"]["policy"])
    path.write_text(json.dumps(profile_of))
    with pytest.raises(UserError, match=message) as error:
        control.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.fast
def test_a_file_of_policies_is_no_reason_to_fit(monkeypatch):
    """In mode bench, beside a controller whose profile is measured with the same drafter."""
    seen, target = [], types.SimpleNamespace(directory="x")
    monkeypatch.setattr(bench, "_jobs", lambda cells: ([job()], True))
    empty = costs.Profile("", "", "", {})
    monkeypatch.setattr(profile, "measure", lambda *_, **how: seen.append(how) or empty)
    for texts, fits in ((("goodput", "ltd:profile=FILE"), False), (("budget", "ltd"), True)):
        chosen = {
            text: MethodChoice({"name": "draft_model", "control": text, **TREE}, "", {})
            for text in texts
        }
        bench._measured(types.SimpleNamespace(methods=chosen), target, [], texts[0], print)
        assert seen.pop()["policies"] == fits


def test_a_bench_without_other_prompts_is_refused(cli):
    config = f"--config={ROOT}/configs/controllers.py:dynamic_tree,{ROOT}/assets,ltd"
    status, _, err, workdir = cli(config, "--config.warm_prompts=0")
    assert status == 2 and "the controller 'ltd' is fitted to prompts that are not measured" in err
    assert len(err.splitlines()) == 1 and not workdir.exists()


@pytest.mark.fast
def test_too_few_rounds():
    with pytest.raises(UserError, match="there are 19; at least 20 are needed: give more warm"):
        ltd.fit(rounds_of(19), np.ones((3, 2)))
