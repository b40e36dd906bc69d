"""Pairs of sources and outputs: files, conversations, docstrings, and the rows made of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import t5_cases

from specjax.data import packing, pairs, prompt_files
from specjax.data.pairs import OutputEnds, Pair
from specjax.errors import UserError

pytestmark = pytest.mark.fast
ENDS = OutputEnds(0, 1)


def test_a_file_has_pairs_and_is_a_file_of_prompts(tmp_path):
    given = t5_cases.lines(40)
    path = tmp_path / "pairs.jsonl"
    t5_cases.write(path, given)
    read = pairs.read(path)
    assert [(pair.source, pair.output) for pair in read] == [
        (line["source"], line["output"]) for line in given
    ]
    parts = {split: pairs.load([str(path)], split) for split in ("train", "test", "valid")}
    assert parts["train"] + parts["test"] + parts["valid"] == read
    assert all(len(part) >= 1 for part in parts.values()) and len(parts["train"]) >= 34
    turns = [each.turns for each in prompt_files.read(path, "prompts")]
    assert turns == [(line["source"],) for line in given]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"source": "w3"}, 'line 2 has no "output"; in a line of pairs that is a text'),
        ({"source": "w3", "output": " "}, "line 2 has ' ' as its \"output\"; .* that is not empty"),
        ({"source": 5, "output": "w3"}, 'line 2 has 5 as its "source"'),
        ({"source": "w3", "output": "w4", "id": 7}, 'line 2 has the key "id"; its keys are'),
        ([], 'line 2 has no "source"'),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    t5_cases.write(path, [*t5_cases.lines(1), line])
    with pytest.raises(UserError, match=message) as error:
        pairs.read(path)
    assert "\n" not in str(error.value)


def test_a_pair_is_its_source_the_start_token_and_a_labelled_output():
    tokenizer = t5_cases.tokenizer()
    given = [Pair("a", "w5 w6", "w7"), Pair("b", "w5", "w7 w8 w9"), Pair("c", "w3 w4 w5", "w6 w6")]
    documents, left_out = pairs.documents(given, tokenizer, ENDS, 6, leave_out=True)
    assert left_out == 1
    assert [each.ids.tolist() for each in documents] == [
        [5, 6, 1, 0, 7, 1],
        [5, 1, 0, 7, 8, 9, 1],
    ]
    assert [each.labelled.astype(int).tolist() for each in documents] == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1, 1, 1],
    ]
    with pytest.raises(
        UserError, match="c: source and output have 4 and 3 tokens .*length 6; raise it"
    ):
        pairs.documents(given, tokenizer, ENDS, 6)
    with pytest.raises(UserError, match="a: the source has the token 0, with which the decoder"):
        pairs.documents([Pair("a", "w5 <pad> w6", "w7")], tokenizer, ENDS, 20)
    assert pairs.ends_of(tokenizer) == ENDS


def test_rows_have_one_document_each_and_an_epoch_has_all():
    documents, _ = pairs.documents(
        [Pair("", f"w{i}", f"w{i + 1}") for i in range(3, 10)], t5_cases.tokenizer(), ENDS, 8
    )
    source = packing.OnePerRow(documents, 3, 8, seed=5)
    rows = np.concatenate([source.batch(step).tokens for step in range(7)])
    for epoch in range(3):
        assert sorted(rows[7 * epoch : 7 * epoch + 7, 0].tolist()) == list(range(3, 10))
    assert rows[:7, 0].tolist() != rows[7:14, 0].tolist()
    batch = source.batch(2)
    assert batch.tokens.shape == (3, 9) and batch.segments is None
    np.testing.assert_array_equal(
        batch.tokens, packing.OnePerRow(documents, 3, 8, 5).batch(2).tokens
    )
    np.testing.assert_array_equal(batch.labelled, np.tile([0, 0, 0, 1, 1, 0, 0, 0, 0], (3, 1)))
    held_out = packing.held_out_rows(documents, 4, 8, 9)
    assert len(held_out) == 1 and len(packing.held_out_rows(documents[:2], 4, 8, 1)[0].tokens) == 4
    with pytest.raises(UserError, match="there are 7 texts of at most 9 tokens, fewer than one"):
        packing.OnePerRow(documents, 8, 8)


CODE = '''
class A:
    def area(self, width):
        """The area
        of it.

        More text.
        """
        return width * self.height

    def none(self):
        return 1

    def only(self):
        """Nothing else."""

    def line(self): "In a line."; return 1

    async def again(self):
        'One line.'
        return 2
'''


def test_functions_with_a_docstring_are_pairs():
    found = pairs.docstrings([("a.py", CODE), ("b.py", "def ("), ("c.py", CODE)])
    assert found == [
        Pair(
            "a.py line 3",
            "def area(self, width):\n    return width * self.height",
            "The area of it.",
        ),
        Pair("a.py line 19", "async def again(self):\n    return 2", "One line."),
    ]


def test_an_answer_and_the_turns_before_it_are_a_pair(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = [["U", "a"], ["S", "b"], ["U", "c"], ["S", "d"], ["U", "e"], ["S", "f"]]
    path.write_text((json.dumps({"turns": turns}) + "\n") * 40)
    found = pairs.turns([str(path)], "train")
    assert len(found) == 3 * 36
    assert [(pair.source, pair.output) for pair in found[:3]] == [
        ("user: a", "b"),
        ("user: a\nassistant: b\nuser: c", "d"),
        ("user: c\nassistant: d\nuser: e", "f"),
    ]


def test_what_is_held_out_is_not_in_training():
    """A source in two splits stays in the later one."""
    given = {"train": "abcd", "valid": "bxc", "test": "cy"}
    every = {s: [Pair("", each, "o") for each in sources] for s, sources in given.items()}
    own = {s: "".join(p.source for p in pairs.split_of(every.__getitem__, s)) for s in given}
    assert own == {"train": "ad", "valid": "bx", "test": "cy"}


def test_an_output_with_an_end_inside_is_refused():
    tokenizer = pairs.train_tokenizer([Pair("", "some words", "other words")], 300)
    ends = pairs.ends_of(tokenizer)
    for token in ("</s>", "<pad>"):
        given = [Pair("p.jsonl line 1", "some words", f"other {token} words")]
        with pytest.raises(UserError, match="p.jsonl line 1: the output has the token"):
            pairs.documents(given, tokenizer, ends, 200)


def test_lines_are_counted_as_the_interpreter_counts_them():
    text = '\x0c\ndef f(x):\n    """Doc."""\n    return x\n\ndef g(a,\n      b): "Doc."; return a\n'
    [pair] = pairs.docstrings([("m.py", text)])
    assert pair.source == "def f(x):\n    return x" and pair.output == "Doc."


def test_a_tokenizer_for_pairs_ends_every_text():
    given = [Pair("", "def f(x): return x", "Returns x."), Pair("", "def g(y): return y", "Y.")]
    tokenizer = pairs.train_tokenizer(given, 280)
    ids = tokenizer.encode("def f").ids
    assert ids[-1] == 1 and 0 not in ids and tokenizer.decode(ids) == "def f"
    assert pairs.ends_of(tokenizer) == ENDS
    with pytest.raises(UserError, match="256 bytes and <pad> and </s> need at least 258"):
        pairs.train_tokenizer(given, 257)
    with pytest.raises(UserError, match="no token to begin an output with"):
        bare = t5_cases.tokenizers.Tokenizer(t5_cases.tokenizers.models.WordLevel({"a": 0}, "a"))
        pairs.ends_of(bare)
