"""Answer files, read in the same way as by Spec-Bench's own scripts."""

import json

import numpy as np
import pytest

from specjax.bench import answers
from specjax.bench.answers import Answer, Turn

pytestmark = pytest.mark.fast


def answer(number, category, *turns):
    """An answer from (seconds, tokens of every round) of each turn; every token is one word."""
    return Answer(
        number,
        category,
        [Turn(" ".join("w" * sum(lengths)), seconds, lengths) for seconds, lengths in turns],
    )


METHOD = [
    answer(81, "writing", (0.5, [3, 2, 1]), (0.25, [4])),
    answer(161, "math", (1.0, [1, 1, 5])),
    answer(241, "qa", (2.0, [2, 2])),
]
PLAIN = [
    answer(81, "writing", (1.0, [1] * 6), (1.0, [1] * 4)),
    answer(161, "math", (2.0, [1] * 7)),
    answer(241, "qa", (2.0, [1] * 4)),
]


def speeds(path, task):
    """(tokens/s, mean accepted tokens, tokens/s from the texts) of a task, as in Spec-Bench."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    mt_bench = [
        "writing",
        "roleplay",
        "reasoning",
        "math",
        "coding",
        "extraction",
        "stem",
        "humanities",
    ]
    groups = {"overall": None, "mt_bench": mt_bench}.get(task, [task])
    first = [line["choices"][0] for line in lines if groups is None or line["category"] in groups]
    counted = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in first]
    # A tokenizer that begins every text with a special token, which is subtracted again.
    retokenised = [
        sum(len(["<s>", *t.split()]) - 1 for t in c["turns"]) / sum(c["wall_time"]) for c in first
    ]
    lengths = [length for choice in first for length in choice["accept_lengths"]]
    return np.mean(counted), np.mean(lengths), np.mean(retokenised)


def test_speed_and_accepted_tokens_follow_from_the_files(tmp_path):
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "plain.jsonl"
    ours.write_text(answers.text(METHOD, "tiny-ours-float32-temp-0.0"), encoding="utf-8")
    theirs.write_text(answers.text(PLAIN, "tiny-plain-float32-temp-0.0"), encoding="utf-8")
    for task, speed, accepted, base in [
        ("mt_bench", (10 / 0.75 + 7) / 2, 17 / 7, (5 + 3.5) / 2),
        ("qa", 2.0, 2.0, 2.0),
        ("overall", (10 / 0.75 + 7 + 2) / 3, 21 / 9, (5 + 3.5 + 2) / 3),
    ]:
        fast, plain = speeds(ours, task), speeds(theirs, task)
        assert fast[:2] == pytest.approx((speed, accepted))
        assert plain[0] == plain[2] == pytest.approx(base)
        assert fast[0] / plain[2] == pytest.approx(speed / base)
        assert plain[1] == 1


def test_a_line_has_the_keys_of_spec_bench():
    first = answers.text(METHOD[:1], "m", now=1.5)
    (line,) = map(json.loads, first.splitlines())
    assert {
        "question_id": 81,
        "category": "writing",
        "model_id": "m",
        "tstamp": 1.5,
    }.items() <= line.items()
    assert line.keys() == {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"}
    assert line["choices"] == [
        {
            "index": 0,
            "turns": ["w w w w w w", "w w w w"],
            "decoding_steps": [3, 1],
            "new_tokens": [6, 4],
            "wall_time": [0.5, 0.25],
            "accept_lengths": [3, 2, 1, 4],
            "accept_lengths_by_turn": [[3, 2, 1], [4]],
        }
    ]
    assert answers.text(METHOD[:1], "m", now=1.5) == first  # the same run gives the same file
    assert json.loads(answers.text(METHOD[:1], "n", now=1.5))["answer_id"] != line["answer_id"]


def test_counts_may_be_numpy_numbers():
    lengths = np.array([2, 1], np.int32)
    turn = Turn("ż", np.float32(0.5), lengths)  # type: ignore[arg-type]
    line = json.loads(answers.text([Answer("q/1", None, [turn])], "m"))
    assert line["choices"][0]["accept_lengths"] == [2, 1]
