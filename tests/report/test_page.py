"""The HTML page: what it shows, and notices on what it cannot show."""

from __future__ import annotations

import json
import os
import re

import pytest
import report_cases
from report_cases import notices_of

from specjax.errors import UserError
from specjax.report import columns, html, inputs

pytestmark = pytest.mark.fast

SVG = (
    '<?xml version="1.0"?>\n<!DOCTYPE svg><svg xmlns="http://www.w3.org/2000/svg" '
    'viewBox="0 0 9 9"><path d="M0 0h9"/></svg>'
)
# Texts of tokens that HTML, JavaScript or a file could misinterpret.
DIFFICULT = [
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


def test_page_has_all_parts_and_makes_no_requests():
    page = html.render(
        report_cases.results(),
        [report_cases.trace(), report_cases.plain_trace()],
        "A <title>",
        plots={"speedup_by_gamma": SVG},
    )
    assert "<h1>A &lt;title&gt;</h1>" in page and "stories &lt;b&gt;" in page  # names are text
    assert "AMD EPYC (Zen 3), 2 cores" in page and "--config=configs/bench.py" in page
    assert page.count("<figure") == 1 and "<?xml" not in page and "DOCTYPE svg" not in page
    outside = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    link = r"<link(?! rel=\"icon\" href=\"data:,\")"
    assert not re.search(rf"https?://|@import|url\((?!#)|{link}|\bsrc=|fetch\(|XMLHttp", outside)
    for column in columns.COLUMNS:
        # Distances are shown where a row has one: of lossy rules.
        shown = column.key != "total_variation"
        assert len(column.meaning) > 10 and (f"<dt>{column.head}</dt>" in page) == shown
    assert page.count('class="failed"') == 1 and page.count('class="lossy"') == 1
    assert notices_of(page) == [
        "trace 2 (none) has no probabilities: it shows only where each token came from"
    ]


def test_the_distance_of_a_lossy_rule_is_a_column():
    results = report_cases.results()
    results["rows"][0] |= {"total_variation": 0.25, "kl_divergence": 0.5}
    results["rows"][1] |= {"texts_changed": 0.125}
    page = html.render(results, [], "A", plots={})
    assert "<dt>TV</dt>" in page and "0.250" in page and "KL 0.5" in page
    assert "12% changed" in page


def test_the_header_names_target_precision_and_commit():
    """And a file of an earlier version has a page without them."""
    more = {
        "target": {
            "name": "a<b>",
            "dtype": "bfloat16",
            "parameters": 7671168,
            "dequantised_from": "Q4_1, Q8_0",
        },
        "git": {"commit": "0123456789abcdef", "dirty": True},
        "max_new_tokens": 48,
        "repeats": 3,
    }
    page = html.render(report_cases.results() | more, [], "t", plots={})
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page.partition("</header>")[0]))
    assert facts["target"] == "a&lt;b&gt;" and facts["precision"] == "bfloat16"
    assert facts["parameters"] == "7,671,168" and facts["commit"] == "0123456789, changed since"
    assert facts["weights"] == "dequantised from Q4_1, Q8_0"
    assert (facts["new tokens"], facts["passes"]) == ("48", "3")
    odd = {"target": {"name": 3, "parameters": "x"}, "git": {"commit": 5}, "repeats": "many"}
    for changes in ({}, dict.fromkeys(more), odd):
        head = html.render(report_cases.results() | changes, [], "t", plots={})
        assert "precision" not in head.partition("</header>")[0]


def test_embedded_traces_are_safe_and_complete():
    rounds = [
        {"out": [[text, n, 3, None, None, None]], "draft": []} for n, text in enumerate(DIFFICULT)
    ]
    trace = report_cases.trace(1, method="</script><b>") | {
        "rounds": rounds,
        "prompt": "</script><!--<script>",
    }
    page = html.render(report_cases.results(), [trace], "t", plots={})
    data = re.search(
        r'<script type="application/json" class="trace-data">(.*?)</script>', page, re.S
    )
    assert data is not None and "<" not in data[1] and data[1].isascii()
    packed = json.loads(data[1])
    assert packed["prompt"] == trace["prompt"]
    assert [packed["strings"][out[0]] for out, _ in packed["rounds"]] == DIFFICULT
    assert page.count("<script") == page.count("</script>") == 1 + len(html.SCRIPTS)
    assert "</script><b>" not in page
    page.encode(errors="replace")


def test_packed_trace_has_values_with_three_digits():
    trace = report_cases.trace(3, tree=True)
    packed = json.loads(html.pack(trace))
    for (out, draft), one in zip(packed["rounds"], trace["rounds"], strict=True):
        assert len(out) == 6 * len(one["out"]) and len(draft) == 7 * len(one["draft"])
        for index, node in enumerate(one["draft"]):
            text, number, parent, target, drafted, rank, kept = draft[7 * index : 7 * index + 7]
            assert [packed["strings"][text], number, parent, rank, kept] == [*node[:3], *node[5:]]
            assert [target, drafted] == pytest.approx(node[3:5], rel=6e-3)


def test_packed_trace_has_greedy_at_temperature_0():
    packed = [
        json.loads(html.pack(report_cases.trace(1, temperature=t)))["greedy"]
        for t in (0.0, 0, 0.7, None)
    ]
    assert packed == [True, True, False, False]
    assert any("at temperature 0" in meaning for meaning in columns.DETAILS.values())


def test_malformed_rows_are_shown_or_left_out():
    huge = 10**400
    odd = report_cases.row(
        tokens=huge,
        acceptance_rate=huge,
        predicted_speedup=1e300,
        context=-huge,
        block_efficiency="2",
        speedup=float("nan"),
        spread=[1],
        costs_ms=3,
        overlap="no",
        time_split={"draft": "x"},
        lossless="yes",
        temperature=None,
        acceptance_by_depth={"1": 2},
        parameters=None,
        prompt_set=7,
    )
    rows = [odd, {"method": 3}, "row", {"method": "new", "speedup": None}]
    page = html.render(report_cases.results(rows), [], "t", plots={})
    assert "nan" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert notices_of(page) == [
        "row 2 is left out: it is not an object with a method",
        "row 3 is left out: it is not an object with a method",
        "row 4 (new) is left out: it has no measurement",
        "there are no plots",
    ]


def test_many_notices_of_one_kind_are_counted():
    rows = [report_cases.row(), *({"method": f"m{n}"} for n in range(2000))]
    traces = [report_cases.plain_trace() for _ in range(9)] + [{}] * 1100
    notices = notices_of(html.render(report_cases.results(rows), traces, "t", plots={"one": SVG}))
    assert len(notices) == 3 * (inputs.MOST_NOTICES + 1)
    assert [text for text in notices if "more" in text] == [
        "1,995 more rows are left out",
        "1,095 more traces are left out",
        "4 more traces have no probabilities",
    ]
    # A notice that counts one other notice would not be shorter.
    assert inputs.first_notices(["a"] * 6, "are out") == ["a"] * 6


def test_long_names_are_cut_and_complete_in_the_tooltip():
    long = "x" * 400
    rows = [report_cases.row(long, drafter="d"), report_cases.row(long, category=long)]
    page = html.render(report_cases.results(rows), [], "t", plots={})
    assert f'title="{long}"' in page and f">{long}" not in page
    short = inputs.cut(long, html.MOST)
    assert f">{short}<" in page and len(short) == html.MOST
    assert len(html._label(1, report_cases.trace(1, method=long))) < 200


def test_failed_write_leaves_the_old_report(tmp_path, monkeypatch):
    def replace(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "report.html"
    path.write_text("old")
    results = tmp_path / "results.json"
    results.write_text(json.dumps(report_cases.results()))
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(UserError, match="No space left on device"):
        html.build(results)
    assert path.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["report.html", "results.json"]
