"""Plots of results: which are drawn, their labels, and the notes on what is left out."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from plot_cases import ALWAYS, CLASSES, caption, legend, row, texts

pytest.importorskip("matplotlib")
from specjax.report import plots

pytestmark = pytest.mark.fast

PER_TEMPERATURE = ("acceptance_by_depth", "overlap_by_class", "efficiency_by_category")


def test_plots_without_data_are_not_drawn():
    assert plots.draw([]) == {} and plots.draw([{}]) == {}
    unfinished = [row(speedup=None), row(gamma=5, speedup=None), row(speedup=float("nan"))]
    assert plots.draw(unfinished) == {}
    bare = {"method": "old", "temperature": 0.0, "batch_size": 1, "speedup": 1.5, "category": None}
    assert plots.draw([bare]) == {}
    assert set(plots.draw([bare, bare | {"batch_size": 4}])) == {"speedup_by_batch_size"}
    assert set(plots.draw([row()])) == ALWAYS
    odd = {
        "acceptance_by_depth": None,
        "acceptance_rate": "?",
        "parameters": 3,
        "costs_ms": [],
        "spread": {"speedup": None},
        "time_split": {"draft": None},
        "overlap": "none",
    }
    strange = [row(gamma=gamma, **odd) for gamma in (2, 4)]
    assert set(plots.draw(strange)) == {"speedup_by_gamma", "predicted_and_measured"}


def test_rows_of_categories_are_only_in_their_plot():
    rows = [row(category=name, speedup=None) for name in ("code", "prose")]
    assert set(plots.draw(rows)) == {"efficiency_by_category"}
    figure = plots.draw([*rows, row()])["efficiency_by_category"]
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == [r["block_efficiency"] for r in rows]
    assert {"code", "prose"} <= set(texts(figure))


def test_categories_of_unequal_length_are_one_series_per_method():
    """The mean length of the prompts differs between categories: it is no setting of a method."""
    methods, lengths = ("a", "b", "c"), {"qa": 30.0, "summaries": 700.5, "code": 120.0}
    rows = []
    for context in (None, 512.0):  # prompts as they are, and cut to one length
        for method in methods:
            rows.append(row(method, context=context or 283.5))
            rows += [row(method, category=k, context=context or n) for k, n in lengths.items()]
    whole = rows[: len(rows) // 2]
    figure = plots.by_category(whole)
    assert legend(figure) == list(methods) and len(figure.axes[0].patches) == 9
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == 3
    assert "is shown" not in caption(figure)
    # Without the rows over all prompts too.
    parts = [each for each in whole if each["category"] is not None]
    assert legend(plots.by_category(parts)) == list(methods)
    several = legend(plots.by_category(rows))
    lengths = [f"{name}, {n} tokens of context" for name in methods for n in (284, 512)]
    assert sorted(several) == lengths


def test_overlap_by_class_has_the_rows_with_an_overlap():
    rows = [row(overlap=CLASSES), row("other", overlap=CLASSES, batch=2), row("none")]
    figure = plots.draw(rows)["overlap_by_class"]
    assert legend(figure) == ["draft_model", "other"] and {"word", "digits"} <= set(texts(figure))


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({"prompt_set": "poems"}, ["m, stories", "m, poems"]),
        ({"context": 900.0}, ["m, 120 tokens of context", "m, 900 tokens of context"]),
        ({"context": 900.0, "prompt_set": "poems"}, ["m, stories", "m, poems"]),
        ({"accept": "block"}, ["m, chain", "m, block"]),
        ({"warm": True}, ["m, cold", "m, warm"]),
    ],
)
def test_rows_with_different_settings_have_different_labels(changes, labels):
    more = {"overlap": CLASSES}
    rows = [row("m", **more), row("m", **more | changes)]
    rows += [one | {"category": name} for one in rows for name in ("code", "prose")]
    figures = plots.draw(rows)
    for name in PER_TEMPERATURE:
        assert legend(figures[name]) == labels and "is shown" not in caption(figures[name])
    assert len(figures["efficiency_by_category"].axes[0].patches) == 4
    assert [tick.get_text() for tick in figures["time_split"].axes[0].get_yticklabels()] == labels


def test_a_note_states_what_is_left_out():
    rows = [row("m", 4, batch=b, overlap=CLASSES) for b in (1, 8)]
    figures = plots.draw(rows + [one | {"category": "code"} for one in rows])
    for name in PER_TEMPERATURE:
        assert "of several batch sizes the smallest" in caption(figures[name]).lower()
    repeated = plots.draw([row("m"), row("m", speedup=1.0)])["acceptance_by_depth"]
    assert "Of rows with the same settings the first is shown." in caption(repeated)
    many = plots.acceptance_by_depth([row(f"m{n}") for n in range(40)])
    assert len(legend(many)) == 16 and "The first 16 of 40 are shown." in caption(many)
    tree = plots.acceptance_by_depth([row("m", 4), row("m", 4, nodes=30), row("m", 2)])
    assert legend(tree) == ["m", "m, gamma 4, 30 nodes"] and "the longest is shown" in caption(tree)


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
def test_a_bad_row_does_not_prevent_a_figure(bad):
    rows = [row(gamma=gamma) for gamma in (2, 4)]
    expected = set(plots.draw(rows))
    figures = plots.draw([*rows, *(one | bad for one in rows)])
    assert expected <= set(figures)
    for figure in figures.values():
        ElementTree.fromstring(plots.svg(figure))


def test_tau_along_the_text_has_both_kinds_of_positions_and_intervals():
    """A replay has no speed-up: its rows are drawn too."""

    def along(taus, first=0):
        begins = [first, *(32 << n for n in range(8) if 32 << n > first)]
        return [
            {"from": begin, "block_efficiency": tau, "interval": [tau - 0.5, tau + 0.25]}
            for begin, tau in zip(begins, taus, strict=False)
        ]

    fields = {
        "tau_by_output_position": along([3.0, 2.5, 2.0]),
        "tau_by_context_position": along([2.75, 2.25], 64),
    }
    rows = [row(speedup=None, **fields), row("other", speedup=None, **fields), row(**fields)]
    figure = plots.draw(rows[:2])["tau_along_text"]
    assert legend(figure) == ["draft_model", "other"] and len(figure.axes) == 2
    output, context = figure.axes
    lines = [line for line in output.lines if len(line.get_ydata()) == 3]
    assert lines[0].get_ydata().tolist() == [3.0, 2.5, 2.0]
    assert [text.get_text() for text in output.get_xticklabels()] == ["0", "32", "64"]
    assert [text.get_text() for text in context.get_xticklabels()] == ["64", "128"]
    assert output.get_xlabel().startswith("output position")
    bars = output.collections[0].get_segments()
    assert [[low, high] for (_, low), (_, high) in bars] == [[2.5, 3.25], [2, 2.75], [1.5, 2.25]]
    short = {key: value[:1] for key, value in fields.items()}
    assert "tau_along_text" not in plots.draw([row(speedup=None, **short)])
    odd = {"tau_by_output_position": [3, {"from": 0}, *along([3.0, 2.0])[:2]]}
    odd["tau_by_output_position"][2]["interval"] = None
    assert len(plots.draw([row(speedup=None, **odd)])["tau_along_text"].axes) == 2
