"""The README and the documentation: complete, with links that lead somewhere and code that runs."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import mutants
import pytest

import specjax
from specjax import accept, control, drafters, run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
    if not {"_build", "_generated", "api", "notebooks", "jupyter_execute"} & set(path.parts)
}
FENCE = re.compile(r"^```(\S*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def generated():
    """The modules of docs/_ext; ``parts`` is everything that they write."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        names = ("api_pages", "config_pages", "method_pages", "result_tables", "source_text")
        names += ("support_pages",)
        modules = {name: importlib.import_module(name) for name in names}
        modules["parts"] = importlib.import_module("generated_pages").parts()
        yield modules
    finally:
        sys.path.remove(str(DOCS / "_ext"))


# The README ------------------------------------------------------------------------------------


@pytest.mark.fast
def test_the_readme_is_short_and_names_every_drafter_and_rule():
    text = PAGES["README.md"]
    assert len(text.splitlines()) <= 120
    lists = text.partition("## What there is")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", lists))
    assert named == {*drafters.names(), *accept.names()}
    lossy = set(re.findall(r"`(\w+)`", lists.partition("Lossy by design")[2].partition("\n")[0]))
    assert lossy == {n for n in accept.names() if accept.load(n).lossless_class != "L1"}


@pytest.mark.fast
def test_the_picture_of_the_readme_is_small():
    [picture] = re.findall(r"!\[[^]]+\]\((.+?)\)", PAGES["README.md"])
    assert (ROOT / picture).stat().st_size < 300_000


@pytest.mark.fast
def test_one_command_runs_the_tests():
    command = 'pip install -e ".[test]" && pytest'
    assert command in PAGES["README.md"]
    assert command.replace("pip install", "pip install -q") in (ROOT / ".ci/run").read_text()
    assert "| `pytest` |" in PAGES["CONTRIBUTING.md"]


def _run(page: str, folder, monkeypatch, target: str, draft: str) -> None:
    """Runs the blocks "python" of a page in one namespace; excerpts are blocks "py".

    Tiny models stand for the folders, and for the names of the Hub.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPECJAX_CACHE", str(folder / "cache"))
    names: dict = {}
    blocks = [code for kind, code in FENCE.findall(PAGES[page]) if kind == "python"]
    assert blocks
    for code in blocks:
        code = code.replace('"DIR"', repr(target)).replace('"DRAFT_DIR"', repr(draft))
        code = re.sub(r'"HuggingFaceTB/[^"]+"', repr(target), code)
        exec(compile(code, page, "exec"), names)


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch, capsys, target):
    _run("README.md", tmp_path, monkeypatch, target, "")
    texts = eval(capsys.readouterr().out)
    assert len(texts) == 2 and all(texts)


@pytest.mark.slow
@pytest.mark.parametrize("page", [n for n, t in PAGES.items() if "\n```python\n" in t])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, target, draft):
    # With room for the default number of new tokens, which the tiny model does not have.
    folders = [str(shutil.copytree(each, tmp_path / Path(each).name)) for each in (target, draft)]
    for folder in folders:
        path = Path(folder, "config.json")
        config = json.loads(path.read_text()) | {"max_position_embeddings": 512}
        path.write_text(json.dumps(config))
    _run(page, tmp_path, monkeypatch, *folders)


@pytest.mark.fast
def test_the_number_of_mutants():
    published, unseen = len(mutants.PUBLISHED), len(mutants.UNSEEN)
    text = " ".join(PAGES["docs/exactness.md"].split())
    number = f"{published + unseen} mistakes, {published} of or near published code and {unseen} "
    assert number in text


# Links and commands ----------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_to_files(page):
    """Sphinx checks links inside docs/; this also covers the README, and needs no Sphinx."""
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page])):
        path = link.partition("#")[0]
        if "://" in link or not path:
            continue
        path = path.replace("notebooks/", "../colab/") if path.startswith("notebooks/") else path
        assert ((ROOT / page).parent / path).exists(), link


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    """Paths of the repository in code style, apart from patterns and names to be chosen."""
    folders = "specjax|configs|tests|experiments|colab|docs"
    for path in re.findall(rf"`((?:{folders})/[\w./]+)(?::\w+)?`", PAGES[page]):
        if not re.search(r"[A-Z]{3}", path) and path != "docs/_build":
            assert (ROOT / path).exists(), path


def _commands(text: str) -> list[list[str]]:
    """The commands of a page that run a configuration."""
    blocks = "\n".join(code for kind, code in FENCE.findall(text) if kind in ("", "console"))
    lines = [line.removeprefix("$ ") for line in blocks.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if "-m specjax.run" in line]
    return [c for c in commands if c[3].startswith("--config=configs/") and "NAME" not in c[3]]


@pytest.mark.fast
def test_commands_have_keys_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [each for text in PAGES.values() for each in _commands(text)]
    assert len(commands) > 10
    for command in commands:
        # --methods is no key of a configuration, and a reader's own module does not exist here.
        flags = [f for f in command[3:] if not re.match(r"--methods=|\S+=my_\w+:make$", f)]
        config, _ = run.parse(["specjax.run", *flags])  # UserError for a key that does not exist
        name = config.get("drafter", {}).get("name")
        if name not in (None, "auto") and ":" not in name:
            drafters.load(name)


# What is generated ------------------------------------------------------------------------------


@pytest.mark.fast
def test_every_public_name_is_in_the_reference(generated):
    text = "\n".join(t for name, t in generated["parts"].items() if name.startswith("api/"))
    documented = set()
    for module, members in re.findall(
        r"^\.\. automodule:: (\S+)(?:\n   :members: (.*))?", text, re.MULTILINE
    ):
        documented |= {module, *(f"{module}.{name}" for name in members.split(", "))}
    required = set(generated["api_pages"].required())
    assert required <= documented, sorted(required - documented)
    home = generated["api_pages"].home
    assert {home("specjax", name) for name in specjax.__all__} <= required
    # Autodoc leaves out what has no docstring.
    assert not required & set(generated["api_pages"].undocumented())
    pages = sorted(name for name in generated["parts"] if name.startswith("api/"))
    listed = re.findall(r"^api/\w+$", generated["parts"]["_generated/reference.md"], re.MULTILINE)
    assert sorted(f"{name}.rst" for name in listed) == pages


@pytest.mark.fast
def test_every_method_and_configuration_has_a_section(generated):
    included = {
        f"_generated/{name}.md"
        for page, text in PAGES.items()
        for name in re.findall(r"\{include\} (?:\.\./)?_generated/(\w+)\.md", text)
    }
    parts = {n: t for n, t in generated["parts"].items() if n.startswith("_generated/")}
    assert included == set(parts)
    labels = re.findall(r"^\(([\w-]+)\)=$", "\n".join(parts.values()), re.MULTILINE)
    assert len(labels) == len(set(labels))
    expected = [f"drafter-{n}" for n in drafters.names()] + [f"rule-{n}" for n in accept.names()]
    expected += [f"controller-{name}" for name in control.names()]
    expected += [f"config-{path.stem}" for path in (ROOT / "configs").glob("[!_]*.py")]
    assert set(expected) == set(labels)


@pytest.mark.fast
def test_the_matrix_of_support_is_that_of_the_tests_and_studies(generated):
    pages, tables = generated["support_pages"], {}
    for name in ("support_rules", "support_runs"):
        lines = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in generated["parts"][f"_generated/{name}.md"].splitlines()
            if line.startswith("|")
        ]
        heads = [head.split("`")[1] if "`" in head else head for head in lines[0]]
        tables[name] = {
            line[0].removeprefix("[](#drafter-").rstrip(")"): dict(zip(heads, line, strict=True))
            for line in lines[2:]
        }
        assert list(tables[name]) == drafters.names()
    rules, runs = tables.values()
    assert rules["medusa"]["recursive"] == "proven" and rules["medusa"]["k_seq"] == ""
    assert {rules["draft_model"][rule].strip("*") for rule in ("chain", "block")} == {"proven"}
    # Every drafter and every rule has a pair, and one in the tests of every change.
    known = pages.pairs()
    assert {name for name, _ in known} == set(drafters.names())
    assert {rule for _, rule in known} == set(accept.names())
    for index, names in ((0, drafters.names()), (1, accept.names())):
        first = {pair[index] for pair, by_default in known.items() if by_default}
        assert first == set(names) - {"spec_drafter"}
    lossy = [name for name in accept.names() if accept.load(name).lossless_class != "L1"]
    assert not any("proven" in row[rule] for row in rules.values() for rule in lossy)
    assert "real_model" in runs["prompt_lookup"]["T > 0, batch"]
    assert runs["controlled"]["GPU"] == "accelerator" and "v5e" in runs["eagle"]["compiled"]


@pytest.mark.fast
def test_what_the_pages_say_about_heads_of_a_chat_model():
    """docs/results.md, "A real chat model": tau, speed-ups, and predictions of the roofline."""
    file = ROOT / "experiments" / "real_model" / "heads.json"
    rows = [row for row in json.loads(file.read_text())["rows"] if row["category"] is None]
    for setting in itertools.product((0, 1), (1, 4)):
        own = {
            row["method"].removesuffix(" gamma=3"): row
            for row in rows
            if (row["temperature"], row["batch_size"]) == setting
        }
        tau = {name: row["block_efficiency"] for name, row in own.items()}
        trained = set(own) - {"prompt_lookup gamma=4"}
        assert max(tau, key=lambda name: tau[name]) == "eagle3 tree=dynamic"
        assert all(own[name]["speedup"] < 1 for name in trained)
        if setting[0]:
            assert tau["eagle3 tree=chain:3 siblings=iid"] > tau["eagle3 tree=chain:3"] + 0.1
        for name in trained:
            assert (own[name]["predicted"]["H100 SXM"] > 1) == name.startswith("eagle3")
        if setting == (0, 1):
            chain = own["eagle3 tree=chain:3"]
            assert round(chain["block_efficiency"] / chain["speedup"], 1) == 1.7
            assert round(chain["block_efficiency"], 2) == 1.35


@pytest.mark.fast
def test_keys_have_types_defaults_and_meanings(generated):
    pages = generated["method_pages"]
    for name in drafters.names():
        keys = pages.keys(drafters.load(name)).values()
        assert all(key.facts.help and key.annotation for key in keys), name
    table = pages.key_table(pages.keys(drafters.load("draft_model")).values())
    assert "| `gamma` | `int \\| None` | `None` | the length of a chain, instead of " in table
    assert "| `model` | `LM \\| str \\| os.PathLike` | needed | the draft model: " in table
    medusa = pages.key_table(pages.keys(drafters.load("medusa")).values())
    assert "| `tree` | `Topology \\| str` | `''` | a shape (" in medusa
    # The keys of a loss, with the method's values.
    assert "| `loss.steps` | `int` | `7` | steps of " in pages.drafter_section("eagle3")
    assert "loss." not in pages.drafter_section("prompt_lookup")


@pytest.mark.fast
def test_every_committed_result_has_a_table_and_its_source(generated):
    studies = {path.parent.name for path in (ROOT / "experiments").glob("*/results.json")}
    tables = generated["result_tables"].parts()
    assert set(tables) == studies
    for text in tables.values():
        assert re.search(r"- Command: `PYTHONPATH=\. python experiments/\w+/run\.py", text)
        assert re.search(r"- Date: \d{4}-\d\d-\d\d\n", text) and "- Machine: " in text
        assert text.count("\n| ") > 5 and "None" not in text


@pytest.mark.fast
def test_indented_code_of_docstrings_becomes_literal(generated):
    literal = generated["source_text"].literal_blocks
    assert literal(["Runs it.", "", "    a command", "", "Text."])[2:4] == ["::", ""]
    for lines in (["- a list", "", "    more of it"], ["Args:", "    x: a number"]):
        assert literal(lines) == lines
