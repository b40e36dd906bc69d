"""Three levels for long prompts: a small model, the target with a part of its cache, the target.

    python -m specjax.run --config=configs/triforce.py   # trains models first
    python -m specjax.run --config=configs/triforce.py:DRAFT_DIR --config.target=DIR \\
        --config.prompts=prompts.txt

The small model must have positions for the whole text. See --explain=triforce.
"""

from ml_collections import ConfigDict

from configs import bench, quickstart
from specjax.run.settings import drafter


def get_config(draft: str = "") -> ConfigDict:
    """The configuration; ``draft`` is the small model; empty: train target and small model."""
    config = bench.get_config() if draft else quickstart.pair()
    if not draft:
        config.grid.methods = ConfigDict()
        config.grid.batch_sizes = (1,)
        config.show_trace = False
    config.drafter = drafter("triforce", model=draft or "{workdir}/draft")
    config.accept = "chain"
    return config
