"""PARD (An et al. 2025): a small draft model learns to draft several tokens in one pass.

    python -m specjax.run --config=configs/pard.py --workdir=runs/pard \\
        --config.target=runs/target --config.data.dir=runs/target/data \\
        --config.init=runs/draft
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=pard --config.drafter.model=runs/pard

``config.init`` is a trained draft model of the same sizes, such as that of configs/distill.py;
without it the training starts from random parameters. The model is an ordinary directory with two
more keys in its config.json, so it can be taught further. A step costs about three passes, not
``config.drafter.gamma``: deeper masks are dropped.
"""

from ml_collections import ConfigDict, config_dict

from configs import distill
from specjax.run.settings import draft_model


def get_config() -> ConfigDict:
    """The configuration."""
    return distill.get_config(
        drafter=draft_model("pard"),
        loss={
            "ce": 1.0,
            "teacher": 0.0,
            "divergence": "forward_kl",
            "decay": 1.0,
            "pace": config_dict.placeholder(float),
            "keep": 0.7,
            "floor": 0.2,
        },
        train={"steps": 600, "batch_size": 4},
    )
