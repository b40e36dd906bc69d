"""Escalation: prompt lookup, and where it finds nothing an n-gram model, on held-out Python code.

    python -m specjax.run --config=configs/escalate.py                   # trains a target first
    python -m specjax.run --config=configs/escalate.py:runs/quickstart   # with the target of an earlier quickstart

A minute or two on two CPU cores. Expect tau 2.89 at temperature 0 and 1.03 at 1, 2.25x and 0.80x at batch 1 (AMD
EPYC, 21 November 2026, experiments/training_free).
"""

from ml_collections import ConfigDict

from configs import training_free


def get_config(models: str = "") -> ConfigDict:
    """The configuration; see configs/training_free.py."""
    return training_free.only("escalate", models)
