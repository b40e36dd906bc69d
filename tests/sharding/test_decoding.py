"""Decoding on several devices gives the text of one device, row by row, for every drafter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(devices: int, program: str, *arguments: str, seconds: int = 240) -> str:
    """Runs a program of this folder with fake devices; what it printed."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={devices}"
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent, HERE)))
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(HERE / program), *arguments],
        env=environment,
        timeout=seconds,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.fast
@pytest.mark.parametrize(
    ("mesh", "cases"),
    [
        pytest.param("data:8", ("prompt_lookup",), marks=pytest.mark.slow),
        ("data:2,tensor:2", ("chain", "chain, int8")),
        pytest.param("data:8", ("chain, mapped",), marks=pytest.mark.slow),
        pytest.param("data:2,tensor:2", ("chain, experts",), marks=pytest.mark.slow),
        pytest.param(
            "data:2,tensor:2", ("chain, recurrent", "chain, mamba"), marks=pytest.mark.slow
        ),
    ],
)
def test_rows_have_the_text_of_one_device(mesh, cases):
    run(8, "decode_program.py", mesh, *cases)


@pytest.mark.fast
def test_models_of_other_libraries():
    run(4, "foreign_program.py")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data:4", "data:2,tensor:2"])
def test_every_drafter_has_the_text_of_one_device(mesh):
    printed = run(8, "decode_program.py", mesh, "all", seconds=1500)
    assert "eagle3 tree" in printed and "escalate" in printed
