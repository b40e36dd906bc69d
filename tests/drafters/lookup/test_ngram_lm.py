"""N-gram tables and their mixture, against direct counts; acceptance against its closed form."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import accept, decode, drafters, rng, sampling, testing
from specjax.data import ngram_tables
from specjax.drafters.lookup import ngram_lm
from specjax.errors import UserError
from specjax.types import Context, ModelParams

# Cases of the conformance matrix, see tests/cases.py.
MATRIX = {
    "ngram_lm": ("ngram_lm", {"gamma": 2, "mode": "sample", "tables": "@tables"}, ("block",)),
}

V = 7


def documents(seed, count=20, longest=60, vocab=V):
    """Random texts in which some words follow some others more often."""
    random = np.random.default_rng(seed)
    weights = random.dirichlet(np.full(vocab, 0.3), vocab)
    texts = []
    for _ in range(count):
        text = [int(random.integers(vocab))]
        for _ in range(random.integers(longest)):
            text.append(int(random.choice(vocab, p=weights[text[-1]])))
        texts.append(text)
    return texts


def counted(texts, before, newest, *, order, l2, l3, keep, smoothing, contexts=None):
    """The mixture f64[V], counted in the texts themselves."""

    def row(context):
        n = len(context)
        seen = Counter(
            t[i + n] for t in texts for i in range(len(t) - n) if tuple(t[i : i + n]) == context
        )
        kept = sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:keep]
        out = np.zeros(V)
        for token, times in kept:
            out[token] = times
        return out / out.sum() if kept else None

    counts = Counter(token for t in texts for token in t)
    q = np.array([counts[v] + smoothing for v in range(V)])
    q = q / q.sum()
    two, three = row((newest,)), row((before, newest))
    if order >= 2 and two is not None:
        q = l2 * two + (1 - l2) * q
    if order >= 3 and three is not None and (contexts is None or (before, newest) in contexts):
        q = l3 * three + (1 - l3) * q
    return q


@pytest.mark.fast
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("keep, contexts", [(2, 1000), (16, 1000), (3, 9)])
def test_the_mixture_equals_counting(order, keep, contexts):
    texts = documents(0)
    texts = [[t if t != 5 else 4 for t in text] for text in texts]  # token 5 never occurs: no row
    tables = ngram_tables.count(texts, V, successors=keep, contexts=contexts, smoothing=0.5)
    pairs = Counter(tuple(t[i : i + 2]) for t in texts for i in range(len(t) - 2))
    kept = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[:contexts]
    assert len(tables.trigram_ids) == len(kept) <= contexts
    before, newest = (
        x.reshape(-1) for x in np.meshgrid(np.arange(-1, V), np.arange(V), indexing="ij")
    )
    weights = ngram_lm.Weights(order, 0.7, 0.6)
    arrays = ngram_tables.Tables(*map(jnp.asarray, tables))
    args = jnp.asarray(before, jnp.int32), jnp.asarray(newest, jnp.int32)
    got = jax.jit(jax.vmap(lambda a, b: ngram_lm.mixture(arrays, weights, a, b)))(*args)
    best = jax.jit(jax.vmap(lambda a, b: ngram_lm.most_probable(arrays, weights, a, b)))(*args)
    for q, top, a, b in zip(
        np.asarray(got), best.tolist(), before.tolist(), newest.tolist(), strict=True
    ):
        expected = counted(
            texts, a, b, order=order, l2=0.7, l3=0.6, keep=keep, smoothing=0.5, contexts=set(kept)
        )
        np.testing.assert_allclose(q, expected, atol=1e-6)
        assert abs(q.sum() - 1) < 1e-6 and (q > 0).all()
        # The argmax, computed without the whole distribution.
        assert expected[top] > expected.max() - 1e-6


@pytest.mark.fast
def test_n_grams_do_not_cross_documents():
    tables = ngram_tables.count([[1, 2], [3], [], [2, 2, 1]], V, successors=3)
    rows = [row[row >= 0].tolist() for row in tables.bigram_ids]
    assert rows == [[], [2], [1, 2], [], [], [], []]
    assert tables.trigram_ids[:, 0].tolist() == [1] and (tables.trigram_keys[:, 0] >= 0).sum() == 1
    # One token: no context.
    one = ngram_tables.count([[1]], V)
    assert one.trigram_ids.shape == (0, V)
    drafter = drafters.make("ngram_lm", testing.tabular(V), tables=one, gamma=2)
    context = Context(
        jnp.asarray([[3, 4], [2, -1]]), jnp.asarray([2, 1]), sampling.make_sampling(2)
    )
    draft, _ = drafter.propose(
        ModelParams({}, drafter.init_params(jax.random.key(0))), None, context, ()
    )
    assert draft.tokens.tolist() == [[1, 1], [1, 1]]


@pytest.mark.fast
def test_contexts_with_equal_hashes_are_distinguished(monkeypatch):
    """All hashes equal: the most frequent contexts that fit into the probes are kept.

    Each has its own row.
    """
    texts = documents(1)
    monkeypatch.setattr(
        ngram_tables, "slot", lambda first, second, slots: (first * 0 + slots - 3).astype(np.int32)
    )
    tables = ngram_tables.count(texts, V, successors=4)
    kept = [tuple(key) for key in tables.trigram_keys.tolist() if key[0] >= 0]
    pairs = Counter(tuple(t[i : i + 2]) for t in texts for i in range(len(t) - 2))
    best = sorted(pairs, key=lambda pair: (-pairs[pair], pair))[: ngram_tables.PROBES]
    assert sorted(kept) == sorted(best) and len(tables.trigram_ids) == len(best) < len(pairs)
    arrays = ngram_tables.Tables(*map(jnp.asarray, tables))
    for a, b in pairs:
        q = ngram_lm.mixture(arrays, ngram_lm.Weights(3, 0.7, 0.6), jnp.asarray(a), jnp.asarray(b))
        expected = counted(
            texts, a, b, order=3, l2=0.7, l3=0.6, keep=4, smoothing=0.1, contexts=set(kept)
        )
        np.testing.assert_allclose(q, expected, atol=1e-6)


@pytest.mark.fast
def test_hashes_spread():
    a, b = (x.reshape(-1).astype(np.int32) for x in np.meshgrid(np.arange(300), np.arange(300)))
    places = ngram_tables.slot(a, b, 1 << 18)
    assert places.min() >= 0 and places.max() < 1 << 18
    # Nearly as many places as random hashes take.
    random = (1 << 18) * (1 - np.exp(-90_000 / (1 << 18)))
    assert len(np.unique(places)) > 0.97 * random
    same = jax.jit(lambda a, b: ngram_tables.slot(a, b, 1 << 18))(jnp.asarray(a), jnp.asarray(b))
    np.testing.assert_array_equal(places, same)
    _, _, left = ngram_tables._hashed(a[:50_000].astype(np.int64) * 300 + b[:50_000], 300)
    assert len(left) > 0.99 * 50_000


@pytest.mark.fast
def test_drafts_of_known_text_are_accepted():
    """Each pair of tokens has one successor in the text: greedy rows accept every draft."""
    text = [0, 1, 0, 2, 1, 1, 2, 2, 0, 0, 3, 3, 1, 3]
    table = np.full((6, 5, 5), -9.0, np.float32)
    for a, b, c in zip([5, *text], text, [*text[1:], 4], strict=False):
        table[a, b] = np.where(np.arange(5) == c, 9.0, table[a, b])
    # With these further texts bigrams alone give wrong drafts.
    tables = ngram_tables.count([text, *([i, 4] * 20 for i in range(4))], 5)
    target = testing.tabular(5)
    packed, lengths = decode.pack_prompts([text[:2], text[:5]])
    rounds = {}
    for order in (2, 3):
        drafter = drafters.make("ngram_lm", target, tables=tables, gamma=3, order=order)
        params = ModelParams(jnp.asarray(table), drafter.init_params(jax.random.key(0)))
        state = decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            rng.row_keys(0, 2),
            max_len=14,
            limit=lengths + jnp.asarray([12, 8]),
            sampling=sampling.make_sampling(2, 0.0),
        )
        state, records = decode.generate(
            target, drafter, accept.load("chain"), params, state, max_steps=14
        )
        assert decode.outputs(state, lengths.tolist()) == [text[2:], text[5:13]]
        rounds[order] = (np.asarray(records.emitted) > 0).sum(0).tolist()
        if order == 3:
            assert records.accepted[:3].T.tolist() == [[3, 3, 3], [3, 3, 0]]
    assert rounds[3] == [3, 2] and min(np.subtract(rounds[2], rounds[3])) > 0


@pytest.mark.slow
def test_acceptance_has_its_closed_form():
    """Sampled, on a target of order one: a draft token is accepted with rate sum min(p, q)."""
    rows, target = 6000, testing.tabular(V)
    table = jnp.broadcast_to(1.5 * testing.random_table(3, V)[0], (V + 1, V, V))
    drafter = drafters.make(
        "ngram_lm",
        target,
        tables=ngram_tables.count(documents(2), V),
        gamma=1,
        order=2,
        mode="sample",
    )
    params = ModelParams(table, drafter.init_params(jax.random.key(0)))
    prompts = jnp.asarray(np.arange(rows) % V, jnp.int32)[:, None]
    ones = jnp.ones((rows,), jnp.int32)
    state = decode.prefill(target, drafter, params, prompts, ones, rng.row_keys(0, rows), max_len=4)
    alone = Context(jnp.arange(V)[:, None], jnp.ones((V,), jnp.int32), sampling.make_sampling(V))
    q = np.asarray(drafter.probs(params, alone))[:, 0]
    _, records = decode.generate(target, drafter, accept.load("chain"), params, state, max_steps=1)
    p = np.asarray(jax.nn.softmax(table[0]))
    beta = np.minimum(p, q).sum(-1)
    alpha = beta[np.arange(rows) % V]
    sigma = np.sqrt((alpha * (1 - alpha)).sum()) / rows
    assert abs(float(records.accepted.sum()) / rows - alpha.mean()) < 3 * sigma
    assert beta.max() - beta.min() > 0.1


@pytest.mark.slow
@pytest.mark.fast
def test_exact_law():
    """All draws and coins of a round of sampled drafts, in float64, with temperature and top-p."""
    target, settings = testing.tabular(3), {"temperature": 0.7, "top_p": 0.85}
    tables = ngram_tables.count(documents(5, vocab=3), 3, successors=2, contexts=6)
    drafter = drafters.make("ngram_lm", target, tables=tables, gamma=2, mode="sample")
    with jax.enable_x64(True):
        table = testing.random_table(1, 3)
        wide = jax.tree.map(
            lambda x: x.astype(np.float64) if x.dtype == np.float32 else x,
            drafter.init_params(None),
        )
        law = testing.exact_law(
            target,
            drafter,
            accept.load("block"),
            ModelParams(table, wide),
            [2, 1],
            3,
            rounds=1,
            **settings,
        )
        truth = testing.sequence_law(target, table, [2, 1], 3, **settings)
    assert testing.total_variation(law, truth) < 1e-12


@pytest.mark.fast
def test_invalid_keys_and_tables_are_refused_in_one_line(tmp_path):
    target, tables = (
        testing.tabular(V)._replace(vocabulary="mine"),
        ngram_tables.count(documents(0), V),
    )
    for keys, message in (
        ({"gamma": 0}, "gamma is 0; it must be a whole number >= 1"),
        ({"mode": "sampled"}, "mode is 'sampled'; it must be one of argmax, sample"),
        ({"order": 4}, "order is 4; it must be a number from 1 to 3"),
        ({"bigram_weight": 1.5}, "bigram_weight is 1.5; it must be a number in [0, 1]"),
        ({"trigram_weight": "much"}, "trigram_weight is 'much'"),
        (
            {"order": 1, "bigram_weight": 0.5},
            "bigram_weight is 0.5 and order 1: n-grams of 2 token",
        ),
        ({"order": 2, "trigram_weight": 0.5}, "trigram_weight is 0.5 and order 2: n-grams of 3 "),
        ({"tables": tmp_path}, "has no ngram_tables.json; build the ngram tables with"),
    ):
        with pytest.raises(UserError) as error:
            drafters.make("ngram_lm", target, **{"tables": tables, **keys})
        assert message in str(error.value)
    for keys in ({"order": 1}, {"order": 2, "bigram_weight": 0.5}):
        assert drafters.make("ngram_lm", target, tables=tables, **keys).nodes == 4
    with pytest.raises(UserError, match="count 7 tokens and the target has 8"):
        drafters.make("ngram_lm", testing.tabular(V + 1), tables=tables)
    for keys, message in (
        ({"successors": 0}, "successors is 0; it must be a whole number >= 1"),
        ({"smoothing": 0.0}, "smoothing is 0.0; it must be a number above 0"),
        ({"vocab_size": 3}, "has the token id 6; ids must be in 0..2"),
        ({"documents": [[]]}, "the documents hold no token"),
    ):
        with pytest.raises(UserError) as error:
            ngram_tables.count(**{"documents": documents(0), "vocab_size": V, **keys})
        assert message in str(error.value)
    ngram_tables.save(tmp_path, tables, vocabulary="mine")
    back = ngram_tables.load(tmp_path, target)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(back, tables, strict=True))
    assert drafters.make("ngram_lm", target, tables=str(tmp_path)).nodes == 4
    with pytest.raises(UserError, match="another tokenizer than the target's"):
        ngram_tables.load(tmp_path, target._replace(vocabulary="other"))
