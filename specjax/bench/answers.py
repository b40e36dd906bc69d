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
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from specjax.errors import UserError


class Turn(NamedTuple):
    """The answer to one turn, and its cost."""

    text: str  # without special tokens, and without whitespace around it
    new_tokens: int
    decoding_steps: int  # rounds; for plain decoding tokens
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
        answers: each question once.
        model_id: model, method, precision and temperature.
        now: the time stamp, in seconds since 1970; by default the current time.

    Raises:
        UserError: a question is answered twice.
        ValueError: a question without turns; a turn whose steps and tokens differ from its rounds,
            or that took no time (speed.py divides by it).
    """
    stamp = time.time() if now is None else now
    counts = Counter(answer.question_id for answer in answers)
    for question, times in counts.items():
        if times > 1:
            raise UserError(
                f"question {question!r} is answered {times} times; give every question its own id"
            )
    return "".join(
        json.dumps(_line(answer, model_id, stamp), ensure_ascii=False) + "\n" for answer in answers
    )


def _line(answer: Answer, model_id: str, stamp: float) -> dict:
    turns = answer.turns
    if not turns:
        raise ValueError(f"question {answer.question_id!r} has no turns")
    for number, turn in enumerate(turns):
        _check_turn(f"question {answer.question_id!r}, turn {number}", turn)
    by_turn = [[int(length) for length in turn.accept_lengths] for turn in turns]
    choice = {
        "index": 0,
        "turns": [turn.text for turn in turns],
        "decoding_steps": [int(turn.decoding_steps) for turn in turns],
        "new_tokens": [int(turn.new_tokens) for turn in turns],
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


def _check_turn(where: str, turn: Turn) -> None:
    rounds, tokens = len(turn.accept_lengths), sum(turn.accept_lengths)
    if (rounds, tokens) != (turn.decoding_steps, turn.new_tokens):
        raise ValueError(
            f"{where}: {turn.decoding_steps} steps and {turn.new_tokens} tokens "
            f"against {rounds} rounds of {tokens} tokens"
        )
    if not turn.wall_time > 0:
        raise ValueError(f"{where} took {turn.wall_time} s")
