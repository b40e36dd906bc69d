"""The target drafts with a part of its own cache, for long prompts.

python -m specjax.run --config=configs/magicdec.py --config.target=DIR --config.prompts=prompts.txt
... --config.drafter.view=snapkv   # or retrieval; see --explain=magicdec

It pays off where most of a pass is spent on the cache: long prompts, and many rows. With short ones
a draft token costs as much as a token of plain decoding, and the text is slower.
experiments/long_context has measurements.
"""

from ml_collections import ConfigDict

from configs import bench
from specjax.run.settings import drafter


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    config.drafter = drafter("magicdec", budget=512, gamma=4)
    config.accept = "chain"
    return config
