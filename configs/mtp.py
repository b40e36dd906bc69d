"""Multi-token prediction modules (DeepSeek-V3, 2024): trained beside a frozen target.

    python -m specjax.run --config=configs/mtp.py --workdir=runs/mtp \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/mtp.py:2 ...   # two modules in sequence

With one module three steps of a draft are unrolled: the module also learns to read its own output,
as in a chain of three tokens. --config.loss.steps=1 is DeepSeek's training of one module. With more
modules there is one step for each. The labels are the target's probs; --config.loss.weight=0
--config.loss.ce=1 are the text's own tokens, as in DeepSeek's training. A training step costs about
as much as one of configs/eagle3.py with as many steps. configs/mtp_pretrain.py:mtp_module trains a
target together with its modules.

The directory has DeepSeek's names of tensors; python -m specjax.models.convert_heads
--kind=mtp_module writes those of MiMo and Qwen3-Next.
"""

from ml_collections import ConfigDict, config_dict

from configs import eagle
from specjax.errors import UserError


def get_config(modules: str = "1") -> ConfigDict:
    """The configuration of so many modules."""
    if not modules.isdecimal() or int(modules) < 1:
        raise UserError(f"configs/mtp.py:{modules} is unknown; give the number of modules, from 1")
    config = eagle.network("mtp_module")
    drafter = config.drafter
    del drafter.layers, drafter.shift
    drafter.modules = int(modules)
    # Switches: see the keys of the drafter; None: their defaults.
    drafter.hidden_first = config_dict.placeholder(bool)
    drafter.hidden = config_dict.placeholder(str)
    drafter.recycled = config_dict.placeholder(str)
    drafter.zero_first = config_dict.placeholder(bool)
    config.loss.steps = 3 if modules == "1" else int(modules)
    config.loss.decay = 0.8
    config.loss.noise = 0.0  # uniform noise on the hidden states that the first step reads
    config.loss.weight = 1.0  # of the divergence from the target's probs
    config.loss.ce = 0.0  # weight of the cross-entropy with the text
    return config
