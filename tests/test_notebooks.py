"""The notebooks of colab/: as they are committed, and what they say when they are run, shrunk by SPECJAX_NOTEBOOK_SMALL=1."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import accept, drafters, testing

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "colab").glob("*.ipynb"))}


def sources(name: str, kind: str) -> list[str]:
    cells = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


@pytest.mark.fast
def test_there_are_two():
    assert list(NOTEBOOKS) == ["new_drafter", "quickstart"]


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_is_clean(name):
    """Valid, run by nobody, with one cell of parameters, and nothing of the machine it was written on."""
    nbformat = pytest.importorskip(
        "nbformat", reason="nbformat is not installed; pip install -e '.[test]'"
    )
    text = NOTEBOOKS[name].read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert [cell.id for cell in code if "parameters" in cell.metadata.get("tags", [])] != []
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    assert not re.search(r"/(work|tmp|home|root|Users)/", text)
    for cell in code:
        ast.parse(cell.source)


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_and_names_lead_somewhere(name):
    """Files of the repository that the text names are there, but for the ones that the reader is to write."""
    text = "\n".join(sources(name, "markdown"))
    for path in re.findall(
        r"`((?:configs|tests|specjax|drafters|colab)/[\w./]+\.\w+|[A-Z]+\.md|\w+\.ipynb)`", text
    ):
        if "bigram_cache" not in path:
            assert any((ROOT / part / path).exists() for part in ("", "specjax", "colab")), path


@pytest.mark.fast
def test_both_install_alike():
    first, second = (sources(name, "code")[0] for name in NOTEBOOKS)
    assert first == second and "SPECJAX_SOURCE" in first


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_ruff_passes(name):
    pytest.importorskip("ruff", reason="ruff is not installed; pip install -e '.[dev]'")
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(NOTEBOOKS[name])],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.fast
def test_every_drafter_of_the_quickstart_has_a_rule_that_takes_its_drafts():
    """A shrunk run leaves some of them out."""
    [cell] = [source for source in sources("quickstart", "code") if "METHODS = " in source]
    node = next(n for n in ast.parse(cell).body if isinstance(n, ast.Assign))
    methods = eval(compile(ast.Expression(node.value), "METHODS", "eval"), {"WORKDIR": "runs"})
    assert len(methods) >= 5
    target = testing.tabular(8)
    for name, keys in methods.items():
        rule = accept.load(keys.pop("rule", "chain"))
        if "model" in keys:
            keys["model"] = testing.tabular(8, "draft")
        accept.check_pair(drafters.make(name, target, **keys), rule)


def execute(name: str, folder: Path, monkeypatch) -> tuple[dict[str, str], Path]:
    """First line of a cell -> all text that it printed or showed; and the folder it ran in. Fails if a cell does."""
    nbclient = pytest.importorskip(
        "nbclient", reason="nbclient is not installed; pip install -e '.[test]'"
    )
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; pip install -e '.[test]'")
    import nbformat

    monkeypatch.setenv("SPECJAX_NOTEBOOK_SMALL", "1")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))  # nobody's own settings
    book = nbformat.read(NOTEBOOKS[name], as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()  # CellExecutionError with the traceback, if a cell fails
    told = {}
    for cell in book.cells:
        if cell.cell_type == "code":
            data = [out.data if "data" in out else {"text/plain": out.text} for out in cell.outputs]
            told[cell.source] = "\n".join(
                text for each in data for text in each.values() if isinstance(text, str)
            )
    return told, folder


def said(told: dict[str, str], words: str) -> str:
    """What the cell that holds these words said."""
    [found] = [text for source, text in told.items() if words in source]
    return found


@pytest.mark.xdist_group("notebook quickstart")
def test_quickstart(tmp_path, monkeypatch):
    told, folder = execute("quickstart", tmp_path, monkeypatch)
    table = said(told, "status = run.main")
    assert (
        "speed-up" in table
        and "draft_model" in table
        and "prompt_lookup" in table
        and "yes, 2/2 prompts" in table
    )
    report = folder / "runs/small/report.html"
    assert "&lt;!doctype html&gt;" in said(told, "show(report") and report.stat().st_size > 50_000
    rows = json.loads((folder / "runs/small/results.json").read_text())["rows"]
    numbers = said(told, "def table")
    assert len(rows) == 4 and all(f"| {row['block_efficiency']:.3g} |" in numbers for row in rows)
    decoded = said(told, "METHODS = ")
    assert re.findall(r"(\w+) +tau [\d.]+, as plain decoding: (\w+)", decoded) == [
        ("none", "True"),
        ("draft_model", "True"),
    ]
    assert "|" in said(told, "sj.stream")
    gammas = json.loads((folder / "runs/small/gammas/results.json").read_text())["rows"]
    assert [row["gamma"] for row in gammas] == [1, 2]
    assert "Speed-up by the length of the draft" in said(told, "plots.speedup_against")
    assert len(re.findall(r"gamma \d+ gives [\d.]+x", said(told, "theory.optimal_gamma"))) == 9


@pytest.mark.xdist_group("notebook new_drafter")
def test_new_drafter(tmp_path, monkeypatch):
    told, folder = execute("new_drafter", tmp_path, monkeypatch)
    assert "proposes [2, 5, 3, 1]\nproposes []" in said(told, "toy = ")
    for words, name in (
        ("assert check(bigram_cache", "bigram_cache"),
        ("assert check(bigram_sampler", "bigram_sampler"),
    ):
        assert f"{name} passed all checks" in said(told, words) and "FAIL" not in said(told, words)
    broken = said(told, "broken = check")
    assert "bigram_sampler FAILED" in broken
    assert re.search("FAIL chain: exact law of a round", broken) and re.search(
        "FAIL chain: law, temp", broken
    )
    assert "ok   chain: greedy is plain greedy decoding" in broken
    table = said(told, "terminal.table(found)")
    for method in ("bigram_cache, gamma 2", "bigram_cache, gamma 4", "prompt_lookup, gamma 4"):
        assert method in table
    assert "yes, 2/2 prompts" in table
    assert said(told, "plots.speedup_against").count("<svg") == 2
    assert "accepted draft token" in said(told, "tracing.record") and "def dedent" in said(
        told, "tracing.record"
    )
    page = (folder / "runs/new_drafter.html").read_text(encoding="utf-8")
    assert "bigram_cache" in page and "&lt;!doctype html&gt;" in said(told, "html.render")
