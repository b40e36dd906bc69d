"""Staged speculation: the tree, its law, the cache of the model, and keys that are refused."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, step, testing
from specjax.drafters.nested import staged
from specjax.errors import UserError
from specjax.testing import check_draft, exact, law_checks, loop
from specjax.types import CHAIN, WITHOUT_REPLACEMENT, Context, Draft, ModelParams

# Enumeration runs each operation alone: on one worker each is compiled once for all these files.
pytestmark = pytest.mark.xdist_group("enumeration")

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "staged": (
        "staged",
        {
            "drafters": [("prompt_lookup", {"gamma": 2, "max_ngram": 2})],
            "gamma": 2,
            "model": "@draft",
            "params": "@draft params",
        },
        ("recursive",),
    ),
}
NONE = drafters.make("none", cases.models(4)[0])
PROMPTS = [[1, 2, 0, 3, 1, 2], [4], [0, 0, 5, 0, 0], [3, 3]]


def made(vocab=3, **keys):
    """The target, the drafter with a table as its model, and the parameters."""
    target, draft, _ = cases.models(vocab)
    drafter = drafters.make("staged", target, model=draft, params=cases.table(1, vocab), **keys)
    return target, drafter, ModelParams(cases.table(0, vocab), drafter.init_params(None))


@pytest.mark.parametrize(
    ("keys", "rule"),
    by_default(
        [
            (("gamma", 1, "width", 2), "recursive"),
            (("gamma", 2, "width", 2), "recursive"),
            (("gamma", 2, "width", 2), "traversal"),
            (("gamma", 1, "width", 3), "recursive"),
            (("gamma", 2, "width", 1), "block"),
        ],
        [(("gamma", 1, "width", 2), "recursive")],
    ),
)
@pytest.mark.slow
def test_its_law_is_the_targets(keys, rule):
    target, drafter, params = made(**dict(zip(keys[::2], keys[1::2], strict=True)))
    assert drafter.siblings == (CHAIN if keys[3] == 1 else WITHOUT_REPLACEMENT)
    finding = law_checks.check_law(
        target, drafter, accept.load(rule), params, [cases.REPEATED], count=False
    )
    assert finding.passed, finding


@pytest.mark.slow
def test_siblings_with_the_probs_of_the_chain_are_noticed(monkeypatch):
    right = staged._siblings

    def wrong(settings, keys, context, drawn, logits):
        tokens, exist, _ = right(settings, keys, context, drawn, logits)
        return tokens, exist, jnp.repeat(drawn.probs[:, :, None], settings.width - 1, 2)

    monkeypatch.setattr(staged, "_siblings", wrong)
    # With three tokens, the residual of the first sibling can be a single token.
    target, drafter, params = made(vocab=4, gamma=1, width=2, drafters=[NONE])
    rule, errors = accept.load("recursive"), []
    for prompt in ([2, 1], [0, 3], [1, 1]):
        result = exact.enumerated(target, drafter, rule, params, prompt, 2, rounds=1)
        errors.append(testing.total_variation(result.law, result.truth))
    assert max(errors) > 1e-3


def test_finished_rows_need_no_inner_round():
    """Their nodes are invalid, the other rows' drafts are the same, and without live rows no
    inner round runs."""
    target, drafter, params = made(vocab=6, gamma=3, width=1)
    packed, lengths = decode.pack_prompts(PROMPTS)
    state = decode.prefill(target, drafter, params, packed, lengths, rng.row_keys(0, 4), max_len=24)
    context, keys = step.context_of(state), step.keys_of(drafter, state)
    assert context.done.tolist() == [False] * 4 and context.limit.tolist() == [24] * 4
    propose = jax.jit(drafter.propose)
    full, after = propose(params, keys, context, state.draft)
    assert full.valid.all() and after.count.min() > 0
    done = jnp.asarray([False, True, False, True])
    draft, _ = propose(params, keys, context.replace(done=done), state.draft)
    assert draft.valid.all(1).tolist() == (~done).tolist() == draft.valid.any(1).tolist()
    assert np.array_equal(draft.tokens[~done], full.tokens[~done])
    _, rested = propose(params, keys, context.replace(done=~(done & False)), state.draft)
    assert not rested.count.any()


LOOKUP = {"name": "prompt_lookup", "gamma": 10, "max_ngram": 2}
MODEL = {"name": "draft_model", "model": cases.models(6)[1], "params": cases.table(1, 6)}


@pytest.mark.parametrize(
    "inner",
    [
        *[LOOKUP | {"control": f"fixed:{length}"} for length in (3, 0, 20)],
        MODEL | {"gamma": 2, "control": "fixed:1"},
        MODEL | {"gamma": 2, "control": "calibrated:most=2"},
    ],
)
def test_a_drafter_with_a_controller_inside(inner):
    """The inner rounds verify widths below its nodes; the greedy text is the target's."""
    inner = {"inner": inner}
    target, drafter, params = made(vocab=6, gamma=3, width=1, drafters=inner)
    packed, lengths = decode.pack_prompts(PROMPTS)
    given = packed, lengths, rng.row_keys(0, 4)
    keys = {"max_len": 24, "sampling": sampling.make_sampling(4, temperature=0.0)}

    def text(drafter, params, rule):
        state = decode.prefill(target, drafter, params, *given, **keys)
        return decode.generate(target, drafter, rule, params, state, max_steps=24)[0].tokens[:, :24]

    plain = text(drafters.make("none", target), ModelParams(params.target), accept.load("chain"))
    np.testing.assert_array_equal(text(drafter, params, accept.load("chain")), plain)


@pytest.mark.slow
def test_the_compiled_loop_has_the_targets_law():
    target, drafter, params = made(gamma=3, width=2)
    fit = loop.loop_fit(target, drafter, accept.load("recursive"), params, [2, 1, 2, 1], 5, 120_000)
    assert fit.p_value > 1e-4 and fit.detectable < 0.02


@functools.cache
def real(**keys):
    """A decoder as the target, the same with other weights as the model, a tree in its rounds."""
    target, params = testing.tiny(vocab_size=8, seed=0)
    close = jax.tree.map(lambda x: 1.05 * x, params)
    lookup = drafters.make("trie", target, nodes=4, depth=2, max_ngram=2, samples=8)
    drafter = drafters.make("staged", target, model=target, params=close, drafters=[lookup], **keys)
    return target, drafter, ModelParams(params, drafter.init_params(None))


@pytest.mark.slow
def test_greedy_text_is_the_targets_and_a_tree_is_inside():
    target, drafter, params = real(gamma=3, width=2)
    packed, lengths = decode.pack_prompts(PROMPTS)
    keys, new = rng.row_keys(0, 4), 24

    def begin(drafter, params):
        return decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            keys,
            max_len=6 + new,
            limit=lengths + new - jnp.array([0, 3, 5, 0]),
            sampling=sampling.make_sampling(4, 0.0),
        )

    none = drafters.make("none", target)
    state = begin(none, ModelParams(params.target))
    state = decode.autoregressive(target, params, state, max_steps=new)
    plain = decode.outputs(state, lengths)
    state, records = decode.generate(
        target, drafter, accept.load("recursive"), params, begin(drafter, params), max_steps=new
    )
    decode.check(state)
    assert decode.outputs(state, lengths) == plain
    assert np.asarray(records.accepted).max() == 3


@pytest.mark.slow
def test_the_models_cache_follows_the_text():
    target, drafter, params = real(gamma=3, width=2)
    finding = testing.state_follows_text(drafter, target, params)
    assert finding.passed, finding


def test_siblings_are_distinct():
    """In a sampled row and in a greedy one, where they are the best tokens after the chain's."""
    logits = np.asarray([[[3, 1, 2, 0], [0, 1, 2, 3]]] * 2, np.float32)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    first = np.asarray([[0, 3], [2, 3]], np.int32)
    drawn = Draft(first, np.ones((2, 2), bool), probs=probs)
    length = np.ones(2, np.int32)
    context = Context(first, length, sampling.make_sampling(2, [0.0, 1.0]))
    settings = made(4, gamma=2, width=3)[1].propose.args[0]

    @jax.jit
    def siblings(base):
        keys = rng.RowKeys(base, jnp.asarray(0), length)
        return staged._siblings(settings, keys, context, jax.tree.map(jnp.asarray, drawn), logits)

    tokens, exist, probs = map(np.asarray, siblings(rng.row_keys(0, 2)))
    assert exist.all() and np.array_equal(tokens[0], [[2, 1], [2, 1]])
    for depth in range(2):
        assert len({first[1, depth], *tokens[1, depth].tolist()}) == 3
        assert (np.take_along_axis(probs[1, depth], tokens[1, depth][:, None], 1) > 0).all()


@pytest.mark.fast
@pytest.mark.slow
def test_drafts_are_well_formed():
    target, drafter, params = made(gamma=2, width=3)
    packed, lengths = decode.pack_prompts([[0, 1, 2, 0, 1], [2], [1, 1], [0]])
    heat = sampling.make_sampling(4, [1.0, 0.5, 0.0, 0.0])
    state = decode.prefill(
        target, drafter, params, packed, lengths, rng.row_keys(1, 4), max_len=12, sampling=heat
    )
    keys = rng.RowKeys(state.keys, state.round, state.length)
    draft, _ = decode.step_lib.propose(target, drafter, params, state, keys)
    check_draft(draft, 3, WITHOUT_REPLACEMENT, greedy=np.asarray(heat.greedy))
    # All three tokens of a depth.
    both = np.asarray(draft.tokens)[:, [0, 2, 3]], np.asarray(draft.tokens)[:, [1, 4, 5]]
    for tokens in both:
        assert (np.sort(tokens, 1) == [0, 1, 2]).all()


@pytest.mark.fast
def test_wrong_keys_are_refused():
    target, draft, _ = cases.models(3)
    for keys, message in [
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"width": 0}, "width is 0; it must be a whole number >= 1"),
        ({"width": 4}, "4"),
        ({"model": cases.models(4)[1]}, "a vocabulary of 4 and the target of 3"),
        ({"drafters": {"jacobi": {}}}, "staged: jacobi reads the output of the model that it"),
        ({"drafters": {"a": {"name": "none"}, "b": {"name": "none"}}}, "takes one drafter"),
    ]:
        with pytest.raises(UserError) as error:
            drafters.make("staged", target, **{"model": draft, **keys})
        assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="staged was made from an LM without params"):
        drafters.make("staged", target, model=draft).init_params(None)
