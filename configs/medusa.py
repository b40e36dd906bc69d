"""Medusa heads (Cai et al. 2024): one residual block and an LM head each, all on the same feature.

    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/medusa.py:joint ...   # Medusa-2: trains the target too

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3, text
written by the target; two CPU cores of an AMD EPYC, with other work running, 2026-11-21): three
minutes; chain of 4: tau 1.94 greedy, 1.22 at temperature 1 (1.33 sampled); tree of 12: 2.39 and
1.50; trained on fixed text: 1.32 and 1.20.
"""

from ml_collections import ConfigDict

from configs import heads


def get_config(joint: str = "") -> ConfigDict:
    """The configuration."""
    config = heads.get_config("medusa", joint == "joint")
    config.loss.decay = 0.8
    return config
