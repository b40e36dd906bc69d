"""Questions that the target answers, as prompts of objective generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.config import Config
from specjax.data import prompts, text_files
from specjax.data.prompts import PromptSource
from specjax.errors import UserError
from specjax.models import hf
from specjax.train.display import report


def read(config: Config, target: hf.Loaded) -> list[list[int]]:
    """``config.generation.num_prompts`` first turns of the conversations in files, as token ids.

    The files ``config.generation.prompts`` are of any kind that mode bench reads, and
    ``config.generation.chat`` is the template as there. Prompts of more than ``prompt_tokens``
    tokens and repeated ones are left out. The others are in a random order that depends on
    ``config.seed``, so the first n of them have the mixture of all. Raises UserError.
    """
    sizes, unique = config.generation, {}
    names = text_files.split_names(sizes.prompts)
    chat = sizes.get("chat") or ""
    for name in names:
        source = PromptSource(names=names, chat=chat, first_turns=True, section="config.generation")
        for prompt in prompts.read(source, target, _no_answer, name=name).prompts:
            unique[tuple(prompt.ids)] = prompt.ids
    fitting = [ids for ids in unique.values() if len(ids) <= sizes.prompt_tokens]
    if len(fitting) < sizes.num_prompts:
        raise UserError(
            f"{sizes.prompts} has {len(fitting)} different prompts of at most "
            f"{sizes.prompt_tokens} tokens, and config.generation.num_prompts is "
            f"{sizes.num_prompts}; lower it, or raise prompt_tokens"
        )
    if len(fitting) < len(unique):
        report(
            f"{len(unique) - len(fitting)} of {len(unique)} prompts have more than "
            f"{sizes.prompt_tokens} tokens and are left out"
        )
    order = np.random.default_rng(config.seed).permutation(len(fitting))
    return [fitting[i] for i in order[: sizes.num_prompts]]


def sources(config: Config) -> list[str]:
    """The names of the files, without their folders."""
    return [Path(name).name for name in text_files.split_names(config.generation.prompts)]


def _no_answer(chosen: list) -> list[list[int]]:
    raise AssertionError("a first turn needs no answer")
