"""Every shape of a draft with one draft model: output law, state, controllers, errors."""

from __future__ import annotations

import functools
import itertools

import cases
import growth_cases as shared
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
from internals import setup_of
from marks import by_default

from specjax import accept, decode, drafters, rng, step, testing
from specjax import tree as tree_lib
from specjax.control import Controller
from specjax.errors import UserError
from specjax.testing import loop
from specjax.types import CHAIN, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "chain": (
        "draft_model",
        {"model": "@draft", "gamma": 2},
        ("chain", "lenient", "rollback", "tolerance", "typical"),
    ),
    "iid": ("draft_tree", {"model": "@draft", "tree": "2x1", "siblings": "iid"}, ("k_seq", "gbv")),
    "without_replacement": (
        "draft_tree",
        {"model": "@draft", "tree": "2x1", "siblings": "without_replacement"},
        ("traversal",),
    ),
    "deterministic": (
        "draft_tree",
        {"model": "@draft", "tree": "2x1", "siblings": "top_k"},
        ("match",),
    ),
    "coupled": (
        "draft_tree",
        {"model": "@draft", "tree": "2x1", "siblings": "coupled"},
        ("coupled",),
    ),
}

TARGET, DRAFT, _ = cases.models(3)
# These run by default; the others are slow.
QUICK = ("chain, iid", "dynamic")


def made(label, control="", **more):
    keys, rule = shared.SHAPES[label]
    return drafters.make("draft_model", TARGET, model=DRAFT, control=control, **keys, **more), rule


def shapes(quick=QUICK):
    for label in shared.SHAPES:
        yield pytest.param(label, marks=[] if label in quick else [pytest.mark.slow])


def law_error(drafter, rule):
    with jax.enable_x64(True):
        return shared.law_error(drafter, rule, TARGET, tables())


def tables():
    return ModelParams(cases.table(0), cases.table(1))


@pytest.mark.parametrize("control", by_default(["", shared.CONTROL], [shared.CONTROL]))
@pytest.mark.parametrize("label", list(shapes(("dynamic, two levels",))))
def test_exact_law(label, control):
    """With a controller, in some rows and histories the draft stops after 0, 1, ... levels."""
    drafter, rule = made(label, control)
    assert law_error(drafter, rule) < shared.EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["recursive", "traversal", "match", "deterministic"])
@pytest.mark.parametrize("label", ["tree, iid", "tree, without replacement", "irregular, iid"])
def test_exact_law_of_all_rules_with_a_controller(label, rule):
    assert law_error(made(label, "threshold:0.5")[0], rule) < shared.EXACT


@pytest.mark.slow
def test_exact_law_of_block_verification_with_a_controller():
    assert law_error(made("chain, iid", shared.CONTROL)[0], "block") < shared.EXACT


def test_a_length_that_depends_on_the_drawn_token_changes_the_law():
    """The confidence threshold as it is often implemented: on the probability of the token."""

    def drop(draft, keys, context):
        own = jnp.take_along_axis(draft.probs, draft.tokens[..., None], -1)[..., 0]
        return draft.replace(valid=draft.valid & (own >= 0.4))

    drafter, rule = made("chain, iid")
    assert law_error(mutants.with_draft(drop)(drafter), rule) > 0.01


@functools.cache
def decoder():
    """A small decoder, and as the draft model the same one with noise."""
    target, params = testing.tiny("llama", 0, 20.0, vocab_size=12)
    return target, target._replace(name="draft"), ModelParams(params, shared.noisy_copy(params))


FOLLOWED = {
    "chain": {"gamma": 4},
    "chain, stopped": {"gamma": 5, "control": "threshold:0.5"},
    "tree, stopped": {"tree": "3x2x1", "siblings": "iid", "control": "threshold:0.5"},
    "dynamic, stopped": {
        "tree": "dynamic",
        "nodes": 20,
        "depth": 4,
        "top_k": 3,
        "control": "threshold:0.7",
    },
}


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=[] if label == "chain, stopped" else [pytest.mark.slow])
        for label in FOLLOWED
    ],
)
def test_state_follows_text(label):
    """Also after a draft that stopped: the next one is that of a new prefill of the text."""
    target, draft, params = decoder()
    drafter = drafters.make("draft_model", target, model=draft, **FOLLOWED[label])
    rule = "match" if drafter.siblings == CHAIN else "recursive"
    depths = set()
    for temperature in (0.0, 1.0):
        for each in shared.assert_state_follows_text(drafter, rule, target, params, temperature):
            valid = np.asarray(each.valid)
            depths |= set(valid.sum(-1).tolist())
            if drafter.siblings == CHAIN:
                assert (valid[:, 1:] <= valid[:, :-1]).all()  # it does not begin again
    if "stopped" in label:
        assert len(depths) > 2, depths


PASSES = [({"gamma": 4}, 4, 4), ({"tree": "2x1", "siblings": "iid"}, 2, 4)]


@pytest.mark.parametrize(("keys", "levels", "nodes"), by_default(PASSES, PASSES[:1]))
def test_a_stopped_draft_costs_no_pass(keys, levels, nodes):
    """The draft model runs for the pending token and then once for each further level."""
    passes = []

    def apply(*args):
        jax.debug.callback(lambda: passes.append(1))
        return DRAFT.apply(*args)

    packed, lengths = decode.pack_prompts([[1, 2], [2, 0]])
    for least, expected in (("1", 1), ("0", levels)):
        drafter = drafters.make(
            "draft_model",
            TARGET,
            model=DRAFT._replace(apply=apply),
            control=f"threshold:{least}",
            **keys,
        )
        state = decode.prefill(
            TARGET, drafter, tables(), packed, lengths, rng.row_keys(0, 2), max_len=12
        )
        rule = accept.load("match")
        jax.effects_barrier()
        passes.clear()
        state, info = next(decode.stream(TARGET, drafter, rule, tables(), state))
        jax.effects_barrier()
        assert len(passes) == expected
        assert info.drafted.tolist() == [0 if expected == 1 else nodes] * 2
        if expected == 1:
            assert state.length.tolist() == [3, 3]


def rising_and_falling() -> Controller:
    """Drafts one level more after a draft that was accepted as a whole, else one less.

    After the stop it would go on again, which must have no effect.
    """

    def ask(levels, ahead):
        again = (ahead.depth > levels + 1) | (ahead.depth < levels)
        return jnp.broadcast_to(again, levels.shape), levels

    def update(levels, draft, verdict):
        whole = verdict.count - 1 >= levels
        return jnp.where(whole, jnp.minimum(levels + 1, 4), jnp.maximum(levels - 1, 1))

    return Controller("rising", ask, lambda context: jnp.full(context.length.shape, 2), update)


@pytest.mark.parametrize("tree", by_default(["chain:4", "2x1x1x1", "dynamic"], ["dynamic"]))
def test_a_controller_has_a_state(tree):
    """Each row has its own, from round to round; a row that stopped does not draft again."""
    keys = {"nodes": 12, "depth": 4, "top_k": 2} if tree == "dynamic" else {"siblings": "top_k"}
    drafter = drafters.make(
        "draft_model", TARGET, model=DRAFT, tree=tree, control=rising_and_falling(), **keys
    )
    assert drafter.history
    rule, params = accept.load("match"), ModelParams(cases.table(0), cases.table(0))
    new = jnp.asarray([30, 30, 3, 30])
    state = loop.begin(TARGET, drafter, params, [[1, 2], [2, 0], [1], [0, 0, 1]], new, 0)
    levels, seen = np.full(4, 2), set()
    rounds = decode.stream(TARGET, drafter, rule, params, state)
    for after_round, info in itertools.islice(rounds, 8):
        alive = np.asarray(info.emitted) > 0
        parents = info.draft.parents
        depth = np.asarray(tree_lib.depths(parents, *info.draft.tokens.shape)) + 1
        drafted = (depth * np.asarray(info.draft.valid)).max(-1)
        np.testing.assert_array_equal(drafted[alive], levels[alive])
        if tree == "dynamic":
            # The best 12 of the candidates in the levels that exist: 2, and then 4 in each.
            count = np.asarray(info.draft.valid).sum(-1)
            np.testing.assert_array_equal(count[alive], np.minimum(4 * levels - 2, 12)[alive])
        whole = np.asarray(info.emitted) - 1 >= levels
        after = np.where(whole, np.minimum(levels + 1, 4), np.maximum(levels - 1, 1))
        levels = np.where(alive, after, levels)
        np.testing.assert_array_equal(after_round.draft.control, levels)
        done = after_round.done
        seen |= set(levels.tolist())
    assert len(seen) > 2 and bool(done[2])


def test_a_chain_is_one_loop():
    """The program of a longer chain has as many equations."""
    sizes = []
    for gamma in (3, 9):
        drafter = drafters.make("draft_model", TARGET, model=DRAFT, gamma=gamma)
        state = loop.begin(TARGET, drafter, tables(), [[1, 2]], 9, 0)

        def propose(state, drafter=drafter):
            keys = rng.RowKeys(state.keys, state.round, state.length)
            context = step.context_of(state)
            return drafter.propose(tables(), keys, context, state.draft)

        sizes.append(str(jax.make_jaxpr(propose)(state)).count("\n"))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_a_chain_is_the_same_in_the_loop_and_level_by_level():
    """The compiled loop, its form with a controller that never stops, and the growth of trees."""
    chain = drafters.make("draft_model", TARGET, model=DRAFT, gamma=3)
    endless = drafters.make("draft_model", TARGET, model=DRAFT, gamma=3, control="threshold:0")
    setup = setup_of(chain)
    levels = setup._replace(stepper=setup.stepper._replace(looped=False))
    drafts = []
    for propose in (chain.propose, endless.propose, functools.partial(chain.propose.func, levels)):
        state = loop.begin(TARGET, chain, tables(), [[1, 2], [0]], 9, 0)
        keys = rng.RowKeys(state.keys, state.round, state.length)
        drafts.append(propose(tables(), keys, step.context_of(state), state.draft)[0])
    for other in drafts[1:]:
        assert bool(other.valid.all()) and other.parents is None
        np.testing.assert_array_equal(drafts[0].tokens, other.tokens)
        np.testing.assert_allclose(drafts[0].probs, other.probs, atol=1e-6)


@pytest.mark.fast
def test_keys():
    make = functools.partial(drafters.make, "draft_model", TARGET, model=DRAFT)
    assert make().nodes == 5 and make(gamma=2).whole and make().siblings == CHAIN
    stopped = make(gamma=2, control="threshold:0.4")
    assert not stopped.whole and not stopped.constant_cost
    assert stopped.training.foresee is None and make().training.foresee is not None
    assert make(tree="dynamic").nodes == 32 and make(tree="dynamic", depth=1).nodes == 3
    assert drafters.make("draft_tree", TARGET, model=DRAFT, tree="chain:2").siblings == CHAIN
    refused = [
        ({"gamma": 2, "tree": "2x1"}, "gamma=2, a chain, and tree='2x1'; give one of them"),
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"top_k": 2}, "top_k is 2 and has no effect on a tree of a fixed shape; leave it out"),
        ({"tree": "2x1", "depth": 2}, "depth is 2 and has no effect on a tree of a fixed shape"),
        ({"nodes": 4}, "draft_model has no measured accuracies to search a tree of 4 nodes"),
        ({"tree": "2x1", "nodes": 4}, "was given a tree and nodes=4; give one of them"),
        ({"tree": "dynamic", "siblings": "iid"}, "siblings is 'iid' and has no effect on the tree"),
        ({"tree": "dynamic", "search": "greedy"}, "search is 'greedy' and has no effect"),
        ({"tree": "dynamic", "nodes": 13, "depth": 2, "top_k": 3}, "ask for at most 12 nodes"),
        ({"tree": "dynamic", "top_k": 4}, "top_k is 4 and the vocabulary has 3 tokens"),
        ({"tree": "best_first"}, "draft_model reads the tokens of its draft"),
        ({"tree": "dynamik"}, 'the tree is \'dynamik\'; give "dynamic", "beam", "best_first"'),
        ({"control": "treshold:0.4"}, "unknown controller 'treshold'; it must be one of"),
        ({"control": "threshold"}, "controller threshold needs the key 'least'"),
    ]
    for keys, message in refused:
        with pytest.raises(UserError, match=message):
            make(**keys)
