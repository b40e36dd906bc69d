"""The structure of the package: which layer may import which, and the size of what is in them."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import count
import pytest

from specjax import drafters

pytestmark = pytest.mark.fast

PACKAGE = Path(__file__).parents[1] / "specjax"
# Lowest first. A module imports from its own package and from lower layers only.
LAYERS = (
    ("bound", "errors"),
    ("checks", "files"),
    ("declare",),
    ("config", "registry"),
    ("references",),
    ("logit_maps",),
    ("sampling",),
    ("divergences",),
    ("rng",),
    ("types",),
    ("tree",),
    ("cache",),
    ("accept",),
    ("outcome",),
    ("step",),
    ("prompt",),
    ("decode",),
    ("sharding",),
    ("topology",),
    ("models",),
    ("data",),
    ("control", "sparse_views"),
    ("theory",),
    ("drafters",),
    ("bench", "convert_heads"),
    ("generation", "report", "train"),
    ("run",),
    ("testing",),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """The parts of specjax that a file imports, at any place in it: "accept", "models", ..."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("specjax.")}
    return parts - {"__version__"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_part_has_a_layer_and_few_are_at_the_top():
    parts = {part_of(path) for path in FILES} - {"__init__"}
    assert parts <= set(LAYER)
    assert len(list(PACKAGE.glob("*.py"))) <= 17


def test_the_list_of_layers_in_contributing_is_this_one():
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.partition("## Structure")[2].partition("only:\n\n")[2].partition("\n\n")[0]
    # Names, then perhaps spaces and a note; the highest layer first.
    lines = [line.strip().partition("  ")[0].split(", ") for line in block.splitlines()]
    assert lines[::-1] == [list(names) for names in LAYERS]


def test_imports_point_to_lower_layers():
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in FILES
        if (own := part_of(path)) != "__init__"
        for name in sorted(imports(path))
        if name != own and LAYER[name] >= LAYER[own]
    ]
    assert not wrong


def test_the_engine_and_the_rules_need_no_text_and_no_files():
    """A drafter or a rule can be written with the lower layers alone."""
    for path in itertools.chain(PACKAGE.glob("accept/*.py"), PACKAGE.glob("*.py")):
        # A command is no part of the engine.
        if path.name not in ("__init__.py", "convert_heads.py"):
            assert not imports(path) & {"models", "data", "drafters", "bench", "run", "train"}


def test_a_configuration_is_read_at_the_top_only():
    """Below the modes and the training recipes, arguments are plain objects."""
    readers = {path.relative_to(PACKAGE) for path in FILES if "config" in imports(path)}
    allowed = ("run", "train/recipes")
    assert not [str(path) for path in readers if not path.as_posix().startswith(allowed)]


def test_targets_training_and_reports_name_no_method():
    """A method is a name in its own file; run and generation name two as defaults."""
    families = drafters.families()
    methods = {name for family, names in families.items() if family for name in names}
    for part in ("models", "train", "report", "data", "sharding"):
        for path in PACKAGE.glob(f"{part}/**/*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    assert node.value not in methods, f"{path}, line {node.lineno}: {node.value}"
                elif isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
                    wrong = [name for name in names if ".".join(name.split(".")[2:3]) in families]
                    wrong = [name for name in wrong if name.startswith("specjax.drafters.")]
                    assert not wrong, f"{path} imports {wrong[0]}"


def test_functions_have_at_most_60_lines():
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > 60:
                    long.append(f"{path.relative_to(PACKAGE)}: {node.name} has {lines} lines")
    assert not long


def test_the_counts_fall():
    """CONTRIBUTING.md states the numbers of tests/count.py; a change may only lower them."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    form = r"([\d,]+) code lines in\s(\d+) files, (\d+) of\sthem with fewer than 40, (\d+) modules"
    found = re.search(form, " ".join(text.split()))
    assert found is not None
    lines, files, small, lonely = (int(each.replace(",", "")) for each in found.groups())
    now = count.count()
    most = count.Counts(files, lines, small, lonely)
    assert all(a <= b for a, b in zip(now, most, strict=True)), f"{now}; at most {most}"


def test_every_name_in_the_second_tier_is_a_test():
    import conftest

    known: dict[str, set[str]] = {}
    for name in conftest.second_tier():
        file, test = name.split("::")
        if file not in known:
            tree = ast.parse((PACKAGE.parent / file).read_text())
            known[file] = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        assert test.split("[")[0] in known[file], name


def test_private_modules_are_imported_in_one_file_of_the_tests():
    """tests/internals.py: who moves a module changes that file."""
    found = []
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specjax"):
                names = [*str(node.module).split("."), *(each.name for each in node.names)]
                private = [n for n in names if n.startswith("_") and not n.startswith("__")]
                if private and path.name != "internals.py":
                    found.append(f"{path.name}: {private[0]}")
    assert not found
