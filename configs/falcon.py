"""Falcon (Gao et al. 2024): EAGLE with blocks of k tokens per pass of the draft network.

    python -m specjax.run --config=configs/falcon.py --workdir=runs/falcon \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/falcon.py:3 ...   # blocks of three tokens

Each training step has two passes: one without gradients, to see how many tokens are wrong, and one
in which so many of the answers, times a rate that falls to 0, are given.

Without keys a draft is EAGLE-2's dynamic tree, 6 tokens deep with blocks of 2 or 3;
--config.drafter.gamma=4 is a chain. All drafts are a multiple of k deep.
"""

from ml_collections import ConfigDict

from specjax.errors import UserError
from specjax.run.settings import trained, training


def get_config(block: str = "2") -> ConfigDict:
    """The configuration for blocks of so many tokens."""
    if not block.isdecimal() or int(block) < 1:
        raise UserError(
            f"configs/falcon.py:{block} is unknown; give the number of tokens of a block, from 1"
        )
    return training(
        "heads",
        drafter=trained("falcon", block=int(block)),
        loss={
            "divergence": "forward_kl",
            "feature": 1.0,
            "weight": 0.1,
            "hard": 0.1,
            "glancing": 0.4,
            "noise": 0.1,
            "dropout": 0.1,
        },
        train={"steps": 600},
    )
