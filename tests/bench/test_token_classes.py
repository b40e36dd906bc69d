"""The class of a token is that of its word, with any tokenizer."""

import pytest
from tokenizers import Tokenizer

from specjax.bench.overlap import CLASSES, classify

pytestmark = pytest.mark.fast
SHORT = {
    "s": "special",
    "w": "whitespace",
    "p": "punctuation",
    "n": "number",
    "f": "function",
    "c": "content",
}


def letters(*pieces):
    """The ids of these pieces, and a ``decode`` that joins the pieces of its ids."""
    return list(range(len(pieces))), lambda ids: "".join(pieces[i] for i in ids)


@pytest.mark.parametrize(
    "pieces, classes",
    [
        (["The", " speci", "fic", " the", "ory"], "fcccc"),  # "ory" and " the" are "theory"
        (["12", "34", " ", "3", ".", "5", " 0x", "f", "f", " 2", "nd"], "nnwnpnnnnnn"),
        (
            ["def", " foo", "_", "bar", "(", "self", ",", " x", "):", "\n   ", " return", " None"],
            "fcccpcpcpwff",
        ),
        (
            ["don", "'t", " ca", "n\u2019", "t", " it", "'", "s", " John", "'", "s", " rock", "'n"],
            "ffffffffccccc",
        ),
        (["'", "tis", "'", " '"], "pcpp"),
        (["a", "", " ", "", "b", ""], "fswscs"),
        (["_", " __", " _x", " --", "\t", "\r\n", ""], "ppcpwws"),
        (["हि", "न", "्", "दी", " 你", "好", "。", " 🙂"], "ccccccpp"),
        # Keywords are case-sensitive, English words are not.
        (["RETURN", " Class", " AND", " true"], "ccfc"),
        # A token that contains several things has the class of its word.
        ([" (the", " --x", "):\n"], "fcp"),
        ([], ""),
    ],
)
def test_a_piece_has_the_class_of_its_word(pieces, classes):
    assert classify(*letters(*pieces)) == [SHORT[c] for c in classes]


def test_real_tokenizers(data_dir):
    text = "Once upon a time, there was\n    żółw 🙂 1234."
    for name in ("tokenizers/gpt2", "tokenizers/gptneox20b", "models/stories260K"):
        tokenizer = Tokenizer.from_file(str(data_dir / name / "tokenizer.json"))
        ids = tokenizer.encode(text).ids
        classes = classify(ids, tokenizer.decode)
        assert len(classes) == len(ids) and set(classes) <= set(CLASSES)
        words = []  # consecutive tokens of one class count once
        for token, kind in zip(ids, classes, strict=True):
            if kind != "whitespace" and [kind] != words[-1:]:
                words.append(kind)
            if kind == "special":
                assert not tokenizer.decode([token])
        expected = [
            "content",
            "function",
            "content",
            "punctuation",
            "function",
            "content",
            "punctuation",
            "number",
        ]
        assert [kind for kind in words if kind != "special"] == [*expected, "punctuation"]
        assert (classes[0] == "special") == (name == "models/stories260K")  # it begins with <s>


def test_parts_of_a_character_and_a_stripped_space(data_dir):
    gpt2 = Tokenizer.from_file(str(data_dir / "tokenizers/gpt2/tokenizer.json"))
    ids = gpt2.encode("ż🙂").ids
    assert classify(ids, gpt2.decode) == ["content"] * (len(ids) - 2) + ["punctuation"] * 2
    assert classify(ids[:-1], gpt2.decode)[-1] == "punctuation"  # the character is incomplete
    llama = Tokenizer.from_file(str(data_dir / "models/stories260K/tokenizer.json"))
    blank = llama.token_to_id("▁")
    assert classify([1, blank, blank, 2], llama.decode) == [
        "special",
        "whitespace",
        "whitespace",
        "special",
    ]
