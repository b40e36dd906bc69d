"""Blockwise parallel decoding (Stern et al. 2018): further slots on the shared LM head, one drawn for each batch.

    python -m specjax.run --config=configs/bpd.py --workdir=runs/bpd --config.target=runs/target \\
        --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bpd.py:joint ...   # fine-tuned: the target learns beside them
    ... --config.data.generated=DIR                           # distilled: on text that the target wrote

TIMES
"""

from ml_collections import ConfigDict, config_dict

from configs import heads


def get_config(joint: str = "") -> ConfigDict:
    """The configuration; "joint" trains the target too."""
    config = heads.get_config("bpd", joint == "joint")
    config.drafter.inner = config_dict.placeholder(int)  # width of a slot's hidden layer; None: four times the target's
    config.loss.slots = "one"
    return config
