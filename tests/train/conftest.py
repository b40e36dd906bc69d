"""Shared by the tests of this folder: a text file, and a trained target."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_cases import TEXT, small_config

from specjax.train import recipes


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def target_run(tmp_path_factory, text_file) -> tuple[Path, dict]:
    workdir = tmp_path_factory.mktemp("runs") / "target"
    return workdir, recipes.run(
        small_config("pretrain", data__files=text_file, model__vocab_size=320), workdir
    )
