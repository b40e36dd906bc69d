"""Builds the HTML report of a bench, or prints its table in another format.

python -m specjax.report DIR_or_results.json [--trace FILE] [--out report.html]
python -m specjax.report DIR_or_results.json --format=csv|latex|markdown [--categories]
    [--columns method,tau,speed-up] [--caption TEXT] [--label NAME]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from specjax.errors import Parser, UserError
from specjax.report import html, inputs, tables, terminal

HTML = "html"
HTML_ONLY = (HTML,), "the HTML report; a table is printed to stdout"
LATEX_ONLY = ("latex",), "--format latex"
# Options that some formats have -> these formats, and what a message says of them.
FORMATS_OF = {
    "trace": HTML_ONLY,
    "out": HTML_ONLY,
    "categories": (tuple(tables.FORMATS), "--format csv, latex or markdown"),
    "columns": (("latex", "markdown"), "--format latex or markdown"),
    "caption": LATEX_ONLY,
    "label": LATEX_ONLY,
}


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    try:
        args = _parser().parse_args(argv)
        for name, (formats, described) in FORMATS_OF.items():
            if getattr(args, name) not in (None, False) and args.format not in formats:
                raise UserError(f"--{name} is for {described}")
        if args.format != HTML:
            return _print_table(args)
        path, notices = html.build(args.results, args.out, trace=args.trace)
        results = inputs.read_results(inputs.results_path(args.results))
        rows, _ = inputs.finished_rows(results["rows"])
    except UserError as error:
        return terminal.fail(str(error))
    console = terminal.console()
    if rows:
        console.print(terminal.table(rows))
        if jax := inputs.part(results, "versions").get("jax"):
            console.print(Text(inputs.visible(f"measured with jax {jax}"), "dim"))
    for notice in [*terminal.notes(rows), *(f"notice: {notice}" for notice in notices)]:
        console.print(Text(notice))
    console.print(Text(inputs.visible(f"wrote {path}"), "dim"))
    return 0


def _parser() -> Parser:
    parser = Parser("python -m specjax.report", description=__doc__, add_help=True)
    add = parser.add_argument
    add("results", type=Path, help="the workdir of a bench, or its results.json")
    add("--trace", type=Path, help="the traces; default trace.jsonl beside results.json")
    add("--out", type=Path, help="the report; default report.html beside results.json")
    add(
        "--format",
        default=HTML,
        choices=(HTML, *tables.FORMATS),
        help="html writes the report; csv, latex and markdown print the table to stdout",
    )
    add(
        "--categories",
        action="store_true",
        help="print the rows of the categories of prompts, not those over all prompts",
    )
    add(
        "--columns",
        type=lambda text: [name.strip() for name in text.split(",")],
        help="names of the columns, with commas between them",
    )
    add("--caption", help="of the table in LaTeX; it is LaTeX")
    add("--label", help="of the table in LaTeX")
    return parser


def _print_table(args: argparse.Namespace) -> int:
    """Prints the table to stdout and notices to stderr. Raises UserError."""
    path = inputs.results_path(args.results)
    results = inputs.read_results(path)
    rows, notices = inputs.finished_rows(results["rows"])
    if not any((row.get("category") is not None) == args.categories for row in rows):
        kind = "of categories" if args.categories else "over all prompts"
        raise UserError(f"{path} has no finished rows {kind}; there is nothing to print")
    for notice in inputs.first_notices(notices, "rows are left out"):
        print(inputs.one_line(f"notice: {notice}"), file=sys.stderr)
    options = {name: getattr(args, name) for name in ("columns", "caption", "label")}
    options = {name: value for name, value in options.items() if value is not None}
    text = tables.FORMATS[args.format](results, categories=args.categories, **options)
    sys.stdout.buffer.write(text.encode(errors="replace"))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
