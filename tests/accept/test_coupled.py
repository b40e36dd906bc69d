"""Coupled drafts: one text whatever drafts, the law of the draws, how often both agree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax as sj
from specjax import accept, drafters, rng, testing
from specjax.rng import RowKeys, row_keys

pytestmark = pytest.mark.fast
VOCAB = 8
SETTINGS = {"temperature": [1.0, 0.7, 0.0, 1.3, 1.0, 0.0], "top_k": [0, 3, 0, 0, 5, 0]}
COUPLED = {"siblings": "coupled"}
DRAFTS = {
    "no draft": {"name": "none"},
    "chain": {"name": "draft_model", "gamma": 3, **COUPLED},
    "another length, stopped": {"gamma": 4, "control": "threshold:0.3", **COUPLED},
    "tree": {"name": "draft_tree", "tree": "2x1x2", **COUPLED},
    "not coupled": {"name": "draft_model", "gamma": 2},
    "lookup": {"name": "prompt_lookup", "gamma": 3},
}


@functools.cache
def texts(label, rule, eos=None):
    """The texts of six ragged rows, and the share of draft tokens that were accepted."""
    target, draft = testing.tabular(VOCAB), testing.tabular(VOCAB, "draft")
    keys = {"name": "draft_model"} | DRAFTS[label]
    model = {} if keys["name"] in ("none", "prompt_lookup") else {"model": draft}
    drafter = drafters.make(target=target, **model, **keys)
    prompts, lengths = sj.pack_prompts([[1, 2], [3], [4, 5, 6], [2], [7, 1], [5]])
    params = sj.ModelParams(testing.random_table(0, VOCAB), testing.random_table(1, VOCAB))
    if not model:
        params = params._replace(draft=drafter.init_params(jax.random.key(0)))
    how = sj.make_sampling(6, **SETTINGS)
    room = {"max_len": 40, "sampling": how}
    state = sj.prefill(target, drafter, params, prompts, lengths, row_keys(3, rows=6), **room)
    state, records = sj.generate(target, drafter, rule, params, state, max_steps=40, eos_id=eos)
    return [list(map(int, each)) for each in sj.outputs(state, lengths)], records


@pytest.mark.parametrize(
    ("label", "streams"),
    [*((label, 1) for label in DRAFTS if label != "no draft"), ("tree", 2), ("lookup", 2)],
)
def test_the_text_depends_on_no_drafter(label, streams):
    """Chains, trees, lookups and other draws: bit for bit the text without drafts."""
    rule = rule_of(streams)
    assert texts(label, rule)[0] == texts("no draft", rule)[0]


def test_it_ends_at_the_same_token():
    """A limit is the same for all; so is an end of the text, in the middle of a draft too."""
    rule = rule_of(1)
    plain, drafted = (texts(label, rule, eos=3)[0] for label in ("no draft", "chain"))
    assert drafted == plain and any(each[-1] == 3 for each in plain)
    assert texts("no draft", rule)[0] != texts("no draft", rule_of(2))[0]


@functools.cache
def rule_of(streams):
    return accept.load("coupled", streams=streams)


def test_the_law_of_a_draw():
    """Any number of streams: the frequencies are the weights, and a stream is independent."""
    rows, weights = 40_000, np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    probs = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), (rows, 5))
    keys = RowKeys(row_keys(0, rows=rows), jnp.zeros((), jnp.int32), jnp.arange(rows) % 7)

    @functools.partial(jax.jit, static_argnums=0)
    def drawn(streams, depth):
        return keys.draw_coupled(depth, probs, streams)

    for streams in (1, 3):
        counts = np.bincount(np.asarray(drawn(streams, 2)), minlength=5)
        assert counts[1] == 0
        expected = rows * weights[weights > 0]
        chi2 = ((counts[weights > 0] - expected) ** 2 / expected).sum()
        assert chi2 < 25, (streams, counts)  # three degrees of freedom
    # Another depth is other noise.
    same = (np.asarray(drawn(1, 2)) == np.asarray(drawn(1, 3))).mean()
    assert same == pytest.approx((weights**2).sum(), abs=0.02)


def test_how_often_both_choose_the_same_token():
    """At least (1 - d) / (1 + d) with one stream; more with more of them, whose list is longer."""
    rows, random = 20_000, np.random.default_rng(0)
    target, draft = (random.dirichlet(np.ones(6)) for _ in range(2))
    keys = RowKeys(row_keys(1, rows=rows), jnp.zeros((), jnp.int32), jnp.zeros(rows, jnp.int32))
    p, q = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), (rows, 6)) for x in (target, draft))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def found(streams, shift):
        guess = keys.guess_coupled(0, jnp.stack([q] * streams, 1), np.arange(streams) + shift)
        return (guess == keys.draw_coupled(0, p, streams)[:, None]).any(1).mean()

    distance = np.abs(target - draft).sum() / 2
    one = float(found(1, 0))
    # What a drafter with the noise of another stream has: the mistake that only costs tokens.
    alone = float(found(1, 5))
    assert alone == pytest.approx((target * draft).sum(), abs=0.02)
    assert one > (1 - distance) / (1 + distance) - 0.01 and one > alone + 0.1
    assert one < 1 - distance + 0.01
    assert float(found(3, 0)) > one + 0.05


def test_coupled_drafts_are_accepted_in_the_loop():
    """The share of tested draft tokens of sampled rows, beside draws with other noise."""
    sampled, share = np.array(SETTINGS["temperature"]) > 0, {}
    for label in ("chain", "not coupled"):
        records = texts(label, rule_of(1))[1]
        accepted, tested = (
            np.asarray(x)[:, sampled].sum() for x in (records.accepted, records.tested)
        )
        share[label] = accepted / tested
    assert share["chain"] > 2 * share["not coupled"]


def test_only_its_own_rule_takes_coupled_drafts():
    takes = {name for name in accept.names() if "coupled" in accept.load(name).siblings}
    assert takes == {"coupled"}


def _sum_of_streams(self, depth, weights, streams, active=None):
    noise = self._gumbel(
        jnp.reshape(depth, (1,)), jnp.arange(streams), weights.shape[-1], jnp.float32
    )
    return rng._race(weights, noise.sum(1))


def _by_round(self, depth, weights, streams, active=None):
    later = self.replace(base=rng._fold(self.base, jnp.broadcast_to(self.round, (6,)), 7))
    return DRAW(later, depth, weights, streams, active)


def _one_late(self, depth, weights, streams):
    return GUESS(self, depth + 1, weights, streams)


DRAW, GUESS = RowKeys.draw_coupled, RowKeys.guess_coupled
MISTAKES = {
    "the sum of the streams": ("draw_coupled", _sum_of_streams, test_the_law_of_a_draw),
    "noise of the round": (
        "draw_coupled",
        _by_round,
        lambda: test_the_text_depends_on_no_drafter("chain", 1),
    ),
    "a guess one position late": (
        "guess_coupled",
        _one_late,
        test_coupled_drafts_are_accepted_in_the_loop,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, monkeypatch):
    name, wrong, check = MISTAKES[mistake]
    monkeypatch.setattr(RowKeys, name, wrong)
    for cached in (texts, rule_of):
        cached.cache_clear()
    jax.clear_caches()
    with pytest.raises(AssertionError):
        check()
    for cached in (texts, rule_of):
        cached.cache_clear()
    jax.clear_caches()
