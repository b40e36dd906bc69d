"""Files of prompts as conversations: the public evaluation sets as published, and a user's own.

The keys of the first line give the kind. Every file may be compressed (``.gz`` or ``.xz``).

- ``spec_bench``: {"question_id", "category", "turns": [text, ...]}; MT-bench and vicuna-bench have
  the same lines.
- ``speed_bench``: SPEED-Bench (Abramovich et al. 2026, 2604.09557): {"question_id", "category",
  "sub_category", "turns": [text, ...], ...}, in Parquet or JSON Lines, or with "messages":
  [{"role", "content"}, ...] in place of the turns. The categories are 11 domains, or the three
  entropies of a set of one input length (``throughput_1k``, ...).
- ``humaneval``: {"task_id", "prompt", "entry_point", ...} (Chen et al. 2021, 2107.03374); code to
  continue.
- ``gsm8k``: {"question", "answer"} (Cobbe et al. 2021, 2110.14168); only the question is used.
- ``mbpp``: {"task_id", "text", "test_list", ...} (Austin et al. 2021, 2108.07732); its sanitised
  half has "prompt" in place of "text". The prompt is the paper's, without examples and up to its
  "[BEGIN]": ``MBPP_PROMPT``.
- ``pairs``: {"source", "output"}, which encoder-decoder models learn (``data.pairs``); only the
  source is used.
- ``prompts``: {"prompt": text}, with or without a "category". Or one prompt per line, unless the
  suffix is .jsonl or .json or the first line is an object of one of these kinds.

A file with the suffix .parquet has a row of these keys for each line.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax import files
from specjax.data import chat, jsonl
from specjax.errors import UserError

MBPP_PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}\n"
)
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math"),
    *("coding", "extraction", "stem", "humanities"),
)
# A turn that begins so is fetched from its source by the script of SPEED-Bench's authors.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
# Kind -> the keys that a line must have. The first key identifies the kind.
_KEYS = {
    "spec_bench": {"turns": "list of texts", "question_id": "number or text", "category": "text"},
    "mbpp": {"test_list": "list of texts", "task_id": "number or text"},
    "humaneval": {"entry_point": "text", "prompt": "text", "task_id": "number or text"},
    "gsm8k": {"question": "text", "answer": "text"},
    "pairs": {"source": "text", "output": "text"},
    "prompts": {"prompt": "text"},
}
_KEYS["speed_bench"] = _KEYS["spec_bench"]
_ALIASES = {"mt_bench": "spec_bench", "vicuna_bench": "spec_bench"}
KINDS = ("auto", *_KEYS, *_ALIASES)


class Conversation(NamedTuple):
    """The user's turns; each turn but the first follows the model's answer to the previous one."""

    id: str | int  # from the file, otherwise the number of the line
    category: str | None
    turns: tuple[str, ...]  # at least one
    completion: bool = False  # text to continue (code): never put into a chat template


class Spelt(NamedTuple):
    """The text of a prompt, and whether the tokenizer must add its special tokens to it."""

    text: str
    add_special_tokens: bool


def named(name: str) -> tuple[str, str]:
    """The kind and the path of "KIND:PATH", such as speed_bench:test.parquet; ("", name) else."""
    kind, _, path = name.partition(":")
    return (kind, path) if path and kind in KINDS else ("", name)


def task(category: str | None) -> str | None:
    """The task under which Spec-Bench reports a category.

    It is "mt_bench" for the eight categories of MT-bench, and the category itself for others. Xia
    et al. 2024 (2401.07851), evaluation/speed.py.
    """
    return "mt_bench" if category in MT_BENCH else category


def sample(conversations: Sequence[Conversation], count: int) -> list[Conversation]:
    """``count`` conversations, evenly from the categories, in the order of ``conversations``.

    From each category the first ones. The numbers for two categories differ by one at most, unless
    a category has no more; the categories that get one more are spread over the tasks (``task``).
    So a larger sample contains a smaller one.
    """
    of_task: dict[str | None, dict[str | None, list[int]]] = {}
    for number, each in enumerate(conversations):
        of_category = of_task.setdefault(task(each.category), {})
        of_category.setdefault(each.category, []).append(number)
    # One category of each task, then the second category of each task, ...
    turns = itertools.zip_longest(*(list(some.values()) for some in of_task.values()))
    categories = [numbers for turn in turns for numbers in turn if numbers]
    order = (n for turn in itertools.zip_longest(*categories) for n in turn if n is not None)
    return [conversations[n] for n in sorted(itertools.islice(order, count))]


def read(path: Path, where: str, kind: str = "auto") -> list[Conversation]:
    """The conversations of a file, in its order.

    Args:
        path: the file.
        where: what the file is, and its path; begins every message.
        kind: one of ``KINDS``.

    Raises:
        UserError: an unknown kind; a file that cannot be read or decompressed, is not UTF-8, or has
            no prompt; JSON that is not one object per line; a line, with its number, that lacks a
            key or has a value of the wrong type, an empty text, a placeholder of SPEED-Bench, or
            the id of an earlier line; Parquet without the package pyarrow.
    """
    if kind not in KINDS:
        raise UserError(f"there is no kind of prompts {kind!r}; choose one of {', '.join(KINDS)}")
    if path.suffix.lower() == ".parquet":
        return _conversations(_parquet(path, where), kind)
    text = jsonl.read(path, where, compressed=True)
    lines = jsonl.lines(text)
    if not lines:
        raise UserError(f"{where} has no prompts; give at least one")
    objects = kind not in ("auto", "prompts") or jsonl.plain_suffix(path) in (".jsonl", ".json")
    first = jsonl.parse(lines[0][1])
    if first is None and _is_one_value(text, lines[0][1].strip(), objects):
        raise UserError(
            f"{where} is a single JSON value; "
            "give JSON Lines: one object per line, no list around them"
        )
    if not objects and not _is_known(first or {}, kind):
        return [Conversation(number, None, (line,)) for number, line in lines]
    return _conversations(jsonl.objects(text, where), kind)


def _parquet(path: Path, where: str) -> list[jsonl.Line]:
    """The rows of a Parquet file. Raises UserError: no pyarrow, no rows, or no such file."""
    try:
        from pyarrow import ArrowException, parquet  # of an extra
    except ImportError:
        raise UserError(
            f"{where} needs pyarrow: pip install 'specjax[parquet]', or give JSON Lines"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{where} is no readable Parquet file: {reason}; copy it again") from None
    if not rows:
        raise UserError(f"{where} has no prompts; give at least one")
    return [jsonl.Line(n, f"{where} row {n}", row) for n, row in enumerate(rows, 1)]


def _conversations(lines: Iterable[jsonl.Line], kind: str) -> list[Conversation]:
    """The conversations on some lines. Raises UserError."""
    conversations, seen = [], {}
    for line in lines:
        if not conversations:
            kind = _kind(line.value or {}) if kind == "auto" else _ALIASES.get(kind, kind)
        each = _conversation(kind, line)
        if each.id in seen:
            raise UserError(
                f"{line.where} has the id {each.id!r} of line {seen[each.id]}; "
                "give every question its own"
            )
        if not all(turn.strip() for turn in each.turns):
            raise UserError(f"{line.where} has an empty prompt; a prompt needs at least one token")
        seen[each.id] = line.number
        conversations.append(each)
    return conversations


def spell(
    conversation: Conversation,
    turn: int,
    answers: Sequence[str],
    template: chat.Template | None = None,
) -> Spelt:
    """The prompt of a turn, with the model's answers to the earlier turns.

    With a template, the prompt is the conversation as the chat model reads it, up to the beginning
    of the answer. The template writes the special tokens, so the tokenizer must add none (otherwise
    the text would begin with two). Without a template, for base models, turns and answers are
    separated by blank lines, and the tokenizer adds its special tokens. A completion is never put
    into a template. Answers are stripped of white space, as in Spec-Bench.

    Args:
        conversation: the user's turns.
        turn: from 0.
        answers: one for each earlier turn, without special tokens.
        template: None for a base model.

    Raises:
        UserError: the template refuses the conversation.
        ValueError: the turn does not exist, or the number of answers is wrong.
    """
    asked = conversation.turns[: turn + 1]
    if len(asked) != turn + 1 or len(answers) != turn:
        raise ValueError(
            f"turn {turn} of {len(conversation.turns)} with {len(answers)} answers; "
            "give one answer for each earlier turn"
        )
    before = zip(asked, (answer.strip() for answer in answers), strict=False)
    texts = [*itertools.chain.from_iterable(before), asked[-1]]
    if template is None or conversation.completion:
        return Spelt("\n\n".join(texts), True)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": next(roles), "content": text} for text in texts]
    return Spelt(chat.render(template, messages, add_generation_prompt=True), False)


def _is_one_value(text: str, first: str, objects: bool) -> bool:
    """Whether the file is a single JSON list or object, on one or more lines.

    ``first`` is its first line, which is not an object. If the file may be a list of prompts (not
    ``objects``), prompts can look like JSON: then only an object or a list of objects counts.
    """
    if first[0] not in "[{":
        return False
    try:
        value = files.parsed(text)
    except ValueError:
        return objects and first in ("[", "{")
    if objects or isinstance(value, dict):
        return True
    return bool(value) and all(isinstance(each, dict) for each in value)


def _is_known(line: Mapping[str, Any], kind: str) -> bool:
    """Whether a line has the key that identifies ``kind``, or any kind for "auto"."""
    chosen = _kind(line) if kind == "auto" else kind
    key, expected = next(iter(_KEYS[chosen].items()))
    return jsonl.KINDS[expected](line.get(key)) or (chosen == "humaneval" and bool(line))


def _kind(line: Mapping[str, Any]) -> str:
    # A line with a prompt may have the keys of other kinds, for example "answer".
    if "prompt" in line and not {"entry_point", "test_list"} & line.keys():
        return "humaneval" if "task_id" in line else "prompts"
    if "question_id" in line and {"sub_category", "messages"} & line.keys():
        return "speed_bench"
    return next((kind for kind, keys in _KEYS.items() if next(iter(keys)) in line), "prompts")


def _conversation(kind: str, line: jsonl.Line) -> Conversation:
    """A line as a conversation. Raises UserError."""
    if kind == "speed_bench":
        line = _with_turns(line)
    text = "prompt" if "prompt" in (line.value or {}) else "text"
    value = line.check(kind, _KEYS[kind] | ({text: "text"} if kind == "mbpp" else {}))
    if kind == "prompts":
        category = value.get("category")
        category = category if isinstance(category, str) else None
        return Conversation(line.number, category, (value["prompt"],))
    if kind in ("spec_bench", "speed_bench"):
        if not value["turns"]:
            raise UserError(f'{line.where} has no turn in its "turns"; give at least one text')
        if kind == "speed_bench" and any(turn.startswith(PLACEHOLDER) for turn in value["turns"]):
            raise UserError(
                f"{line.where} has a placeholder and no text: run prepare_data.py of SPEED-Bench, "
                "which fetches the texts, and give the file that it writes"
            )
        return Conversation(value["question_id"], value["category"], tuple(value["turns"]))
    if kind == "humaneval":
        return Conversation(value["task_id"], kind, (value["prompt"],), completion=True)
    if kind == "gsm8k":
        return Conversation(line.number, kind, (value["question"],))
    if kind == "pairs":
        return Conversation(line.number, None, (value["source"],))
    if not value[text].strip() or not any(test.strip() for test in value["test_list"]):
        empty = "test_list" if value[text].strip() else text
        raise UserError(
            f'{line.where} has an empty "{empty}"; a line of mbpp needs a task and at least one '
            "test"
        )
    prompt = MBPP_PROMPT.format(text=value[text], tests="\n".join(value["test_list"]))
    return Conversation(value["task_id"], kind, (prompt,))


def _with_turns(line: jsonl.Line) -> jsonl.Line:
    """A row of SPEED-Bench, whose messages are turns where it has any. Raises UserError."""
    value = line.value or {}
    messages = value.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        return line
    if strange := [each for each in messages if each.get("role") != "user"]:
        raise UserError(
            f"{line.where} has a message of the role {strange[0].get('role')!r}; the messages "
            "of a line of speed_bench are the turns of the user"
        )
    return line._replace(value=value | {"turns": [each.get("content") for each in messages]})
