"""Builds the HTML report of a bench.

python -m specjax.report DIR_or_results.json [--trace FILE] [--out report.html]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.text import Text

from specjax.errors import UserError
from specjax.report import _text, html, inputs, terminal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{message}; usage: python -m specjax.report DIR [--trace FILE] [--out FILE]"
        )


def main(argv: Sequence[str]) -> int:
    """Runs the command line ``argv`` (without the program's name); returns the exit status."""
    parser = _Parser("python -m specjax.report", description=__doc__, add_help=True)
    parser.add_argument("results", type=Path, help="the workdir of a bench, or its results.json")
    parser.add_argument(
        "--trace", type=Path, help="the traces; default trace.jsonl beside results.json"
    )
    parser.add_argument(
        "--out", type=Path, help="the report; default report.html beside results.json"
    )
    try:
        args = parser.parse_args(argv)
        path, notices = html.build(args.results, args.out, trace=args.trace)
        results = inputs.read_results(html.results_path(args.results))
        rows, _ = inputs.finished_rows(results["rows"])
    except UserError as error:
        return terminal.fail(str(error))
    console = terminal.console()
    if rows:
        console.print(terminal.table(rows))
    for notice in notices:
        console.print(Text(f"notice: {notice}"))
    console.print(Text(_text.visible(f"wrote {path}"), "dim"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
