"""Shared by all tests: a compilation cache for child processes, the data folder, and small models."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

CACHE = Path(tempfile.gettempdir()) / f"specjax-test-cache-{os.getuid()}"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of public data; tests that need it are skipped where it is not there."""
    root = os.environ.get("SPECJAX_TEST_DATA", "")
    if not root or not Path(root).is_dir():
        pytest.skip("SPECJAX_TEST_DATA does not name the data folder")
    return Path(root)


@pytest.fixture(scope="session")
def stories(data_dir):
    """stories260K: a real trained Llama."""
    from specjax.models import hf

    return hf.load(data_dir / "models" / "stories260K")
