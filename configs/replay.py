"""Replay recorded conversations: block efficiency of a drafter, overall and by category, without a target model.

    python -m specjax.run --config=configs/replay.py --config.traces=FILE.jsonl
    python -m specjax.run --config=configs/replay.py --config.traces=FILE.jsonl --config.target=DIR \\
        --config.drafter.name=draft_tree --config.drafter.model=DRAFT_DIR --config.accept=recursive

A line of the file is one conversation as token ids, as its target answered it at temperature 0:
{"id": ..., "category": ..., "prompt_ids": [...], "output_ids": [...]}; id and category may be left out.
``specjax.traces.record`` writes such files, and so does mode generate with ``config.record``. Nine seconds on two CPU
cores for 480 conversations of 196 tokens and prompt lookup (README).
"""

from ml_collections import ConfigDict

from configs import generate


def get_config() -> ConfigDict:
    """The configuration."""
    config = ConfigDict()
    config.mode = "replay"
    config.traces = ""  # the recording
    config.skip_bad = False  # leave bad lines out and list them, instead of stopping at the first
    config.num_traces = 0  # at most so many conversations, from the start; 0 = all
    config.vocab_size = 0  # of the recorded model; 0 = that of config.target, or else the largest recorded id says it
    config.target = (
        ""  # its directory, if there is one: config.json and the tokenizer are read, no weights
    )
    config.drafter = generate.drafter("prompt_lookup")  # any that looks at tokens only
    config.accept = "chain"  # a lossless rule that fits the drafter; at temperature 0 they all accept the same tokens
    config.accept_keys = generate.accept_keys()
    config.sampling = ConfigDict(
        {"temperature": 0.0}
    )  # a recording is one text: nothing else can be replayed
    config.max_new_tokens = 0  # cut every output there; 0 = all of it
    config.batch_size = 32  # conversations at once: how fast it is, never what it finds
    config.seed = 0
    config.grid = ConfigDict()
    # Label -> drafter keys, instead of config.drafter. A method may bring its own rule: accept, and accept_keys for it.
    config.grid.methods = ConfigDict()
    return config
