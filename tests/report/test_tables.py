"""The table in other formats: CSV, Markdown, LaTeX, pandas."""

from __future__ import annotations

import csv
import io
import json
import sys
import types

import pytest
import report_cases

from specjax import report
from specjax.errors import UserError
from specjax.report import html, tables

pytestmark = pytest.mark.fast

ERRORS = {"block_efficiency": 0.125, "acceptance_rate": None}


@pytest.fixture
def workdir(tmp_path):
    """A directory with two methods over all prompts and in two categories."""
    more = {"standard_errors": ERRORS, "speedup_interval": [1.2, 1.9], "class_status": "proven"}
    rows = [report_cases.row(speedup=1.5, **more), report_cases.row("a_b|c & 5%", speedup=None)]
    rows += [report_cases.row(category=name, speedup=1.5) for name in ("code", "chat")]
    results = report_cases.results(rows) | {
        "target": {"name": "tiny", "dtype": "float32"},
        "git": {"commit": "0" * 40, "dirty": False},
        "seed": 3,
    }
    (tmp_path / "results.json").write_text(json.dumps(results))
    return tmp_path


def test_csv_has_all_values_and_totals_apart_from_categories(workdir, run):
    status, out, err = run(workdir, "--format=csv")
    assert (status, err) == (0, "") and not (workdir / "report.html").exists()
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["method"] for row in rows] == ["draft_model", "a_b|c & 5%"]
    first, expected = rows[0], json.loads((workdir / "results.json").read_text())["rows"][0]
    assert first["target.name"] == "tiny" and first["seed"] == "3"
    assert first["git.dirty"] == "false" and first["warm"] == "false"
    assert float(first["block_efficiency"]) == expected["block_efficiency"]
    assert float(first["costs_ms.verify"]) == 2.9
    assert (first["speedup_interval.low"], first["speedup_interval.high"]) == ("1.2", "1.9")
    assert float(first["spread.speedup.low"]) == expected["spread"]["speedup"][0]
    assert json.loads(first["acceptance_by_depth"]) == expected["acceptance_by_depth"]
    assert first["standard_errors.acceptance_rate"] == "" and rows[1]["speedup"] == ""
    status, out, _ = run(workdir, "--format=csv", "--categories")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and [row["category"] for row in rows] == ["code", "chat"]


def test_markdown(workdir, run):
    status, out, err = run(workdir, "--format=markdown")
    assert (status, err) == (0, "")
    head, rule, first, second = out.splitlines()
    assert len({line.replace("\\|", "").count("|") for line in out.splitlines()}) == 1
    assert head.startswith("| method | rule | class | T | batch | tau | loops | alpha | tokens/s |")
    assert rule.count("---:") == 10 and "category" not in head
    assert "| L1 proven |" in first and "± 0.12 |" in first and "1.50x [1.20, 1.90]" in first
    assert r"a_b\|c & 5%" in second and "| L1 |" in second
    assert "| category |" in run(workdir, "--format=markdown", "--categories")[1]


def test_latex_is_escaped_and_uses_booktabs(workdir, run):
    status, out, err = run(workdir, "--format", "latex")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == r"\begin{tabular}{lllrrrrrrrrrrl}" and lines[-1] == r"\end{tabular}"
    assert lines[1:4:2] == [r"\toprule", r"\midrule"] and lines[-2] == r"\bottomrule"
    assert lines[2].startswith(r"method & rule & class & T & batch & $\tau$ & loops & $\alpha$ & ")
    assert all(line.endswith(r" \\") for line in lines[4:6])
    assert r"draft\_model & chain & L1 proven" in lines[4] and r"$\pm$ 0.12" in lines[4]
    assert lines[5].startswith(r"a\_b\textbar{}c \& 5\% & ")
    assert lines[4].count(" & ") == lines[5].replace(r"\&", "").count(" & ") == 13


def test_latex_has_chosen_columns_a_caption_and_a_label(workdir, run):
    chosen = ("--columns=method, tau,speed-up", "--caption=Rates ($x$)", "--label=tab:a")
    status, out, err = run(workdir, "--format=latex", *chosen)
    lines = out.splitlines()
    assert (status, err, lines[0], lines[-1]) == (0, "", r"\begin{table}", r"\end{table}")
    assert lines[1:4] == [r"\centering", r"\caption{Rates ($x$)}", r"\label{tab:a}"]
    assert r"method & $\tau$ & speed-up \\" in lines and r"\begin{tabular}{lrr}" in lines
    only = run(workdir, "--format=latex", "--label=a")[1]
    assert r"\label{a}" in only and "caption" not in only
    shown = run(workdir, "--format=markdown", "--columns=T,method")[1]
    assert shown.splitlines()[0] == "| T | method |"


ATTACKS = ("</script><script>alert(1)</script>", "=1+1", "+1", "-1", "@SUM(A1)", " \t=1")


def test_names_are_text_in_every_format():
    """A method, a category and a set of prompts with the syntax of each format."""
    rows = [
        report_cases.row(name, prompt_set=name, category=category, speedup=1.5)
        for name in ATTACKS
        for category in (None, name)
    ]
    results = report_cases.results(rows) | {"command": ATTACKS[0], "git": {"=1": ATTACKS[0]}}
    page = html.render(results, [], ATTACKS[0], plots={})
    assert page.count("<script") == len(html.SCRIPTS) and "&lt;/script&gt;&lt;script" in page
    for categories in (False, True):
        cells = [*csv.reader(io.StringIO(tables.to_csv(results, categories=categories)))]
        texts = [cell for line in cells for cell in line]
        for name in ATTACKS[1:]:
            assert f"'{name}" in texts and name not in texts
        assert ATTACKS[0] in texts and "git.=1" in texts
        latex = tables.to_latex(results, categories=categories)
        assert r"\textless{}/script\textgreater{}" in latex and "<" not in latex
        assert "\n| \\</script>" in tables.to_markdown(results, categories=categories)


def test_a_bracket_does_not_begin_a_line_of_latex():
    out = tables.to_latex(report_cases.results([report_cases.row("[a] b")]))
    assert "\n{}[a] b & " in out


def test_mistakes_are_one_line(workdir, run):
    for argv, message in (
        ((workdir, "--format=pdf"), "invalid choice: 'pdf' (choose from"),
        ((workdir, "--format=csv", "--out", "x.csv"), "--out is for the HTML report"),
        ((workdir, "--format=csv", "--trace", "x"), "--trace is for the HTML report"),
        ((workdir, "--categories"), "--categories is for --format csv, latex or markdown"),
        ((workdir, "--format=csv", "--columns=T"), "--columns is for --format latex or markdown"),
        ((workdir, "--format=latex", "--columns=x"), "column 'x' is not one of method, category,"),
        ((workdir, "--format=markdown", "--label=x"), "--label is for --format latex"),
        ((workdir, "--caption=x"), "--caption is for --format latex"),
        ((workdir / "none", "--format=csv"), "cannot be read"),
    ):
        status, out, err = run(*argv)
        assert (status, out, err.count("\n")) == (2, "", 1) and message in err, argv
    (workdir / "results.json").write_text('{"schema": 1, "rows": [{"method": "x"}]}')
    assert "has no finished rows over all prompts" in run(workdir, "--format=csv")[2]
    (workdir / "results.json").write_text(json.dumps(report_cases.results([report_cases.row()])))
    assert "has no finished rows of categories" in run(workdir, "--format=csv", "--categories")[2]


def test_rows_of_earlier_versions_and_control_characters(tmp_path, run):
    evil = "a\x1b]0;x\x07\nb"
    rows = [{"method": evil, "tokens_per_second": 3.0}, {"method": "gone"}, report_cases.row()]
    (tmp_path / "results.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    for kind in tables.FORMATS:
        status, out, err = run(tmp_path, f"--format={kind}")
        assert status == 0 and "\x1b" not in out and "gone" not in out
        assert err == "notice: row 2 (gone) is left out: it has no measurement\n"


def test_a_frame_without_pandas_is_a_clear_error(workdir, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"needs pandas: pip install 'specjax\[frame\]'"):
        report.to_frame(workdir)


def test_a_frame_has_totals_or_categories(workdir, monkeypatch):
    made = types.ModuleType("pandas")
    made.DataFrame = list  # what it is given
    monkeypatch.setitem(sys.modules, "pandas", made)
    results = json.loads((workdir / "results.json").read_text())
    for given in (workdir, str(workdir / "results.json"), results):
        totals, parts = report.to_frame(given), report.to_frame(given, categories=True)
        assert [row["method"] for row in totals] == ["draft_model", "a_b|c & 5%"]
        assert [row["category"] for row in parts] == ["code", "chat"]
        assert totals[0]["costs_ms.step"] == 2.3 and totals[0]["speedup_interval.high"] == 1.9


def test_a_frame_of_pandas(workdir):
    pandas = pytest.importorskip("pandas")
    frame = report.to_frame(workdir)
    assert isinstance(frame, pandas.DataFrame) and len(frame) == 2
    assert frame["speedup"].isna().tolist() == [False, True]
    assert frame["target.name"].tolist() == ["tiny", "tiny"]
