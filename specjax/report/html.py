"""The report of a bench: one HTML file with the table, the plots and the viewer of token traces.

The page loads nothing from the network.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specjax.errors import UserError, on_disk
from specjax.files import replacing
from specjax.report import advice, columns, inputs
from specjax.report.columns import BY_KEY, COLUMNS, FACTS, Column, spell
from specjax.report.inputs import TIME_PARTS, cut, number_of, part

HERE = Path(__file__).parent
STYLES = ("style.css", "viewer.css")
SCRIPTS = ("table.js", "tokens.js", "draft.js", "tip.js", "viewer.js")  # in the order of their use
DASH = "\N{EN DASH}"  # not measured
# Characters shown of the first column, and of the other columns.
MOST, MOST_OTHERS = 60, 24
# The columns of the categories of a row; "overlap" is not one of the other tables.
CATEGORY = ("block_efficiency", "repeated_4grams", "acceptance_rate", "overlap")
CATEGORY += ("tokens_per_second", "speedup")


class Cell(NamedTuple):
    """One cell of the table."""

    text: str
    sort: float | str
    style: str = ""  # a CSS class
    below: str = ""  # a second line in small letters
    full: str = ""  # the texts that were cut, uncut


class Bar(NamedTuple):
    """A share between 0 and 1, drawn as a bar."""

    head: str
    text: str
    share: float


class Line(NamedTuple):
    """A line of the table, and the details that unfold under it."""

    cells: list[Cell]
    facts: list[tuple[str, str]]
    bars: list[tuple[str, list[Bar]]]
    split: list[Bar]
    categories: list[list[str]]


def lines(rows: Sequence[dict]) -> list[Line]:
    """One line for each row over all prompts, with the rows of its categories inside.

    A row of a category without such a row has a line of its own.
    """
    parts: dict[int, list[dict]] = {}
    for row, owner in zip(rows, inputs.owners(rows), strict=True):
        parts.setdefault(id(row if owner is None else owner), []).append(row)
    wholes = [row for row in rows if id(row) in parts]
    return [_line(row, [one for one in parts[id(row)] if one is not row]) for row in wholes]


def verdict(shown: Sequence[Line]) -> str:
    """One sentence that counts the results of the lossless checks."""
    styles = [line.cells[-1].style for line in shown]
    lossy = [any(cell.style == "lossy" for cell in line.cells) for line in shown]
    unsure = [style not in ("passed", "failed") for style in styles]
    others = sum(a and not b for a, b in zip(unsure, lossy, strict=True))
    parts = [
        f"{styles.count('passed')} of {len(shown)} rows passed their lossless check",
        f"{styles.count('failed')} failed",
    ]
    parts += [f"{others} had no check or no clear result"] if others else []
    parts += [f"{sum(lossy)} of class L3: lossy by design"] if any(lossy) else []
    return ", ".join(parts) + "."


def _line(row: dict, categories: Sequence[dict]) -> Line:
    overlap = part(row, "overlap")
    classes = part(overlap, "by_class")
    groups = (
        ("acceptance by depth", _numbered(row.get("acceptance_by_depth"))),
        ("overlap by depth", _numbered(overlap.get("by_depth"))),
        ("overlap by token class", {key: part(classes, key).get("alpha") for key in classes}),
    )
    shares = part(row, "time_split")
    known = [name for name in TIME_PARTS if name in shares]
    split = {name: shares[name] for name in dict.fromkeys((*known, *shares))}
    return Line(
        cells=[_cell(row, column) for column in COLUMNS],
        facts=_row_facts(row, overlap),
        bars=[(head, _bars(values)) for head, values in groups if values],
        split=_bars(split, "{:.0%}"),
        categories=[_category(one, part(overlap, "by_category")) for one in categories],
    )


def _row_facts(row: dict, overlap: dict) -> list[tuple[str, str]]:
    """(name, value) of the details that are one number or one text."""
    known = [fact for fact in FACTS if row.get(fact[0]) is not None]
    facts = [(head, spell(row[key], number_format) or DASH) for key, head, number_format in known]
    sizes = part(row, "parameters")
    facts += [(f"{key} parameters", spell(sizes[key], "{:,.0f}") or DASH) for key in sizes]
    facts += _costs(row)
    if passes := _ends(part(row, "spread").get("speedup"), "{:.2f}"):
        facts.append(("speed-up of the passes", passes))
    if overlap:
        alpha = spell(overlap.get("alpha"), "{:.3f}") or DASH
        tokens = spell(overlap.get("tokens"), "{:,.0f}") or DASH
        facts.append(("overlap", f"{alpha}, {tokens} tokens"))
    if check := part(row, "lossless"):
        facts.append(("check", f"{check.get('check') or DASH}: {check.get('detail') or DASH}"))
    if sentence := columns.near_ties(row):
        facts.append(("near ties", sentence))
    return facts


def _cell(row: dict, column: Column) -> Cell:
    text, below, style = column.text(row), column.detail(row), ""
    sort: float | str = text
    if column.number_format:
        number, style = number_of(row.get(column.key)), "number"
        sort = "" if number is None else number
    elif column.key == "lossless":
        ranks = {"": (0, ""), "NO": (1, "failed"), "?": (2, "unsure"), "yes": (3, "passed")}
        sort, style = ranks[text]
    elif column.key == "class" and text == "L3":
        style = "lossy"
    elif column.key == "prompt_set" and not text:
        text, below = below, ""
    most = MOST if column is COLUMNS[0] else MOST_OTHERS
    whole = text or DASH, below
    shown = [cut(each, most) for each in whole]
    full = "; ".join(a for a, b in zip(whole, shown, strict=True) if a != b)
    return Cell(shown[0], sort, style, shown[1], full)


def _costs(row: dict) -> list[tuple[str, str]]:
    """The time of each part of a round, with its spread, and a hint where it cannot be right."""
    costs, spread = part(row, "costs_ms"), part(part(row, "spread"), "costs_ms")
    facts = []
    for key, value in costs.items():
        passes = _ends(spread.get(key), "{:.3g}")
        facts.append((key, (spell(value, "{:.3g} ms") or DASH) + (f" ({passes})" * bool(passes))))
    step, verify = number_of(costs.get("step")), number_of(costs.get("verify"))
    efficiency = number_of(row.get("system_efficiency"))
    why = "the machine was busy, or too little was timed"
    if step is not None and verify is not None and verify < step:
        facts.append(("hint", f"verification took less time than a one-token pass: {why}"))
    elif efficiency is not None and efficiency > 1.05:
        facts.append(("hint", f"the speed-up is above what the costs of the parts allow: {why}"))
    return facts


def _ends(values: Any, number_format: str) -> str:
    return columns.ends(values, f"{number_format}{DASH}{number_format}")


def _category(row: dict, overlaps: dict) -> list[str]:
    """The texts of a category's line: its name, its number of prompts, and ``CATEGORY``."""
    name = str(row["category"])
    overlap = part(row, "overlap") or part(overlaps, name)
    texts = [cut(name, MOST), BY_KEY["prompt_set"].detail(row) or DASH]
    for key in CATEGORY:
        if key == "overlap":
            texts.append(spell(overlap.get("alpha"), "{:.3f}") or DASH)
        else:
            column = BY_KEY[key]
            texts.append(f"{column.text(row) or DASH} {column.detail(row)}".rstrip())
    return texts


def _bars(values: Mapping[str, Any], number_format: str = "{:.2f}") -> list[Bar]:
    numbers = {str(head): number_of(value) for head, value in values.items()}
    return [
        Bar(cut(head, MOST), spell(number, number_format), min(max(number, 0.0), 1.0))
        for head, number in numbers.items()
        if number is not None
    ]


def _numbered(values: Any) -> dict[str, Any]:
    return {str(n): value for n, value in enumerate(values, 1)} if isinstance(values, list) else {}


def render(
    results: dict,
    traces: Sequence[dict],
    title: str,
    *,
    plots: dict[str, str],
    notices: Sequence[str] = (),
) -> str:
    """The report as one self-contained page.

    Rows and traces that cannot be shown are left out, with a notice.

    Args:
        results: the object of results.json.
        traces: objects of trace.jsonl.
        title: the heading.
        plots: name -> SVG text.
        notices: shown at the top of the page.
    """
    return _render(results, traces, title, plots, notices)[0]


def build(
    workdir: Path, out: Path | None = None, *, trace: Path | None = None
) -> tuple[Path, list[str]]:
    """Builds the report of a bench; returns (its path, all its notices).

    The heading is the name of the directory.

    Args:
        workdir: the directory with results.json, or that file.
        out: the report's path; default report.html beside results.json.
        trace: the file of traces; default trace.jsonl beside results.json, if there is one.

    Raises:
        UserError: results.json, or the file named by ``trace``, cannot be used (see ``inputs``);
            there is nothing to show; ``out`` cannot be written, or is a file that is read.
    """
    path = inputs.results_path(workdir)
    results = inputs.read_results(path)
    beside = path.with_name("trace.jsonl")
    trace_path = trace or (beside if os.path.lexists(beside) else None)
    out = out or path.with_name("report.html")
    if any(_same_file(out, measured) for measured in (path, beside, *([trace] if trace else []))):
        raise UserError(
            f"cannot write the report {out}: it would replace what was measured; name another file"
        )
    traces, notices = _traces(trace_path, named=trace is not None)
    rows, _ = inputs.finished_rows(results["rows"])
    if not rows and not traces:
        why = "there is no trace.jsonl"
        if trace_path is not None:
            why = f"{trace_path.name} has no trace that can be shown"
        raise UserError(f"{path} has no finished rows, and {why}; there is nothing to report")
    if out.is_dir():
        raise UserError(f"cannot write the report {out}: it is a directory; name a file")
    svgs, more = _plots(rows)
    page, notices = _render(results, traces, path.resolve().parent.name, svgs, [*notices, *more])
    with on_disk(f"cannot write the report {out}", "name another file"), replacing(out) as fresh:
        fresh.write_bytes(page.encode(errors="replace"))
    return out, notices


def pack(trace: dict) -> str:
    """A trace as JSON that is safe inside a script element.

    {"prompt", "greedy", "strings", "rounds"}: each round is two flat lists of values, of the
    tokens and of the draft nodes, in which texts are indices of ``strings``. ``greedy`` is whether
    the trace was decoded at temperature 0: its probabilities are then those of temperature 1.
    """
    strings: dict[str, int] = {}

    def flat(tokens: list[list]) -> list:
        values = []
        for text, number, link, target, draft, rank, *kept in tokens:
            index = strings.setdefault(text, len(strings))
            values += [index, number, link, _rounded(target), _rounded(draft), rank, *kept]
        return values

    rounds = [[flat(one["out"]), flat(one["draft"])] for one in trace["rounds"]]
    packed = {
        "prompt": trace["prompt"],
        "greedy": number_of(trace.get("temperature")) == 0,
        "strings": list(strings),
        "rounds": rounds,
    }
    return json.dumps(packed, separators=(",", ":")).replace("<", "\\u003c")


def _render(
    results: dict, traces: Sequence[dict], title: str, plots: dict[str, str], notices: Sequence[str]
) -> tuple[str, list[str]]:
    """(page, all its notices)."""
    rows, unfinished = inputs.finished_rows(results.get("rows") or [])
    notices = [*notices, *inputs.first_notices(unfinished, "rows are left out")]
    if not rows:
        notices.append("there are no finished rows: nothing was measured, or the run ended early")
    elif not plots:
        notices.append("there are no plots")
    shown, more = _shown_traces(traces)
    notices = [inputs.one_line(text) for text in [*notices, *more]]
    far = any(map(columns.has_distance, rows))
    kept = [column.key != "total_variation" or far for column in COLUMNS]
    shown_rows = [
        line._replace(cells=list(itertools.compress(line.cells, kept))) for line in lines(rows)
    ]
    heads = ("category", "prompts", *CATEGORY)
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("template.html").render(
        title=title,
        facts=_facts(results),
        command=results.get("command"),
        notices=notices,
        columns=list(itertools.compress(COLUMNS, kept)),
        details=columns.DETAILS.items(),
        category_heads=[BY_KEY[key].head if key in BY_KEY else key for key in heads],
        rows=shown_rows,
        parts=TIME_PARTS,
        verdict=verdict(shown_rows),
        advice=advice.lines(rows),
        plots=[
            (name.replace("_", " "), Markup(svg[svg.find("<svg") :])) for name, svg in plots.items()
        ],
        traces=[(_label(n, trace), Markup(pack(trace))) for n, trace in enumerate(shown, 1)],
        style=Markup("\n".join(_asset(name) for name in STYLES)),
        scripts=[Markup(_asset(name)) for name in SCRIPTS],
    )
    return page, notices


def _shown_traces(traces: Sequence[dict]) -> tuple[list[dict], list[str]]:
    """(the traces that can be shown, notices on the others and on those without probabilities)."""
    problems = [inputs.trace_problem(trace) for trace in traces]
    shown = [trace for trace, problem in zip(traces, problems, strict=True) if problem is None]
    left_out = [
        f"trace {n} is left out: {problem}" for n, problem in enumerate(problems, 1) if problem
    ]
    bare = [
        f"trace {n} ({trace['method']}) has no probabilities: "
        "it shows only where each token came from"
        for n, trace in enumerate(shown, 1)
        if not inputs.has_probabilities(trace)
    ]
    notices = inputs.first_notices(left_out, "traces are left out")
    return shown, notices + inputs.first_notices(bare, "traces have no probabilities")


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _facts(results: dict) -> list[tuple[str, str]]:
    """(name, value) of what is shown below the heading."""
    target, machine, versions, git = (
        part(results, key) for key in ("target", "machine", "versions", "git")
    )
    cores = f", {machine['cores']} cores" if machine.get("cores") else ""
    rounded, commit = target.get("dequantised_from"), git.get("commit")
    dirty = ", changed since" if git.get("dirty") is True else ""
    facts = [
        ("target", cut(str(target.get("name") or ""), MOST)),
        ("parameters", spell(target.get("parameters"), "{:,.0f}")),
        ("precision", target.get("dtype")),
        ("weights", rounded and f"dequantised from {rounded}"),
        ("date", results.get("date")),
        ("machine", machine and f"{machine.get('cpu') or 'unknown'}{cores}"),
        *versions.items(),
        ("commit", f"{commit[:10]}{dirty}" if isinstance(commit, str) else None),
        ("new tokens", spell(results.get("max_new_tokens"), "{}")),
        ("passes", spell(results.get("repeats"), "{}")),
    ]
    return [(str(name), str(value)) for name, value in facts if value]


def _label(number: int, trace: dict) -> str:
    """The text that names a trace in the list of traces."""
    kind, prompt = trace.get("class"), " ".join(trace["prompt"].split())
    parts = [cut(trace["method"], MOST), trace.get("accept"), "L3, lossy" if kind == "L3" else kind]
    parts += [spell(trace.get("temperature"), "T {:g}"), trace.get("category")]
    parts.append(f"“{prompt[:40]}{'…' if len(prompt) > 40 else ''}”")
    return f"{number}. " + " · ".join(str(part) for part in parts if part)


def _rounded(probability: float | None) -> float | int | None:
    """Three digits, between 0 and 1."""
    if probability is None:
        return None
    rounded = float(f"{min(max(probability, 0), 1):.3g}")
    return int(rounded) if rounded in (0, 1) else rounded


def _traces(path: Path | None, named: bool) -> tuple[list[dict], list[str]]:
    """The traces of a file, and notices. Only a file that the user named raises UserError."""
    if path is None:
        return [], ["there is no trace.jsonl: no trace is shown"]
    try:
        traces, notices = inputs.read_traces(path)
    except UserError as error:
        if named:
            raise
        return [], [f"no trace is shown: {error}"]
    return traces, inputs.first_notices(notices, f"lines of {path.name} are left out")


def _plots(rows: Sequence[dict]) -> tuple[dict[str, str], list[str]]:
    """(name -> SVG of every plot that the rows have data for, notices)."""
    try:
        from specjax.report import plots  # only here: matplotlib takes a second to import

        return {name: plots.svg(figure) for name, figure in plots.draw(rows).items()}, []
    except ImportError as error:
        return {}, [f"no plots were drawn: {error}"]


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)  # some file systems do not distinguish a from A
    except OSError:  # one of them does not exist
        return os.path.realpath(one) == os.path.realpath(other)
