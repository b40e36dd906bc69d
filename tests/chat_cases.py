"""Shared by the tests of chat templates and dialogues: a conversation, and its labelled tokens."""

from __future__ import annotations

import numpy as np

from specjax.data import dialogues

OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, is the café  open? 你好"},
    {"role": "assistant", "content": "Yes … till 10 <b>& more</b>."},
    {"role": "user", "content": "Thanks!\n\nAnd now?"},
    {"role": "assistant", "content": "Still open."},
]
ANSWERS = [OPENAI[2]["content"], OPENAI[4]["content"]]


def labelled(template, tokenizer, messages=OPENAI) -> tuple[str, list[str]]:
    """(text of a conversation, texts of its runs of labelled tokens)."""
    [document] = dialogues.documents(
        [dialogues.Conversation("x line 1", messages)], tokenizer, template
    )
    runs, last = [], -2
    for place in np.flatnonzero(document.labelled):
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(document.ids[place]))
        last = place
    whole, *parts = (
        tokenizer.decode(ids, skip_special_tokens=False) for ids in (document.ids.tolist(), *runs)
    )
    return whole, parts
