"""The report: one HTML file with the table, the plots and the token trace viewer, that asks the network for nothing."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from specjax.errors import UserError
from specjax.report import cells, files

HERE = Path(__file__).parent


def render(
    results: dict,
    traces: Sequence[dict],
    title: str,
    *,
    plots: Mapping[str, str],
    notices: Sequence[str] = (),
) -> str:
    """The report as one self-contained page; what cannot be shown is left out, and told in a notice.

    Args:
        results: the object of results.json.
        traces: objects of trace.jsonl.
        title: the heading.
        plots: name -> SVG text.
        notices: what the reader must know, above everything else.
    """
    return _compose(results, traces, title, plots, notices)[0]


def _compose(
    results: dict,
    traces: Sequence[dict],
    title: str,
    plots: Mapping[str, str],
    notices: Sequence[str],
) -> tuple[str, list[str]]:
    """(page, every notice on it)."""
    rows, unfinished = files.finished(results.get("rows") or [])
    problems = [files.problem(record) for record in traces]
    shown = [record for record, why in zip(traces, problems, strict=True) if why is None]
    notices = [*notices, *files.few(unfinished, "rows are left out")]
    if not rows:
        notices.append("there are no finished rows: nothing was measured, or the run ended before")
    elif not plots:
        notices.append("there are no plots")
    refused = [f"trace {n} is left out: {why}" for n, why in enumerate(problems, 1) if why]
    bare = [
        f"trace {n} ({record['method']}) has no probabilities: its tokens tell only where they came from"
        for n, record in enumerate(shown, 1)
        if not files.has_probabilities(record)
    ]
    notices += files.few(refused, "traces are left out") + files.few(
        bare, "traces have no probabilities"
    )
    notices = [files.one_line(text) for text in notices]
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
        columns=cells.COLUMNS,
        details=cells.DETAILS,
        category_heads=cells.CATEGORY_HEADS,
        rows=lines,
        parts=cells.PARTS,
        verdict=cells.verdict(lines),
        plots=[
            (name.replace("_", " "), Markup(text[text.find("<svg") :]))
            for name, text in plots.items()
        ],
        traces=[(_label(n, record), Markup(pack(record))) for n, record in enumerate(shown, 1)],
        style=Markup(_asset("style.css")),
        scripts=[Markup(_asset(name)) for name in ("table.js", "tokens.js", "viewer.js")],
    )
    return page, notices


def _asset(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _facts(results: dict) -> list[tuple[str, str]]:
    """The words of the heading: (what, value)."""
    facts = [("date", str(results["date"]))] if results.get("date") else []
    machine, versions = results.get("machine"), results.get("versions")
    if isinstance(machine, dict):
        cores = f", {machine['cores']} cores" if machine.get("cores") else ""
        facts.append(("machine", f"{machine.get('cpu') or 'unknown'}{cores}"))
    if isinstance(versions, dict):
        facts += [(str(name), str(value)) for name, value in versions.items() if value is not None]
    return facts


def _label(number: int, record: dict) -> str:
    """What a trace is called among the others."""
    law = record.get("class")
    words = [
        cells.short(record["method"]),
        record.get("accept"),
        "L3, lossy" if law == "L3" else law,
    ]
    if (temperature := files.number_of(record.get("temperature"))) is not None:
        words.append(f"T {temperature:g}")
    words.append(record.get("category"))
    prompt = " ".join(record["prompt"].split())
    words.append(f"“{prompt[:40]}{'…' if len(prompt) > 40 else ''}”")
    return f"{number}. " + " · ".join(str(word) for word in words if word)


def pack(record: dict) -> str:
    """A trace as JSON that is safe inside a script element: a table of strings, and flat lists of numbers a round.

    ``greedy``: its probabilities are those of temperature 1, not of the temperature it was decoded at.
    """
    strings: dict[str, int] = {}

    def flat(tokens: list[list]) -> list:
        found = []
        for text, number, link, target, draft, rank, *kept in tokens:
            found += [
                strings.setdefault(text, len(strings)),
                number,
                link,
                _short(target),
                _short(draft),
                rank,
                *kept,
            ]
        return found

    rounds = [[flat(one["out"]), flat(one["draft"])] for one in record["rounds"]]
    greedy = files.number_of(record.get("temperature")) == 0
    packed = {
        "prompt": record["prompt"],
        "greedy": greedy,
        "strings": list(strings),
        "rounds": rounds,
    }
    return json.dumps(packed, separators=(",", ":")).replace("<", "\\u003c")


def _short(probability: float | None) -> float | int | None:
    if probability is None:
        return None
    short = float(f"{min(max(probability, 0), 1):.3g}")
    return int(short) if short in (0, 1) else short


def write(
    path: Path,
    results: dict,
    traces: Sequence[dict],
    title: str,
    *,
    plots: Mapping[str, str],
    notices: Sequence[str] = (),
) -> list[str]:
    """Writes what ``render`` gives, all or nothing; returns every notice on it.

    Raises:
        UserError: a file that cannot be written.
    """
    if path.is_dir():
        raise UserError(f"cannot write the report {path}: it is a directory; name a file")
    page, notices = _compose(results, traces, title, plots, notices)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
            (Path(beside) / "new").write_bytes(page.encode(errors="replace"))
            os.replace(Path(beside) / "new", path)
    except OSError as error:
        raise UserError(
            f"cannot write the report {path}: {error.strerror}; name another file"
        ) from None
    return notices


def build(
    workdir: Path, out: Path | None = None, *, trace: Path | None = None, title: str | None = None
) -> tuple[Path, list[str]]:
    """Builds the report of a bench; returns where it lies, and every notice on it.

    Args:
        workdir: the directory that holds results.json, or that file.
        out: where the report goes; default report.html beside results.json.
        trace: the file of traces; default trace.jsonl beside results.json, if there is one.
        title: the heading; default the name of the directory.

    Raises:
        UserError: what ``files.results`` raises, and ``files.traces`` of a file that was named; nothing to show; a file that
            cannot be written, or that holds what was measured.
    """
    path = located(workdir)
    results = files.results(path)
    beside = path.with_name("trace.jsonl")
    found = trace or (beside if os.path.lexists(beside) else None)
    out = out or path.with_name("report.html")
    for measured in (path, beside, *([trace] if trace else [])):
        if _same_file(out, measured):
            raise UserError(
                f"cannot write the report {out}: it would replace what was measured; name another file"
            )
    traces, notices = _traces(found, named=trace is not None)
    rows, _ = files.finished(results["rows"])
    if not rows and not traces:
        why = (
            f", and {found.name} no trace that can be shown"
            if found
            else ", and there is no trace.jsonl"
        )
        raise UserError(f"{path} has no finished rows{why}; there is nothing to report")
    try:
        from specjax.report import plots  # only here: matplotlib takes a second to import

        drawn = {name: plots.svg(figure) for name, figure in plots.draw(rows).items()}
    except ImportError as error:
        drawn, notices = {}, [*notices, f"no plots were drawn: {error}"]
    return out, write(
        out, results, traces, title or path.resolve().parent.name, plots=drawn, notices=notices
    )


def _traces(path: Path | None, named: bool) -> tuple[list[dict], list[str]]:
    """The traces of a file, and notices; a file that only happens to lie there and cannot be read is a notice as well."""
    if path is None:
        return [], ["there is no trace.jsonl: no trace is shown"]
    try:
        found, notices = files.traces(path)
    except UserError as error:
        if named:
            raise
        return [], [f"no trace is shown: {error}"]
    return found, files.few(notices, f"lines of {path.name} are left out")


def _same_file(one: Path, other: Path) -> bool:
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return one.samefile(other)  # a file system may not tell a from A
    except OSError:  # one of them is not there
        return False


def located(workdir: Path) -> Path:
    """The results.json that a directory holds, or the file itself."""
    named = workdir.is_file() or (workdir.suffix == ".json" and not workdir.is_dir())
    return workdir if named else workdir / "results.json"
