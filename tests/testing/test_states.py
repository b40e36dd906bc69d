"""The states and forecasts of all drafters, and the model that shows wrong cache entries.

A wrong state changes the acceptance only, so no check of texts can see it.
"""

from __future__ import annotations

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import testing, tree
from specjax.models import lm
from specjax.testing import forecast_checks, state_checks

# A cache that grows by levels. tests/drafters has caches over the target's features.
DEFAULT = ("without_replacement",)
STATES = [name for name in cases.NAMES if name not in ("irregular", "ragged", "none")]
FORECASTS = [
    name
    for name in cases.NAMES
    if (training := cases.case(name).drafter.training) and training.foresee
]


@pytest.mark.parametrize("name", by_default(STATES, DEFAULT))
def test_states_on_real_decoders(name):
    """After every round a draft equals that after a fresh prefill of the same text."""
    _, target, drafter, params = cases.real(name)
    finding = state_checks.state_follows_text(drafter, target, params)
    assert finding.passed, str(finding)
    assert drafter.history == ("exempt" in finding.detail)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_widths_do_not_matter(name):
    """On the table, whose logits are equal at every width."""
    _, target, drafter, params = cases.case(name)
    finding = state_checks.widths_do_not_matter(drafter, target, params)
    assert finding.passed, str(finding)


@pytest.mark.parametrize("name", by_default(FORECASTS, ("medusa",)))
def test_forecasts_equal_decoding(name):
    _, target, drafter, params = cases.case(name)
    finding = forecast_checks.forecast_equals_decoding(drafter, target, params)
    assert finding.passed, str(finding)


@pytest.mark.fast
def test_the_drafters_whose_drafts_depend_on_history():
    names = {name for name in cases.NAMES if cases.case(name).drafter.history}
    views = {"magicdec snapkv", "magicdec tree", "triforce"}
    more = views | {"layer_skip matchness", "layer_skip tree"}
    assert names == {"jacobi", "lookahead", "token_recycling", "trie", "controlled"} | more


# The model that depends on its whole cache.
VOCAB = 4
MODEL, TABLE = testing.whole_text(testing.tabular(VOCAB)), testing.random_table(0, VOCAB)
TEXT = jnp.asarray([[3, 1, 0, 2, 2, 1, 3]])


def cached(tokens):
    cache = MODEL.init_cache(1, 16)
    _, block = MODEL.apply(TABLE, tokens, cache)
    return MODEL.commit(cache, block, jnp.array([tokens.shape[1]]))


@pytest.mark.fast
def test_a_wrong_entry_anywhere_changes_the_output():
    """At once in most cases; two entries may lead to the same of the five tables."""
    cache, pending = cached(TEXT[:, :-1]), TEXT[:, -1:]
    right = np.asarray(MODEL.apply(TABLE, pending, cache)[0].logits)
    assert np.array_equal(right, np.asarray(lm.forward(MODEL, TABLE, TEXT).logits)[:, -1:])
    # Row 11 i + j has another entry in slot i.
    slot, other = (x.ravel() for x in np.meshgrid(np.arange(6), np.arange(1, 12), indexing="ij"))
    entries = jnp.broadcast_to(cache.entries, (66, 16)).at[np.arange(66), slot].add(other)
    wrong = cache.replace(entries=entries, length=jnp.full((66,), 6))
    logits = MODEL.apply(TABLE, jnp.broadcast_to(pending, (66, 1)), wrong)[0].logits
    changed = (np.asarray(logits) != right).any((1, 2))
    assert changed.mean() > 0.75 and changed.reshape(6, 11).any(1).all()
    shorter = MODEL.apply(TABLE, pending, cache.replace(length=cache.length - 1))[0].logits
    assert not np.array_equal(right, np.asarray(shorter))


@pytest.mark.fast
@pytest.mark.slow
def test_a_tree_fed_level_by_level_equals_its_paths():
    parents = jnp.array([[-1, 0, 0, 1, 2]])
    tokens = jnp.array([[3, 0, 1, 2, 2]])
    cache = cached(TEXT[:, :-1])
    whole, block = MODEL.apply(TABLE, tokens, cache, tree.layout(parents))
    first, part = MODEL.apply(TABLE, tokens[:, :3], cache, tree.layout(parents[:, :3]))
    rest, more = MODEL.apply(TABLE, tokens[:, 3:], cache, tree.layout(parents, 2), part)
    pieces = np.concatenate([first.logits, rest.logits], 1)
    assert np.array_equal(pieces, np.asarray(whole.logits))
    assert np.array_equal(np.concatenate([part, more], 1), np.asarray(block))
    for path in ([0, 1, 3], [0, 2, 4]):
        text = jnp.concatenate([TEXT[:, :-1], tokens[:, jnp.array(path)]], 1)
        expected = np.asarray(lm.forward(MODEL, TABLE, text).logits)[:, -1]
        assert np.array_equal(expected, np.asarray(whole.logits)[:, path[-1]])
        kept = MODEL.commit(cache, block, jnp.array([3]), jnp.array([path]))
        assert jax.tree.all(jax.tree.map(np.array_equal, kept, cached(text)))
