"""Stores the target's features of a text once, to train several drafters on them.

    python -m specjax.run --config=configs/features.py --workdir=runs/features \\
        --config.target=runs/target --config.data.generated=runs/generated
    python -m specjax.run --config=configs/medusa.py --workdir=runs/medusa \\
        --config.target=runs/target --config.data.features=runs/features

A row has ``config.train.length`` tokens. A token takes (1 + taps) * width * 4, 2 or 1 bytes as
float32, bfloat16 or float8 (float8: 4 more for each of its vectors), and 12 to 17 for its id,
label, document and two numbers of the target's logits. The sizes are printed before the target
runs, and are in summary.json. The same command resumes a killed run.
"""

from ml_collections import ConfigDict

from specjax.run.settings import training


def get_config() -> ConfigDict:
    """The configuration."""
    return training("features")
