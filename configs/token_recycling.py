"""Token recycling, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/token_recycling.py                   # trains a target first
    python -m specjax.run --config=configs/token_recycling.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 2.59 at temperature 0 and 1.12 at 1, 1.21x and 0.46x at batch 1; warm
3.41 and 1.28, 1.61x and 0.54x (AMD EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("token_recycling", models)
