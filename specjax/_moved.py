"""Modules that moved: ``from specjax import <old name>`` still works, with a warning."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

MOVED = {
    "answers": "bench.answers",
    "datastore": "data.datastore",
    "grid": "run.bench",
    "jsonl": "data.jsonl",
    "lossless": "bench.lossless",
    "metrics": "bench.metrics",
    "ngram_tables": "data.ngram_tables",
    "overlap": "bench.overlap",
    "progress": "bench.progress",
    "prompt_sets": "data.prompt_files",
    "prompts": "data.prompts",
    "recorded": "bench.recorded_target",
    "replay": "bench.replay",
    "results": "bench.results",
    "rows": "bench.summaries",
    "session": "run.resolve",
    "timing": "bench.timing",
    "token_classes": "bench.token_classes",
    "traces": "data.recordings",
    "tracing": "bench.token_traces",
    "tree_search": "topology.search",
    "views": "bench.token_probs",
}


def module(name: str) -> ModuleType:
    """The module that ``from specjax import name`` gave before. Raises AttributeError."""
    if name not in MOVED:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    place = f"specjax.{MOVED[name]}"
    warnings.warn(f"specjax.{name} is now {place}", DeprecationWarning, stacklevel=3)
    return importlib.import_module(place)
