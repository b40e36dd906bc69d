"""Hydra heads (Ankner et al. 2024): each sees the tokens drafted before it; with a prefix layer, Hydra++.

    python -m specjax.run --config=configs/hydra.py --workdir=runs/hydra --config.target=runs/target \\
        --config.data.dir=runs/target/data
    ... --config.drafter.prefix=True --config.drafter.layers=4 --config.loss.ce=0 --config.loss.teacher=1   # Hydra++

TIMES
"""

from ml_collections import ConfigDict, config_dict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("hydra")
    config.drafter.layers = config_dict.placeholder(int)  # blocks a head; None: 1
    config.drafter.prefix = config_dict.placeholder(bool)  # one more decoder layer over all features (Hydra++)
    return config
