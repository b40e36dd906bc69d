"""The notebooks of colab/: their form, and their output with SPECJAX_NOTEBOOK_SMALL=1."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import specjax
from specjax import accept, drafters, run, testing

ROOT = Path(__file__).parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "colab").glob("*.ipynb"))}


def sources(name: str, kind: str) -> list[str]:
    """The texts of all cells of a kind, "code" or "markdown"."""
    cells = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def source_with(name: str, part: str) -> str:
    """The code cell that contains ``part``."""
    [source] = [source for source in sources(name, "code") if part in source]
    return source


@pytest.mark.fast
def test_all_are_there():
    assert list(NOTEBOOKS) == [
        "chat_model",
        "in_memory",
        "new_drafter",
        "quickstart",
        "tpu",
        "train_eagle",
    ]


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_is_clean(name):
    """Valid, with small outputs, one cell of parameters, and without paths of a machine."""
    nbformat = pytest.importorskip(
        "nbformat", reason="nbformat is not installed; pip install -e '.[test]'"
    )
    text = NOTEBOOKS[name].read_text(encoding="utf-8")
    book = nbformat.reads(text, as_version=nbformat.NO_CONVERT)
    nbformat.validate(book)
    assert (book.nbformat, book.nbformat_minor) == (4, 5)
    assert book.metadata.kernelspec.name == "python3"
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    outputs = [output for cell in code for output in cell.outputs]
    assert len(outputs) >= 8 and len(text) < 300_000
    kinds = {output.output_type for output in outputs}
    assert kinds <= {"stream", "display_data", "execute_result"}  # no error
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert "<iframe" not in json.dumps(outputs)
    assert [cell.id for cell in code if "parameters" in cell.metadata.get("tags", [])] != []
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    assert not re.search(r"/(work|tmp|home|root|Users)/", text)
    for cell in code:
        ast.parse(cell.source)


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_address_of_the_repository_has_one_place(name):
    """Badge and install cell have the address of pyproject.toml, as colab/store_outputs.py does."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = pyproject["project"]["urls"]["Repository"]
    assert f'REPOSITORY = "{address}"' in sources(name, "code")[0].splitlines()
    place = address.removeprefix("https://github.com/")
    page = f"https://colab.research.google.com/github/{place}/blob/main/colab/{name}.ipynb"
    badge = sources(name, "markdown")[0].splitlines()[0]
    assert badge.startswith("[![Open in Colab](") and badge.endswith(f"({page})")
    pages = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    assert not [path.name for path in pages if address in path.read_text(encoding="utf-8")]


@pytest.mark.fast
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_named_files_exist(name):
    """Files of the repository that the text names, except those that the reader will write."""
    text = "\n".join(sources(name, "markdown"))
    folders = "configs|tests|specjax|drafters|colab"
    for path in re.findall(rf"`((?:{folders})/[\w./]+\.\w+|[A-Z]+\.md|\w+\.ipynb)`", text):
        if "bigram_cache" not in path:
            assert any((ROOT / part / path).exists() for part in ("", "specjax", "colab")), path


@pytest.mark.fast
def test_all_have_the_same_installation():
    [install] = {sources(name, "code")[0] for name in NOTEBOOKS}
    assert "SPECJAX_SOURCE" in install


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
def test_every_drafter_of_the_quickstart_has_a_rule_for_its_drafts():
    """With SPECJAX_NOTEBOOK_SMALL some of them are left out."""
    cell = source_with("quickstart", "METHODS = ")
    node = next(n for n in ast.parse(cell).body if isinstance(n, ast.Assign))
    methods = eval(compile(ast.Expression(node.value), "METHODS", "eval"), {"WORKDIR": "runs"})
    assert len(methods) >= 5
    target = testing.tabular(8)
    for name, keys in methods.items():
        rule = accept.load(keys.pop("rule", "chain"))
        if "model" in keys:
            keys["model"] = testing.tabular(8, "draft")
        accept.check_pair(drafters.make(name, target, **keys), rule)


@pytest.mark.fast
@pytest.mark.parametrize("small", [False, True])
def test_new_drafter_trains_a_target_where_there_is_none(tmp_path, monkeypatch, small):
    """The executed notebook finds the quickstart's target, so its command is checked here."""
    cell = ast.parse(source_with("new_drafter", "def train"))
    function = next(n for n in cell.body if isinstance(n, ast.FunctionDef) and n.name == "train")
    names = {"Path": Path, "sj": SimpleNamespace(__file__=specjax.__file__), "SMALL": small}
    exec(compile(ast.Module([function], []), "train", "exec"), names)
    commands = []
    monkeypatch.setattr(run, "main", commands.append)
    names["train"](tmp_path / "target")
    config, workdir = run.parse(commands[0])  # UserError for a key that does not exist
    assert workdir == tmp_path / "target" and config.mode == "train"
    assert (config.model.hidden_size == 32) == small


# Execution --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of both notebooks: the second one uses the target that the first one trained."""
    return tmp_path_factory.mktemp("notebooks")


def execute(name: str, folder: Path, monkeypatch) -> dict[str, str]:
    """Source of a cell -> the texts that it printed or showed. Raises if a cell does."""
    nbclient = pytest.importorskip(
        "nbclient", reason="nbclient is not installed; pip install -e '.[test]'"
    )
    pytest.importorskip("ipykernel", reason="ipykernel is not installed; pip install -e '.[test]'")
    import nbformat

    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("SPECJAX_NOTEBOOK_SMALL", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / ".ipython"))  # without the user's settings
    book = nbformat.read(NOTEBOOKS[name], as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3", resources=resources).execute()
    outputs = {}
    for cell in book.cells:
        if cell.cell_type == "code":
            data = [out.data if "data" in out else {"text/plain": out.text} for out in cell.outputs]
            texts = [text for each in data for text in each.values() if isinstance(text, str)]
            outputs[cell.source] = "\n".join(texts)
    return outputs


def output_of(outputs: dict[str, str], part: str) -> str:
    """The output of the cell that contains ``part``."""
    [output] = [text for source, text in outputs.items() if part in source]
    return output


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_chat_model(folder, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(folder / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_never_printed")
    outputs = execute("chat_model", folder, monkeypatch)
    assert not any("hf_never_printed" in text for text in outputs.values())
    settings = output_of(outputs, "HF_TOKEN is ")
    assert "model runs/small/chat/target, draft model runs/small/chat/target" in settings
    sizes = output_of(outputs, "def size")
    for_both = re.findall(r"(?m)^target: [\d.]+ million parameters, .* in float32; cache", sizes)
    assert len(for_both) == 2
    assert re.search(r"(?m)^\d+\.\d+ GB of the [\d.]+ GB that this machine has$", sizes)
    assert "float32" in output_of(outputs, "model = sj.load")
    assert "question: " in output_of(outputs, 'plain, seconds = decode("none")')
    tuned = output_of(outputs, "chosen = sj.tune")
    assert "; kept after" in tuned and "prompt_lookup" in tuned and "of plain decoding" in tuned
    both = output_of(outputs, "verdict = ")
    assert both.startswith("3 of 3 answers are those of plain decoding\n")
    assert len(re.findall(r"(?m)tau [\d.]+, +[\d.]+ tokens/s$", both)) == 2
    origins = output_of(outputs, "bench.trace(")
    count = re.search(r"prompt_lookup: (\d+) of \d+ tokens were drafted and accepted", origins)
    assert origins.count("background:rgba") == int(count[1])
    assert output_of(outputs, "sj.stream_text").strip()
    assert "yes, 3/3 prompts" in output_of(outputs, '"--config=configs/bench.py"')
    rows = json.loads((folder / "runs/small/chat/bench/results.json").read_text())["rows"]
    assert {row["category"] for row in rows} == {None, "code edit", "summary", "question"}
    assert "<svg" in output_of(outputs, "plots.draw")
    assert "no accelerator" in output_of(outputs, 'checkout / "experiments')


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_in_memory(folder, monkeypatch):
    outputs = execute("in_memory", folder, monkeypatch)
    assert "passed all checks" in output_of(outputs, "testing.check_lm")
    equal = re.findall(
        r"(\w+) +tau [\d.]+, as plain decoding: (\w+)", output_of(outputs, "same = ")
    )
    assert equal == [(name, "True") for name in ("prompt_lookup", "token_recycling", "suffix")]
    curves = output_of(outputs, 'curves["suffix"] = ')
    assert re.findall(r"(?m)^([\w, ]+?) +reward", curves) == ["plain", "suffix", "suffix, warm"]
    tunix = output_of(outputs, "ClusterConfig")
    assert "pip install google-tunix" in tunix or "tau " in tunix


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_quickstart(folder, monkeypatch):
    outputs = execute("quickstart", folder, monkeypatch)
    table = output_of(outputs, "status = run.main")
    for text in ("speed-up", "draft_model", "prompt_lookup", "yes, 2/2 prompts"):
        assert text in table
    report = folder / "runs/small/report.html"
    assert report.stat().st_size > 50_000
    assert "&lt;!doctype html&gt;" in output_of(outputs, "show(report")
    rows = json.loads((folder / "runs/small/results.json").read_text())["rows"]
    numbers = output_of(outputs, "def table")
    assert len(rows) == 4 and all(f"| {row['block_efficiency']:.3g} |" in numbers for row in rows)
    decoded = output_of(outputs, "METHODS = ")
    equal = re.findall(r"(\w+) +tau [\d.]+, as plain decoding: (\w+)", decoded)
    assert equal == [("none", "True"), ("draft_model", "True")]
    assert "|" in output_of(outputs, "sj.stream")
    gammas = json.loads((folder / "runs/small/gammas/results.json").read_text())["rows"]
    assert [row["gamma"] for row in gammas] == [1, 2]
    assert "Speed-up by the length of the draft" in output_of(outputs, "plots.speedup_against")
    best = output_of(outputs, "theory.optimal_gamma")
    assert len(re.findall(r"gamma \d+ gives [\d.]+x", best)) == 9


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_new_drafter(folder, monkeypatch):
    outputs = execute("new_drafter", folder, monkeypatch)
    assert "proposes [2, 5, 3, 1]\nproposes []" in output_of(outputs, "toy = ")
    for name in ("bigram_cache", "bigram_sampler"):
        report = output_of(outputs, f"assert check({name}")
        assert f"{name} passed all checks" in report and "FAIL" not in report
    broken = output_of(outputs, "broken = check")
    assert "bigram_sampler FAILED" in broken
    assert re.search("FAIL chain: exact law of a round", broken)
    assert re.search("FAIL chain: law, temp", broken)
    assert "ok   chain: greedy is plain greedy decoding" in broken
    table = output_of(outputs, "terminal.table(rows)")
    for method in ("bigram_cache, gamma 2", "bigram_cache, gamma 4", "prompt_lookup, gamma 4"):
        assert method in table
    assert "yes, 2/2 prompts" in table
    assert output_of(outputs, "plots.speedup_against").count("<svg") == 2
    trace = output_of(outputs, "token_traces.record")
    assert "accepted draft token" in trace and "def dedent" in trace
    page = (folder / "runs/new_drafter.html").read_text(encoding="utf-8")
    assert "bigram_cache" in page
    assert "&lt;!doctype html&gt;" in output_of(outputs, "html.render")


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_train_eagle(folder, monkeypatch):
    outputs = execute("train_eagle", folder, monkeypatch)
    assert "3 layers of width 32, 300 tokens" in output_of(outputs, "hf.load(folder)")
    curve = re.findall(r"step +(\d+): tau ([\d.]+)", output_of(outputs, "axes.plot"))
    assert [step for step, _ in curve] == ["5", "10"] and all(float(tau) >= 1 for _, tau in curve)
    table = output_of(outputs, "run.measure")
    assert "eagle3, chain" in table and "eagle3, tree" in table and "yes, 2/2 prompts" in table
    exported = output_of(outputs, "convert_heads.convert")
    first, second = re.search(r"(\d+) and (\d+) rounds; the same text: True", exported).groups()
    assert first == second and "Eagle3Speculator" in exported


@pytest.mark.notebooks
@pytest.mark.xdist_group("notebooks")
def test_tpu(folder, monkeypatch):
    outputs = execute("tpu", folder, monkeypatch)
    assert output_of(outputs, "import jaxlib").startswith("8 devices: cpu, backend cpu\n")
    same = "8 of 8 rows as on one device"
    rows, matrices = output_of(outputs, "lookup = "), output_of(outputs, "BOTH = ")
    assert re.search(rf"(?m)^data:8: .*, {same}$", rows)
    assert re.search(rf"(?m)^data:4,tensor:2: .*, {same}$", matrices)
    assert re.search(r"(?m)^layers/0/attention/q/kernel .*\(32, 32\) .*\(32, 16\)$", matrices)
    assert output_of(outputs, "record = ").endswith(f"\n{same}\n")
    assert re.search(rf"Medusa, data:8: [\d.]+ tokens .*, {same}", output_of(outputs, "heads = "))
    speeds = output_of(outputs, "speeds = []")
    assert len(re.findall(r"(?m)^(?:one device|data:8) .*( +\d+){3} tokens/s$", speeds)) == 2
    assert "no meaning" in speeds
