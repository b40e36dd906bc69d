"""An n-gram language model, by its most probable tokens and by draws from its law, on held-out Python code.

    python -m specjax.run --config=configs/ngram_lm.py                   # trains a target first
    python -m specjax.run --config=configs/ngram_lm.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 1.29 at temperature 0 and 1.17 at 1, 1.18x and 0.96x at batch 1; sampled
1.29 and 1.59, 1.20x and 1.25x (AMD EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("ngram_lm", models)
