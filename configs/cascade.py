"""A draft model that is drafted for by a lookup: cascade, staged and bild beside draft_model.

    python -m specjax.run --config=configs/cascade.py   # trains models first
    python -m specjax.run --config=configs/cascade.py:assets   # with the shipped models

The tokens of all drafts are the same draft model's; the methods differ in how often it runs.
"""

from ml_collections import ConfigDict

from configs import quickstart
from specjax.run.settings import drafter


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target and a draft; empty: train them."""
    config = quickstart.pair(models)
    draft = f"{models or '{workdir}'}/draft"
    methods = config.grid.methods = ConfigDict()
    methods.draft_model = drafter("draft_model", model=draft, gamma=5, accept="chain")
    methods.cascade = drafter("cascade", models=draft, lengths="5,0;5", accept="chain")
    methods.staged = drafter("staged", model=draft, gamma=5, accept="recursive")
    methods.staged.drafters.lookup = drafter("prompt_lookup", gamma=5)
    methods.bild = drafter("bild", model=draft, accept="chain")
    config.grid.batch_sizes = (1,)
    config.max_new_tokens = 64
    config.show_trace = False
    return config
