"""Early exit: everything accepted at the last layer, output law, cost, wrong drafters, errors."""

from __future__ import annotations

import functools
import re
import time

import cases
import growth_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exit_cases import PROMPTS, error_of_probs, largest_error, outputs, tiny, with_inner
from internals import self_speculation_own_cache as _own_cache
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import drafter_checks, loop
from specjax.types import ModelParams, Sublayers

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "early_exit": ("early_exit", {"exit_layer": 1, "gamma": 2}, ()),
    "early_exit tree": (
        "early_exit",
        {"exit_layer": 1, "tree": "2x1", "siblings": "without_replacement"},
        (),
    ),
}

SHAPES = {
    "chain": ({"gamma": 3}, "chain"),
    "tree": ({"tree": "2x2x1", "siblings": "without_replacement"}, "recursive"),
    "iid tree": ({"tree": "2x1", "siblings": "iid"}, "traversal"),
    "top_k tree": ({"tree": "2x2x1", "siblings": "top_k"}, "deterministic"),
    "dynamic": ({"tree": "dynamic", "nodes": 6, "depth": 3, "top_k": 2}, "deterministic"),
    "stopped": ({"gamma": 4, "control": "threshold:0.3"}, "block"),
}


def generated(target, params, drafter, rule, temperature, new=16):
    state = loop.begin(target, drafter, params, PROMPTS, new, 0, temperature=temperature)
    state, records = decode.generate(
        target, drafter, accept.load(rule), params, state, max_steps=new
    )
    decode.check(state)
    return np.asarray(state.tokens), jax.tree.map(np.asarray, records)


# The last layer -------------------------------------------------------------------------------


@pytest.mark.parametrize("label", by_default(("chain", "tree", "top_k tree"), ("tree",)))
def test_an_exit_at_the_last_layer_accepts_everything(label):
    """Greedy and sampled rows in one ragged batch; a round commits a whole path and the bonus."""
    target, params = tiny()
    keys, rule = SHAPES[label]
    drafter = drafters.make("early_exit", target, exit_layer=3, **keys)
    # A deterministic tree has the sampled token only if it is one of the likeliest.
    temperature = 0.0 if label == "top_k tree" else [0.0, 1.0, 0.7, 1.0]
    _, records = generated(target, ModelParams(params), drafter, rule, temperature)
    ran = records.emitted > 0
    assert (records.accepted[ran] == drafter.longest).all()
    assert ran.sum(0).tolist() == [-(-16 // (drafter.longest + 1))] * len(PROMPTS)


# The text and its law -------------------------------------------------------------------------

FAMILIES = ("llama", "gemma3_text", "gpt2", "gpt_neox")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("label", SHAPES)
def test_greedy_text_is_plain_greedy_text(family, label):
    target, params = tiny(family)
    keys, rule = SHAPES[label]
    pair = ModelParams(params)
    plain = drafters.make("none", target)
    drafter = drafters.make("early_exit", target, exit_layer=1, **keys)
    texts = [
        generated(target, pair, each, chosen, 0.0)[0]
        for each, chosen in ((plain, "chain"), (drafter, rule))
    ]
    ends = [len(p) + 16 for p in PROMPTS]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(texts[0][row, :end], texts[1][row, :end])


@pytest.mark.slow
@pytest.mark.parametrize("label", growth_cases.SHAPES)
def test_exact_law(label):
    """Enumerated in float64, for every shape of a draft."""
    keys, rule = growth_cases.SHAPES[label]
    target = testing.tabular(cases.VOCAB)
    drafter = drafters.make("early_exit", target, exit_layer=2, **keys)
    with jax.enable_x64(True):
        params = ModelParams(cases.table(0))
        assert growth_cases.law_error(drafter, rule, target, params) < growth_cases.EXACT


# What is drafted ------------------------------------------------------------------------------


def expected_probs(params, text):
    """f[T,V]: softmax(head(norm(output of layer 1))), from one pass of the whole model."""
    logits = outputs(params, 1, text)[2].astype(np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_a_draft_has_the_probs_of_the_first_layers():
    target, params = tiny()
    drafter = drafters.make("early_exit", target, exit_layer=2, gamma=3)
    reference = functools.partial(expected_probs, params)
    assert largest_error(drafter, ModelParams(params), reference) < 1e-4


def one_slot_too_long(inner):
    """Reads the cache one slot too far: a rejected token's keys, or zeros."""

    def view(params, context, kept):
        both, kept = inner.view(params, context, kept)
        cache = both.part
        return both._replace(part=cache.replace(length=cache.length + 1)), kept

    return inner._replace(view=view)


def one_slot_too_short(inner):
    """Does not read the newest committed token."""

    def view(params, context, kept):
        both, kept = inner.view(params, context, kept)
        shorter = jnp.maximum(both.part.length - 1, 0)
        return both._replace(part=both.part.replace(length=shorter)), kept

    return inner._replace(view=view)


def the_next_rows_cache(inner):
    """Reads the cache of another row."""

    def view(params, context, kept):
        both, kept = inner.view(params, context, kept)
        cache = both.part
        rolled = jax.tree.map(lambda x: jnp.roll(x, 1, 0), (cache.k, cache.v))
        return both._replace(part=cache.replace(k=rolled[0], v=rolled[1])), kept

    return inner._replace(view=view)


def forgets_the_pending_token(target, **keys):
    """The draft's nodes do not attend to the pending token: its memory is zeros."""
    begin = _own_cache._begin

    def forgetful(*args):
        begun = begin(*args)
        return begun._replace(memory=jax.tree.map(jnp.zeros_like, begun.memory))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_own_cache, "_begin", forgetful)
        return drafters.make("early_exit", target, **keys)


def other_layers(target, **keys):
    """Computes the last layers instead of the first ones."""
    part = Sublayers((1, 2), (1, 2))
    wrong = target._replace(inside=target.inside._replace(part=lambda _: target.inside.part(part)))
    return drafters.make("early_exit", wrong, **keys)


def without_feed_forward(target, **keys):
    """Leaves out the feed-forward part of the last layer that is computed."""
    part = Sublayers((0, 1), (0,))
    return drafters.make(
        "early_exit",
        target._replace(inside=target.inside._replace(part=lambda _: target.inside.part(part))),
        **keys,
    )


MUTANTS = {
    "one slot too long": with_inner(one_slot_too_long),
    "one slot too short": with_inner(one_slot_too_short),
    "the next row's cache": with_inner(the_next_rows_cache),
    "forgets the pending token": forgets_the_pending_token,
    "other layers": other_layers,
    "without feed-forward": without_feed_forward,
}


@pytest.mark.parametrize("name", by_default(MUTANTS, ("one slot too long", "other layers")))
def test_wrong_drafts_are_detected(name):
    target, params = tiny()
    drafter = MUTANTS[name](target, exit_layer=2, gamma=3)
    reference = functools.partial(expected_probs, params)
    assert largest_error(drafter, ModelParams(params), reference) > 1e-2


def test_probs_of_a_text():
    """``Drafter.probs`` are those of the first draft token, in every round and at any settings."""
    target, params = tiny()
    drafter = drafters.make("early_exit", target, exit_layer=2, gamma=2)
    assert error_of_probs(drafter, ModelParams(params)) < 1e-4
    table, logits = testing.tabular(3), cases.table(0, 3)
    drafter = drafters.make("early_exit", table, exit_layer=2, gamma=2)
    finding = drafter_checks.probs_of_text(drafter, table, ModelParams(logits))
    assert finding.passed, str(finding)


# What it costs --------------------------------------------------------------------------------


def copies(target, params, drafter):
    """How many copies of a buffer of the target's cache the compiled loop has."""
    state = loop.begin(target, drafter, params, PROMPTS, 16, 0)
    shape = state.cache.k[0].shape
    static = {"max_steps": 16, "verify_widths": None}
    lowered = decode._generate.lower(
        target, drafter, accept.load("chain"), params, state, None, **static
    )
    text = lowered.compile().as_text()
    return len(re.findall(rf"= f32\[{','.join(map(str, shape))}\]\S* copy\(", text))


@pytest.mark.parametrize("reuse", by_default((False, True), (False,)))
def test_the_draft_copies_no_cache(reuse):
    """The compiled loop has as many copies of a cache buffer as plain decoding's."""
    target, params = tiny()
    # As many slots, so that buffers have one shape.
    drafter = drafters.make("early_exit", target, exit_layer=2, gamma=3, reuse=reuse)
    lookup = drafters.make("prompt_lookup", target, gamma=3, min_ngram=1, max_ngram=2)
    own, other = (copies(target, ModelParams(params), each) for each in (drafter, lookup))
    assert own <= other, (own, other)


@pytest.mark.slow
def test_a_draft_step_costs_its_share_of_a_pass():
    """E layers of L cost E / L of a pass within 10 %, where the head is small."""
    config = testing.tiny_config(vocab_size=64, layers=12, width=256)
    target, params = lm.from_config(config), lm.init_params(config, jax.random.key(0))
    cache = target.init_cache(1, 64).replace(length=jnp.full((1,), 48, jnp.int32))

    def timed(model):
        @jax.jit
        def run(params, cache):
            def body(_, token):
                logits = model.apply(params, token, cache)[0].logits
                return (token + sampling.argmax(logits[:, -1:])) % 64

            return jax.lax.fori_loop(0, 200, body, jnp.ones((1, 1), jnp.int32))

        run(params, cache).block_until_ready()

        def once():
            began = time.perf_counter()
            run(params, cache).block_until_ready()
            return time.perf_counter() - began

        return once

    layers = (3, 6, 12)
    runs = [timed(target.with_part(Sublayers(tuple(range(n)), tuple(range(n))))) for n in layers]
    samples = np.array([[each() for each in runs] for _ in range(9)])
    shares = np.median(samples, 0) / np.median(samples[:, -1])
    np.testing.assert_allclose(shares, np.array(layers) / 12, rtol=0.1)


# Bad input ------------------------------------------------------------------------------------

WRONG = {
    "exit_layer is 4, and lm has 3 layers; give 1 to 3": {"exit_layer": 4},
    "exit_layer is -1; it must be a whole number >= 0": {"exit_layer": -1},
    "early_exit was given gamma=2, a chain, and tree='2x1'": {"gamma": 2, "tree": "2x1"},
    "early_exit was given gamma=2, a chain, and nodes=4": {"gamma": 2, "nodes": 4},
    "gamma is 0; it must be a whole number >= 1": {"gamma": 0},
    "adapter is 'mlp'; it must be one of": {"adapter": "mlp"},
    "head is 'mine'; it must be one of": {"head": "mine"},
    "head_dim is 4 and has no effect on the adapter 'none'": {"head_dim": 4},
    "head_dim is 3; rotary positions need an even number": {"adapter": "layer", "head_dim": 3},
    "early_exit has no measured accuracies to search a tree": {"nodes": 5},
    "early_exit has a dtype, in which files are read, and no files": {"dtype": "float32"},
    "depth is 3 and has no effect on a tree of a fixed shape": {"depth": 3},
}


@pytest.mark.fast
@pytest.mark.parametrize("message", WRONG)
def test_wrong_keys_are_one_line(message):
    target, _ = tiny()
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        drafters.make("early_exit", target, **WRONG[message])
    assert "\n" not in str(caught.value)


@pytest.mark.fast
def test_a_model_without_layers_is_refused():
    model = tiny()[0]
    target = model._replace(inside=model.inside._replace(part=None))
    with pytest.raises(UserError, match="a draft with a part of the layers of lm is asked for"):
        drafters.make("early_exit", target, exit_layer=1)
    drafter = drafters.make("early_exit", tiny()[0], adapter="linear")
    with pytest.raises(UserError, match="early_exit has no parameters yet; give model="):
        drafter.init_params(rng.row_keys(0, 1)[0])


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "early_exit", "exit_layer": 1},
        {"name": "layer_skip", "skip_attention": "1", "skip_mlp": "0"},
        {"name": "pass", "params": {"look_ahead": jnp.zeros((2, 32))}},
    ],
    ids=lambda keys: keys["name"],
)
def test_inside_the_rounds_of_a_draft_model_it_is_refused(keys):
    """There the cache is that of the draft model, which has other layers."""
    (target, params), (model, own) = tiny(), testing.tiny("llama", 1)
    drafter = drafters.make("staged", target, model=model, params=own, drafters={"inner": keys})
    pair = ModelParams(params, drafter.init_params(rng.row_keys(0, 1)[0]))
    with pytest.raises(UserError, match=f"{keys['name']} reads the target's weights or its cache"):
        state = loop.begin(target, drafter, pair, PROMPTS, 8, 0)
        jax.eval_shape(lambda: loop.propose(drafter, pair, state))


@pytest.mark.fast
def test_without_a_key_a_quarter_of_the_layers_is_computed():
    for layers, expected in ((2, 1), (4, 1), (9, 2)):
        target = lm.from_config(testing.tiny_config(layers=layers))
        facts = dict(drafters.make("early_exit", target).training.facts)
        assert facts == {"exit_layer": expected}
