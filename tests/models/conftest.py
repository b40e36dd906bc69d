"""PyTorch and transformers for tests that compare with them; skipped where they are missing."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def torch():
    """PyTorch with one thread: with more, each small product takes about ten times as long."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def transformers(torch):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers
