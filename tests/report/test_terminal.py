"""The table and the coloured traces in the terminal."""

from __future__ import annotations

import io
import time

import pytest
import report_cases
from rich.console import Console

from specjax.report import inputs, terminal

pytestmark = pytest.mark.fast


def printed(item, width: int = 120) -> list[str]:
    """The lines that the console prints."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, soft_wrap=True).print(item)
    return file.getvalue().splitlines()


def width_of(lines: list[str]) -> int:
    return max(map(len, lines))


def test_table_fits_and_accepts_malformed_rows():
    rows = [*report_cases.results()["rows"], {"method": "old [b]"}, {"method": 3, "lossless": "?"}]
    name = "token_recycling warm, twenty nodes, and more"
    rows.append(report_cases.row(name, "deterministic", tokens_per_second=123456.0))
    lines = printed(terminal.table(rows))
    assert width_of(lines) <= 120 and "eff" in lines[0] and "old [b]" in "".join(lines)
    assert any("NO, p = 2e-09" in line for line in lines)
    assert not any("stories <b>" in line for line in lines)
    assert any("0.93" in line for line in lines) and "and more" in "\n".join(lines)


def test_a_class_is_proven_or_declared_and_notes_explain_the_marks():
    rows = [report_cases.row(class_status="proven"), report_cases.row("b", system_efficiency=1.13)]
    assert terminal.notes(rows) == []
    text = "\n".join(printed(terminal.table(rows)))
    assert "L1 proven" in text and "1.13" in text
    own = report_cases.row("own", class_status="declared", system_efficiency=1.5)
    lines = printed(terminal.table([*rows, own]))
    assert "L1 declared" in lines[-1] and "n/m" in lines[-1] and "1.50" not in lines[-1]
    assert width_of(lines) <= 120
    timed = report_cases.row(speedup=1.5, speedup_interval=[1.2, 1.9])
    few = report_cases.row(speedup=1.5, speedup_interval=[0.0, 87569.0], prompts=2)
    lines = printed(terminal.table([timed, few]))
    assert [line.split()[0] for line in (lines[2], lines[4])] == ["[1.20,", "too"]
    assert width_of(lines) <= 120 and "87569" not in "".join(lines)
    efficiency, declared = terminal.notes([*rows, own])
    assert efficiency.startswith("n/m: not measurable: ") and "testing.check_drafter" in declared


def test_only_true_and_false_are_results_of_a_check():
    text = "\n".join(printed(terminal.table([report_cases.row(lossless={"passed": "no"})])))
    assert "?, neither" in text and "yes" not in text


def test_table_names_the_prompts_if_they_differ():
    row = report_cases.row
    one_set = [row(), row("other")]
    assert "prompts" not in printed(terminal.table(one_set))[0]
    long_set = row(prompt_set="mt_bench, first turns only", context=900.0)
    sets = [*one_set, row(prompt_set="humaneval"), long_set]
    lines = printed(terminal.table(sets))
    assert "prompts" in lines[0] and width_of(lines) <= 120
    assert "humaneval" in lines[3] and "stories" in lines[1]
    assert "tokens" not in lines[1].partition("chain")[0]
    lines = printed(terminal.table([row(context=float(n)) for n in (128, 512)]))
    text = " ".join(lines)
    assert "128" in text and "512" in text and width_of(lines) <= 120
    wide = row(
        "m" * 400,
        "r" * 400,
        "L" * 90,
        prompt_set="p" * 400,
        tokens_per_second=1e300,
        temperature=10**400,
    )
    assert width_of(printed(terminal.table([*sets, wide]))) <= 120


def test_trace_has_a_style_for_every_origin():
    trace = report_cases.trace(1) | {"prompt": "P[/b]\x1b]0;x\x07"}
    a, b, d = [" a", 1, 0, 0.5, 0.5, 0], [" b", 2, 1, 0.5, None, 0], ["d", 2, 2, 0.5, None, 0]
    c, e, f = ["c", 1, 0, None, None, None], ["e\x1b[31m", 9, 3, None, None, None], ["f", 9, 0]
    x, y = ["\nx", 3, 0, 0.1, 0.5, 4, 0], [" y", 4, 1, 0.1, 0.5, 4, 0]
    g = ["g", 9, 0, 0.1, 0.1, 0, 0]
    trace["rounds"] = [
        {"out": [a, b], "draft": [[" a", 1, -1, 0.5, 0.5, 0, 1], x, y]},
        {"out": [c, d], "draft": [["c", 1, -1, None, None, None, 1]]},
        {"out": [e], "draft": []},
        {"out": [[*f, None, None, None]], "draft": [["f", 9, -1, 0.1, 0.1, 0, 1], g]},
        {"out": [], "draft": []},
    ]
    assert inputs.trace_problem(trace) is None
    text = terminal.trace(trace)
    # The limit cut the text after "f", so "g" was not tested.
    assert text.plain == "P[/b]␛]0;x␇ a↵x bcde␛[31mf"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert [styles[k] for k in (" a", " b", "d", "e␛[31m")] == list(terminal.STYLES)
    assert styles["↵x"] == terminal.REJECTED
    every = {*terminal.STYLES, terminal.REJECTED}
    legend = terminal.legend()
    assert len(every) == 5 and {str(span.style) for span in legend.spans} == every
    assert len(legend.plain) <= 120


def test_rejected_nodes_are_children_of_the_last_accepted_node():
    for trace in (report_cases.trace(60), report_cases.trace(60, tree=True)):
        for one in trace["rounds"]:
            nodes = inputs.rejected_nodes(one)
            assert bool(nodes) == (one["out"][-1][2] == 1)
            assert all(node in one["draft"] and not node[6] for node in nodes)


def shown(monkeypatch, seconds: float, *messages: str) -> list[str]:
    """The lines of a status whose messages take so many seconds each, where there is no terminal;
    a second is a hundredth of one."""
    for name in ("TICK", "SOON", "OFTEN"):
        monkeypatch.setattr(terminal, name, getattr(terminal, name) / 100)
    file = io.StringIO()
    with terminal.Status(Console(file=file, width=80), messages[0]) as status:
        for message in messages:
            status.update(message)
            time.sleep(seconds / 100)
    return [line.strip() for line in file.getvalue().splitlines()]


def test_what_takes_long_is_printed_without_a_terminal(monkeypatch):
    lines = shown(monkeypatch, 45, "compiling [1] of 2", "tracing")
    assert lines[0] == "0 s  compiling [1] of 2" and lines[-1].endswith(" s  tracing")
    assert len(lines) >= 4  # every ten seconds; a busy machine prints fewer


def test_what_is_short_is_not_printed(monkeypatch):
    assert shown(monkeypatch, 0, "a", "b", "c") == []


def test_a_row_before_there_is_a_table():
    row = {"method": "suffix", "block_efficiency": 1.5, "speedup": 0.85, "tokens_per_second": 99.7}
    row["lossless"] = {"check": "greedy-identity", "passed": True, "detail": "3/3 prompts"}
    expected = "suffix: tau 1.50, 100 tokens/s, plain -, speed-up 0.85x, lossless: yes, 3/3 prompts"
    assert terminal.line(row).plain == expected
