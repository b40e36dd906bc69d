"""Decodes prompts and prints the text: plainly, or with any drafter.

    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.prompt="Once upon a time"
    python -m specjax.run --config=configs/generate.py --config.target=DIR \\
        --config.prompts=prompts.jsonl --config.drafter.name=draft_model \\
        --config.drafter.model=DRAFT_DIR --config.sampling.temperature=0.8

A single prompt on a terminal is streamed. Takes seconds on a CPU for a small model, most of them
for compilation.
"""

from ml_collections import ConfigDict

from specjax.run.settings import decoding, drafter

__all__ = ["drafter", "get_config"]


def get_config() -> ConfigDict:
    """The configuration."""
    return decoding("generate")
