"""SpecDec's Spec-Drafter (Xia et al. 2023): drafts a block of tokens for T5 targets in one pass.

    python -m specjax.run --config=configs/spec_drafter.py --workdir=runs/spec_drafter \\
        --config.target=runs/t5 --config.data.dir=runs/t5/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/t5 \\
        --config.prompts=stdlib --config.prompt_tokens=96 \\
        --config.drafter.name=spec_drafter --config.drafter.model=runs/spec_drafter
    ... --config.accept=tolerance --config.accept_keys.top=3 --config.accept_keys.gap=1.0   # lossy

The network learns the outputs of the pairs, or better those that the target wrote for their sources
(--config.data.pairs= --config.data.generated=DIR, of configs/self_generate.py with
--config.data.pairs=docstrings), as the paper's data are distilled. The encoder begins as a copy of
the target's where the sizes agree. The paper trains a beginning of each output per step
(config.loss.places=1), with dropout, which is left out here.
"""

from ml_collections import ConfigDict, config_dict

from configs import t5
from specjax.run.settings import trained, training


def get_config() -> ConfigDict:
    """The configuration."""
    return training(
        "heads",
        data={"pairs": "docstrings"},
        # The paper's drafts have 25 tokens.
        drafter=trained("spec_drafter", block=7, layers=2),
        loss={
            "places": 4,
            "smoothing": 0.1,
            "glancing": 0.5,
            "fall": config_dict.placeholder(float),
        },
        train=t5.TRAIN,
        examine=t5.EXAMINE,
    )
