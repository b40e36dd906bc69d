"""The command that builds datastores and n-gram tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers

from specjax import run, testing
from specjax.data import datastore, ngram_tables
from specjax.models import hf
from specjax.train.recipes import lookup_data

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder with texts and a random model; its tokenizer has the words w0..w14 and <s>."""
    folder = tmp_path_factory.mktemp("store")
    words = {f"w{i}": i for i in range(15)} | {"<s>": 15}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    hf.save(
        folder / "target",
        testing.tiny_config(vocab_size=16),
        testing.tiny(vocab_size=16)[1],
        tokenizer,
    )
    (folder / "a.txt").write_text("w1 w2 w3\nw1 w2 w4\n")
    (folder / "b.jsonl").write_text('{"text": "w5 w6"}\n{"text": " "}\n{"text": "w7"}\n')
    return folder


def command(config, workdir, *settings):
    return run.main(["run", f"--config=configs/{config}.py", f"--workdir={workdir}", *settings])


def test_the_command_builds_a_store(target, tmp_path, capsys):
    given = [
        f"--config.target={target}/target",
        f"--config.data.files={target}/a.txt,{target}/b.jsonl",
    ]
    assert command("datastore", tmp_path / "s", *given) == 0, capsys.readouterr().err
    loaded = hf.load(target / "target")
    store = datastore.load(tmp_path / "s", loaded.lm)
    assert (
        store.tokens.tolist() == [15, 1, 2, 3, 1, 2, 4, -1, 15, 5, 6, -1, 15, 7, -1]
        and store.reach == 32
    )
    assert lookup_data.read_vocabulary(target / "target").fingerprint == loaded.lm.vocabulary
    names = sorted(p.name for p in (tmp_path / "s").iterdir())
    assert names == ["config.json", "datastore.json", "datastore.safetensors", "summary.json"]
    before = [(p.name, p.stat().st_mtime_ns) for p in (tmp_path / "s").iterdir()]
    assert command("datastore", tmp_path / "s", *given) == 0  # finished: not built again
    assert before == [(p.name, p.stat().st_mtime_ns) for p in (tmp_path / "s").iterdir()]
    capsys.readouterr()
    assert command("datastore", tmp_path / "s", *given, "--config.reach=8") == 2
    assert "reach was 32, is 8" in capsys.readouterr().err
    assert command("ngram_tables", tmp_path / "s", *given) == 2  # another build: refused
    (tmp_path / "s" / "datastore.json").unlink()  # as after a build that was killed
    assert command("datastore", tmp_path / "s", *given, "--config.reach=8") == 0
    assert datastore.load(tmp_path / "s", loaded.lm).reach == 8


def test_the_command_counts_text_and_generated_text(target, tmp_path, capsys):
    given = [
        f"--config.target={target}/target",
        f"--config.data.files={target}/a.txt,{target}/b.jsonl",
    ]
    assert command("ngram_tables", tmp_path / "n", *given, "--config.successors=2") == 0, (
        capsys.readouterr().err
    )
    lm = hf.load(target / "target").lm
    tables = ngram_tables.load(tmp_path / "n", lm)
    assert tables.bigram_ids[2].tolist() == [3, 4] and tables.bigram_ids[15].tolist() == [1, 5]
    small = [
        "--config.generation.prompt_tokens=3",
        "--config.generation.new_tokens=5",
        "--config.from_target=50",
    ]
    for name in ("once", "again"):
        assert (
            command(
                "ngram_tables", tmp_path / name, *given, *small, "--config.generation.batch_size=4"
            )
            == 0
        )
    summary = json.loads((tmp_path / "once" / "summary.json").read_text())
    # Three batches of four rows: five new tokens, and two of the prompt in the counted context.
    assert summary["tokens"] == 3 * 4 * (5 + 2)
    once, again = (ngram_tables.load(tmp_path / name, lm) for name in ("once", "again"))
    assert all((a == b).all() for a, b in zip(once, again, strict=True))
    assert not np.array_equal(once.unigram, tables.unigram)
    assert "the target, after" in (tmp_path / "once" / "ngram_tables.json").read_text()


def test_mistakes_give_one_clear_line(target, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((target / "target" / "config.json").read_text())
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    given = {"target": f"{target}/target", "data.files": f"{target}/a.txt"}
    cases = [
        ("datastore", {"target": ""}, "config.target is empty"),
        ("datastore", {"target": "/nowhere"}, "/nowhere is no directory"),
        ("datastore", {"target": f"{tmp_path}/bare"}, "has no tokenizer.json"),
        ("datastore", {"data.files": f"{tmp_path}/empty.txt"}, "empty; give a file with text"),
        ("datastore", {"data.files": f"{tmp_path}/latin.txt"}, "is not UTF-8"),
        ("datastore", {"data.files": f"{tmp_path}/none.txt"}, "No such file"),
        ("datastore", {"reach": 0}, "config.reach is 0; it must be a whole number >= 1"),
        (
            "ngram_tables",
            {"successors": 0},
            "config.successors is 0; it must be a whole number >= 1",
        ),
        ("ngram_tables", {"smoothing": 0.0}, "config.smoothing is 0.0; it must be a number > 0"),
        (
            "ngram_tables",
            {"from_target": -1},
            "config.from_target is -1; it must be a whole number >= 0",
        ),
        ("ngram_tables", {"generation.batch_size": 0}, "config.generation.batch_size is 0"),
        (
            "ngram_tables",
            {"from_target": 9, "generation.new_tokens": 400},
            "32 + 400 tokens and the model has 128",
        ),
        (
            "ngram_tables",
            {"from_target": 9, "generation.new_tokens": 5},
            "no text has the 32 tokens of config.generation.prompt_tokens",
        ),
    ]
    for name, keys, message in cases:
        settings = [f"--config.{key}={value}" for key, value in (given | keys).items()]
        assert command(name, tmp_path / "out", *settings) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
        assert not (tmp_path / "out").exists()
    settings = [f"--config.{key}={value}" for key, value in given.items()]
    assert command("datastore", tmp_path / "run", *settings) == 2
    assert "holds a training run" in capsys.readouterr().err
