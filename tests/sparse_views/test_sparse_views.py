"""Sparse views against NumPy: which tokens they hold, and what attention over them gives."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import by_default

from specjax import decode, sampling, testing, tree
from specjax import sparse_views as views
from specjax.cache import KVCache
from specjax.errors import UserError
from specjax.models import attention, lm
from specjax.models.attention import Past, Scores, Stored
from specjax.sparse_views import ring
from specjax.sparse_views.retrieval import chunk_scores
from specjax.sparse_views.view import full_layers
from specjax.types import Context

VOCAB, SLOTS, MOST = 5, 80, 4
LENGTHS = [3, 30, 17, 9]  # of the prompts, with their pending tokens


@functools.cache
def text():
    """i32[B,SLOTS]: what the rows' texts become."""
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (4, SLOTS)), jnp.int32)


@functools.cache
def decoder(family="llama"):
    return testing.tiny(family, 0, vocab_size=VOCAB, width=16)


@functools.partial(jax.jit, static_argnums=0)
def fed(model, params, tokens, lengths, cache):
    """The cache after a prefill of these texts."""
    return decode.feed(model, params, tokens, lengths, cache)[1]


@functools.partial(jax.jit, static_argnums=0)
def longer(model, params, tokens, counts, cache):
    """The cache with the first ``counts`` tokens of a block."""
    return model.commit(cache, model.apply(params, tokens, cache)[1], counts)


def prompted(model, params, lengths=LENGTHS):
    """A context whose cache has the texts without their pending tokens."""
    lengths = jnp.asarray(lengths, jnp.int32)
    width = int(lengths.max())
    cache = model.init_cache(4, SLOTS)
    cache = fed(model, params, text()[:, : width - 1], lengths - 1, cache)
    return Context(text(), lengths, sampling.make_sampling(4), cache)


def grown(model, params, context, counts):
    """The context after ``counts`` i32[B] more tokens."""
    counts = jnp.asarray(counts, jnp.int32)
    place = context.cache.length[:, None] + jnp.arange(MOST)
    tokens = jnp.take_along_axis(context.tokens, place, 1)
    cache = longer(model, params, tokens, counts, context.cache)
    return context.replace(length=context.length + counts, cache=cache)


def positions_held(cache: KVCache) -> list[list[int]]:
    """The positions that the view of a ``keyed`` model holds in each row."""
    assert cache.held is not None
    rows = np.asarray(cache.k[0])[:, 0, :, 1].astype(int)
    return [
        sorted(row[:held].tolist()) for row, held in zip(rows, np.asarray(cache.held), strict=True)
    ]


def rounds(view, model, params, number=14):
    """Plays rounds that add 0 to MOST tokens; yields context, view and kept state after each."""
    random = np.random.default_rng(3)
    context = prompted(model, params)
    kept = jax.jit(view.init)(params, context)
    read = jax.jit(view.read)
    for _ in range(number):
        cache, kept = read(params, context, kept)
        yield context, cache, kept
        counts = random.integers(0, MOST + 1, 4)
        context = grown(model, params, context, counts)
        kept = view.commit(kept, jnp.asarray(counts > 0))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("budget", "sinks"), by_default([(8, 3), (4, 0), (3, 2), (200, 4)], [(8, 3), (200, 4)])
)
def test_streaming_holds_the_first_and_the_most_recent(budget, sinks):
    model, params = testing.keyed(VOCAB), testing.random_table(0, VOCAB)
    view = views.streaming(model, budget=budget, sinks=sinks, most=MOST)
    assert view.slots == budget and not view.history
    for context, cache, _ in rounds(view, model, params):
        assert np.array_equal(cache.length, context.cache.length)
        assert cache.k[0].shape[2] == min(budget, SLOTS)
        for length, held in zip(np.asarray(cache.length), positions_held(cache), strict=True):
            recent = range(max(0, length - (budget - sinks)), length)
            assert held == sorted({*range(min(sinks, length)), *recent})


@pytest.mark.fast
@pytest.mark.parametrize(
    ("budget", "sinks"), by_default([(7, 3), (4, 0), (3, 2), (200, 4)], [(7, 3), (4, 0)])
)
def test_a_streaming_model_holds_the_first_and_the_most_recent(budget, sinks):
    """Also after blocks of which a part is committed, and blocks longer than the recent part."""
    model, params = testing.keyed(VOCAB), testing.random_table(0, VOCAB)
    small = views.streaming_model(model, budget=budget, sinks=sinks)
    cache = small.init_cache(4, SLOTS)
    assert cache.k[0].shape[2] == min(budget, SLOTS)
    random = np.random.default_rng(1)
    for size in (1, 3, 9, 1, 5, 12, 4):
        places = cache.length[:, None] + jnp.arange(size)
        counts = jnp.asarray(random.integers(0, size + 1, 4), jnp.int32)
        cache = longer(small, params, jnp.take_along_axis(text(), places, 1), counts, cache)
        for length, held in zip(np.asarray(cache.length), positions_held(cache), strict=True):
            recent = range(max(0, length - (budget - sinks)), length)
            assert held == sorted({*range(min(sinks, length)), *recent})


def test_a_pass_of_a_streaming_model_is_a_pass_with_a_mask():
    """A decoder that is fed token by token; then a chain of three, after its cache."""
    model, params = decoder()
    small, sinks, recent, size = views.streaming_model(model, budget=8, sinks=3), 3, 5, 20
    cache, tokens = small.init_cache(4, SLOTS), text()[:, : size + 3]
    one = jnp.ones((4,), jnp.int32)
    step = jax.jit(
        lambda cache, token: small.commit(cache, small.apply(params, token, cache)[1], one)
    )
    for place in range(size):
        cache = step(cache, tokens[:, place, None])
    out, _ = jax.jit(small.apply)(params, tokens[:, size:], cache)
    own, past = np.arange(size + 3)[:, None], np.arange(size + 3)
    # What is held when a token is fed: those before it, or before the chain that it is in.
    end = np.minimum(own, size)
    visible = (past <= own) & ((past < sinks) | (past >= end - recent))
    layout = tree.Layout(
        jnp.broadcast_to(visible, (4, size + 3, size + 3)), jnp.broadcast_to(past, (4, size + 3))
    )
    full, _ = jax.jit(model.apply)(params, tokens, model.init_cache(4, 0), layout)
    np.testing.assert_allclose(out.logits, full.logits[:, size:], atol=1e-4)


@pytest.mark.fast
def test_a_view_that_missed_rounds_catches_up():
    """Another drafter proposed for a while: the same as after a fresh look at the text."""
    model, params = testing.keyed(VOCAB), testing.random_table(0, VOCAB)
    for make in (
        functools.partial(views.streaming, budget=6, sinks=2),
        functools.partial(views.retrieval, budget=4, chunk=2, refresh=2),
    ):
        view = make(model, most=MOST)
        context = prompted(model, params)
        kept = view.init(params, context)
        for _ in range(5):
            context = grown(model, params, context, [4, 4, 0, 1])
        cache, _ = view.read(params, context, kept)
        fresh, _ = view.read(params, context, view.init(params, context))
        missed, now = positions_held(cache), positions_held(fresh)
        # Without a new choice, the tokens since the choice are in the view.
        assert missed[0] == now[0] and missed[1] == now[1] and missed[2] == now[2]
        length = int(context.cache.length[3])
        assert set(range(length - 4, length)) <= set(missed[3])


@pytest.mark.fast
def test_retrieval_holds_the_best_chunks_and_all_newer_tokens():
    model, params = testing.keyed(VOCAB), testing.random_table(0, VOCAB)
    view = views.retrieval(model, budget=6, chunk=2, refresh=3, most=MOST)
    assert view.slots == 6 + 1 + 2 * MOST and view.history
    chosen, since = [set()] * 4, [0] * 4
    grew = np.zeros(4, int)
    before = None
    for number, (context, cache, _) in enumerate(rounds(view, model, params)):
        length = np.asarray(context.cache.length)
        grew = grew if before is None else grew + (length > before)
        before = length
        for row, held in enumerate(positions_held(cache)):
            if number == 0 or grew[row] == 3:
                chosen[row], since[row] = best_chunks(model, params, context, row, 2, 3)
                grew[row] = 0
            assert held == sorted({*chosen[row], *range(since[row], length[row])})


def best_chunks(model, params, context, row, chunk, count):
    """The tokens of the chosen chunks of a row, and the first token after all complete chunks."""
    asked = model.inside.queries(params, context.pending[:, None], context.cache)[0]
    query, keys = np.asarray(asked.q)[row, 0, 0], np.asarray(context.cache.k[0])[row, 0]
    complete = int(context.cache.length[row]) // chunk
    scores = [float(query @ keys[i * chunk : (i + 1) * chunk].mean(0)) for i in range(complete)]
    others = sorted(range(1, complete), key=lambda i: -scores[i])[: count - 1]
    best = [0, *others] if complete else []
    return {i * chunk + j for i in best for j in range(chunk)}, complete * chunk


def test_scores_of_chunks_average_the_queries_of_a_group():
    random = np.random.default_rng(0)
    query, keys = random.normal(size=(2, 6, 4)), random.normal(size=(2, 3, 11, 4))
    result = chunk_scores(jnp.asarray(query), jnp.asarray(keys), 4)
    assert result.shape == (2, 3, 2)
    for b, h, c in np.ndindex(result.shape):
        mean = keys[b, h, 4 * c : 4 * c + 4].mean(0)
        expected = np.mean([query[b, 2 * h + g] @ mean for g in range(2)])
        assert result[b, h, c] == pytest.approx(expected, abs=1e-5)


@pytest.mark.fast
def test_queries_are_those_that_attention_multiplies(monkeypatch):
    for family in ("gpt2", "gemma2", "olmo2"):
        model, params = decoder(family)
        tokens, seen = text()[:, :3], []
        empty = model.init_cache(4, 0)

        def attend(q, scores, *rest, seen=seen):
            seen.append(np.asarray(q, np.float32) / scores.divisor)
            return attend.real(q, scores, *rest)

        attend.real = attention.attend
        with monkeypatch.context() as patch:
            patch.setattr(attention, "attend", attend)
            model.apply(params, tokens, empty)
        given = model.inside.queries(params, tokens, empty)
        assert len(given) == len(seen) == len(empty.k)
        for asked, products in zip(given, seen, strict=True):
            heads = products.shape[1]
            q = np.asarray(asked.q).reshape(4, 3, heads, -1, products.shape[3])
            q = q.transpose(0, 2, 3, 1, 4).reshape(products.shape)
            np.testing.assert_allclose(q, products, atol=1e-6)


def masses(model, params, context, layer, queries):
    """f64[B,H,S]: SnapKV's attention of the last tokens before the pending one, head by head."""
    length = np.asarray(context.cache.length)
    keys = np.asarray(context.cache.k[layer], np.float64)
    result = np.zeros(keys.shape[:3])
    # The queries of a whole pass over each text.
    empty = model.init_cache(4, 0)
    q = np.asarray(
        jax.jit(model.inside.queries)(params, context.tokens, empty)[layer].q, np.float64
    )
    group = q.shape[2] // keys.shape[1]
    for row, end in enumerate(length):
        for place in range(max(0, end - queries), end):
            for head in range(q.shape[2]):
                scores = keys[row, head // group, : place + 1] @ q[row, place, head]
                weights = np.exp(scores - scores.max())
                result[row, head // group, : place + 1] += weights / weights.sum() / group
    return result


def test_snapkv_holds_what_the_end_of_the_prompt_attends_to():
    model, params = decoder()
    budget, window, queries, pool = 8, 3, 4, 3
    view = views.snapkv(model, budget=budget, window=window, queries=queries, pool=pool, most=MOST)
    context = prompted(model, params)
    cache, _ = jax.jit(view.read)(params, context, jax.jit(view.init)(params, context))
    assert view.history and cache.held.tolist() == [2, 8, 8, 8]
    for layer in range(2):
        mass = masses(model, params, context, layer, queries)
        for row, head in np.ndindex(*mass.shape[:2]):
            length = int(context.cache.length[row])
            held = held_positions(cache, context.cache, layer, row, head)
            if length <= budget:
                assert held == list(range(length))
                continue
            before = np.where(np.arange(SLOTS) < length - window, mass[row, head], 0)
            pooled = np.convolve(before, np.ones(pool), "same")[: length - window]
            best = np.argsort(-pooled, kind="stable")[: budget - window].tolist()
            assert held == sorted([*best, *range(length - window, length)])


def held_positions(view, whole, layer, row, head):
    """Where in the whole cache the held keys are; values must be of the same tokens."""
    count = int(view.held[row])
    keys, values = (np.asarray(x[layer])[row, head] for x in (view.k, view.v))
    every, all_values = (np.asarray(x[layer])[row, head] for x in (whole.k, whole.v))
    found = [int(np.abs(every - key).sum(-1).argmin()) for key in keys[:count]]
    assert np.array_equal(every[found], keys[:count])
    assert np.array_equal(all_values[found], values[:count])
    return sorted(found)


def test_most_attended_takes_no_token_of_the_window():
    mass = jnp.asarray([[[0.0, 5, 0, 1, 9, 9, 9]]])
    chosen = ring.most_attended(mass, jnp.asarray([4]), 3, 2)
    # The means of neighbours are 5, 5, 6 and 1.
    assert sorted(chosen[0, 0].tolist()) in ([0, 2], [1, 2])


@pytest.mark.parametrize("name", by_default(["streaming", "snapkv", "retrieval"], ["retrieval"]))
def test_attention_over_a_view_is_masked_full_attention(name):
    """Each key head of each layer, in float64 NumPy over the whole cache with a mask."""
    model, params = decoder()
    made = {
        "streaming": functools.partial(views.streaming, budget=8, sinks=3),
        "snapkv": functools.partial(views.snapkv, budget=8, window=3, queries=4, pool=3),
        "retrieval": functools.partial(views.retrieval, budget=4, chunk=2, refresh=2),
    }[name](model, most=MOST)
    for context, cache, _ in rounds(made, model, params, 3):
        queries = model.inside.queries(params, context.pending[:, None], context.cache)
        for layer in full_layers(cache):
            check_layer(cache, context.cache, layer, np.asarray(queries[layer].q)[:, 0])


def check_layer(view, whole, layer, query):
    """``query`` f32[B,Q,D]: that of one new token, divided as scores are."""
    heads, width = view.k[layer].shape[1], query.shape[-1]
    own = np.random.default_rng(layer).normal(size=(4, heads, 1, width)).astype(np.float32)
    past = Past(view.length, tree.chain_layout(4, 1), view.held)
    stored = Stored(view.k[layer], view.v[layer])
    grouped = jnp.asarray(query.reshape(4, heads, -1, width))
    result = attention.attend(
        grouped, Scores(1.0), past, stored, jnp.asarray(own), jnp.asarray(own)
    )
    for row, head in np.ndindex(4, heads):
        held = held_positions(view, whole, layer, row, head)
        mask = np.isin(np.arange(SLOTS), held)
        keys, values = (
            np.concatenate([np.asarray(x[layer], np.float64)[row, head], own[row, head]])
            for x in (whole.k, whole.v)
        )
        for index, one in enumerate(np.asarray(grouped, np.float64)[row, head]):
            scores = np.where(np.append(mask, True), keys @ one, -np.inf)
            weights = np.exp(scores - scores.max())
            expected = weights @ values / weights.sum()
            np.testing.assert_allclose(result[row, head, index], expected, atol=2e-5)


@pytest.mark.slow
def test_a_streaming_pass_is_a_pass_with_a_mask():
    """The whole decoder: the pending token sees the first and the most recent tokens."""
    model, params = decoder()
    view = views.streaming(model, budget=8, sinks=3, most=MOST)
    context = prompted(model, params)
    cache, _ = view.read(params, context, view.init(params, context))
    out, _ = model.apply(params, context.pending[:, None], cache)
    width = max(LENGTHS)
    place = np.arange(width)
    visible = np.broadcast_to(place <= place[:, None], (4, width, width)).copy()
    for row, length in enumerate(LENGTHS):
        last = length - 1
        visible[row, last] = (place < 3) | ((place >= last - 5) & (place < last)) | (place == last)
        visible[row, last] &= place <= last
    layout = tree.Layout(jnp.asarray(visible), jnp.broadcast_to(jnp.asarray(place), (4, width)))
    full, _ = model.apply(params, context.tokens[:, :width], model.init_cache(4, 0), layout)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(out.logits[row, 0], full.logits[row, length - 1], atol=1e-4)


@pytest.mark.parametrize("name", ["streaming", "retrieval"])
@pytest.mark.slow
def test_layers_with_a_window_keep_their_ring(name):
    """A view that holds the whole text changes nothing, also beside layers with windows."""
    config = testing.tiny_config(vocab_size=VOCAB, width=16)
    model = lm.from_config(dataclasses.replace(config, windows=(6, None)))
    params = decoder()[1]
    keys = {"sinks": 2} if name == "streaming" else {"chunk": 2, "refresh": 2}
    view = getattr(views, name)(model, budget=48, most=MOST, **keys)
    for context, cache, _ in rounds(view, model, params, 4):
        token = context.pending[:, None]
        sparse, whole = (model.apply(params, token, c)[0].logits for c in (cache, context.cache))
        np.testing.assert_allclose(sparse, whole, atol=1e-4)
        assert [k.shape[2] for k in cache.k] == [6, view.slots]


@pytest.mark.fast
def test_models_without_a_choice_are_refused():
    table = testing.tabular(3)
    with pytest.raises(UserError, match="tabular has none; take a decoder of specjax.models"):
        views.streaming(table, budget=8, sinks=1, most=2)
    config = testing.tiny_config(vocab_size=VOCAB, width=16)
    local, mixed = (
        lm.from_config(dataclasses.replace(config, windows=windows))
        for windows in ((6, 6), (6, None))
    )
    with pytest.raises(UserError, match="all layers of lm have a sliding window"):
        views.retrieval(local, budget=8, chunk=2, refresh=1, most=2)
    with pytest.raises(UserError, match="reads the prompt's last tokens again"):
        views.snapkv(mixed, budget=8, window=2, queries=2, pool=1, most=2)
    assert views.streaming(mixed, budget=8, sinks=1, most=2).slots == 8
