"""Prompt lookup, on held-out Python code.

    python -m specjax.run --config=configs/prompt_lookup.py                   # trains a target first
    python -m specjax.run --config=configs/prompt_lookup.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 2.71 at temperature 0 and 1.02 at 1, 2.27x and 0.81x at batch 1 (AMD
EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("prompt_lookup", models)
