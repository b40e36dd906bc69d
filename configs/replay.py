"""Replays recorded conversations: block efficiency of a drafter, overall and by category.

    python -m specjax.run --config=configs/replay.py --config.traces=FILE.jsonl
    python -m specjax.run --config=configs/replay.py --config.traces=FILE.jsonl \\
        --config.target=DIR --config.drafter.name=draft_tree --config.drafter.model=DRAFT_DIR

No target model is run. A line of the file is one conversation as token ids, as the target
answered it at temperature 0: {"id": ..., "category": ..., "prompt_ids": [...], "output_ids":
[...]}; id and category are optional. ``specjax.data.recordings.record`` writes such files, and so
does mode generate with ``config.record``. Nine seconds on two CPU cores for 480 conversations of
196 tokens and prompt lookup (README).
"""

from ml_collections import ConfigDict

from specjax.run.settings import decoding, drafter


def get_config() -> ConfigDict:
    """The configuration."""
    return decoding("replay", drafter=drafter("prompt_lookup"), max_new_tokens=0, batch_size=32)
