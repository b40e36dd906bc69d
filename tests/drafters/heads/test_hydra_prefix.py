"""Hydra++: the prefix layer in plain NumPy, its cache across rounds, its files, errors."""

from __future__ import annotations

import cases
import head_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import rms_normal, silu
from internals import heads_along_text as _along_text
from internals import heads_heads as _heads
from internals import heads_prefix as _prefix

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax import cache as kv
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import lm
from specjax.testing import conformance
from specjax.types import Batch, ModelParams

TARGET, TABLE = testing.tabular(shared.VOCAB), cases.table(0, shared.VOCAB)


def plain_prefix(params, features, head_dim, theta=10000.0):
    """One causal Llama layer over features [T,D], and its norm."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    size, half = len(features), head_dim // 2

    def rotated(x):  # [T,H,d], the angle of pair i at position t is t / theta^(i / half)
        angle = np.arange(size)[:, None, None] * theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = rms_normal(features) * p["attention_norm"]["scale"]
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
    y = rms_normal(x) * p["mlp_norm"]["scale"]
    mlp = silu(y @ p["mlp"]["gate"]["kernel"]) * (y @ p["mlp"]["up"]["kernel"])
    return rms_normal(x + mlp @ p["mlp"]["down"]["kernel"]) * p["norm"]["scale"]


@pytest.mark.fast
@pytest.mark.parametrize("segmented", [False, True])
def test_prefix_is_a_causal_layer(segmented):
    """Over a real decoder: the whole forward by hand, and in a packed row each document alone."""
    model, target_params = testing.tiny(layers=1, width=16)
    keys = {"heads": 2, "layers": 2, "prefix": True, "head_dim": 4}
    params = cases.random_heads("hydra", model, target_params, scale=0.4, **keys).init_params(None)
    tokens, pair = shared.text(2, 9, 32), ModelParams(target_params, params)
    heads = shared.heads_of("hydra", model, params=params, head_dim=4)
    bounds = [0, 4, 9] if segmented else [0, 9]
    segments = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[None].repeat(2, 0)
    batch = Batch(jnp.asarray(tokens), segments=jnp.asarray(segments) if segmented else None)
    out = jax.jit(lambda params: _along_text.output(model, params, batch))(target_params)
    features, _ = jax.jit(lambda pair: _heads.drafts(heads, model, pair, batch).state)(pair)
    for start, end in zip(bounds, [*bounds[1:-1], 8], strict=False):
        for row in range(2):
            hidden = np.asarray(out.hidden[row, start:end], np.float64)
            expected = plain_prefix(params["prefix"], hidden, 4)
            np.testing.assert_allclose(features[row, start:end], expected, rtol=2e-3, atol=2e-3)
    if not segmented:
        result = shared.logits_along("hydra", model, target_params, params, tokens, head_dim=4)
        embedding = np.asarray(model.embed(target_params, jnp.arange(32)), np.float64)
        read = shared.hydra_formula(params, embedding)
        expected = shared.expected_along(read, np.asarray(features, np.float64), tokens, 2)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def decoder():
    """A decoder that emits periodic text."""
    return testing.tiny(scale=20.0, layers=1, width=16, vocab_size=8)


def test_prefix_cache_across_rounds(decoder, monkeypatch):
    """After some rounds with accepted drafts the cache is that of one pass over the committed text.

    The prompts are fed to the prefix layer in two chunks.
    """
    monkeypatch.setattr(_prefix, "CHUNK", 3)
    model, target_params = decoder
    keys = {"heads": 2, "layers": 1, "prefix": True, "head_dim": 16, "tree": "3x1"}
    drafter = cases.random_heads("hydra", model, target_params, scale=0.5, **keys)
    params, prompts = ModelParams(target_params, drafter.init_params(None)), shared.PROMPTS
    packed, lengths = decode.pack_prompts(prompts)
    state = decode.prefill(
        model,
        drafter,
        params,
        packed,
        lengths,
        rng.row_keys(0, len(prompts)),
        max_len=packed.shape[1] + 16,
        limit=lengths + jnp.asarray([16, 1, 9, 16, 16]),
        sampling=sampling.make_sampling(len(prompts), 1.0),
    )
    assert state.draft.kept.known.tolist() == [False, True, True, True, False]
    heads = shared.heads_of("hydra", model, params=params.draft, head_dim=16)
    rule = accept.load("deterministic")
    state, records = decode.generate(model, drafter, rule, params, state, max_steps=4)
    decode.check(state)
    assert int(records.accepted.sum()) > 3
    assert bool(state.done.any()) and not bool(state.done.all())
    tokens, length = jnp.maximum(state.tokens, 0), np.asarray(state.length)

    @jax.jit
    def one_pass(params):
        hidden = lm.forward(model, params.target, tokens).hidden
        cache = heads.prefix.init_cache(*tokens.shape)
        features, block = heads.prefix.apply(params, hidden, cache)
        return features, kv.commit(cache, block, jnp.full(len(tokens), tokens.shape[1]))

    features, cache = one_pass(params)
    own = state.draft.kept.cache
    for row, size in enumerate(length - 1):
        assert int(own.length[row]) == size
        for result, expected in zip(own.k + own.v, cache.k + cache.v, strict=True):
            np.testing.assert_allclose(
                result[row, :, :size], expected[row, :, :size], rtol=1e-3, atol=1e-3
            )
        if not state.done[row]:
            np.testing.assert_allclose(
                state.draft.kept.feature[row], features[row, size - 1], rtol=1e-3, atol=1e-3
            )


@pytest.mark.slow
def test_forecast_is_decoded_with_a_decoder(decoder):
    model, target_params = decoder
    keys = {"heads": 2, "prefix": True, "head_dim": 16, "tree": "4x3"}
    drafter = cases.random_heads("hydra", model, target_params, scale=0.5, **keys)
    shared.assert_forecast_is_decoded(
        drafter, model, target_params, shared.PROMPTS * 8, 24, (0.0,), eos=7
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tree", "rule"), [("", "chain"), ("2x1", "recursive"), ("2x1", "traversal")]
)
def test_conformance(tree, rule):
    """Sampled drafts."""
    target, table = testing.tabular(3), cases.table(0)
    keys = {"heads": 2, "layers": 1, "prefix": True, "head_dim": 2}
    keys |= {"tree": tree, "siblings": "without_replacement"}
    drafter = cases.random_heads("hydra", target, table, **keys)
    params = ModelParams(table, drafter.init_params(None))
    report = conformance.check_drafter(drafter, target, params, [accept.load(rule)])
    assert report.passed, str(report)


NO_HEAD_DIM = "do not show the width of the prefix layer's attention heads; give head_dim"


@pytest.mark.fast
def test_files_hold_what_shapes_do_not_show(tmp_path):
    shared.assert_files_round_trip("hydra", tmp_path / "plain", heads=2, layers=2)
    keys = {"heads": 2, "layers": 2, "prefix": True, "head_dim": 2}
    target = shared.assert_files_round_trip("hydra", tmp_path / "plus", **keys)
    written = drafters.make("hydra", target, model=tmp_path / "plus")
    params, facts = written.init_params(None), dict(written.training.facts)
    assert facts["head_dim"] == 2

    def write(name, config):
        head_files.write(tmp_path / name, "hydra", params, config)

    def facts_of(name, **keys):
        drafter = drafters.make("hydra", target, model=tmp_path / name, **keys)
        return dict(drafter.training.facts)

    def refused(match, name, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("hydra", target, model=tmp_path / name, **keys)

    others = {"rope_theta": 500.0, "rms_norm_eps": 1e-5}
    write("others", others)
    refused(NO_HEAD_DIM, "others")
    assert facts_of("others", head_dim=4) == facts | others | {"head_dim": 4}
    refused("head_dim is 8, and the prefix layer has queries of 4", "others", head_dim=8)
    write("number of heads", {"num_attention_heads": 1})
    assert facts_of("number of heads")["head_dim"] == 4
    write("deeper", facts | {"hidden_state_offset": 1})
    refused("hidden_state_offset is 1; only heads on the last feature can be read", "deeper")
    write("text", {"head_dim": "wide"})
    refused("head_dim is 'wide'; it must be a positive integer", "text")
    refused("head_dim is 4, and the given heads have 2; leave it out", "plus", head_dim=4)
    refused("prefix is True, and the given hydra has False", "plain", prefix=True)


@pytest.mark.fast
def test_errors():
    keys = {"heads": 2, "prefix": True, "head_dim": 2}
    params = cases.random_heads("hydra", TARGET, TABLE, **keys).init_params(None)
    prefix = params["prefix"]

    def refused(match, **keys):
        with pytest.raises(UserError, match=match):
            drafters.make("hydra", TARGET, **keys).init_params(None)

    def with_prefix(layer):
        return params | {"prefix": layer}

    refused("head_dim is 3; rotary positions need an even number", prefix=True, head_dim=3)
    without_norm = with_prefix({k: v for k, v in prefix.items() if k != "norm"})
    refused("prefix.norm.scale is missing", params=without_norm, head_dim=2)
    narrow = with_prefix(prefix | {"mlp_norm": {"scale": jnp.ones(3)}})
    refused(
        r"prefix.mlp_norm.scale of the hydra heads is \[3\], and on this target it must be \[5\]",
        params=narrow,
    )
    mlp = {k: prefix["mlp"][k] for k in ("up", "down")}
    norm = {"scale": jnp.ones(5), "bias": jnp.zeros(5)}
    norms = dict.fromkeys(("norm", "attention_norm", "mlp_norm"), norm)
    gpt2 = with_prefix(prefix | {"mlp": mlp} | norms)
    refused("not a Llama layer and its norm; no other can be read", params=gpt2, head_dim=2)
    refused(NO_HEAD_DIM, params=params)
    shared.assert_foreign_is_refused("hydra", TARGET, params)
