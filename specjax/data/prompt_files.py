"""Files of prompts: the public evaluation sets as they are published, and a user's own, as conversations.

Kinds, found by the keys of the first line (any of them may be gzipped, ``.gz``):

- ``spec_bench``: {"question_id", "category", "turns": [text, ...]}; MT-bench and vicuna-bench have the same lines.
- ``humaneval``: {"task_id", "prompt", "entry_point", ...} (Chen et al. 2021, 2107.03374); code to be continued.
- ``gsm8k``: {"question", "answer"} (Cobbe et al. 2021, 2110.14168); the question alone.
- ``mbpp``: {"task_id", "text", "test_list", ...} (Austin et al. 2021, 2108.07732), with "prompt" for "text" in its sanitised
  half; the paper's prompt without examples, as far as its "[BEGIN]": ``MBPP_PROMPT``.
- ``prompts``: {"prompt": text} with a "category" or without; or, unless the file is .jsonl or .json or its first line is an
  object of one of these kinds, a prompt a line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.data import chat, jsonl
from specjax.errors import UserError

MBPP_PROMPT = "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}\n"
MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)
_KEYS = {  # kind -> the keys that a line must have; the first is what the kind is known by
    "spec_bench": {"turns": "list of texts", "question_id": "number or text", "category": "text"},
    "mbpp": {"test_list": "list of texts", "task_id": "number or text"},
    "humaneval": {"entry_point": "text", "prompt": "text", "task_id": "number or text"},
    "gsm8k": {"question": "text", "answer": "text"},
    "prompts": {"prompt": "text"},
}
_SAME = {"mt_bench": "spec_bench", "vicuna_bench": "spec_bench"}
KINDS = ("auto", *_KEYS, *_SAME)


class Conversation(NamedTuple):
    """What the user says, turn by turn; each turn after the first follows the model's answer to the one before."""

    id: str | int  # the file's, or else the number of the line
    category: str | None
    turns: tuple[str, ...]  # at least one
    completion: bool = False  # text to be continued (code), which no chat template fits


class Spelt(NamedTuple):
    """The text of a prompt, and whether the tokenizer is to add its special tokens to it."""

    text: str
    add_special_tokens: bool


def task(category: str | None) -> str | None:
    """The task under which Spec-Bench reports a category: the eight of MT-bench are "mt_bench", any other stands for itself.

    Xia et al. 2024 (2401.07851), evaluation/speed.py.
    """
    return "mt_bench" if category in MT_BENCH else category


def read(path: Path, where: str, kind: str = "auto") -> list[Conversation]:
    """The conversations of a file, in its order.

    Args:
        path: the file.
        where: what the file is, and its path: it begins every message.
        kind: one of ``KINDS``.

    Raises:
        UserError: an unknown kind; a file that cannot be read, is no gzip file though its name ends in .gz, is not UTF-8, or
            has no prompt; JSON that is not an object a line; and naming its number the first line that lacks a key, has a
            value of another type, an empty text, or an id for the second time.
    """
    if kind not in KINDS:
        raise UserError(f"there is no kind of prompts {kind!r}; there is {', '.join(KINDS)}")
    text = jsonl.read(path, where, gz=True)
    lines = jsonl.lines(text)
    if not lines:
        raise UserError(f"{where} has no prompts; give at least one")
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    objects = kind not in ("auto", "prompts") or name.suffix.lower() in (".jsonl", ".json")
    first = jsonl.parse(lines[0][1])
    if first is None and _is_one_value(text, lines[0][1].strip(), objects):
        raise UserError(
            f"{where} is one JSON value as a whole; give JSON Lines: an object a line, and no list around them"
        )
    if not objects and not _is_known(first or {}, kind):
        return [Conversation(number, None, (line,)) for number, line in lines]
    kind = _kind(first or {}) if kind == "auto" else _SAME.get(kind, kind)
    found, seen = [], {}
    for number, line in lines:
        told = f"{where} line {number}"
        each = _conversation(kind, jsonl.parse(line), number, told)
        if each.id in seen:
            raise UserError(
                f"{told} has the id {each.id!r} of line {seen[each.id]}; give every question its own"
            )
        if not all(turn.strip() for turn in each.turns):
            raise UserError(f"{told} has an empty prompt; a prompt needs at least one token")
        seen[each.id] = number
        found.append(each)
    return found


def spell(
    conversation: Conversation,
    turn: int,
    answers: Sequence[str],
    template: chat.Template | None = None,
) -> Spelt:
    """The prompt of a turn, after the model's answers to the turns before it.

    With a template it is the conversation as a chat model reads it, up to where the answer begins. The template writes the
    special tokens itself, and the tokenizer must add none (else there were two at the beginning). Without one, for base
    models, turns and answers follow each other with a blank line between them, and the tokenizer adds what it adds to any
    text. A completion is never put into a template. Answers lose the blanks around them, as in Spec-Bench.

    Args:
        turn: from 0.
        answers: one for each turn before it, without special tokens.

    Raises:
        UserError: the template does not take the conversation.
    """
    asked = conversation.turns[: turn + 1]
    if len(asked) != turn + 1 or len(answers) != turn:
        raise ValueError(
            f"turn {turn} of {len(conversation.turns)} with {len(answers)} answers; it needs one a turn before"
        )
    said = [answer.strip() for answer in answers]
    if template is None or conversation.completion:
        both = (text for pair in zip(asked, said, strict=False) for text in pair)
        return Spelt("\n\n".join((*both, asked[-1])), True)
    messages = [{"role": "user", "content": asked[0]}]
    for answer, question in zip(said, asked[1:], strict=True):
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": question},
        ]
    return Spelt(chat.render(template, messages, add_generation_prompt=True), False)


def _is_one_value(text: str, first: str, objects: bool) -> bool:
    """Whether a file whose first line is no object is one list or one object, over however many lines.

    Where the file need not hold ``objects`` it may be prompts that look like it, and only a list of objects, or an object,
    is one.
    """
    if first[0] not in "[{":
        return False
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return objects and first in ("[", "{")
    return (
        objects
        or isinstance(value, dict)
        or (bool(value) and all(isinstance(each, dict) for each in value))
    )


def _is_known(line: Mapping[str, Any], kind: str) -> bool:
    """Whether a line is an object of a kind, or of the one asked for: by the key that the kind is known by."""
    found = _kind(line) if kind == "auto" else kind
    key, wanted = next(iter(_KEYS[found].items()))
    return _is(line.get(key), wanted) or (found == "humaneval" and bool(line))


def _kind(line: Mapping[str, Any]) -> str:
    if (
        "prompt" in line and not {"entry_point", "test_list"} & line.keys()
    ):  # it may have further keys, "answer" say
        return "humaneval" if "task_id" in line else "prompts"
    return next((kind for kind, keys in _KEYS.items() if next(iter(keys)) in line), "prompts")


def _conversation(kind: str, line: dict[str, Any] | None, number: int, told: str) -> Conversation:
    """A line as a conversation. Raises UserError."""
    line = line or {}
    if kind == "prompts":
        if not isinstance(line.get("prompt"), str):
            raise UserError(f'{told} is no JSON object with a "prompt" text')
        category = line.get("category")
        return Conversation(
            number, category if isinstance(category, str) else None, (line["prompt"],)
        )
    keys = _KEYS[kind]
    text = "prompt" if "prompt" in line else "text"
    for key, wanted in (keys | ({text: "text"} if kind == "mbpp" else {})).items():
        if not _is(line.get(key), wanted):
            had = f"has {line[key]!r:.40} as its" if key in line else "has no"
            raise UserError(f'{told} {had} "{key}"; in a line of {kind} that is a {wanted}')
    if kind == "spec_bench":
        if not line["turns"]:
            raise UserError(f'{told} has no turn in its "turns"; give at least one text')
        return Conversation(line["question_id"], line["category"], tuple(line["turns"]))
    if kind == "humaneval":
        return Conversation(line["task_id"], kind, (line["prompt"],), completion=True)
    if kind == "gsm8k":
        return Conversation(number, kind, (line["question"],))
    if not line[text].strip() or not any(test.strip() for test in line["test_list"]):
        empty = "test_list" if line[text].strip() else text
        raise UserError(
            f'{told} has an empty "{empty}"; a line of mbpp needs a task and at least one test'
        )
    return Conversation(
        line["task_id"],
        kind,
        (MBPP_PROMPT.format(text=line[text], tests="\n".join(line["test_list"])),),
    )


def _is(value: Any, wanted: str) -> bool:
    if wanted == "list of texts":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if wanted == "number or text":
        return isinstance(value, int | str) and not isinstance(value, bool)
    return isinstance(value, str)
