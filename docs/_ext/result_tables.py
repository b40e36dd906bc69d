"""Tables of the studies: ``tables.py`` beside a results.json makes its text."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def parts() -> dict[str, str]:
    """Study -> its MyST text: where the numbers come from, and its tables."""
    paths = sorted((ROOT / "experiments").glob("*/results.json"))
    return {path.parent.name: study(path) for path in paths}


def study(path: Path) -> str:
    """The text of one study. Raises ModuleNotFoundError for a study without ``tables.py``."""
    module = importlib.import_module(f"experiments.{path.parent.name}.tables")
    return module.tables(json.loads(path.read_text(encoding="utf-8")))
