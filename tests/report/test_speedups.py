"""Plots of the speed-up: along a setting, and against the predicted speed-up."""

from __future__ import annotations

import pytest
from plot_cases import ALWAYS, caption, legend, points, row, texts

from specjax import theory

pytest.importorskip("matplotlib")
from specjax.report import plots

pytestmark = pytest.mark.fast


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
def test_an_axis_is_drawn_if_rows_differ_only_in_it(name, changes):
    rows = [row(**change) for change in changes]
    assert set(plots.draw(rows)) - ALWAYS == {f"speedup_by_{name}"}
    other = rows[0] | {"accept": "block", "speedup": 2.0}
    assert set(plots.draw([other, rows[1]])) <= ALWAYS  # they also differ in the rule
    figure = plots.speedup_against([*rows, other], name)
    assert figure is not None and len(figure.axes[0].containers) == 1


def test_measured_points_and_the_curve_of_theory():
    rows = [row(gamma=gamma, acceptance_rate=0.8) for gamma in (1, 3, 6)]
    (ax,) = plots.speedup_against(rows, "gamma").axes
    assert points(ax) == [[[r["gamma"], r["speedup"]] for r in rows]]
    (curve,) = [line.get_xydata().tolist() for line in ax.lines if len(line.get_xdata()) == 7]
    for gamma, gain in curve:  # c = .05, and a verified token costs a tenth of a step
        tokens = theory.expected_tokens(0.8, int(gamma))
        assert gain == pytest.approx(tokens / (0.05 * gamma + 1 + 0.1 * gamma))
    low, high = ax.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx(rows[0]["spread"]["speedup"])
    assert any(list(line.get_ydata()) == [1, 1] for line in ax.lines)  # plain decoding
    text = " ".join(texts(ax.figure)).replace("\n", " ")
    assert "Curves:" in text and "Assumed:" in text


def test_the_curve_accounts_for_rounds_without_a_draft():
    """Half of the rounds draft nothing: half of the tokens that full drafts would give."""
    tokens = {gamma: 1 + 0.5 * (theory.expected_tokens(0.8, gamma) - 1) for gamma in (1, 3, 6)}
    rows = [
        row(gamma=g, acceptance_rate=0.8, acceptance_by_depth=[0.8] * g, block_efficiency=expected)
        for g, expected in tokens.items()
    ]
    (ax,) = plots.speedup_against(rows, "gamma").axes
    (curve,) = [dict(line.get_xydata().tolist()) for line in ax.lines if len(line.get_xdata()) == 7]
    for gamma, expected in tokens.items():
        assert curve[gamma] == pytest.approx(expected / (0.05 * gamma + 1 + 0.1 * gamma))
    assert "s is the share of full drafts" in " ".join(texts(ax.figure)).replace("\n", " ")


def test_no_curve_without_costs_or_for_trees():
    for change in ({"costs_ms": None}, {"nodes": 30}):
        figure = plots.speedup_against([row(gamma=gamma, **change) for gamma in (2, 4)], "gamma")
        assert "Curves:" not in " ".join(texts(figure))


def test_a_long_curve_has_few_points():
    rows = [row() | {"gamma": g, "nodes": g} for g in (4, 3_000_000)]
    figure = plots.speedup_against(rows, "gamma")
    assert max(len(line.get_xdata()) for line in figure.axes[0].lines) == 64


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
    by_batch, by_gamma = figures["speedup_by_batch_size"], figures["speedup_by_gamma"]
    titles = [ax.get_title(loc="left") for ax in by_batch.axes]
    assert titles == ["temperature 0", "temperature 1"]
    labels = [f"{m}, gamma {g}, {s}" for m in ("one", "two") for g in (2, 4) for s in "xy"]
    assert legend(by_batch) == labels
    assert legend(by_gamma) == ["one, x", "one, y", "two, x", "two, y"]
    assert len(by_gamma.axes) == 4


def test_many_series_are_thinned_with_a_note():
    rows = [row(f"method {m}", 4, 0.0, b) for m in "abcdefghijklmnopqrstuvwxyz" for b in (1, 8)]
    figures = plots.draw(rows)
    assert len(legend(figures["speedup_by_batch_size"])) == 16
    assert "The 16 fastest of 26" in caption(figures["speedup_by_batch_size"])
    assert "Smallest batches only." in caption(figures["time_split"])
    assert len(figures["time_split"].axes[0].get_yticks()) == 26
    handles = figures["predicted_and_measured"].legends[0].legend_handles
    assert len({(h.get_color(), h.get_marker()) for h in handles}) == 26


def test_thousands_of_predicted_rows_are_thinned_with_a_note():
    rows = [row(f"method {m}", context=float(n)) for m in range(50) for n in range(1, 60)]
    figure = plots.predicted(rows)
    assert len(legend(figure)) == 30 and sum(map(len, points(figure.axes[0]))) == 30 * 40
    note = "The 30 fastest of 50 are shown. Of each method the 40 fastest rows are shown."
    assert note in caption(figure)


def test_lines_along_the_context_join_one_set_of_prompts():
    contexts = (("a", 50), ("b", 100), ("b", 900), ("c", 1000))
    rows = [row(context=float(n), prompt_set=name) for name, n in contexts]
    figure = plots.speedup_against(rows, "context")
    assert [[x for x, _ in line] for line in points(figure.axes[0])] == [[100, 900]]
