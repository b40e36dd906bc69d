"""The lookahead trie, cold and warm, on held-out Python code.

    python -m specjax.run --config=configs/trie.py   # trains a target first
    python -m specjax.run --config=configs/trie.py:assets   # with the shipped target

With the target that is trained, at batch 1: tau 3.05 and speed-up 1.53x at temperature
0, 1.06 and 0.43x at temperature 1; warm 4.57 and 2.31x, 1.14 and 0.48x (AMD EPYC, 2026-11-21,
experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("trie", models)
