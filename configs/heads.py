"""Trains heads on a target's features: the common part of the configurations of heads.

    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=medusa --config.drafter.model=runs/medusa

``<workdir>/model`` has the layout of the released heads. It also holds their accuracies on the
target's own text, so that ``config.drafter.nodes`` can search for a tree.
"""

from ml_collections import ConfigDict, config_dict

from specjax.run.settings import trained, training


def get_config(name: str = "medusa", joint: bool = False) -> ConfigDict:
    """The configuration of the heads ``name``; ``joint`` trains the target too (a new target)."""
    loss = {
        "ce": 1.0,
        "teacher": 0.0,
        "divergence": "forward_kl",
        "decay": 1.0,
        "pace": config_dict.placeholder(float),
    }
    loss["places"] = 0
    if name in ("medusa", "bpd"):
        loss["slots"] = "all"
    config = training(
        "heads",
        drafter=trained(name),
        joint=joint,
        loss=loss | ({"language": "ce", "heads": 0.2} if joint else {}),
        train={"steps": 600},
    )
    if joint:
        config.optimiser.target_rate = 0.25
    return config
