"""SPIRe's draft model: passes over its cache against an oracle, wrong versions, files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spire_cases as shared
from marks import by_default

from specjax import cache as kv
from specjax import testing, tree
from specjax.cache import KVBlock
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig, check
from specjax.errors import UserError
from specjax.models import hf, lm

CLOSE = 2e-4
TEXT = np.random.default_rng(3).integers(0, shared.VOCAB, (2, 19))


@pytest.mark.parametrize("kind", by_default(shared.KINDS, ("feedback", "sparse")))
def test_a_text_is_that_of_the_oracle(kind):
    """Texts of almost three times the cache; computing activations again changes nothing."""
    model, params, config = shared.made(kind)
    got = jax.jit(lambda p: lm.forward(model, p, jnp.asarray(TEXT)).logits)(params)
    for row, text in enumerate(TEXT.tolist()):
        np.testing.assert_allclose(
            np.asarray(got)[row], shared.oracle(config, params, text), rtol=0, atol=CLOSE
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", shared.KINDS)
def test_gradients_with_and_without_recomputing(kind):
    _, params, config = shared.made(kind)

    def gradient(remat):
        model = spire.from_config(config, remat=remat)
        value = lambda p: jnp.square(lm.forward(model, p, jnp.asarray(TEXT)).logits).mean()  # noqa: E731
        return jax.jit(jax.grad(value))(params)

    plain, again = gradient(False), gradient(True)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain))
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * scale)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(plain))
    if config.feedback:
        assert float(jnp.abs(plain[spire.MEMORY]["weights"]).max()) > 0


# The first is fed a tree level by level, as drafters do.
PASSES = [("feedback", True), ("feedback", False), ("feedback, no own token", True)]
PASSES += [("feedback, no sinks", True), ("sparse", True), ("sparse", False)]


@pytest.mark.parametrize(("kind", "by_level"), by_default(PASSES, PASSES[1:2]))
def test_passes_over_the_cache_are_those_over_the_text(kind, by_level):
    model, _, config = shared.made(kind)
    assert {x.shape[2] for x in model.init_cache(1, shared.SLOTS).k} == {config.slots}
    assert shared.differences(kind, by_level=by_level) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "olmo2", "qwen3", "gpt_neox"])
def test_a_wide_window_without_feedback_is_the_decoder(family):
    _, params, config = shared.made("sparse", family=family)
    wide = dataclasses.replace(config, sinks=0, window=64)
    if any(wide.decoder.windows):
        wide = dataclasses.replace(wide, decoder=dataclasses.replace(wide.decoder, windows=()))
    expected = lm.forward(lm.from_config(wide.decoder), params, jnp.asarray(TEXT))
    got = lm.forward(spire.from_config(wide), params, jnp.asarray(TEXT))
    np.testing.assert_allclose(got.logits, expected.logits, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(got.hidden, expected.hidden, rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "olmo2", "qwen3", "gpt_neox"])
def test_a_memory_of_embeddings_in_one_layer_is_the_decoder(family):
    """The only layer reads the embeddings of all tokens, with feedback memory as without."""
    _, params, config = shared.made("feedback", layers=1, family=family)
    wide = dataclasses.replace(config, sinks=0, window=64)
    params = {**params, spire.MEMORY: {"weights": jnp.asarray([50.0, -50.0])}}
    own = {key: value for key, value in params.items() if key != spire.MEMORY}
    expected = lm.forward(lm.from_config(wide.decoder), own, jnp.asarray(TEXT)).logits
    got = lm.forward(spire.from_config(wide), params, jnp.asarray(TEXT)).logits
    np.testing.assert_allclose(got, expected, rtol=0, atol=CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feedback", "sparse"])
def test_documents_in_one_row_are_those_alone(kind):
    model, params, _ = shared.made(kind)
    tokens = jnp.asarray(TEXT[:1])
    got = lm.forward(model, params, tokens, jnp.asarray([[0] * 10 + [1] * 9])).logits[0]
    for part in (slice(0, 10), slice(10, 19)):
        alone = lm.forward(model, params, tokens[:, part]).logits[0]
        np.testing.assert_allclose(got[part], alone, rtol=0, atol=CLOSE)


def test_the_cost_of_a_token_does_not_depend_on_the_text():
    """The same program for buffers of 1,000 and of 16,000 tokens: no array grows."""
    model, params, config = shared.made("feedback")

    def step(slots):
        cache = model.init_cache(1, slots)
        return str(jax.make_jaxpr(lambda t, c: model.apply(params, t, c))(TEXT[:1, :1], cache))

    assert step(1000) == step(16000) != step(6)
    sizes = [x.shape[2] for slots in (3, 7, 16000) for x in model.init_cache(1, slots).k]
    assert sizes == [3, 3, config.slots, config.slots, config.slots, config.slots]


@pytest.mark.fast
@pytest.mark.parametrize("sinks", [0, 2])
def test_slots_have_the_newest_positions(sinks):
    """Against a list: ragged commits of 0 to 9 tokens into a ring of 4."""
    plain, texts = kv.zeros(1, 3, 1, sinks + 4, 1, jnp.float32), [0, 0, 0]
    cache = spire.SparseCache(plain.k, plain.v, plain.length, sinks)
    draw = np.random.default_rng(0)
    for _ in range(12):
        counts = draw.integers(0, 10, 3)
        marks = np.array(texts)[:, None] + np.arange(9) + 1.0
        block = KVBlock(*[(jnp.asarray(marks)[..., None, None],)] * 2, jnp.asarray(marks))
        cache = spire.commit(cache, block, jnp.asarray(counts, jnp.int32))
        texts = [a + int(b) for a, b in zip(texts, counts, strict=True)]
        at, stored = np.asarray(spire.positions(cache)), np.asarray(cache.k[0])[:, 0, :, 0]
        for row, length in enumerate(texts):
            first, newest = range(min(sinks, length)), range(max(sinks, length - 4), length)
            assert sorted(p for p in at[row] if p >= 0) == [*first, *newest]
            assert all(stored[row, s] == p + 1 for s, p in enumerate(at[row]) if p >= 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feedback", "sparse"])
def test_a_token_that_is_not_finite_reaches_its_descendants_only(kind):
    model, params, _ = shared.made(kind)
    cache, tokens = model.init_cache(1, 20), jnp.asarray(TEXT[:1, :3])
    _, block = model.apply(params, tokens, cache, tree.layout(jnp.asarray([[-1, 0, 0]])))
    bad = jax.tree.map(lambda x: x.at[:, 1].set(jnp.nan), block)
    layout = tree.layout(jnp.asarray([[-1, 0, 0, 1, 2]]), 2)
    out, _ = model.apply(params, tokens[:, :2], cache, layout, bad)
    finite = np.isfinite(np.asarray(out.logits)).all(-1)[0]
    assert finite.tolist() == [False, True]


# Wrong versions --------------------------------------------------------------------------------


def _one_pass(job, tokens, view, known, levels):
    """The tokens of a tree do not wait for their ancestors."""
    return RIGHT["levels"](job, tokens, view, known, jnp.ones((), jnp.int32))


def _every_token_itself(job, layout, new):
    view = RIGHT["view"](job, layout, new)
    return view._replace(block=layout.visible)


def _no_window(job, layout, new):
    wide = job._replace(config=dataclasses.replace(job.config, window=1000))
    return RIGHT["view"](wide, layout, new)


def _no_sinks(job, layout, new):
    return RIGHT["view"](job._replace(config=dataclasses.replace(job.config, sinks=0)), layout, new)


def _shifted(cache):
    found = RIGHT["positions"](cache)
    return jnp.where(found < cache.sinks, found, found - 1)


def _rejected_too(cache, start, count, size):
    return RIGHT["slots"](cache, start, jnp.full_like(count, size), size)


def _over_the_sinks(cache, start, count, size):
    kept = RIGHT["slots"](cache, start, count, size) < cache.slots
    return jnp.where(kept, (start[:, None] + jnp.arange(size)) % cache.slots, cache.slots)


def _last_layer(job, outputs):
    return outputs[-1]


def _unnormalised(pass_, index, x, angles):
    layer, angle = pass_.module.layers[index], angles.get(pass_.config.decoder.rope(index))
    keys = layer.attention.part("k", x, angle), layer.attention.part("v", x, angle)
    return x, angle, keys


RIGHT = {
    "levels": spire._by_levels,
    "view": spire._view,
    "positions": spire.positions,
    "slots": spire._slots,
}
WRONG = {
    "one pass for a tree": (spire, "_by_levels", _one_pass),
    "the place of the token in the block": (spire, "_view", _every_token_itself),
    "no window": (spire, "_view", _no_window),
    "no sinks": (spire, "_view", _no_sinks),
    "a position late": (spire, "positions", _shifted),
    "rejected tokens are written": (spire, "_slots", _rejected_too),
    "a ring over the sinks": (spire, "_slots", _over_the_sinks),
    "memory of the last layer": (spire, "_mixture", _last_layer),
    "no norm before the projections": (spire, "_projected", _unnormalised),
}


@pytest.mark.parametrize("name", by_default(WRONG, ()))
def test_wrong_passes_are_noticed(name, monkeypatch):
    module, function, wrong = WRONG[name]
    monkeypatch.setattr(module, function, wrong)
    # Programs of the right functions, and later those of the wrong ones, must not be found again.
    jax.clear_caches()
    try:
        assert not shared.differences("feedback") < 1e-2
    finally:
        jax.clear_caches()


# Values and files ------------------------------------------------------------------------------


@pytest.mark.fast
def test_wrong_values():
    decoder = testing.tiny_config()
    sliding = dataclasses.replace(decoder, windows=(8, None))
    for config, message in [
        (SpireConfig(decoder, -1, 4), "sinks is -1; it must be a whole number >= 0"),
        (SpireConfig(decoder, 0, 0), "window is 0; it must be a whole number >= 1"),
        (SpireConfig(decoder, 0, 4, "yes"), "feedback is 'yes'; it must be True or False"),
        (SpireConfig(decoder, 0, 4, False, False), "own belongs to feedback memory"),
        (SpireConfig(sliding, 0, 9), "window is 9, and a layer .* of 8 positions; give at most 8"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            check(config)
        assert "\n" not in str(caught.value)
    check(SpireConfig(sliding, 0, 8))
    with pytest.raises(UserError, match=r"taps are \(2,\); layers are numbered 0..1"):
        spire.from_config(SpireConfig(decoder, 0, 4), taps=(2,))


def test_a_directory_keeps_the_model(tmp_path):
    _, params, config = shared.made("feedback")
    spire.save(tmp_path / "a", config, params, layers="0,3")
    loaded = spire.load(tmp_path / "a")
    assert loaded.config == config and loaded.lm.window == 5 and loaded.lm.vocabulary is None
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.params, params))
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert raw["target_layers"] == "0,3" and (raw["sinks"], raw["window"]) == (2, 5)
    plain = {key: value for key, value in params.items() if key != spire.MEMORY}
    spire.save(tmp_path / "b", shared.without_feedback(config), plain)
    assert not (tmp_path / "b" / "memory.safetensors").exists()
    assert spire.load(tmp_path / "b").params.keys() == plain.keys()
    # As a plain decoder it would attend to everything.
    with pytest.raises(UserError, match="architecture SpireDraftModel is not supported"):
        hf.load(tmp_path / "b")


def test_wrong_directories_are_one_line(tmp_path):
    _, params, config = shared.made("feedback")

    def refused(message, call):
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)

    hf.save(tmp_path / "plain", config.decoder, {k: params[k] for k in params if k != "memory"})
    refused("plain is no SPIRe draft model; give one", lambda: spire.load(tmp_path / "plain"))
    refused("is no directory", lambda: spire.load(tmp_path / "nowhere"))
    own = tmp_path / "own"
    spire.save(own, config, params)
    raw = json.loads((own / "config.json").read_text())
    for changed, message in [
        ({key: raw[key] for key in raw if key != "window"}, "config.json has no window; train"),
        (raw | {"decoder": 3}, "config.json has no decoder"),
        (raw | {"window": 0}, "config.json: window is 0"),
        (raw | {"feedback": 1}, "config.json: feedback is 1; it must be True or False"),
    ]:
        (own / "config.json").write_text(json.dumps(changed))
        refused(message, lambda: spire.load(own))
    (own / "config.json").write_text(json.dumps(raw))
    (own / "memory.safetensors").write_bytes(b"damaged")
    refused("memory.safetensors is damaged", lambda: spire.load(own))
    (own / "memory.safetensors").unlink()
    refused("own lacks memory.safetensors", lambda: spire.load(own))
    refused(
        "the parameters are not those of the config",
        lambda: spire.save(own, shared.without_feedback(config), params),
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    refused("is not a model directory", lambda: spire.save(tmp_path / "other", config, params))
