"""Prompts of every form as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax.errors import UserError
from specjax.generation.loading import Model
from specjax.prompt import of_text

# A text to continue, the turns of a chat, or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def encode(model: Model, prompts: Prompt | Sequence[Prompt], chat: str = "") -> list[list[int]]:
    """The token ids of each prompt; for a model with an encoder, sources and their start token.

    Raises UserError for a prompt that is empty or of another form.
    """
    several = _several(prompts)
    if chat and not any(_is_chat(each) for each in several):
        raise UserError(
            f"chat is {chat!r}, and no prompt is a chat; leave it out, or give turns: "
            '[{"role": "user", "content": ...}]'
        )
    return [_encode(model, each, chat, i) for i, each in enumerate(several)]


def _is_chat(prompt: Any) -> bool:
    turns = isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt) > 0
    return turns and all(isinstance(turn, Mapping) for turn in prompt)


def _several(prompts: Any) -> list:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "ndim"):
        prompts = np.asarray(prompts).tolist()
    if not isinstance(prompts, Sequence):
        raise UserError(f"the prompts are {prompts!r}; give a text, token ids, a chat, or several")
    prompts = list(prompts)
    if not prompts:
        raise UserError("there is no prompt; give at least one")
    first = prompts[0]
    one = isinstance(first, Mapping | int | np.integer)
    return [prompts] if one else prompts


def _encode(model: Model, prompt: Any, chat: str, number: int) -> list[int]:
    if isinstance(prompt, str):
        ids = model.tokenizer.encode(prompt).ids
    elif _is_chat(prompt):
        # Imported here because it needs Jinja.
        from specjax.data import chat as chats

        template = chats.load(chat, model.target.directory, model.tokenizer)
        text = chats.render(template, prompt, add_generation_prompt=True)
        ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    else:
        ids = np.asarray(prompt).tolist() if hasattr(prompt, "ndim") else prompt
        if not isinstance(ids, Sequence) or any(type(i) is not int for i in map(_plain, ids)):
            raise UserError(
                f"prompt {number} is {prompt!r}; it must be a text, token ids, or the turns of a "
                "chat"
            )
        ids = [int(token) for token in ids]
    if not ids:
        raise UserError(f"prompt {number} is empty; a prompt needs at least one token")
    if isinstance(prompt, str) or _is_chat(prompt):
        return of_text(model.lm, ids, f"prompt {number}")
    return model.lm.prompt(ids)


def _plain(token: Any) -> Any:
    """A NumPy integer as Python's."""
    return int(token) if isinstance(token, np.integer) else token
