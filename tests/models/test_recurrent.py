"""Recurrent layers: the rule against its recurrence, blocks against steps, and wrong blocks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mutants import recurrent as mistakes

from specjax import accept, decode, drafters, prompt, testing, tree
from specjax import cache as kv
from specjax.cache import RecurrentState, Updates
from specjax.errors import UserError
from specjax.models import lm, recurrent
from specjax.models.recurrent import Tokens
from specjax.testing import exact, loop

# 0 - 1 - 3 - 6, 0 - 2 - 4, 0 - 2 - 5: every node goes on from the state of its parent.
PARENTS = (-1, 0, 0, 1, 2, 2, 3)
PATHS, COUNTS = ((0, 1, 3, 6), (0, 2, 5, 0), (0, 2, 4, 0)), (4, 3, 0)
ROWS, SIZE, GROUPS, HEADS, KEY, VALUE = 3, len(PARENTS), 2, 4, 3, 5


DELTA, MAMBA = "qwen3_next", "nemotron_h"


@functools.cache
def hybrid(dtype="float32", family=DELTA):
    """A decoder with a recurrent layer and one with attention, and its parameters.

    The recurrent layer of Nemotron-H has no feed-forward part.
    """
    config = testing.tiny_config(family)
    config = dataclasses.replace(config, without_mlp=(0,) if family == MAMBA else ())
    params = jax.jit(scaled, static_argnums=(0, 1))(config, dtype)
    return lm.from_config(config, dtype), params


def scaled(config, dtype):
    params = lm.init_params(config, jax.random.key(0), dtype)
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    for layer in params["layers"].values():
        if "mamba" in layer:  # larger steps and slower decays, so that its output is the state's
            layer["mamba"]["dt_bias"] += 4
            layer["mamba"]["a_log"] -= 4
    return params


# The rule -------------------------------------------------------------------------------------


def drawn(size=SIZE, corrects=True):
    """Inputs of the recurrence and a state, in float64; ``corrects``: with beta."""
    draw = np.random.default_rng(0)
    q, k = (draw.normal(size=(ROWS, size, GROUPS, KEY)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = draw.normal(size=(ROWS, size, HEADS, VALUE))
    beta, decay = draw.uniform(size=(2, ROWS, size, HEADS))
    memory = draw.normal(size=(ROWS, HEADS, KEY, VALUE))
    tokens = Tokens(*map(jnp.asarray, (q, k, v, beta, -decay)))
    return tokens if corrects else tokens._replace(beta=None), jnp.asarray(memory)


def recurrence(tokens, memory, parents):
    """Outputs and the state after each node, one node and head at a time."""
    q, k, v, beta, decay = (None if part is None else np.asarray(part) for part in tokens)
    states = np.zeros((*v.shape[:3], KEY, VALUE))
    out = np.zeros(v.shape)
    for row, node, head in np.ndindex(v.shape[:3]):
        above = parents[node]
        state = np.asarray(memory)[row, head] if above < 0 else states[row, above, head]
        state = np.exp(decay[row, node, head]) * state
        key = k[row, node, head // (HEADS // GROUPS)]
        write = v[row, node, head]
        if beta is not None:
            write = beta[row, node, head] * (write - key @ state)
        states[row, node, head] = state + np.outer(key, write)
        out[row, node, head] = q[row, node, head // (HEADS // GROUPS)] @ states[row, node, head]
    return out, states


def in_parts(tokens, memory, parents, calls):
    """Outputs and updates of the rule, with the nodes fed in so many calls."""
    fed, outs = None, []
    for part in np.array_split(np.arange(len(parents)), calls):
        above = jnp.broadcast_to(jnp.asarray(parents[: part[-1] + 1]), (ROWS, part[-1] + 1))
        own = Tokens(*(None if array is None else array[:, part] for array in tokens))
        layout = tree.layout(above, len(part))
        out, values = recurrent.delta_rule(own, layout, memory, fed)
        inputs = jnp.zeros((ROWS, len(part), 1))
        new = Updates(own.k, values, own.decay, inputs)
        fed = new if fed is None else tree.join(fed, new)
        outs.append(out)
    return jnp.concatenate(outs, 1), fed


@pytest.mark.fast
@pytest.mark.parametrize("corrects", [True, False])
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("parents", [PARENTS, tuple(range(-1, SIZE - 1))], ids=["tree", "chain"])
def test_the_rule_is_its_recurrence(parents, calls, corrects):
    with jax.enable_x64(True):
        tokens, memory = drawn(corrects=corrects)
        expected, states = recurrence(tokens, memory, parents)

        @jax.jit
        def both(tokens, memory):
            out, block = in_parts(tokens, memory, parents, calls)
            state = RecurrentState(memory, jnp.zeros((ROWS, 3, 1)))
            path = jnp.asarray(PATHS if parents == PARENTS else [[0, 1, 2, 3]] * ROWS)
            kept, _ = tree.accepted(block, jnp.asarray(COUNTS), path)
            return out, kv.advanced(state, kept, jnp.asarray(COUNTS)).memory, path

        out, after, path = both(tokens, memory)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)
        for row, count in enumerate(COUNTS):
            right = states[row, path[row, count - 1]] if count else memory[row]
            np.testing.assert_allclose(after[row], right, rtol=0, atol=1e-13 if count else 0)


@pytest.mark.fast
def test_a_node_that_is_not_finite_reaches_its_descendants_alone():
    tokens, memory = drawn()
    value = np.array(tokens.v)
    value[1, 2, 0, 0] = np.inf
    tokens = tokens._replace(v=value)
    for calls in (1, 3):
        out, block = jax.jit(in_parts, static_argnums=(2, 3))(tokens, memory, PARENTS, calls)
        for array in (out, block.values):
            lost = ~np.isfinite(np.asarray(array)).all((2, 3))
            assert np.argwhere(lost).tolist() == [[1, 2], [1, 4], [1, 5]]


# Models ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [DELTA, MAMBA])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_hybrid_passes(dtype, family):
    report = testing.check_lm(*hybrid(dtype, family), progress=False)
    assert report.passed, str(report)


def test_the_state_is_float32():
    cache = jax.eval_shape(lambda: hybrid("bfloat16")[0].init_cache(2, 5))
    assert {state.memory.dtype for state in cache.states} == {jnp.dtype("float32")}
    assert {state.window.dtype for state in cache.states} == {jnp.dtype("bfloat16")}


TEXT, MORE = 9, 1
DRAW = np.random.default_rng(1)
WORDS, NODES, AFTER = (DRAW.integers(0, 32, (ROWS, size)) for size in (TEXT, SIZE, MORE))
LENGTHS = (TEXT, 1, 4)


def passes(model, params):
    """Logits of a tree after ragged prompts, and of steps after its commit; states.

    The states of row 2 before and after commits of count 0.
    """
    cache, lengths, counts = model.init_cache(ROWS, 40), jnp.asarray(LENGTHS), jnp.asarray(COUNTS)
    for start in (0, 5):
        piece = jnp.asarray(WORDS[:, start : start + 5])
        out, block = model.apply(params, piece, cache)
        cache = model.commit(cache, block, jnp.clip(lengths - start, 0, piece.shape[1]))
    before = jax.tree.map(lambda x: x[2], cache.states)
    layout = tree.layout(jnp.broadcast_to(jnp.asarray(PARENTS), NODES.shape))
    out, block = model.apply(params, jnp.asarray(NODES), cache, layout)
    kept, _ = tree.accepted(block, counts, jnp.asarray(PATHS))
    cache, logits = model.commit(cache, kept, counts), [out.logits]
    after = jax.tree.map(lambda x: x[2], cache.states)
    for at in range(MORE):
        out, block = model.apply(params, jnp.asarray(AFTER[:, at : at + 1]), cache)
        cache = model.commit(cache, block, jnp.ones(ROWS, jnp.int32))
        logits.append(out.logits)
    return jnp.concatenate(logits, 1), before, after


def path_to(node):
    return [] if node < 0 else [*path_to(PARENTS[node]), node]


@functools.cache
def truth(family):
    """The logits of ``passes``, of the same texts that are fed one token at a time."""
    model, params = hybrid(family=family)
    texts = []
    for row in range(ROWS):
        begin = WORDS[row, : LENGTHS[row]]
        texts += [[*begin, *NODES[row, path_to(node)]] for node in range(SIZE)]
        kept = NODES[row, list(PATHS[row][: COUNTS[row]])]
        texts += [[*begin, *kept, *AFTER[row, : at + 1]] for at in range(MORE)]
    width = max(map(len, texts))
    tokens = jnp.asarray([[*text, *[0] * (width - len(text))] for text in texts])

    @jax.jit
    def steps(params, tokens):
        def one(cache, token):
            out, block = model.apply(params, token[:, None], cache)
            return model.commit(cache, block, jnp.ones(len(token), jnp.int32)), out.logits[:, 0]

        return jax.lax.scan(one, model.init_cache(len(tokens), width), tokens.T)[1]

    last = np.asarray([len(text) - 1 for text in texts])
    logits = np.asarray(steps(params, tokens))[last, np.arange(len(texts))]
    return logits.reshape(ROWS, SIZE + MORE, -1)


def wrong(model, family):
    """The largest difference from the truth, and whether commits of count 0 move a state."""
    logits, before, after = jax.jit(functools.partial(passes, model))(hybrid(family=family)[1])
    right = truth(family)
    apart = np.abs(np.asarray(logits) - right).max() / np.abs(right).max()
    same = all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
    return apart if np.isfinite(apart) else np.inf, not same


@pytest.mark.parametrize("family", [DELTA, MAMBA])
def test_blocks_are_steps(family):
    apart, moved = wrong(hybrid(family=family)[0], family)
    assert apart < 1e-5 and not moved


# An update of Mamba-2 does not depend on the path.
_WITHOUT = {(MAMBA, "an update forgets the path before it")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family in (DELTA, MAMBA)
        for name in mistakes.MUTANTS
        if (family, name) not in _WITHOUT
    ],
)
def test_mutants_die(family, name, monkeypatch):
    truth(family)  # before anything is changed
    model = mistakes.MUTANTS[name](monkeypatch, hybrid(family=family)[0])
    apart, moved = wrong(model, family)
    assert apart > 1e-4 or moved, f"{name}: {apart:.1e}"


def test_documents_in_a_row_do_not_see_each_other():
    """Outputs and gradients of packed rows are those of the documents alone."""
    model, params = hybrid()
    tokens = jnp.asarray(DRAW.integers(0, 32, (1, 12)))
    segments = jnp.asarray([[0] * 5 + [1] * 7])

    def loss(params, parts):
        outs = [lm.forward(model, params, *part).logits for part in parts]
        chosen = jax.nn.log_softmax(jnp.concatenate(outs, 1))[0, jnp.arange(12), tokens[0]]
        return chosen.sum()

    both = jax.jit(
        lambda params: [
            jax.value_and_grad(loss)(params, parts)
            for parts in ([(tokens, segments)], [(tokens[:, :5],), (tokens[:, 5:],)])
        ]
    )(params)
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        scale = 1e-5 + float(np.abs(b).max())
        np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-4)


# Law and rounds -------------------------------------------------------------------------------


@pytest.mark.xdist_group("enumeration")
@pytest.mark.parametrize(
    ("name", "rule", "family"),
    [
        ("chain", "chain", DELTA),
        ("chain", "chain", MAMBA),
        pytest.param("without_replacement", "traversal", DELTA, marks=pytest.mark.slow),
        pytest.param("without_replacement", "traversal", MAMBA, marks=pytest.mark.slow),
    ],
)
def test_the_law_of_rounds_is_the_targets(name, rule, family):
    """By enumeration in float64, with hybrids as target and draft model."""
    with jax.enable_x64(True):
        case = cases.real(name, family, 2, "float64")
        found = exact.enumerated(
            case.target, case.drafter, accept.load(rule), case.params, cases.PROMPT, 3, rounds=2
        )
    assert testing.total_variation(found.law, found.truth) < 1e-12


NEW = 14
# Drafters that choose among the keys and values of the target, or have layers of its kind.
REFUSED = {name for name in cases.NAMES if name.startswith(("magicdec", "triforce"))}
REFUSED |= {"mtp", "mtp tree", "mtp fixed"}


def finished(case, loop_of):
    """The state after all tokens of ragged rows, two of them greedy."""
    settings: dict[str, Any] = {"temperature": np.array([0.0, 0.0, 1.0, 0.7])}
    prompts = [[0, 1, 2, 0, 1], [2], [1, 1], [0, 2, 1]]
    state = loop.begin(case.target, case.drafter, case.params, prompts, NEW, 3, **settings)
    return loop_of(state)


@pytest.mark.slow
@pytest.mark.parametrize("family", [DELTA, MAMBA])
@pytest.mark.parametrize("name", [name for name in cases.NAMES if name not in REFUSED])
def test_every_drafter_drafts_for_a_hybrid(name, family):
    """Greedy texts, and the cache after a loop, which is that of its text fed at once."""
    case = cases.real(name, family, 2)
    rule = accept.load(accept.default_rule(case.drafter))
    pair = (case.target, case.drafter, rule, case.params)
    state = finished(case, lambda state: decode.generate(*pair, state, max_steps=NEW)[0])
    assert np.asarray(state.done).all() and (np.asarray(state.failed) == -1).all()
    plain = case._replace(drafter=drafters.make("none", case.target))
    first = (case.target, case.params)
    greedy = finished(plain, lambda state: decode.autoregressive(*first, state, max_steps=NEW))
    if rule.lossless_class != "L3":
        size = int(greedy.length.max())
        np.testing.assert_array_equal(state.tokens[:2, :size], greedy.tokens[:2, :size])
    cache = case.target.init_cache(4, state.tokens.shape[1])
    tokens = jnp.maximum(state.tokens, 0)
    fed: Any = prompt.feed(case.target, case.params.target, tokens, state.length - 1, cache, 7)
    cache = fed[1]
    for own, right in zip(state.cache.states, cache.states, strict=True):
        for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_drafters_are_refused(name):
    with pytest.raises(UserError, match="recurrent"):
        cases.real(name, "qwen3_next", 2)
