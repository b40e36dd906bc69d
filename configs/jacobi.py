"""Jacobi decoding, with the rule that draws with the same noise, on held-out Python code.

    python -m specjax.run --config=configs/jacobi.py   # trains a target first
    python -m specjax.run --config=configs/jacobi.py:assets   # with the shipped target

With the target that is trained, at batch 1: tau 1.00 and speed-up 0.91x at temperature
0, 1.05 and 0.85x at temperature 1 (AMD EPYC, 2026-11-21, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("jacobi", models)
