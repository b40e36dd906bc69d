"""Escalation: who proposes, what runs, and whether a draft model that had to wait still knows the text."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelParams, accept, decode, drafters, make_sampling, rng, row_keys
from specjax.drafters.nested import escalate
from specjax.errors import UserError
from specjax.testing import cases, exact, laws, tabular
from specjax.theory import statistics
from specjax.types import Context, Draft, Drafter

VOCAB = 3
target, draft, _ = cases.models(VOCAB)


def scripted(nodes: int, tokens, proposes) -> Drafter:
    """Proposes the same tokens whenever ``proposes(length)`` says so; its state counts its updates in each row."""

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
def test_the_first_that_proposes_wins_row_by_row():
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
            who = 0 if length[row] % 2 == 0 else 1 if length[row] % 4 == 1 else None
            want = {0: [True, True, False], 1: [True] * 3, None: [False] * 3}[who]
            if emitted[row]:
                assert valid[row].tolist() == want
                assert who is None or tokens[row][valid[row]].tolist() == [[0, 1], [2, 2, 2]][who]
                won[row, 1 if who is None else who] += (
                    1  # where nobody proposes, the last one asked has the round
                )
    assert won.min() >= 0 and won.sum(0).min() > 0
    np.testing.assert_array_equal(
        np.stack([np.asarray(s) for s in state.draft.states], 1), won
    )  # whose round it was


def test_the_draft_model_waits_and_still_knows_the_text():
    """Rounds in which a lookup proposed leave the model behind, by any number of tokens; its law must not show it."""
    lookup = drafters.make("prompt_lookup", target, gamma=3, max_ngram=2, min_ngram=2)
    model = drafters.make(
        "draft_model", target, model=draft, gamma=2, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[lookup, model])
    params = ModelParams(cases.table(0), both.init_params(None))
    packed, lengths = decode.pack_prompts([[0, 1, 2], [1], [2, 2, 0, 1, 2], [0, 0]])
    state = decode.prefill(target, both, params, packed, lengths, row_keys(3, 4), max_len=40)
    propose, waited, asked = jax.jit(both.propose), 0, 0
    rounds = decode.stream(target, both, accept.load("chain"), params, state)
    for state, _ in itertools.islice(rounds, 12):
        keys = rng.RowKeys(state.keys, state.round, state.length)
        given, after = propose(
            params, keys, Context(state.tokens, state.length, state.sampling), state.draft
        )
        law = model.probs(
            params._replace(draft=params.draft[1]),
            Context(jnp.maximum(state.tokens, 0), state.length, state.sampling),
        )
        want = jax.vmap(lambda row, n: row[n - 1])(law, state.length)
        mine = np.asarray((after.winner == 1) & ~state.done)
        np.testing.assert_allclose(
            np.asarray(given.probs[:, 0])[mine], np.asarray(want)[mine], atol=1e-5
        )
        behind = np.asarray(state.length - state.draft.states[1].length)
        waited, asked = max(waited, int(behind[mine].max(initial=0))), asked + mine.sum()
    assert asked > 8 and waited > 3  # it was further behind than one block of its own


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
            found = exact.exact_law(target, both, accept.load("chain"), params, prompt, 2, rounds=2)
            truth = laws.sequence_law(target, params.target, prompt, 2)
            assert statistics.total_variation(found, truth) < 1e-12


@pytest.mark.fast
def test_a_drafter_that_fails_is_not_asked_any_more():
    wrong = scripted(2, [0, 0], lambda n: n > 0)
    table = jnp.zeros((VOCAB + 1, VOCAB, VOCAB)).at[..., 1].set(9.0)  # always says 1
    both = escalate.make(
        target, drafters=[wrong, scripted(1, [1], lambda n: n > 0)], least=0.4, decay=0.5
    )
    params = ModelParams(table, both.init_params(None))
    taken = []
    run(
        both,
        params,
        [[1], [2, 1]],
        step=lambda state, info: taken.append(np.asarray(state.draft.winner)),
    )
    assert [t.tolist() for t in taken[:4]] == [
        [0, 0],
        [0, 0],
        [1, 1],
        [1, 1],
    ]  # 1, 0.5, 0.25: below 0.4


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
    want, _ = run(plain, ModelParams(cases.table(0)), prompts)
    assert decode.outputs(state, lengths) == decode.outputs(want, lengths)
    keys = {"lookup": {"name": "prompt_lookup", "gamma": 2, "match": None}, "trie": {"nodes": 4}}
    assert drafters.make("escalate", target, drafters=keys).nodes == 4  # as a configuration says it


@pytest.mark.fast
def test_mistakes_are_named():
    model = {"model": draft, "params": cases.table(1)}
    for given, message in [
        ({}, "give at least one"),
        ("prompt_lookup", "escalate needs drafters to ask"),
        ({"lookup": {"name": "prompt_lokup"}}, "unknown drafter 'prompt_lokup'"),
        ({"prompt_lookup": {"gama": 3}}, "does not take the key 'gama'"),
        ({"lookup": 3}, "drafter lookup is 3; give its keys"),
        ({"none": {}}, "none of the drafters drafts anything"),
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
            escalate.make(target, drafters=given)
    with pytest.raises(UserError, match=r"least is 1; it must be a number in \[0, 1\)"):
        escalate.make(target, drafters={"prompt_lookup": {}}, least=1)
    mixed = [
        drafters.make("trie", target, nodes=2),
        drafters.make("draft_model", target, gaps=True, **model),
    ]
    both = escalate.make(target, drafters=mixed)
    with pytest.raises(UserError, match="every drafter must be deterministic"):
        run(both, ModelParams(cases.table(0), both.init_params(None)), [[0]], rule="recursive")


@pytest.mark.fast
def test_a_target_without_the_model_is_cheap():
    """Where every row has a lookup, the draft model does not run: its cache stays where it was."""
    always = scripted(2, [1, 1], lambda n: n > 0)
    model = drafters.make(
        "draft_model", tabular(VOCAB), model=draft, gamma=2, params=cases.table(1), gaps=True
    )
    both = escalate.make(target, drafters=[always, model])
    params = ModelParams(cases.table(0), both.init_params(None))
    state, _ = run(both, params, [[0, 1], [2]])
    assert np.asarray(state.draft.states[1].length).tolist() == [1, 0]  # as after prefill


@pytest.mark.fast
def test_who_proposes_nothing_still_learns():
    """A cold matrix behind a lookup that finds nothing: the round is its own, so that it has something to propose later."""
    never = scripted(1, [0], lambda n: n < 0)
    recycling = drafters.make("token_recycling", target, tree="2", top_k=2)
    both = escalate.make(target, drafters=[never, recycling])
    params = ModelParams(cases.table(0), both.init_params(None))
    alone = ModelParams(cases.table(0), recycling.init_params(None))
    state, lengths = run(both, params, [[0, 1], [2]], rule="recursive")
    same, _ = run(recycling, alone, [[0, 1], [2]], rule="recursive")
    np.testing.assert_array_equal(state.draft.states[1].matrix, same.draft.matrix)
    assert (np.asarray(same.draft.matrix) >= 0).any() and decode.outputs(
        state, lengths
    ) == decode.outputs(same, lengths)


@pytest.mark.fast
def test_nobody_runs_for_a_finished_row_and_texts_that_fit_fit():
    """A row that ended does not keep a costly drafter awake; and the slots of a wide neighbour are nobody's positions."""
    even = scripted(2, [0, 1], lambda n: n > 3)  # serves row 1, never the short text of row 0
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
    before = np.asarray(state.draft.states[2].length)
    *_, (state, _) = decode.stream(target, both, accept.load("chain"), params, state)
    assert np.asarray(state.length).tolist() == [1, 16]
    # It ran in the first round, when nobody had yet been seen to stand still, and never again.
    assert (np.asarray(state.draft.states[2].length) - before).max() <= 1


def test_a_part_guesses_with_the_targets_own_noise():
    """Seeded Jacobi inside of it guesses what it guesses alone."""
    alone = drafters.make("jacobi", target, gamma=2)
    both = escalate.make(target, drafters=[drafters.make("jacobi", target, gamma=2)])
    table = cases.table(0)
    prompts = [[0, 1], [2], [1, 1, 0]]
    want, _ = run(alone, ModelParams(table, {}), prompts, temperature=1.0, rule="match")
    got, _ = run(both, ModelParams(table, ({},)), prompts, temperature=1.0, rule="match")
    assert got.round == want.round and (got.tokens[:, :14] == want.tokens[:, :14]).all()
