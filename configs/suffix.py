"""SuffixDecoding, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/suffix.py                   # trains a target first
    python -m specjax.run --config=configs/suffix.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 2.81 at temperature 0 and 1.03 at 1, 1.55x and 0.48x at batch 1; warm
4.45 and 1.05, 1.97x and 0.48x (AMD EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("suffix", models)
