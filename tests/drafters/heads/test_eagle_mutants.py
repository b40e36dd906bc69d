"""Wrong drafters of a draft network are detected, and lower tau without changing the text."""

from __future__ import annotations

import cases
import eagle_cases as shared
import eagle_reference as reference
import jax
import numpy as np
import pytest
from mutants.networks import CLAIMS, MISTAKES, REFERENCE, ROUNDS

from specjax import accept, decode, rng, sampling, step
from specjax.testing import claims
from specjax.types import ModelParams

# Programs are shared with test_eagle.py.
pytestmark = pytest.mark.xdist_group("eagle")
# One of each kind by default.
QUICK = {"stale_features", "zeros_outside"}


def caught_by(test):
    chosen = [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.slow])
        for each in MISTAKES
        if each.caught_by == test
    ]
    return pytest.mark.parametrize("mutant", chosen)


def test_names_are_unique():
    names = [each.name for each in MISTAKES]
    assert len(set(names)) == len(names) >= 6


def largest_difference(drafter, params, run) -> float:
    """Of the logits along a path, after the rounds of ``run`` and after a fresh prefill."""
    path, worst = np.zeros((len(shared.PROMPTS), shared.DEPTH), int), 0.0
    for state, _, fresh in run:
        ours, right = (shared.look(drafter, params, each, path) for each in (state, fresh))
        alive = ~np.asarray(state.done) & np.asarray(right.ready)
        # -inf outside of the draft vocabulary, in both.
        pair = (np.nan_to_num(np.asarray(each.logits), neginf=0) for each in (ours, right))
        error = np.abs(np.subtract(*pair)).max((1, 2))
        worst = max(worst, float(error[alive].max(initial=0)))
    return worst


@caught_by(ROUNDS)
def test_a_fresh_prefill_detects(mutant):
    drafter, params = shared.made("eagle3, all switches")
    wrong = mutant.change(drafter)._replace(name=drafter.name)
    assert largest_difference(drafter, params, shared.rounds(wrong, "dynamic", params)) > 1e-2


def first_draft(drafter, params):
    """The first draft of a fresh prefill, at temperature 1."""
    packed, lengths = decode.pack_prompts(shared.PROMPTS, shared.SIZE)
    state = shared.prefilled(drafter, params, packed, lengths)
    keys = rng.RowKeys(state.keys, state.round, state.length, nodes=drafter.nodes)
    rows = sampling.make_sampling(len(shared.PROMPTS), 1.0)
    context = step.context_of(state).replace(sampling=rows)
    return jax.jit(drafter.propose)(params, keys, context, state.draft)[0]


@pytest.fixture(scope="module")
def references():
    return {}


def error_of_probs(label, draft, known) -> float:
    """Of the declared probs of the first sibling at each node, against the plain reference."""
    drafter, params = shared.made(label, "tree")
    net, row = shared.plain_of(drafter, params), 2
    text = shared.PROMPTS[row]
    features, worst = shared.features(drafter, net, text), 0.0
    parents, tokens = np.asarray(draft.parents)[row], np.asarray(draft.tokens)[row].tolist()
    paths = []
    for node, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, tokens[node]))
        if parent in parents[:node]:
            continue
        if (label, above) not in known:
            known[label, above] = np.exp(
                reference.log_softmax(reference.after(net, text, features, above))
            )
        error = np.abs(np.asarray(draft.probs)[row, node] - known[label, above]).max()
        worst = max(worst, float(error))
    return worst


@caught_by(REFERENCE)
def test_the_reference_detects(mutant, references):
    label = "eagle3, all switches" if mutant.name == "zeros_outside" else "eagle"
    drafter, params = shared.made(label, "tree")
    assert error_of_probs(label, first_draft(mutant.change(drafter), params), references) > 1e-3


@pytest.mark.parametrize(
    "label", ["eagle3, all switches", pytest.param("eagle", marks=pytest.mark.slow)]
)
def test_the_right_draft_is_the_reference(label, references):
    drafter, params = shared.made(label, "tree")
    draft = first_draft(drafter, params)
    assert error_of_probs(label, draft, references) < 1e-4
    ids = shared.network_of(drafter).ids
    if ids is not None:
        outside = np.setdiff1d(np.arange(shared.VOCAB), ids)
        assert (np.asarray(draft.probs)[..., outside] == 0).all()
        assert np.isin(np.asarray(draft.tokens)[np.asarray(draft.valid)], ids).all()


@pytest.mark.slow
@caught_by(CLAIMS)
def test_claims_detect(mutant):
    _, target, drafter, params = cases.case("eagle3 tree")
    settings = [{"temperature": 0.7, "top_p": 0.6}]
    for each, passed in ((drafter, True), (mutant.change(drafter), False)):
        finding = claims.drawn_as_declared(target, each, params, [cases.PROMPT], settings, ())
        assert finding.passed is passed, str(finding)


@pytest.mark.slow
def test_text_stays_and_tau_falls(stories):
    """On a trained target with a briefly trained network; the mutants that keep the law."""
    target, params = stories.lm, stories.params
    drafter = shared.trained("eagle", target, params, 400, tree="3x3x2", head_dim=8)
    params = ModelParams(params, drafter.init_params(None))
    tau, text = greedy_tau(target, drafter, params)
    assert tau > 1.5
    lower = {}
    for mutant in MISTAKES:
        if mutant.caught_by == CLAIMS or mutant.name == "zeros_outside":
            continue
        own_tau, own_text = greedy_tau(target, mutant.change(drafter), params)
        np.testing.assert_array_equal(own_text, text)
        lower[mutant.name] = tau - own_tau
    print(f"tau {tau:.3f}, less by {lower}")
    for mutant in MISTAKES:
        # What only the reference sees costs little: a shift of all draft positions, for example,
        # moves them only against the text.
        if mutant.name in lower:
            least = 0.1 if mutant.caught_by == ROUNDS else -0.02
            assert lower[mutant.name] > least, (mutant.name, tau, lower)


def greedy_tau(target, drafter, params):
    """(tokens per round, tokens) of eight rows of greedy text."""
    packed, lengths = decode.pack_prompts([[1, *range(i, i + 3)] for i in range(260, 268)])
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, 8),
        max_len=68,
        sampling=sampling.make_sampling(8, 0.0),
    )
    rule = accept.load("deterministic")
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=64)
    decode.check(state)
    assert bool(state.done.all())
    emitted = np.asarray(records.emitted)
    return emitted.sum() / (emitted > 0).sum(), np.asarray(state.tokens[:, :68])
