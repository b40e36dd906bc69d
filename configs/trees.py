"""A draft model as a chain and as trees: the models of the quickstart, each drafter with a rule that fits it.

    python -m specjax.run --config=configs/trees.py
    python -m specjax.run --config=configs/trees.py:runs/quickstart   # with the models of an earlier quickstart

TIME
"""

from ml_collections import ConfigDict

from configs import generate, quickstart


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a trained target and a draft model, empty: train them."""
    config = quickstart.get_config()
    if models:
        config.prepare = ()
        config.target = f"{models}/target"
    methods = config.grid.methods = ConfigDict()
    methods.chain = generate.drafter("draft_model")
    methods.chain.gamma = 4
    methods.chain.accept = "chain"
    methods.tree = generate.drafter("draft_tree")
    methods.tree.tree = "3x2x1x1"
    methods.tree.siblings = "without_replacement"
    methods.tree.accept = "recursive"
    methods.iid_tree = generate.drafter("draft_tree")
    methods.iid_tree.tree = "3x2x1x1"
    methods.iid_tree.siblings = "iid"
    methods.iid_tree.accept = "recursive"
    methods.dynamic_tree = generate.drafter("dynamic_tree")
    methods.dynamic_tree.nodes = 21  # as many as the others have
    methods.dynamic_tree.depth = 4
    methods.dynamic_tree.top_k = 4
    methods.dynamic_tree.accept = "deterministic"
    for keys in methods.values():
        keys.model = f"{models or '{workdir}'}/draft"
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1,)
    config.show_trace = False
    return config
