"""The configurations of configs/: their commands and what they are for."""

from __future__ import annotations

import ast
from pathlib import Path

from source_text import literal_blocks

CONFIGS = Path(__file__).parents[2] / "configs"


def names() -> list[str]:
    """The configurations, in alphabetical order."""
    return sorted(path.stem for path in CONFIGS.glob("*.py") if path.stem != "__init__")


def parts() -> dict[str, str]:
    """Name of a part -> its MyST text."""
    return {"configs": "\n\n".join(map(section, names()))}


def section(name: str) -> str:
    """A configuration: its docstring."""
    text = ast.get_docstring(ast.parse((CONFIGS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    body = "\n".join(literal_blocks(text.splitlines()))
    return f"(config-{name})=\n## `configs/{name}.py`\n\n```{{eval-rst}}\n{body}\n```"
