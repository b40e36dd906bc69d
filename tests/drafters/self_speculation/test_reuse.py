"""Verification that goes on from the layers of a draft: logits, texts, law, mutants, cost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import cases
import decode_cases
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exit_cases import PROMPTS
from marks import by_default

from specjax import accept, drafters, prompt, step, testing, tree
from specjax.bench import timing
from specjax.errors import UserError
from specjax.models import attention, lm, overlay
from specjax.rng import RowKeys
from specjax.testing import loop
from specjax.types import LowerLayers, ModelParams, Sublayers

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "early_exit reuse": ("early_exit", {"exit_layer": 1, "gamma": 2, "reuse": True}, ("chain",)),
}

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "gemma3_text", "olmo2")
LAYERS, WINDOW = 3, 6
# The largest difference of logits and keys that are equal but for rounding.
EXACT = {"float32": 1e-4, "float64": 1e-10}


@functools.cache
def model(family, dtype="float32"):
    """(LM, params) of a random decoder; Gemma 2's windows alternate and are shorter than texts."""
    config = testing.tiny_config(family, layers=LAYERS)
    if family == "gemma2":
        config = dataclasses.replace(config, windows=(WINDOW, None, WINDOW))
    params = lm.init_params(config, jax.random.key(0), jnp.dtype(dtype))
    params = jax.tree.map(lambda x: x * 8 if x.ndim > 1 else x, params)
    return lm.from_config(config, jnp.dtype(dtype)), params


@contextlib.contextmanager
def computed_in(dtype):
    """In float64 the scores of the attention are float64 too; the models' are float32."""
    einsum = jnp.einsum

    def wide(*args, preferred_element_type=None, **keys):
        return einsum(*args, **keys)

    with jax.enable_x64(dtype == "float64"), pytest.MonkeyPatch.context() as patch:
        if dtype == "float64":
            patch.setattr(attention.jnp, "einsum", wide)
        yield


def largest(ours, theirs):
    """The largest difference of two (Output, KVBlock), but for the float32 ``KVBlock.output``."""
    pairs = [(out, (block.k, block.v)) for out, block in (ours, theirs)]
    apart = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), *pairs)
    return jnp.stack(jax.tree.leaves(apart)).max()


# A pass --------------------------------------------------------------------------------------

PARENTS = (-1, 0, 0, 1, 2)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def pass_difference(target, count, known, shape, params, cache, tokens):
    """The largest difference between a pass from the output of layer ``count`` - 1 and a whole one.

    ``known`` tokens have passed the first layers, fed one after another.
    """
    layout, taps = None, tuple(range(count - 1, LAYERS))
    if shape == "tree":
        layout = tree.layout(jnp.broadcast_to(jnp.asarray(PARENTS), tokens.shape))
    whole = target.with_taps(taps).apply(params, tokens, cache, layout)
    every = tuple(range(count))
    part = target.with_part(Sublayers(every, every)).with_taps((count - 1,))
    parts = []
    for place in range(known):
        block = tree.join(*(own for _, own in parts)) if parts else None
        one = layout and layout.replace(
            visible=layout.visible[:, place : place + 1, : place + 1],
            depth=layout.depth[:, : place + 1],
        )
        out, own = part.apply(params, tokens[:, place : place + 1], cache, one, block)
        parts.append((out.taps[0], own))
    hidden, block = tree.join(*parts)
    lower = LowerLayers(hidden, block, count)
    ours = target.with_lower(taps).apply((params, lower), tokens, cache, layout)
    return largest(whole, ours)


# (layers, tokens that have passed them, tokens of the pass, shape)
PASSES = ((2, 3, 5, "tree"), (1, 4, 5, "chain"), (3, 4, 5, "chain"), (2, 4, 3, "chain"))
TEXT = 11


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", range(len(PASSES)))
def test_a_pass_from_a_layer_is_the_whole_pass(shape, family, dtype):
    """Logits, taps, keys and values, after ragged texts longer than a window."""
    count, known, size, kind = PASSES[shape]
    with computed_in(dtype):
        target, params = model(family, dtype)
        draw = np.random.default_rng(0)
        tokens = jnp.asarray(draw.integers(0, 32, (3, TEXT + size)), jnp.int32)
        lengths = jnp.asarray([TEXT, 2, 7], jnp.int32)
        _, cache = prompt.feed(
            target, params, tokens[:, :TEXT], lengths, target.init_cache(3, 20), TEXT
        )
        apart = pass_difference(target, count, known, kind, params, cache, tokens[:, -size:])
        assert apart < EXACT[dtype]


# Rounds --------------------------------------------------------------------------------------

# Label -> keys of a drafter.
KEYS = {
    "chain": {"exit_layer": 2, "gamma": 3},
    "one token": {"exit_layer": 1, "gamma": 1},
    "all layers": {"exit_layer": 3, "gamma": 3},
    "stopped": {"exit_layer": 2, "gamma": 4, "control": "threshold:0.2"},
    "linear": {"exit_layer": 2, "gamma": 3, "adapter": "linear"},
    "layer": {"exit_layer": 1, "gamma": 3, "adapter": "layer"},
}


def made(label, family="llama", dtype="float32", reuse=True):
    """(target, drafter, params)."""
    target, params = model(family, dtype)
    keys = KEYS[label] | {"reuse": reuse}
    if "adapter" in keys:
        drafter = cases.random_heads("early_exit", target, params, scale=0.3, **keys)
    else:
        drafter = drafters.make("early_exit", target, **keys)
    return target, drafter, ModelParams(params, drafter.init_params(params))


@functools.partial(jax.jit, static_argnums=(0, 1))
def one_round(target, drafter, params, state):
    """(next state, draft tokens accepted, how far its logits and block are from a whole pass's)."""
    keys = RowKeys(state.keys, state.round, state.length, nodes=drafter.nodes)
    draft, own = step.propose(target, drafter, params, state, keys)
    state = state.replace(draft=own)
    scored = step.score(target, drafter, params, state, draft)
    tokens = jnp.concatenate([step.context_of(state).pending[:, None], draft.tokens], 1)
    whole = drafter.tapped(target).apply(params.target, tokens, state.cache)
    # What a pass computes for nodes that do not exist has no meaning.
    exist = jnp.pad(tree.exists(draft.valid, None), ((0, 0), (1, 0)), constant_values=True)
    apart = largest(*(tree.mask(x, exist) for x in (whole, (scored.out, scored.block))))
    rule = accept.load("chain")
    fixed = step.Round(target, drafter, rule, keys)
    after, info = step.decide(fixed, params, state, draft, scored)
    return after, info.accepted.sum(), apart


def largest_difference(target, drafter, params, number=12):
    """Over the rounds of a ragged batch of greedy and sampled rows."""
    temperature = [0.0, 1.0, 0.7, 1.0]
    state = loop.begin(target, drafter, params, PROMPTS, 30, 0, temperature=temperature)
    worst, total = 0.0, 0
    for _ in range(number):
        state, accepted, apart = one_round(target, drafter, params, state)
        worst, total = max(worst, float(apart)), total + int(accepted)
    assert total, "no draft token was accepted: later rounds show nothing"
    return worst


ROUNDS = [("stopped", "gemma2", "float64")]
ROUNDS += [(label, "llama", dtype) for label in KEYS for dtype in EXACT]
ROUNDS += [("chain", family, "float32") for family in FAMILIES[1:]]


@pytest.mark.parametrize(("label", "family", "dtype"), by_default(ROUNDS, ROUNDS[:1]))
def test_a_round_scores_as_the_whole_pass(label, family, dtype):
    """Also where rows stop early, and with adapters."""
    with computed_in(dtype):
        assert largest_difference(*made(label, family, dtype)) < EXACT[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "label"), [(1, "stopped"), *((5, label) for label in KEYS)])
def test_texts_are_those_without_reuse(rows, label):
    """Greedy and sampled, with stops and limits; at batch 1 rounds verify several widths."""
    target, drafter, params = made(label)
    other = made(label, reuse=False)[1]

    def run(drafter, end=None):
        return decode_cases.speculate(
            target,
            drafter,
            "chain",
            params,
            decode_cases.PROMPTS[:rows],
            new=jnp.asarray([30, 1, 17, 40, 8])[:rows],
            temperature=[0.0, 1.0, 0.7, 1.3, 0.0][:rows],
            eos_id=end,
        )

    end = run(other)[0][0][12]
    ours, theirs = run(drafter, end), run(other, end)
    assert ours[0] == theirs[0] and len(ours[0][0]) <= 13
    jax.tree.map(np.testing.assert_array_equal, ours[2], theirs[2])


# The law --------------------------------------------------------------------------------------

LAWS = {
    "chain": ({"exit_layer": 2, "gamma": 2}, "chain"),
    "block": ({"exit_layer": 1, "gamma": 3}, "block"),
    "greedy drafts": ({"exit_layer": 2, "tree": "chain:2", "siblings": "top_k"}, "chain"),
    "stopped": ({"exit_layer": 2, "gamma": 2, "control": growth_cases.CONTROL}, "chain"),
}


def law_error(label, change=lambda drafter: drafter):
    keys, rule = LAWS[label]
    target = testing.tabular(cases.VOCAB)
    drafter = change(drafters.make("early_exit", target, reuse=True, **keys))
    with jax.enable_x64(True):
        return growth_cases.law_error(drafter, rule, target, ModelParams(cases.table(0)))


@pytest.mark.slow
@pytest.mark.parametrize("label", LAWS)
def test_exact_law(label):
    """Enumerated in float64; the table's logits come from what the draft hands over."""
    assert law_error(label) < growth_cases.EXACT


# Mutants --------------------------------------------------------------------------------------


def hidden_states_of_the_node_before(drafter):
    def lower(state):
        known = drafter.rare.lower(state)
        return known.replace(hidden=jnp.concatenate([known.hidden[:, :1], known.hidden[:, :-1]], 1))

    return drafter._replace(rare=drafter.rare._replace(lower=lower))


def keys_of_the_round_before(drafter):
    def init(*args):
        state = drafter.init(*args)
        return state, state.block

    def propose(params, keys, context, state):
        draft, new = drafter.propose(params, keys, context, state[0])
        return draft, (new, state[0].block)

    def update(params, state, *args):
        return drafter.update(params, state[0], *args), state[1]

    def lower(state):
        before = drafter.rare.lower(state[0].replace(block=state[1]))
        return drafter.rare.lower(state[0]).replace(block=before.block)

    return drafter._replace(
        init=init, propose=propose, update=update, rare=drafter.rare._replace(lower=lower)
    )


def last_token_without_the_lower_layers(drafter):
    def lower(state):
        known = drafter.rare.lower(state)
        hidden, block = tree.sized((known.hidden, known.block), drafter.nodes + 1)
        return known.replace(hidden=hidden, block=block)

    return drafter._replace(rare=drafter.rare._replace(lower=lower))


MUTANTS = (
    hidden_states_of_the_node_before,
    keys_of_the_round_before,
    last_token_without_the_lower_layers,
)


@pytest.mark.parametrize("change", MUTANTS)
def test_mutants_break_the_law(change):
    assert law_error("chain", change) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("change", MUTANTS)
def test_mutants_have_other_logits(change):
    target, drafter, params = made("chain")
    assert largest_difference(target, change(drafter), params) > 1e-2


# Cost -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_pass_computes_the_first_layers_for_one_token():
    """By the compiler's count: of 5 tokens in 4 layers, 4 tokens do not pass 2 layers again."""
    config = testing.tiny_config(vocab_size=8, layers=4, width=128)
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    pair, flops = ModelParams(params), []
    for reuse in (False, True):
        drafter = drafters.make("early_exit", target, exit_layer=2, gamma=4, reuse=reuse)
        state = loop.begin(target, drafter, pair, [[1, 2]], 8, 0)
        draft = jax.eval_shape(functools.partial(loop.propose, drafter), pair, state)
        score = jax.jit(step.score, static_argnums=(0, 1))
        program = score.lower(target, drafter, pair, state, draft).compile()
        flops.append(program.cost_analysis()["flops"])
        assert timing.of_verify(target, drafter, 5).sample(pair, state) > 0
    assert flops[1] / flops[0] == pytest.approx(12 / 20, abs=0.05)


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.fast
def test_wrong_uses_are_one_line():
    target, params = model("llama")
    table, passed = testing.tabular(3), target.with_lower((0,)).apply
    wrong = {
        "reuse is True and the draft is a tree": lambda: drafters.make(
            "early_exit", target, exit_layer=1, tree="2x1", reuse=True
        ),
        "tabular is asked for, and it cannot begin above a layer": lambda: drafters.make(
            "early_exit",
            table._replace(inside=table.inside._replace(above=None)),
            exit_layer=1,
            reuse=True,
        ),
        "early_exit with reuse is a drafter inside another one": lambda: drafters.make(
            "escalate", table, drafters={"early_exit": {"exit_layer": 1, "reuse": True}}
        ),
        "cannot begin above a layer": overlay.overlay(target).with_lower,
        "taps are (0,), and the pass goes on from the output of layer 1": lambda: passed(
            (params, LowerLayers(jnp.zeros((1, 1, 32)), (), 2)),
            jnp.zeros((1, 2), jnp.int32),
            target.init_cache(1, 4),
        ),
    }
    for message, use in wrong.items():
        with pytest.raises(UserError, match=re.escape(message)) as caught:
            use()
        assert "\n" not in str(caught.value)
