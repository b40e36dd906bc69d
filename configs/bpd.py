"""Blockwise parallel decoding (Stern et al. 2018): further slots on the shared LM head.

    python -m specjax.run --config=configs/bpd.py --workdir=runs/bpd \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bpd.py:joint ...   # fine-tuned: trains the target too
    ... --config.data.generated=DIR                           # distilled: on the target's own text

One slot, chosen at random, is trained in each batch.

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3, text
written by the target; two CPU cores of an AMD EPYC, with other work running, 2026-11-21): one
minute; chain of 4: tau 2.01 greedy, 1.24 at temperature 1 (1.35 sampled).
"""

from ml_collections import ConfigDict

from configs import heads


def get_config(joint: str = "") -> ConfigDict:
    """The configuration."""
    config = heads.get_config("bpd", joint == "joint")
    config.loss.slots = "one"
    return config
