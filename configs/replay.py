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

from configs import generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "replay"
    config.traces = ""  # the recording
    config.skip_bad = False  # leave bad lines out and list them, instead of stopping at the first
    config.num_traces = 0  # largest number of conversations, from the start; 0 = all
    # Of the recorded model; 0 = that of config.target, or else the largest recorded id + 1.
    config.vocab_size = 0
    # Directory of the recorded model, optional: config.json and the tokenizer are read, no weights.
    config.target = ""
    config.drafter = generate.drafter("prompt_lookup")  # any drafter that reads tokens only
    # A lossless rule that fits the drafter. At temperature 0 all of them accept the same tokens.
    # Empty: the recommended one.
    config.accept = ""
    config.accept_keys = generate.accept_keys()
    # A recording is one text: only temperature 0 can be replayed.
    config.sampling = ConfigDict({"temperature": 0.0})
    config.max_new_tokens = 0  # cut every output there; 0 = all of it
    config.batch_size = 32  # conversations at once; changes the time, not the results
    config.seed = 0
    config.grid = ConfigDict()
    # Label -> drafter keys, instead of config.drafter. A method may have its own accept and
    # accept_keys.
    config.grid.methods = ConfigDict()
    return config
