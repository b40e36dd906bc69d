"""Recorded conversations: reading, writing, and bad lines."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.data import recordings
from specjax.data.recordings import Trace
from specjax.errors import UserError

pytestmark = pytest.mark.fast

GOOD = {"id": 7, "category": "qa", "prompt_ids": [1, 2, 3, 1, 2], "output_ids": [3, 1, 2, 4]}
BAD = {
    "no JSON": ("{", "it is no JSON object"),
    "a list": ("[1]", "it is no JSON object"),
    "deep": ("[" * 100_000, "it is no JSON object"),
    "no prompt": ({"output_ids": [1]}, "prompt_ids is missing"),
    "no output": ({"prompt_ids": [1]}, "output_ids is missing"),
    "empty": (
        {**GOOD, "output_ids": []},
        "output_ids is empty; it must be a list of at least one token id",
    ),
    "text": ({**GOOD, "prompt_ids": "123"}, "prompt_ids is no list"),
    "null": ({**GOOD, "prompt_ids": None}, "prompt_ids is no list"),
    "a fraction": (
        {**GOOD, "prompt_ids": [1, 2.0]},
        "prompt_ids has 2.0; ids are whole numbers in 0..4",
    ),
    "a truth value": (
        {**GOOD, "output_ids": [True]},
        "output_ids has true; ids are whole numbers in 0..4",
    ),
    "a hole": ({**GOOD, "output_ids": [1, None]}, "output_ids has null"),
    "negative": ({**GOOD, "output_ids": [-1]}, "output_ids has -1"),
    "beyond the vocabulary": (
        {**GOOD, "output_ids": [1, 5]},
        "output_ids has 5; ids are whole numbers in 0..4",
    ),
    "category": ({**GOOD, "category": 3}, "category is 3; it must be a text or null"),
}


def write(path, *values):
    path.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))
    return path


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_or_left_out(tmp_path, name):
    value, message = BAD[name]
    file = write(tmp_path / "t.jsonl", GOOD, " ", value, GOOD)
    with pytest.raises(UserError) as error:
        recordings.read(file, 5)
    assert f"{file} line 3: {message}" in str(error.value)
    result = recordings.read(file, 5, skip_bad=True)
    assert len(result.traces) == 2 and result.vocab_size == 5
    [bad] = result.skipped
    assert bad["line"] == 3 and bad["why"].startswith(message)
    with pytest.raises(UserError, match="none of its 1 lines can be replayed; line 1: "):
        recordings.read(write(tmp_path / "none.jsonl", value), 5, skip_bad=True)


def test_recordings_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "t.jsonl"
    recordings.record(
        file, [[1, 2], np.array([3])], [[4], jnp.asarray([0, 9])], categories=["\u2028", None]
    )
    result = recordings.read(file)
    assert result == ([Trace([1, 2], [4], "\u2028"), Trace([3], [0, 9])], 10, [])
    assert [json.loads(line)["id"] for line in file.read_text().split("\n") if line] == [0, 1]
    assert recordings.read(file, most=1) == (result.traces[:1], 5, [])
    with pytest.raises(UserError, match="2 prompts and 1 outputs"):
        recordings.record(file, [[1], [2]], [[1]])
    with pytest.raises(UserError, match="not a writable directory"):
        recordings.record(tmp_path / "no" / "t.jsonl", [[1]], [[1]])
    assert [p.name for p in tmp_path.iterdir()] == ["t.jsonl"]


BENCH = {
    "id": "3",
    "prompt_token_ids": [1, 2],
    "generated_token_ids": [3, 1, 2, 4],
    "acc_eagle": {"acc_len": [3, 2, 1]},
    "acc_ngram": {"acc_len": [1, 1, 1]},
}


def test_recordings_of_specdecode_bench(tmp_path):
    result = recordings.read(write(tmp_path / "t.jsonl", BENCH, GOOD))
    first, second = result.traces
    assert first[:3] == ([1, 2], [3, 1, 2, 4], None) and second.rounds == {}
    assert first.rounds == {"eagle": [3, 2, 1], "ngram": [1, 1, 1]}
    # Another key of that beginning is ignored, like any other.
    other = write(tmp_path / "o.jsonl", GOOD | {"acc_rate": 0.5, "acc_x": {}})
    assert recordings.read(other).traces[0].rounds == {}
    for wrong in ({"acc_len": [0]}, {"acc_len": [True]}, {"acc_len": 3}):
        with pytest.raises(UserError, match="acc_len of acc_eagle must be"):
            recordings.read(write(tmp_path / "bad.jsonl", BENCH | {"acc_eagle": wrong}))
    without = {key: value for key, value in BENCH.items() if key != "generated_token_ids"}
    with pytest.raises(UserError, match="output_ids is missing"):
        recordings.read(write(tmp_path / "bad.jsonl", without))


def test_files_of_other_programs(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n")
    assert recordings.read(file).traces == [Trace([1, 2, 3, 1, 2], [3, 1, 2, 4], "qa")]
    with pytest.raises(UserError, match="ids are whole numbers in 0..16777215"):
        recordings.read(write(file, {**GOOD, "prompt_ids": [2**40]}))
    for data, message in (
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b'{"id": "\xe9"}', "byte 8 is not UTF-8"),
    ):
        file.write_bytes(data)
        with pytest.raises(UserError, match=message):
            recordings.read(file, skip_bad=True)
    with pytest.raises(UserError, match="cannot be read"):
        recordings.read(tmp_path)
