"""One drafter with several targets of one vocabulary: what quantisation or fine-tuning changes.

    python -m specjax.run --config=configs/compare_targets.py
    python -m specjax.run --config=configs/compare_targets.py:bfloat16,MODEL.gguf,TUNED_DIR \\
        --config.target=DIR --config.prompts=FILE --config.drafter.name=eagle \\
        --config.drafter.model=HEADS_DIR

The argument has the further targets, separated by commas: a directory, a name of the Hub or a
.gguf file; or a dtype, or int8, for config.target with such weights. Every drafter of the bench
runs with each of them on the same prompts, and the embeddings and the LM head that a draft head
uses are those of the target that it runs with. Beside the rows of a bench, results.json has for
each further target how many greedy texts are those of config.target, how often the most probable
token is the same on its texts, how far the next-token distributions are apart (total variation),
and the ratio of tokens per round, with intervals over prompts.

Without an argument: the shipped target in bfloat16 and with int8 weights, with a draft model and a
lookup. Some minutes on two CPU cores (an estimate).
"""

import re
from pathlib import Path

from ml_collections import ConfigDict

from configs import bench, quickstart

DTYPES = ("float32", "bfloat16", "float16")


def get_config(others: str = "") -> ConfigDict:
    """The configuration; ``others`` are the further targets."""
    config = bench.get_config()
    config.repeats, config.max_new_tokens = 1, 64
    if not others:
        shipped = quickstart.get_config()
        config.update(target=shipped.target, prompts=shipped.prompts)
        names = ("draft_model", "prompt_lookup")
        config.grid.methods = ConfigDict({name: shipped.grid.methods[name] for name in names})
    for name in (others or "bfloat16,int8").split(","):
        if name in (*DTYPES, "int8"):
            key = "weights" if name == "int8" else "dtype"
            config.grid.targets[name] = ConfigDict({key: name})
        else:
            # Labels cannot have dots.
            label = re.sub(r"\W+", "_", Path(name).stem)
            if label in config.grid.targets:
                label = re.sub(r"\W+", "_", name)
            config.grid.targets[label] = ConfigDict({"target": name})
    return config
