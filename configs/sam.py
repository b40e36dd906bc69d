"""Matches of any length: sam alone, sam before token recycling as in its paper, and prompt lookup.

python -m specjax.run --config=configs/sam.py --config.target=DIR --config.prompts=prompts.txt
... --config.grid.methods.sam.datastore=STORE_DIR   # of configs/datastore.py, this target
"""

from ml_collections import ConfigDict

from configs import bench, generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    methods = config.grid.methods
    for name in ("sam", "prompt_lookup"):
        methods[name] = generate.drafter(name)
        methods[name].gamma = 15
    methods.prompt_lookup.max_ngram = 16
    both = methods.sam_then_recycling = generate.drafter("escalate")
    both.accept = "deterministic"
    for name in ("sam", "token_recycling"):
        both.drafters[name] = generate.drafter(name)
    both.drafters.sam.gamma = 15
    # With a shorter match sam proposes no token, and the next drafter proposes.
    both.drafters.sam.min_match = 5
    both.drafters.token_recycling.tree = "4x2x1"
    return config
