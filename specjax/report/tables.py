"""The rows of results.json as tables elsewhere: CSV, Markdown, LaTeX, and pandas."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specjax.errors import UserError
from specjax.report import _rows, _text, inputs
from specjax.report.inputs import number_of

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingImports]  (an extra)

# Keys of results.json that are columns of every row, so that several runs can be in one table.
RUN = ("target", "max_new_tokens", "seed", "repeats", "git", "date")


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
    try:
        import pandas  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError("to_frame needs pandas: pip install 'specjax[frame]'") from None
    return pandas.DataFrame(flat(read(results), categories=categories))


def read(results: Mapping[str, Any] | str | os.PathLike) -> Mapping[str, Any]:
    """The object of results.json. Raises UserError."""
    if isinstance(results, Mapping):
        return results
    return inputs.read_results(inputs.results_path(Path(results).expanduser()))


def flat(results: Mapping[str, Any], *, categories: bool = False) -> list[dict[str, Any]]:
    """The rows as flat dicts, with the columns of ``to_frame``."""
    run: dict[str, Any] = {}
    for key in RUN:
        _flatten(run, key, results.get(key))
    rows = []
    for row in _chosen(results, categories):
        rows.append(dict(run))
        for key, value in row.items():
            _flatten(rows[-1], key, value)
    return rows


def _chosen(results: Mapping[str, Any], categories: bool) -> list[dict]:
    rows, _ = inputs.finished_rows(results.get("rows") or [])
    return [row for row in rows if (row.get("category") is not None) == categories]


def _flatten(into: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(into, f"{key}.{name}", inner)
    elif _is_range(key, value):
        into[f"{key}.low"], into[f"{key}.high"] = value
    else:
        into[key] = value


def _is_range(key: str, value: Any) -> bool:
    named = key.startswith("spread.") or key.endswith("_interval")
    return named and isinstance(value, list) and len(value) == 2


def to_csv(results: Mapping[str, Any], *, categories: bool = False) -> str:
    """CSV with the columns of ``to_frame``: numbers unrounded, lists as JSON, null as nothing."""
    rows = flat(results, categories=categories)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(heads)
    for row in rows:
        writer.writerow([_plain(row.get(head)) for head in heads])
    return file.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, bool | list | dict):
        return json.dumps(value)
    return _text.visible(value) if isinstance(value, str) else value


class Column(NamedTuple):
    """A column of a rounded table."""

    head: str
    text: Callable[[dict], str]
    number: bool = True


def _number(key: str, number_format: str) -> Callable[[dict], str]:
    def text(row: dict) -> str:
        value = number_of(row.get(key))
        return "-" if value is None else number_format.format(value)

    return text


def _with_error(key: str) -> Callable[[dict], str]:
    def text(row: dict) -> str:
        error = number_of(_rows.part(row, "standard_errors").get(key))
        shown = _number(key, "{:.2f}")(row)
        return shown if error is None else f"{shown} ± {error:.2f}"

    return text


def _speedup(row: dict) -> str:
    shown, ends = _number("speedup", "{:.2f}x")(row), row.get("speedup_interval")
    numbers = [number_of(end) for end in ends] if isinstance(ends, list) else []
    if len(numbers) != 2 or None in numbers:
        return shown
    return f"{shown} [{numbers[0]:.2f}, {numbers[1]:.2f}]"


def _efficiency(row: dict) -> str:
    return "n/m" if _rows.too_efficient(row) else _number("system_efficiency", "{:.2f}")(row)


def _lossless(row: dict) -> str:
    check = _rows.part(row, "lossless")
    return {True: "yes", False: "NO", None: "?"}[inputs.passed(check)] if check else "-"


def _word(key: str) -> Callable[[dict], str]:
    return lambda row: "-" if row.get(key) is None else str(row[key])


COLUMNS = (
    Column("method", _word("method"), False),
    Column("category", _word("category"), False),
    Column("prompts", _word("prompt_set"), False),
    Column("rule", _word("accept"), False),
    Column("class", lambda row: _rows.lossless_class(row) or "-", False),
    Column("T", _number("temperature", "{:g}")),
    Column("batch", _number("batch_size", "{:g}")),
    Column("tau", _with_error("block_efficiency")),
    Column("loops", _number("repeated_4grams", "{:.0%}")),
    Column("alpha", _with_error("acceptance_rate")),
    Column("tokens/s", _number("tokens_per_second", "{:.0f}")),
    Column("plain", _number("autoregressive_tokens_per_second", "{:.0f}")),
    Column("speed-up", _speedup),
    Column("predicted", _number("predicted_speedup", "{:.2f}x")),
    Column("eff", _efficiency),
    Column("lossless", _lossless, False),
)


def _cells(rows: Sequence[dict]) -> tuple[list[Column], list[list[str]]]:
    """The columns that distinguish rows or hold a measurement, and the texts of each row."""
    several = {key: len({str(row.get(key)) for row in rows}) > 1 for key in ("prompt_set",)}
    chosen = [
        column
        for column in COLUMNS
        if (column.head != "category" or any(row.get("category") is not None for row in rows))
        and (column.head != "prompts" or several["prompt_set"])
    ]
    return chosen, [[_text.one_line(column.text(row)) for column in chosen] for row in rows]


def to_markdown(results: Mapping[str, Any], *, categories: bool = False) -> str:
    """A table in GitHub's Markdown: rounded, with standard errors and 95 % intervals."""
    columns, texts = _cells(_chosen(results, categories))
    texts = [[_escaped(text, "\\|<*`") for text in line] for line in texts]
    rule = ["---:" if column.number else "---" for column in columns]
    lines = [[column.head for column in columns], rule, *texts]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _escaped(text: str, special: str) -> str:
    return "".join(f"\\{c}" if c in special else c for c in text)


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
} | {c: f"\\{c}" for c in "&%$#_{}"}


def to_latex(results: Mapping[str, Any], *, categories: bool = False) -> str:
    """A ``tabular`` for LaTeX with the package booktabs; the same columns as in Markdown."""
    columns, texts = _cells(_chosen(results, categories))
    names = {"tau": r"$\tau$", "alpha": r"$\alpha$"}
    heads = [names.get(column.head, column.head) for column in columns]
    body = [["".join(LATEX.get(c, c) for c in text) for text in line] for line in texts]
    form = "".join("r" if column.number else "l" for column in columns)
    lines = [rf"\begin{{tabular}}{{{form}}}", r"\toprule", _latex_line(heads), r"\midrule"]
    lines += [_latex_line(line) for line in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_line(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


FORMATS = {"csv": to_csv, "latex": to_latex, "markdown": to_markdown}
