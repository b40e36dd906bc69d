"""Multi-token prediction heads (Gloeckle et al. 2024) for a target that was trained without them.

    python -m specjax.run --config=configs/mtp_heads.py --workdir=runs/mtp_heads \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=mtp --config.drafter.model=runs/mtp_heads

Further last layers of the target, which begin as copies of its own last layer and are trained
beside it; the target needs two layers or more. configs/mtp_pretrain.py trains a target together
with its heads, as published.
"""

from ml_collections import ConfigDict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("mtp")
    config.loss.slots = "all"
    return config
