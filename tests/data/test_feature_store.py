"""Rows of features as records: sizes, the bits of each dtype, shards, wrong directories."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data import feature_store
from specjax.data import feature_store as records
from specjax.data.feature_store import RecordLayout
from specjax.errors import UserError
from specjax.types import Batch

pytestmark = pytest.mark.fast
T, E = 6, 40
BITS = {"float32": 0.0, "bfloat16": 2**-8, "float8": 2**-4}


def rows(count, documents, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 99, (count, T + 1)).astype(np.int32)
    if not documents:
        return Batch(tokens)
    return Batch(tokens, random.random(tokens.shape) < 0.5, np.sort(tokens, 1))


def stored(layout, batch, values):
    """The batch after it was written and read, with its taps in reverse order."""
    bits, scales = jax.jit(lambda x: records.in_bits(x, layout.dtype))(values)
    scales = None if scales is None else np.asarray(scales)
    raw = records.records(layout, batch, np.asarray(bits), scales)
    assert {len(record) for record in raw} == {layout.record.itemsize}
    return records.batch_of(layout, raw, (1, 0))


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("documents", [False, True])
def test_records(dtype, documents):
    layout, batch = RecordLayout(T, E, (3, 1), dtype, documents), rows(4, documents)
    # Vectors of very different sizes, and one of zeros.
    values = np.random.default_rng(1).normal(size=(4, 3, T, E)).astype(np.float32)
    values *= 10.0 ** np.arange(-9, 9).reshape(1, 3, T, 1)
    values[0, 0, 0] = 0
    result = stored(layout, batch, jnp.asarray(values))
    for name in ("tokens", "labelled", "segments"):
        np.testing.assert_array_equal(getattr(result, name), getattr(batch, name))
    hidden, taps = result.features.hidden, result.features.taps
    assert hidden.dtype == ("float32" if dtype == "float32" else "bfloat16")
    assert result.tokens.dtype == np.int32 and len(taps) == 2
    for ours, right in zip((hidden, *taps), values.swapaxes(0, 1)[[0, 2, 1]], strict=True):
        error = np.abs(np.asarray(ours, np.float32) - right)
        # Of float8 the smallest numbers are relative to the largest of the vector.
        least = np.abs(right).max(-1, keepdims=True) * 2**-8 if dtype == "float8" else 0
        assert (error <= BITS[dtype] * np.maximum(np.abs(right), least) * 1.01).all()
    tokens = (T + 1) * (9 if documents else 4)
    each = {"float32": 4 * E, "bfloat16": 2 * E, "float8": E + 4}[dtype]
    assert layout.bytes_per_token == 3 * each
    assert layout.record.itemsize == tokens + T * layout.bytes_per_token


def test_shards(tmp_path):
    layout = RecordLayout(T, E, (), "float32", False)
    batch = rows(5, False)
    values = np.random.default_rng(0).normal(size=(5, 1, T, E)).astype(np.float32)
    path = tmp_path / records.name_of("train", 0, 1)
    assert path.name == "train-00000-of-00001.array_record"
    records.write(path, records.records(layout, batch, values, None))
    each = [Batch(batch.tokens[i : i + 1]) for i in range(5)]
    other = [*each[:-1], Batch(each[0].tokens + 1)]
    assert records.is_finished(path, layout, each)
    assert not records.is_finished(path, layout, other)
    assert not records.is_finished(path, layout, each[:-1])
    assert not records.is_finished(path, layout._replace(dtype="float8"), each)
    assert not records.is_finished(tmp_path / "missing", layout, each)
    path.write_bytes(path.read_bytes()[:-900])
    assert not records.is_finished(path, layout, each)


def manifest(**changes):
    facts = {"format": f"specjax {feature_store.NAME}", "schema": feature_store.SCHEMA, "length": T}
    facts |= {"width": E, "taps": [], "dtype": "float32", "documents": False, "shards": {}}
    return facts | changes


def test_wrong_directories(tmp_path):
    path = tmp_path / "manifest.json"

    def refused(message):
        with pytest.raises(UserError, match=message) as caught:
            feature_store.FeatureStore(tmp_path)
        assert "\n" not in str(caught.value)

    refused(r"has no manifest.json; build the features with configs/features.py \(the same command")
    path.write_text("{")
    refused(
        "manifest.json is damaged, or no features of specjax; build it with configs/features.py"
    )
    path.write_text(json.dumps(manifest(format="specjax generated text")))
    refused("is no features of specjax; build one with configs/features.py")
    path.write_text(json.dumps(manifest(schema=7)))
    refused(
        "format version 7, but this specjax reads version 1; build it again with configs/features"
    )
    path.write_text(json.dumps(manifest(shards={"train": {"rows": 1, "bytes": 3}})))
    refused("train is missing or damaged; remove .* and store the features again")
    path.write_text(json.dumps(manifest()))
    store = feature_store.FeatureStore(tmp_path)
    with pytest.raises(UserError, match=r"counts.npy is missing or damaged; store the features"):
        _ = store.counts
    with pytest.raises(UserError, match=r"the target's layers \[1, 2\], and .* has no taps; "):
        store.chosen((1, 2))
