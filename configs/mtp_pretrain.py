"""Multi-token prediction in pretraining: a target that is trained together with its heads.

    python -m specjax.run --config=configs/mtp_pretrain.py --workdir=runs/mtp
    python -m specjax.run --config=configs/mtp_pretrain.py:mtp_module ...   # DeepSeek-V3's module
    python -m specjax.run --config=configs/bench.py --config.target=runs/mtp \\
        --config.prompts=stdlib --config.drafter.name=mtp --config.drafter.model=runs/mtp/heads

The target of configs/pretrain.py with three further last layers (Gloeckle et al. 2024, n = 4), all
losses with equal weights; or with one module (DeepSeek-AI 2024), whose loss has the weight 0.3, and
0.1 in the last third of the steps. ``<workdir>/model`` is the target, an ordinary directory, and
``<workdir>/heads`` are the heads. The result is another model than plain pretraining gives:
drafting is lossless with respect to it. ``heldout_loss`` is the target's own loss.
"""

from ml_collections import ConfigDict

from configs import pretrain
from specjax.errors import UserError
from specjax.run.settings import trained

METHODS = {
    # Three heads are the paper's n - 1. weight None: the number of heads.
    "mtp": {"heads": 3, "weight": None},
    "mtp_module": {"modules": 1, "weight": "0.3,0.1@0.67"},
}


def get_config(method: str = "mtp") -> ConfigDict:
    """The configuration of one of ``METHODS``."""
    if method not in METHODS:
        raise UserError(
            f"configs/mtp_pretrain.py:{method} is unknown; it must be {' or '.join(METHODS)}"
        )
    loss = {"slots": "all"} if method == "mtp" else {}
    return pretrain.get_config(
        drafter=trained(method, **METHODS[method]),
        loss={"decay": 1.0} | loss,
        examine={},
    )
