"""A draft model that is drafted for by a lookup: cascade, staged and bild beside draft_model.

    python -m specjax.run --config=configs/cascade.py   # trains the quickstart's models first
    python -m specjax.run --config=configs/cascade.py:runs/quickstart   # with its models

The tokens of all drafts are the same draft model's; the methods differ in how often it runs.
"""

from ml_collections import ConfigDict

from configs import generate, quickstart


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target and a draft; empty: train them."""
    config = quickstart.get_config()
    if models:
        config.prepare = ()
        config.target = f"{models}/target"
    draft = f"{models or '{workdir}'}/draft"
    methods = config.grid.methods = ConfigDict()
    for name in ("draft_model", "cascade", "staged", "bild"):
        methods[name] = generate.drafter(name)
        methods[name].accept = "recursive" if name == "staged" else "chain"
        if name != "cascade":
            methods[name].model = draft
    methods.draft_model.gamma = methods.staged.gamma = 5
    methods.cascade.models = draft
    methods.cascade.lengths = "5,0;5"
    lookup = methods.staged.drafters.lookup = generate.drafter("prompt_lookup")
    lookup.gamma = 5
    config.grid.batch_sizes = (1,)
    config.max_new_tokens = 64
    config.show_trace = False
    return config
