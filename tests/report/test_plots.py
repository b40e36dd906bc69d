"""Plots of results: which are drawn, what stands in them, labels as they were written, files that are whole or not there."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from specjax import theory
from specjax.errors import UserError

pytest.importorskip("matplotlib")
from specjax.report import plots

pytestmark = pytest.mark.fast


def row(method="draft_model", gamma=4, temperature=0.0, batch=1, **more):
    """A finished row, its time as theory has it and a little more."""
    chance = random.Random(f"{method}{gamma}{temperature}{batch}{more}")
    alpha = 0.6 + 0.2 * chance.random()
    costs = {"step": 2.0, "draft": 0.1 * gamma, "verify": 2.0 + 0.2 * gamma}
    tokens = theory.expected_tokens(alpha, gamma)
    predicted = theory.speedup(tokens, costs["draft"], costs["verify"], costs["step"])
    gain = predicted * chance.uniform(0.8, 1.0)
    return {
        "method": method,
        "drafter": "draft_model",
        "accept": "chain",
        "class": "L1",
        "temperature": temperature,
        "batch_size": batch,
        "prompt_set": "stories",
        "category": None,
        "gamma": gamma,
        "nodes": gamma,
        "parameters": {"target": 70_000_000, "draft": 10_000_000},
        "context": 120.0,
        "block_efficiency": tokens,
        "acceptance_rate": alpha,
        "acceptance_by_depth": [alpha] * gamma,
        "speedup": gain,
        "predicted_speedup": predicted,
        "spread": {"speedup": [gain * 0.9, gain * 1.1]},
        "costs_ms": costs,
        "time_split": {"draft": 0.2, "verify": 0.6, "accept": 0.1, "host": 0.1},
        "overlap": None,
        "warm": False,
    } | more


CLASSES = {
    "by_class": {"word": {"alpha": 0.7, "tokens": 90}, "digits": {"alpha": 0.4, "tokens": 9}}
}
ALWAYS = {"predicted_and_measured", "acceptance_by_depth", "time_split"}


def words(figure):
    """Everything written in a figure, as it was meant."""
    from matplotlib.text import Text

    return [text.get_text().replace(r"\$", "$") for text in figure.findobj(Text)]


def legend(figure):
    return [text.get_text().replace(r"\$", "$") for text in figure.legends[0].get_texts()]


def points(ax):
    """The measured points of every series: the lines that have bars."""
    return [container.lines[0].get_xydata().tolist() for container in ax.containers]


def test_what_cannot_be_drawn_is_left_out():
    assert plots.draw([]) == {} and plots.draw([{}]) == {}
    unfinished = [row(speedup=None), row(gamma=5, speedup=None), row(speedup=float("nan"))]
    assert plots.draw(unfinished) == {}
    bare = {"method": "old", "temperature": 0.0, "batch_size": 1, "speedup": 1.5, "category": None}
    assert plots.draw([bare]) == {} and set(plots.draw([bare, bare | {"batch_size": 4}])) == {
        "speedup_by_batch_size"
    }
    assert set(plots.draw([row()])) == ALWAYS
    odd = {
        "parameters": 3,
        "costs_ms": [],
        "spread": {"speedup": None},
        "time_split": {"draft": None},
        "overlap": "none",
    }
    strange = [
        row(gamma=gamma, acceptance_by_depth=None, acceptance_rate="?", **odd) for gamma in (2, 4)
    ]
    assert set(plots.draw(strange)) == {"speedup_by_gamma", "predicted_and_measured"}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gamma", [{"gamma": 2}, {"gamma": 4}]),
        ("gamma", [{"gamma": 2, "method": "drafter 2"}, {"gamma": 4, "method": "drafter 4"}]),
        ("temperature", [{"temperature": 0.0}, {"temperature": 1.0}]),
        ("batch_size", [{"batch": 1}, {"batch": 8}]),
        (
            "draft_parameters",
            [{"method": str(n), "parameters": {"target": 7e7, "draft": n}} for n in (10**6, 10**7)],
        ),
        ("context", [{"context": float(n)} for n in (100, 1000)]),
    ],
)
def test_an_axis_is_drawn_where_rows_differ_in_it_alone(name, changes):
    rows = [row(**change) for change in changes]
    assert set(plots.draw(rows)) - ALWAYS == {f"speedup_by_{name}"}
    other = rows[0] | {"accept": "block", "speedup": 2.0}
    assert set(plots.draw([other, rows[1]])) <= ALWAYS  # not comparable
    figure = plots.speedup_against([*rows, other], name)
    assert figure is not None and len(figure.axes[0].containers) == 1


def test_categories_stand_apart():
    rows = [row(category=c, speedup=None, gamma=g) for c in ("code", "prose") for g in (4,)]
    assert set(plots.draw(rows)) == {"efficiency_by_category"}
    figure = plots.draw([*rows, row()])["efficiency_by_category"]
    assert [bar.get_width() for bar in figure.axes[0].patches] == [
        r["block_efficiency"] for r in rows
    ]
    assert {"code", "prose"} <= set(words(figure))


def test_theory_and_measurement_in_one_figure():
    rows = [row(gamma=gamma, acceptance_rate=0.8) for gamma in (1, 3, 6)]
    (ax,) = plots.speedup_against(rows, "gamma").axes
    assert points(ax) == [[[r["gamma"], r["speedup"]] for r in rows]]
    (curve,) = [line.get_xydata().tolist() for line in ax.lines if len(line.get_xdata()) == 7]
    for gamma, gain in curve:  # c = .05, and a verified token costs a tenth of a step
        assert gain == pytest.approx(
            theory.expected_tokens(0.8, int(gamma)) / (0.05 * gamma + 1 + 0.1 * gamma)
        )
    low, high = ax.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(rows[0]["spread"]["speedup"])
    assert any(list(line.get_ydata()) == [1, 1] for line in ax.lines)  # plain decoding
    text = " ".join(words(ax.figure))
    assert "Curves:" in text and "Assumed:" in text.replace("\n", " ")


def test_the_curve_knows_of_rounds_without_a_draft():
    """Half of the rounds draft nothing: half of the tokens that a full draft would bring."""
    tokens = {gamma: 1 + 0.5 * (theory.expected_tokens(0.8, gamma) - 1) for gamma in (1, 3, 6)}
    more = [
        {"acceptance_rate": 0.8, "acceptance_by_depth": [0.8] * g, "block_efficiency": tokens[g]}
        for g in tokens
    ]
    rows = [row(gamma=gamma, **one) for gamma, one in zip(tokens, more, strict=True)]
    (ax,) = plots.speedup_against(rows, "gamma").axes
    (curve,) = [dict(line.get_xydata().tolist()) for line in ax.lines if len(line.get_xdata()) == 7]
    for gamma, expected in tokens.items():
        assert curve[gamma] == pytest.approx(expected / (0.05 * gamma + 1 + 0.1 * gamma))
    assert "s is the share of the draft" in " ".join(words(ax.figure)).replace("\n", " ")


def test_no_curve_without_costs_or_for_trees():
    for change in ({"costs_ms": None}, {"nodes": 30}):
        figure = plots.speedup_against([row(gamma=gamma, **change) for gamma in (2, 4)], "gamma")
        assert "Curves:" not in " ".join(words(figure))


def test_panels_and_series():
    rows = [
        row(m, g, t, b, prompt_set=s)
        for m in ("one", "two")
        for g in (2, 4)
        for t in (0.0, 1.0)
        for b in (1, 8)
        for s in "xy"
    ]
    figures = plots.draw(rows)
    assert [ax.get_title(loc="left") for ax in figures["speedup_by_batch_size"].axes] == [
        "temperature 0",
        "temperature 1",
    ]
    told = legend(figures["speedup_by_batch_size"])
    assert told == [f"{m}, gamma {g}, {s}" for m in ("one", "two") for g in (2, 4) for s in "xy"]
    assert legend(figures["speedup_by_gamma"]) == ["one, x", "one, y", "two, x", "two, y"]
    assert len(figures["speedup_by_gamma"].axes) == 4


def test_crowds_are_thinned_and_it_is_said():
    rows = [row(f"method {m}", 4, 0.0, b) for m in "abcdefghijklmnopqrstuvwxyz" for b in (1, 8)]
    figures = plots.draw(rows)
    assert len(legend(figures["speedup_by_batch_size"])) == 16
    assert "The 16 fastest of 26" in " ".join(words(figures["speedup_by_batch_size"])).replace(
        "\n", " "
    )
    assert "Smallest batches only." in " ".join(words(figures["time_split"])).replace("\n", " ")
    assert len(figures["time_split"].axes[0].get_yticks()) == 26
    looks = {
        (h.get_color(), h.get_marker())
        for h in figures["predicted_and_measured"].legends[0].legend_handles
    }
    assert len(looks) == 26


def test_thousands_of_rows_are_thinned_where_they_are_predicted():
    rows = [row(f"method {m}", context=float(n)) for m in range(50) for n in range(1, 60)]
    figure = plots.predicted(rows)
    assert len(legend(figure)) == 30 and sum(map(len, points(figure.axes[0]))) == 30 * 40
    text = " ".join(words(figure)).replace("\n", " ")
    assert "The 30 fastest of 50 are shown. Of each method the 40 fastest rows are shown." in text


def caption(figure):
    return figure.texts[-1].get_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt_set": "poems"}, ["m, stories", "m, poems"]),
        ({"context": 900.0}, ["m, 120 tokens of context", "m, 900 tokens of context"]),
        ({"context": 900.0, "prompt_set": "poems"}, ["m, stories", "m, poems"]),
        ({"accept": "block"}, ["m, chain", "m, block"]),
        ({"warm": True}, ["m, cold", "m, warm"]),
    ],
)
def test_rows_that_differ_are_shown_apart(changes, told):
    more = {"overlap": CLASSES}
    rows = [row("m", **more), row("m", **more | changes)]
    rows += [one | {"category": c} for one in rows for c in ("code", "prose")]
    figures = plots.draw(rows)
    for name in ("acceptance_by_depth", "overlap_by_class", "efficiency_by_category"):
        assert legend(figures[name]) == told and "is shown" not in caption(figures[name])
    assert len(figures["efficiency_by_category"].axes[0].patches) == 4
    assert [tick.get_text() for tick in figures["time_split"].axes[0].get_yticklabels()] == told


def test_what_is_left_out_is_told():
    rows = [row("m", 4, batch=b, overlap=CLASSES) for b in (1, 8)]
    figures = plots.draw(rows + [one | {"category": "code"} for one in rows])
    for name in ("acceptance_by_depth", "overlap_by_class", "efficiency_by_category"):
        assert "of several batch sizes the smallest" in caption(figures[name]).lower()
    again = plots.draw([row("m"), row("m", speedup=1.0)])["acceptance_by_depth"]
    assert "alike in all but their measurements the first is shown" in caption(again)
    crowd = plots.acceptance_by_depth([row(f"m{n}") for n in range(40)])
    assert len(legend(crowd)) == 16 and "The first 16 of 40 are shown." in caption(crowd)
    tree = plots.acceptance_by_depth([row("m", 4), row("m", 4, nodes=30), row("m", 2)])
    assert legend(tree) == ["m", "m, gamma 4, 30 nodes"] and "the longest is shown" in caption(tree)


def test_lines_of_contexts_join_one_set_of_prompts():
    rows = [
        row(context=float(n), prompt_set=s)
        for s, n in (("a", 50), ("b", 100), ("b", 900), ("c", 1000))
    ]
    figure = plots.speedup_against(rows, "context")
    assert [[x for x, _ in some] for some in points(figure.axes[0])] == [[100, 900]]


@pytest.mark.parametrize(
    "bad",
    [
        {"speedup": 10**400},
        {"speedup": 1e308},
        {"batch_size": 10**400},
        {"batch_size": 1e300},
        {"context": 1e300},
        {"context": "long"},
        {"parameters": {"target": 1e300, "draft": 1e300}},
        {"gamma": 3_000_000, "nodes": 3_000_000},
        {"gamma": -3, "nodes": -3},
        {"acceptance_by_depth": [2.0, 10**400]},
        {"temperature": 10**400},
        {"method": "\ud800"},
        {"method": "\x00\x1b[31m\uffff"},
        {"prompt_set": "\ud800"},
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_bad_row_costs_no_figure(bad):
    rows = [row(gamma=gamma) for gamma in (2, 4)]
    wanted = set(plots.draw(rows))
    figures = plots.draw([*rows, *(one | bad for one in rows)])
    assert wanted <= set(figures)
    for figure in figures.values():
        ElementTree.fromstring(plots.svg(figure))


def test_a_long_curve_has_few_points():
    figure = plots.speedup_against(
        [row() | {"gamma": g, "nodes": g} for g in (4, 3_000_000)], "gamma"
    )
    assert max(len(line.get_xdata()) for line in figure.axes[0].lines) == 64


def test_overlap_of_classes():
    figure = plots.draw(
        [row(overlap=CLASSES), row("other", overlap=CLASSES, batch=2), row("none")]
    )["overlap_by_class"]
    assert legend(figure) == ["draft_model", "other"] and {"word", "digits"} <= set(words(figure))


def test_labels_stay_as_they_are_written():
    wild = ["_first", "$x_1$ and $y^2$", "50$", "a\nb <&> \\frac", "ä 漢", "x" * 200, r"\$", ""]
    figures = plots.draw([row(label, gamma) for label in wild for gamma in (2, 4)])
    shown = legend(figures["speedup_by_gamma"])
    assert {"_first", "$x_1$ and $y^2$", "50$", "a b <&> \\frac"} <= set(shown) and len(
        shown
    ) == len(wild)
    text = "".join(ElementTree.fromstring(plots.svg(figures["speedup_by_gamma"])).itertext())
    assert "$x_1$ and $y^2$" in text and "_first" in text and "50$" in text and "<&>" in text


def test_svg_stands_beside_others():
    figures = plots.draw([row("a", gamma, t) for gamma in (2, 4) for t in (0.0, 1.0)])
    texts = [plots.svg(figure) for figure in figures.values()]
    seen = [re.findall(r'\bid="([^"]+)"', text) for text in texts]
    flat = [name for names in seen for name in names]
    assert len(flat) == len(set(flat)) > 20
    for text, names in zip(texts, seen, strict=True):
        root = ElementTree.fromstring(text)
        assert root.get("width") == "640" and root.get("viewBox") and root.get("aria-label")
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        assert used and set(used) <= set(names)
        assert (
            "sans-serif" in text
            and "http://www.w3.org/2000/svg" in text
            and not re.search("<metadata|<style", text)
        )
        assert "Speed-up" in text or "speed-up" in text or "share" in text
    again = plots.draw([row("a", gamma, t) for gamma in (2, 4) for t in (0.0, 1.0)])
    assert [plots.svg(figure) for figure in again.values()] == texts


def test_files_are_written_all_or_none(tmp_path):
    figures = plots.draw([row()])
    made = plots.save(figures, tmp_path / "deep" / "plots")
    assert sorted(path.name for path in made) == sorted(
        f"{name}.{kind}" for name in figures for kind in ("png", "svg")
    )
    assert all(path.stat().st_size > 1000 for path in made) and len(
        list((tmp_path / "deep" / "plots").iterdir())
    ) == len(made)
    head = (tmp_path / "deep" / "plots" / "time_split.png").read_bytes()[:24]
    assert head[:4] == b"\x89PNG" and int.from_bytes(head[16:20], "big") == 1280
    with pytest.raises(UserError, match="format is 'pdf'; it must be one of png, svg"):
        plots.save(figures, tmp_path / "other", formats=["pdf"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write plots into"):
        plots.save(figures, tmp_path / "file")

    class Broken:
        def savefig(self, *_, **__):
            raise RuntimeError("out of ink")

    with pytest.raises(RuntimeError):
        plots.save({**figures, "broken": Broken()}, tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []


GLOBAL = """
import sys
from specjax.report import plots
assert "matplotlib" not in sys.modules
import matplotlib
before = dict(dict.items(matplotlib.rcParams))  # looking an item up would choose a backend
row = {"method": "m", "speedup": 1.5, "predicted_speedup": 1.6, "temperature": 0, "batch_size": 1}
for figure in plots.draw([row, row | {"batch_size": 2}]).values():
    plots.svg(figure)
assert dict(dict.items(matplotlib.rcParams)) == before
assert "matplotlib.pyplot" not in sys.modules
"""


def test_nothing_global_is_touched():
    subprocess.run([sys.executable, "-c", GLOBAL], check=True)
