"""Jacobi decoding, with the rule that draws with the same noise, on held-out Python code.

    python -m specjax.run --config=configs/jacobi.py                   # trains a target first
    python -m specjax.run --config=configs/jacobi.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 1.00 at temperature 0 and 1.05 at 1, 0.91x and 0.85x at batch 1 (AMD
EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("jacobi", models)
