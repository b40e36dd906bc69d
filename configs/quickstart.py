"""Trains a target and a draft model on Python code, then measures drafters.

    python -m specjax.run --config=configs/quickstart.py

Builds the corpus (the interpreter's own standard library), trains the target
(configs/pretrain.py) and a draft model that imitates it (configs/distill.py). Then decodes
held-out Python code plainly and with each drafter, greedy and at temperature 1, batch 1 and 8,
checks that the output is lossless, and prints a table and one continuation coloured by the origin
of each token. Everything is written to runs/quickstart; a second run reuses the trained models.
"""

from ml_collections import ConfigDict

from configs import bench, distill, pretrain
from specjax.run.settings import drafter


def get_config() -> ConfigDict:
    """The configuration."""
    config = bench.get_config()
    config.prepare = ("target", "draft")
    config.stages = ConfigDict({"target": pretrain.get_config(), "draft": distill.get_config()})
    config.stages.draft.target = config.target = "{workdir}/target"
    config.stages.draft.data.dir = "{workdir}/target/data"
    config.prompts = "stdlib"
    config.num_prompts = 8
    config.max_new_tokens = 24
    config.grid.methods.draft_model = drafter("draft_model", model="{workdir}/draft", gamma=4)
    config.grid.methods.prompt_lookup = drafter("prompt_lookup", gamma=4)
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1, 8)
    config.show_trace = True
    return config
