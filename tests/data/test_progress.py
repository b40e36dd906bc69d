"""What a fingerprint covers, and how results are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specjax
from specjax.bench import results
from specjax.data import progress
from specjax.errors import UserError

pytestmark = pytest.mark.fast


def test_the_fingerprint_covers_every_source_file(tmp_path, monkeypatch):
    assert progress.PACKAGE.samefile(specjax.__path__[0])
    monkeypatch.setattr(progress, "PACKAGE", tmp_path)
    source = tmp_path / "drafters" / "new.py"
    source.parent.mkdir()
    source.write_text("1")
    before = progress.fingerprint({}, [])
    assert progress.fingerprint({}, []) == before
    source.write_text("12")
    assert progress.fingerprint({}, []) != before


@pytest.mark.parametrize(
    "text", ["{a}", "gsm8k:{a}", "{a}, {b}", "ltd:profile={a}", "goodput:slack=1,profile={b}"]
)
def test_files_inside_a_text_are_named(tmp_path, text):
    a, b = tmp_path / "a", tmp_path / "b"
    for path in (a, b):
        path.write_text("1")
    settings = {"drafter": [{"keys": text.format(a=a, b=b)}]}
    named = {path for path, _ in progress.named_files(settings)}
    assert named == {str(path) for path in (a, b) if str(path) in settings["drafter"][0]["keys"]}
    before = progress.inputs(settings)
    for path in named:
        Path(path).write_text("12")
        assert progress.inputs(settings) != before


def test_an_incomplete_line_is_dropped(tmp_path):
    progress.Progress(tmp_path, "mark").put("a", [1])
    file = tmp_path / progress.NAME
    file.write_text(file.read_text() + '{"name": "b", "val')
    again = progress.Progress(tmp_path, "mark")
    again.put("c", 2)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines == [
        {"fingerprint": "mark"},
        {"name": "a", "value": [1]},
        {"name": "c", "value": 2},
    ]


def test_new_results_replace_the_files_of_earlier_ones(tmp_path):
    (tmp_path / "plots").mkdir()
    for name in ("plots/a.svg", "trace.jsonl", "notes.txt"):
        (tmp_path / name).write_text("earlier")
    path = results.write(
        "{}\n", tmp_path, [{"method": "x"}], {"answers/a.jsonl": "1\n"}, command="c", skipped=[]
    )
    written = json.loads(path.read_text())
    assert list(written)[-3:] == ["rows", "command", "skipped"]
    assert written["schema"] == results.SCHEMA and written["rows"] == [{"method": "x"}]
    files = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["answers/a.jsonl", "config.json", "metrics.jsonl", "notes.txt", "results.json"]


def test_a_failed_write_keeps_the_earlier_results(tmp_path):
    (tmp_path / "trace.jsonl").write_text("earlier")
    with pytest.raises(UserError, match="cannot write into"):
        results.write("{}\n", tmp_path, [], {"a/" + "b" * 300: ""})
    assert [p.name for p in tmp_path.iterdir()] == ["trace.jsonl"]
