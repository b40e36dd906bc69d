"""An adapter between an early exit and the target's head (Kangaroo, Liu et al. 2024).

    python -m specjax.run --config=configs/early_exit.py --workdir=runs/exit \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=early_exit --config.drafter.model=runs/exit

The target is frozen. Without an adapter nothing is trained: --config.drafter.name=early_exit
--config.drafter.exit_layer=2 drafts with the first two layers and the head of any target.
"""

from ml_collections import ConfigDict, config_dict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("early_exit")
    drafter = config.drafter = ConfigDict({"name": "early_exit"})
    # Layers that are computed before the exit; None: a quarter of the target's.
    drafter.exit_layer = config_dict.placeholder(int)
    drafter.adapter = "layer"  # attention and two norms; or "linear", "norm", "none"
    drafter.head = "shared"  # the target's; or "own": a copy that is trained too
    drafter.head_dim = config_dict.placeholder(int)  # of the layer's attention; None: up to 64
    drafter.gamma = config_dict.placeholder(int)  # draft tokens per round; None: 5
    config.loss = ConfigDict()
    config.loss.ce = 0.0  # cross-entropy with the text
    config.loss.teacher = 1.0  # weight of the divergence from the target's probs
    # forward_kl, reverse_kl, jensen_shannon, jeffreys, total_variation, lk, lk_hybrid; needs
    # teacher > 0
    config.loss.divergence = "forward_kl"
    return config
