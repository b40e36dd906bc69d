"""The keys of a configuration with their comments: what ``--help`` with ``--config`` prints.

The comments are those behind or above the assignments in the configuration's file and in the
configurations that it imports; those of drafters come from their docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specjax import drafters
from specjax.config import Config
from specjax.errors import UserError
from specjax.run import catalog, overrides

# Functions of configs/generate.py whose local variable ``keys`` is a group of this name.
_GROUPS = {name: name for name in ("accept_keys", "beams", "drafter", "sampling")}


def page(config: Config, file: Path) -> Group:
    """All keys of a configuration: path, value and comment."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    comments = _all_comments(file)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", max_width=60)
    table.add_column(overflow="fold")
    methods = dict(_methods(config))
    for path, value in overrides.leaves(config):
        group, _, key = path.rpartition(".")
        if group in methods:
            own = methods[group]
            if key not in own and key not in ("name", "drafters", "warm", "accept") and not value:
                continue  # a key of another drafter
            comment = own.get(key) or _comment(comments, f"drafter.{key}")
        else:
            comment = _comment(comments, path)
        table.add_row(Text(f"--config.{path}={value}"), Text(comment))
    named = ", ".join(dict.fromkeys(config_name for config_name in _names(config)))
    notes = (
        [Text(f"keys of another drafter: --explain=NAME ({named} here)", "dim")] if named else []
    )
    return Group(Text(text), Text(), Text(f"keys of {file}:", "bold"), table, *notes)


def _methods(config: Config, path: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Path of each group that holds a drafter's keys -> key -> comment."""
    for key in config:
        value = config[key]
        if not hasattr(value, "items"):
            continue
        name = value.get("name")
        if isinstance(name, str) and (name in drafters.names() or ":" in name):
            try:
                lines = catalog.key_lines(drafters.load(name))
            except UserError:
                lines = []
            yield f"{path}{key}", {line.name: line.comment for line in lines}
        yield from _methods(value, f"{path}{key}.")


def _names(config: Config) -> Iterator[str]:
    for path, _ in _methods(config):
        group = config
        for part in path.split("."):
            group = group[part]
        yield group["name"]


def _comment(comments: dict[str, str], path: str) -> str:
    """The comment of the longest end of the path that has one."""
    parts = path.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((comments[end] for end in ends if end in comments), "")


def _all_comments(file: Path, seen: set[Path] | None = None) -> dict[str, str]:
    """Comments in a file, then in the configurations that it imports from its own folder."""
    seen = set() if seen is None else seen
    if file.resolve() in seen or not file.is_file():
        return {}
    seen.add(file.resolve())
    source = file.read_text(encoding="utf-8")
    result = comments_in(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "configs":
            for alias in node.names:
                folder = file.parent if file.parent.name == "configs" else catalog.configs_dir()
                result = _all_comments(folder / f"{alias.name}.py", seen) | result
    return result


def comments_in(source: str) -> dict[str, str]:
    """Path of a key -> the comment of its assignment, in a configuration's source.

    "config.train.steps = 1  # text" is the path "train.steps"; in a function that returns a group,
    the group's name comes first.
    """
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    lines, result = source.splitlines(), {}
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign):
                continue
            path, comment = _path(node.targets[0], function.name), _at(node, comments, lines)
            if path and comment:
                result.setdefault(path, comment)
    return result


def _path(target: ast.expr, function: str) -> str:
    """The path of a key that is assigned to; "" for any other assignment."""
    text = ast.unparse(target)
    if not re.fullmatch(r"\w+(\.\w+)+", text):
        return ""
    variable, _, rest = text.partition(".")
    if variable == "config":
        return rest
    return f"{_GROUPS.get(function, variable)}.{rest}"


def _at(node: ast.stmt, comments: dict[int, str], lines: list[str]) -> str:
    """The comment behind a statement, or the lines of comments above it."""
    end = node.end_lineno or node.lineno
    behind = [comments[line] for line in range(node.lineno, end + 1) if line in comments]
    if behind:
        return " ".join(behind)
    above, line = [], node.lineno - 1
    while line in comments and lines[line - 1].lstrip().startswith("#"):
        above.insert(0, comments[line])
        line -= 1
    return " ".join(above)
