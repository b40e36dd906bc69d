"""MLP speculator (Wertheimer et al. 2024): a small recurrent state, fed with each drafted token.

    python -m specjax.run --config=configs/mlp_speculator.py --workdir=runs/speculator1 \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/mlp_speculator.py --workdir=runs/speculator2 \\
        --config.target=runs/target --config.init=runs/speculator1 \\
        --config.data.generated=runs/generated --config.optimiser.learning_rate=1e-4

The second command is the second phase of training: text written by the target, a tenth of the rate.

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3,
text written by the target; two CPU cores of an AMD EPYC, with other work running, 2026-11-21):
under three minutes per phase (the first on fixed text); chain of 4: tau after the first phase
1.75 greedy, 1.43 at temperature 1 (1.63 sampled); after the second 2.34 and 1.44 (1.67).
"""

from ml_collections import ConfigDict

from configs import heads


def get_config() -> ConfigDict:
    """The configuration."""
    config = heads.get_config("mlp_speculator")
    config.optimiser.weight_decay = 0.1
    return config
