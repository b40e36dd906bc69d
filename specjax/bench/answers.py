"""Answers to questions in the format of Spec-Bench (Xia et al. 2024, 2401.07851).

Its evaluation/speed.py reads two such files: a method's and plain decoding's. The speed of a
question is the sum of ``new_tokens`` over the sum of ``wall_time``; a method's tokens/s is the
plain mean of these speeds over the questions of a task. "Mean accepted tokens" is the mean of
``accept_lengths`` over all rounds of all questions (tau: the target's own token counts).

For plain decoding it ignores ``new_tokens``: it tokenises ``turns`` again and subtracts one from
each count, for the token at the beginning of a text. So its speed-up, the ratio of the two
tokens/s, equals that of ``new_tokens`` only if the tokenizer adds such a token and the text gives
the same ids again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import NamedTuple


class Turn(NamedTuple):
    """The answer to one turn, and its cost."""

    text: str  # without special tokens, and without whitespace around it
    wall_time: float  # seconds, prefill included
    accept_lengths: Sequence[int]  # tokens emitted by every round, the target's own included


class Answer(NamedTuple):
    """The answers to the turns of a question."""

    question_id: str | int
    category: str | None
    turns: Sequence[Turn]


def text(answers: Sequence[Answer], model_id: str, *, now: float | None = None) -> str:
    """The text of the file: one line per question, in the given order.

    ``accept_lengths_by_turn`` is an additional key, which Spec-Bench ignores. ``answer_id`` follows
    from the question and ``model_id``.

    Args:
        answers: each question once, with at least one turn.
        model_id: model, method, precision and temperature.
        now: the time stamp, in seconds since 1970; by default the current time.
    """
    stamp = time.time() if now is None else now
    lines = (_line(each, model_id, stamp) for each in answers)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _line(answer: Answer, model_id: str, stamp: float) -> dict:
    turns = answer.turns
    by_turn = [[int(length) for length in turn.accept_lengths] for turn in turns]
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        # Rounds; for plain decoding tokens.
        "decoding_steps": [len(lengths) for lengths in by_turn],
        "new_tokens": [sum(lengths) for lengths in by_turn],
        "wall_time": [float(turn.wall_time) for turn in turns],
        "accept_lengths": [length for lengths in by_turn for length in lengths],
        "accept_lengths_by_turn": by_turn,
    }
    return {
        "question_id": answer.question_id,
        "category": answer.category,
        "answer_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{model_id}/{answer.question_id}").hex,
        "model_id": model_id,
        "choices": [choice],
        "tstamp": stamp,
    }
