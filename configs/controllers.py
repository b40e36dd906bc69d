"""Fixed draft lengths beside controllers, for one drafter: what adapting the length gains.

    python -m specjax.run --config=configs/controllers.py   # trains models first
    python -m specjax.run --config=configs/controllers.py:draft_model,assets
    python -m specjax.run --config=configs/controllers.py:prompt_lookup --config.target=DIR \\
        --config.prompts=FILE

The argument is a drafter, optionally a folder with a target and a draft (``hydra``: heads), and
optionally controllers, instead of all: "prompt_lookup,,fixed:2;fixed:8;pending:FILE".
Held-out Python code, greedy and at temperature 1, in batches of 1 and 8. ``goodput`` measures what
rounds cost before the bench begins, and the acceptance on 4 prompts that are not measured.
"""

import re

from ml_collections import ConfigDict

from configs import hydra, quickstart
from specjax.run.settings import drafter

LENGTHS = (1, 2, 4, 8)
HEADS = 4
# Those that any drafter takes, and those that ask while a draft grows.
LIMITS = ("heuristic:5", "bass:5", "bandit:ucb", "goodput")
ASKS = (
    "threshold:0.4",
    "confidence:0.4",
    "confidence:0.4,1",
    "entropy:0.3",
    "adaedl",
    "calibrated",
)


def get_config(what: str = "draft_model") -> ConfigDict:
    """The configuration; ``what`` is a drafter, a folder of models, and controllers."""
    name, models, wanted = [*what.split(",", 2), "", ""][:3]
    config = quickstart.pair(models)
    if name == "hydra" and not models:
        config.prepare = ("target", "hydra")
        config.stages.hydra = hydra.get_config()
        config.stages.hydra.target = "{workdir}/target"
        config.stages.hydra.data.dir = "{workdir}/target/data"
        config.stages.hydra.drafter.heads = HEADS
    lengths = [n for n in LENGTHS if name != "hydra" or n <= HEADS]
    texts = [f"fixed:{length}" for length in lengths] + list(LIMITS)
    if name in ("draft_model", "hydra"):
        texts += ASKS
    if wanted:
        texts = wanted.split(";")
    methods = config.grid.methods = ConfigDict()
    for text in texts:
        # Labels cannot have dots.
        keys = methods[re.sub(r"[:,.]", " ", text)] = drafter(name, control=text)
        if name in ("draft_model", "hydra"):
            folder = "draft" if name == "draft_model" else name
            keys.model = f"{models or '{workdir}'}/{folder}"
        if name == "hydra":
            keys.tree = f"chain:{HEADS}"
        elif name != "token_recycling":
            keys.gamma = max(LENGTHS)
    config.warm_prompts = 4
    config.show_trace = False
    return config
