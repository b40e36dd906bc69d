"""The type of a configuration in signatures."""

from typing import Any, TypeAlias

Config: TypeAlias = (
    Any  # an ml_collections.ConfigDict: what its attributes are is known only when it runs
)
