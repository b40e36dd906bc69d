"""Chat templates: Jinja programs that turn a conversation into the text a model was trained on.

They run in a sandbox, with the globals and filters of transformers, so a model's own template
renders the same text there and here. The assistant's text is the text in ``{% generation %}``
blocks; a template without such blocks is rendered turn by turn.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from specjax.data import jsonl
from specjax.errors import UserError
from specjax.files import buckets
from specjax.models import hf

Messages = Sequence[Mapping[str, str]]  # "role" is system, user or assistant; "content" is text

BUILT_IN = {
    name: Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text("utf-8")
    for name in ("chatml", "vicuna", "llama2", "plain")
}
_SPECIAL = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]


# Prompts and text to train on are the same on every day; the default of Llama 3's templates.
DATE = datetime(2024, 7, 26)


class Template(NamedTuple):
    """A chat template with the special tokens of one tokenizer."""

    name: str
    source: str
    words: dict[str, str]  # the variables bos_token, eos_token, ...: their texts
    special: tuple[str, ...]  # the texts of all special tokens
    date: datetime | None = DATE  # what it reads as the present date; None: today


def load(name: str, directory: str | Path, tokenizer: Tokenizer) -> Template:
    """The template ``name`` for the model in ``directory``.

    ``name`` is "" (the model's own template), one of ``BUILT_IN``, or the path of a .jinja file.

    Raises UserError if the template does not exist or is not valid Jinja.
    """
    folder = hf.resolve(directory)
    config = hf.read_tokenizer_config(folder)
    if not name:
        source, title = _own(folder, config), f"the chat template of {folder}"
        if source is None:
            raise UserError(
                f"{folder} has no chat template; choose one of {', '.join(BUILT_IN)}, "
                "or give a .jinja file"
            )
    elif name in BUILT_IN:
        source, title = BUILT_IN[name], f"the chat template {name}"
    else:
        path = buckets.local(name)
        if not path.is_file():
            raise UserError(
                f"there is no chat template {name!r}; choose one of {', '.join(BUILT_IN)}, "
                "a .jinja file, or the model's own (leave it empty)"
            )
        source, title = jsonl.read(path, f"chat template {path}"), f"the chat template {path}"
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{title}, line {error.lineno}: {error.message}; correct it") from None
    added = tokenizer.get_added_tokens_decoder().values()
    special = tuple(token.content for token in added if token.special)
    return Template(title, source, _words(folder, config, tokenizer), special)


def has_own(directory: str | Path) -> bool:
    """Whether the model in ``directory`` has a chat template."""
    folder = hf.resolve(directory)
    return _own(folder, hf.read_tokenizer_config(folder)) is not None


def _own(folder: Path, config: dict) -> str | None:
    """The template in a model's directory, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return jsonl.read(file, f"chat template {file}")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, with names
        named = [each for each in template if isinstance(each, dict)]
        template = {each.get("name"): each.get("template") for each in named}.get("default")
    return template if isinstance(template, str) else None


def _words(folder: Path, config: dict, tokenizer: Tokenizer) -> dict[str, str]:
    """Name of a special token -> its text, from tokenizer_config.json (``config``).

    Without that file, the ids in the model's config.json are used.
    """
    words = {}
    for key in _SPECIAL:
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            words[key] = value
    if not config:
        model = hf.read_config(folder)
        for key in ("bos_token", "eos_token"):
            number = model.get(f"{key}_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and (word := tokenizer.id_to_token(number)) is not None:
                words[key] = word
    return words


def render(template: Template, messages: Messages, add_generation_prompt: bool = False) -> str:
    """The text of a conversation, as ``apply_chat_template`` of transformers gives it.

    Raises UserError if the template refuses the conversation.
    """
    return _render(template, messages, add_generation_prompt)[0]


def spans(template: Template, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """(text, the [begin, end) of each part of it that the assistant writes).

    A part is a turn of the assistant, with the special token that ends it.

    Raises:
        UserError: the template refuses the conversation; or it has no ``{% generation %}`` blocks
            and later turns change the text of earlier ones, so that no turn can be located.
    """
    text, marked = _render(template, messages)
    if re.search(r"\{%-?\s*generation\b", template.source):
        return text, marked
    parts = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(template, messages[:number], add_generation_prompt=True)
        after = render(template, messages[: number + 1])
        if not after.startswith(before) or not text.startswith(after):
            raise UserError(
                f"{template.name} is not prefix-stable: the text of turn {number + 1} depends on "
                "later turns; put {% generation %} blocks around the assistant's text, "
                f"or choose one of {', '.join(BUILT_IN)}"
            )
        written = after[len(before) :]
        # Decoding ends with the special token; the template adds the line feed after it.
        if (bare := written.rstrip()).endswith(template.special):
            written = bare
        parts.append((len(before), len(before) + len(written)))
    return text, parts


def _render(
    template: Template, messages: Messages, add_generation_prompt: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """(text, [begin, end) of each generation block). Raises UserError."""
    compiled, tracker = _compile(template.source)
    variables = {"messages": [dict(m) for m in messages], "tools": None, "documents": None}
    variables["strftime_now"] = (template.date or datetime.now()).strftime
    variables |= template.words
    tracker.blocks, tracker.parts = [], []
    try:
        for block in compiled.generate(**variables, add_generation_prompt=add_generation_prompt):
            tracker.blocks.append(block)
    except Exception as error:  # a template is a program and can raise any error
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{template.name} does not take this conversation: {why}") from None
    return "".join(tracker.blocks), list(tracker.parts)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: renders the content and records its position."""

    tags = {"generation"}  # noqa: RUF012  (as Jinja declares it)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.blocks: list[str] = []
        self.parts: list[tuple[int, int]] = []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        text = caller()
        start = sum(map(len, self.blocks))
        self.parts.append((start, start + len(text)))
        return text


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[jinja2.Template, _Generation]:
    """Compiles a template as ``chat_template_utils`` of transformers does."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's filter of this name escapes HTML.
        keys: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    tracker: Any = environment.extensions[_Generation.identifier]
    return environment.from_string(source), tracker
