"""Verification: how many tokens a round verifies, and what it leaves unchanged."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import accept, decode, drafters, rng, sampling, testing, tree
from specjax.data import datastore
from specjax.drafters import none
from specjax.errors import UserError
from specjax.models import lm
from specjax.types import DETERMINISTIC, Draft, Drafter, ModelParams

VOCAB = 6
TEXTS = [[1, 2, 3, 1, 2, 3, 1, 2], [4, 5, 0], [2, 2, 2, 2, 2]]
SLOW = ("none", "draft_model", "medusa")
# test_widths_detect of tests/testing/test_mutants.py has token_recycling by default.
QUICK = ()


def begin(target, drafter, params, texts, temperature, new=24):
    packed, lengths = decode.pack_prompts(texts, 8)
    return decode.prefill(
        target,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(3, len(texts)),
        max_len=8 + new,
        limit=lengths + new,
        sampling=sampling.make_sampling(len(texts), temperature),
    )


def run(target, drafter, rule, params, texts, temperature, widths):
    state = begin(target, drafter, params, texts, temperature)
    state, records = decode.generate(
        target, drafter, accept.load(rule), params, state, max_steps=40, verify_widths=widths
    )
    decode.check(state)
    return jax.device_get((state, records))


@functools.cache
def target():
    return testing.tabular(VOCAB)


def cases():
    texts = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
    store = datastore.build([texts])
    nested = [
        drafters.make("prompt_lookup", target(), gamma=4, min_ngram=2),
        drafters.make("rest", target(), nodes=6, depth=3, datastore=store),
        drafters.make("lookahead", target(), window=2, ngram=3, candidates=2),
    ]
    keys = {
        "prompt_lookup": {"gamma": 5},
        "sam": {"gamma": 5},
        "llma": {"gamma": 4},
        "trie": {"nodes": 6, "depth": 3},
        "suffix": {"nodes": 6, "depth": 3},
        "token_recycling": {"tree": "2x2x1", "top_k": 2},
        "lookahead": {"window": 2, "ngram": 3, "candidates": 2},
        "jacobi": {"gamma": 3},
    }
    made = {name: drafters.make(name, target(), **own) for name, own in keys.items()}
    made["escalate"] = drafters.make("escalate", target(), drafters=nested)
    slow = {name: () if name in QUICK else pytest.mark.slow for name in made}
    return [pytest.param(each, id=name, marks=slow[name]) for name, each in made.items()]


@pytest.mark.parametrize("drafter", cases())
def test_the_width_does_not_change_the_text(drafter):
    """Text, state of the drafter and counts are those of verifying the whole draft."""
    params = ModelParams(testing.random_table(0, VOCAB, 3.0), drafter.init_params(None))
    rule = "recursive" if drafter.siblings == "chain" else "deterministic"
    for texts, temperature, widths in ((TEXTS[:1], 0.0, (1, 2, 4)), (TEXTS, 0.8, None)):
        whole, full = run(target(), drafter, rule, params, texts, temperature, ())
        state, few = run(target(), drafter, rule, params, texts, temperature, widths)
        np.testing.assert_array_equal(whole.tokens, state.tokens)
        jax.tree.map(np.testing.assert_array_equal, whole.draft, state.draft)
        for name in ("emitted", "accepted", "drafted", "tested"):
            np.testing.assert_array_equal(getattr(full, name), getattr(few, name))
        ran = full.emitted > 0
        assert (full.verified[ran] == drafter.nodes + 1).all() and (full.verified[~ran] == 0).all()
        assert set(few.verified[ran]) <= set(tree.widths(drafter, widths))
        if not drafter.whole and drafter.name not in ("lookahead", "escalate"):
            assert few.verified[ran].min() < drafter.nodes + 1


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["chain", "block", "match", "recursive"])
def test_every_rule_gives_the_same_text_at_every_width(rule):
    drafter = drafters.make("prompt_lookup", target(), gamma=5)
    params = ModelParams(testing.random_table(1, VOCAB, 2.0))
    whole, _ = run(target(), drafter, rule, params, TEXTS, [1.0, 0.0, 0.7], ())
    state, _ = run(target(), drafter, rule, params, TEXTS, [1.0, 0.0, 0.7], (1, 2, 3, 4, 5))
    np.testing.assert_array_equal(whole.tokens, state.tokens)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ("fixed:3", (1, 4)),
        ("fixed:20", (1, 9)),  # longer than the drafter's own drafts
        ("goodput:most=6", (1, 2, 3, 4, 5, 7)),
        ("bandit:most=4", (1, 2, 3, 4, 5)),
        ("heuristic:3", (1, 2, 4, 9)),  # any length
    ],
)
def test_widths_of_a_controller(control, expected):
    """Chains verify what the controller can choose; a tree's levels have several nodes."""
    keys = {"model": target(), "control": control}
    assert tree.widths(drafters.make("draft_model", target(), gamma=8, **keys)) == expected
    trees = drafters.make("draft_tree", target(), tree="2x2x1x1", **keys)
    assert tree.widths(trees)[-1] == trees.nodes + 1
    # A match of a lookup may be shorter than the controller allows.
    looked = set(tree.widths(drafters.make("prompt_lookup", target(), gamma=8, control=control)))
    assert {*expected} <= looked and max(looked) == max(expected)
    # Drafts with further nodes, which the target must be fed.
    further = drafters.make("draft_model", target(), gamma=8, **keys)._replace(nodes=12, depth=8)
    assert tree.widths(further)[-1] == 13


def test_widths():
    short = drafters.make("prompt_lookup", target(), gamma=5, match="latest")
    long = drafters.make("prompt_lookup", target(), gamma=10, match="latest")
    # A continuation of the first occurrence is hardly ever cut by the end of the text.
    for own in ({}, {"match": "latest", "periodic": True}, {"rule": "original", "match": "latest"}):
        assert tree.widths(drafters.make("prompt_lookup", target(), gamma=5, **own)) == (1, 6)
    tall = drafters.make("trie", target(), nodes=64, depth=4)
    assert tree.widths(short) == (1, 2, 3, 6)
    assert tree.widths(long) == (1, 2, 5, 11)
    assert tree.widths(tall) == (1, 5, 17, 65)
    unsure = drafters.make("prompt_lookup", target(), gamma=5, control="heuristic:3")
    for match, expected in (("latest", (1, 2, 3, 6)), ("earliest", (1, 4, 6))):
        stages = {"a": {"name": "prompt_lookup", "gamma": 5, "match": match}}
        stages["b"] = {"name": "draft_model", "model": target(), "gamma": 3}
        both = drafters.make("escalate", target(), drafters=stages)
        assert tree.widths(both) == expected
    assert tree.widths(unsure) == tree.widths(short._replace(adaptive=True)) == (1, 2, 3, 6)
    assert tree.widths(short, (1, 5, 11)) == (1, 5, 6)
    assert tree.widths(none.make(target())) == (1,)
    assert tree.widths(drafters.make("jacobi", target(), gamma=3), (1, 2)) == (4,)
    for wrong in ((0,), (1.5,), ("a",)):
        with pytest.raises(UserError, match="whole numbers >= 1"):
            tree.widths(short, wrong)


def fixed(tokens, parents):
    """A drafter that always drafts these nodes."""

    def propose(params, keys, context, state):
        batch = context.length.shape[0]
        nodes = jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (batch, len(tokens)))
        above = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), nodes.shape)
        return Draft(nodes, jnp.ones_like(nodes, bool), above), state

    return Drafter(
        init_params=lambda key: {},
        init=lambda *_: (),
        propose=propose,
        update=lambda params, state, *_: state,
        nodes=len(tokens),
        name="fixed",
        siblings=DETERMINISTIC,
        whole=True,
    )


@pytest.mark.parametrize("family", by_default(["llama", "gpt2"], ["llama"]))
def test_a_rejected_node_may_have_any_activations(family):
    """A token whose embedding is NaN is drafted and never chosen; plain decoding works too."""
    model, params = testing.tiny(family)
    plain = decode.autoregressive(
        model,
        ModelParams(params),
        begin(model, none.make(model), ModelParams(params), TEXTS, 0.0),
        max_steps=40,
    )
    written = set(np.unique(np.asarray(plain.tokens)).tolist())
    bad = next(token for token in range(model.vocab_size) if token not in written)
    # The LM head must stay as it was.
    head = model._replace(apply=functools.partial(_with_head, model.apply))
    drafter = fixed([bad, bad, 1, 2], [-1, 0, -1, 2])
    for value in (np.nan, np.inf):
        table = params["embed"]["embedding"]
        broken = {**params, "embed": {"embedding": table.at[bad].set(value)}}
        both = ModelParams((params, broken))
        state = begin(head, drafter, both, TEXTS, 0.0)
        state, _ = decode.generate(head, drafter, accept.load("match"), both, state, max_steps=40)
        decode.check(state)
        size = min(plain.tokens.shape[1], state.tokens.shape[1])
        np.testing.assert_array_equal(plain.tokens[:, :size], state.tokens[:, :size])
        slots = jnp.isfinite(jnp.stack(state.cache.k)) & jnp.isfinite(jnp.stack(state.cache.v))
        assert bool(slots.all())


def _with_head(apply, both, *args):
    """A pass with the broken embedding, whose logits come from the right one."""
    params, broken = both
    out, block = apply(broken, *args)
    logits = out.hidden @ params["embed"]["embedding"].T
    return out._replace(logits=logits.astype(jnp.float32)), block


def test_apply_changes_nothing_and_commit_writes_only_the_path():
    model, params = testing.tiny()
    cache = model.init_cache(2, 16)
    _, block = jax.jit(model.apply)(params, jnp.asarray([[1, 2, 3], [4, 5, 6]]), cache)
    before, paths = jax.device_get(cache), jnp.asarray([[0, 2, -1], [1, -1, -1]])
    after = jax.jit(model.commit)(cache, block, jnp.asarray([2, 1]), paths)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(cache))
    assert after.length.tolist() == [2, 1]
    for buffer, own in zip(after.k + after.v, block.k + block.v, strict=True):
        np.testing.assert_array_equal(buffer[0, :, :2], own[0, np.array([0, 2])].swapaxes(0, 1))
        np.testing.assert_array_equal(buffer[1, :, :1], own[1, 1:2].swapaxes(0, 1))
        assert not np.asarray(buffer[0, :, 2:]).any() and not np.asarray(buffer[1, :, 1:]).any()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_documents_are_separate(family):
    """Logits of documents in one row are those of the documents alone."""
    model, params = testing.tiny(family)
    documents = [[1, 2, 3, 4], [5], [6, 7, 8], [6, 7]]
    numbers = [n for n, text in enumerate(documents) for _ in text]
    packed = jnp.asarray([[token for text in documents for token in text]])
    forward = jax.jit(functools.partial(lm.forward, model))
    out = forward(params, packed, jnp.asarray([numbers])).logits[0]
    alone = forward(params, jnp.asarray([text + [0] * (4 - len(text)) for text in documents]))
    place = 0
    for row, text in enumerate(documents):
        mine = alone.logits[row, : len(text)]
        np.testing.assert_allclose(out[place : place + len(text)], mine, atol=1e-5)
        place += len(text)
    layout = tree.segments(jnp.asarray([[3, 3, 1, 1, 1, 3]]))
    assert layout.depth.tolist() == [[0, 1, 0, 1, 2, 0]]


def test_a_preallocated_block_is_equal_to_a_grown_one():
    model, params = testing.tiny()
    tokens = jnp.asarray([[1, 2, 3, 4], [4, 3, 2, 1]])
    cache, apply = model.init_cache(2, 8), jax.jit(model.apply)
    whole = apply(params, tokens, cache)[0].logits
    shapes = jax.eval_shape(model.apply, params, tokens, cache)[1]
    block = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    place = jnp.arange(4)
    for at in range(4):
        fed = jnp.broadcast_to(place < at, (2, 1, 4))
        layout = tree.Layout(
            jnp.concatenate([fed, jnp.ones((2, 1, 1), bool)], -1),
            jnp.broadcast_to(jnp.append(place, at), (2, 5)),
        )
        out, own = apply(params, tokens[:, at : at + 1], cache, layout, block)
        np.testing.assert_allclose(out.logits[:, 0], whole[:, at], atol=1e-5)
        block = tree.put(block, own, at)


def test_drafters_read_the_cache_and_the_taps_of_the_target():
    """At every proposal the context has the committed cache and the newest token's taps."""
    shape = testing.tiny_config(layers=3)
    model, params = lm.from_config(shape, taps=(0, 2)), testing.tiny(layers=3)[1]
    seen = []

    def propose(params, keys, context, state):
        length = context.length
        out, _ = model.apply(params.target, context.pending[:, None], context.cache)
        jax.debug.callback(
            lambda *x: seen.append(x), context.tokens, length, context.taps, out.logits
        )
        return Draft(jnp.full((3, 1), 2), jnp.ones((3, 1), bool)), state

    drafter = Drafter(propose, 1, "reads")
    state = begin(model, drafter, ModelParams(params), TEXTS, 0.0, new=6)
    decode.generate(model, drafter, accept.load("match"), ModelParams(params), state, max_steps=20)
    jax.effects_barrier()
    assert len(seen) >= 4
    forward = jax.jit(functools.partial(lm.forward, model))
    for tokens, length, taps, logits in seen[:4]:
        # A causal model: the tokens beyond the length do not matter.
        plain = jax.device_get(forward(params, jnp.maximum(jnp.asarray(tokens), 0)))
        for row, count in enumerate(length):
            np.testing.assert_allclose(logits[row, 0], plain.logits[row, count - 1], atol=1e-4)
            for tap, expected in zip(taps, plain.taps, strict=True):
                np.testing.assert_allclose(tap[row], expected[row, count - 2], atol=1e-4)


@pytest.mark.parametrize(
    "name", ["prompt_lookup", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)]
)
def test_temporaries_are_small(name):
    """A compiled loop at 4,096 slots needs temporaries of at most 0.3x of the cache."""
    shape = testing.tiny_config(layers=4, width=64)
    shape = dataclasses.replace(shape, max_positions=8192)
    long, params = lm.from_config(shape), lm.init_params(shape, jax.random.key(0))
    keys = {"prompt_lookup": {"gamma": 5}, "draft_model": {"model": long, "params": params}}
    drafter = drafters.make(name, long, **keys.get(name, {}))
    own = {}
    if name == "medusa":
        own = drafter.training.start(params, jax.random.key(1))
    elif name != "none":
        own = drafter.init_params(jax.random.key(1))
    pair = ModelParams(params, own)
    packed, lengths = decode.pack_prompts(TEXTS[:1])
    state = decode.prefill(
        long, drafter, pair, packed, lengths, rng.row_keys(0, 1), max_len=4096 - drafter.nodes
    )
    rule, stop = accept.load("match"), jnp.zeros((0,), jnp.int32)
    static = {"max_steps": 8, "verify_widths": None}
    lowered = decode._generate.lower(long, drafter, rule, pair, state, stop, **static)
    analysis = lowered.compile().memory_analysis()
    cache = sum(x.nbytes for x in jax.tree.leaves(state.cache))
    assert analysis.temp_size_in_bytes <= 0.3 * cache
