"""Reads what docstrings and comments say: fields of types, indented commands."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap


def literal_blocks(lines: list[str]) -> list[str]:
    """RST in which indented paragraphs after an unindented one are code.

    Docstrings of this project show commands and formulas indented, without "::". Lists and the
    sections of napoleon ("Args:") stay as they are.
    """
    result: list[str] = []
    for number, line in enumerate(lines):
        before = [each for each in lines[:number] if each.strip()]
        starts = (
            line.startswith("    ")
            and number > 0
            and not lines[number - 1].strip()
            and bool(before)
            and not before[-1].startswith(" ")
            and not re.match(r"[-*:]|\d+\. |\.\. |=+( |$)", before[-1])
            and not re.match(r"\s*([-*] |\d+\. )", line)
        )
        if starts:
            result += ["::", ""]
        elif _aligned(lines, number):
            result += ["", "::", ""]
        result.append(line)
    return result


def _aligned(lines: list[str], number: int) -> bool:
    """Whether an indented block with columns begins here, right below a line of text."""
    head = lines[number - 1] if number else ""
    if not lines[number].startswith("    ") or not head.strip() or head.startswith((" ", "-", ":")):
        return False
    block = itertools.takewhile(lambda line: line.startswith("    "), lines[number:])
    return any(re.search(r"\S {3,}\S", line) for line in block)


def docstring(thing: object) -> list[str]:
    """The lines of a docstring as RST, with code as literal blocks."""
    return literal_blocks((inspect.getdoc(thing) or "").splitlines())


def field_comments(cls: type) -> dict[str, str]:
    """Field -> the comment above it or behind it, of a class with annotated fields."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
        [node] = ast.parse(source).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return {}
    lines = source.splitlines()
    comments: dict[str, str] = {}
    for item in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            behind = lines[(item.end_lineno or 1) - 1][item.end_col_offset :].strip()
            above: list[str] = []
            place = item.lineno - 2
            while lines[place].strip().startswith("#"):
                above.insert(0, lines[place].strip().lstrip("# "))
                place -= 1
            texts = [*above, *([behind.lstrip("# ")] if behind.startswith("#") else [])]
            text = " ".join(each for each in texts if not each.startswith("noqa"))
            comments[item.target.id] = re.sub(r"\s*#?\s*noqa:.*", "", text)
    return comments
