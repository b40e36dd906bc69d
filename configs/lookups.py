"""Drafters that only read the text, against plain decoding of any target.

    python -m specjax.run --config=configs/lookups.py --config.target=DIR \\
        --config.prompts=question.jsonl

"nothing" never finds a match: it measures what a round without a draft costs more than a step of
plain decoding. Measured with SmolLM2-135M-Instruct, the first two prompts of each of Spec-Bench's
13 categories, greedy, batch 1, --config.max_new_tokens=128 --config.repeats=1, two cores of an
Intel Xeon, 2026-11-22, 15 minutes: prompt_lookup 1.16x of plain decoding (least 0.97x, "writing";
most 1.79x, "extraction"), sam 1.16x (0.95x, "writing"; 1.74x), nothing 0.985x; the texts are those
of plain decoding. A pass over 6 tokens costs about 1.8 times a pass over one there, so
drafts after a match of a single token (min_ngram=1), which are mostly rejected, cost time.
"""

from ml_collections import ConfigDict

from configs import bench
from specjax.run.settings import drafter

METHODS = {
    "nothing": {"name": "prompt_lookup", "gamma": 5, "min_ngram": 64, "max_ngram": 64},
    "prompt_lookup": {"name": "prompt_lookup", "gamma": 5},
    "sam": {"name": "sam", "gamma": 5},
}


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    config.grid.methods = {label: drafter(**keys) for label, keys in METHODS.items()}
    return config
