"""PaSS (Monea et al. 2023): look-ahead embeddings for a frozen target, its only new parameters.

    python -m specjax.run --config=configs/pass.py --workdir=runs/pass \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=pass --config.drafter.model=runs/pass

The embeddings serve both variants: ``config.drafter.calls=1`` drafts and verifies in one pass of
the target. Minutes on two CPU cores for a small target.
"""

from ml_collections import ConfigDict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("pass")
    config.loss.places = 32
    config.optimiser.update({"learning_rate": 1e-2, "weight_decay": 0.0})
    return config
