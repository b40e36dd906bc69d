"""python -m specjax.report: the files that it reads, and its output, messages and exit status."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest
import report_cases
from report_cases import notices_of

from specjax.report import html, inputs, terminal

pytestmark = pytest.mark.fast


@pytest.fixture
def workdir(tmp_path):
    """A directory with results.json and trace.jsonl."""
    (tmp_path / "results.json").write_text(json.dumps(report_cases.results()))
    (tmp_path / "trace.jsonl").write_text(json.dumps(report_cases.trace(5)) + "\n")
    return tmp_path


def is_error(result: tuple[int, str, str], message: str) -> bool:
    """Whether the program ended with status 2 and one line on stderr that has the message."""
    status, out, err = result
    one_line = err.count("\n") == 1 and err.startswith("specjax: ")
    return status == 2 and out == "" and one_line and message in err


def test_writes_the_report_and_prints_the_table(workdir, run):
    status, out, err = run(workdir)
    assert (status, err) == (0, "") and "prompt_lookup" in out
    assert f"wrote {workdir / 'report.html'}" in out and "measured with jax 0.10.2\n" in out
    page = (workdir / "report.html").read_text()
    assert page.count('class="trace-data"') == 1 and "<svg" in page
    assert f"<h1>{workdir.name}</h1>" in page
    files = ("--out", workdir / "other.html", "--trace", workdir / "trace.jsonl")
    status, out, err = run(workdir / "results.json", *files)
    assert (status, err) == (0, "") and (workdir / "other.html").exists()
    names = ["other.html", "report.html", "results.json", "trace.jsonl"]
    assert sorted(os.listdir(workdir)) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{rows", "is not JSON (line 1: "),
        ("[1]", "is not a JSON object"),
        ('{"schema": 2, "rows": []}', "has schema 2; this version reads schema 1"),
        ('{"rows": []}', "has schema none; this version reads schema 1"),
        ('{"schema": 1}', 'has no list "rows"'),
        (
            '{"schema": 1, "rows": []}',
            "has no finished rows, and there is no trace.jsonl; there is nothing to report",
        ),
        ('{"schema": 1, "rows": [{"method": "x", "speedup": null}]}', "has no finished rows"),
        (b"\xff\xfe", "is not UTF-8"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_bad_results_are_an_error(tmp_path, run, text, message):
    if text is not None:
        (tmp_path / "results.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert is_error(run(tmp_path), message)
    assert not (tmp_path / "report.html").exists()


def test_traces_are_shown_if_no_row_is_finished(workdir, run):
    (workdir / "results.json").write_text('{"schema": 1, "rows": []}')
    status, out, err = run(workdir)
    assert (status, err) == (0, "") and "notice: there are no finished rows" in out
    page = (workdir / "report.html").read_text()
    assert 'class="trace-data"' in page and "<table" not in page.partition("<script")[0]
    (workdir / "trace.jsonl").write_text("{\n")
    message = "and trace.jsonl has no trace that can be shown; there is nothing to report"
    assert is_error(run(workdir), message)


def bad_traces(good: dict) -> list[tuple[str, str]]:
    """(line of trace.jsonl, message)."""

    def changed(**keys) -> str:
        return json.dumps(good | keys)

    def with_round(**keys) -> str:
        return changed(rounds=[good["rounds"][0], good["rounds"][0] | keys])

    token, node = good["rounds"][0]["out"][0], good["rounds"][0]["draft"][0]
    own_parent = [*node[:2], 0, *node[3:]]
    return [
        ("{half", "it is not a JSON object"),
        ("3", "it is not a JSON object"),
        (changed(schema=2), "it has schema 2; this version reads schema 1"),
        (changed(schema=True), "it has schema true"),
        (changed(prompt=None), 'it has no text "prompt"'),
        (changed(rounds=[]), "at least one round"),
        (changed(rounds=[{"out": []}]), 'round 1 has no lists "out" and "draft"'),
        (with_round(out=[token[:4]]), "round 2: out 0 is"),
        (with_round(out=[[*token[:2], 4, *token[3:]]]), "round 2: out 0 is"),
        (with_round(out=[[*token[:3], 7.5, *token[4:]]]), "round 2: out 0 is"),
        (with_round(out=[[*token[:5], -1]]), "round 2: out 0 is"),
        (with_round(draft=[own_parent]), "round 2: draft 0 is"),
        (with_round(draft=[[None, *node[1:]]]), "round 2: draft 0 is"),
        (with_round(draft=[[*node[:6], 2]]), "round 2: draft 0 is"),
    ]


def test_bad_lines_of_traces_are_left_out_with_a_notice(workdir, run):
    good = report_cases.trace(2)
    bad = bad_traces(good)
    plain = json.dumps(report_cases.plain_trace())
    lines = [json.dumps(good), *(line for line, _ in bad), "", plain]
    (workdir / "trace.jsonl").write_text("\n".join(lines))
    notices = inputs.read_traces(workdir / "trace.jsonl")[1]
    for number, ((_, message), notice) in enumerate(zip(bad, notices, strict=True), 2):
        assert notice.startswith(f"trace.jsonl line {number} is left out: ") and message in notice
    status, out, err = run(workdir)
    assert (status, err) == (0, "")
    most = inputs.MOST_NOTICES
    assert all(f"notice: {notice}" in out for notice in notices[:most])
    assert notices[most] not in out
    assert f"notice: {len(bad) - most} more lines of trace.jsonl are left out" in out
    assert "notice: trace 2 (none) has no probabilities" in out
    page = (workdir / "report.html").read_text()
    assert page.count('class="trace-data"') == 2 and len(notices_of(page)) == most + 2


def test_bad_traces_from_python_are_left_out_with_a_notice():
    for line, message in bad_traces(report_cases.trace(2))[2:]:
        page = html.render(report_cases.results(), [json.loads(line)], "t", plots={})
        assert any(text.startswith("trace 1 is left out") for text in notices_of(page)), message


def test_missing_parts_are_notices(workdir, run, monkeypatch):
    (workdir / "trace.jsonl").write_text("\n")
    assert "notice: trace.jsonl is empty" in run(workdir)[1]
    (workdir / "trace.jsonl").unlink()
    monkeypatch.setitem(sys.modules, "specjax.report.plots", None)
    monkeypatch.delattr("specjax.report.plots", raising=False)
    status, out, _ = run(workdir)
    assert status == 0
    assert "notice: there is no trace.jsonl" in out and "notice: no plots were drawn" in out
    page = (workdir / "report.html").read_text()
    assert "There is no trace to show." in page
    assert '<section id="plots"' not in page and 'id="viewer"' not in page


def test_measured_files_are_not_replaced(workdir, run):
    before = {path.name: path.read_bytes() for path in workdir.iterdir()}
    (workdir / "sub").mkdir()
    other = workdir / "sub" / "other.jsonl"
    other.write_bytes(before["trace.jsonl"])
    for out in (workdir / "results.json", workdir / "sub" / ".." / "trace.jsonl", other):
        result = run(workdir, "--trace", other, "--out", out)
        assert is_error(result, "would replace what was measured")
    assert {path.name: path.read_bytes() for path in workdir.iterdir() if path.is_file()} == before
    assert other.read_bytes() == before["trace.jsonl"]


@pytest.mark.parametrize("kind", ["bytes", "directory", "dangling"])
def test_unreadable_traces_are_a_notice_unless_the_user_named_them(workdir, run, kind):
    path = workdir / "trace.jsonl"
    path.unlink()
    if kind == "bytes":
        path.write_bytes(b"\xff\xfe")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(workdir / "gone")
    status, out, err = run(workdir)
    assert (status, err) == (0, "") and "notice: no trace is shown: trace " in out
    assert "<table" in (workdir / "report.html").read_text()
    assert is_error(run(workdir, "--trace", path), "")


def test_mistakes_on_the_command_line_are_errors(workdir, run):
    for argv, message in (
        ((), "the following arguments are required"),
        ((workdir, "--nothing"), "unrecognized arguments"),
        ((workdir, "--trace", workdir / "none.jsonl"), "none.jsonl cannot be read"),
        ((workdir, "--out", workdir / "no" / "r.html"), "cannot write the report"),
        ((workdir, "--out", workdir), "it is a directory"),
    ):
        assert is_error(run(*argv), message), argv


def test_control_characters_are_not_printed(workdir, run, capsys):
    evil = "a\x1b]0;x\x07\r\x9b\n\u202eb"
    check = {"passed": True, "detail": evil}
    row = report_cases.row(evil, evil, prompt_set=evil, lossless=check)
    results = report_cases.results([row, report_cases.row(), {"method": evil}])
    (workdir / "results.json").write_text(json.dumps(results))
    trace = report_cases.plain_trace() | {"schema": evil}
    (workdir / "trace.jsonl").write_text(json.dumps(trace) + "\n")
    status, out, err = run(workdir)
    assert (status, err) == (0, "") and "␛]0;x␇" in out and "notice: row 3 (a␛" in out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", out)
    page = (workdir / "report.html").read_text()
    assert notices_of(page)[1].startswith("row 3 (a␛]0;x␇")
    terminal.fail(f"{evil}\ud800")
    assert capsys.readouterr().err == "specjax: a␛]0;x␇␍\ufffd \ufffdb\ufffd\n"
