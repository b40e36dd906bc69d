"""One round: logits that are not finite, ids that are no tokens, drafts of a wrong form."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import NEW, begin, oracle, run, speculate, tabular

from specjax import accept, decode, drafters, outcome, sampling, step, testing, tree
from specjax.drafters.draft_models import draft_model
from specjax.errors import NonFiniteLogits, UserError
from specjax.generation.refill import decode_all
from specjax.types import CHAIN, DETERMINISTIC, IID, Draft, ModelParams

LOOKUP = drafters.make("prompt_lookup", tabular(7), gamma=3)
DRAFT_MODEL = draft_model.make(tabular(7), model=tabular(7, "draft"), gamma=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_non_finite_logits_name_row_and_round(temperature, poison):
    """They never become a token: the row stops before them, the others continue."""
    model, rule = tabular(7), accept.load("chain")
    # After token 6 the logits are not finite, and the model itself never emits 6.
    table = testing.random_table(0, 7, 1.0).at[:, :, 6].add(-1e4).at[:, 6].set(poison)
    both, prompts = ModelParams(table), [[1, 2], [3, 6], [4]]
    none = drafters.make("none", model)
    for drafter in (none, LOOKUP):
        state = begin(model, drafter, both, prompts, temperature=temperature)
        state, _ = run(model, drafter, "chain", both, state)
        assert (state.length - jnp.asarray([2, 2, 1])).tolist() == [NEW, 0, NEW]
        for read in (decode.outputs, decode.logprobs):
            with pytest.raises(NonFiniteLogits, match="row 1, round 0"):
                read(state, [2, 2, 1])
        assert state.failed.tolist() == [-1, 0, -1]
        with pytest.raises(NonFiniteLogits, match="row 1, round 0"):
            decode.check(state)
    state = begin(model, none, both, prompts, temperature=temperature)
    state = decode.autoregressive(model, both, state, max_steps=NEW)
    assert state.failed.tolist() == [-1, 0, -1]
    with pytest.raises(NonFiniteLogits):
        list(decode.stream(model, LOOKUP, rule, both, begin(model, LOOKUP, both, prompts)))


def stopping(token):
    """The rule "chain", which emits nothing where the target's next token is ``token``."""
    rule = accept.load("chain")

    def emptied(verdict, scores):
        return outcome.withdraw(verdict, sampling.argmax(scores[:, 0]) == token)

    return rule._replace(
        sampled=lambda keys, draft, probs: emptied(rule.sampled(keys, draft, probs), probs),
        greedy=lambda draft, logits: emptied(rule.greedy(draft, logits), logits),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "drafter", [drafters.make("none", tabular(7)), LOOKUP], ids=["none", "lookup"]
)
def test_a_row_that_gets_no_token_is_an_error(temperature, drafter):
    """It names row and round, the row stops there, and the others continue."""
    model, prompts = tabular(7), [[1, 2], [3, 6], [4, 5]]
    # The tokens are 1 to 5; token 0 is next after 6 only.
    table = testing.random_table(0, 7, 1.0).at[:, :, jnp.asarray([0, 6])].add(-1e4)
    table = table.at[:, 6, 0].set(1e4)
    both, rule = ModelParams(table), stopping(0)

    def start():
        return begin(model, drafter, both, prompts, temperature=temperature)

    state, _ = decode.generate(model, drafter, rule, both, start(), max_steps=NEW)
    assert bool(state.done.all()) and state.failed.tolist() == [-1, -2, -1]
    assert (state.length - 2).tolist() == [NEW, 0, NEW]
    message = "row 1 got no token in round 0, and was neither done nor at its limit"
    for read in (decode.check, lambda state: decode.outputs(state, [2, 2, 2])):
        with pytest.raises(UserError, match=message):
            read(state)
    with pytest.raises(UserError, match=message):
        list(decode.stream(model, drafter, rule, both, start()))
    with pytest.raises(UserError, match="row 1 got no token"):
        given = {"batch_size": 2, "max_new_tokens": NEW, "temperature": temperature}
        list(decode_all(model, drafter, rule, both, prompts, **given))


def test_a_row_that_is_done_may_get_no_token():
    """Rows at their limit, with an end-of-sequence token, and with one token left to write."""
    model, prompts = tabular(7), [[1, 2], [3, 6], [4, 5], [5, 1]]
    both = ModelParams(testing.random_table(0, 7, 1.0))
    for drafter in (drafters.make("none", model), LOOKUP):
        state = begin(model, drafter, both, prompts, temperature=1.0)
        state = state.replace(limit=state.length + jnp.asarray([0, 1, NEW, NEW]))
        state, _ = run(model, drafter, "chain", both, state, eos_id=3)
        decode.check(state)
        assert bool(state.done.all()) and state.failed.tolist() == [-1] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_draft_logits_are_reported(temperature):
    model, table = tabular(7), testing.random_table(0, 7, 1.0)
    both = ModelParams(table, table.at[:, 3].set(jnp.nan))
    state = begin(model, DRAFT_MODEL, both, [[1, 3], [3, 1]], temperature=temperature)
    state, _ = run(model, DRAFT_MODEL, "chain", both, state)
    assert int(state.failed[0]) == 0
    with pytest.raises(NonFiniteLogits, match="row 0, round 0"):
        decode.check(state)


def test_logits_after_a_rejected_draft_do_not_matter():
    """They are not finite after token 6 only, which plain decoding never emits."""
    table = testing.random_table(0, 7, 1.0).at[:, :, 6].add(-1e4).at[:, 6].set(jnp.nan)
    prompts, both = [[1, 2, 6, 3, 1, 2]], ModelParams(table)
    expected = oracle(tabular(7), both, prompts)
    assert len(expected[0]) == NEW
    assert speculate(tabular(7), LOOKUP, "chain", both, prompts)[0] == expected


@pytest.mark.parametrize("rule", ["chain", "block", "traversal"])
def test_nan_matters_where_the_rule_reads_the_probs(rule):
    """The target is NaN after token 1, and one token is requested.

    A rule that decides token by token does not read there. One that reads the probs at all nodes
    does, and must not decide from them.
    """
    model, rows = tabular(3), 600
    both = ModelParams(jnp.zeros((4, 3, 3)).at[:, 1].set(jnp.nan), jnp.zeros((4, 3, 3)))
    drafter = draft_model.make(model, model=tabular(3, "draft"), gamma=2)
    state = begin(model, drafter, both, [[0, 2]] * rows, new=1, temperature=1.0)
    state, _ = run(model, drafter, rule, both, state)
    failed = np.asarray(state.failed) >= 0
    if rule == "chain":
        assert not failed.any()
        seen = np.bincount(np.asarray(state.tokens)[:, 2], minlength=3)
        assert testing.chi_square(seen, np.ones(3) / 3)[2] > 1e-3
    else:
        # A 1 drafted at one of two positions.
        assert abs(failed.mean() - 5 / 9) < 0.1


def test_an_id_outside_the_vocabulary_is_no_draft():
    """From a table or a text of another vocabulary: no rule accepts or emits it."""
    target, rows = tabular(3), 64

    def propose(params, keys, context, state):
        tokens = jnp.broadcast_to(jnp.asarray([3, -2, 1], jnp.int32), (rows, 3))
        return Draft(tokens, jnp.ones_like(tokens, bool)), state

    foreign = drafters.make("prompt_lookup", target, gamma=3)._replace(propose=propose)
    params = ModelParams(testing.random_table(0, 3), {})
    for rule in ("chain", "deterministic", "match"):
        output, _, records = speculate(
            target, foreign, rule, params, [[0, 1]] * rows, new=8, temperature=1.0
        )
        assert (records.accepted == 0).all()
        assert all(len(row) == 8 and set(row) <= {0, 1, 2} for row in output)


def draft_of(nodes, parents=None, probs=None, depth=None):
    tokens = jnp.zeros((2, nodes), jnp.int32)
    return Draft(tokens, jnp.ones_like(tokens, bool), parents, probs, depth=depth)


@pytest.mark.parametrize(
    ("siblings", "draft", "message"),
    [
        (
            CHAIN,
            draft_of(2),
            r"propose of .* returned tokens of shape \(2, 2\); with 3 nodes it must be \(2, 3\)",
        ),
        (
            CHAIN,
            draft_of(3, probs=jnp.zeros((2, 3, 8))),
            r"returned probs of shape \(2, 3, 8\); with 3 nodes it must be \(2, 3, 7\)",
        ),
        (CHAIN, draft_of(3, depth=2), "returned a draft of depth 2; it declares depth 3"),
        (IID, draft_of(3), "declares siblings 'iid' and gave no parents"),
        (CHAIN, draft_of(3, parents=jnp.full((2, 3), -1)), "siblings 'chain' and gave parents"),
        (
            DETERMINISTIC,
            draft_of(3, parents=jnp.full((2, 3), -1), probs=jnp.zeros((2, 3, 7))),
            "declares siblings 'deterministic' and gave probs; probs must be None",
        ),
    ],
)
def test_a_draft_of_a_wrong_form_is_refused(siblings, draft, message):
    model, params = tabular(7), ModelParams(testing.random_table(0, 7))
    wrong = LOOKUP._replace(propose=lambda *_: (draft, ()), siblings=siblings)
    state = begin(model, LOOKUP, params, [[1], [2]])
    with pytest.raises(UserError, match=message):
        step.speculative_step(model, wrong, accept.load("recursive"), params, state)


def test_nodes_at_a_prefix():
    """Independent siblings may have the same token: all nodes with the path are listed."""
    #        0   1   2   3  4  5  6
    tokens = jnp.asarray([[5, 5, 6, 7, 7, 8, 7]])
    parents = jnp.asarray([[-1, -1, -1, 0, 1, 1, 2]])
    exist = jnp.ones((1, 7), bool)
    prefix = jnp.asarray([[5, 7, 0]])

    def nodes(count, exist=exist):
        here = tree.nodes_at(prefix, jnp.asarray([count]), tokens, exist, parents)
        return (np.flatnonzero(here[0]) - 1).tolist()

    assert nodes(0) == [-1] and nodes(1) == [0, 1] and nodes(2) == [3, 4]
    assert nodes(2, exist.at[0, 3].set(False)) == [4] and nodes(3) == []
