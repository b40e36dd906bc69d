"""PARD (An et al. 2025): a small draft model learns to draft several tokens in one pass.

    python -m specjax.run --config=configs/pard.py --workdir=runs/pard \\
        --config.target=runs/target --config.data.dir=runs/target/data \\
        --config.init=runs/draft
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=pard --config.drafter.model=runs/pard

``config.init`` is a trained draft model of the same sizes, such as that of configs/distill.py;
without it the training starts from random parameters. The model is an ordinary directory with two
more keys in its config.json, so it can be taught further. A step costs about three passes, not
``config.pard.tokens``: deeper masks are dropped.
"""

from ml_collections import ConfigDict, config_dict

from configs import distill


def get_config() -> ConfigDict:
    """The configuration: what differs from a draft model of one token per pass."""
    config = distill.get_config()
    config.pard = ConfigDict()
    config.pard.tokens = 8  # of a draft in one pass
    # The token that stands for unknown ones, best an unused one; None: the last of the vocabulary.
    config.pard.mask_id = config_dict.placeholder(int)
    config.loss = ConfigDict()
    config.loss.ce = 1.0  # cross-entropy with the text
    config.loss.teacher = 0.0  # weight of the divergence from the target's probs
    config.loss.divergence = "forward_kl"
    config.loss.decay = 1.0  # factor on the loss from each depth to the next
    # Smoothing of D-PACE's weights of depths, instead of decay, such as 0.5; None: without.
    config.loss.pace = config_dict.placeholder(float)
    # The share of places that have masks at depth d is keep^d, and at least floor.
    config.loss.keep = 0.7
    config.loss.floor = 0.2
    config.train.steps = 600
    return config
