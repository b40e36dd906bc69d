"""A draft model as a chain and as trees: the models of the quickstart, each drafter with a rule that fits it.

    python -m specjax.run --config=configs/trees.py
    python -m specjax.run --config=configs/trees.py:runs/quickstart   # with the models of an earlier quickstart

Three minutes on two CPU cores, after the two and a half of training. Tokens per round (tau) of 8 prompts, 24 tokens each:

    temperature   chain of 4   tree of 21   tree of 21, iid   dynamic tree of 21
    0             3.31         3.84         3.84              3.69
    1             3.56         3.49         3.59              1.48

The target is unsure of itself (4.5 nats a token), so at temperature 1 the best few tokens seldom hold its draw, and drafts
that are sampled win. The chain is the quickest: two CPU cores verify 5 tokens in far less time than 22. (AMD EPYC,
other work beside it, 21 November 2026; 192 tokens a cell, so +-0.2.)
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
