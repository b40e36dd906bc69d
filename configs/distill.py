"""A one-layer draft model that imitates the target (DistillSpec).

    python -m specjax.run --config=configs/distill.py --workdir=runs/draft \\
        --config.target=runs/target --config.data.dir=runs/target/data

Divergences: --config.loss.divergence=forward_kl, reverse_kl, jensen_shannon (with
--config.loss.beta), total_variation. Text: the corpus; text written by the target
(--config.data.generated=DIR of configs/self_generate.py); text written by the draft
(--config.data.on_policy=1); or a mixture (both, on_policy between 0 and 1). --config.pruned=0,3
starts from those layers of the target instead of config.model. ``config.data.dir`` only saves
building the corpus a second time.

The draft of quickstart.py:train, with these defaults: under a minute on two CPU cores, held-out
divergence 0.094 nats per token, acceptance rate (alpha) 0.85 at temperature 1. On stories260K
(experiments/trained_drafters: 1200 steps of 8 x 128 tokens, one layer of the target's width; AMD
EPYC, with other work running, 2026-11-21) one and a half to three minutes; tau greedy and at
temperature 1:

    text              forward_kl   reverse_kl   jensen_shannon   total_variation
    fixed             1.38 1.55    1.67 1.93    1.43 1.64        1.67 1.79
    target's          3.19 2.38    2.52 1.97    3.08 2.24        2.51 1.92
    draft's           2.14 2.28    1.81 1.83    2.25 2.31        1.91 2.00
    half and half     2.98 2.28    2.41 2.07    2.93 2.34        2.62 2.10

Pretrained on the fixed text (configs/pretrain.py with config.target): 1.65 1.74.
"""

from ml_collections import ConfigDict

from configs import pretrain
from specjax.run.settings import training

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_layers": 1, "num_heads": 2}


def get_config(**values: object) -> ConfigDict:
    """The configuration; ``values`` replace groups."""
    usual = {
        "model": pretrain.SMALL | {"vocab_size": 0} | SHAPE,
        "loss": {"divergence": "forward_kl", "beta": 0.5, "temperature": 1.0},
        "train": {"steps": 220, "batch_size": 4},
        "optimiser": pretrain.MUON,
    }
    return training("distill", **usual | values)
