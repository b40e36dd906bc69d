"""SuffixDecoding, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/suffix.py   # trains a target first
    python -m specjax.run --config=configs/suffix.py:assets   # with the shipped target

With the target that is trained, at batch 1: tau 2.81 and speed-up 1.55x at temperature
0, 1.03 and 0.48x at temperature 1; warm 4.45 and 1.97x, 1.05 and 0.48x (AMD EPYC, 2026-11-21,
experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("suffix", models)
