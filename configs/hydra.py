"""Hydra heads (Ankner et al. 2024): each sees the tokens drafted before it; with a prefix layer, Hydra++.

    python -m specjax.run --config=configs/hydra.py --workdir=runs/hydra --config.target=runs/target \\
        --config.data.dir=runs/target/data
    ... --config.drafter.prefix=True --config.drafter.layers=4 --config.loss.ce=0 --config.loss.teacher=1   # Hydra++

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3, text that the target wrote; two
CPU cores of an AMD EPYC, other work beside it, 2026-11-21): two and a half minutes, tau 2.76 greedy, 1.48 at
temperature 1 (top-1 chains; sampled ones are in the study).
"""

from ml_collections import ConfigDict, config_dict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("hydra")
    config.drafter.layers = config_dict.placeholder(int)  # blocks a head; None: 1
    config.drafter.prefix = config_dict.placeholder(bool)  # one more decoder layer over all features (Hydra++)
    return config
