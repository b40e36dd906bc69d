"""Escalation: which drafter proposes, which ones run, and a draft model that missed rounds."""

from __future__ import annotations

import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelParams, accept, decode, drafters, make_sampling, rng, row_keys
from specjax.drafters.nested import escalate
from specjax.errors import UserError
from specjax.testing import exact, laws, loop, tabular, tiny
from specjax.theory import statistics
from specjax.types import Context, Draft, Drafter

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "escalate": (
        "escalate",
        {
            "drafters": [
                ("prompt_lookup", {"gamma": 3, "max_ngram": 2, "min_ngram": 2}),
                (
                    "draft_model",
                    {"gamma": 2, "gaps": True, "model": "@draft", "params": "@draft params"},
                ),
            ]
        },
        ("match",),
    ),
}

VOCAB = 3
target, draft, _ = cases.models(VOCAB)
lm_target, lm_params = tiny(vocab_size=16)


def scripted(nodes: int, tokens, proposes) -> Drafter:
    """Proposes the same tokens in rows where ``proposes(length)`` is True.

    Its state counts its updates in each row.
    """

    def propose(params, keys, context, state):
        batch = context.length.shape[0]
        valid = jnp.broadcast_to(proposes(context.length)[:, None], (batch, nodes))
        return Draft(jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (batch, nodes)), valid), state

    return Drafter(
        init_params=lambda key: {},
        init=lambda params, context, out, slots: jnp.zeros_like(context.length),
        propose=propose,
        update=lambda params, state, draft, verdict, out: state + (verdict.count > 0),
        nodes=nodes,
        name="scripted",
    )


def run(drafter, params, prompts, new=12, temperature=0.0, rule="chain", step=None):
    packed, lengths = decode.pack_prompts(prompts)
    state = decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        row_keys(0, len(prompts)),
        max_len=packed.shape[1] + new,
        limit=lengths + new,
        sampling=make_sampling(len(prompts), temperature),
    )
    if step is not None:
        for after, info in decode.stream(target, drafter, accept.load(rule), params, state):
            step(after, info)
            state = after
    else:
        state, _ = decode.generate(target, drafter, accept.load(rule), params, state, max_steps=new)
    return state, lengths


@pytest.mark.fast
def test_in_each_row_the_first_draft_is_used():
    even = scripted(2, [0, 1], lambda n: n % 2 == 0)
    long = scripted(3, [2, 2, 2], lambda n: n % 4 == 1)
    both = escalate.make(target, drafters=[even, long])
    params = ModelParams(cases.table(0), both.init_params(None))
    seen = []

    def step(after, info):
        seen.append(
            (
                before[0],
                np.asarray(info.draft.tokens),
                np.asarray(info.draft.valid),
                np.asarray(info.emitted),
            )
        )
        before[0] = np.asarray(after.length)

    prompts = [[0, 1, 2], [1, 1], [2], [0, 1, 1, 0]]
    before = [np.array([len(p) for p in prompts])]
    state, _ = run(both, params, prompts, step=step)
    won = np.zeros((4, 2), int)
    for length, tokens, valid, emitted in seen:
        for row in range(4):
            stage = 0 if length[row] % 2 == 0 else 1 if length[row] % 4 == 1 else None
            expected = {0: [True, True, False], 1: [True] * 3, None: [False] * 3}[stage]
            if emitted[row]:
                assert valid[row].tolist() == expected
                script = {0: [0, 1], 1: [2, 2, 2], None: []}[stage]
                assert tokens[row][valid[row]].tolist() == script
                # A round without proposals belongs to the last drafter asked.
                won[row, 1 if stage is None else stage] += 1
    assert won.min() >= 0 and won.sum(0).min() > 0
    updates = np.stack([np.asarray(s) for s in state.draft.states], 1)
    np.testing.assert_array_equal(updates, won)


def test_the_draft_model_reads_the_tokens_that_it_missed():
    """Its probabilities do not depend on how many tokens it missed while a lookup proposed."""
    lookup = drafters.make("prompt_lookup", target, gamma=3, max_ngram=2, min_ngram=2)
    model = drafters.make(
        "draft_model", target, model=draft, gamma=2, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[lookup, model])
    params = ModelParams(cases.table(0), both.init_params(None))
    packed, lengths = decode.pack_prompts([[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]])
    state = decode.prefill(target, both, params, packed, lengths, row_keys(3, 4), max_len=40)
    propose, waited, asked = jax.jit(both.propose), 0, 0
    all_probs = jax.jit(model.probs)
    rounds = decode.stream(target, both, accept.load("chain"), params, state)
    for state, _ in itertools.islice(rounds, 12):
        keys = rng.RowKeys(state.keys, state.round, state.length)
        drafted, after = propose(
            params, keys, Context(state.tokens, state.length, state.sampling), state.draft
        )
        probs = all_probs(
            params._replace(draft=params.draft[1]),
            Context(jnp.maximum(state.tokens, 0), state.length, state.sampling),
        )
        expected = np.asarray(probs)[np.arange(4), np.asarray(state.length) - 1]
        mine = np.asarray((after.winner == 1) & ~state.done)
        actual = np.asarray(drafted.probs[:, 0])
        np.testing.assert_allclose(actual[mine], expected[mine], atol=1e-5)
        behind = np.asarray(state.length - state.draft.states[1].kept.length)
        waited, asked = max(waited, int(behind[mine].max(initial=0))), asked + mine.sum()
    # More tokens were missed than one of its blocks has.
    assert asked > 8 and waited > 3


@pytest.mark.slow
def test_the_exact_law():
    """Every outcome of a round in which some texts are looked up and others drafted."""
    lookup = drafters.make("prompt_lookup", target, gamma=1, max_ngram=2, min_ngram=2)
    model = drafters.make(
        "draft_model", target, model=draft, gamma=2, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[lookup, model])
    with jax.enable_x64(True):
        params = ModelParams(cases.table(0), ({}, cases.table(1)))
        for prompt in ([0, 1, 2, 0, 1], [2, 1]):
            law = exact.exact_law(target, both, accept.load("chain"), params, prompt, 2, rounds=2)
            truth = laws.sequence_law(target, params.target, prompt, 2)
            assert statistics.total_variation(law, truth) < 1e-12


@pytest.mark.fast
def test_a_drafter_with_a_low_rate_is_not_asked():
    wrong = scripted(2, [0, 0], lambda n: n > 0)
    # The target's token is always 1.
    table = jnp.zeros((VOCAB + 1, VOCAB, VOCAB)).at[..., 1].set(9.0)
    both = escalate.make(
        target, drafters=[wrong, scripted(1, [1], lambda n: n > 0)], least=0.4, decay=0.5
    )
    params = ModelParams(table, both.init_params(None))
    winners = []
    run(
        both,
        params,
        [[1], [2, 1]],
        step=lambda state, info: winners.append(np.asarray(state.draft.winner).tolist()),
    )
    # The rate of the first drafter is 1, then 0.5, then 0.25, which is below 0.4.
    assert winners[:4] == [[0, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.fast
def test_trees_beside_chains():
    lookup = drafters.make("prompt_lookup", target, gamma=3)
    trie = drafters.make("trie", target, nodes=5, depth=4)
    both = escalate.make(target, drafters={"lookup": lookup, "trie": trie})
    assert (both.siblings, both.nodes, both.longest) == ("deterministic", 5, 4)
    params = ModelParams(cases.table(0), both.init_params(None))
    prompts = [[0, 1, 2, 0], [1], [2, 2, 0, 1, 2], [0, 0]]
    state, lengths = run(both, params, prompts, rule="recursive")
    plain = drafters.make("none", target)
    expected, _ = run(plain, ModelParams(cases.table(0)), prompts)
    assert decode.outputs(state, lengths) == decode.outputs(expected, lengths)
    # As in a configuration.
    keys = {"lookup": {"name": "prompt_lookup", "gamma": 2, "match": None}, "trie": {"nodes": 4}}
    assert drafters.make("escalate", target, drafters=keys).nodes == 4


@pytest.mark.fast
def test_invalid_keys_are_refused():
    model = {"model": draft, "params": cases.table(1)}
    for stages, message in [
        ({}, "give at least one"),
        ("prompt_lookup", "escalate needs inner drafters"),
        ({"lookup": {"name": "prompt_lokup"}}, "unknown drafter 'prompt_lokup'"),
        ({"prompt_lookup": {"gama": 3}}, "does not take the key 'gama'"),
        ({"lookup": 3}, "drafter lookup is 3; give its keys"),
        ({"none": {}}, "none of the drafters drafts any tokens"),
        (
            [drafters.make("draft_tree", target, tree="2x1", siblings="iid", **model)],
            "drafts iid siblings",
        ),
        (
            [drafters.make("draft_model", target, **model)],
            "draft_model must take part in every round",
        ),
        (
            {"prompt_lookup": {}, "medusa": {}},
            "medusa must take part in every round; it cannot wait for its turn",
        ),
        ([cases.case("bpd").drafter], "bpd must take part in every round"),
        ([cases.case("hydra").drafter], "drafts without_replacement siblings"),
    ]:
        with pytest.raises(UserError, match=message):
            escalate.make(target, drafters=stages)
    with pytest.raises(UserError, match=r"least is 1; it must be a number in \[0, 1\)"):
        escalate.make(target, drafters={"prompt_lookup": {}}, least=1)
    with pytest.raises(UserError, match=r"decay is 0\.5 and least is 0\.0, so it has no effect"):
        escalate.make(target, drafters={"prompt_lookup": {}}, decay=0.5)
    with pytest.raises(UserError, match=r"decay is 1\.0; it must be a number in \[0, 1\)"):
        escalate.make(target, drafters={"prompt_lookup": {}}, least=0.5, decay=1.0)
    mixed = [
        drafters.make("trie", target, nodes=2),
        drafters.make("draft_model", target, gaps=True, **model),
    ]
    both = escalate.make(target, drafters=mixed)
    with pytest.raises(UserError, match="every drafter must be deterministic"):
        run(both, ModelParams(cases.table(0), both.init_params(None)), [[0]], rule="recursive")


@pytest.mark.fast
def test_a_drafter_that_no_row_needs_does_not_run():
    """Every row has a lookup, so the draft model's cache does not grow."""
    always = scripted(2, [1, 1], lambda n: n > 0)
    model = drafters.make(
        "draft_model", tabular(VOCAB), model=draft, gamma=2, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[always, model])
    params = ModelParams(cases.table(0), both.init_params(None))
    state, _ = run(both, params, [[0, 1], [2]])
    # As after prefill.
    assert np.asarray(state.draft.states[1].kept.length).tolist() == [1, 0]


@pytest.mark.fast
def test_a_drafter_with_an_empty_draft_learns():
    """Rounds without proposals belong to the last drafter: an empty matrix is filled in them."""
    never = scripted(1, [0], lambda n: n < 0)
    recycling = drafters.make("token_recycling", target, tree="2", top_k=2)
    both = escalate.make(target, drafters=[never, recycling])
    params = ModelParams(cases.table(0), both.init_params(None))
    alone = ModelParams(cases.table(0), recycling.init_params(None))
    state, lengths = run(both, params, [[0, 1], [2]], rule="recursive")
    same, _ = run(recycling, alone, [[0, 1], [2]], rule="recursive")
    np.testing.assert_array_equal(state.draft.states[1].matrix, same.draft.matrix)
    assert (np.asarray(same.draft.matrix) >= 0).any()
    assert decode.outputs(state, lengths) == decode.outputs(same, lengths)


@pytest.mark.fast
def test_no_drafter_runs_for_a_finished_row_and_slots_are_counted_per_drafter():
    """A finished row needs no draft; the slots of a wide draft do not count for other drafters."""
    # Proposes in row 1, but not for the short text of row 0.
    even = scripted(2, [0, 1], lambda n: n > 3)
    model = draft._replace(max_positions=16)
    costly = drafters.make(
        "draft_model", target, model=model, gamma=1, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[scripted(6, [0] * 6, lambda n: n < 0), even, costly])
    params = ModelParams(cases.table(0), both.init_params(None))
    packed, lengths = decode.pack_prompts([[0], [1, 1, 0, 2]])
    state = decode.prefill(
        target,
        both,
        params,
        packed,
        lengths,
        row_keys(0, 2),
        max_len=16,
        limit=jnp.asarray([1, 16]),
    )
    before = np.asarray(state.draft.states[2].kept.length)
    *_, (state, _) = decode.stream(target, both, accept.load("chain"), params, state)
    assert np.asarray(state.length).tolist() == [1, 16]
    # It ran in the first round, before any row was known to be finished, and not later.
    assert (np.asarray(state.draft.states[2].kept.length) - before).max() <= 1


def test_an_inner_drafter_gets_the_targets_own_noise():
    """Seeded Jacobi makes the same guesses inside escalation and alone."""
    alone = drafters.make("jacobi", target, gamma=2)
    both = escalate.make(target, drafters=[drafters.make("jacobi", target, gamma=2)])
    table = cases.table(0)
    prompts = [[0, 1], [2], [1, 1, 0]]
    expected, _ = run(alone, ModelParams(table, {}), prompts, temperature=1.0, rule="match")
    got, _ = run(both, ModelParams(table, ({},)), prompts, temperature=1.0, rule="match")
    assert got.round == expected.round
    assert (got.tokens[:, :14] == expected.tokens[:, :14]).all()


def test_a_drafter_may_read_the_taps_of_the_context_alone():
    """Its update then gets an output of no tokens, which has no taps."""
    reads = scripted(2, (1, 2), lambda length: length % 2 == 0)._replace(taps=(0,))
    drafter = drafters.make("escalate", target=lm_target, drafters=[reads])
    assert not drafter.features and drafter.taps == (0,)
    packed, lengths = decode.pack_prompts([[1, 2, 3]])
    state = decode.prefill(
        *(lm_target, drafter, ModelParams(lm_params, drafter.init_params(None)), packed, lengths),
        row_keys(0, 1),
        max_len=8,
    )
    params = ModelParams(lm_params, drafter.init_params(None))
    rule = accept.load("chain")
    state, _ = decode.generate(lm_target, drafter, rule, params, state, max_steps=8)
    assert int(state.length[0]) == 8


def learning(control):
    """A lookup and a draft model equal to the target, with the same controller."""
    find = {"gamma": 3, "max_ngram": 3, "min_ngram": 3}
    lookup = drafters.make("prompt_lookup", target, control=control, **find)
    keys = {"model": target, "params": cases.table(0), "gamma": 2, "gaps": True}
    model = drafters.make("draft_model", target, control=control, **keys)
    both = escalate.make(target, drafters=[lookup, model])
    return both, ModelParams(cases.table(0), both.init_params(None))


CHEAP = "draft=0.01,verify=0.01"


@pytest.mark.parametrize("control", [f"goodput:{CHEAP}", f"bandit:{CHEAP}"])
def test_controllers_inside_learn_from_their_own_rounds_only(control):
    """A round of one drafter does not stop the other: all drafts of the model are accepted."""
    both, params = learning(control)
    winners, ends = [], [5]

    def see(state, info):
        winners.append(int(state.draft.winner[0]))
        ends.append(int(state.length[0]))

    run(both, params, [[0, 1, 2, 0, 1]], new=120, temperature=1.0, step=see)
    assert {0, 1} <= {*winners[10:]}
    counts = np.diff(ends)[np.asarray(winners) == 1]
    assert counts[-10:].mean() > 2


@pytest.mark.slow
def test_the_law_with_controllers_inside():
    both, params = learning(f"goodput:{CHEAP}")
    fit = loop.loop_fit(target, both, accept.load("chain"), params, [2, 1, 2, 1], 5, 120_000)
    assert fit.p_value > 1e-4 and fit.detectable < 0.02
