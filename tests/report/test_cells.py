"""The lines of the report's table, made from rows of results.json."""

from __future__ import annotations

import pytest
import report_cases

from specjax.report import canvas, columns, html, inputs

pytestmark = pytest.mark.fast


def test_categories_are_details_of_their_row_or_have_a_line():
    lines = html.lines(report_cases.results()["rows"])
    names = [row[0] for row in lines[0].categories]
    assert len(lines) == 7 and names == ["code", "stories <b>", "chat"]
    assert not any(line.categories for line in lines[1:])
    assert lines[0].categories[0][5] == "0.810"  # the overlap of the category's row
    [alone] = html.lines([report_cases.row(category="code")])
    assert alone.cells[0].below == "category code"


def test_categories_of_several_lengths_are_details_of_their_own_row():
    def rows(context: float, *parts: float) -> list[dict]:
        names = ("code", "chat")
        categories = [
            report_cases.row(category=name, context=each, tokens_per_second=each)
            for name, each in zip(names, parts, strict=True)
        ]
        return [report_cases.row(context=context), *categories]

    for one, other in [((20.0, 11.0, 33.0), (90.0, 81.0, 97.0)), ((5.0, 5, 5), (9.0, 9, 9))]:
        lines = html.lines([*rows(*one), *rows(*other)])
        speeds = [[float(part[6]) for part in line.categories] for line in lines]
        assert speeds == [list(one[1:]), list(other[1:])]


def test_classes_errors_and_intervals():
    """And a system efficiency far above 1 is not shown as a measurement."""
    errors = {"block_efficiency": 0.123, "acceptance_rate": 0.05}
    row = report_cases.row(class_status="declared", standard_errors=errors)
    row |= {"speedup_interval": [1.1, 2.25], "system_efficiency": 1.45}
    [line] = html.lines([row])
    by_key = {column.key: cell for column, cell in zip(columns.COLUMNS, line.cells, strict=True)}
    assert (by_key["class"].text, by_key["class"].below) == ("L1", "declared")
    assert by_key["block_efficiency"].below == "± 0.12"
    assert by_key["acceptance_rate"].below == "± 0.05"
    efficiency = by_key["system_efficiency"]
    assert (efficiency.text, efficiency.below) == (columns.NOT_MEASURABLE, "1.45")
    assert by_key["speedup"].below == "[1.10, 2.25]"
    assert html.DASH in dict(line.facts)["speed-up of the passes"]
    [usual] = html.lines([row | {"system_efficiency": 1.13, "class": "L3", "class_status": None}])
    assert "1.13" in [cell.text for cell in usual.cells]
    assert [cell.below for cell in usual.cells if cell.style == "lossy"] == ["lossy"]


def test_an_interval_of_two_prompts_or_batches_is_too_few():
    """And a row of an earlier version, without an interval, has none."""
    cases = {(2, 1): "too few", (1, 1): "too few", (8, 4): "too few", (9, 4): "[0.10, 9.00]"}
    for (prompts, batch), expected in cases.items():
        keys = {"prompts": prompts, "batch_size": batch, "speedup_interval": [0.1, 9.0]}
        assert columns.interval(report_cases.row(**keys)) == expected
    assert columns.interval(report_cases.row()) == ""
    assert columns.interval(report_cases.row(prompts=1, speedup=None)) == ""


def test_rows_of_earlier_versions_have_dashes():
    old = {"method": "x", "accept": "chain", "class": "L1", "tokens_per_second": 3.0}
    [line] = html.lines([old])
    assert [cell.text for cell in line.cells].count(html.DASH) >= 6 and not line.facts


def test_verdict_counts_the_lines_of_the_table():
    assert html.verdict(html.lines(report_cases.results()["rows"])) == (
        "4 of 7 rows passed their lossless check, 1 failed, 1 had no check or no clear result, "
        "1 of class L3: lossy by design."
    )


def test_only_true_and_false_are_results_of_a_check():
    texts = []
    for value in (True, False, None, "no", 1):
        check = {"check": "c", "passed": value, "detail": "d"}
        texts.append(html.lines([report_cases.row(lossless=check)])[0].cells[-1].text)
    assert texts == ["yes", "NO", "?", "?", "?"]


def test_long_text_is_cut_and_kept_in_full():
    long = "x" * 400
    [line] = html.lines([report_cases.row(prompt_set=long)])
    assert len(line.cells[5].text) < 30 and line.cells[5].full == long


def test_costs_have_a_spread_and_a_hint_if_they_cannot_be_right():
    def facts(**keys) -> dict:
        return dict(html.lines([report_cases.row(**keys)])[0].facts)

    usual = facts(spread={"costs_ms": {"step": [2.1, 2.6], "draft": [1]}})
    assert usual["step"] == f"2.3 ms (2.1{html.DASH}2.6)" and usual["draft"] == "1.1 ms"
    assert "hint" not in usual
    cheap = facts(costs_ms={"step": 2.3, "draft": 1, "verify": 2.2}, system_efficiency=1.2)
    assert cheap["hint"].startswith(
        "verification took less time than a one-token pass: the machine was busy"
    )
    assert "above what the costs of the parts allow" in facts(system_efficiency=1.06)["hint"]


def test_time_split_has_the_order_and_the_colours_of_its_plot():
    style = html._asset("style.css")
    for part, colour in zip(inputs.TIME_PARTS, canvas.COLOURS, strict=False):
        assert f".part-{part} {{ --part: {colour.lower()} }}" in style
    [line] = html.lines([report_cases.row(time_split={"other": 0.1, "host": 0.2, "draft": 0.7})])
    assert [bar.head for bar in line.split] == ["draft", "host", "other"]


def test_a_lossy_rule_without_a_verdict_is_not_said_to_have_too_few_tokens():
    check = {"check": "law", "passed": None, "detail": "900 tokens, p = 0.5; the rule is lossy"}
    cases = ("L1", 1.0, "too few tokens"), ("L2", 0.0, "too few tokens")
    for kind, heat, why in (*cases, ("L2", 1.0, "lossy by design"), ("L3", 0.0, "lossy by design")):
        row = report_cases.row(lossless=check) | {"class": kind, "temperature": heat}
        [line] = html.lines([row])
        keys = [column.key for column in columns.COLUMNS]
        cell = line.cells[keys.index("lossless")]
        assert (cell.text, cell.below) == ("?", why)
