"""Models: the decoder, Hugging Face style directories and files of PyTorch."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

# Old places of modules, which work until the next version.
_MOVED = {
    "head_files": "specjax.drafters.files.head_files",
    "convert_heads": "specjax.convert_heads",
}


def __getattr__(name: str) -> ModuleType:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"specjax.models.{name} is now {_MOVED[name]}", FutureWarning, stacklevel=2)
    return importlib.import_module(_MOVED[name])
