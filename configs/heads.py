"""Train heads on a target's features: what configs/medusa.py, hydra.py, mlp_speculator.py and bpd.py begin with.

    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa --config.target=runs/target \\
        --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target --config.prompts=stdlib \\
        --config.drafter.name=medusa --config.drafter.model=runs/medusa

``<workdir>/model`` has the layout of the released heads, and their accuracies on the target's own text, so that
``config.drafter.nodes`` can search for a tree.
"""

from ml_collections import ConfigDict, config_dict

from configs import pretrain


def get_config(name: str = "medusa", joint: bool = False) -> ConfigDict:
    """The configuration of the heads ``name``; ``joint`` trains the target beside them (it becomes another target)."""
    config = pretrain.get_config()
    del config.tokenizer, config.model  # the target's
    config.objective = "heads"
    config.target = ""  # a model directory, or a trained run's workdir
    config.init = ""  # heads to begin with
    config.joint = joint  # writes <workdir>/target as well
    config.drafter = ConfigDict({"name": name})
    config.drafter.heads = config_dict.placeholder(
        int
    )  # how many; None: as many as the method usually has
    config.loss.ce = 1.0  # cross-entropy with the text
    config.loss.teacher = 0.0  # divergence from the target's own law
    config.loss.decay = 1.0  # factor on the loss from each head to the next
    if name in ("medusa", "bpd"):
        config.loss.slots = "all"  # "one": a single head a batch, drawn anew each time
    config.optimiser = pretrain.optimiser("adamw", 1e-3)
    if joint:
        config.loss.language = "ce"  # of the target: on the text, or "kl" from what it was
        config.loss.heads = 0.2  # weight of the heads beside it
        config.optimiser.target_rate = 0.25  # of the heads' learning rate
        config.optimiser.target_from = 0  # step at which the target begins to move
    config.train.steps = 600
    config.train.batch_size = 8
    config.examine.prompts = 16
    return config
