"""Answers to questions in the format of Spec-Bench (Xia et al. 2024, 2401.07851), for its own scripts to read.

Its evaluation/speed.py takes two such files, a method's and plain decoding's. Per question the speed is the sum of
``new_tokens`` over the sum of ``wall_time``; a method's tokens/s is the plain mean of these speeds over the questions of a
task; "mean accepted tokens" is the mean of ``accept_lengths`` over all rounds of all questions (tau: the target's own token
counts). Of plain decoding it does not use ``new_tokens``: it tokenises ``turns`` again and takes one off each, for the token
that begins a text. Its speed-up, the ratio of the two tokens/s, is therefore that of ``new_tokens`` only where the tokenizer
adds such a token and the text gives the same ids back.
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
    """The answer to one turn, and what it took."""

    text: str  # without special tokens and blanks around it
    new_tokens: int
    decoding_steps: int  # rounds; tokens, of plain decoding
    wall_time: float  # seconds, prefill included
    accept_lengths: Sequence[int]  # tokens emitted by every round, the target's own counted


class Answer(NamedTuple):
    """The answers to a question's turns."""

    question_id: str | int
    category: str | None
    turns: Sequence[Turn]


def text(answers: Sequence[Answer], model_id: str, *, now: float | None = None) -> str:
    """The file's text: a line per question, in the order given.

    ``accept_lengths_by_turn`` is added to what Spec-Bench has, and ignored by it. ``answer_id`` follows from the question and
    ``model_id``.

    Args:
        answers: each question once.
        model_id: what was asked: model, method, precision, temperature.
        now: the time stamp, in seconds since 1970; by default the clock's.

    Raises:
        UserError: a question is answered twice.
        ValueError: no turns, a turn whose rounds do not add up, or that took no time (speed.py divides by it).
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
        if (
            len(turn.accept_lengths) != turn.decoding_steps
            or sum(turn.accept_lengths) != turn.new_tokens
        ):
            raise ValueError(
                f"question {answer.question_id!r}, turn {number}: {turn.decoding_steps} steps and {turn.new_tokens} tokens "
                f"against {len(turn.accept_lengths)} rounds of {sum(turn.accept_lengths)} tokens"
            )
        if not turn.wall_time > 0:
            raise ValueError(
                f"question {answer.question_id!r}, turn {number} took {turn.wall_time} s"
            )
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
