"""Mode chat: conversations in a chat model's template, printed as they are written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from specjax.bench import metrics, passes, provenance, results
from specjax.data import prompts as prompts_lib
from specjax.data.prompt_files import Conversation
from specjax.data.prompts import Prompt, PromptSet
from specjax.errors import UserError
from specjax.report import terminal
from specjax.run import build, generate, process, workdirs
from specjax.run.settings import Settings


class _Answer(NamedTuple):
    """What the model wrote in a turn."""

    prompt: Prompt
    ids: list[int]
    text: str
    said: str  # the text as the next turn has it
    counts: metrics.Counts


def chat(settings: Settings, workdir: Path, command: str | None) -> None:
    """Prints every turn and its answer, and writes results.json and ``settings.record``.

    After an interrupt they have the answers that were complete.

    Raises UserError: settings that do not fit, no chat template, a conversation that is too long.
    """
    _check(settings)
    name = settings.source.names[0]
    prompts_lib.check(settings.source, name, 1)
    target = build.target(settings)
    [method] = build.methods(settings, target)
    conversations, _ = prompts_lib.conversations_of(settings.source, name)
    template = prompts_lib.template_of(settings.source, target, conversations)
    template = template and template._replace(date=None)
    turns = prompts_lib.Turns(settings.source, target, template)
    job = _job(settings, turns, conversations)
    workdirs.announce_replacement(settings, workdir)
    if (console := terminal.console()).is_terminal:  # elsewhere only the conversation is printed
        console.print(Text(build.about(job, [method]), "dim"))
    answers: list[_Answer] = []
    with process.held(answers) as interrupts:
        _converse(_Model(settings, turns, method, job), conversations, answers)
    facts = None  # the hash of large weights takes longer than an interrupted process has
    if not interrupts:
        facts = provenance.target(target.params, name="", directory=target.directory)
    counted = [results.Decoded(each.prompt.category, each.counts, each.ids) for each in answers]
    rows = results.rows_of_texts(method, target.lm, counted, settings.sampling.temperature, 1)
    written = [(each.prompt, each.text, each.ids) for each in answers]
    workdirs.write_texts(
        settings,
        workdir,
        rows,
        written,
        command=command,
        target=facts,
        unfinished=bool(interrupts),
    )
    if interrupts:
        raise interrupts[0]


class _Model(NamedTuple):
    """What answers."""

    settings: Settings
    turns: prompts_lib.Turns
    method: passes.Method
    job: passes.Job  # with buffers for the longest turn


def _converse(model: _Model, conversations: Sequence[Conversation], answers: list[_Answer]) -> None:
    """Prints every turn and its answer; appends to ``answers``. Raises UserError."""
    console = terminal.console()
    for number, each in enumerate(conversations, 1):
        place = "" if len(conversations) == 1 else f"\n{number} of {len(conversations)}"
        if heading := ", ".join(filter(None, (place, each.category))):
            console.print(Text(heading, "bold"))
        texts: list[str] = []
        for turn in range(len(each.turns)):
            prompt = model.turns.prompt(each, turn, texts)
            console.print(Text.assemble(("user: ", "bold"), (each.turns[turn], "dim")))
            answers.append(_answer(model, prompt, len(answers), console))
            texts.append(answers[-1].said)


def _check(settings: Settings) -> None:
    """Raises UserError for settings of other modes."""
    prompts = settings.source
    if not prompts.chat:
        raise UserError(
            "config.chat is empty, and mode chat needs a template; give 'own' (the model's), or "
            "use configs/generate.py to continue a text"
        )
    if prompts.names == (prompts_lib.STDLIB,):
        raise UserError(
            "config.prompts is stdlib, which has texts to be continued; give a file of questions"
        )


def _job(
    settings: Settings, turns: prompts_lib.Turns, conversations: Sequence[Conversation]
) -> passes.Job:
    """What decodes every turn, with buffers for the longest one, so that it is compiled once.

    Answers are not known yet: each is taken to have ``max_new_tokens``. Raises UserError.
    """

    def size_of(each: Conversation, turn: int) -> int:
        prompt = turns.prompt(each, turn, [""] * turn)
        return len(prompt.ids) + turn * settings.max_new_tokens

    first = [size_of(each, 0) for each in conversations]
    whole = [size_of(each, len(each.turns) - 1) for each in conversations]
    # A first turn that does not fit is an error at once, a later one when it is reached.
    room = turns.target.config.longest_text - settings.max_new_tokens
    most = settings.source.max_prompt_tokens or max(whole)
    size = max(*first, min(max(whole), room, most))
    prompts = PromptSet(None, [Prompt("", [0] * size)], [])
    return build.job(settings, turns.target, prompts, settings.sampling.temperature, 1)


def _answer(model: _Model, prompt: Prompt, number: int, console) -> _Answer:
    """Decodes and prints one answer. Raises UserError if the turn is too long."""
    settings, turns, method, job = model
    size, positions = len(prompt.ids), turns.target.config.longest_text
    if size + job.max_new_tokens > positions:
        raise UserError(
            f"turn {prompt.turn + 1} of conversation {prompt.question} has {size} tokens, with "
            f"config.max_new_tokens = {job.max_new_tokens} that is {size + job.max_new_tokens}, "
            f"and the model has {positions} positions; let config.max_prompt_tokens cut prompts"
        )
    if size > job.width:
        job = job._replace(prompts=[[0] * size])
    began = time.perf_counter()
    counts, ids, cut = generate.stream(job, method, prompt.ids, settings.stop, console, number)
    seconds = time.perf_counter() - began
    tau = counts.tokens / counts.rounds
    note = f"{method.name}: {len(ids)} tokens, tau {tau:.2f}, {len(ids) / seconds:.1f} tokens/s"
    # The first answer is also compiled.
    note += ", compilation included" if number == 0 else ""
    colours = number == 0 and method.drafter.nodes and terminal.has_colours(console)
    console.print(Text(note + ("; green: accepted draft tokens" if colours else ""), "dim"))
    ids = ids[: cut.tokens]
    return _Answer(prompt, ids, cut.text, generate.said(cut, ids, turns.target), counts)
