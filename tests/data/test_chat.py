"""Chat templates: the texts of transformers, a model's own template, mistakes."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from chat_cases import ANSWERS, OPENAI, labelled

from specjax.data import chat, dialogues, token_streams
from specjax.errors import UserError

fast = pytest.mark.fast


# In the style of real models' templates: no generation blocks; line feeds and blocks to trim.
ZEPHYR = """{% for message in messages %}
    {% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
    {% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
    {% else %}{{ raise_exception('no such role: ' + message | tojson) }}{% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}"""


MARKED = """{%- for m in messages -%}{%- if m.role == 'assistant' -%}
[A] {% generation %}{{ m.content | tojson }}{{ eos_token }}{% endgeneration %}\
{% else %}[{{ m.role | upper }}] {{ m.content }}
{%- endif -%}{%- endfor -%}"""


@fast
def test_built_in_templates(model, tokenizer):
    start, system = token_streams.SEPARATOR, OPENAI[0]["content"]
    first, second = OPENAI[1]["content"], OPENAI[3]["content"]
    yes, still = ANSWERS
    texts = {
        "chatml": f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{first}<|im_end|>\n"
        f"<|im_start|>assistant\n{yes}<|im_end|>\n<|im_start|>user\n{second}<|im_end|>\n"
        f"<|im_start|>assistant\n{still}<|im_end|>\n",
        "vicuna": f"{start}{system} USER: {first} ASSISTANT: {yes}<|im_end|>"
        f"USER: {second} ASSISTANT: {still}<|im_end|>",
        "llama2": f"{start}[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{first} [/INST] {yes} <|im_end|>"
        f"{start}[INST] {second} [/INST] {still} <|im_end|>",
        "plain": f"{start}System: {system}\nUser: {first}\nAssistant: {yes}\n"
        f"User: {second}\nAssistant: {still}\n",
    }
    ends = {
        "chatml": "{}<|im_end|>",
        "vicuna": " {}<|im_end|>",
        "llama2": " {} <|im_end|>",
        "plain": " {}\n",
    }
    assert set(texts) == set(chat.BUILT_IN)
    for name, text in texts.items():
        template = chat.load(name, model, tokenizer)
        assert chat.render(template, OPENAI) == text
        turns = [ends[name].format(answer) for answer in ANSWERS]
        assert labelled(template, tokenizer) == (text, turns)
        # The prompt for decoding is the text before the turn in training.
        asked = chat.render(template, OPENAI[:4], add_generation_prompt=True)
        assert text.startswith(asked) and text[len(asked) :].lstrip(" ").startswith(ANSWERS[1])


@fast
def test_vicuna_has_a_default_system_message(model, tokenizer):
    text = chat.render(chat.load("vicuna", model, tokenizer), OPENAI[1:3])
    assert (
        text.startswith(token_streams.SEPARATOR + "A chat between a curious user")
        and ". USER: Hi" in text
    )


@fast
def test_the_date_of_a_template(model, tokenizer, tmp_path):
    """Text to train on and prompts of a bench are the same on every day."""
    (tmp_path / "t.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}")
    template = chat.load(str(tmp_path / "t.jinja"), model, tokenizer)
    assert chat.render(template, OPENAI) == "2024-07-26"
    today = chat.render(template._replace(date=None), OPENAI)
    assert 0 <= (datetime.now() - datetime.fromisoformat(today)).days <= 1


@fast
def test_a_models_own_template(model, tokenizer, tmp_path):
    with pytest.raises(
        UserError, match="has no chat template; choose one of chatml, vicuna, llama2, plain"
    ):
        chat.load("", model, tokenizer)
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ZEPHYR}]
    for given in (ZEPHYR, named):
        changed = json.dumps(config | {"chat_template": given})
        (tmp_path / "tokenizer_config.json").write_text(changed)
        template = chat.load("", tmp_path, tokenizer)
        assert template.source == ZEPHYR
    text, runs = labelled(template, tokenizer)
    assert text.startswith("<|system|>\nBe brief.<|im_end|>\n<|user|>\nHi")
    assert text.endswith("Still open.<|im_end|>\n")
    # The model does not have to write the line feed after the last token.
    assert runs == [f"{answer}<|im_end|>" for answer in ANSWERS]
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    text, runs = labelled(chat.load("", tmp_path, tokenizer), tokenizer)
    assert runs == [json.dumps(answer, ensure_ascii=False) + "<|im_end|>" for answer in ANSWERS]
    assert chat.load(str(tmp_path / "chat_template.jinja"), model, tokenizer).source == MARKED
    # Without this file, the special tokens are those of config.json.
    (tmp_path / "tokenizer_config.json").unlink()
    assert chat.load("plain", tmp_path, tokenizer).words == {}
    raw = json.loads((tmp_path / "config.json").read_text()) | {
        "bos_token_id": 0,
        "eos_token_id": [301, 0],
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert chat.load("plain", tmp_path, tokenizer).words == {
        "bos_token": token_streams.SEPARATOR,
        "eos_token": "<|im_end|>",
    }


@pytest.mark.parametrize("name", ["zephyr", "marked", *chat.BUILT_IN])
def test_rendered_and_labelled_as_transformers_does(model, tokenizer, name, tmp_path):
    transformers = pytest.importorskip("transformers")
    source = {"zephyr": ZEPHYR, "marked": MARKED}.get(name) or chat.BUILT_IN[name]
    (tmp_path / "t.jinja").write_text(source)
    template = chat.load(str(tmp_path / "t.jinja"), model, tokenizer)
    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token_streams.SEPARATOR,
        eos_token="<|im_end|>",
        chat_template=source,
    )
    for messages in (OPENAI, OPENAI[1:3]):
        for prompt in (False, True):
            assert chat.render(template, messages, prompt) == peer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
    if name != "zephyr":
        theirs = peer.apply_chat_template(
            OPENAI, return_dict=True, return_assistant_tokens_mask=True
        )
        [ours] = dialogues.documents([dialogues.Conversation("x", OPENAI)], tokenizer, template)
        assert ours.ids.tolist() == theirs["input_ids"]
        assert ours.labelled.astype(int).tolist() == theirs["assistant_masks"]


@fast
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "does not take this conversation: roles must alternate",
        ),
        ("{{ messages[9].content + 'x' }}", "does not take this conversation"),
        ("{{ ''.__class__.__mro__ }}", "does not take this conversation"),  # the sandbox
        # Treats the last turn differently, as the templates of reasoning models do.
        (
            "{% for m in messages %}{{ m.content if loop.last else m.role }}{% endfor %}",
            "is not prefix-stable",
        ),
    ],
)
def test_invalid_templates(model, tokenizer, tmp_path, source, message):
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(UserError, match=message) as error:
        template = chat.load(str(tmp_path / "t.jinja"), model, tokenizer)
        dialogues.documents([dialogues.Conversation("a.jsonl line 7", OPENAI)], tokenizer, template)
    assert "\n" not in str(error.value)
    assert "line 1:" in message or "a.jsonl line 7" in str(error.value)


@fast
def test_an_unknown_template(model, tokenizer):
    with pytest.raises(
        UserError,
        match="no chat template 'zephyr'; choose one of chatml, vicuna, llama2, plain, a .jinja",
    ):
        chat.load("zephyr", model, tokenizer)
