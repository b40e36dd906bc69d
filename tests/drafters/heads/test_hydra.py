"""Hydra and Hydra++: the card's formulas, the prefix layer recomputed plainly, training as decoding, the mistakes."""

from __future__ import annotations

import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.drafters.heads import _loss, _prefix
from specjax.errors import UserError
from specjax.models import head_files, lm
from specjax.testing import cases, conformance
from specjax.types import Batch, ModelParams

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


def silu(x):
    return x / (1 + np.exp(-x))


def normal(x, eps=1e-6):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def plain(params, embedding):
    """The card: R x + SiLU(W x + b) of [s, e(tokens)], further blocks x + SiLU(W x + b), a linear map with a bias."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def linear(part, x):
        return x @ part["kernel"] + part["bias"]

    def read(feature, known):
        head = params["mlp"][str(len(known) - 1)]
        x = np.concatenate([feature, *embedding[known]])
        x = linear(head["skip"], x) + silu(linear(head["in"], x))
        for kernel, bias in zip(
            *(head.get("blocks", {"kernel": [], "bias": []})[k] for k in ("kernel", "bias")),
            strict=True,
        ):
            x = x + silu(x @ kernel + bias)
        return x @ params["head"]["kernel"][len(known) - 1] + params["head"]["bias"][len(known) - 1]

    return read


def plain_prefix(params, features, head_dim, theta=10000.0):
    """One Llama layer over features [T,D] and its norm: every position afresh, looking at itself and those before it."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    size, half = len(features), head_dim // 2

    def rotated(x):  # [T,H,d], the angle of pair i at position t is t / theta^(i / half)
        angle = np.arange(size)[:, None, None] * theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return np.concatenate(
            [
                first * np.cos(angle) - second * np.sin(angle),
                second * np.cos(angle) + first * np.sin(angle),
            ],
            -1,
        )

    x = normal(features) * p["attention_norm"]["scale"]
    q, k, v = (
        (x @ p["attention"][name]["kernel"]).reshape(size, -1, head_dim) for name in ("q", "k", "v")
    )
    q, k = rotated(q), rotated(k)
    k, v = (each.repeat(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = np.zeros_like(q)
    for t in range(size):
        for head in range(q.shape[1]):
            weights = np.exp(q[t, head] @ k[: t + 1, head].T / np.sqrt(head_dim))
            out[t, head] = weights @ v[: t + 1, head] / weights.sum()
    x = features + out.reshape(size, -1) @ p["attention"]["o"]["kernel"]
    y = normal(x) * p["mlp_norm"]["scale"]
    mlp = silu(y @ p["mlp"]["gate"]["kernel"]) * (y @ p["mlp"]["up"]["kernel"])
    return normal(x + mlp @ p["mlp"]["down"]["kernel"]) * p["norm"]["scale"]


@pytest.mark.fast
@pytest.mark.parametrize("layers", [1, 3])
def test_forward_is_the_card(layers):
    params = cases.random_heads("hydra", TARGET, TABLE, heads=3, layers=layers).init_params(None)
    tokens = shared.text()
    got = shared.logits_along("hydra", TARGET, TABLE, params, tokens)
    read = plain(params, np.eye(shared.VOCAB))
    want = shared.retold(read, shared.features_of(TARGET, TABLE, tokens), tokens, 3)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.fast
@pytest.mark.parametrize("segmented", [False, True])
def test_prefix_is_a_causal_layer(segmented):
    """Hydra++ over a real decoder: the whole forward by hand, and of a packed row each document by itself."""
    model, target_params = testing.tiny(layers=1, width=16)
    keys = {"heads": 2, "layers": 2, "prefix": True, "head_dim": 4}
    params = cases.random_heads("hydra", model, target_params, scale=0.4, **keys).init_params(None)
    tokens, pair = shared.text(2, 9, 32), ModelParams(target_params, params)
    heads = shared.described("hydra", model, params=params, head_dim=4)
    bounds = [0, 4, 9] if segmented else [0, 9]
    segments = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[None].repeat(2, 0)
    batch = Batch(jnp.asarray(tokens), segments=jnp.asarray(segments) if segmented else None)
    out, (features,) = jax.jit(lambda pair: _loss.begin(heads, model, pair, batch))(pair)
    for start, end in zip(bounds, [*bounds[1:-1], 8], strict=False):
        for row in range(2):
            want = plain_prefix(
                params["prefix"], np.asarray(out.hidden[row, start:end], np.float64), 4
            )
            np.testing.assert_allclose(features[row, start:end], want, rtol=2e-3, atol=2e-3)
    if not segmented:
        got = shared.logits_along("hydra", model, target_params, params, tokens, head_dim=4)
        read = plain(params, np.asarray(model.embed(target_params, jnp.arange(32)), np.float64))
        want = shared.retold(read, np.asarray(features, np.float64), tokens, 2)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.fast
@pytest.mark.parametrize("prefix", [False, True])
def test_new_heads_repeat_the_target(prefix):
    """Hydra++ as well, but for the length of the feature, which its norm takes away."""
    model, params = testing.tiny(layers=1, width=16)
    drafter = drafters.make("hydra", model, heads=2, layers=3, prefix=prefix)
    fresh, facts = drafter.training.start(params, jax.random.key(0)), dict(drafter.training.facts)
    tokens = shared.text(vocab=32)
    got = shared.logits_along(
        "hydra", model, params, fresh, tokens, head_dim=facts.get("head_dim", 0)
    )
    features = shared.features_of(model, params, tokens)
    want = np.asarray(
        model.unembed(params, jnp.asarray(normal(features) if prefix else features, jnp.float32))
    )
    np.testing.assert_allclose(got, np.repeat(want[:, :, None], 2, 2), rtol=1e-3, atol=1e-3)


CHAIN, TREE, PREFIX = {}, {"tree": "3x2x1"}, {"siblings": "iid", "prefix": True, "head_dim": 2}


@pytest.mark.parametrize("shape", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE, PREFIX])
def test_training_sees_what_decoding_does(shape):
    drafter = cases.random_heads("hydra", TARGET, TABLE, heads=3, **shape)
    shared.assert_foreseen_is_decoded(drafter, TARGET, TABLE, shared.PROMPTS * 300, 24)


def test_prefix_cache_across_rounds(monkeypatch):
    """A decoder that says periodic things, a tree of drafts some of which are accepted: after some rounds the prefix layer
    has seen what it would have seen in one pass over the committed text. (The prompts pass through it in two chunks.)"""
    monkeypatch.setattr(_prefix, "CHUNK", 3)
    model, target_params = testing.tiny(scale=20.0, layers=1, width=16, vocab_size=8)
    keys = {"heads": 2, "layers": 1, "prefix": True, "head_dim": 16, "tree": "3x1"}
    drafter = cases.random_heads("hydra", model, target_params, scale=0.5, **keys)
    params, prompts = ModelParams(target_params, drafter.init_params(None)), shared.PROMPTS
    packed, lengths = decode.pack_prompts(prompts)
    new = jnp.asarray([16, 1, 9, 16, 16])
    state = decode.prefill(
        model, drafter, params, packed, lengths, rng.row_keys(0, len(prompts)), max_len=packed.shape[1] + 16,
        limit=lengths + new, sampling=sampling.make_sampling(len(prompts), 1.0),
    )  # fmt: skip
    assert state.draft.known.tolist() == [False, True, True, True, False]
    heads, accepted = shared.described("hydra", model, params=params.draft, head_dim=16), 0
    state, records = decode.generate(
        model, drafter, accept.load("deterministic"), params, state, max_steps=4
    )
    decode.check(state)
    accepted = int(records.accepted.sum())
    assert accepted > 3 and bool(state.done.any()) and not bool(state.done.all())
    tokens, length = jnp.maximum(state.tokens, 0), np.asarray(state.length)

    @jax.jit
    def afresh(params):
        hidden = lm.forward(model, params.target, tokens).hidden
        return heads.prefix.apply(params, hidden, heads.prefix.init_cache(*tokens.shape), None)

    features, cache = afresh(params)
    for row, size in enumerate(length - 1):
        assert int(state.draft.cache.length[row]) == size
        for have, want in zip(
            state.draft.cache.k + state.draft.cache.v, cache.k + cache.v, strict=True
        ):
            np.testing.assert_allclose(
                have[row, :, :size], want[row, :, :size], rtol=1e-3, atol=1e-3
            )
        if not state.done[row]:
            np.testing.assert_allclose(
                state.draft.feature[row], features[row, size - 1], rtol=1e-3, atol=1e-3
            )


def test_training_sees_what_decoding_does_beside_a_decoder():
    model, target_params = testing.tiny(scale=20.0, layers=1, width=16, vocab_size=8)
    keys = {"heads": 2, "prefix": True, "head_dim": 16, "tree": "4x3"}
    drafter = cases.random_heads("hydra", model, target_params, scale=0.5, **keys)
    shared.assert_foreseen_is_decoded(
        drafter, model, target_params, shared.PROMPTS * 8, 24, (0.0,), eos=7
    )


@pytest.mark.parametrize("prefix", [False, True])
def test_it_learns_and_a_wrong_label_is_noticed(prefix):
    shared.assert_learns("hydra", heads=3, layers=1, prefix=prefix)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "rule"), [("", "chain"), ("2x1", "recursive"), ("2x1", "traversal")]
)
def test_prefix_keeps_its_promises(tree, rule):
    """Hydra++ through everything that conformance asks, sampled."""
    target, table = testing.tabular(3), cases.table(0)
    keys = {
        "heads": 2,
        "layers": 1,
        "prefix": True,
        "head_dim": 2,
        "tree": tree,
        "siblings": "without_replacement",
    }
    drafter = cases.random_heads("hydra", target, table, **keys)
    params = ModelParams(table, drafter.init_params(None))
    report = conformance.check_drafter(drafter, target, params, [accept.load(rule)])
    assert report.passed, str(report)


@pytest.mark.fast
def test_files_say_what_shapes_do_not(tmp_path):
    shared.assert_files_round_trip("hydra", tmp_path / "plain", heads=2, layers=2)
    keys = {"heads": 2, "layers": 2, "prefix": True, "head_dim": 2}
    target = shared.assert_files_round_trip("hydra", tmp_path / "plus", **keys)
    mine = drafters.make("hydra", target, model=tmp_path / "plus")
    assert dict(mine.training.facts)["head_dim"] == 2
    params, facts = mine.init_params(None), dict(mine.training.facts)
    head_files.write(
        tmp_path / "theirs", "hydra", params, {"rope_theta": 500.0, "rms_norm_eps": 1e-5}
    )

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("hydra", target, **keys)

    refused(
        "do not say how wide an attention head of their prefix layer is; give head_dim",
        model=tmp_path / "theirs",
    )
    theirs = drafters.make("hydra", target, model=tmp_path / "theirs", head_dim=4)
    assert dict(theirs.training.facts) == facts | {
        "head_dim": 4,
        "rope_theta": 500.0,
        "rms_norm_eps": 1e-5,
    }
    head_files.write(tmp_path / "spelt", "hydra", params, {"num_attention_heads": 1})
    assert (
        dict(drafters.make("hydra", target, model=tmp_path / "spelt").training.facts)["head_dim"]
        == 4
    )
    head_files.write(tmp_path / "deeper", "hydra", params, facts | {"hidden_state_offset": 1})
    refused(
        "hidden_state_offset is 1; only heads on the last feature are read",
        model=tmp_path / "deeper",
    )
    head_files.write(tmp_path / "odd", "hydra", params, {"head_dim": "wide"})
    refused("head_dim is 'wide'; it must be a positive integer", model=tmp_path / "odd")
    refused(
        "head_dim is 4, and the heads in the files have 2; leave it out",
        model=tmp_path / "plus",
        head_dim=4,
    )
    refused(
        "head_dim is 8, and the prefix layer has queries of 4",
        model=tmp_path / "theirs",
        head_dim=8,
    )
    refused(
        "prefix is asked for, and the heads in the files have no prefix",
        model=tmp_path / "plain",
        prefix=True,
    )


@pytest.mark.fast
def test_mistakes():
    mine = cases.random_heads("hydra", TARGET, TABLE, heads=3).init_params(None)
    plus = cases.random_heads("hydra", TARGET, TABLE, heads=2, prefix=True, head_dim=2).init_params(
        None
    )

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("hydra", TARGET, **keys).init_params(None)

    refused("hydra has no heads yet; give model=, a directory of trained ones")
    refused(
        "the tree is 4 levels deep and hydra has 3 heads; take a flatter one",
        params=mine,
        tree="2x1x1x1",
    )
    refused("heads is 2, and the heads in the files have 3; leave it out", params=mine, heads=2)
    refused("layers is 2, and the heads in the files have 1; leave it out", params=mine, layers=2)
    refused("prefix is 1; it must be True or False", prefix=1)
    refused(
        "head_dim is 2 and belongs to a prefix layer; leave it out, or ask for prefix", head_dim=2
    )
    refused("head_dim is 3; rotary positions need an even number", prefix=True, head_dim=3)
    bare = plus | {"prefix": {k: v for k, v in plus["prefix"].items() if k != "norm"}}
    refused("prefix.norm.scale is missing", params=bare, head_dim=2)
    odd = plus | {"prefix": plus["prefix"] | {"mlp_norm": {"scale": jnp.ones(3)}}}
    refused(
        r"prefix.mlp_norm.scale of the hydra heads is \[3\], and on this target it must be \[5\]",
        params=odd,
    )
    gpt2 = plus | {
        "prefix": plus["prefix"] | {"mlp": {k: plus["prefix"]["mlp"][k] for k in ("up", "down")}}
    }
    for norm in ("norm", "attention_norm", "mlp_norm"):
        gpt2["prefix"][norm] = {"scale": jnp.ones(5), "bias": jnp.zeros(5)}
    refused("not a Llama layer and its norm; no other can be read", params=gpt2, head_dim=2)
    refused(
        "do not say how wide an attention head of their prefix layer is; give head_dim", params=plus
    )
    for params in (mine, plus):
        shared.assert_foreign_is_refused("hydra", TARGET, params)
    drafter = drafters.make("hydra", TARGET, params=mine)
    with pytest.raises(
        UserError, match="each head of hydra goes on from the one before; loss.slots must be 'all'"
    ):
        drafter.training.loss(
            mine, TABLE, Batch(jnp.asarray(shared.text())), jax.random.key(0), slots="one"
        )
