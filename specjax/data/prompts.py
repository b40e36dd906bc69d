"""Prompts as token ids: one text, files of any known kind, or code of the embedded corpus.

A prompt begins like any text of the target's tokenizer, whatever its source is: with the ids that
the tokenizer puts before a text (``token_streams.opening``), or with those of the chat template.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from specjax.data import chat, corpora, pairs, prompt_files, token_streams
from specjax.data.prompt_files import Conversation
from specjax.errors import UserError
from specjax.files import buckets
from specjax.models import hf
from specjax.prompt import of_text

# The named prompt set: held-out lines of the embedded corpus; with an encoder, its functions.
STDLIB = "stdlib"
OWN = "own"  # config.chat: the model's chat template
AUTO = "auto"  # config.chat: the model's chat template, if it has one and the prompts are of a file
STDLIB_PROMPTS = 32  # of the set "stdlib", if no number is given


class Prompt(NamedTuple):
    """One prompt, as text and as token ids."""

    text: str
    ids: list[int]
    category: str | None = None
    question: str | int = 0  # its conversation: the id in the file, or the number of the line
    turn: int = 0  # of the conversation


class PromptSet(NamedTuple):
    """The prompts of one source."""

    name: str | None  # None: a text on the command line
    prompts: list[Prompt]
    others: list[Prompt]  # ``warm_prompts`` further ones, to learn from

    def about(self) -> str:
        """The numbers of conversations and turns, and of the conversations of each category."""
        category = {prompt.question: prompt.category for prompt in self.prompts}
        counts = Counter(each for each in category.values() if each is not None)
        parts = ", ".join(f"{name} {count}" for name, count in counts.items())
        size = f"{len(category)} conversations, {len(self.prompts)} turns"
        if len(category) == len(self.prompts):
            size = f"{len(category)} prompts"
        return f"{self.name or 'prompt'}: {size}" + (f" ({parts})" if parts else "")


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """Which prompts to read. Each field is the configuration key of that name, unless noted."""

    text: str = ""  # config.prompt: one text
    names: tuple[str, ...] = ("",)  # config.grid.prompts or (config.prompts,): files, or "stdlib"
    kind: str = "auto"  # config.prompt_kind
    # Template for conversations: "" none, "own" the model's, "auto" the model's if it has one and
    # the prompts are of a file, or a name that ``data.chat`` defines.
    chat: str = ""
    max_prompt_tokens: int = 0  # longer prompts are cut: see ``_cut``; 0 = no limit
    # Conversations of a file, evenly from its categories; 0 = all, of "stdlib" 32.
    num_prompts: int = 0
    prompt_tokens: int = 64  # length of each prompt of "stdlib", its opening included
    warm_prompts: int = 0  # further prompts, to learn from
    data_dir: str = ""  # where the corpus of "stdlib" is; "" = the data folder beside the target
    seed: int = 0  # chooses the lines of "stdlib"
    first_turns: bool = False  # only these are prompts, not every turn of a conversation
    section: str = "config"  # where these keys are; for messages


# Decodes the prompts of a turn: prompts -> the new token ids of each, or its text.
Answer = Callable[[list[Prompt]], Sequence[list[int] | str]]


def read(
    source: PromptSource, target: hf.Loaded, answer: Answer, *, name: str = "", context: int = 0
) -> PromptSet:
    """Reads ``source.text``, or the prompts called ``name``.

    Args:
        source: which prompts, how many, and the chat template.
        target: its tokenizer is used.
        answer: decodes the prompts of a turn, for the turns that follow it.
        name: one of ``source.names``; "" if the source is a text.
        context: cuts every prompt to this many first tokens, without the shorter ones; 0 = no cut.

    Raises:
        UserError: neither or both of text and name, a missing file, a line without the keys of its
            kind, an empty prompt, a template that fits no prompt, too few prompts of that length.
    """
    _check(source, name)
    extra = source.warm_prompts
    if name == STDLIB:
        if context and target.lm.encoder is not None:
            raise UserError(
                "config.grid.contexts cuts prompts, and sources of an encoder-decoder model are "
                "functions of different lengths; give config.prompt_tokens, the longest one"
            )
        count = (source.num_prompts or STDLIB_PROMPTS) + extra
        every = _held_out(source, target, count, context or source.prompt_tokens)
        return PromptSet(STDLIB, every[: len(every) - extra], every[len(every) - extra :])
    conversations, measured = conversations_of(source, name)
    every = _all_turns(source, target, conversations, answer)
    if context:
        every = [_shortened(p, target, target.lm.prompt(p.ids, context)) for p in every]
    others = [p for p in every if p.question not in measured]  # they may be shorter
    prompts = [p for p in every if p.question in measured]
    prompts = [p for p in prompts if not context or len(p.ids) == context]
    if not prompts:
        raise UserError(
            f"{_where(source, name)}: no prompt has {context} tokens; ask for fewer in "
            "config.grid.contexts"
        )
    return PromptSet(None if source.text else _label(name, source.names), prompts, others)


def _check(source: PromptSource, name: str) -> None:
    if bool(source.text) == bool(name):
        raise UserError(
            "give either config.prompt (one text) or config.prompts "
            "(a .txt or .jsonl file, or stdlib)"
        )
    if source.text or name == STDLIB:
        given = "config.prompt is a text" if source.text else "config.prompts is stdlib"
        templated = name == STDLIB and source.chat not in ("", AUTO)
        for key, is_set in (("chat", templated), ("prompt_kind", source.kind != "auto")):
            if is_set:
                raise UserError(f"config.{key} is for files of prompts, and {given}; leave it out")


def check(source: PromptSource, name: str, batch_size: int) -> None:
    """Checks what ``read`` would read, without a tokenizer. Raises UserError."""
    _check(source, name)
    if name == STDLIB:
        count, what = source.num_prompts or STDLIB_PROMPTS, "prompts"
    else:
        conversations, measured = conversations_of(source, name)
        if source.chat not in ("", AUTO) and all(each.completion for each in conversations):
            raise _no_template(source)
        turns = [len(each.turns) for each in conversations if each.id in measured]
        count, what = sum(turns), "turns" if max(turns) > 1 else "prompts"
    if batch_size > count:
        raise UserError(
            f"the batch size is {batch_size} and there are {count} {what}; give more, or lower it"
        )


def _where(source: PromptSource, name: str) -> str:
    return f"{source.section}.prompts: {os.path.expanduser(name)}"


def conversations_of(source: PromptSource, name: str) -> tuple[list[Conversation], set[str | int]]:
    """The conversations, and the ids of those that are measured; the others are learnt from."""
    if source.text:
        every = [Conversation(1, None, (source.text,))]
    else:
        kind, path = prompt_files.named(name)
        if kind and source.kind not in ("auto", kind):
            raise UserError(
                f"{_where(source, name)}: the kind is {kind}, and {source.section}.prompt_kind is "
                f"{source.kind}; leave one of them out"
            )
        every = prompt_files.read(buckets.local(path), _where(source, path), kind or source.kind)
    every = [each._replace(turns=each.turns[: 1 if source.first_turns else None]) for each in every]
    extra = source.warm_prompts
    if source.num_prompts:
        every = prompt_files.sample(every, source.num_prompts + extra)
    if len(every) <= extra:
        raise UserError(
            f"there are {len(every)} prompts, and config.warm_prompts takes {extra} "
            "of them; give more"
        )
    measured = every[: len(every) - extra]
    if source.num_prompts:
        measured = prompt_files.sample(every, min(source.num_prompts, len(measured)))
    return every, {each.id for each in measured}


def _label(name: str, names: Sequence[str]) -> str:
    """A file's name in the results: the shortest spelling of its path that no other file has.

    The spellings: the stem, the file name, the file name with its folder, the whole path. A split
    of SPEED-Bench, qualitative/test.parquet, has the name of its folder.
    """
    kind, name = prompt_files.named(name)
    names = [prompt_files.named(each)[1] for each in names]
    if kind == "speed_bench" and Path(name).name.startswith("test"):
        *names, name = (str(Path(each).absolute().parent) for each in (*names, name))
    spellings = (
        lambda path: path.name.partition(".")[0],
        lambda path: path.name,
        lambda path: f"{path.absolute().parent.name}/{path.name}",
    )
    for spell in spellings:
        label = spell(Path(name))
        if Counter(spell(Path(each)) for each in names)[label] <= 1:
            return label
    return str(Path(name))


def _all_turns(
    source: PromptSource, target: hf.Loaded, conversations: Sequence[Conversation], answer: Answer
) -> list[Prompt]:
    """Every turn of every conversation as a prompt, with the answers to the earlier turns."""
    turns = Turns(source, target, template_of(source, target, conversations))
    answers, result = ([[] for _ in conversations] for _ in range(2))
    for turn in range(max(len(each.turns) for each in conversations)):
        for number, each in enumerate(conversations):
            if len(each.turns) > turn:
                result[number].append(turns.prompt(each, turn, answers[number]))
        unfinished = [n for n, each in enumerate(conversations) if len(each.turns) > turn + 1]
        if unfinished:
            outputs = answer([result[number][-1] for number in unfinished])
            decode = target.text_tokenizer.decode
            for number, new in zip(unfinished, outputs, strict=True):
                answers[number].append(new if isinstance(new, str) else decode(new))
    return [prompt for prompts in result for prompt in prompts]


def template_of(
    source: PromptSource, target: hf.Loaded, conversations: Sequence[Conversation]
) -> chat.Template | None:
    """The template of the conversations, or None; prints which one "auto" has chosen."""
    if not source.chat:
        return None
    completions = all(each.completion for each in conversations)
    auto = source.chat == AUTO
    if auto and (source.text or completions or not chat.has_own(target.directory)):
        return None
    if completions:
        raise _no_template(source)
    name = "" if source.chat in (OWN, AUTO) else source.chat
    template = chat.load(name, target.directory, target.text_tokenizer)
    if auto and jax.process_index() == 0:
        other = f"--{source.section}.chat= decodes them as texts"
        print(f"prompts are put into {template.name}; {other}", file=sys.stderr, flush=True)
    return template


def _no_template(source: PromptSource) -> UserError:
    return UserError(
        f"{source.section}.chat is {source.chat!r}, and these prompts are texts to be continued; "
        "a template does not fit"
    )


class Turns(NamedTuple):
    """How the turns of conversations become prompts."""

    source: PromptSource
    target: hf.Loaded
    template: chat.Template | None  # of ``template_of``

    def prompt(self, conversation: Conversation, turn: int, answers: Sequence[str]) -> Prompt:
        """A turn after the answers to the earlier ones. Raises UserError."""
        text, special = prompt_files.spell(conversation, turn, answers, self.template)
        try:
            text.encode()
        except UnicodeEncodeError:  # a command line in another encoding
            raise UserError(f"prompt {conversation.id} is not UTF-8 text") from None
        ids = self.target.text_tokenizer.encode(text, add_special_tokens=special).ids
        if not text.strip() or not ids:
            raise UserError(f"prompt {conversation.id} is empty; a prompt needs at least one token")
        ids = of_text(self.target.lm, ids, f"prompt {conversation.id}")
        whole = Prompt(text, ids, conversation.category, conversation.id, turn)
        cut = _cut(self.source, self.target, ids)
        return whole if cut == ids else _shortened(whole, self.target, cut)


def _cut(source: PromptSource, target: hf.Loaded, ids: list[int]) -> list[int]:
    """The ids, or ``max_prompt_tokens`` of them: their opening and the last ones.

    Of a source, which begins with its task: the first ones and its end, as transformers cuts.
    """
    most = source.max_prompt_tokens
    if not 0 < most < len(ids):
        return ids
    if (encoder := target.lm.encoder) is not None:
        end = [*token_streams.closing(target.text_tokenizer), encoder.start]
        end = end if ids[-len(end) :] == end and len(end) < most else ids[-1:]
        return ids[: most - len(end)] + end
    head = token_streams.opening(target.text_tokenizer)
    if ids[: len(head)] != head or len(head) >= most:
        head = []
    return head + ids[len(ids) - most + len(head) :]


def _shortened(prompt: Prompt, target: hf.Loaded, ids: list[int]) -> Prompt:
    return prompt._replace(ids=ids, text=target.text_tokenizer.decode(ids))


def _held_out(source: PromptSource, target: hf.Loaded, count: int, tokens: int) -> list[Prompt]:
    """``count`` prompts of ``tokens`` token ids: starts of lines of the corpus's test split.

    Of a target with an encoder: functions without their docstring, of at most ``tokens`` token ids
    with the start token. The corpus is in ``source.data_dir``, or in the data folder beside the
    target. Raises UserError if there is none, or too little text for such prompts.
    """
    beside = Path(target.directory).parent / "data"
    if not source.data_dir and not beside.is_dir():
        raise UserError(
            "config.prompts=stdlib: there is no corpus beside the target; "
            "give config.data_dir, a directory to build it in"
        )
    model, tokenizer, seed = target.lm, target.text_tokenizer, source.seed
    head = len(token_streams.opening(tokenizer))
    if tokens <= head:
        raise UserError(
            f"config.prompts=stdlib: a prompt of {tokens} tokens has no text, because the "
            f"tokenizer puts {head} before every text; ask for more tokens"
        )
    texts = corpora.load_texts(source.data_dir or str(beside), "test")
    if model.encoder is None:
        lines = [text for _, text in texts]
        ids = token_streams.held_out_prompts(lines, tokenizer, count, tokens - head, seed)
    else:
        ids = pairs.held_out_sources(pairs.docstrings(texts), tokenizer, count, tokens - 1, seed)
        ids = [of_text(model, each, f"prompt {number}") for number, each in enumerate(ids)]
    ids = [_cut(source, target, each) for each in ids]
    return [Prompt(tokenizer.decode(each), each, None, n) for n, each in enumerate(ids)]
