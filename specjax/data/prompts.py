"""Prompts as token ids, from a configuration: one text, files of any known kind, or held-out code of the embedded corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specjax.config import Config
from specjax.data import prompt_files
from specjax.data.prompt_files import Conversation
from specjax.errors import UserError
from specjax.models import hf

STDLIB = "stdlib"  # the named prompt set: held-out lines of the embedded corpus
OWN = "own"  # config.chat: the model's chat template


class Prompt(NamedTuple):
    """One prompt, as text and as token ids."""

    text: str
    ids: list[int]
    category: str | None = None
    question: str | int = 0  # which conversation it is of: the file's id, or the number of its line
    turn: int = 0  # of the conversation


class PromptSet(NamedTuple):
    """What is decoded."""

    name: str | None  # None: a text on the command line
    prompts: list[Prompt]
    others: list[Prompt]  # ``config.warm_prompts`` further ones, to learn from


Answer = Callable[[list[Prompt]], list[list[int]]]


def names(config: Config) -> list[str]:
    """The sources of a configuration: ``config.grid.prompts`` if there are any, else ``config.prompts``."""
    grid = config.get("grid") or {}
    return list(grid.get("prompts") or ()) or [config.prompts]


def read(
    config: Config,
    target: hf.Loaded,
    answer: Answer,
    *,
    source: str | None = None,
    context: int = 0,
) -> PromptSet:
    """``config.prompt`` (one text), or ``config.prompts``: a file (``specjax.prompt_sets``), or the set "stdlib" (held-out
    Python code, ``config.prompt_tokens`` tokens each). At most ``config.num_prompts`` of them (of a file: conversations, all
    turns of which are prompts); 0 = all, of "stdlib" 32. ``config.warm_prompts`` further ones are ``others``.

    Args:
        config: says also ``config.chat`` (the template in which conversations are put: "" none, "own" the model's, or what
            ``specjax.train.chat`` knows) and ``config.max_prompt_tokens`` (longer prompts keep their end; 0 = no limit).
        target: its tokenizer is used.
        answer: decodes the prompts of a turn, for the turns that follow it: prompts -> new token ids.
        source: in place of ``config.prompts``.
        context: cuts every prompt to its first tokens, so many, and leaves shorter ones out; 0 = as they are.

    Raises:
        UserError: neither or both, a missing file, a line without the keys of its kind, an empty prompt, a template that fits
            no prompt, too few prompts of the asked length.
    """
    chosen: str = config.prompts if source is None else source
    for name, least in (("num_prompts", 0), ("prompt_tokens", 1), ("max_prompt_tokens", 0)):
        if config.get(name, least) < least:
            raise UserError(f"config.{name} is {config[name]}; it must be at least {least}")
    if bool(config.prompt) == bool(chosen):
        raise UserError(
            "give either config.prompt (one text) or config.prompts (a .txt or .jsonl file, or stdlib)"
        )
    extra = config.get("warm_prompts", 0)
    kind = config.get("prompt_kind", "auto")
    if chosen == STDLIB:
        for name, given in (("chat", config.get("chat")), ("prompt_kind", kind != "auto")):
            if given:
                raise UserError(
                    f"config.{name} is for files of prompts, and these are held-out code; leave it out"
                )
        every = _held_out(
            config, target, (config.num_prompts or 32) + extra, context or config.prompt_tokens
        )
        return PromptSet(STDLIB, every[: len(every) - extra], every[len(every) - extra :])
    if config.prompt and kind != "auto":
        raise UserError(
            "config.prompt_kind is for files of prompts, and config.prompt is a text; leave it out"
        )
    where = f"config.prompts: {Path(chosen).expanduser()}"
    talks = [Conversation(1, None, (config.prompt,))] if config.prompt else prompt_files.read(
        Path(chosen).expanduser(), where, kind
    )  # fmt: skip
    if config.num_prompts:
        talks = talks[: config.num_prompts + extra]
    if len(talks) <= extra:
        raise UserError(
            f"there are {len(talks)} prompts, and config.warm_prompts takes {extra} of them; give more"
        )
    apart = len(talks) - extra
    known = {talk.id for talk in talks[:apart]}
    every = _converse(config, target, talks, answer)
    mine, others = ([p for p in every if (p.question in known) == own] for own in (True, False))
    if context:  # what is learnt from may be shorter
        mine, others = (
            [_shortened(p, target, p.ids[:context]) for p in some] for some in (mine, others)
        )
        mine = [p for p in mine if len(p.ids) == context]
    if not mine:
        raise UserError(
            f"{where}: no prompt has {context} tokens; ask for fewer in config.grid.contexts"
        )
    return PromptSet(None if config.prompt else _name(chosen, names(config)), mine, others)


def _name(source: str, every: Sequence[str]) -> str:
    """What results call a file: the shortest of its stem, its name, and that with its folder, that no other has."""
    spellings = (
        lambda path: path.name.partition(".")[0],
        lambda path: path.name,
        lambda path: f"{path.absolute().parent.name}/{path.name}",
        str,
    )
    return next(
        name for spell in spellings
        if Counter(map(spell, map(Path, every)))[name := spell(Path(source))] <= 1 or spell is str
    )  # fmt: skip


def _converse(
    config: Config, target: hf.Loaded, talks: Sequence[Conversation], answer: Answer
) -> list[Prompt]:
    """Every turn of every conversation as a prompt, the model's answers to the turns before it in it."""
    template = _template(config, target, talks)
    answers: list[list[str]] = [[] for _ in talks]
    found: list[list[Prompt]] = [[] for _ in talks]
    for turn in range(max(len(talk.turns) for talk in talks)):
        now = [number for number, talk in enumerate(talks) if len(talk.turns) > turn]
        for number in now:
            found[number].append(
                _prompt(config, target, talks[number], turn, answers[number], template)
            )
        going_on = [number for number in now if len(talks[number].turns) > turn + 1]
        if going_on:
            said = answer([found[number][-1] for number in going_on])
            assert target.tokenizer is not None
            for number, ids in zip(going_on, said, strict=True):
                answers[number].append(target.tokenizer.decode(ids))
    return [prompt for prompts in found for prompt in prompts]


def _template(config: Config, target: hf.Loaded, talks: Sequence[Conversation]):
    if not config.get("chat"):
        return None
    from specjax.data import chat  # only here: Jinja

    if all(talk.completion for talk in talks):
        raise UserError(
            f"config.chat is {config.chat!r}, and these prompts are texts to be continued; a template does not fit"
        )
    assert target.tokenizer is not None
    return chat.load("" if config.chat == OWN else config.chat, target.directory, target.tokenizer)


def _prompt(
    config: Config,
    target: hf.Loaded,
    talk: Conversation,
    turn: int,
    answers: Sequence[str],
    template,
) -> Prompt:
    assert target.tokenizer is not None
    spelt = prompt_files.spell(talk, turn, answers, template)
    try:
        spelt.text.encode()
    except UnicodeEncodeError:  # a command line in another encoding
        raise UserError(f"prompt {talk.id} is not UTF-8 text") from None
    ids = target.tokenizer.encode(spelt.text, add_special_tokens=spelt.add_special_tokens).ids
    if not spelt.text.strip() or not ids:
        raise UserError(f"prompt {talk.id} is empty; a prompt needs at least one token")
    whole = Prompt(spelt.text, ids, talk.category, talk.id, turn)
    most = config.get("max_prompt_tokens", 0)
    return _shortened(whole, target, ids[-most:]) if 0 < most < len(ids) else whole


def _shortened(prompt: Prompt, target: hf.Loaded, ids: list[int]) -> Prompt:
    assert target.tokenizer is not None
    return prompt._replace(ids=ids, text=target.tokenizer.decode(ids))


def _held_out(config: Config, target: hf.Loaded, count: int, tokens: int) -> list[Prompt]:
    from specjax.data import token_streams  # only here: TFDS takes a second to import

    assert target.tokenizer is not None
    beside = Path(target.directory).parent / "data"
    if not config.data_dir and not beside.is_dir():
        raise UserError(
            "config.prompts=stdlib: no corpus lies beside the target; give config.data_dir to build it in"
        )
    folder = config.data_dir or str(beside)
    texts = [text for _, text in token_streams.load_texts(folder, "test")]
    ids = token_streams.held_out_prompts(texts, target.tokenizer, count, tokens, config.seed)
    most = config.get("max_prompt_tokens", 0)
    ids = [each[-most:] for each in ids] if most else ids
    return [
        Prompt(target.tokenizer.decode(each), each, None, number) for number, each in enumerate(ids)
    ]
