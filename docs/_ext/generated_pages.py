"""Writes what the pages take from the code and the results, before Sphinx reads the sources.

``docs/_generated`` holds parts that pages include; ``docs/api`` and ``docs/notebooks`` hold whole
pages. None of them is in git.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import api_pages
import config_pages
import method_pages
import result_tables
import scaling_pages
import support_pages

ROOT = Path(__file__).parents[2]


def parts() -> dict[str, str]:
    """Path below docs/ -> text of everything that is generated, without the notebooks."""
    parts = {f"_generated/{name}.md": text for name, text in method_pages.parts().items()}
    parts |= {f"_generated/{name}.md": text for name, text in config_pages.parts().items()}
    parts |= {f"_generated/results_{n}.md": t for n, t in result_tables.parts().items()}
    parts |= {f"_generated/{name}.md": text for name, text in scaling_pages.parts().items()}
    parts |= {f"_generated/{name}.md": text for name, text in support_pages.parts().items()}
    parts["_generated/reference.md"] = api_pages.contents()
    parts |= {f"api/{name}.rst": text for name, text in api_pages.pages().items()}
    return parts


def write(docs: Path) -> None:
    """Writes the generated pages; a file that would not change keeps its time."""
    texts = parts()
    for folder in ("_generated", "api"):
        for old in (docs / folder).glob("*"):
            if f"{folder}/{old.name}" not in texts:
                old.unlink()
    for name, text in texts.items():
        _put(docs / name, text.rstrip() + "\n")
    (docs / "notebooks").mkdir(exist_ok=True)
    for book in (ROOT / "colab").glob("*.ipynb"):
        copy = docs / "notebooks" / book.name
        if not copy.exists() or copy.read_bytes() != book.read_bytes():
            shutil.copyfile(book, copy)


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _check(app, error) -> None:
    """After the build: every public name has an entry in the reference. Raises RuntimeError."""
    if error is not None or app.builder.format != "html":
        return
    missing = set(api_pages.required()) - set(app.env.domaindata["py"]["objects"])
    missing -= set(app.env.domaindata["py"]["modules"])
    if missing:
        raise RuntimeError(f"not documented: {', '.join(sorted(missing))}")


def _begin(app, config) -> None:
    write(Path(app.srcdir))
    config.nitpick_ignore = [("py:class", name) for name in api_pages.aliases()]
    # "Raises: NotLossless (``specjax.run``)" names the module of an exception.
    config.nitpick_ignore += [("py:exc", name) for name in api_pages.modules()]


def setup(app) -> dict:
    """Called by Sphinx."""
    app.connect("config-inited", _begin)
    app.connect("autodoc-process-docstring", api_pages.process_docstring)
    app.connect("autodoc-skip-member", api_pages.skip_member)
    app.connect("build-finished", _check)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
