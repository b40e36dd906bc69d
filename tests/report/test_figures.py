"""Figures as files and as SVG in a page."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from plot_cases import legend, row

from specjax.errors import UserError

pytest.importorskip("matplotlib")
from specjax.report import plots

pytestmark = pytest.mark.fast


def test_labels_are_shown_as_written():
    wild = ["_first", "$x_1$ and $y^2$", "50$", "a\nb <&> \\frac", "ä 漢", "x" * 200, r"\$", ""]
    figures = plots.draw([row(label, gamma) for label in wild for gamma in (2, 4)])
    shown = legend(figures["speedup_by_gamma"])
    assert {"_first", "$x_1$ and $y^2$", "50$", "a b <&> \\frac"} <= set(shown)
    assert len(shown) == len(wild)
    text = "".join(ElementTree.fromstring(plots.svg(figures["speedup_by_gamma"])).itertext())
    assert "$x_1$ and $y^2$" in text and "_first" in text and "50$" in text and "<&>" in text


def test_several_svgs_can_be_in_one_page():
    rows = [row("a", gamma, t) for gamma in (2, 4) for t in (0.0, 1.0)]
    svgs = [plots.svg(figure) for figure in plots.draw(rows).values()]
    ids = [re.findall(r'\bid="([^"]+)"', text) for text in svgs]
    every = [name for names in ids for name in names]
    assert len(every) == len(set(every)) > 20
    for text, names in zip(svgs, ids, strict=True):
        root = ElementTree.fromstring(text)
        assert root.get("width") == "640" and root.get("viewBox") and root.get("aria-label")
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
        assert used and set(used) <= set(names)
        assert "sans-serif" in text and "http://www.w3.org/2000/svg" in text
        assert not re.search("<metadata|<style", text)
        assert "Speed-up" in text or "speed-up" in text or "share" in text
    assert [plots.svg(figure) for figure in plots.draw(rows).values()] == svgs


def test_files_are_written_all_or_none(tmp_path):
    figures, folder = plots.draw([row()]), tmp_path / "deep" / "plots"
    made = plots.save(figures, folder)
    names = [f"{name}.{kind}" for name in figures for kind in ("png", "svg")]
    assert sorted(path.name for path in made) == sorted(names)
    assert all(path.stat().st_size > 1000 for path in made)
    assert len(list(folder.iterdir())) == len(made)
    head = (folder / "time_split.png").read_bytes()[:24]
    assert head[:4] == b"\x89PNG" and int.from_bytes(head[16:20], "big") == 1280
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write plots into"):
        plots.save(figures, tmp_path / "file")

    class Broken:
        def savefig(self, *_, **__):
            raise RuntimeError("cannot be drawn")

    with pytest.raises(RuntimeError):
        plots.save({**figures, "broken": Broken()}, tmp_path / "none")
    assert list((tmp_path / "none").iterdir()) == []


GLOBAL = """
import sys
from specjax.report import plots
assert "matplotlib" not in sys.modules
import matplotlib
before = dict(dict.items(matplotlib.rcParams))  # rcParams[...] would choose a backend
row = {"method": "m", "speedup": 1.5, "predicted_speedup": 1.6, "temperature": 0, "batch_size": 1}
for figure in plots.draw([row, row | {"batch_size": 2}]).values():
    plots.svg(figure)
assert dict(dict.items(matplotlib.rcParams)) == before
assert "matplotlib.pyplot" not in sys.modules
"""


def test_no_global_setting_is_changed():
    subprocess.run([sys.executable, "-c", GLOBAL], check=True)
