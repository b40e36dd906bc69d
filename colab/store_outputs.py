"""Executes the notebooks and stores them with their outputs.

    python colab/store_outputs.py [NAME ...] [--workdir=DIR]

Ten minutes on two idle CPU cores, three of them training; models stay in the workdir, by default
``runs/notebooks``. First writes the repository's address of pyproject.toml into the badges and the
install cells. Outputs are stored without pages in frames (a report of a bench is a third of a
megabyte), warnings, and paths of this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tomllib
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MOST = 60_000  # characters of one output
HIDDEN = "(the page is shown here when the notebook runs)"


def address() -> str:
    """The repository's address: [project.urls] of pyproject.toml."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["urls"]["Repository"]


def badge(name: str) -> str:
    """The first line of a notebook: a link that opens it on Colab."""
    place = address().removeprefix("https://github.com/")
    picture = "https://colab.research.google.com/assets/colab-badge.svg"
    page = f"https://colab.research.google.com/github/{place}/blob/main/colab/{name}.ipynb"
    return f"[![Open in Colab]({picture})]({page})"


def addressed(book: nbformat.NotebookNode, name: str) -> None:
    """Puts the repository's address into the badge and the install cell."""
    first = book.cells[0]
    text = re.sub(r"\A\[!\[Open in Colab\].*\n+", "", first.source)
    first.source = f"{badge(name)}\n\n{text}"
    for cell in book.cells:
        if cell.cell_type == "code":
            line = f'REPOSITORY = "{address()}"'
            cell.source = re.sub(r'^REPOSITORY = ".*"$', line, cell.source, flags=re.MULTILINE)


def cleaned(output: dict, paths: tuple[str, ...]) -> dict | None:
    """An output as it is stored; None if it is left out."""
    if output["output_type"] == "stream":
        if output["name"] == "stderr":
            return None
        output["text"] = _text(output["text"], paths)
        return output if output["text"] else None
    data = output.get("data", {})
    if set(data) == {"text/html", "text/plain"} and not data["text/plain"].strip():
        return None  # a progress bar that has ended
    if "<iframe" in data.get("text/html", "") or len(str(data)) > MOST:
        output["data"] = {"text/plain": HIDDEN}
    else:
        for kind, value in data.items():
            if isinstance(value, str):
                data[kind] = _text(value, paths)
    output["metadata"] = {}
    return output


def merged(outputs: list[dict]) -> list[dict]:
    """Outputs in which printed texts that follow each other are one."""
    result: list[dict] = []
    for output in outputs:
        both = [output, *result[-1:]]
        if len(both) == 2 and all(each["output_type"] == "stream" for each in both):
            result[-1]["text"] += output["text"]
        else:
            result.append(output)
    return result


def _text(text: str, paths: tuple[str, ...]) -> str:
    """Without paths of this machine, and of a line that was overwritten only the last form."""
    for path in paths:
        text = text.replace(path, ".")
    return re.sub(r"[^\n]*\r(?!\n)", "", text)


def store(name: str, workdir: Path) -> None:
    """Executes one notebook in ``workdir`` and replaces the file."""
    path = HERE / f"{name}.ipynb"
    book = nbformat.read(path, as_version=4)
    addressed(book, name)
    workdir.mkdir(parents=True, exist_ok=True)
    resources = {"metadata": {"path": str(workdir)}}
    NotebookClient(book, timeout=3600, kernel_name="python3", resources=resources).execute()
    paths = tuple(dict.fromkeys(map(str, (workdir.resolve(), ROOT, Path.home(), sys.prefix))))
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            outputs = [cleaned(output, paths) for output in cell.outputs]
            cell.outputs = merged([output for output in outputs if output is not None])
    # Versions of this machine are not part of the notebook.
    book.metadata.language_info = nbformat.from_dict({"name": "python"})
    nbformat.validate(book)
    path.write_text(nbformat.writes(book, indent=1).rstrip() + "\n", encoding="utf-8")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [path.stem for path in sorted(HERE.glob("*.ipynb"), reverse=True)]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(names)}")
    parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "notebooks")
    options = parser.parse_args()
    if wrong := [name for name in options.names if name not in names]:
        parser.error(f"there is no notebook {wrong[0]!r}; there are {', '.join(names)}")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in options.names or names:
        print(name, file=sys.stderr, flush=True)
        store(name, options.workdir)


if __name__ == "__main__":
    main()
