"""SPIRe's drafter: its law, its text, its keys; a draft step costs the same at every length."""

from __future__ import annotations

import time

import cases
import growth_cases
import jax
import jax.numpy as jnp
import mutants
import numpy as np
import pytest
import spire_cases as shared
from decode_cases import oracle, speculate
from marks import by_default

from specjax import accept, drafters, testing
from specjax.drafters.draft_models import spire_model as spire
from specjax.drafters.draft_models.spire_model import SpireConfig
from specjax.errors import UserError
from specjax.testing.claims import widen
from specjax.types import CHAIN, LM, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "spire": ("spire", {"gamma": 2, "model": "@spire", "params": "@spire params"}, ("chain",)),
    "spire tree": (
        "spire",
        {"tree": "2x1", "siblings": "iid", "model": "@spire", "params": "@spire params"},
        (),
    ),
}

# Label -> kind of ``spire_cases``, keys, rule.
LAWS = {
    "chain": ("feedback", {"gamma": 2}, "chain"),
    "tree, iid": ("feedback", {"tree": "2x1", "siblings": "iid"}, "recursive"),
    "tree, no own token": (
        "feedback, no own token",
        {"tree": "2x2x1", "siblings": "top_k"},
        "deterministic",
    ),
    "stopped": ("feedback, no sinks", {"gamma": 2, "control": "threshold:0.5"}, "block"),
    "dynamic, sparse": ("sparse", {"tree": "dynamic", "nodes": 5, "depth": 2, "top_k": 2}, "match"),
}
# Twice as long as the caches: the rings have wrapped around.
PROMPT = (2, 1, 0, 0, 1, 2, 2, 0, 1, 1, 2, 0, 0)


def drafter_of(target, kind, **keys):
    model, params, _ = shared.made(kind, vocab=target.vocab_size, width=16)
    return drafters.make("spire", target, model=model, params=params, **keys)


@pytest.mark.parametrize("label", by_default(LAWS, ()))
def test_exact_law(label):
    """Enumerated in float64, after a text that is longer than the cache."""
    kind, keys, rule = LAWS[label]
    with jax.enable_x64(True):
        target, table = testing.tabular(3), cases.table(0)
        drafter = drafter_of(target, kind, **keys)
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        error = growth_cases.law_error(drafter, rule, target, params, PROMPT)
        assert error < growth_cases.EXACT


@pytest.mark.slow
def test_wrong_probs_change_the_law():
    """Drafts of the model that are declared as drawn from equal probabilities."""
    kind, keys, rule = LAWS["chain"]

    def flat(draft, keys, context):
        return draft.replace(probs=jnp.full_like(draft.probs, 1 / 3))

    with jax.enable_x64(True):
        target, table = testing.tabular(3), cases.table(0)
        drafter = mutants.with_draft(flat)(drafter_of(target, kind, **keys))
        params = jax.tree.map(widen, ModelParams(table, drafter.init_params(None)))
        assert growth_cases.law_error(drafter, rule, target, params, PROMPT) > 0.01


TEXTS = [("feedback", {"gamma": 4}), ("feedback", {"tree": "3x2x1"}), ("sparse", {"gamma": 3})]


@pytest.mark.parametrize(("kind", "keys"), by_default(TEXTS, ()))
def test_greedy_text_of_ragged_rows_is_that_of_plain_decoding(kind, keys):
    target, params = testing.tiny("llama", 0)
    drafter = drafter_of(target, kind, **keys)
    pair = ModelParams(params, drafter.init_params(None))
    got, *_ = speculate(target, drafter, accept.default_rule(drafter), pair)
    assert got == oracle(target, ModelParams(params))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"gamma": 4},
        {"gamma": 4, "control": "threshold:0.2"},
        {"tree": "3x2x1", "siblings": "iid"},
        {"tree": "dynamic", "nodes": 12, "depth": 4, "top_k": 3},
    ],
    ids=str,
)
def test_state_follows_text(keys):
    """The model drafts for itself with noise: most tokens are accepted, and not all."""
    model, params, _ = shared.made("feedback", vocab=12)
    own = growth_cases.noisy_copy(params, 0.01)
    drafter = drafters.make("spire", model, model=model, params=own, **keys)
    rule = "chain" if drafter.siblings == CHAIN else "recursive"
    for temperature in (0.0, 1.0):
        growth_cases.assert_state_follows_text(
            drafter, rule, model, ModelParams(params, own), temperature
        )


@pytest.mark.slow
def test_the_target_itself_is_always_accepted():
    """A SPIRe model as target and as its own draft: every token of every draft is accepted."""
    model, params, _ = shared.made("feedback")
    drafter = drafters.make("spire", model, model=model, params=params, gamma=4)
    _, _, records = speculate(model, drafter, "chain", ModelParams(params, params))
    emitted = np.asarray(records.emitted)
    # 40 tokens in rounds of five.
    assert (emitted[:8] == 5).all() and not emitted[8:].any()


@pytest.mark.fast
def test_keys(tmp_path):
    target = testing.tabular(3)
    model, params, config = shared.made("feedback", vocab=3, width=16)
    made = drafters.make("spire", target, model=model, params=params, gamma=3)
    assert (made.name, made.siblings, made.nodes) == ("spire", CHAIN, 3)
    assert made.training.foresee is not None and made.probs is not None
    spire.save(tmp_path / "a", config, params)
    loaded = drafters.make("spire", target, model=tmp_path / "a", gamma=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, loaded.init_params(None), params))
    other, others = shared.made("feedback")[:2]
    for keys, message in [
        ({"model": model, "gamma": 5}, "smallest sliding window of spire has 5 .* at most 4 tok"),
        ({"model": model, "gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        (
            {"model": model, "gamma": 2, "tree": "2x1"},
            "spire was given gamma=2, a chain, and tree='2x1'",
        ),
        ({"model": other, "params": others}, "vocabulary of 32 and the target of 3"),
        ({"model": "nowhere"}, "nowhere is no directory"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            drafters.make("spire", target, **keys)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="spire was made from an LM without params"):
        drafters.make("spire", target, model=model, gamma=2).init_params(None)


@pytest.mark.slow
def test_a_draft_step_takes_the_same_time_at_every_length():
    """Texts of 1,000 and of 16,000 tokens in a cache of 260 slots; medians, interleaved."""
    decoder = testing.tiny_config(vocab_size=64, width=256)
    config = SpireConfig(decoder, 4, 256)
    model: LM = spire.from_config(config)
    params = spire.with_memory(config, spire.lm.init_params(decoder, jax.random.key(0)))
    token, runs = jnp.zeros((1, 1), jnp.int32), {}
    step = jax.jit(lambda p, c: model.commit(c, model.apply(p, token, c)[1], jnp.ones(1, int)))
    for length in (1000, 16000):
        cache = model.init_cache(1, length + 8)
        runs[length] = cache.replace(length=jnp.full((1,), length, jnp.int32)), []
    for _ in range(200):
        for cache, times in runs.values():
            began = time.perf_counter()
            jax.block_until_ready(step(params, cache))
            times.append(time.perf_counter() - began)
    short, long = (np.median(times[20:]) for _, times in runs.values())
    assert long < 1.1 * short, (short, long)
