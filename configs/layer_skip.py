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
    config = pretrain.get_config()
    config.loss = ConfigDict()
    config.loss.dropout = 0.1  # probability that the last layer is left out; earlier ones: less
    config.loss.dropout_schedule = "exponential"  # "constant": to continue a trained model
    config.loss.exits = 0.2  # weight of the exits before the last layer
    # Exits that a step trains: "rotational" (every rotation-th layer, by turns), "gradual" (from
    # the last to the first, in half of the steps), or "all".
    config.loss.curriculum = "rotational"
    config.loss.rotation = 2
    config.train.steps = 300
    return config
