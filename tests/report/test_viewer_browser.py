"""The viewer of token traces in a real browser."""

from __future__ import annotations

import time

import pytest
import report_cases
from browser_cases import DIFFICULT, LAPTOP, PHONE, inside, status, until

from specjax.report import html

pytestmark = pytest.mark.browser

CURRENT_ROUND_IS_VISIBLE = """(() => {
    const box = document.getElementById('text').getBoundingClientRect();
    const top = document.querySelector('.round.now').getBoundingClientRect().top;
    return top >= box.top && top < box.bottom })()"""


def test_pointing_at_a_token_shows_its_probabilities(visit, report):
    page = visit(report)
    tip = page.locator("#tip")
    assert tip.is_hidden()
    for kind, parts in (
        ("accepted", ("accepted draft token; id", "target", "drafter", "most probable")),
        ("rejected", ("draft token, rejected", "target", "drafter", "rank")),
        ("residual", ("after a rejection", "target", "rank")),
        ("bonus", ("after a whole draft was accepted", "target")),
    ):
        page.locator(f"#text .t.{kind}").first.hover()
        assert tip.is_visible() and all(part in tip.inner_text() for part in parts), kind
        assert inside(page, "#tip")
    page.locator("#trace-head").hover()
    assert tip.is_hidden()
    page.locator("#text .t").nth(30).hover()
    page.evaluate("scrollTo(0, 0)")  # away from the token
    until(page, "document.getElementById('tip').hidden")
    page.locator("#text .t").nth(30).hover()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator("#choose").select_option("2")  # without probabilities
    page.locator("#text .t.plain").nth(3).hover()
    assert html.DASH in tip.inner_text() and "nothing was drafted" in tip.inner_text()


def test_origins_differ_without_colour(visit, report):
    page = visit(report)
    look = (
        "e => { const s = getComputedStyle(e); "
        "return s.textDecorationLine + ' ' + s.textDecorationStyle }"
    )
    kinds = ("accepted", "rejected", "residual", "bonus", "plain")
    assert len({page.locator(f".legend .t.{kind}").evaluate(look) for kind in kinds}) == 5


def test_buttons_and_keys_step_through_the_rounds(visit, report):
    page, rounds = visit(report), report_cases.trace(80)["rounds"]
    now, play = page.locator(".round.now"), page.locator("[data-go=play]")
    assert status(page).startswith("Round 1 of 80: ")
    page.locator("[data-go=next]").click()
    page.keyboard.press("ArrowRight")
    assert now.count() == 1 and now.get_attribute("data-r") == "2"
    accepted = sum(node[6] for node in rounds[2]["draft"])
    last = {1: "residual", 2: "bonus"}[rounds[2]["out"][-1][2]]
    assert status(page) == f"Round 3 of 80: {accepted} of 5 drafts accepted, {last} token"
    page.locator("[data-go=last]").click()
    assert status(page).startswith("Round 80 of 80")
    assert page.locator("[data-go=next]").is_disabled()
    until(page, CURRENT_ROUND_IS_VISIBLE)
    page.locator("#text").focus()
    for key, number in (("Home", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 80)):
        page.keyboard.press(key)
        assert status(page).startswith(f"Round {number} of 80"), key
    page.locator("#slide").fill("40")
    assert status(page).startswith("Round 40 of 80")
    play.click()
    until(page, "document.getElementById('status').textContent.startsWith('Round 41 ')")
    play.click()
    assert play.get_attribute("aria-pressed") == "false"
    page.locator("#choose").select_option("2")
    assert status(page) == "Round 1 of 30: nothing drafted, plain token"
    assert page.locator(".mark").count() == 0


def test_arrow_keys_step_wherever_the_focus_is(visit, report):
    page = visit(report)
    page.locator(".definitions summary").focus()
    page.locator("#viewer").evaluate("e => e.scrollIntoView()")
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 2 of 80")
    page.locator(".unfold").first.evaluate("e => e.focus({ preventScroll: true })")
    page.keyboard.press("ArrowLeft")
    assert status(page).startswith("Round 1 of 80")
    # A box that scrolls sideways keeps its keys, and so does the rest of the page.
    page.locator(".scroll").evaluate("e => { e.style.width = '300px' }")
    page.locator(".scroll").evaluate("e => e.focus({ preventScroll: true })")
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 1 of 80")
    page.evaluate("scrollTo(0, 0)")
    page.locator(".definitions summary").focus()
    page.evaluate("document.getElementById('trace').style.marginTop = '2000px'")  # out of sight
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 1 of 80")


def test_the_summary_of_a_long_prompt_keeps_its_keys(visit, tmp_path):
    trace = report_cases.trace(9, prompt="long " * 200)
    report_cases.write(tmp_path / "a.html", report_cases.results(), [trace], "a", plots={})
    page = visit(tmp_path / "a.html")
    page.locator(".prompt summary").focus()
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 2 of 9")
    page.locator(".prompt summary").focus()
    page.keyboard.press("Space")
    assert page.locator("details.prompt").get_attribute("open") is not None
    assert page.locator("[data-go=play]").inner_text() == "play"


def test_the_tab_key_reaches_the_tokens_of_a_round(visit, report):
    page = visit(report)
    active = "document.activeElement"
    page.locator("#text").focus()
    page.keyboard.press("Tab")
    assert "Round 1: " in page.evaluate(f"{active}.getAttribute('aria-label')")
    page.keyboard.press("Tab")
    assert page.locator("#tip").is_visible()
    assert page.evaluate(f"{active}.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("ArrowRight")  # the focus moves to the text
    assert status(page).startswith("Round 2 ") and page.evaluate(f"{active}.id") == "text"


def test_a_tree_unfolds_and_folds(visit, report):
    page, draft = visit(report), report_cases.trace(30, tree=True)["rounds"][3]["draft"]
    page.locator("#choose").select_option("1")
    mark = page.locator(".round[data-r='3'] .mark")
    mark.click()
    assert mark.get_attribute("aria-expanded") == "true" and "(a tree)" in status(page)
    nodes = page.locator("#draft tr[data-node]")
    assert nodes.count() == len(draft)
    accepted = page.locator("#draft tr.accepted").all()
    numbers = [int(row.get_attribute("data-node")) for row in accepted]
    assert numbers == [index for index, node in enumerate(draft) if node[6]]
    for row in nodes.all():
        node = draft[int(row.get_attribute("data-node"))]
        follows = "the pending token" if node[2] < 0 else f"“{draft[node[2]][0]}”"
        assert row.get_attribute("title").endswith(f"; follows {follows}")
        texts = row.locator("td").all_inner_texts()
        assert texts[1].strip() == f"{float(f'{100 * node[3]:.3g}'):g} %"
        assert texts[3] == str(node[5] + 1)
    assert "├" in page.locator("#draft").inner_text() and page.locator("#draft tr.own").count() == 1
    mark.click()
    assert page.locator("#draft").is_hidden() and mark.get_attribute("aria-expanded") == "false"
    mark.click()
    assert page.locator("#draft").is_visible()


def deep_draft(depth: int) -> list[list]:
    """A draft of that depth with two siblings at each depth, none of them accepted."""
    chain = [[f" token{n}", n, 2 * n - 2 if n else -1, 0.5, 0.5, 120, 0] for n in range(depth)]
    return [node for one in chain for node in (one, list(one))]


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_deep_tree_shows_one_line_and_the_rank_of_each_node(visit, tmp_path, size):
    trace = report_cases.trace(1)
    trace["rounds"][0]["draft"] = deep_draft(16)
    report_cases.write(tmp_path / "deep.html", report_cases.results(), [trace], "deep", plots={})
    page = visit(tmp_path / "deep.html", size)
    script = "all => all.map(r => r.offsetHeight)"
    heights = page.eval_on_selector_all("#draft tr[data-node]", script)
    assert len(heights) == 32 and max(heights) < 40
    ranks = page.locator("#draft tr[data-node] td:last-child")
    edge = page.locator("#draft").evaluate("e => e.getBoundingClientRect().left + e.clientWidth")
    for index in (0, 31):
        box = ranks.nth(index).bounding_box()
        assert box["x"] + box["width"] <= edge + 1 and ranks.nth(index).inner_text() == "121"
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


def test_keys_work_on_the_checkbox_and_greedy_traces_have_a_note(visit, tmp_path):
    traces = [report_cases.trace(9), report_cases.trace(9, temperature=1.0)]
    report_cases.write(tmp_path / "a.html", report_cases.results(), traces, "a", plots={})
    page = visit(tmp_path / "a.html")
    page.locator("#rejects").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 3 of 9")
    page.keyboard.press("Space")
    assert not page.locator("#rejects").is_checked()
    assert page.locator("[data-go=play]").inner_text() == "play"
    assert "those of temperature 1" in page.locator("#greedy").inner_text()
    page.locator("#choose").select_option("1")
    assert page.locator("#greedy").is_hidden()


def test_rejected_drafts_can_be_hidden(visit, report):
    page = visit(report)
    rejected = page.locator("#text .t.rejected").first
    assert rejected.is_visible()
    line = rejected.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert "line-through" in line
    page.locator("#rejects").uncheck()
    assert rejected.is_hidden()
    page.locator("#rejects").check()
    assert rejected.is_visible()


def test_difficult_tokens_are_visible_text(visit, report):
    page = visit(report)
    page.locator("#choose").select_option("3")
    tokens = page.locator("#text .t")
    assert tokens.count() == len(DIFFICULT) and page.locator("#text script").count() == 0
    shown = [text.replace("\u200b", "") for text in tokens.all_inner_texts()]
    assert shown[:7] == [
        "<script>",
        "</script>",
        "U+2028",
        DIFFICULT[3],
        "שלום",
        "U+202E",
        "U+001B",
    ]
    assert shown[7] == "U+00A0" and shown[9:11] == ["U+200D", "#10"] and shown[12] == "&lt;"
    assert page.locator("#text .dots").count() == 1 and all(sign in shown[11] for sign in "→↵")
    feed = tokens.nth(11).bounding_box()["y"]
    assert tokens.nth(12).bounding_box()["y"] > feed + 10  # a line feed ends the line


def test_a_hundred_thousand_tokens_open_and_step(visit, tmp_path):
    trace = report_cases.trace(31_000)
    count = len(trace["rounds"])
    assert sum(len(one["out"]) for one in trace["rounds"]) > 100_000
    report_cases.write(tmp_path / "long.html", report_cases.results(), [trace], "long", plots={})
    start = time.perf_counter()
    page = visit(tmp_path / "long.html")
    assert status(page).startswith(f"Round 1 of {count}")
    opened = time.perf_counter() - start
    page.locator("[data-go=last]").click()
    assert status(page).startswith(f"Round {count} of {count}")
    page.locator("[data-go=previous]").click()
    page.locator("#slide").fill("15000")
    # Blocks above and below are filled, and the visible text stays where it is.
    page.wait_for_timeout(200)
    assert page.evaluate(CURRENT_ROUND_IS_VISIBLE)
    assert page.locator("#text *").count() < 12_000
    # Limits for two busy cores; on an idle machine it opens in half a second.
    assert opened < 6 and time.perf_counter() - start < 15
