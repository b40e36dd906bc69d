"""The report of a bench: one HTML file with the table, the plots and the viewer of token traces.

The page loads nothing from the network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specjax.errors import UserError
from specjax.files import replacing
from specjax.report import _text, cells, columns, inputs
from specjax.report._rows import TIME_PARTS

HERE = Path(__file__).parent
STYLES = ("style.css", "viewer.css")
SCRIPTS = ("table.js", "tokens.js", "draft.js", "tip.js", "viewer.js")  # in the order of their use


def render(
    results: dict,
    traces: Sequence[dict],
    title: str,
    *,
    plots: Mapping[str, str],
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


def write(
    path: Path,
    results: dict,
    traces: Sequence[dict],
    title: str,
    *,
    plots: Mapping[str, str],
    notices: Sequence[str] = (),
) -> list[str]:
    """Writes the page of ``render``, whole or not at all; returns all its notices.

    Raises:
        UserError: the file cannot be written.
    """
    if path.is_dir():
        raise UserError(f"cannot write the report {path}: it is a directory; name a file")
    page, notices = _render(results, traces, title, plots, notices)
    try:
        with replacing(path) as fresh:
            fresh.write_bytes(page.encode(errors="replace"))
    except OSError as error:
        raise UserError(
            f"cannot write the report {path}: {error.strerror}; name another file"
        ) from None
    return notices


def build(
    workdir: Path, out: Path | None = None, *, trace: Path | None = None, title: str | None = None
) -> tuple[Path, list[str]]:
    """Builds the report of a bench; returns (its path, all its notices).

    Args:
        workdir: the directory with results.json, or that file.
        out: the report's path; default report.html beside results.json.
        trace: the file of traces; default trace.jsonl beside results.json, if there is one.
        title: the heading; default the name of the directory.

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
    svgs, more = _plots(rows)
    title = title or path.resolve().parent.name
    return out, write(out, results, traces, title, plots=svgs, notices=[*notices, *more])


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
        "greedy": inputs.number_of(trace.get("temperature")) == 0,
        "strings": list(strings),
        "rounds": rounds,
    }
    return json.dumps(packed, separators=(",", ":")).replace("<", "\\u003c")


def _render(
    results: dict,
    traces: Sequence[dict],
    title: str,
    plots: Mapping[str, str],
    notices: Sequence[str],
) -> tuple[str, list[str]]:
    """(page, all its notices)."""
    rows, unfinished = inputs.finished_rows(results.get("rows") or [])
    notices = [*notices, *_text.first_notices(unfinished, "rows are left out")]
    if not rows:
        notices.append("there are no finished rows: nothing was measured, or the run ended early")
    elif not plots:
        notices.append("there are no plots")
    shown, more = _shown_traces(traces)
    notices = [_text.one_line(text) for text in [*notices, *more]]
    lines = cells.lines(rows)
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
        columns=columns.COLUMNS,
        details=columns.DETAILS,
        category_heads=columns.CATEGORY_HEADS,
        rows=lines,
        parts=TIME_PARTS,
        verdict=cells.verdict(lines),
        plots=[
            (name.replace("_", " "), Markup(text[text.find("<svg") :]))
            for name, text in plots.items()
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
    notices = _text.first_notices(left_out, "traces are left out")
    return shown, notices + _text.first_notices(bare, "traces have no probabilities")


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _facts(results: dict) -> list[tuple[str, str]]:
    """(name, value) of what is shown below the heading."""
    facts = _target_facts(results.get("target"))
    facts += [("date", str(results["date"]))] if results.get("date") else []
    machine, versions = results.get("machine"), results.get("versions")
    if isinstance(machine, dict):
        cores = f", {machine['cores']} cores" if machine.get("cores") else ""
        facts.append(("machine", f"{machine.get('cpu') or 'unknown'}{cores}"))
    if isinstance(versions, dict):
        facts += [(str(name), str(value)) for name, value in versions.items() if value is not None]
    git = results.get("git")
    if isinstance(git, dict) and isinstance(git.get("commit"), str):
        dirty = ", changed since" if git.get("dirty") is True else ""
        facts.append(("commit", f"{git['commit'][:10]}{dirty}"))
    for name, head in (("max_new_tokens", "new tokens"), ("repeats", "passes")):
        if inputs.number_of(results.get(name)) is not None:
            facts.append((head, f"{results[name]}"))
    return facts


def _target_facts(target: object) -> list[tuple[str, str]]:
    """(name, value) of the target: its name, size and precision; [] if they are not known."""
    if not isinstance(target, dict):
        return []
    facts = [("target", _text.cut(str(target["name"]), cells.MOST))] if target.get("name") else []
    if (size := inputs.number_of(target.get("parameters"))) is not None:
        facts.append(("parameters", f"{size:,.0f}"))
    facts += [("precision", str(target["dtype"]))] if target.get("dtype") else []
    rounded = target.get("dequantised_from")
    return facts + ([("weights", f"dequantised from {rounded}")] if rounded else [])


def _label(number: int, trace: dict) -> str:
    """The text that names a trace in the list of traces."""
    lossless_class = trace.get("class")
    parts = [
        _text.cut(trace["method"], cells.MOST),
        trace.get("accept"),
        "L3, lossy" if lossless_class == "L3" else lossless_class,
    ]
    if (temperature := inputs.number_of(trace.get("temperature"))) is not None:
        parts.append(f"T {temperature:g}")
    parts.append(trace.get("category"))
    prompt = " ".join(trace["prompt"].split())
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
    return traces, _text.first_notices(notices, f"lines of {path.name} are left out")


def _plots(rows: Sequence[dict]) -> tuple[dict[str, str], list[str]]:
    """(name -> SVG of every plot that the rows have data for, notices)."""
    try:
        from specjax.report import plots  # only here: matplotlib takes a second to import

        return {name: plots.svg(figure) for name, figure in plots.draw(rows).items()}, []
    except ImportError as error:
        return {}, [f"no plots were drawn: {error}"]


def _same_file(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)  # some file systems do not distinguish a from A
    except OSError:  # one of them does not exist
        return False
