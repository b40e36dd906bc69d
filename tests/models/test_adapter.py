"""Models of other libraries as an ``LM``: a forward pass with a cache of its own, other trees."""

from __future__ import annotations

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign_cases import (
    VOCAB,
    WIDTH,
    by_index,
    call,
    foreign_params,
    init_cache,
    masked,
    of_chains,
    with_heads,
    with_states,
)

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import adapter
from specjax.testing import laws, loop
from specjax.theory import statistics
from specjax.types import ModelParams

NEW = 20
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 8, 5, 6, 7, 8, 5]]


@jax.jit
def whole_pass(params, ids):
    size = len(ids)
    mask = jnp.tril(jnp.ones((1, size, size), bool))
    return call(params, ids[None], jnp.arange(size)[None], init_cache(1, size), mask)[0][0]


def plain(params, ids, new=NEW):
    """Greedy decoding by whole passes."""
    ids, size = list(ids), len(ids) + new
    for last in range(len(ids) - 1, size - 1):
        padded = np.zeros(max(map(len, PROMPTS)) + NEW, np.int32)
        padded[: last + 1] = ids
        ids.append(int(whole_pass(params, padded)[last].argmax()))
    return ids


@functools.cache
def answers():
    return [plain(foreign_params(), ids)[len(ids) :] for ids in PROMPTS]


def decoded(lm, drafter, params, prompts=PROMPTS, rule="deterministic"):
    tokens, lengths = decode.pack_prompts(prompts)
    keys, room = rng.row_keys(0, len(prompts)), tokens.shape[1] + NEW
    greedy = sampling.make_sampling(len(prompts), temperature=0.0)
    state = decode.prefill(
        *(lm, drafter, params, tokens, lengths, keys),
        max_len=room,
        limit=lengths + NEW,
        sampling=greedy,
        chunk=4,
    )
    state, records = decode.generate(lm, drafter, accept.load(rule), params, state, max_steps=NEW)
    return decode.outputs(state, list(map(len, prompts))), records


@pytest.mark.parametrize("name", ["prompt_lookup", "token_recycling"])
def test_greedy_text_is_that_of_whole_passes(name):
    """Ragged rows, a chain and a tree; some drafts are accepted."""
    lm = masked()
    drafter = drafters.make(name, lm)
    params = ModelParams(foreign_params(), drafter.init_params(None))
    texts, records = decoded(lm, drafter, params)
    assert texts == answers() and np.asarray(records.accepted).sum() > 0


@pytest.mark.parametrize("make", [masked, of_chains])
def test_the_contract_of_a_model(make):
    report = testing.check_lm(make(), foreign_params(), progress=False)
    assert report.passed, report
    assert ("left out: the model takes chains only" in str(report)) == (make is of_chains)


def test_wrong_models_without_a_mask_fail():
    """The index of the first row for all rows; the block of earlier calls is not read."""
    lm = of_chains()

    def first_index(params, tokens, cache, layout=None, block=None):
        same = cache.replace(length=jnp.broadcast_to(cache.length[:1], cache.length.shape))
        return lm.apply(params, tokens, same, layout, block)

    def forgets(params, tokens, cache, layout=None, block=None):
        block = block and jax.tree.map(jnp.zeros_like, block)
        return lm.apply(params, tokens, cache, layout, block)

    for apply, check in (
        (first_index, "rows of unequal length"),
        (forgets, "a chain in two parts"),
    ):
        report = testing.check_lm(lm._replace(apply=apply), foreign_params(), progress=False)
        assert check in [each.check for each in report.findings if each.passed is False]


def test_a_model_without_a_mask_takes_chains():
    lm, params = of_chains(), ModelParams(foreign_params())
    assert decoded(lm, drafters.make("prompt_lookup", lm), params)[0] == answers()
    with pytest.raises(UserError, match="cannot verify or grow a tree; take a drafter of chains"):
        trees = drafters.make("token_recycling", lm)
        decoded(lm, trees, ModelParams(foreign_params(), trees.init_params(None)))


@pytest.mark.parametrize("control", ["", "threshold:0.3"])
def test_a_model_without_a_mask_drafts_chains(control):
    """It is its own draft model: all that is verified is accepted."""
    lm, params = of_chains(), foreign_params()
    drafter = drafters.make("draft_model", lm, model=lm, params=params, gamma=3, control=control)
    texts, records = decoded(lm, drafter, ModelParams(params, params), rule="chain")
    drafted, accepted = (np.asarray(x) for x in (records.drafted, records.accepted))
    assert texts == answers() and (accepted == drafted).all() and accepted.sum() > NEW
    if not control:
        trees = drafters.make("draft_tree", masked(), model=lm, params=params)
        with pytest.raises(UserError, match="cannot verify or grow a tree"):
            decoded(masked(), trees, ModelParams(params, params), rule="recursive")


def test_new_parameters_compile_nothing():
    lm, again = masked(), masked()
    assert lm == again and hash(lm.apply) == hash(again.apply)
    drafter = drafters.make("prompt_lookup", lm)
    decoded(lm, drafter, ModelParams(foreign_params()))
    before = decode._generate._cache_size()
    other = foreign_params(1)
    texts, _ = decoded(again, drafters.make("prompt_lookup", again), ModelParams(other))
    assert decode._generate._cache_size() == before
    assert texts == [plain(other, ids)[len(ids) :] for ids in PROMPTS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtypes_are_kept(dtype):
    with jax.enable_x64(dtype == "float64"):
        params = {name: jnp.asarray(x, dtype) for name, x in foreign_params().items()}
        lm = adapter.from_call(call, Bound(init_cache, dtype=dtype), vocab_size=VOCAB)
        out = jax.eval_shape(lm.apply, params, jnp.zeros((1, 2), int), lm.init_cache(1, 4))[0]
    assert out.logits.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)


def test_a_window_counts_positions():
    """Of tokens in a block the depth counts, not the slot behind all committed ones."""
    lm = adapter.from_call(call, init_cache, vocab_size=VOCAB, window=3)
    assert testing.check_lm(lm, foreign_params(), progress=False).passed


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            lambda batch, slots: {"k": jnp.zeros((batch, 128))},
            r"gives float32\[2, 128\] at \['k'\]",
        ),
        (
            lambda batch, slots: jnp.zeros((slots, 4)),
            "at its root; an array of a cache has an axis",
        ),
        (lambda batch, slots: {"end": jnp.zeros((), int)}, "gives no array with slots"),
        (lambda batch, slots: [jnp.zeros((batch, slots))] * batch, "other trees for other sizes"),
    ],
)
def test_caches_of_another_form(made, problem):
    with pytest.raises(UserError, match=problem) as caught:
        adapter.from_call(call, made, vocab_size=VOCAB)
    assert "\n" not in str(caught.value)


def test_one_index_for_rows_of_several_lengths():
    lm = adapter.from_call(by_index, init_cache, vocab_size=VOCAB, chains_only=True)
    with pytest.raises(UserError, match="has one index for all rows, and the batch 3 rows"):
        decoded(lm, drafters.make("none", lm), ModelParams(foreign_params()))


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_heads_read_the_states_that_the_call_returns(name):
    lm, params = with_heads(), foreign_params()
    drafter = cases.random_heads(name, lm, params, gamma=2)
    own = ModelParams(params, drafter.init_params(None))
    assert decoded(lm, drafter, own, rule="chain")[0] == answers()


def test_heads_say_what_the_model_lacks():
    without = adapter.from_call(call, init_cache, vocab_size=VOCAB, width=WIDTH)
    for lm, make, problem in (
        (masked(), lambda lm: drafters.make("eagle", lm), "it lacks width, embed, unembed"),
        (without, lambda lm: drafters.make("medusa", lm), "it lacks embed, unembed"),
        (without, run_none, "width is 16, and call returns no hidden states; return them, or"),
        (
            adapter.from_call(with_states, init_cache, vocab_size=VOCAB, width=8),
            run_none,
            r"width is 8, and call returns hidden states of 16; give width=16",
        ),
    ):
        with pytest.raises(UserError, match=problem) as caught:
            make(lm)
        assert "\n" not in str(caught.value)


def run_none(lm):
    return decoded(lm, drafters.make("none", lm), ModelParams(foreign_params()))


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_the_law_of_sampled_text(shape):
    """Counted in the compiled loop; other parameters of the target are detected."""
    vocab, settings = 3, {"temperature": 0.7}
    lm = masked(vocab) if shape == "tree" else of_chains(vocab)
    target, draft = (foreign_params(seed, vocab) for seed in (0, 1))
    more = {"tree": "2x1"} if shape == "tree" else {"gamma": 2}
    name, rule = ("draft_tree", "recursive") if shape == "tree" else ("draft_model", "chain")
    drafter = drafters.make(name, lm, model=lm, params=draft, **more)
    rules = accept.load(rule)
    fit = loop.loop_fit(
        *(lm, drafter, rules, ModelParams(target, draft), [1, 2], 4, 30_000), **settings
    )
    assert fit.p_value > 1e-3 and fit.detectable < 0.03, fit
    wrong = ModelParams(jax.tree.map(lambda x: 0.8 * x, target), draft)
    counted = loop.loop_fit(lm, drafter, rules, wrong, [1, 2], 4, 30_000, **settings).counts
    law = laws.sequence_law(lm, target, [1, 2], 4, **settings)
    assert statistics.chi_square(counted, law)[2] < 1e-6


def rename(tree):
    """The parameters of ``testing.tiny`` from a tree in which kernels have axes of heads."""
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x, tree["weights"])


def test_mapped_parameters():
    """Logits, heads and parts are those of the model with its own tree."""
    lm, params = testing.tiny(layers=3, width=16, vocab_size=VOCAB)
    split = lambda x: x.reshape(-1, 1, x.shape[-1]) if x.ndim == 2 else x  # noqa: E731
    theirs = {"weights": jax.tree.map(split, params)}
    other = adapter.mapped(lm, rename)
    assert other.apply == adapter.mapped(lm, rename).apply
    for name, keys in {
        "eagle3": {"gamma": 2},
        "early_exit": {"exit_layer": 1, "adapter": "layer"},
    }.items():
        results = []
        for model, own in ((lm, params), (other, theirs)):
            drafter = cases.random_heads(name, model, own, **keys)
            draft = drafter.init_params(None)
            texts, records = decoded(model, drafter, ModelParams(own, draft), rule="chain")
            results.append((texts, np.asarray(records.emitted).tolist()))
        assert results[0] == results[1]
