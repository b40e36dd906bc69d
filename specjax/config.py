"""Configurations: their type in signatures, and what is common to reading them.

Only ``specjax.run`` and ``specjax.train.recipes`` see a configuration. They turn it into plain
objects, which everything below takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

# An ml_collections.ConfigDict. Its attributes are known only at run time.
Config: TypeAlias = Any


def given(keys: Mapping | None) -> dict:
    """The keys that have a value, as a plain dict, without None and empty groups at any depth."""
    values = {k: given(v) if hasattr(v, "items") else v for k, v in (keys or {}).items()}
    return {k: v for k, v in values.items() if v is not None and v != {}}
