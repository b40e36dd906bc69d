"""The lookahead trie, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/trie.py                   # trains a target first
    python -m specjax.run --config=configs/trie.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 3.05 at temperature 0 and 1.06 at 1, 1.53x and 0.43x at batch 1; warm
4.57 and 1.14, 2.31x and 0.48x (AMD EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("trie", models)
