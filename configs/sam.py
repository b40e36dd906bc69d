"""Matches of any length: sam alone, sam before token recycling as in its paper, and prompt lookup.

python -m specjax.run --config=configs/sam.py --config.target=DIR --config.prompts=prompts.txt
... --config.grid.methods.sam.datastore=STORE_DIR   # of configs/datastore.py, this target
"""

from ml_collections import ConfigDict

from configs import bench
from specjax.run.settings import drafter


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    methods = config.grid.methods
    methods.sam = drafter("sam", gamma=15)
    methods.prompt_lookup = drafter("prompt_lookup", gamma=15, max_ngram=16)
    both = methods.sam_then_recycling = drafter("escalate", accept="deterministic")
    # With a shorter match sam proposes no token, and the next drafter proposes.
    both.drafters.sam = drafter("sam", gamma=15, min_match=5)
    both.drafters.token_recycling = drafter("token_recycling", tree="4x2x1")
    return config
