"""Chat templates: Jinja programs that spell a conversation as a model was taught to read it, and say what it is to write.

They run in a sandbox with the names that transformers gives them, so that a model's own template renders the same text.
What the assistant writes is what stands in ``{% generation %}`` blocks; a template without them is rendered turn by turn.
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
from specjax.models import hf

Messages = Sequence[Mapping[str, str]]  # "role" is system, user or assistant; "content" is text

_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
BUILT_IN = {
    "chatml": (  # OpenAI 2023, chatml.md; Qwen, Yi, SmolLM
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "vicuna": (  # FastChat, conversation.py: vicuna_v1.1
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ messages[0].content + ' ' }}"
        f'{{% else %}}{{{{ "{_SYSTEM} " }}}}{{% endif %}}'
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
        "{% elif m.role == 'assistant' %}{{ 'ASSISTANT:' }}"
        "{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "llama2": (  # Touvron et al. 2023 (2307.09288), llama/generation.py
        "{% set known = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set known.system = '<<SYS>>\\n' + m.content + '\\n<</SYS>>\\n\\n' %}"
        "{% elif m.role == 'user' %}{{ bos_token + '[INST] ' + known.system + m.content.strip() + ' [/INST]' }}"
        "{% set known.system = '' %}"
        "{% else %}{% generation %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    ),
    "plain": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant:' }}"
        "{% generation %}{{ ' ' + m.content + '\\n' }}{% endgeneration %}"
        "{% else %}{{ m.role.capitalize() + ': ' + m.content + '\\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}


class Template(NamedTuple):
    """A chat template with the words of the tokenizer it is for."""

    name: str
    source: str
    words: dict[str, str]  # bos_token, eos_token, ...: what it may use
    special: tuple[str, ...]  # spellings of the special tokens


def load(name: str, directory: str | Path, tokenizer: Tokenizer) -> Template:
    """The template called ``name`` for the model of ``directory``: "" is the model's own, then ``BUILT_IN`` ones, then a file.

    Raises UserError: there is no such template, or it is no valid one.
    """
    folder = hf.resolve(directory)
    file = folder / "tokenizer_config.json"
    config = hf._read_json(file) if file.is_file() else {}
    if not name:
        source, told = _own(folder, config), f"the chat template of {folder}"
        if source is None:
            known = ", ".join(BUILT_IN)
            raise UserError(
                f"{folder} has no chat template; name one of {known}, or give a .jinja file"
            )
    elif name in BUILT_IN:
        source, told = BUILT_IN[name], f"the chat template {name}"
    else:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(
                f"there is no chat template {name!r}; there is {', '.join(BUILT_IN)}, a .jinja file, or the model's own "
                "(leave it empty)"
            )
        source, told = jsonl.read(path, f"chat template {path}"), f"the chat template {path}"
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{told}, line {error.lineno}: {error.message}; correct it") from None
    special = (
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    )
    return Template(told, source, _words(folder, config, tokenizer), tuple(special))


def _own(folder: Path, config: dict) -> str | None:
    """The template that came with a model."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return jsonl.read(file, f"chat template {file}")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, each with a name
        found = {
            each.get("name"): each.get("template") for each in found if isinstance(each, dict)
        }.get("default")
    return found if isinstance(found, str) else None


def _words(folder: Path, config: dict, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens by name, as tokenizer_config.json has them, or else config.json (of ids)."""
    words = {}
    for key in (
        "bos_token",
        "eos_token",
        "unk_token",
        "sep_token",
        "pad_token",
        "cls_token",
        "mask_token",
    ):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            words[key] = value
    if not config:
        model = hf._read_json(folder / "config.json")
        for key in ("bos_token", "eos_token"):
            number = model.get(f"{key}_id")
            number = number[0] if isinstance(number, list) and number else number
            if isinstance(number, int) and (word := tokenizer.id_to_token(number)) is not None:
                words[key] = word
    return words


def render(template: Template, messages: Messages, add_generation_prompt: bool = False) -> str:
    """The text of a conversation, as transformers' ``apply_chat_template`` gives it. Raises UserError."""
    return _render(template, messages, add_generation_prompt)[0]


def spans(template: Template, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
    """(text, [begin, end) of what the assistant writes in it: its turns, each with the token that ends it).

    Raises:
        UserError: the template refuses the conversation; or it has no ``{% generation %}`` blocks and its text changes when
            the conversation goes on, so that no turn can be found.
    """
    text, found = _render(template, messages)
    if re.search(r"\{%-?\s*generation\b", template.source):
        return text, found
    found = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(template, messages[:number], add_generation_prompt=True)
        after = render(template, messages[: number + 1])
        if not after.startswith(before) or not text.startswith(after):
            raise UserError(
                f"{template.name} is not prefix-stable: what turn {number + 1} reads as depends on later turns; put "
                f"{{% generation %}} blocks around what the assistant writes, or name one of {', '.join(BUILT_IN)}"
            )
        written = after[len(before) :]
        if (bare := written.rstrip()).endswith(template.special):
            written = (
                bare  # decoding ends with that token: the line break behind it is the template's
            )
        found.append((len(before), len(before) + len(written)))
    return text, found


def _render(template: Template, messages: Messages, add_generation_prompt: bool = False):
    compiled, tracker = _compile(template.source)
    told = {
        "messages": [dict(m) for m in messages],
        "tools": None,
        "documents": None,
    } | template.words
    tracker.blocks, tracker.found = [], []
    try:
        for block in compiled.generate(**told, add_generation_prompt=add_generation_prompt):
            tracker.blocks.append(block)
    except (
        Exception
    ) as error:  # a template is somebody's program, and Python's own errors come out of it
        why = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{template.name} does not take this conversation: {why}") from None
    return "".join(tracker.blocks), list(tracker.found)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``: renders what is inside, and remembers where it went."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own spelling)

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.blocks: list[str] = []
        self.found: list[tuple[int, int]] = []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        text = caller()
        start = sum(map(len, self.blocks))
        self.found.append((start, start + len(text)))
        return text


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[jinja2.Template, _Generation]:
    """As transformers' ``chat_template_utils`` does it."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # Jinja's own escapes for HTML.
        keys: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    tracker = next(
        each for each in environment.extensions.values() if isinstance(each, _Generation)
    )
    return environment.from_string(source), tracker
