"""Mode chat: conversations in the model's template, one after the other."""

from __future__ import annotations

import json

import pytest
from commandline import ROOT, save

from specjax.data.chat import BUILT_IN
from specjax.generation import stops
from specjax.run import generate

CHAT, GENERATE = (f"--config={ROOT}/configs/{name}.py" for name in ("chat", "generate"))
QUESTIONS = [
    {"question_id": 81, "category": "coding", "turns": ["return a + b", "def sub"]},
    {"question_id": 7, "category": "qa", "turns": ["add(a, b)?"]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    save(folder)
    words = {"chat_template": BUILT_IN["plain"], "bos_token": "", "eos_token": ""}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    return file


def test_prompts_of_a_file_are_put_into_the_models_template_and_a_line_says_so(
    cli, model, questions, tmp_path
):
    """ "auto" is the model's template for a file, and none for a text or a model without one."""
    keys = [f"--config.target={model}", "--config.max_new_tokens=2"]
    status, _, err, workdir = cli(GENERATE, *keys, f"--config.prompts={questions}")
    assert status == 0 and err.count("\n") == 1
    assert "prompts are put into the chat template of" in err and "--config.chat=" in err
    results = json.loads((workdir / "results.json").read_text())
    assert results["rows"][0]["method"] == "none"
    own, none, base = (tmp_path / name for name in ("own", "none", "base"))
    plain = save(tmp_path / "plain")
    for source, chat, folder, about in (
        (f"prompts={questions}", ["--config.chat=own"], own, ""),
        (f"prompts={questions}", ["--config.chat="], none, ""),
        (f"prompts={questions}", [f"--config.target={plain}"], base, ""),
    ):
        status, _, err, _ = cli(GENERATE, *keys, f"--config.{source}", *chat, workdir=folder)
        assert (status, err) == (0, about)
    ids = [
        json.loads((folder / "results.json").read_text())["token_ids"]
        for folder in (workdir, own, none, base)
    ]
    assert ids[0] == ids[1] != ids[2] == ids[3]


@pytest.mark.slow
def test_every_turn_is_answered_as_by_mode_generate(cli, model, questions, tmp_path):
    keys = [f"--config.target={model}", f"--config.prompts={questions}"]
    keys += ["--config.max_new_tokens=10", "--config.drafter.name=prompt_lookup"]
    keys += ["--config.drafter.min_ngram=1"]
    record = tmp_path / "traces.jsonl"
    status, out, err, workdir = cli(CHAT, *keys, f"--config.record={record}")
    assert (status, err) == (0, "")
    results = json.loads((workdir / "results.json").read_text())
    status, _, err, workdir = cli(GENERATE, *keys, "--config.chat=own", workdir=tmp_path / "b")
    assert (status, err) == (0, "")
    other = json.loads((workdir / "results.json").read_text())
    assert results["token_ids"] == other["token_ids"] and len(results["token_ids"]) == 3
    assert results["texts"] == other["texts"]
    whole, coding, qa = results["rows"]
    [row] = other["rows"]
    for key in ("tokens", "rounds", "block_efficiency", "repeated_4grams", "acceptance_rate"):
        assert whole[key] == row[key]
    assert (coding["category"], coding["prompts"]) == ("coding", 2)
    assert qa["tokens"] + coding["tokens"] == whole["tokens"] == 30
    lines = record.read_text().splitlines()
    assert [json.loads(line)["output_ids"] for line in lines] == results["token_ids"]
    # Each question, then its answer, then what it took.
    places = [out.index(text) for text in ("1 of 2, coding", "user: return a + b", "tokens/s")]
    places += [out.index("user: def sub"), out.index("2 of 2, qa"), out.index("user: add(a, b)?")]
    assert places == sorted(places) and out.count(" tokens/s") == 3
    for text in results["texts"]:
        assert text.splitlines()[0] in out
    assert "User: " not in out and "Assistant:" not in out.partition("user:")[0]


def test_one_prompt(cli, model):
    status, out, err, workdir = cli(
        CHAT, f"--config.target={model}", "--config.prompt=add(a, b)?", "--config.max_new_tokens=10"
    )
    assert (status, err) == (0, "") and out.startswith("user: add(a, b)?\n")
    [row] = json.loads((workdir / "results.json").read_text())["rows"]
    assert row["tokens"] == 10 and row["prompts"] == 1 and row["category"] is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["--config.prompt=x", "--config.chat="], "config.chat is empty, and mode chat needs"),
        (
            ["--config.prompt=x", "--config.batch_size=2"],
            "config.batch_size is for modes generate and bench and replay",
        ),
        (
            ["--config.prompt=x", "--config.mesh=data:1"],
            "config.mesh is for modes generate and bench, not for mode chat",
        ),
        (["--config.prompts=stdlib"], "config.prompts is stdlib, which has texts to be continued"),
        ([], "give either config.prompt (one text) or config.prompts"),
        (["--config.prompt=x", "--config.max_new_tokens=4000"], "the longest prompt has"),
        (["--config.prompt=x", "--config.chat=nothing"], "there is no chat template 'nothing'"),
    ],
)
def test_mistakes_are_one_line(cli, model, keys, message):
    status, out, err, workdir = cli(CHAT, f"--config.target={model}", *keys)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert not workdir.exists()


def test_a_model_without_a_template(cli, target):
    status, out, err, workdir = cli(CHAT, f"--config.target={target}", "--config.prompt=x")
    assert (status, out) == (2, "") and "has no chat template; choose one of chatml" in err
    assert not workdir.exists()


@pytest.mark.fast
def test_accepted_draft_tokens_have_a_colour():
    """From the character on that was shown."""
    row = stops.Row([], lambda ids: "".join("ab c"[i] for i in ids), ())
    row.add([0, 1, 2, 3], last=True)
    text = generate._coloured(row, row.cut().text, [False, True, True, False], 0)
    assert text.plain == "ab c" and [tuple(span)[:2] for span in text.spans] == [(1, 2), (2, 3)]
    text = generate._coloured(row, row.cut().text, [False, True, True, False], 2)
    assert text.plain == " c" and [tuple(s)[:2] for s in text.spans if s.end > s.start] == [(0, 1)]
