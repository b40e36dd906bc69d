"""The report in a real browser: it asks for nothing, and everything on it can be pointed at, stepped through and read."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import report_cases as made

from specjax.report import cells, html

sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync"]  # fmt: skip
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="640pt" viewBox="0 0 640 300"><path d="M0 0h640v300"/></svg>'
SEEN = """(() => { const box = document.getElementById('text').getBoundingClientRect();
    const top = document.querySelector('.round.now').getBoundingClientRect().top;
    return top >= box.top && top < box.bottom })()"""
STRANGE = [
    "<script>",
    "</script>",
    "\u2028",
    "👩‍👩‍👧",
    "שלום",
    "\u202e",
    "\x1b",
    "\u00a0",
    "  ",
    "\u200d",
    "",
    " a\tb\n",
    "&lt;",
]


@pytest.fixture(scope="module")
def browser():
    named = os.environ.get("SPECJAX_CHROMIUM")
    found = named or next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if not found:
        pytest.skip("no Chromium is installed; install one, or let SPECJAX_CHROMIUM name it")
    with sync.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=ARGS)
        yield started
        started.close()


def deep(depth: int) -> list[list]:
    """A draft of that depth, two siblings each, none of them kept."""
    chain = [[f" token{n}", n, 2 * n - 2 if n else -1, 0.5, 0.5, 120, 0] for n in range(depth)]
    return [node for one in chain for node in (one, list(one))]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The file of a report with four traces: a chain, trees, plain decoding without probabilities, strange tokens."""
    strange = [{"out": [[text, n, 3, 0.5, None, 0]], "draft": []} for n, text in enumerate(STRANGE)]
    traces = [
        made.trace(80),
        made.trace(30, tree=True),
        made.plain(),
        made.trace(1, method="strange") | {"rounds": strange},
    ]
    path = tmp_path_factory.mktemp("report") / "report.html"
    html.write(
        path,
        made.results(),
        traces,
        "Stories",
        plots={"one": SVG, "two": SVG},
        notices=["line 3 is left out: why"],
    )
    return path


@pytest.fixture
def visit(browser):
    """Opens a file: the page. Afterwards: it asked for nothing, and had no error to tell."""
    contexts, asked, said = [], [], []

    def opens(path, size=LAPTOP, **keys):
        contexts.append(browser.new_context(viewport=size, offline=True, **keys))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        asked.remove(path.as_uri())
        return page

    yield opens
    for context in contexts:
        context.close()
    assert [url for url in asked if not url.startswith("data:")] == [] and said == []


def status(page) -> str:
    return page.locator("#status").inner_text()


def until(page, condition: str) -> None:
    """Waits for a condition. (The page's own policy forbids what ``wait_for_function`` does.)"""
    ends = time.monotonic() + 5
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(20)


def inside(page, selector: str) -> bool:
    box, size = page.locator(selector).bounding_box(), page.viewport_size
    return (
        box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


def test_pointing_at_tokens_tells_their_probabilities(visit, report):
    page = visit(report)
    tip = page.locator("#tip")
    assert tip.is_hidden()
    for kind, words in (
        ("accepted", ("accepted draft token; id", "target", "drafter", "most probable")),
        ("rejected", ("draft token, rejected", "target", "drafter", "rank")),
        ("residual", ("after a rejection", "target", "rank")),
        ("bonus", ("after a whole draft was accepted", "target")),
    ):
        page.locator(f"#text .t.{kind}").first.hover()
        assert tip.is_visible() and all(word in tip.inner_text() for word in words), kind
        assert inside(page, "#tip")
    page.locator("#trace-head").hover()
    assert tip.is_hidden()
    page.locator("#text .t").nth(30).hover()
    page.evaluate("scrollTo(0, 0)")  # away from it
    until(page, "document.getElementById('tip').hidden")
    page.locator("#text .t").nth(30).hover()
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.locator("#choose").select_option("2")  # without probabilities
    page.locator("#text .t.plain").nth(3).hover()
    assert cells.DASH in tip.inner_text() and "nothing was drafted" in tip.inner_text()


def test_kinds_differ_without_colour(visit, report):
    page = visit(report)
    look = "e => { const s = getComputedStyle(e); return s.textDecorationLine + ' ' + s.textDecorationStyle }"
    kinds = ("accepted", "rejected", "residual", "bonus", "plain")
    assert len({page.locator(f".legend .t.{kind}").evaluate(look) for kind in kinds}) == 5


def test_rounds_are_stepped_through_by_buttons_and_keys(visit, report):
    page, rounds = visit(report), made.trace(80)["rounds"]
    assert status(page).startswith("Round 1 of 80: ")
    page.locator("[data-go=next]").click()
    page.keyboard.press("ArrowRight")
    assert (
        page.locator(".round.now").get_attribute("data-r") == "2"
        and page.locator(".round.now").count() == 1
    )
    kept = sum(node[6] for node in rounds[2]["draft"])
    last = {1: "residual", 2: "bonus"}[rounds[2]["out"][-1][2]]
    assert status(page) == f"Round 3 of 80: {kept} of 5 drafts accepted, {last} token"
    page.locator("[data-go=last]").click()
    assert (
        status(page).startswith("Round 80 of 80") and page.locator("[data-go=next]").is_disabled()
    )
    until(page, SEEN)  # it glides there
    page.locator("#text").focus()
    for key, number in (("Home", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 80)):
        page.keyboard.press(key)
        assert status(page).startswith(f"Round {number} of 80"), key
    page.locator("#slide").fill("40")
    assert status(page).startswith("Round 40 of 80")
    page.locator("[data-go=play]").click()
    until(page, "document.getElementById('status').textContent.startsWith('Round 41 ')")
    page.locator("[data-go=play]").click()
    assert page.locator("[data-go=play]").get_attribute("aria-pressed") == "false"
    page.locator("#choose").select_option("2")
    assert (
        status(page) == "Round 1 of 30: nothing drafted, plain token"
        and page.locator(".mark").count() == 0
    )


def test_the_tab_key_walks_through_the_tokens_of_a_round(visit, report):
    page = visit(report)
    page.locator("#text").focus()
    page.keyboard.press("Tab")
    assert "Round 1: " in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Tab")
    assert page.locator("#tip").is_visible()
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "tip"
    page.keyboard.press("ArrowRight")  # goes on from the text itself
    assert (
        status(page).startswith("Round 2 ") and page.evaluate("document.activeElement.id") == "text"
    )


def test_a_tree_unfolds_and_folds(visit, report):
    page, draft = visit(report), made.trace(30, tree=True)["rounds"][3]["draft"]
    page.locator("#choose").select_option("1")
    mark = page.locator(".round[data-r='3'] .mark")
    mark.click()
    assert mark.get_attribute("aria-expanded") == "true" and "(a tree)" in status(page)
    nodes = page.locator("#draft tr[data-node]")
    assert nodes.count() == len(draft)
    kept = [int(row.get_attribute("data-node")) for row in page.locator("#draft tr.kept").all()]
    assert kept == [place for place, node in enumerate(draft) if node[6]]
    for row in nodes.all():
        place = int(row.get_attribute("data-node"))
        parent = draft[place][2]
        follows = "the pending token" if parent < 0 else f"“{draft[parent][0]}”"
        assert row.get_attribute("title").endswith(f"; follows {follows}")
        numbers = row.locator("td").all_inner_texts()
        assert numbers[1].strip() == f"{float(f'{100 * draft[place][3]:.3g}'):g} %" and numbers[
            3
        ] == str(draft[place][5] + 1)
    assert "├" in page.locator("#draft").inner_text() and page.locator("#draft tr.own").count() == 1
    mark.click()
    assert page.locator("#draft").is_hidden() and mark.get_attribute("aria-expanded") == "false"
    mark.click()
    assert page.locator("#draft").is_visible()


@pytest.mark.parametrize("size", [LAPTOP, PHONE])
def test_a_deep_tree_keeps_its_lines_and_its_ranks(visit, tmp_path, size):
    record = made.trace(1)
    record["rounds"][0]["draft"] = deep(16)
    html.write(tmp_path / "deep.html", made.results(), [record], "deep", plots={})
    page = visit(tmp_path / "deep.html", size)
    heights = page.eval_on_selector_all(
        "#draft tr[data-node]", "all => all.map(r => r.offsetHeight)"
    )
    assert len(heights) == 32 and max(heights) < 40  # one line each
    ranks = page.locator("#draft tr[data-node] td:last-child")
    edge = page.locator("#draft").evaluate("e => e.getBoundingClientRect().left + e.clientWidth")
    for place in (0, 31):
        box = ranks.nth(place).bounding_box()
        assert box["x"] + box["width"] <= edge + 1 and ranks.nth(place).inner_text() == "121"
    assert page.evaluate("document.documentElement.scrollWidth") == size["width"]


def test_keys_step_from_the_checkbox_and_greedy_is_explained(visit, tmp_path):
    html.write(
        tmp_path / "a.html",
        made.results(),
        [made.trace(9), made.trace(9, temperature=1.0)],
        "a",
        plots={},
    )
    page = visit(tmp_path / "a.html")
    page.locator("#rejects").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert status(page).startswith("Round 3 of 9")
    page.keyboard.press("Space")
    assert (
        not page.locator("#rejects").is_checked()
        and page.locator("[data-go=play]").inner_text() == "play"
    )
    assert "those of temperature 1" in page.locator("#greedy").inner_text()
    page.locator("#choose").select_option("1")
    assert page.locator("#greedy").is_hidden()


def test_rejected_drafts_can_be_hidden(visit, report):
    page = visit(report)
    rejected = page.locator("#text .t.rejected").first
    assert rejected.is_visible() and "line-through" in rejected.evaluate(
        "e => getComputedStyle(e).textDecorationLine"
    )
    page.locator("#rejects").uncheck()
    assert rejected.is_hidden()
    page.locator("#rejects").check()
    assert rejected.is_visible()


def test_strange_tokens_are_seen_and_obeyed_by_nobody(visit, report):
    page = visit(report)
    page.locator("#choose").select_option("3")
    texts = page.locator("#text .t").all_inner_texts()
    assert (
        page.locator("#text .t").count() == len(STRANGE)
        and page.locator("#text script").count() == 0
    )
    shown = [text.replace("\u200b", "") for text in texts]
    assert shown[:7] == ["<script>", "</script>", "U+2028", "👩‍👩‍👧", "שלום", "U+202E", "U+001B"]
    assert shown[7] == "U+00A0" and shown[9:11] == ["U+200D", "#10"] and shown[12] == "&lt;"
    assert page.locator("#text .dots").count() == 1 and all(sign in shown[11] for sign in "→↵")
    feed = page.locator("#text .t").nth(11).bounding_box()["y"]
    assert page.locator("#text .t").nth(12).bounding_box()["y"] > feed + 10  # the line ended there


def test_the_table_sorts_and_unfolds(visit, report):
    page = visit(report)
    heads = page.locator("table.results thead th")
    place = heads.all_inner_texts().index("speed-up")

    def values(cell: int) -> list[str]:
        return page.eval_on_selector_all(
            "table.results > tbody", f"all => all.map(b => b.rows[0].cells[{cell}].dataset.sort)"
        )

    heads.nth(place).locator("button").click()
    numbers = [float(value) for value in values(place)]
    assert (
        numbers == sorted(numbers, reverse=True)
        and heads.nth(place).get_attribute("aria-sort") == "descending"
    )
    heads.nth(place).locator("button").click()
    assert [float(value) for value in values(place)] == sorted(numbers)
    heads.nth(0).locator("button").click()
    assert values(0) == sorted(values(0)) and heads.nth(place).get_attribute("aria-sort") is None
    body = page.locator("table.results > tbody").filter(has=page.locator(".categories")).first
    more = body.locator("tr.more")
    assert more.is_hidden()
    body.locator(".unfold").click()
    assert more.is_visible() and all(
        word in more.inner_text() for word in ("Acceptance by depth", "verify 66%", "stories <b>")
    )
    assert body.locator(".unfold").get_attribute("aria-expanded") == "true"
    colour = "e => getComputedStyle(e).backgroundColor"
    assert more.locator(".split .part-draft").evaluate(colour) == "rgb(0, 114, 178)"


def test_a_long_label_does_not_make_a_high_row(visit, tmp_path):
    html.write(
        tmp_path / "a.html",
        made.results([made.row("x" * 400, prompt_set="y" * 400)]),
        [],
        "a",
        plots={},
    )
    assert (
        visit(tmp_path / "a.html")
        .locator("table.results > tbody > tr")
        .first.bounding_box()["height"]
        < 200
    )


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_without_scrolling_sideways(visit, report, dark):
    page = visit(
        report,
        PHONE,
        has_touch=True,
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
    )
    page.locator(".unfold").first.tap()
    page.locator(".words summary").tap()
    page.locator("#choose").select_option("1")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".plots svg").first.bounding_box()["width"] >= 560  # its box scrolls
    for place in range(0, 24, 4):
        page.locator("#text .t.accepted").nth(place).tap()
        assert page.locator("#tip").is_visible() and inside(page, "#tip")
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 200) == dark
    assert (
        page.locator("table.results > tbody > tr > th").first.evaluate(
            "e => getComputedStyle(e).position"
        )
        == "sticky"
    )


def test_a_hundred_thousand_tokens_open_and_step(visit, tmp_path):
    record = made.trace(31_000)
    count = len(record["rounds"])
    assert sum(len(one["out"]) for one in record["rounds"]) > 100_000
    html.write(tmp_path / "long.html", made.results(), [record], "long", plots={})
    began = time.perf_counter()
    page = visit(tmp_path / "long.html")
    assert status(page).startswith(f"Round 1 of {count}")
    opened = time.perf_counter() - began
    page.locator("[data-go=last]").click()
    assert status(page).startswith(f"Round {count} of {count}")
    page.locator("[data-go=previous]").click()
    page.locator("#slide").fill("15000")
    page.wait_for_timeout(
        200
    )  # blocks above and below are built, and what is read stays where it is
    assert page.evaluate(SEEN)
    assert page.locator("#text *").count() < 12_000
    assert (
        opened < 6 and time.perf_counter() - began < 15
    )  # two busy cores; alone it opens in half a second


def test_a_report_of_nothing_but_traces_and_one_without(visit, tmp_path):
    html.write(tmp_path / "a.html", made.results([]), [made.trace(3)], "a", plots={})
    assert status(visit(tmp_path / "a.html")).startswith("Round 1 of 3")
    html.write(tmp_path / "b.html", made.results(), [], "b", plots={})
    page = visit(tmp_path / "b.html")
    assert (
        "There is no trace to show." in page.inner_text("body")
        and page.locator("#viewer").count() == 0
    )
