"""A draft model as a chain and as trees, with the models of the quickstart.

    python -m specjax.run --config=configs/trees.py
    python -m specjax.run --config=configs/trees.py:runs/quickstart   # with a quickstart's models

Three minutes on two CPU cores, after two and a half of training. Tokens per round (tau) of 8
prompts, 24 tokens each:

    temperature   chain of 4   tree of 21   tree of 21, iid   dynamic tree of 21
    0             3.31         3.84         3.84              3.69
    1             3.56         3.49         3.59              1.48

The target has high entropy (4.5 nats per token), so at temperature 1 its draw is seldom among the
best few tokens, and sampled drafts have a higher tau. The chain is the fastest: two CPU cores
verify 5 tokens in far less time than 22. (AMD EPYC, with other work running, 2026-11-21; 192
tokens per cell, so +-0.2.)
"""

from ml_collections import ConfigDict

from configs import generate, quickstart


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target and a draft; empty: train them."""
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
    methods.dynamic_tree.nodes = 21  # the same number as in the other trees
    methods.dynamic_tree.depth = 4
    methods.dynamic_tree.top_k = 4
    methods.dynamic_tree.accept = "deterministic"
    for keys in methods.values():
        keys.model = f"{models or '{workdir}'}/draft"
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1,)
    config.show_trace = False
    return config
