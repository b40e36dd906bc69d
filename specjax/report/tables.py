"""The rows of results.json as tables elsewhere: CSV, Markdown, LaTeX, and pandas."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.errors import library
from specjax.report import inputs
from specjax.report.columns import table

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingImports]  (an extra)

# Keys of results.json that are columns of every row, so that several runs can be in one table.
RUN = ("target", "max_new_tokens", "seed", "repeats", "git", "date")
# Columns with their details; what stands between a value and its detail.
JOINTS: dict[str, str] = dict.fromkeys(
    ("class", "block_efficiency", "acceptance_rate", "speedup", "total_variation"), " "
)


def to_frame(
    results: Mapping[str, Any] | str | os.PathLike, *, categories: bool = False
) -> pandas.DataFrame:
    """The finished rows as a pandas DataFrame: those over all prompts, or those of categories.

    Args:
        results: the object of results.json, its path, or its directory.
        categories: False: one row per method and setting; True: one per category of prompts. They
            are never in one table: a mean over both would count prompts twice.

    Returns:
        The columns are the keys of a row (``specjax.bench.results``), with dots for keys inside
        others ("costs_ms.step") and ".low", ".high" for ranges; before them those of the run
        ("target.name", "git.commit", "max_new_tokens", ...).

    Raises:
        UserError: pandas is not installed, or results.json cannot be used.
    """
    pandas = library("pandas", "frame", "to_frame needs pandas")
    if not isinstance(results, Mapping):
        results = inputs.read_results(inputs.results_path(Path(results).expanduser()))
    return pandas.DataFrame(flat(results, categories=categories))


def flat(results: Mapping[str, Any], *, categories: bool = False) -> list[dict[str, Any]]:
    """The rows as flat dicts, with the columns of ``to_frame``."""
    run = dict(_flatten({key: results.get(key) for key in RUN}))
    return [run | dict(_flatten(row)) for row in _chosen(results, categories)]


def _chosen(results: Mapping[str, Any], categories: bool) -> list[dict]:
    rows, _ = inputs.finished_rows(results.get("rows") or [])
    return [row for row in rows if (row.get("category") is not None) == categories]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name of the column, value) of all values, and of those inside others."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        is_range = name.startswith("spread.") or name.endswith("_interval")
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{name}.")
        elif is_range and isinstance(value, list) and len(value) == 2:
            yield from zip((f"{name}.low", f"{name}.high"), value, strict=True)
        else:
            yield name, value


def to_csv(results: Mapping[str, Any], *, categories: bool = False) -> str:
    """CSV with the columns of ``to_frame``: numbers unrounded, lists as JSON, null as nothing.

    A text that a spreadsheet would compute (its first character is =, +, - or @) begins with an
    apostrophe.
    """
    rows = flat(results, categories=categories)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    lines, file = [heads, *([row.get(head) for head in heads] for row in rows)], io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(map(_plain, line) for line in lines)
    return file.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    if not isinstance(value, str):
        return value
    computed = value.lstrip().startswith(("=", "+", "-", "@"))
    return "'" * computed + inputs.visible(value)


def to_markdown(
    results: Mapping[str, Any], *, categories: bool = False, columns: Sequence[str] = ()
) -> str:
    """A table in GitHub's Markdown: rounded, with standard errors and 95 % intervals.

    ``columns`` are the names of those to show; () = all that hold a measurement. Raises UserError.
    """
    chosen, texts = table(_chosen(results, categories), JOINTS, columns)
    texts = [[re.sub(r"([\\|<*`])", r"\\\1", text) for text in line] for line in texts]
    rule = ["---:" if column.number_format else "---" for column in chosen]
    lines = [[column.head for column in chosen], rule, *texts]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
} | {c: f"\\{c}" for c in "&%$#_{}"}


def to_latex(
    results: Mapping[str, Any],
    *,
    categories: bool = False,
    columns: Sequence[str] = (),
    caption: str = "",
    label: str = "",
) -> str:
    """A ``tabular`` for LaTeX with the package booktabs; the same columns as in Markdown.

    It is inside of a ``table`` if it has a caption (in LaTeX) or a label. Raises UserError.
    """
    chosen, texts = table(_chosen(results, categories), JOINTS, columns)
    body = [["".join(LATEX.get(c, c) for c in text) for text in line] for line in texts]
    form = "".join("r" if column.number_format else "l" for column in chosen)
    lines = [rf"\begin{{tabular}}{{{form}}}", r"\toprule"]
    lines += [_latex_line([column.latex or column.head for column in chosen]), r"\midrule"]
    lines += [*map(_latex_line, body), r"\bottomrule", r"\end{tabular}"]
    if caption or label:
        texts_of = {"caption": caption, "label": label}
        named = [rf"\{name}{{{text}}}" for name, text in texts_of.items() if text]
        lines = [r"\begin{table}", r"\centering", *named, *lines, r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_line(texts: Sequence[str]) -> str:
    # A bracket at the beginning would be an argument of the line break before it.
    line = " & ".join(texts) + r" \\"
    return "{}" + line if line.startswith("[") else line


FORMATS = {"csv": to_csv, "latex": to_latex, "markdown": to_markdown}
