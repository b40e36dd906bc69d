"""The report in a real browser: the table, the plots, and the page on a phone."""

from __future__ import annotations

import pytest
import report_cases
from browser_cases import LAPTOP, PHONE, inside, status

pytestmark = pytest.mark.browser


def test_the_table_sorts_and_unfolds(visit, report):
    page = visit(report)
    heads = page.locator("table.results thead th")
    speedup = heads.all_inner_texts().index("speed-up")

    def values(column: int) -> list[str]:
        script = f"all => all.map(b => b.rows[0].cells[{column}].dataset.sort)"
        return page.eval_on_selector_all("table.results > tbody", script)

    heads.nth(speedup).locator("button").click()
    numbers = [float(value) for value in values(speedup)]
    assert numbers == sorted(numbers, reverse=True)
    assert heads.nth(speedup).get_attribute("aria-sort") == "descending"
    heads.nth(speedup).locator("button").click()
    assert [float(value) for value in values(speedup)] == sorted(numbers)
    heads.nth(0).locator("button").click()
    assert values(0) == sorted(values(0)) and heads.nth(speedup).get_attribute("aria-sort") is None
    body = page.locator("table.results > tbody").filter(has=page.locator(".categories")).first
    details = body.locator("tr.more")
    assert details.is_hidden()
    body.locator(".unfold").click()
    assert details.is_visible()
    text = details.inner_text()
    assert all(part in text for part in ("Acceptance by depth", "verify 66%", "stories <b>"))
    assert body.locator(".unfold").get_attribute("aria-expanded") == "true"
    colour = "e => getComputedStyle(e).backgroundColor"
    assert details.locator(".split .part-draft").evaluate(colour) == "rgb(0, 114, 178)"


@pytest.mark.parametrize("width", [1400, 1280, 1000])
def test_plots_fit_into_their_cards(visit, report, width):
    page = visit(report, {"width": width, "height": 900})
    wider = "all => all.filter(e => e.scrollWidth > e.clientWidth).length"
    assert page.locator(".plots figure").count() == 2
    assert page.eval_on_selector_all(".plots figure", wider) == 0
    assert page.locator(".plots svg").first.bounding_box()["width"] >= 500
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_the_table_fits_into_a_laptop(visit, tmp_path):
    """With every mark that a cell can have."""
    errors = {"block_efficiency": 0.12, "acceptance_rate": 0.05}
    row = report_cases.row("token_recycling", "deterministic", class_status="declared")
    row |= {"standard_errors": errors, "system_efficiency": 1.5}
    report_cases.write(tmp_path / "a.html", report_cases.results([row]), [], "a", plots={})
    scroll = visit(tmp_path / "a.html", LAPTOP).locator(".scroll")
    assert scroll.evaluate("e => e.scrollWidth - e.clientWidth") <= 1


def test_a_long_label_does_not_make_a_high_row(visit, tmp_path):
    rows = [report_cases.row("x" * 400, prompt_set="y" * 400)]
    report_cases.write(tmp_path / "a.html", report_cases.results(rows), [], "a", plots={})
    row = visit(tmp_path / "a.html").locator("table.results > tbody > tr").first
    assert row.bounding_box()["height"] < 200


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_the_page_without_horizontal_scrolling(visit, report, dark):
    scheme = "dark" if dark else "light"
    page = visit(report, PHONE, has_touch=True, color_scheme=scheme, reduced_motion="reduce")
    page.locator(".unfold").first.tap()
    page.locator(".definitions summary").tap()
    page.locator("#choose").select_option("1")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".plots svg").first.bounding_box()["width"] >= 560  # its box scrolls
    for index in range(0, 24, 4):
        page.locator("#text .t.accepted").nth(index).tap()
        assert page.locator("#tip").is_visible() and inside(page, "#tip")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 200) == dark
    head = page.locator("table.results > tbody > tr > th").first
    assert head.evaluate("e => getComputedStyle(e).position") == "sticky"


def test_a_report_with_traces_only_and_one_without_traces(visit, tmp_path):
    traces = [report_cases.trace(3)]
    report_cases.write(tmp_path / "a.html", report_cases.results([]), traces, "a", plots={})
    assert status(visit(tmp_path / "a.html")).startswith("Round 1 of 3")
    report_cases.write(tmp_path / "b.html", report_cases.results(), [], "b", plots={})
    page = visit(tmp_path / "b.html")
    assert "There is no trace to show." in page.inner_text("body")
    assert page.locator("#viewer").count() == 0
