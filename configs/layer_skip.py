"""LayerSkip (Elhoushi et al. 2024): pretrains a target whose early layers draft well.

    python -m specjax.run --config=configs/layer_skip.py --workdir=runs/layer_skip
    python -m specjax.run --config=configs/bench.py --config.target=runs/layer_skip \\
        --config.prompts=stdlib --config.drafter.name=early_exit --config.drafter.exit_layer=2

The target of configs/pretrain.py, with more steps, trained from scratch. To continue a trained
model: --config.init=DIR --config.loss.dropout_schedule=constant. The result is another model than
plain pretraining gives: drafting is lossless with respect to it.
"""

from ml_collections import ConfigDict

from configs import pretrain


def get_config() -> ConfigDict:
    """The configuration."""
    return pretrain.get_config(
        loss={
            "dropout": 0.1,
            "dropout_schedule": "exponential",
            "exits": 0.2,
            "curriculum": "rotational",
            "rotation": 2,
        },
        train={"steps": 300},
    )
