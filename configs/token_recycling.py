"""Token recycling, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/token_recycling.py   # trains a target first
    python -m specjax.run --config=configs/token_recycling.py:assets   # with the shipped target

With the target that is trained, at batch 1: tau 2.59 and speed-up 1.21x at temperature
0, 1.12 and 0.46x at temperature 1; warm 3.41 and 1.61x, 1.28 and 0.54x (AMD EPYC, 2026-11-21,
experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("token_recycling", models)
