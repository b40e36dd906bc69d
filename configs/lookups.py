"""Drafters that only read the text, against plain decoding of any target.

    python -m specjax.run --config=configs/lookups.py --config.target=DIR \\
        --config.prompts=question.jsonl --config.chat=own

"nothing" never finds a match: it measures what a round without a draft costs more than a step of
plain decoding. On two CPU cores a model of 135 M parameters takes about 40 seconds per method and
repeat for 13 prompts with 96 new tokens each.
"""

from ml_collections import ConfigDict

from configs import bench, generate

METHODS = {
    "nothing": {"name": "prompt_lookup", "gamma": 5, "min_ngram": 64, "max_ngram": 64},
    "prompt_lookup": {"gamma": 5},
    "sam": {"gamma": 5},
}


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    methods = config.grid.methods
    for label, keys in METHODS.items():
        methods[label] = generate.drafter(keys.get("name", label))
        methods[label].update({"name": label} | keys)
    return config
