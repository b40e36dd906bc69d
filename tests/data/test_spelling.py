"""The text that each token adds: exact on real tokenizers, with a constant cost per token."""

import itertools
import random

import pytest
from tokenizers import Tokenizer

from specjax.data.spelling import spell

pytestmark = pytest.mark.fast
FILES = {
    "gpt2": "tokenizers/gpt2/tokenizer.json",
    "neox": "tokenizers/gptneox20b/tokenizer.json",
    # Has byte tokens for other characters, and strips the first space.
    "llama": "models/stories260K/tokenizer.json",
}
TEXT = (
    "  Two  spaces,\n\tdef f(x):\n        return '你好 🙂🏽 żółw €5'  # don't — 12,345.6 \n\n" * 3
)


def by_definition(ids, decode, prefix=()):
    """The definition: decodes the whole text for every token."""
    prefix, ids = list(prefix), list(ids)
    texts = [decode(prefix + ids[:n]) for n in range(len(ids) + 1)]
    whole, settled = texts[-1], [0]
    for text in texts:
        pairs = zip(text, whole, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        settled.append(max(settled[-1], common))
    return [whole[a:b] for a, b in itertools.pairwise(settled[1:])], whole[settled[1] :]


def check(ids, decode, prefix=(), byte_fallback=False):
    expected, text = by_definition(ids, decode, prefix)
    pieces = spell(ids, decode, prefix)
    assert "".join(pieces) == text
    assert pieces == expected or (byte_fallback and "\ufffd" in text)


@pytest.mark.parametrize("name", FILES)
def test_every_token_adds_the_text_of_the_definition(name, data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES[name]))
    decode, size = tokenizer.decode, tokenizer.get_vocab_size()
    draw = random.Random(name)
    real = tokenizer.encode(TEXT).ids
    # One invalid byte makes the whole run of byte tokens unreadable, also the tokens before it.
    byte_fallback = name == "llama"
    for ids, prefix in [
        (real, ()),
        (real[7:], real[:7]),
        (real[60:], real[:60]),
        ([], ()),
        ([], real),
        (real[:1], ()),
    ]:
        check(ids, decode, prefix)
    for _ in range(25):
        noise = [draw.randrange(size) for _ in range(draw.choice([1, 5, 40, 200]))]
        # Bytes and special tokens: broken characters.
        low = [draw.randrange(min(size, 259)) for _ in range(60)]
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
            check(ids, decode, prefix, byte_fallback)


def test_a_character_belongs_to_the_token_that_completes_it(data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["gpt2"]))
    ids = tokenizer.encode("a🙂b").ids
    assert spell(ids, tokenizer.decode) == ["a", "", "🙂", "b"]
    assert spell(ids[2:], tokenizer.decode, ids[:2]) == ["🙂", "b"]  # begun in the prefix
    assert spell(ids[:2], tokenizer.decode) == ["a", "�"]  # never completed


def test_a_space_and_a_beginning_of_text(data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["llama"]))
    ids = tokenizer.encode("Once upon a time").ids
    # Single tokens lose their spaces.
    assert [tokenizer.decode([i]) for i in ids] == ["", "Once", "upon", "a", "time"]
    assert spell(ids, tokenizer.decode) == ["", "Once", " upon", " a", " time"]
    assert spell(ids[2:], tokenizer.decode, ids[:2]) == [" upon", " a", " time"]
    assert spell(ids[1:], tokenizer.decode, ids[:1]) == ["Once", " upon", " a", " time"]
    assert spell(ids[-1:], tokenizer.decode, ids * 30) == [" time"]


def utf8(ids):
    return bytes(ids).decode(errors="replace")


def tidy(ids):
    """Words separated by spaces, without a space before "." and "!"; 0 has no text."""
    return " ".join("0abc.d!"[i] for i in ids if i).replace(" .", ".").replace(" !", "!")


@pytest.mark.parametrize(
    "decode, size", [(utf8, 256), (tidy, 7), (lambda ids: tidy(ids).strip(" a"), 7)]
)
def test_decoders_of_other_kinds(decode, size):
    draw = random.Random(size)
    for _ in range(100):
        ids = [draw.randrange(size) for _ in range(draw.choice([0, 1, 3, 50, 120]))]
        cut = draw.randrange(len(ids) + 1)
        pieces, whole = spell(ids[cut:], decode, ids[:cut]), decode(ids)
        assert len(pieces) == len(ids) - cut and whole.endswith("".join(pieces))
        if not cut:
            check(ids, decode)


@pytest.mark.parametrize("what", ["text", "no text"])
def test_a_token_costs_the_same_in_a_long_text(what, data_dir):
    tokenizer = Tokenizer.from_file(str(data_dir / FILES["llama"]))
    ids = {"text": tokenizer.encode(TEXT * 60).ids, "no text": [5, *[2] * 20_000]}[what]
    decoded = 0

    def decode(some):
        nonlocal decoded
        decoded += len(some)
        return tokenizer.decode(some)

    assert "".join(spell(ids, decode)) == tokenizer.decode(ids)
    assert decoded < 40 * len(ids)
    decoded = 0
    spell(ids[:1], decode, ids)
    assert decoded < 300 or what == "no text"
