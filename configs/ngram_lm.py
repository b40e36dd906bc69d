"""An n-gram language model: its most probable tokens, and draws from it, on held-out Python code.

    python -m specjax.run --config=configs/ngram_lm.py   # trains a target first
    python -m specjax.run --config=configs/ngram_lm.py:assets   # with the shipped target

With the target that is trained, at batch 1: tau 1.29 and speed-up 1.18x at temperature
0, 1.17 and 0.96x at temperature 1; sampled 1.29 and 1.20x, 1.59 and 1.25x (AMD EPYC, 2026-11-21,
experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("ngram_lm", models)
