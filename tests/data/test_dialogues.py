"""Conversations: three kinds of lines, templates as transformers renders them, and labels on what the assistant writes."""

from __future__ import annotations

import json
import lzma

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors

from specjax import testing
from specjax.data import chat, dialogues, token_streams
from specjax.errors import UserError
from specjax.models import hf

fast = pytest.mark.fast

OPENAI = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi, is the café  open? 你好"},
    {"role": "assistant", "content": "Yes … till 10 <b>& more</b>."},
    {"role": "user", "content": "Thanks!\n\nAnd now?"},
    {"role": "assistant", "content": "Still open."},
]
# A template as models bring it: no generation blocks, line breaks and blocks that are to be trimmed.
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
[A] {% generation %}{{ m.content | tojson }}{{ eos_token }}{% endgeneration %}{% else %}[{{ m.role | upper }}] {{ m.content }}
{%- endif -%}{%- endfor -%}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model directory with a byte-level tokenizer that knows the special words of ChatML."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = token_streams.train_tokenizer([" ".join(m["content"] for m in OPENAI) * 3], 300)
    tokenizer.add_special_tokens(
        [AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)]
    )
    shape = testing.tiny_config(vocab_size=tokenizer.get_vocab_size(), layers=1, width=16)
    params = testing.tiny(vocab_size=shape.vocab_size, layers=1, width=16)[1]
    hf.save(folder, shape, params, tokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {
        "bos_token": token_streams.SEPARATOR,
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def learnt(template, tokenizer, messages=OPENAI) -> tuple[str, list[str]]:
    """(the text, the runs of labelled tokens as text)."""
    [document] = dialogues.documents(
        [dialogues.Conversation("x line 1", messages)], tokenizer, template
    )
    runs, last = [], -2
    for place in np.flatnonzero(document.labelled):
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(document.ids[place]))
        last = place
    spell = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)  # noqa: E731
    return spell(document.ids.tolist()), [spell(run) for run in runs]


SAID = [OPENAI[2]["content"], OPENAI[4]["content"]]


@fast
def test_built_in_templates(model, tokenizer):
    start, system = token_streams.SEPARATOR, OPENAI[0]["content"]
    first, second = OPENAI[1]["content"], OPENAI[3]["content"]
    texts = {
        "chatml": f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n"
        f"{SAID[0]}<|im_end|>\n<|im_start|>user\n{second}<|im_end|>\n<|im_start|>assistant\n{SAID[1]}<|im_end|>\n",
        "vicuna": f"{start}{system} USER: {first} ASSISTANT: {SAID[0]}<|im_end|>USER: {second} ASSISTANT: {SAID[1]}<|im_end|>",
        "llama2": f"{start}[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{first} [/INST] {SAID[0]} <|im_end|>"
        f"{start}[INST] {second} [/INST] {SAID[1]} <|im_end|>",
        "plain": f"{start}System: {system}\nUser: {first}\nAssistant: {SAID[0]}\nUser: {second}\nAssistant: {SAID[1]}\n",
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
        assert learnt(template, tokenizer) == (text, [ends[name].format(said) for said in SAID])
        # What decoding is given is what training has before a turn.
        asked = chat.render(template, OPENAI[:4], add_generation_prompt=True)
        assert text.startswith(asked) and text[len(asked) :].lstrip(" ").startswith(SAID[1])


@fast
def test_vicuna_has_a_system_of_its_own(model, tokenizer):
    text = chat.render(chat.load("vicuna", model, tokenizer), OPENAI[1:3])
    assert (
        text.startswith(token_streams.SEPARATOR + "A chat between a curious user")
        and ". USER: Hi" in text
    )


@fast
def test_a_models_own_template(model, tokenizer, tmp_path):
    with pytest.raises(
        UserError, match="has no chat template; choose one of chatml, vicuna, llama2, plain"
    ):
        chat.load("", model, tokenizer)
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for given in (
        ZEPHYR,
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": ZEPHYR}],
    ):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": given})
        )
        template = chat.load("", tmp_path, tokenizer)
        assert template.source == ZEPHYR
    text, runs = learnt(template, tokenizer)
    assert text.startswith("<|system|>\nBe brief.<|im_end|>\n<|user|>\nHi") and text.endswith(
        "Still open.<|im_end|>\n"
    )
    # The line break behind the last token is nothing that a model has to write.
    assert runs == [f"{said}<|im_end|>" for said in SAID]
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    text, runs = learnt(chat.load("", tmp_path, tokenizer), tokenizer)
    assert runs == [json.dumps(said, ensure_ascii=False) + "<|im_end|>" for said in SAID]
    assert chat.load(str(tmp_path / "chat_template.jinja"), model, tokenizer).source == MARKED
    (tmp_path / "tokenizer_config.json").unlink()  # then config.json says which tokens they are
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
def test_a_token_that_reaches_into_a_turn_is_labelled(model, tokenizer):
    """Whole text, one tokenisation: what a tokenizer does across the border of a turn happens here too."""
    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.post_processor = processors.ByteLevel(
        trim_offsets=True
    )  # takes the space out of a token's place
    bare.enable_truncation(4)
    for normalizer in (None, normalizers.NFC()):
        if normalizer:
            bare.normalizer = normalizer
        template = chat.load("plain", model, bare)
        text, runs = learnt(template, bare)
        assert [run.removeprefix(" ") for run in runs] == [said + "\n" for said in SAID] and len(
            text
        ) > 50
    assert bare.truncation is not None  # the caller's tokenizer stays as it is
    # One token "xy" over the border: both halves stand in it.
    words = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str())))
    words.add_tokens(["QA"])
    source = "Q{% generation %}{{ messages[1].content }}{% endgeneration %}"
    template = chat.Template("x", source, {}, ())
    assert learnt(
        template, words, [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Abc"}]
    ) == (
        "QAbc",
        ["QAbc"],
    )


LINES = {
    "sharegpt": {
        "id": "x",
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    },
    "openai": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "sgd": {"id": "1", "turns": [["U", "a"], ["S", "b"]]},
}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@fast
def test_three_kinds_of_lines(tmp_path):
    found, skipped = dialogues.read(write(tmp_path / "a.jsonl", *LINES.values()))
    assert [each.messages for each in found] == [LINES["openai"]["messages"]] * 3 and skipped == 0
    assert [each.where for each in found] == [f"{tmp_path / 'a.jsonl'} line {n}" for n in (1, 2, 3)]


@fast
def test_dirt(tmp_path):
    def sharegpt(*turns):
        return {"conversations": [{"from": who, "value": what} for who, what in turns]}

    lines = [
        sharegpt(("gpt", "z"), ("human", "a"), ("chatgpt", "b")),  # begins with an assistant
        sharegpt(("system", "s"), ("bing", "z"), ("user", "a"), ("bard", "b"), ("human", "c")),
        sharegpt(
            ("system", " "), ("human", "a"), ("assistant", "b"), ("human", ""), ("gpt", "c")
        ),  # an empty turn
        sharegpt(),
        sharegpt(("gpt", "alone")),
        sharegpt(("human", "alone")),
        sharegpt(("human", "a"), ("gpt", "  ")),
    ]
    found, skipped = dialogues.read(write(tmp_path / "a.jsonl", *lines))
    assert ["".join(m["content"] for m in each.messages) for each in found] == [
        "ab",
        "sab",
        "ab",
    ] and skipped == 4


@fast
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense", 'line 2 is not a JSON object with "conversations"'),
        ('{"text": "x"}', "line 2 is not"),
        ('{"messages": 7}', "line 2 is not"),
        ('{"messages": [{"role": "user"}]}', "line 2, turn 1 has no role and text"),
        (
            '{"messages": [{"role": "user", "content": null}]}',
            "line 2, turn 1 has no role and text",
        ),
        ('{"turns": [["U", "a"], ["S"]]}', "line 2, turn 2 has no role and text"),
        ('{"turns": [["X", "a"]]}', "line 2, turn 1 is by 'X'; the roles are U, S"),
        (
            '{"conversations": [{"from": "tool", "value": "x"}]}',
            "is by 'tool'; the roles are human, user, system, gpt",
        ),
    ],
)
def test_bad_lines(tmp_path, line, told):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(LINES["openai"]) + "\n" + line + "\n")
    with pytest.raises(UserError, match=told) as error:
        dialogues.read(path)
    assert "\n" not in str(error.value) and "a.jsonl" in str(error.value)


@fast
def test_files_without_answers(tmp_path):
    for name, told in (
        ("none", "No such file"),
        ("empty", "no conversation in which an assistant answers"),
    ):
        if name == "empty":
            (tmp_path / name).write_text("\n")
        with pytest.raises(UserError, match=told):
            dialogues.read(tmp_path / name)


@fast
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for m in messages %}", "line 1: Unexpected end of template"),
        (
            "{{ raise_exception('roles must\nalternate') }}",
            "does not take this conversation: roles must alternate",
        ),
        ("{{ messages[9].content + 'x' }}", "does not take this conversation"),
        ("{{ ''.__class__.__mro__ }}", "does not take this conversation"),  # the sandbox
        # Shows thoughts of the last turn only, as reasoning models do.
        (
            "{% for m in messages %}{{ m.content if loop.last else m.role }}{% endfor %}",
            "is not prefix-stable",
        ),
    ],
)
def test_templates_that_cannot_be(model, tokenizer, tmp_path, source, told):
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(UserError, match=told) as error:
        template = chat.load(str(tmp_path / "t.jinja"), model, tokenizer)
        dialogues.documents([dialogues.Conversation("a.jsonl line 7", OPENAI)], tokenizer, template)
    assert "\n" not in str(error.value) and (
        "line 1:" in told or "a.jsonl line 7" in str(error.value)
    )


@fast
def test_an_unknown_template(model, tokenizer):
    with pytest.raises(
        UserError,
        match="no chat template 'zephyr'; choose one of chatml, vicuna, llama2, plain, a .jinja file",
    ):
        chat.load("zephyr", model, tokenizer)


@fast
def test_splits_of_files(model, tokenizer, tmp_path):
    lines = [{"turns": [["U", "how many?"], ["S", f"number {n:03}"]]} for n in range(100)]
    file = str(write(tmp_path / "a.jsonl", *lines, {"turns": []}))
    template = chat.load("plain", model, tokenizer)
    parts = {
        split: dialogues.load(file, split, tokenizer, template)
        for split in ("train", "test", "valid")
    }
    assert {split: len(part.documents) for split, part in parts.items()} == {
        "train": 90,
        "test": 5,
        "valid": 5,
    }
    assert all(part.skipped == 1 for part in parts.values())
    spelled = [
        tokenizer.decode(d.ids[d.labelled].tolist())
        for part in parts.values()
        for d in part.documents
    ]
    assert spelled == [f" number {n:03}\n" for n in range(100)]


def test_real_dialogues(data_dir, tokenizer, tmp_path):
    raw = lzma.decompress((data_dir / "text" / "sgd_dialogues" / "dev.jsonl.xz").read_bytes())
    (tmp_path / "dev.jsonl").write_bytes(b"".join(raw.splitlines(keepends=True)[:200]))
    conversations, skipped = dialogues.read(tmp_path / "dev.jsonl")
    assert len(conversations) == 200 and skipped == 0
    template = chat.Template(
        "plain", chat.BUILT_IN["plain"], {"bos_token": token_streams.SEPARATOR}, ()
    )
    for each, document in zip(
        conversations, dialogues.documents(conversations, tokenizer, template), strict=True
    ):
        said = "".join(f" {m['content']}\n" for m in each.messages if m["role"] == "assistant")
        assert tokenizer.decode(document.ids[document.labelled].tolist()) == said
