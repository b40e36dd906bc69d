"""Datastores: order, search, eviction and files, compared with plain Python."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from internals import lookup_suffix_array
from safetensors.numpy import load_file, save_file

from specjax import testing
from specjax.data import datastore
from specjax.errors import UserError

pytestmark = pytest.mark.fast
TARGET = testing.tabular(4)._replace(vocabulary="mine")


def documents(seed, count=12, longest=30, alphabet=3):
    random = np.random.default_rng(seed)
    return [
        random.integers(0, alphabet, random.integers(0, longest)).tolist() for _ in range(count)
    ]


@pytest.mark.parametrize("reach", [1, 2, 3, 6, 32])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 50_000])
def test_order_equals_sorting_all_substrings(alphabet, reach):
    for seed in range(4):
        store = datastore.build([[0], *documents(seed, alphabet=alphabet)], reach)
        size, padded = len(store.tokens), [*store.tokens.tolist(), *[-1] * reach]
        assert store.order.tolist() == sorted(range(size), key=lambda i: (padded[i : i + reach], i))
        assert store.tokens.dtype == store.order.dtype == np.int32


def occurrences(store, phrase):
    """The positions of a phrase, in the order of the store."""
    text, n = store.tokens.tolist(), len(phrase)
    return [i for i in store.order.tolist() if text[i : i + n] == phrase]


def test_find_equals_a_scan_for_every_length():
    """A thousand texts, shorter or longer than the pattern; the store has endings of most."""
    longest, reach, rows = 6, 5, 1000
    store, random = datastore.build(documents(0, 20, alphabet=3), reach), np.random.default_rng(1)
    length = random.integers(1, 12, rows)
    tokens = random.integers(0, 4, (rows, 12))  # token 3 is not in the store
    tokens[random.random((rows, 12)) < 0.9] %= 3
    tokens[: rows // 2] = store.tokens[
        random.integers(0, len(store.tokens) - 12, rows // 2)[:, None] + np.arange(12)
    ]
    tokens = np.where((np.arange(12) < length[:, None]) & (tokens >= 0), tokens, 9)

    def one(row, size):
        pattern = lookup_suffix_array.last_tokens(row, size, longest)
        return pattern, *lookup_suffix_array.find(
            jnp.asarray(store.tokens), jnp.asarray(store.order), pattern, reach
        )

    patterns, low, high = jax.jit(jax.vmap(one))(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(length, jnp.int32)
    )
    patterns, low, high, hits = (
        patterns.tolist(),
        low.tolist(),
        high.tolist(),
        np.zeros(longest, int),
    )
    known = {}
    for row in range(rows):
        text = tokens[row, : length[row]].tolist()
        assert patterns[row] == [*[-1] * max(0, longest - len(text)), *text[-longest:]]
        for n in range(1, longest + 1):
            phrase = tuple(text[-n:])
            if phrase not in known:
                known[phrase] = occurrences(store, list(phrase))
            expected = known[phrase] if n <= min(len(text), reach) else []
            assert store.order[low[row][n - 1] : high[row][n - 1]].tolist() == expected, (
                phrase,
                expected,
            )
            hits[n - 1] += bool(expected)
    assert hits[reach - 1] > 100 and hits[reach] == 0 and (rows - hits[:reach] > 50).all()


def test_sample_is_spread_evenly():
    order = jnp.asarray(np.random.default_rng(0).permutation(1000), jnp.int32)
    for count in (7, 64):
        take = jax.jit(functools.partial(lookup_suffix_array.sample, order, count=count))
        for low, size in (
            (0, 0),
            (3, 1),
            (5, 6),
            (5, 7),
            (0, 8),
            (0, 63),
            (0, 64),
            (0, 65),
            (100, 900),
        ):
            got = np.asarray(take(jnp.asarray(low), jnp.asarray(low + size)))
            real = min(count, size)
            assert (got[real:] == -1).all()
            at = np.array([np.flatnonzero(order == place)[0] - low for place in got[:real]])
            if size <= count:
                assert at.tolist() == list(range(size))
            else:
                # One in each of ``count`` equal parts.
                edges = np.arange(count + 1) * size // count
                assert (edges[:-1] <= at).all() and (at < edges[1:]).all()


def test_follow_stops_at_the_end_of_the_document():
    tokens = jnp.asarray([5, 6, 7, -1, 8, -1])
    text = lookup_suffix_array.follow(tokens, jnp.asarray([0, 1, 2, 3, 4, 6, -1]), 4)
    assert text.tolist() == [
        [5, 6, 7, -1],
        [6, 7, -1, -1],
        [7, *[-1] * 3],
        [-1] * 4,
        [8, *[-1] * 3],
        [-1] * 4,
        [-1] * 4,
    ]


def test_whole_documents_are_evicted_oldest_first():
    tokens, capacity, model = np.full(20, -1, np.int32), 20, []
    assert datastore.split(tokens) == []
    for seed in range(12):
        new = documents(seed, 2, 12)
        tokens = datastore.recent([*datastore.split(tokens), *new], capacity)
        model = [d for d in [*model, *new] if d]
        while sum(len(d) + 1 for d in model) > capacity:
            model = model[1:]
        assert [d.tolist() for d in datastore.split(tokens)] == model
        fresh = datastore.build(model, 4)
        assert len(tokens) == capacity
        assert tokens[: len(fresh.tokens)].tolist() == fresh.tokens.tolist()
        order = datastore.suffix_array(tokens, 4)
        places = order[tokens[order] >= 0]  # padding sorts before all text
        assert places.tolist() == fresh.order[fresh.tokens[fresh.order] >= 0].tolist()
    long = datastore.recent([*datastore.split(tokens), [1], list(range(50))], capacity)
    assert [d.tolist() for d in datastore.split(long)] == [list(range(31, 50))]  # its end


def test_saved_stores_load_unchanged(tmp_path):
    store = datastore.build(documents(3), 7)
    datastore.save(tmp_path, store, vocab_size=4, vocabulary="mine", sources=["a.txt"])
    back = datastore.load(tmp_path, TARGET)
    assert back.reach == 7 and all((a == b).all() for a, b in zip(back[:2], store[:2], strict=True))
    manifest = json.loads((tmp_path / "datastore.json").read_text())
    assert manifest["tokens"] == sum(map(len, documents(3))) and manifest["sources"] == ["a.txt"]
    assert manifest["documents"] == sum(map(bool, documents(3)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["datastore.json", "datastore.safetensors"]
    # Without a fingerprint only the number of ids is compared, which fits.
    datastore.load(tmp_path, TARGET._replace(vocabulary=None))


def test_wrong_stores_give_one_clear_line(tmp_path):
    store = datastore.build(documents(3), 7)
    file, manifest = tmp_path / "datastore.safetensors", tmp_path / "datastore.json"

    def fresh():
        datastore.save(tmp_path, store, vocab_size=4, vocabulary="mine")
        return json.loads(manifest.read_text())

    def refused(message, target=TARGET):
        with pytest.raises(UserError, match=message) as error:
            datastore.load(tmp_path, target)
        assert "configs/datastore.py" in str(error.value) and "\n" not in str(error.value)

    refused("has no datastore.json; build the datastore with")
    fresh()
    refused("built with another tokenizer than the target's", TARGET._replace(vocabulary="other"))
    refused(
        "built with another tokenizer than the target's",
        TARGET._replace(vocabulary=None, vocab_size=3),
    )
    manifest.write_text(json.dumps(fresh() | {"format": "specjax ngram_tables"}))
    refused("is no datastore of specjax")
    manifest.write_text(json.dumps(fresh() | {"schema": 2}))
    refused("format version 2, but this specjax reads version 1")
    for text in ("{", "[1]", '{"format": 3}', "\x00"):
        manifest.write_text(text)
        refused("is damaged, or no datastore")
    fresh()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused("does not fit datastore.json")
    file.write_bytes(content[:-40])
    refused("missing or damaged")
    file.unlink()
    refused("missing or damaged")
    fresh()
    save_file({"tokens": load_file(file)["tokens"]}, file)
    refused("does not fit datastore.json")
    with pytest.raises(UserError, match="the datastore has the token id 2 and the target 2 tokens"):
        datastore.check(store, testing.tabular(2))
    for given, message in (
        (([],), "the documents hold no token"),
        (([[1, -1]],), "token ids >= 0"),
        (([[1.5]],), "token ids >= 0"),
        (([[1]], 0), "reach is 0"),
    ):
        with pytest.raises(UserError, match=message):
            datastore.build(*given)
