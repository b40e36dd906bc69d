"""Files of conversations: three kinds of lines, labels on the assistant's turns, mistakes."""

from __future__ import annotations

import json
import lzma

import pytest
from chat_cases import ANSWERS, labelled
from tokenizers import Tokenizer, normalizers, processors

from specjax.data import chat, dialogues, token_streams
from specjax.errors import UserError

fast = pytest.mark.fast


@fast
def test_a_token_that_reaches_into_a_turn_is_labelled(model, tokenizer):
    """The whole text is tokenised at once, so a token may cross the boundary of a turn."""
    bare = Tokenizer.from_str(tokenizer.to_str())
    # Removes the space from a token's offsets.
    bare.post_processor = processors.ByteLevel(trim_offsets=True)
    bare.enable_truncation(4)
    for normalizer in (None, normalizers.NFC()):
        if normalizer:
            bare.normalizer = normalizer
        template = chat.load("plain", model, bare)
        text, runs = labelled(template, bare)
        assert [run.removeprefix(" ") for run in runs] == [f"{answer}\n" for answer in ANSWERS]
        assert len(text) > 50
    assert bare.truncation is not None  # the caller's tokenizer stays as it is
    # The token "QA" crosses the boundary and contains characters of both sides.
    words = Tokenizer.from_str(json.dumps(json.loads(tokenizer.to_str())))
    words.add_tokens(["QA"])
    source = "Q{% generation %}{{ messages[1].content }}{% endgeneration %}"
    template = chat.Template("x", source, {}, ())
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Abc"}]
    assert labelled(template, words, messages) == ("QAbc", ["QAbc"])


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
    conversations = dialogues.read(write(tmp_path / "a.jsonl", *LINES.values()))
    assert [each.messages for each in conversations] == [LINES["openai"]["messages"]] * 3
    assert [each.where for each in conversations] == [
        f"{tmp_path / 'a.jsonl'} line {n}" for n in (1, 2, 3)
    ]


@fast
def test_irregular_conversations_are_trimmed_or_skipped(tmp_path):
    def sharegpt(*turns):
        return {"conversations": [{"from": who, "value": what} for who, what in turns]}

    lines = [
        # Begins with an assistant's turn.
        sharegpt(("gpt", "z"), ("human", "a"), ("chatgpt", "b")),
        sharegpt(("system", "s"), ("bing", "z"), ("user", "a"), ("bard", "b"), ("human", "c")),
        # Has an empty turn.
        sharegpt(("system", " "), ("human", "a"), ("assistant", "b"), ("human", ""), ("gpt", "c")),
        sharegpt(),
        sharegpt(("gpt", "alone")),
        sharegpt(("human", "alone")),
        sharegpt(("human", "a"), ("gpt", "  ")),
    ]
    conversations = dialogues.read(write(tmp_path / "a.jsonl", *lines))
    texts = ["".join(m["content"] for m in each.messages) for each in conversations]
    assert texts == ["ab", "sab", "ab"]


@fast
@pytest.mark.parametrize(
    ("line", "message"),
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
def test_bad_lines(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(LINES["openai"]) + "\n" + line + "\n")
    with pytest.raises(UserError, match=message) as error:
        dialogues.read(path)
    assert "\n" not in str(error.value) and "a.jsonl" in str(error.value)


@fast
def test_files_without_answers(tmp_path):
    for name, message in (
        ("none", "No such file"),
        ("empty", "no conversation in which an assistant answers"),
    ):
        if name == "empty":
            (tmp_path / name).write_text("\n")
        with pytest.raises(UserError, match=message):
            dialogues.read(tmp_path / name)


@fast
def test_splits_of_files(model, tokenizer, tmp_path):
    lines = [{"turns": [["U", "how many?"], ["S", f"number {n:03}"]]} for n in range(100)]
    file = str(write(tmp_path / "a.jsonl", *lines, {"turns": []}))
    template = chat.load("plain", model, tokenizer)
    parts = {
        split: dialogues.load([file], split, tokenizer, template)
        for split in ("train", "test", "valid")
    }
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 90,
        "test": 5,
        "valid": 5,
    }
    spelled = [
        tokenizer.decode(d.ids[d.labelled].tolist()) for part in parts.values() for d in part
    ]
    assert spelled == [f" number {n:03}\n" for n in range(100)]


def test_real_dialogues(data_dir, tokenizer, tmp_path):
    raw = lzma.decompress((data_dir / "text" / "sgd_dialogues" / "dev.jsonl.xz").read_bytes())
    (tmp_path / "dev.jsonl").write_bytes(b"".join(raw.splitlines(keepends=True)[:200]))
    conversations = dialogues.read(tmp_path / "dev.jsonl")
    assert len(conversations) == 200
    template = chat.Template(
        "plain", chat.BUILT_IN["plain"], {"bos_token": token_streams.SEPARATOR}, ()
    )
    for each, document in zip(
        conversations, dialogues.documents(conversations, tokenizer, template), strict=True
    ):
        answer = "".join(f" {m['content']}\n" for m in each.messages if m["role"] == "assistant")
        assert tokenizer.decode(document.ids[document.labelled].tolist()) == answer
