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

The directory has DeepSeek's names of tensors; python -m specjax.convert_heads
--kind=mtp_module writes those of MiMo and Qwen3-Next.
"""

from ml_collections import ConfigDict

from configs import eagle
from specjax.errors import UserError


def get_config(modules: str = "1") -> ConfigDict:
    """The configuration of so many modules."""
    if not modules.isdecimal() or int(modules) < 1:
        raise UserError(f"configs/mtp.py:{modules} is unknown; give the number of modules, from 1")
    steps = 3 if modules == "1" else int(modules)
    config = eagle.network("mtp_module", steps=steps, decay=0.8, noise=0.0, weight=1.0, ce=0.0)
    config.drafter.modules = int(modules)
    return config
