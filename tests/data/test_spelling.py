"""What each token adds to a text: exact on real tokenizers, and as quick in a long text as in a short one."""

import itertools
import random

import pytest
from tokenizers import Tokenizer

from specjax.data.spelling import spell

pytestmark = pytest.mark.fast
FILES = {
    "gpt2": "tokenizers/gpt2/tokenizer.json",
    "neox": "tokenizers/gptneox20b/tokenizer.json",
    "llama": "models/stories260K/tokenizer.json",  # bytes for what it does not know, and a first space that is stripped
}
TEXT = (
    "  Two  spaces,\n\tdef f(x):\n        return '你好 🙂🏽 żółw €5'  # don't — 12,345.6 \n\n" * 3
)


def plainly(ids, decode, prefix=()):
    """The definition, with the whole text decoded for every token."""
    prefix, ids = list(prefix), list(ids)
    texts = [decode(prefix + ids[:n]) for n in range(len(ids) + 1)]
    whole, settled = texts[-1], [0]
    for text in texts:
        common = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(text, whole, strict=False)
            )
        )
        settled.append(max(settled[-1], common))
    return [whole[a:b] for a, b in itertools.pairwise(settled[1:])], whole[settled[1] :]


def agree(ids, decode, prefix=(), bytes_fall_back=False):
    expected, text = plainly(ids, decode, prefix)
    found = spell(ids, decode, prefix)
    assert "".join(found) == text
    assert found == expected or (bytes_fall_back and "\ufffd" in text)


@pytest.mark.parametrize("name", FILES)
def test_every_token_adds_what_the_definition_says(name, data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES[name]))
    decode, size = tokenizer.decode, tokenizer.get_vocab_size()
    draw = random.Random(name)
    real = tokenizer.encode(TEXT).ids
    bytes_fall_back = (
        name == "llama"
    )  # one bad byte makes its whole run unreadable, also what came before
    for ids, prefix in [
        (real, ()),
        (real[7:], real[:7]),
        (real[60:], real[:60]),
        ([], ()),
        ([], real),
        (real[:1], ()),
    ]:
        agree(ids, decode, prefix)
    for _ in range(25):
        noise = [draw.randrange(size) for _ in range(draw.choice([1, 5, 40, 200]))]
        low = [
            draw.randrange(min(size, 259)) for _ in range(60)
        ]  # bytes and special tokens: broken characters
        high = [draw.choice([1, draw.randrange(259, size)]) for _ in range(60)]
        begun = real[: draw.randrange(150)]
        for ids, prefix in [
            (noise, ()),
            (low, ()),
            (noise, low),
            (low, noise),
            (high, begun),
            (noise[:1], begun),
        ]:
            agree(ids, decode, prefix, bytes_fall_back)


def test_a_character_belongs_to_the_token_that_completes_it(data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["gpt2"]))
    ids = tokenizer.encode("a🙂b").ids
    assert spell(ids, tokenizer.decode) == ["a", "", "🙂", "b"]
    assert spell(ids[2:], tokenizer.decode, ids[:2]) == ["🙂", "b"]  # begun in the prefix
    assert spell(ids[:2], tokenizer.decode) == ["a", "�"]  # never completed


def test_a_space_and_a_beginning_of_text(data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["llama"]))
    ids = tokenizer.encode("Once upon a time").ids
    assert [tokenizer.decode([i]) for i in ids] == [
        "",
        "Once",
        "upon",
        "a",
        "time",
    ]  # alone they lose their spaces
    assert spell(ids, tokenizer.decode) == ["", "Once", " upon", " a", " time"]
    assert spell(ids[2:], tokenizer.decode, ids[:2]) == [" upon", " a", " time"]
    assert spell(ids[1:], tokenizer.decode, ids[:1]) == ["Once", " upon", " a", " time"]
    assert spell(ids[-1:], tokenizer.decode, ids * 30) == [" time"]


def utf8(ids):
    return bytes(ids).decode(errors="replace")


def tidy(ids):
    """Words with spaces between them, and none before a full stop; a 0 is nothing at all."""
    return " ".join("0abc.d!"[i] for i in ids if i).replace(" .", ".").replace(" !", "!")


@pytest.mark.parametrize(
    "decode, size", [(utf8, 256), (tidy, 7), (lambda ids: tidy(ids).strip(" a"), 7)]
)
def test_decoders_of_other_kinds(decode, size):
    draw = random.Random(size)
    for _ in range(100):
        ids = [draw.randrange(size) for _ in range(draw.choice([0, 1, 3, 50, 120]))]
        cut = draw.randrange(len(ids) + 1)
        found, whole = spell(ids[cut:], decode, ids[:cut]), decode(ids)
        assert len(found) == len(ids) - cut and whole.endswith("".join(found))
        if not cut:
            agree(ids, decode)


@pytest.mark.parametrize("what", ["text", "silence"])
def test_a_token_costs_the_same_in_a_long_text(what, data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["llama"]))
    ids = {"text": tokenizer.encode(TEXT * 60).ids, "silence": [5, *[2] * 20_000]}[what]
    decoded = 0

    def decode(some):
        nonlocal decoded
        decoded += len(some)
        return tokenizer.decode(some)

    assert "".join(spell(ids, decode)) == tokenizer.decode(ids)
    assert decoded < 40 * len(ids)
    decoded = 0
    spell(ids[:1], decode, ids)
    assert decoded < 300 or what == "silence"
