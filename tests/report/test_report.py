"""The report: what is rendered, what is said about input that cannot be, and the trace in the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys

import pytest
import report_cases as made
from rich.console import Console

from specjax.errors import UserError
from specjax.report import __main__ as program
from specjax.report import _canvas, cells, files, html, plots, terminal

pytestmark = pytest.mark.fast

SVG = '<?xml version="1.0"?>\n<!DOCTYPE svg><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M0 0h9"/></svg>'
NASTY = [
    "<script>",
    "</script>",
    "<!--",
    "\u2028",
    "👩‍👩‍👧",
    "שלום",
    "\u202e",
    "a&b",
    '"',
    "\ud800",
    "",
    "\n",
]


@pytest.fixture
def bench(tmp_path):
    """A workdir, and a function that writes what is to lie in it and runs the program: (status, stdout, stderr)."""
    (tmp_path / "results.json").write_text(json.dumps(made.results()))
    (tmp_path / "trace.jsonl").write_text(json.dumps(made.trace(5)) + "\n")
    return tmp_path


def call(capsys, *argv) -> tuple[int, str, str]:
    capsys.readouterr()
    status = program.main([str(a) for a in argv])
    out = capsys.readouterr()
    return status, out.out, out.err


def notices_of(page: str) -> list[str]:
    found = re.search(r'<aside class="notices".*?</aside>', page, re.S)
    return re.findall(r"<p>(.*?)</p>", found[0]) if found else []


def test_page_has_all_parts_and_asks_for_nothing():
    page = html.render(
        made.results(), [made.trace(), made.plain()], "A <title>", plots={"speedup_by_gamma": SVG}
    )
    assert "<h1>A &lt;title&gt;</h1>" in page and "stories &lt;b&gt;" in page  # names are text
    assert "AMD EPYC (Zen 3), 2 cores" in page and "--config=configs/bench.py" in page
    assert page.count("<figure") == 1 and "<?xml" not in page and "DOCTYPE svg" not in page
    outside = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(
        r"https?://|@import|url\((?!#)|<link(?! rel=\"icon\" href=\"data:,\")|\bsrc=|fetch\(|XMLHttp",
        outside,
    )
    for column in cells.COLUMNS:
        assert len(column.meaning) > 10 and column.head in page
    assert page.count('class="failed"') == 1 and page.count('class="lossy"') == 1
    assert notices_of(page) == [
        "trace 2 (none) has no probabilities: its tokens tell only where they came from"
    ]


def test_embedded_traces_are_safe_and_whole():
    rounds = [
        {"out": [[text, n, 3, None, None, None]], "draft": []} for n, text in enumerate(NASTY)
    ]
    record = made.trace(1, method="</script><b>") | {
        "rounds": rounds,
        "prompt": "</script><!--<script>",
    }
    page = html.render(made.results(), [record], "t", plots={})
    blob = re.search(
        r'<script type="application/json" class="trace-data">(.*?)</script>', page, re.S
    )[1]  # type: ignore[index]
    assert "<" not in blob and blob.isascii()
    packed = json.loads(blob)
    assert packed["prompt"] == record["prompt"]
    assert [packed["strings"][out[0]] for out, _ in packed["rounds"]] == NASTY
    assert page.count("<script") == page.count("</script>") == 4 and "</script><b>" not in page
    page.encode(errors="replace")


def test_packed_trace_keeps_values_to_three_digits():
    record = made.trace(3, tree=True)
    packed = json.loads(html.pack(record))
    for (out, draft), one in zip(packed["rounds"], record["rounds"], strict=True):
        assert len(out) == 6 * len(one["out"]) and len(draft) == 7 * len(one["draft"])
        for place, node in enumerate(one["draft"]):
            text, number, parent, target, drafted, rank, kept = draft[7 * place : 7 * place + 7]
            assert [packed["strings"][text], number, parent, rank, kept] == [*node[:3], *node[5:]]
            assert [target, drafted] == pytest.approx(node[3:5], rel=6e-3)


def test_categories_unfold_inside_their_row_or_stand_alone():
    lines = cells.lines(made.results()["rows"])
    assert len(lines) == 7 and [row[0] for row in lines[0].categories] == [
        "code",
        "stories <b>",
        "chat",
    ]
    assert not any(line.categories for line in lines[1:])
    assert lines[0].categories[0][4] == "0.810"  # its own overlap
    [alone] = cells.lines([made.row(category="code")])
    assert alone.cells[0].below == "category code"
    old = {
        "method": "x",
        "accept": "chain",
        "class": "L1",
        "tokens_per_second": 3.0,
    }  # of a version before
    [line] = cells.lines([old])
    assert [cell.text for cell in line.cells].count(cells.DASH) >= 6 and not line.facts


def test_rows_of_any_kind_do_not_break_the_page():
    odd = made.row(
        tokens=10**400, acceptance_rate=10**400, predicted_speedup=1e300, context=-(10**400),
        block_efficiency="2", speedup=float("nan"), spread=[1], costs_ms=3, overlap="no", time_split={"draft": "x"},
        lossless="yes", temperature=None, acceptance_by_depth={"1": 2}, parameters=None, prompt_set=7,
    )  # fmt: skip
    page = html.render(
        made.results([odd, {"method": 3}, "row", {"method": "new", "speedup": None}]),
        [],
        "t",
        plots={},
    )
    assert "nan" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert notices_of(page) == [
        "row 2 is left out: it is no object with a method",
        "row 3 is left out: it is no object with a method",
        "row 4 (new) is left out: it is not finished, nothing was measured",
        "there are no plots",
    ]


def test_verdict_counts_what_the_table_shows():
    said = cells.verdict(cells.lines(made.results()["rows"]))
    assert said == (
        "4 of 7 rows passed their lossless check, 1 failed, 1 could not tell or had none, 1 of class L3: lossy by design."
    )


def test_program_writes_the_report_and_the_table(bench, capsys):
    status, out, err = call(capsys, bench)
    assert (
        (status, err) == (0, "")
        and f"wrote {bench / 'report.html'}" in out
        and "prompt_lookup" in out
    )
    page = (bench / "report.html").read_text()
    assert (
        page.count('class="trace-data"') == 1
        and f"<h1>{bench.name}</h1>" in page
        and "<svg" in page
    )
    status, out, err = call(
        capsys,
        bench / "results.json",
        "--out",
        bench / "other.html",
        "--trace",
        bench / "trace.jsonl",
    )
    assert (status, err) == (0, "") and (bench / "other.html").exists()
    assert sorted(os.listdir(bench)) == ["other.html", "report.html", "results.json", "trace.jsonl"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("{rows", "is not JSON (line 1: "),
        ("[1]", "is no JSON object"),
        ('{"schema": 2, "rows": []}', "has schema 2; this version reads schema 1"),
        ('{"rows": []}', "has schema none; this version reads schema 1"),
        ('{"schema": 1}', 'has no list "rows"'),
        ('{"schema": 1, "rows": []}', "has no finished rows, and there is no trace.jsonl; there is nothing to report"),
        ('{"schema": 1, "rows": [{"method": "x", "speedup": null}]}', "has no finished rows"),
        (b"\xff\xfe", "is not UTF-8"),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_one_line_and_status_2_for_bad_results(tmp_path, capsys, text, told):
    if text is not None:
        (tmp_path / "results.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = call(capsys, tmp_path)
    assert (
        status == 2
        and out == ""
        and err.count("\n") == 1
        and err.startswith("specjax: ")
        and told in err
    )
    assert not (tmp_path / "report.html").exists()


def test_traces_are_shown_where_no_row_is_finished(bench, capsys):
    (bench / "results.json").write_text('{"schema": 1, "rows": []}')
    status, out, err = call(capsys, bench)
    assert (status, err) == (0, "") and "notice: there are no finished rows" in out
    page = (bench / "report.html").read_text()
    assert 'class="trace-data"' in page and "<table" not in page.partition("<script")[0]
    (bench / "trace.jsonl").write_text("{\n")
    status, out, err = call(capsys, bench)
    assert (
        status == 2
        and "and trace.jsonl no trace that can be shown; there is nothing to report" in err
    )


def test_every_bad_trace_line_is_named_and_the_rest_is_shown(bench, capsys):
    good = made.trace(2)

    def changed(**keys) -> str:
        return json.dumps(good | keys)

    def round_with(**keys) -> str:
        return changed(rounds=[good["rounds"][0], good["rounds"][0] | keys])

    token, node = good["rounds"][0]["out"][0], good["rounds"][0]["draft"][0]
    bad = [
        ("{half", "it is no JSON object"),
        ("3", "it is no JSON object"),
        (changed(schema=2), "it has schema 2; this version reads schema 1"),
        (changed(schema=True), "it has schema true"),
        (changed(prompt=None), 'it has no text "prompt"'),
        (changed(rounds=[]), "at least one round"),
        (changed(rounds=[{"out": []}]), 'round 1 has no lists "out" and "draft"'),
        (round_with(out=[token[:4]]), "round 2: out 0 is"),
        (round_with(out=[[*token[:2], 4, *token[3:]]]), "round 2: out 0 is"),
        (round_with(out=[[*token[:3], 7.5, *token[4:]]]), "round 2: out 0 is"),
        (round_with(out=[[*token[:5], -1]]), "round 2: out 0 is"),
        (round_with(draft=[[*node[:2], 0, *node[3:]]]), "round 2: draft 0 is"),  # its own parent
        (round_with(draft=[[None, *node[1:]]]), "round 2: draft 0 is"),
        (round_with(draft=[[*node[:6], 2]]), "round 2: draft 0 is"),
    ]
    lines = [json.dumps(good), *(line for line, _ in bad), "", json.dumps(made.plain())]
    (bench / "trace.jsonl").write_text("\n".join(lines))
    every = files.traces(bench / "trace.jsonl")[1]
    for number, ((_, told), said) in enumerate(zip(bad, every, strict=True), 2):
        assert said.startswith(f"trace.jsonl line {number} is left out: ") and told in said
    status, out, err = call(capsys, bench)
    assert (status, err) == (0, "")
    assert (
        all(f"notice: {said}" in out for said in every[: files.FEW]) and every[files.FEW] not in out
    )
    assert f"notice: {len(bad) - files.FEW} more lines of trace.jsonl are left out" in out
    assert "notice: trace 2 (none) has no probabilities" in out
    page = (bench / "report.html").read_text()
    assert page.count('class="trace-data"') == 2 and len(notices_of(page)) == files.FEW + 2
    for line, told in bad[2:]:  # the same where there is no file
        page = html.render(made.results(), [json.loads(line)], "t", plots={})
        assert any(text.startswith("trace 1 is left out") for text in notices_of(page)), told


def test_missing_parts_are_notices(bench, capsys, monkeypatch):
    (bench / "trace.jsonl").write_text("\n")
    assert "notice: trace.jsonl is empty" in call(capsys, bench)[1]
    (bench / "trace.jsonl").unlink()
    monkeypatch.setitem(sys.modules, "specjax.report.plots", None)
    monkeypatch.delattr("specjax.report.plots", raising=False)
    status, out, _ = call(capsys, bench)
    assert (
        status == 0
        and "notice: there is no trace.jsonl" in out
        and "notice: no plots were drawn" in out
    )
    page = (bench / "report.html").read_text()
    assert (
        "There is no trace to show." in page
        and '<section id="plots"' not in page
        and 'id="viewer"' not in page
    )


def test_the_report_never_replaces_what_was_measured(bench, capsys):
    before = {path.name: path.read_bytes() for path in bench.iterdir()}
    (bench / "sub").mkdir()
    other = bench / "sub" / "other.jsonl"
    other.write_bytes(before["trace.jsonl"])
    for out in (bench / "results.json", bench / "sub" / ".." / "trace.jsonl", other):
        status, said, err = call(capsys, bench, "--trace", other, "--out", out)
        assert (
            status == 2
            and said == ""
            and err.count("\n") == 1
            and "would replace what was measured" in err
        )
    assert {path.name: path.read_bytes() for path in bench.iterdir() if path.is_file()} == before
    assert other.read_bytes() == before["trace.jsonl"]


@pytest.mark.parametrize("kind", ["bytes", "directory", "dangling"])
def test_traces_that_cannot_be_read_are_a_notice_unless_named(bench, capsys, kind):
    path = bench / "trace.jsonl"
    path.unlink()
    if kind == "bytes":
        path.write_bytes(b"\xff\xfe")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(bench / "gone")
    status, out, err = call(capsys, bench)
    assert (status, err) == (0, "") and "notice: no trace is shown: trace " in out
    assert "<table" in (bench / "report.html").read_text()
    status, out, err = call(capsys, bench, "--trace", path)
    assert status == 2 and out == "" and err.count("\n") == 1


def test_many_notices_of_a_kind_are_counted():
    rows = [made.row(), *({"method": f"m{n}"} for n in range(2000))]
    traces = [made.plain() for _ in range(9)] + [{}] * 1100
    said = notices_of(html.render(made.results(rows), traces, "t", plots={"one": SVG}))
    assert len(said) == 3 * (files.FEW + 1)
    assert [text for text in said if "more" in text] == [
        "1,995 more rows are left out", "1,095 more traces are left out", "4 more traces have no probabilities"
    ]  # fmt: skip
    assert files.few(["a"] * 6, "are out") == ["a"] * 6  # nothing is won by counting one


def test_no_finding_but_true_and_false():
    found = [
        cells.lines([made.row(lossless={"check": "c", "passed": value, "detail": "d"})])[0]
        .cells[-1]
        .text
        for value in (True, False, None, "no", 1)
    ]
    assert found == ["yes", "NO", "?", "?", "?"]
    text = shown(terminal.table([made.row(lossless={"passed": "no"})]))
    assert "?, -" in text and "yes" not in text


def test_long_names_are_cut_and_whole_on_pointing():
    long = "x" * 400
    page = html.render(
        made.results([made.row(long, drafter="d"), made.row(long, category=long)]),
        [],
        "t",
        plots={},
    )
    assert f'title="{long}"' in page and f">{long}" not in page
    assert f">{cells.short(long)}<" in page and len(cells.short(long)) == cells.MOST
    [line] = cells.lines([made.row(prompt_set=long)])
    assert len(line.cells[5].text) < 30 and line.cells[5].whole == long
    assert len(html._label(1, made.trace(1, method=long))) < 200


def test_costs_tell_their_spread_and_what_cannot_be_true():
    def facts(**keys) -> dict:
        return dict(cells.lines([made.row(**keys)])[0].facts)

    told = facts(spread={"costs_ms": {"step": [2.1, 2.6], "draft": [1]}})
    assert (
        told["step"] == f"2.3 ms (2.1{cells.DASH}2.6)"
        and told["draft"] == "1.1 ms"
        and "hint" not in told
    )
    cheap = facts(costs_ms={"step": 2.3, "draft": 1, "verify": 2.2}, system_efficiency=1.2)
    assert cheap["hint"].startswith(
        "verification was measured cheaper than a one-token pass: the machine was busy"
    )
    assert "above what the costs of the parts allow" in facts(system_efficiency=1.06)["hint"]


def test_the_time_split_has_the_order_and_the_colours_of_its_plot():
    assert cells.PARTS == plots.PARTS
    style = html._asset("style.css")
    for part, colour in zip(cells.PARTS, _canvas.COLOURS, strict=False):
        assert f".part-{part} {{ --part: {colour.lower()} }}" in style
    [line] = cells.lines([made.row(time_split={"other": 0.1, "host": 0.2, "draft": 0.7})])
    assert [bar.head for bar in line.split] == ["draft", "host", "other"]


def test_greedy_traces_say_whose_probabilities_they_show():
    packed = [
        json.loads(html.pack(made.trace(1, temperature=t)))["greedy"] for t in (0.0, 0, 0.7, None)
    ]
    assert packed == [True, True, False, False]
    assert any("at temperature 0" in meaning for _, meaning in cells.DETAILS)


def test_other_mistakes_of_the_command_line(bench, capsys):
    for argv, told in (
        ((), "the following arguments are required"),
        ((bench, "--nothing"), "unrecognized arguments"),
        ((bench, "--trace", bench / "none.jsonl"), "none.jsonl cannot be read"),
        ((bench, "--out", bench / "no" / "r.html"), "cannot write the report"),
        ((bench, "--out", bench), "it is a directory"),
    ):
        status, _, err = call(capsys, *argv)
        assert status == 2 and err.count("\n") == 1 and told in err, argv


def test_a_failed_write_leaves_the_old_report(bench, monkeypatch):
    path = bench / "report.html"
    path.write_text("old")
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(UserError, match="No space left on device"):
        html.write(path, made.results(), [], "t", plots={})
    assert path.read_text() == "old" and len(os.listdir(bench)) == 3


def shown(item, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, soft_wrap=True)
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_terminal_table_fits_and_tolerates():
    rows = [*made.results()["rows"], {"method": "old [b]"}, {"method": 3, "lossless": "?"}]
    rows.append(
        made.row(
            "token_recycling warm, twenty nodes, and more",
            "deterministic",
            tokens_per_second=123456.0,
        )
    )
    lines = shown(terminal.table(rows)).splitlines()
    assert max(map(len, lines)) <= 120 and "eff" in lines[0] and "old [b]" in "".join(lines)
    assert any("NO, p = 2e-09" in line for line in lines) and not any(
        "stories <b>" in line for line in lines
    )
    assert any("0.93" in line for line in lines) and "and more" in shown(terminal.table(rows))


def test_terminal_table_tells_prompts_apart_where_they_differ():
    one = [made.row(), made.row("other")]
    assert "prompts" not in shown(terminal.table(one)).splitlines()[0]
    sets = [
        *one,
        made.row(prompt_set="humaneval"),
        made.row(prompt_set="mt_bench, first turns only", context=900.0),
    ]
    lines = shown(terminal.table(sets)).splitlines()
    assert "prompts" in lines[0] and max(map(len, lines)) <= 120
    assert (
        "humaneval" in lines[3]
        and "stories" in lines[1]
        and "tokens" not in lines[1].partition("chain")[0]
    )
    lines = shown(terminal.table([made.row(context=float(n)) for n in (128, 512)])).splitlines()
    text = " ".join(lines)
    assert "128" in text and "512" in text and max(map(len, lines)) <= 120
    wide = made.row(
        "m" * 400,
        "r" * 400,
        "L" * 90,
        prompt_set="p" * 400,
        tokens_per_second=1e300,
        temperature=10**400,
    )
    assert max(map(len, shown(terminal.table([*sets, wide])).splitlines())) <= 120


def test_nothing_that_a_terminal_obeys_is_printed(bench, capsys):
    evil = "a\x1b]0;x\x07\r\x9b\n\u202eb"
    row = made.row(evil, evil, prompt_set=evil, lossless={"passed": True, "detail": evil})
    (bench / "results.json").write_text(
        json.dumps(made.results([row, made.row(), {"method": evil}]))
    )
    (bench / "trace.jsonl").write_text(json.dumps(made.plain() | {"schema": evil}) + "\n")
    status, out, err = call(capsys, bench)
    assert (status, err) == (0, "") and "␛]0;x␇" in out and "notice: row 3 (a␛" in out
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800]", out)
    assert notices_of((bench / "report.html").read_text())[1].startswith("row 3 (a␛]0;x␇")
    terminal.fail(f"{evil}\ud800")
    assert capsys.readouterr().err == "specjax: a␛]0;x␇␍\ufffd \ufffdb\ufffd\n"


def test_terminal_trace_colours_every_origin():
    record = made.trace(1) | {"prompt": "P[/b]\x1b]0;x\x07"}
    record["rounds"] = [
        {"out": [[" a", 1, 0, 0.5, 0.5, 0], [" b", 2, 1, 0.5, None, 0]],
         "draft": [[" a", 1, -1, 0.5, 0.5, 0, 1], ["\nx", 3, 0, 0.1, 0.5, 4, 0], [" y", 4, 1, 0.1, 0.5, 4, 0]]},
        {"out": [["c", 1, 0, None, None, None], ["d", 2, 2, 0.5, None, 0]], "draft": [["c", 1, -1, None, None, None, 1]]},
        {"out": [["e\x1b[31m", 9, 3, None, None, None]], "draft": []},
        {"out": [["f", 9, 0, None, None, None]], "draft": [["f", 9, -1, 0.1, 0.1, 0, 1], ["g", 9, 0, 0.1, 0.1, 0, 0]]},
        {"out": [], "draft": []},
    ]  # fmt: skip
    assert files.problem(record | {"rounds": record["rounds"]}) is None
    text = terminal.trace(record)
    assert text.plain == "P[/b]␛]0;x␇ a↵x bcde␛[31mf"  # cut by the limit, "g" was never tested
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert [styles[k] for k in (" a", " b", "d", "e␛[31m")] == list(terminal.STYLES) and styles[
        "↵x"
    ] == terminal.REJECTED
    assert len({*terminal.STYLES, terminal.REJECTED}) == 5
    legend = terminal.legend()
    assert {str(span.style) for span in legend.spans} == {
        *terminal.STYLES,
        terminal.REJECTED,
    } and len(legend.plain) <= 120


def test_rejected_children_of_the_last_kept_node():
    for record in (made.trace(60), made.trace(60, tree=True)):
        for one in record["rounds"]:
            found = files.rejected(one)
            assert bool(found) == (one["out"][-1][2] == 1) and all(
                node in one["draft"] and not node[6] for node in found
            )
