"""Fixed draft lengths beside controllers, for one drafter: what adapting the length gains.

    python -m specjax.run --config=configs/controllers.py   # trains models first
    python -m specjax.run --config=configs/controllers.py:draft_model,assets
    python -m specjax.run --config=configs/controllers.py:dynamic_tree,assets
    python -m specjax.run --config=configs/controllers.py:prompt_lookup --config.target=DIR \\
        --config.prompts=FILE

The argument is a drafter (``dynamic_tree``: a draft model that drafts such a tree), optionally a
folder with a target and a draft (``hydra``: heads), and optionally controllers, instead of all:
"prompt_lookup,,fixed:2;fixed:8;pending:FILE".
Held-out Python code, greedy and at temperature 1, in batches of 1 and 8. ``goodput`` measures what
rounds cost before the bench begins, and the acceptance on 4 prompts that are not measured; ``ltd``
fits its policies to 16.
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
# Of a tree.
SIZES = ("budget", "ltd")
TREE = {"nodes": 32, "depth": 6, "top_k": 8, "accept": "deterministic"}


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
    if name == "dynamic_tree":
        texts += SIZES
    if wanted:
        texts = wanted.split(";")
    methods = config.grid.methods = ConfigDict()
    for text in texts:
        # Labels cannot have dots.
        keys = methods[re.sub(r"[:,.]", " ", text)] = drafter(name, control=text)
        if name in ("draft_model", "hydra", "dynamic_tree"):
            folder = "hydra" if name == "hydra" else "draft"
            keys.model = f"{models or '{workdir}'}/{folder}"
        if name == "hydra":
            keys.tree = f"chain:{HEADS}"
        elif name == "dynamic_tree":
            keys.update(TREE)
        elif name != "token_recycling":
            keys.gamma = max(LENGTHS)
    config.warm_prompts = 16 if "ltd" in texts else 4
    config.show_trace = False
    return config
