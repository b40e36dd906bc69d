"""Tokenizers and chat templates of .gguf files: the ids of the tokenizer they were made from."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import gguf_cases
import pytest
from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from specjax import files
from specjax.bench import replay
from specjax.data import chat, feature_store
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.sources import gguf_file, gguf_tokenizer
from specjax.train.recipes import lookup_data, material

gguf = pytest.importorskip("gguf")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
TEXT = Path(argparse.__file__).read_text(encoding="utf-8")
HARD = [
    "",
    " ",
    "It's 12345 o'clock,\r\n\r\n  isn't IT?\t\tYES'LL",
    "naïve café  Å é  ½ ٣٤ 中文字 🙂🙃\u200b",
    "cafe\u0301 A\u030angstro\u0308m",
    "  two  leading and trailing  ",
    "def f(x):\n\n\n    return x**2  # 3.14159\n",
    "<|im_start|>user\nhi<|im_end|>",
]


def texts() -> list[str]:
    """Hard cases, lines of a program, and random characters."""
    rng = random.Random(0)
    letters = "ab '12.\n\t\r é中🙂-_Z▁"
    made = ["".join(rng.choices(letters, k=rng.randrange(1, 30))) for _ in range(150)]
    return HARD + TEXT.splitlines()[100:300] + made


def trained(steps: list, normalizer=None) -> Tokenizer:
    """A byte-level BPE of its own text, with tokens that only added tokens can be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def fields_of(tokenizer: Tokenizer, pre: str, **more) -> gguf_file.GgufFile:
    """The metadata of a .gguf file with this byte-level tokenizer."""
    ids = {i: token for token, i in tokenizer.get_vocab().items()}
    tokens = [ids[i] for i in range(len(ids))]
    kinds = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in merges],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in (fields | more).items()}
    return gguf_file.GgufFile(Path("m.gguf"), fields, {})


def plain(digits: bool) -> list:
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]


def assert_same_ids(one: Tokenizer, other: Tokenizer) -> None:
    assert one.get_vocab() == other.get_vocab()
    for text in texts():
        ids = one.encode(text).ids
        assert other.encode(text).ids == ids, text
        assert other.decode(ids) == one.decode(ids)


@pytest.mark.parametrize(("pre", "digits"), [("gpt-2", False), ("smollm", True)])
def test_byte_level_tokenizers(pre, digits):
    own = trained(plain(digits))
    read = gguf_tokenizer.read(fields_of(own, pre))
    assert_same_ids(own, read)
    # The other rule gives other ids, so the comparison notices a wrong one.
    wrong = gguf_tokenizer.read(fields_of(own, "smollm" if pre == "gpt-2" else "gpt-2"))
    assert any(wrong.encode(text).ids != own.encode(text).ids for text in texts())


def test_the_tokenizer_of_qwen_2():
    transformers = pytest.importorskip("transformers")
    own = trained(plain(False), normalizers.NFC())
    model = json.loads(own.to_str())["model"]
    reference = transformers.Qwen2Tokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    read = gguf_tokenizer.read(fields_of(own, "qwen2"))
    for text in (each for each in texts() if "<" not in each):
        assert read.encode(text).ids == reference.encode(text, add_special_tokens=False), text


def test_the_tokenizer_of_llama_3_splits_digits_by_three_and_begins_a_text():
    read = gguf_tokenizer.read(fields_of(trained(plain(False)), "llama-bpe"))
    pieces = [piece for piece, _ in read.pre_tokenizer.pre_tokenize_str("It's 12345 OK\n\n go")]
    assert pieces == ["It", "'s", "Ġ", "123", "45", "ĠOK", "ĊĊ", "Ġgo"]
    assert read.encode("go").ids[0] == 1  # llama.cpp adds it where the file does not say so
    assert read.encode("go", add_special_tokens=False).ids[0] != 1
    silent = gguf_tokenizer.read(fields_of(trained(plain(False)), "llama-bpe", add_bos_token=False))
    assert silent.encode("go").ids == read.encode("go").ids[1:]


@pytest.mark.parametrize("prefixed", [True, False])
def test_sentencepiece(prefixed, tmp_path):
    """Against the library itself, with a model trained here."""
    spm = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(TEXT, encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        user_defined_symbols=["<tool>"],
        minloglevel=2,
    )
    own = spm.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    kinds = []
    for i in range(len(own)):
        kinds.append(2 if own.is_unknown(i) else 3 if own.is_control(i) else 1)
        kinds[-1] = 6 if own.is_byte(i) else 4 if own.id_to_piece(i) == "<tool>" else kinds[-1]
    fields = {
        "model": "llama",
        "tokens": [own.id_to_piece(i) for i in range(len(own))],
        "scores": [own.get_score(i) for i in range(len(own))],
        "token_type": kinds,
        "bos_token_id": own.bos_id(),
        "eos_token_id": own.eos_id(),
        "unknown_token_id": own.unk_id(),
        "add_space_prefix": prefixed,
    }
    fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    read = gguf_tokenizer.read(gguf_file.GgufFile(Path("m.gguf"), fields, {}))
    for text in texts():
        ids = read.encode(text, add_special_tokens=False).ids
        assert ids == own.encode(text), text
        assert read.decode(ids) == own.decode(ids)
    assert read.encode("a").ids[0] == own.bos_id()


def gguf_with(tmp_path, tokenizer: Tokenizer, template: str | None = TEMPLATE) -> Path:
    """A whole random model with a tokenizer."""
    fields = fields_of(tokenizer, "smollm").fields
    tokens = fields["tokenizer.ggml.tokens"]
    config = gguf_cases.config_of("llama") | {"vocab_size": len(tokens)}

    def more(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(fields["tokenizer.ggml.token_type"])
        writer.add_token_merges(fields["tokenizer.ggml.merges"])
        if template is not None:
            writer.add_chat_template(template)

    file = tmp_path / "m.gguf"
    gguf_cases.write_gguf(file, config, gguf_cases.tensors_of(config), "Q8_0", more=more)
    return file


def test_a_file_with_its_tokenizer_and_its_template(tmp_path):
    own = trained(plain(True))
    file = gguf_with(tmp_path, own)
    loaded = hf.load(file)
    assert_same_ids(own, loaded.tokenizer)
    assert loaded.lm.vocabulary == hf.fingerprint(own)
    template = chat.load("", loaded.directory, loaded.tokenizer)
    messages = [{"role": "user", "content": "hi"}]
    assert chat.render(template, messages) == "<|im_start|>user\nhi"
    assert template.words == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_the_places_that_read_only_a_vocabulary(tmp_path):
    own = trained(plain(True))
    file = gguf_with(tmp_path, own)
    mark, size = hf.fingerprint(own), own.get_vocab_size()
    number, spelled = replay.vocabulary_of(str(file))
    assert (number, spelled) == (size, hf.load(file).lm.token_bytes)
    vocabulary = lookup_data.read_vocabulary(file)
    assert (vocabulary.size, vocabulary.fingerprint) == (size, mark)
    config = ConfigDict({"tokenizer": str(file), "model": {"vocab_size": 0}})
    assert hf.fingerprint(material.tokenizer(config, tmp_path)) == mark
    assert feature_store.target_fingerprint(file) == files.sha256(file)


def test_the_command_line(tmp_path, cli):
    file = gguf_with(tmp_path, trained(plain(True)))
    keys = ["--config.drafter.name=draft_model", "--config.max_new_tokens=3"]
    keys += [f"--config.drafter.model={file}", "--config.prompt=hi", "--config.chat=own"]
    status, _, err, workdir = cli("--config=generate", f"--config.target={file}", *keys)
    assert status == 0, err
    target = json.loads((workdir / "results.json").read_text())["target"]
    assert (target["name"], target["dequantised_from"]) == ("m.gguf", "Q8_0")
    (tmp_path / "part.gguf").write_bytes(file.read_bytes()[:-5000])
    keys[2] = f"--config.drafter.model={tmp_path / 'part.gguf'}"
    other = tmp_path / "other"
    status, _, err, _ = cli("--config=generate", f"--config.target={file}", *keys, workdir=other)
    assert status == 2 and err.count("\n") == 1 and "is damaged or incomplete" in err
    assert not other.exists()


def test_a_file_without_a_template(tmp_path):
    loaded = hf.load(gguf_with(tmp_path, trained(plain(True)), template=None))
    with pytest.raises(UserError, match=r"m\.gguf has no chat template; choose one of chatml"):
        chat.load("", loaded.directory, loaded.tokenizer)
    assert chat.load("chatml", loaded.directory, loaded.tokenizer).name.endswith("chatml")


def without(**changes):
    fields = fields_of(trained(plain(True)), "smollm").fields
    fields = fields | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return gguf_file.GgufFile(Path("m.gguf"), fields, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "viking"}, "the pre-tokenizer 'viking' (tokenizer.ggml.pre) is not supported"),
        ({"pre": None}, "the pre-tokenizer None (tokenizer.ggml.pre) is not supported"),
        ({"model": "t5"}, "the tokenizer 't5' is not supported; supported: gpt2, llama"),
        ({"tokens": ["a", "a"]}, "is empty or has a token twice"),
        ({"merges": ["zz yy"]}, "its tokenizer is damaged"),
        ({"merges": ["zz"]}, "its tokenizer is damaged"),
        ({"model": "llama"}, "tokenizer.ggml.scores has 0 numbers"),
        ({"model": "llama", "precompiled_charsmap": [1]}, "a tokenizer that rewrites texts"),
    ],
)
def test_one_line_for_other_tokenizers(changes, message):
    with pytest.raises(UserError) as caught:
        gguf_tokenizer.read(without(**changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_ids_without_a_token_are_left_out():
    """Else a model from a directory and one from a file would seem to have other tokens."""
    own = trained(plain(True))
    size = own.get_vocab_size()
    fields = fields_of(own, "smollm").fields
    fields["tokenizer.ggml.tokens"] += [f"[PAD{size}]", f"[PAD{size + 1}]"]
    fields["tokenizer.ggml.token_type"] += [5, 5]
    read = gguf_tokenizer.read(gguf_file.GgufFile(Path("m.gguf"), fields, {}))
    assert hf.fingerprint(read) == hf.fingerprint(own)


def test_a_file_without_a_tokenizer():
    assert gguf_tokenizer.read(without(model="none")) is None
    assert gguf_tokenizer.read(gguf_file.GgufFile(Path("m.gguf"), {}, {})) is None
