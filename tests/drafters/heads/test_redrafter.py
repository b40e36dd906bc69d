"""ReDrafter: the draft step and the beam tree in plain NumPy, depths, learning, errors."""

from __future__ import annotations

import functools

import cases
import growth_cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import setup_of
from marks import by_default

from specjax import drafters, rng, step, testing
from specjax.errors import UserError
from specjax.testing import loop
from specjax.types import ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "redrafter": ("redrafter", {"heads": 2, "layers": 1, "top_k": 2}, ("deterministic",)),
    "redrafter chain": ("redrafter", {"layers": 1, "tree": "chain:2", "siblings": "iid"}, ()),
}

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)
SIZES = {"rnn": {}, "sum": {"running_sum": True, "layers": 1}, "projection": {"inner": 7}}


def formula(params, embedding):
    """s = SiLU(W e + U s + b) or s + e; z = P [f, s] + p; z + SiLU(A z + a); H z."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def read(feature, since):
        state = np.zeros_like(feature)
        for token in since:
            read = embedding[token]
            if "rnn" in params:
                w, u = params["rnn"]["w"], params["rnn"]["u"]
                state = shared.silu(read @ w["kernel"] + state @ u["kernel"] + u["bias"])
            else:
                state = state + read
        z = np.concatenate([feature, state])
        if "input_proj" in params:
            z = z @ params["input_proj"]["kernel"] + params["input_proj"]["bias"]
        for block in params["block"].values():
            z = z + shared.silu(z @ block["kernel"] + block["bias"])
        return z @ params["head"]["kernel"]

    return read


@pytest.mark.fast
@pytest.mark.parametrize("sizes", SIZES)
def test_forward_is_the_formula(sizes):
    keys = SIZES[sizes]
    params = cases.random_heads("redrafter", TARGET, TABLE, heads=4, **keys).init_params(None)
    assert ("rnn" in params, "input_proj" in params) == (sizes != "sum", sizes == "projection")
    tokens = shared.text()
    result = shared.logits_along("redrafter", TARGET, TABLE, params, tokens, heads=4)
    read = formula(params, np.eye(shared.VOCAB))
    features = shared.features_of(TARGET, TABLE, tokens)
    expected = shared.expected_along(read, features, tokens, 4)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def first_drafts(drafter, target, params, prompts):
    """The first draft after each prompt."""
    state = loop.begin(target, drafter, params, prompts, 8, 0)
    keys = rng.RowKeys(state.keys, state.round, state.length)
    propose = jax.jit(functools.partial(drafter.propose, params, keys))
    return propose(step.context_of(state), state.draft)[0]


def beam_tree(read, width, depth):
    """The paths of a plain beam search's tree: level by level, best first, each prefix once."""
    beams, levels = [((), 0.0)], []
    for _ in range(depth):
        below = []
        for path, score in beams:
            logits = read(path)
            scores = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            below += [((*path, token), score + scores[token]) for token in range(len(scores))]
        beams = sorted(below, key=lambda beam: -beam[1])[:width]
        levels.append([path for path, _ in beams])
    prefixes = {path[:end] for path, _ in beams for end in range(1, depth + 1)}
    return [path for level in levels for path in level if path in prefixes]


@pytest.mark.parametrize("sizes", by_default(SIZES, ("rnn",)))
def test_the_beam_tree_is_that_of_plain_numpy(sizes):
    """In ragged rows, deeper than the steps that training predicts."""
    target, table = testing.tiny(scale=20.0, layers=1, width=16, vocab_size=12)
    keys = {"heads": 2, "depth": 4, "top_k": 3, **SIZES[sizes]}
    drafter = cases.random_heads("redrafter", target, table, scale=0.5, **keys)
    params, prompts, nodes = ModelParams(table, drafter.init_params(None)), shared.PROMPTS, set()
    drafts = first_drafts(drafter, target, params, prompts)
    read = formula(params.draft, np.asarray(target.embed(table, jnp.arange(12)), np.float64))
    for row, text in enumerate(prompts):
        if len(text) < 2:
            assert not bool(drafts.valid[row].any())  # it has no feature yet
            continue
        feature = shared.features_of(target, table, np.array([text]))[0, -1]
        expected = beam_tree(lambda path, f=feature, y=text[-1]: read(f, [y, *path]), 3, 4)
        assert growth_cases.paths_of(drafts, row) == expected
        nodes.add(len(expected))
    assert drafter.nodes == 12 and drafter.longest == 4 and len(nodes) > 1


@pytest.mark.fast
@pytest.mark.parametrize("sizes", SIZES)
def test_a_new_network_repeats_the_target(sizes):
    model, params = testing.tiny(layers=1, width=16)
    keys = SIZES[sizes] | ({"inner": 20} if sizes == "projection" else {})
    fresh = drafters.make("redrafter", model, **keys).training.start(params, jax.random.key(0))
    tokens = shared.text(vocab=32)
    result = shared.logits_along("redrafter", model, params, fresh, tokens, heads=2)
    features = jnp.asarray(shared.features_of(model, params, tokens), jnp.float32)
    expected = np.repeat(np.asarray(model.unembed(params, features))[:, :, None], 2, 2)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_chain_is_the_same_in_the_loop_and_level_by_level():
    """The compiled loop of a chain, longer than the trained steps, and the growth of trees."""
    keys = {"tree": "chain:4", "heads": 2, "siblings": "iid"}
    chain = cases.random_heads("redrafter", TARGET, TABLE, **keys)
    params = ModelParams(TABLE, chain.init_params(None))
    setup = setup_of(chain)
    assert setup.stepper.looped
    levels = setup._replace(stepper=setup.stepper._replace(looped=False))
    other = chain._replace(propose=functools.partial(chain.propose.func, levels))
    drafts = [first_drafts(each, TARGET, params, shared.PROMPTS) for each in (chain, other)]
    np.testing.assert_array_equal(drafts[0].tokens, drafts[1].tokens)
    np.testing.assert_allclose(drafts[0].probs, drafts[1].probs, atol=1e-6)


SHAPES = {"chain": {"tree": "chain:3", "siblings": "iid"}, "tree": {"tree": "3x2x1"}}


@pytest.mark.parametrize("shape", by_default(SHAPES, ()))
def test_forecast_is_decoded(shape):
    drafter = cases.random_heads("redrafter", TARGET, TABLE, seed=5, heads=2, **SHAPES[shape])
    shared.assert_forecast_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


@pytest.mark.parametrize("sizes", by_default(SIZES, ("rnn",)))
def test_it_learns_and_not_from_wrong_labels(sizes):
    shared.assert_learns("redrafter", heads=3, **SIZES[sizes])


@pytest.mark.fast
def test_keys():
    make = functools.partial(drafters.make, "redrafter", TARGET)
    # The paper's draft is a beam search; its keys need no tree.
    default = make()
    assert (default.longest, default.nodes, default.siblings) == (5, 25, "deterministic")
    small = make(heads=3, top_k=2)
    assert (small.longest, small.nodes) == (3, 6) and not small.whole
    assert small.training.foresee is None and dict(small.training.facts) == {"n_predict": 3}
    assert make(tree="chain:7").longest == 7 and make(tree="3x2x1").training.foresee is not None
    assert make(tree="dynamic", nodes=9, top_k=3).nodes == 9
    params = cases.random_heads("redrafter", TARGET, TABLE).init_params(None)
    refused = [
        ({}, "redrafter has no parameters yet; give model=, a directory of trained ones"),
        ({"params": params, "layers": 3}, "layers is 3, and the given redrafter has 2"),
        ({"params": params, "inner": 9}, "inner is 9, and the given redrafter has 10"),
        (
            {"params": params, "running_sum": True},
            "running_sum is True, and the given .* has False",
        ),
        ({"running_sum": 1}, "running_sum is 1; it must be True or False"),
        ({"heads": -1}, "heads is -1; it must be a whole number >= 0"),
        ({"nodes": 4, "depth": 5}, "nodes is 4 and depth is 5, so no path of 5 tokens fits"),
        ({"top_k": 6}, "top_k is 6 and the vocabulary has 5 tokens"),
    ]
    for keys, message in refused:
        with pytest.raises(UserError, match=message):
            make(**keys).init_params(None)


@pytest.mark.fast
@pytest.mark.parametrize("sizes", SIZES)
def test_files_round_trip(sizes, tmp_path):
    """The number of trained steps is in config.json: it is the default depth."""
    target = shared.assert_files_round_trip("redrafter", tmp_path, heads=3, **SIZES[sizes])
    assert drafters.make("redrafter", target, model=tmp_path).longest == 3
    assert drafters.make("redrafter", target, model=tmp_path, heads=4).longest == 4
    if sizes == "rnn":
        with pytest.raises(UserError, match="running_sum is True, and the given .* has False"):
            drafters.make("redrafter", target, model=tmp_path, running_sum=True)


@pytest.mark.parametrize("sizes", by_default(SIZES, ("projection",)))
@pytest.mark.fast
def test_foreign_parameters_are_refused(sizes):
    params = cases.random_heads("redrafter", TARGET, TABLE, **SIZES[sizes]).init_params(None)
    shared.assert_foreign_is_refused("redrafter", TARGET, params)
