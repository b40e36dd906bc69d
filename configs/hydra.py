"""Hydra heads (Ankner et al. 2024): each reads the tokens drafted before it. Also Hydra++.

    python -m specjax.run --config=configs/hydra.py --workdir=runs/hydra \\
        --config.target=runs/target --config.data.dir=runs/target/data
    ... --config.drafter.prefix=True --config.drafter.layers=4 \\
        --config.loss.ce=0 --config.loss.teacher=1   # Hydra++

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3, text
written by the target; two CPU cores of an AMD EPYC, with other work running, 2026-11-21): two and
a half minutes; chain of 4: tau 2.71 greedy, 1.53 at temperature 1 (1.76 sampled); tree of 12: 3.19
and 1.80.
"""

from ml_collections import ConfigDict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    return heads.get_config("hydra")
