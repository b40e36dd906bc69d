"""An adapter between an early exit and the target's head (Kangaroo, Liu et al. 2024).

    python -m specjax.run --config=configs/early_exit.py --workdir=runs/exit \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=early_exit --config.drafter.model=runs/exit

The target is frozen. Without an adapter nothing is trained: --config.drafter.name=early_exit
--config.drafter.exit_layer=2 drafts with the first two layers and the head of any target.
"""

from ml_collections import ConfigDict

from specjax.run.settings import trained, training


def get_config() -> ConfigDict:
    """The configuration."""
    return training(
        "heads",
        drafter=trained("early_exit", adapter="layer", head="shared"),
        loss={"ce": 0.0, "teacher": 1.0, "divergence": "forward_kl"},
        train={"steps": 600},
    )
