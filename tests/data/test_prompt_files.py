"""Prompt files: the published sets, a user's own files, and the line of every mistake."""

import collections
import gzip
import json
import lzma
import sys

import pytest

from specjax.data import jsonl, prompt_files
from specjax.data.chat import BUILT_IN, Template
from specjax.data.prompt_files import Conversation
from specjax.errors import UserError

pytestmark = pytest.mark.fast
BASIC = {"task_id": 1, "text": "Add.", "test_list": ["assert True"]}
BENCH = {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}


@pytest.fixture
def file(tmp_path):
    """Writes lines (objects as JSON) and returns the path."""

    def write(*lines, name="p.jsonl"):
        path = tmp_path / name
        text = "".join(
            (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
        )
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write


def test_the_published_sets(data_dir):
    folder = data_dir / "prompts"
    read = {
        name: prompt_files.read(folder / name, name)
        for name in (
            "spec_bench/question.jsonl",
            "mt_bench/question.jsonl",
            "mt_bench/vicuna_bench_question.jsonl",
            "humaneval/HumanEval.jsonl.gz",
            "gsm8k/test.jsonl",
            "mbpp/mbpp.jsonl",
        )
    }
    assert [len(conversations) for conversations in read.values()] == [480, 80, 80, 164, 1319, 974]
    bench, _, vicuna, human, school, basic = read.values()
    tasks = collections.Counter(prompt_files.task(each.category) for each in bench)
    assert tasks == dict.fromkeys(
        ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"), 80
    )
    assert [len(each.turns) for each in bench] == [2] * 80 + [1] * 400
    assert (
        bench[0].id == 81
        and bench[0].category == "writing"
        and bench[0].turns[1].startswith("Rewrite your previous")
    )
    assert vicuna[0][:3] == (1, "generic", ("How can I improve my time management skills?",))
    assert (
        human[1].id == "HumanEval/1"
        and human[1].completion
        and human[1].turns[0].startswith("from typing")
    )
    assert (
        school[0].category == "gsm8k"
        and school[0].turns[0].startswith("Janet")
        and school[0].id == 1
    )
    assert basic[1].id == 2 and basic[1].turns[0] == (
        "You are an expert Python programmer, and here is your task: Write a function to find the "
        "similar elements from the given two tuple lists. Your code should pass these tests:\n\n"
        "assert similar_elements((3, 4, 5, 6),(5, 7, 4, 10)) == (4, 5)\n"
        "assert similar_elements((1, 2, 3, 4),(5, 4, 3, 7)) == (3, 4)\n"
        "assert similar_elements((11, 12, 14, 13),(17, 15, 14, 13)) == (13, 14)\n"
    )
    for conversations in read.values():
        assert all(turn.strip() for each in conversations for turn in each.turns)


def test_prompts_of_the_user(file):
    lines = {"prompt": "a", "category": "x"}, "", {"prompt": "b\n", "answer": "c", "category": 3}
    assert prompt_files.read(file(*lines), "p") == [
        Conversation(1, "x", ("a",)),
        Conversation(3, None, ("b\n",)),
    ]
    for name in ("p.txt", "p.txt.gz", "prompts"):
        assert prompt_files.read(file("def add", "  ", ' {"prompt": 1}\r', name=name), "p") == [
            Conversation(1, None, ("def add",)),
            Conversation(3, None, (' {"prompt": 1}',)),
        ]
    zipped = file(BENCH, BENCH | {"question_id": "b"}, name="q.jsonl.gz")
    assert [each.id for each in prompt_files.read(zipped, "q", "mt_bench")] == [81, "b"]
    # A line of MBPP's sanitised half.
    edited = {"task_id": 2, "prompt": "Add.", "test_list": ["assert 1", "assert 2"]}
    [turn] = prompt_files.read(file(edited), "q")[0].turns
    assert turn.endswith("task: Add. Your code should pass these tests:\n\nassert 1\nassert 2\n")
    assert prompt_files.read(file(edited | {"entry_point": "add"}), "q", "prompts")[0].turns == (
        "Add.",
    )


def test_the_content_decides_whatever_the_file_name_is(file):
    for name in ("p.JSONL", "p.JSONL.GZ", "p.Json", "p.txt", "p", "p.txt.gz"):
        path = file(BENCH, name=name.replace("GZ", "gz"))
        assert prompt_files.read(path.rename(path.with_name(name)), "p") == [
            Conversation(81, "writing", ("Write.", "Again."))
        ]
    for line in ({"prompt": "a"}, {"question": "a", "answer": "b"}, BASIC):
        assert prompt_files.read(file(line, name="p.txt"), "p")[0].turns[0] != json.dumps(line)
    # Prompts that look like JSON.
    for lines in (['{"a": 1}', "b"], ["[1, 2]"], ["{", "b"], ['{"prompt": 3}']):
        prompts = prompt_files.read(file(*lines, name="p.txt"), "p")
        assert [each.turns[0] for each in prompts] == lines
    assert prompt_files.read(file(BENCH, name="p.txt"), "p", "prompts")[0].turns == (
        json.dumps(BENCH),
    )
    for lines in (['[{"prompt": "a"},', '{"prompt": "b"}]'], ["{", '"turns": ["a"]', "}"]):
        with pytest.raises(UserError, match="p is a single JSON value"):
            prompt_files.read(file(*lines, name="p.txt"), "p")


def test_only_prompts_are_decompressed(file):
    path = file({"prompt": "a"}, name="p.jsonl.gz")
    assert jsonl.read(path, "p", compressed=True) == '{"prompt": "a"}\n'
    with pytest.raises(UserError, match="is not UTF-8"):
        jsonl.read(path, "p")


MISTAKES = {
    "text": (
        [{"prompt": "def"}, {"text": "x"}],
        "auto",
        'p line 2 has no "prompt"; in a line of prompts that is a text',
    ),
    "no known key": (
        ["17"],
        "auto",
        'p line 1 has no "prompt"; in a line of prompts that is a text',
    ),
    "no JSON": (
        [BENCH, "", "{"],
        "auto",
        'p line 3 has no "turns"; in a line of spec_bench that is a list of texts',
    ),
    "key": (
        [BENCH, {"turns": ["a"], "question_id": 1}],
        "auto",
        'p line 2 has no "category"; in a line of spec_bench',
    ),
    "type": (
        [BENCH | {"turns": ["a", 1]}],
        "auto",
        "p line 1 has ['a', 1] as its \"turns\"; in a line of spec_bench",
    ),
    "id": (
        [BENCH | {"question_id": True}],
        "auto",
        'p line 1 has True as its "question_id"; in a line of spec_bench',
    ),
    "dialogue": ([{"turns": [["U", "Hi"]]}], "auto", "p line 1 has [['U', 'Hi']] as its \"turns\""),
    "no turns": (
        [BENCH | {"turns": []}],
        "auto",
        'p line 1 has no turn in its "turns"; give at least one text',
    ),
    "empty turn": ([BENCH | {"turns": ["a", " \n"]}], "auto", "p line 1 has an empty prompt"),
    "twice": ([BENCH, BENCH], "auto", "p line 2 has the id 81 of line 1"),
    "forced": (
        [{"prompt": "a", "task_id": 1}],
        "humaneval",
        'p line 1 has no "entry_point"; in a line of humaneval',
    ),
    "answer": (
        [{"question": "a"}],
        "gsm8k",
        'p line 1 has no "answer"; in a line of gsm8k that is a text',
    ),
    "mbpp": (
        [{"task_id": 1, "test_list": ["a"]}],
        "auto",
        'p line 1 has no "text"; in a line of mbpp that is a text',
    ),
    "list": (
        ['[{"prompt": "a"},', '{"prompt": "b"}]'],
        "auto",
        "p is a single JSON value; give JSON Lines",
    ),
    "list in a line": (["[1]"], "gsm8k", "p is a single JSON value; give JSON Lines"),
    "spread out": (
        ["{", '"prompt": "a"', "}"],
        "auto",
        "p is a single JSON value; give JSON Lines: one object per line",
    ),
    "blank task": (
        [BASIC | {"text": " "}],
        "auto",
        'p line 1 has an empty "text"; a line of mbpp needs a task',
    ),
    "no tests": (
        [BASIC, BASIC | {"task_id": 2, "test_list": []}],
        "auto",
        'p line 2 has an empty "test_list"; a line',
    ),
    "no entry": (
        [{"task_id": "HumanEval/0", "prompt": "def"}],
        "auto",
        'p line 1 has no "entry_point"; in a line of humaneval',
    ),
    "no kind": (
        ["a"],
        "alpaca",
        "there is no kind of prompts 'alpaca'; choose one of auto, spec_bench",
    ),
    "void": (["", " "], "auto", "p has no prompts; give at least one"),
}


@pytest.mark.parametrize("lines, kind, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_name_the_line(lines, kind, message, file):
    with pytest.raises(UserError) as error:
        prompt_files.read(file(*lines), "p", kind)
    assert str(error.value).startswith(message)


def test_damaged_files(file, tmp_path):
    whole = file({"prompt": "żółw"}, name="whole.jsonl.gz")
    assert prompt_files.read(whole, "p")[0].turns == ("żółw",)
    for name, content, message in [
        ("no.jsonl.gz", b'{"prompt": "a"}\n', "p is not a complete gzip file"),
        ("half.jsonl.gz", whole.read_bytes()[:-9], "p is not a complete gzip file"),
        (
            "bad.jsonl.gz",
            whole.read_bytes()[:14] + b"\xff" * 9,
            "p is not a complete gzip file",
        ),
        ("latin.txt.gz", gzip.compress("é".encode("latin-1")), "p: byte 0 is not UTF-8"),
        ("latin.txt", "é".encode("latin-1"), "p: byte 0 is not UTF-8"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            prompt_files.read(tmp_path / name, "p")
    for name in ("none.jsonl", "none.jsonl.gz"):
        with pytest.raises(UserError, match="p cannot be read"):
            prompt_files.read(tmp_path / name, "p")


def test_prompts_with_and_without_a_template():
    conversation = Conversation(1, None, ("One?", "Two?", "Three?"))
    answers = [" Yes.\n", "No."]
    plain = Template("plain", BUILT_IN["plain"], {"bos_token": "<s>"}, ("<s>",))
    # The template writes the token at the beginning.
    assert prompt_files.spell(conversation, 0, [], plain) == ("<s>User: One?\nAssistant:", False)
    assert prompt_files.spell(conversation, 2, answers, plain) == (
        "<s>User: One?\nAssistant: Yes.\nUser: Two?\nAssistant: No.\nUser: Three?\nAssistant:",
        False,
    )
    assert prompt_files.spell(conversation, 0, []) == ("One?", True)
    assert prompt_files.spell(conversation, 2, answers) == (
        "One?\n\nYes.\n\nTwo?\n\nNo.\n\nThree?",
        True,
    )
    code = Conversation("HumanEval/0", "humaneval", ("def f():\n",), completion=True)
    assert prompt_files.spell(code, 0, [], plain) == ("def f():\n", True)
    for turn, wrong in [(0, ["a"]), (1, []), (3, ["a"] * 3)]:
        with pytest.raises(ValueError, match=f"turn {turn} of 3"):
            prompt_files.spell(conversation, turn, wrong)
    refuses = Template("mine", "{{ raise_exception('one turn only') }}", {}, ())
    with pytest.raises(UserError, match="mine does not take this conversation: one turn only"):
        prompt_files.spell(conversation, 0, [], refuses)


def test_a_sample_takes_every_category_in_turn():
    """The first prompts of each; every task of Spec-Bench before a second category of one task."""
    names = ["writing"] * 3 + ["roleplay"] * 3 + ["translation"] * 3 + ["qa"] * 1 + ["rag"] * 3
    every = [prompt_files.Conversation(n, name, ("x",)) for n, name in enumerate(names)]
    samples = {n: [each.id for each in prompt_files.sample(every, n)] for n in range(15)}
    assert [names[i] for i in samples[4]] == ["writing", "translation", "qa", "rag"]
    assert [names[i] for i in samples[5]] == list(dict.fromkeys(names))
    assert samples[5] == [0, 3, 6, 9, 10] and samples[7] == [0, 1, 3, 6, 7, 9, 10]
    assert samples[13] == samples[14] == list(range(13))
    assert all(set(samples[n]) <= set(samples[n + 1]) for n in range(14))
    for n in range(10):  # until the smallest category is empty, numbers differ by one at most
        counts = [sum(names[i] == name for i in samples[n]) for name in set(names) - {"qa"}]
        assert max(counts) - min(counts) <= 1
    plain = [prompt_files.Conversation(n, None, ("x",)) for n in range(5)]
    assert [each.id for each in prompt_files.sample(plain, 3)] == [0, 1, 2]


@pytest.mark.parametrize("suffix, pack", [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_a_compressed_file_is_read_and_a_part_of_one_is_one_line(tmp_path, suffix, pack):
    path = tmp_path / f"p.jsonl{suffix}"
    content = pack(b'{"prompt": "a"}\n{"prompt": "b"}\n' * 50)
    path.write_bytes(pack(b'{"prompt": "a"}\n'))
    assert prompt_files.read(path, "p")[0].turns == ("a",)
    for cut in (content[:-5], content[:20], b"plain text"):
        path.write_bytes(cut)
        with pytest.raises(UserError, match=f"copy it again, or use a name without {suffix}"):
            prompt_files.read(path, "p")


DOMAINS = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay"),
    *("stem", "summarization", "writing"),
)


def speed_rows(categories, each=2):
    """Made-up rows with the fields of SPEED-Bench."""
    rows = []
    for number, category in enumerate(c for c in categories for _ in range(each)):
        turns = [f"Question {number}?"] + ["And then?"] * (number % 2)
        rows.append(
            {
                "question_id": f"q{number:03d}",
                "category": category,
                "sub_category": None if number % 3 else "some",
                "turns": turns,
                "source": "made-up",
                "src_id": str(number),
                "difficulty": None,
                "multiturn": len(turns) > 1,
            }
        )
    return rows


def parquet_of(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_speed_bench_is_read_from_parquet_and_from_both_forms_of_lines(file, tmp_path):
    rows = speed_rows(DOMAINS)
    messages = [
        {k: v for k, v in row.items() if k != "turns"}
        | {"messages": [{"role": "user", "content": turn} for turn in row["turns"]]}
        for row in rows
    ]
    paths = [
        file(*rows, name="turns.jsonl"),
        file(*messages, name="qualitative.jsonl"),
        parquet_of(tmp_path / "qualitative" / "test.parquet", rows),
    ]
    asked = [Conversation(row["question_id"], row["category"], tuple(row["turns"])) for row in rows]
    for path in paths:
        for kind in ("auto", "speed_bench"):
            assert prompt_files.read(path, "p", kind) == asked
    chosen = prompt_files.sample(asked, 11)
    assert sorted(each.category for each in chosen) == sorted(DOMAINS)


def test_a_set_for_throughput_has_its_entropies_as_categories(tmp_path):
    rows = speed_rows(("low_entropy", "mixed", "high_entropy"), 4)
    path = parquet_of(tmp_path / "throughput_1k" / "test.parquet", rows)
    found = collections.Counter(each.category for each in prompt_files.read(path, "p"))
    assert found == {"low_entropy": 4, "mixed": 4, "high_entropy": 4}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"turns": [f"{prompt_files.PLACEHOLDER} FROM THE SOURCE\n\n{{question}}"]},
            "p line 2 has a placeholder and no text: run prepare_data.py of SPEED-Bench, which "
            "fetches the texts, and give the file that it writes",
        ),
        ({"turns": []}, 'p line 2 has no turn in its "turns"; give at least one text'),
        (
            {"messages": [{"role": "system", "content": "Be short."}]},
            "p line 2 has a message of the role 'system'; the messages of a line of speed_bench "
            "are the turns of the user",
        ),
        ({"category": None}, 'p line 2 has None as its "category"'),
    ],
)
def test_rows_of_speed_bench_that_are_refused(file, change, message):
    good, bad = speed_rows(("qa",))
    with pytest.raises(UserError) as error:
        prompt_files.read(file(good, bad | change), "p")
    assert str(error.value).startswith(message)


def test_parquet_files_that_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "test.parquet"
    path.write_bytes(b"no parquet")
    parquet_of(tmp_path / "empty.parquet", speed_rows(("qa",)))
    with pytest.raises(UserError, match="p is no readable Parquet file: .*; copy it again"):
        prompt_files.read(path, "p")
    with pytest.raises(UserError, match="p is no readable Parquet file"):
        prompt_files.read(tmp_path / "missing.parquet", "p")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"pip install 'specjax\[parquet\]', or give JSON Lines"):
        prompt_files.read(path, "p")


def test_a_name_may_begin_with_its_kind():
    assert prompt_files.named("speed_bench:a/b.parquet") == ("speed_bench", "a/b.parquet")
    assert prompt_files.named("mt_bench:q.jsonl") == ("mt_bench", "q.jsonl")
    for name in ("q.jsonl", "gs://bucket/q.jsonl", "speed_bench", "other:q.jsonl", ""):
        assert prompt_files.named(name) == ("", name)
