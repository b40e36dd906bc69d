"""Counts what should fall: code lines, small files, modules with one importer.

    python tests/count.py

A code line has a token that is no comment, no docstring, no help text of a key and no part of an
import. A small file has
fewer than ``SMALL`` code lines. A lonely module is imported by one other module of the package
only, and is beside it: a reader would look for it in that module. CONTRIBUTING.md states the
numbers, and a test compares them.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "specjax"
SMALL = 40
SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Counts(NamedTuple):
    """The numbers of the package."""

    files: int
    lines: int
    small: int
    lonely: int


def code_lines(source: str) -> int:
    """Lines with a token that is no comment, docstring, help text of a key, or import."""
    left_out: set[int] = set()
    helps: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("key", "declare.key"):
            texts = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "help")]
            helps += [
                ((each.lineno, each.col_offset), (each.end_lineno or 0, each.end_col_offset or 0))
                for each in texts
            ]
        imports = isinstance(node, ast.Import | ast.ImportFrom)
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if imports or (text and isinstance(node.value.value, str)):  # type: ignore[union-attr]
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        own = any(start <= token.start and token.end <= end for start, end in helps)
        if token.type not in SKIPPED and not own and token.string != ",":
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - left_out)


def imported(path: Path, source: str, modules: set[str]) -> set[str]:
    """The modules of the package that a file imports, also inside of functions."""
    own = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(own[: len(own) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names = [module, *(f"{module}.{each.name}" for each in node.names)]
        found |= {name for name in names if name in modules}
    return found


def count() -> Counts:
    """The numbers of the package as it is."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    names = {path: _name(path) for path in files}
    modules, importers, sizes = set(names.values()), defaultdict(set), []
    for path in files:
        source = path.read_text()
        sizes.append(code_lines(source))
        for module in imported(path, source, modules) - {names[path]}:
            importers[module].add(names[path])
    lonely = 0
    for path in files:
        by = importers[names[path]]
        beside = {name.rpartition(".")[0] for name in by} == {names[path].rpartition(".")[0]}
        lonely += path.name != "__init__.py" and len(by) == 1 and beside
    small = sum(size < SMALL for size in sizes)
    return Counts(len(files), sum(sizes), small, lonely)


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    now = count()
    print(f"{now.lines:,} code lines in {now.files} files of {PACKAGE}/")
    print(f"{now.small} files with fewer than {SMALL} code lines")
    print(f"{now.lonely} modules that one module beside them imports")
