"""Trains heads on a target's features: the common part of the configurations of heads.

    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=medusa --config.drafter.model=runs/medusa

``<workdir>/model`` has the layout of the released heads. It also holds their accuracies on the
target's own text, so that ``config.drafter.nodes`` can search for a tree.
"""

from ml_collections import ConfigDict, config_dict

from configs import pretrain


def get_config(name: str = "medusa", joint: bool = False) -> ConfigDict:
    """The configuration of the heads ``name``; ``joint`` trains the target too (a new target)."""
    config = pretrain.get_config()
    del config.tokenizer, config.model  # the target's
    config.objective = "heads"
    # A model directory, a name of the Hub, a .gguf file, or a trained run's workdir.
    config.target = ""
    config.init = ""  # heads to start from
    config.joint = joint  # writes <workdir>/target as well
    config.drafter = ConfigDict({"name": name})
    config.drafter.heads = config_dict.placeholder(int)  # how many; None: the method's default
    config.loss.ce = 1.0  # cross-entropy with the text
    config.loss.teacher = 0.0  # weight of the divergence from the target's probs
    # forward_kl, reverse_kl, jensen_shannon, jeffreys, total_variation, lk, lk_hybrid; needs
    # teacher > 0
    config.loss.divergence = "forward_kl"
    config.loss.decay = 1.0  # factor on the loss from each head to the next
    # Smoothing of D-PACE's weights of depths, instead of decay, such as 0.5; None: without.
    config.loss.pace = config_dict.placeholder(float)
    if name in ("medusa", "bpd"):
        config.loss.slots = "all"  # "one": a single head per batch, chosen at random
    config.optimiser = pretrain.optimiser("adamw", 1e-3)
    if joint:
        config.loss.language = "ce"  # loss of the target: "ce" on the text, or "kl" from its start
        config.loss.heads = 0.2  # weight of the heads' loss
        config.optimiser.target_rate = 0.25  # factor on the heads' learning rate
        config.optimiser.target_from = 0  # step at which the target starts to train
    config.train.steps = 600
    config.train.batch_size = 8
    config.examine.prompts = 16
    return config
