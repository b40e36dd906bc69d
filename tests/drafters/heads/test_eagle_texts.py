"""EAGLE on long prompts, in bfloat16, with another width than its target, with a searched tree."""

from __future__ import annotations

import cases
import eagle_cases as shared
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_cases import TABLE, TARGET, VOCAB
from internals import heads_prefix as _prefix
from internals import setup_of

from specjax import accept, decode, drafters, rng, sampling
from specjax.drafters.files import head_files
from specjax.errors import UserError
from specjax.models import lm
from specjax.topology import search
from specjax.types import Context, ModelParams

pytestmark = pytest.mark.fast
SIZES = {"nodes": 8, "depth": 2, "top_k": 4}


def assert_greedy(drafter, prompts, new=8):
    """The decoded texts are the target's greedy ones; some drafts are accepted."""
    params = ModelParams(TABLE, drafter.init_params(None))
    packed, lengths = decode.pack_prompts(prompts)
    rows, size = len(prompts), packed.shape[1] + new
    keys = {"max_len": size, "sampling": sampling.make_sampling(rows, 0.0)}
    state = decode.prefill(TARGET, drafter, params, packed, lengths, rng.row_keys(0, rows), **keys)
    rule = accept.load("deterministic")
    state, records = decode.generate(TARGET, drafter, rule, params, state, max_steps=size)
    decode.check(state)
    assert bool(state.done.all())
    tokens = np.asarray(state.tokens)[:, :size]
    logits = jax.jit(lambda x: lm.forward(TARGET, TABLE, x).logits)(jnp.maximum(tokens, 0))
    for row, begin in enumerate(np.asarray(lengths)):
        end = int(state.length[row])
        expected = np.asarray(logits)[row, begin - 1 : end - 1].argmax(-1)
        np.testing.assert_array_equal(tokens[row, begin:end], expected)
    return int(records.accepted.sum())


@pytest.mark.parametrize("label", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_prompt_of_several_chunks(label, monkeypatch):
    """The cache after a prompt does not depend on how many tokens are fed at once."""
    size = 3 + _prefix.CHUNK
    tokens = np.random.default_rng(0).integers(0, VOCAB, (3, size)).astype(np.int32)
    lengths = jnp.asarray([size, size - 2, 40], jnp.int32)
    drafter, params = shared.made(label)
    context = Context(jnp.asarray(tokens), lengths, sampling.make_sampling(3))

    def state(chunk):
        monkeypatch.setattr(_prefix, "CHUNK", chunk)

        @jax.jit
        def fed(params):
            target = TARGET.with_taps(drafter.taps)
            out = lm.forward(target, params.target, context.tokens[:, :-1])
            kept = drafter.init(params, context, out, size).kept
            return shared.stepper_of(drafter).begin(params, context, kept)

        return fed(params)

    default, once = (state(chunk) for chunk in (_prefix.CHUNK, size))
    np.testing.assert_array_equal(default.kept.cache.length, lengths - 1)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        (default.logits, default.kept.features, default.kept.recycled, default.kept.cache),
        (once.logits, once.kept.features, once.kept.recycled, once.kept.cache),
    )


@pytest.mark.parametrize("name", ["eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_parameters_in_bfloat16(name):
    wide = cases.random_heads(name, TARGET, TABLE, scale=0.25, **SIZES).init_params(None)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide)
    drafter = drafters.make(name, TARGET, params=params, **SIZES)
    assert jax.tree.leaves(shared.network_of(drafter).init_cache(1, 2))[0].dtype == jnp.bfloat16
    assert assert_greedy(drafter, shared.PROMPTS) > 0


def test_another_width_and_prompts_of_one_token():
    """A network of half the target's width, with its own embedding; a first round without draft."""
    made = cases.random_heads("eagle3", TARGET, TABLE, width=8)
    drafter = drafters.make("eagle3", TARGET, params=made.init_params(None), **SIZES)
    assert shared.network_of(drafter).width == 8 != TARGET.width
    assert assert_greedy(drafter, [[token] for token in range(VOCAB)]) > 0


def test_tree_of_measured_accuracies(tmp_path):
    """The accuracies are in the files; the search takes the best shape for them."""
    written = cases.random_heads("eagle", TARGET, TABLE, scale=0.25)
    params, facts = written.init_params(None), dict(written.training.facts)
    accuracy = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.1], [0.4, 0.1, 0.1]]
    for name, more in (("measured", {"accuracy": accuracy}), ("not", {})):
        head_files.write(tmp_path / name, "eagle", params, facts | more)
    keys = {"tree": "search", "nodes": 6}
    drafter = drafters.make("eagle", TARGET, model=tmp_path / "measured", **keys)
    best, _ = search.optimal(np.asarray(accuracy), 6, 3, 3)
    assert setup_of(drafter).plan.growth.shape.parents == best.parents
    assert (drafter.nodes, drafter.siblings) == (6, "deterministic")
    assert assert_greedy(drafter, shared.PROMPTS) > 0
    with pytest.raises(UserError, match="eagle has no measured accuracies to search a tree of 6"):
        drafters.make("eagle", TARGET, model=tmp_path / "not", **keys)
