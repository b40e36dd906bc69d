"""Conversations as documents in which the assistant's turns are labelled.

Three kinds of .jsonl line are read: ShareGPT's
{"conversations": [{"from": "human", "value": ...}, ...]}, OpenAI's
{"messages": [{"role": "user", "content": ...}, ...]}, and {"turns": [["U", ...], ["S", ...]]} of
Schema-Guided Dialogue (Rastogi et al. 2020, 1909.05855).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, processors

from specjax.data import chat, jsonl, text_files
from specjax.data.packing import Document
from specjax.errors import UserError
from specjax.files import buckets

ROLES = {"human": "user", "user": "user", "system": "system"}
ROLES |= dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant")
# Key of the line -> (keys of a turn, the roles by their names in the file).
_KINDS = {
    "conversations": (("from", "value"), ROLES),
    "messages": (("role", "content"), ROLES),
    "turns": ((0, 1), {"U": "user", "S": "assistant"}),
}
_EXPECTED = (
    'a JSON object with "conversations" (turns with "from" and "value"), '
    '"messages" (turns with "role" and "content") or "turns" (pairs ["U" or "S", text])'
)


class Conversation(NamedTuple):
    """Turns, each {"role": "system" | "user" | "assistant", "content": text}.

    The first turn after the system's is a user's.
    """

    where: str  # file and line
    messages: list[dict[str, str]]


def load(
    files: Sequence[str], split: str, tokenizer: Tokenizer, template: chat.Template
) -> list[Document]:
    """The documents of a split ("train", "valid", "test") of .jsonl files.

    The assistant's turns are labelled. Raises UserError: see ``read`` and ``chat.spans``.
    """
    return documents(conversations_of(files, split), tokenizer, template)


def conversations_of(files: Sequence[str], split: str) -> list[Conversation]:
    """The conversations of a split of .jsonl files.

    The splits are 90 %, 5 % and 5 % of each file, as for texts (``text_files.part_of``). Raises
    UserError: see ``read``.
    """

    def size(each: Conversation) -> int:
        return sum(len(m["content"]) for m in each.messages)

    return [each for own in map(read, files) for each in text_files.part_of(own, split, size)]


def read(file: str | Path) -> list[Conversation]:
    """The conversations of a .jsonl file; those in which no assistant answers are left out.

    Turns of an assistant before the first user's are left out; an empty turn ends the conversation.

    Raises UserError, with the line: not a conversation, an unknown role.
    """
    path = buckets.local(file)
    where = f"dialogue file {path}"
    conversations = []
    for line in jsonl.objects(jsonl.read(path, where, compressed=True), where):
        if messages := _answered(_messages(line.value, line.where)):
            conversations.append(Conversation(f"{path} line {line.number}", messages))
    if not conversations:
        raise UserError(
            f"{where} has no conversation in which an assistant answers; give another file"
        )
    return conversations


def _messages(value: dict | None, where: str) -> list[dict[str, str]]:
    """The turns of a line, with the roles system, user and assistant. Raises UserError."""
    kind = next((key for key in _KINDS if isinstance((value or {}).get(key), list)), None)
    if value is None or kind is None:
        raise UserError(f"{where} is not {_EXPECTED}")
    (role_key, text_key), roles = _KINDS[kind]
    messages = []
    for number, turn in enumerate(value[kind], 1):
        try:
            role, text = turn[role_key], turn[text_key]
        except (KeyError, IndexError, TypeError):
            role = text = None
        if not isinstance(role, str) or not isinstance(text, str):
            raise UserError(f"{where}, turn {number} has no role and text; give {_EXPECTED}")
        if role not in roles:
            raise UserError(
                f"{where}, turn {number} is by {role!r}; the roles are {', '.join(roles)}"
            )
        messages.append({"role": roles[role], "content": text})
    return messages


def _answered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The system's turns, then those from the first user's to the last assistant's.

    An empty list if no assistant answers.
    """
    system = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    turns = itertools.dropwhile(lambda m: m["role"] != "user", messages[len(system) :])
    turns = list(itertools.takewhile(lambda m: m["content"].strip(), turns))
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return [m for m in system if m["content"].strip()] + turns if turns else []


def documents(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: chat.Template
) -> list[Document]:
    """The text of each conversation from the template, tokenised in one piece.

    A token is labelled if it contains a character that the assistant writes.

    Raises UserError, with the line, if the template refuses a conversation.
    """
    # A copy: the caller's tokenizer must keep its truncation and padding.
    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.no_truncation()
    bare.no_padding()
    bare.post_processor = processors.Sequence([])  # some remove the spaces from the offsets
    texts, counts = [], []
    for where, messages in conversations:
        try:
            text, spans = chat.spans(template, messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        mark = np.zeros(len(text) + 1, np.int32)
        for start, end in spans:
            mark[start + 1 : end + 1] = 1
        texts.append(text)
        # How many of the assistant's characters come before each position.
        counts.append(np.cumsum(mark))
    result = []
    encodings = bare.encode_batch(texts, add_special_tokens=False)
    for encoding, before in zip(encodings, counts, strict=True):
        begin, end = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
        result.append(Document(np.asarray(encoding.ids, np.int32), before[end] > before[begin]))
    return result
