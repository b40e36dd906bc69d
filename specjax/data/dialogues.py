"""Conversations as documents of which the assistant's turns are learnt.

Three kinds of .jsonl line are read: ShareGPT's {"conversations": [{"from": "human", "value": ...}, ...]}, OpenAI's
{"messages": [{"role": "user", "content": ...}, ...]}, and {"turns": [["U", ...], ["S", ...]]} of Schema-Guided Dialogue
(Rastogi et al. 2020, 1909.05855).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, processors

from specjax.data import chat, jsonl, token_streams
from specjax.data.packing import Document
from specjax.errors import UserError

ROLES = {"human": "user", "user": "user", "system": "system"} | dict.fromkeys(
    ("gpt", "assistant", "chatgpt", "bing", "bard"), "assistant"
)
_KINDS = {  # key of the line -> (keys of a turn, what roles are called)
    "conversations": (("from", "value"), ROLES),
    "messages": (("role", "content"), ROLES),
    "turns": ((0, 1), {"U": "user", "S": "assistant"}),
}
_EXPECTED = (
    'a JSON object with "conversations" (turns with "from" and "value"), "messages" (turns with "role" and "content") or '
    '"turns" (pairs ["U" or "S", text])'
)


class Conversation(NamedTuple):
    """Turns, each {"role": "system" | "user" | "assistant", "content": text}; the first after the system's is a user's."""

    where: str  # file and line
    messages: list[dict[str, str]]


class Dialogues(NamedTuple):
    """Conversations as tokens."""

    documents: list[Document]  # an assistant's turns are labelled
    skipped: int  # conversations in which no assistant answers


def load(
    files: str | Sequence[str], split: str, tokenizer: Tokenizer, template: chat.Template
) -> Dialogues:
    """The documents of ``split`` ("train", "valid", "test") of .jsonl files: of each file 90 %, 5 % and 5 %, as for texts.

    Raises UserError: see ``read`` and ``chat.spans``.
    """
    found, skipped = [], 0
    for path in [files] if isinstance(files, str) else files:
        conversations, left_out = read(path)
        sizes = [sum(len(m["content"]) for m in each.messages) for each in conversations]
        found += conversations[token_streams.share(sizes, split)]
        skipped += left_out
    return Dialogues(documents(found, tokenizer, template), skipped)


def read(file: str | Path) -> tuple[list[Conversation], int]:
    """The conversations of a .jsonl file, and how many were skipped because no assistant answers in them.

    What an assistant says before the first user does is left out, an empty turn ends the conversation. Raises UserError
    naming the line: no such conversation, an unknown role.
    """
    path = Path(file).expanduser()
    told = f"dialogue file {path}"
    found, skipped = [], 0
    for number, line in jsonl.lines(jsonl.read(path, told)):
        messages = _answered(_messages(jsonl.parse(line), f"{told} line {number}"))
        if messages:
            found.append(Conversation(f"{path} line {number}", messages))
        else:
            skipped += 1
    if not found:
        raise UserError(
            f"{told} has no conversation in which an assistant answers; give one with some"
        )
    return found, skipped


def _messages(value: dict | None, where: str) -> list[dict[str, str]]:
    """The turns of a line, with our names for the roles."""
    kind = next((key for key in _KINDS if isinstance((value or {}).get(key), list)), None)
    if value is None or kind is None:
        raise UserError(f"{where} is not {_EXPECTED}")
    (who, what), roles = _KINDS[kind]
    messages = []
    for number, turn in enumerate(value[kind], 1):
        try:
            role, text = turn[who], turn[what]
        except (KeyError, IndexError, TypeError):
            role = text = None
        if not isinstance(role, str) or not isinstance(text, str):
            raise UserError(f"{where}, turn {number} has no role and text; expected is {_EXPECTED}")
        if role not in roles:
            raise UserError(
                f"{where}, turn {number} is by {role!r}; the roles are {', '.join(roles)}"
            )
        messages.append({"role": roles[role], "content": text})
    return messages


def _answered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The turns from the first user's to the last assistant's, after the system's; none if no assistant answers."""
    system = list(itertools.takewhile(lambda m: m["role"] == "system", messages))
    turns = itertools.dropwhile(lambda m: m["role"] != "user", messages[len(system) :])
    turns = list(itertools.takewhile(lambda m: m["content"].strip(), turns))
    while turns and turns[-1]["role"] != "assistant":
        turns.pop()
    return [m for m in system if m["content"].strip()] + turns if turns else []


def documents(
    conversations: Sequence[Conversation], tokenizer: Tokenizer, template: chat.Template
) -> list[Document]:
    """Each conversation as the template spells it, tokenised in one piece; a token is labelled if it has a character of what
    the assistant writes. Raises UserError naming the line: the template does not take a conversation."""
    bare = Tokenizer.from_str(
        tokenizer.to_str()
    )  # a copy: how a caller's tokenizer cuts and fills up stays as it is
    bare.no_truncation()
    bare.no_padding()
    bare.post_processor = processors.Sequence([])  # some take the spaces out of the offsets
    texts, marks = [], []
    for where, messages in conversations:
        try:
            text, spans = chat.spans(template, messages)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        before = np.zeros(
            len(text) + 1, np.int32
        )  # characters of the assistant's before each place
        for start, end in spans:
            before[start + 1 : end + 1] = 1
        texts.append(text)
        marks.append(np.cumsum(before))
    found = []
    for encoding, before in zip(
        bare.encode_batch(texts, add_special_tokens=False), marks, strict=True
    ):
        places = np.asarray(encoding.offsets, np.int64).reshape(-1, 2)
        found.append(
            Document(
                np.asarray(encoding.ids, np.int32), before[places[:, 1]] > before[places[:, 0]]
            )
        )
    return found
