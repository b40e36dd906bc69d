"""Multi-token prediction modules against a plain reference, round by round; training; mutants."""

from __future__ import annotations

import functools

import cases
import eagle_cases as shared
import growth_cases
import jax
import jax.numpy as jnp
import mtp_reference as reference
import numpy as np
import pytest
from eagle_cases import TABLE, TARGET
from internals import heads_rollout as _rollout
from mutants.modules import MISTAKES

from specjax import drafters, testing
from specjax.errors import UserError
from specjax.testing.claims import widen
from specjax.types import Batch, ModelParams

pytestmark = pytest.mark.xdist_group("mtp")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "mtp_module": (
        "mtp_module",
        {"modules": 2, "tree": "2x1", "siblings": "without_replacement"},
        ("recursive",),
    ),
    "mtp_module chain": (
        "mtp_module",
        {"gamma": 2, "siblings": "iid", "hidden": "raw", "control": "threshold:0.4"},
        (),
    ),
    "mtp_module dynamic": (
        "mtp_module",
        {"modules": 2, "tree": "dynamic", "nodes": 5, "depth": 2, "top_k": 2},
        (),
    ),
}
ODD = {"hidden_first": True, "hidden": "raw", "recycled": "raw", "zero_first": True}
MODULES = {
    "one": {},
    "one, all switches": {**ODD, "kv_heads": 1, "head_dim": 8, "qk_norm": True},
    "two": {"modules": 2, "hidden": "raw"},
    "three": {"modules": 3, **ODD},
}
GROWTHS = {
    "dynamic": {"tree": "dynamic", "nodes": 8, "depth": 3, "top_k": 3},
    "tree": {"tree": "2x2x1", "siblings": "without_replacement"},
    "chain": {"gamma": 3, "siblings": "iid"},
}
DEFAULT = {("three", "tree")}
EVERY = [
    pytest.param(*each, marks=[] if each in DEFAULT else [pytest.mark.slow], id=", ".join(each))
    for each in ((label, growth) for label in MODULES for growth in GROWTHS)
]


@functools.cache
def made(label, growth):
    keys = MODULES[label] | GROWTHS[growth]
    drafter = cases.random_heads("mtp_module", TARGET, TABLE, scale=0.25, **keys)
    return drafter, ModelParams(TABLE, drafter.init_params(None))


def plain_of(drafter, params) -> reference.Modules:
    facts = dict(drafter.training.facts)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params.draft)
    with jax.default_matmul_precision("highest"):
        ends = (
            TARGET.embed(params.target, jnp.arange(shared.VOCAB)),
            TARGET.unembed(params.target, jnp.eye(TARGET.width)),
        )
    return reference.Modules(
        wide,
        facts["head_dim"],
        *(np.asarray(each, np.float64) for each in ends),
        *(facts[key] for key in ("hidden_first", "recycled", "zero_first")),
    )


def features_of(drafter, text):
    """[n-1,D]: the target's hidden states of a text but its last token, as they are read."""
    padded = np.zeros((1, shared.SIZE), np.int32)
    padded[0, : len(text)] = text
    hidden, taps = shared._forward(drafter.tapped(TARGET), TABLE, padded)
    return np.asarray(taps[0] if taps else hidden, np.float64)[0, : len(text) - 1]


@pytest.mark.parametrize(("label", "growth"), EVERY)
def test_rounds_follow_the_reference(label, growth):
    """Ragged rows, greedy and sampled, that end at EOS and at limits.

    In every round all logits along a path are those after a fresh prefill on the committed text,
    and those of the plain reference. A text must have as many tokens as there are modules, and two.
    """
    drafter, params = made(label, growth)
    net, random = plain_of(drafter, params), np.random.default_rng(0)
    least = max(2, len(net.params["modules"]))
    partial = seen = 0
    for number, (state, info, fresh) in enumerate(shared.rounds(drafter, growth, params)):
        path = random.integers(0, shared.VOCAB, (len(shared.PROMPTS), shared.DEPTH))
        ours, right = (shared.look(drafter, params, each, path) for each in (state, fresh))
        for row in np.flatnonzero(~np.asarray(state.done)):
            text = np.asarray(state.tokens)[row, : int(state.length[row])].tolist()
            assert bool(ours.ready[row]) == bool(right.ready[row]) == (len(text) >= least)
            if len(text) < least:
                continue
            seen += 1
            partial += 0 < int(info.accepted[row]) < drafter.longest
            np.testing.assert_allclose(ours.logits[row], right.logits[row], atol=1e-4, rtol=1e-4)
            lengths = [int(own.cache.length[row]) for own in (ours.kept, *ours.kept.more)]
            assert lengths == [len(text) - 1 - k for k in range(len(lengths))]
            # The reference is slow: every row in every third round.
            for depth in range(shared.DEPTH + 1) if number % 3 == 0 else ():
                own = reference.after(net, text, features_of(drafter, text), path[row, :depth])
                np.testing.assert_allclose(ours.logits[row, depth], own, atol=1e-4, rtol=1e-4)
    assert seen >= 12 and partial >= 1, (seen, partial)


@pytest.mark.parametrize("label", ["three", *(x for x in MODULES if x != "three")])
def test_training_sees_real_drafts(label):
    """The columns along a text are what a drafter computes at every place of it."""
    drafter, params = made(label, "tree")
    net, network = plain_of(drafter, params), shared.network_of(drafter)
    tokens = np.random.default_rng(3).integers(0, shared.VOCAB, (2, 9))
    model = drafter.tapped(TARGET)

    @jax.jit
    def along(params):
        texts = _rollout.along(network, model, params, Batch(jnp.asarray(tokens)), 5)
        return [(labels, logits) for labels, logits, _ in texts]

    result = along(params)
    if label == "three":
        ranks = jax.jit(drafter.training.ranks)(params, Batch(jnp.asarray(tokens)))
        assert (ranks[:, :2] == -1).all() and (ranks[:, 2:, 0] >= 0).all()
    for row, text in enumerate(tokens.tolist()):
        for t, depth in ((0, 0), (1, 1), (2, 2), (3, 4), (1, 4), (0, 3)):
            head, path = text[: t + 2], text[t + 2 : t + 2 + depth]
            own = reference.after(net, head, features_of(drafter, head), path)
            labels, logits = result[depth]
            np.testing.assert_allclose(logits[row, t], own, atol=1e-4, rtol=1e-4)
            if t + 2 + depth < len(text):
                assert labels[row, t] == text[t + 2 + depth]


def largest_difference(change) -> float:
    """Of the logits along a path, after the rounds of a changed drafter and a fresh prefill."""
    drafter, params = made("three", "tree")
    wrong = change(drafter)._replace(name=drafter.name)
    path, worst = np.zeros((len(shared.PROMPTS), shared.DEPTH), int), 0.0
    for state, _, fresh in shared.rounds(wrong, "tree", params, most=5):
        ours = shared.look(wrong, params, state, path)
        right = shared.look(drafter, params, fresh, path)
        alive = ~np.asarray(state.done) & np.asarray(right.ready)
        error = np.abs(np.subtract(ours.logits, right.logits)).max((1, 2))
        worst = max(worst, float(error[alive].max(initial=0)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MISTAKES, ids=lambda each: each.name)
def test_mutants_are_detected(mutant):
    assert largest_difference(lambda drafter: drafter) < 1e-4
    assert largest_difference(mutant.change) > 1e-2


LAWS = {
    "two modules": ({"modules": 2, "tree": "2x1", "siblings": "without_replacement"}, "traversal"),
    "recycled": ({"gamma": 2, "siblings": "iid", "control": "threshold:0.4"}, "block"),
    "dynamic": ({"tree": "dynamic", "nodes": 4, "depth": 2, "top_k": 2}, "deterministic"),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", LAWS)
def test_exact_law(label):
    """Enumerated in float64."""
    keys, rule = LAWS[label]
    with jax.enable_x64(True):
        table, target = cases.table(0), testing.tabular(3)
        drafter = cases.random_heads("mtp_module", target, table, **keys)
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}):
            error = growth_cases.law_error(drafter, rule, target, params, **settings)
            assert error < growth_cases.EXACT


@pytest.mark.fast
def test_keys():
    drafter = drafters.make("mtp_module", TARGET)
    assert (drafter.nodes, drafter.siblings, drafter.taps) == (3, "chain", ())
    assert drafters.make("mtp_module", TARGET, modules=5).nodes == 5
    assert drafters.make("mtp_module", TARGET, hidden="raw").taps == (2,)
    with pytest.raises(UserError, match="mtp_module has no parameters yet; give model="):
        drafter.init_params(None)

    def refused(match, target=TARGET, **keys):
        with pytest.raises(UserError, match=match) as caught:
            drafters.make("mtp_module", target, **keys)
        assert "\n" not in str(caught.value), caught.value

    refused("modules is -1; it must be a whole number >= 0", modules=-1)
    refused("hidden is 'final'; it must be one of normed, raw", hidden="final")
    refused("recycled is 'final'; it must be one of normed, raw", recycled="final")
    refused("zero_first is 1; it must be True or False", zero_first=1)
    refused("does not take the key 'shift'", shift=0)
    refused("does not take the key 'layers'", layers=2)
    refused("was given gamma=2, a chain, and nodes=4", gamma=2, nodes=4)
    refused("nodes is 9, and", nodes=9, tree="dynamic", depth=1, top_k=2)
    refused("reads the features of its target, and lm has none", TARGET._replace(embed=None))
    refused(
        "reads hidden states of layers of its target, and lm gives none",
        TARGET._replace(tapping=None, layers=None),
        hidden="raw",
    )
    params = made("two", "tree")[0].init_params(None)
    refused("modules is 3, and the given mtp_module has 2; leave it out", params=params, modules=3)
    foreign = "the parameters are not those of mtp_module"
    for wrong in ({}, [], {"modules": {"1": {}}}, {"modules": {"0": {}}}):
        refused(foreign, params=wrong)
    refused(foreign, params=params | {"more": np.zeros(3)})
    refused("qk_norm is True, and the given mtp_module has False", params=params, qk_norm=True)
    wider = testing.tiny(layers=3, width=32, vocab_size=shared.VOCAB)[0]
    refused("on this target it must be .*; use heads made for this target", wider, params=params)
    leaf = {"kernel": np.zeros((16, shared.VOCAB + 1), np.float32)}
    refused("head.kernel of the mtp_module heads is", params=params | {"head": leaf})
