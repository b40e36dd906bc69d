"""A draft model as a chain and as trees, with models of ``quickstart.py:train``.

    python -m specjax.run --config=configs/trees.py
    python -m specjax.run --config=configs/trees.py:assets   # with the shipped models

Three minutes on two CPU cores, after two and a half of training. Tokens per round (tau) of 8
prompts, 24 tokens each:

    temperature   chain of 4   tree of 21   tree of 21, iid   dynamic tree of 21
    0             3.31         3.84         3.84              3.69
    1             3.56         3.49         3.59              1.48

The target has high entropy (4.5 nats per token), so at temperature 1 its draw is seldom among the
best few tokens, and sampled drafts have a higher tau. The chain is the fastest: two CPU cores
verify 5 tokens in far less time than 22. ``budget_tree`` verifies as many nodes of the dynamic tree
as pay there. (AMD EPYC, with other work running, 2026-11-21; 192
tokens per cell, so +-0.2.)
"""

from ml_collections import ConfigDict

from configs import quickstart
from specjax.run.settings import drafter

SHAPE = {"tree": "3x2x1x1", "accept": "recursive"}
METHODS = {
    "chain": {"name": "draft_model", "gamma": 4, "accept": "chain"},
    "tree": {"name": "draft_tree", "siblings": "without_replacement"} | SHAPE,
    "iid_tree": {"name": "draft_tree", "siblings": "iid"} | SHAPE,
    # The same number of nodes as in the other trees.
    "dynamic_tree": {
        "name": "dynamic_tree",
        "nodes": 21,
        "depth": 4,
        "top_k": 4,
        "accept": "deterministic",
    },
}
# As many of its nodes as pay by the costs that are measured before the bench.
METHODS["budget_tree"] = METHODS["dynamic_tree"] | {"control": "budget"}


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target and a draft; empty: train them."""
    config = quickstart.pair(models)
    draft = {"model": f"{models or '{workdir}'}/draft"}
    config.grid.methods = {label: drafter(**keys | draft) for label, keys in METHODS.items()}
    config.grid.temperatures = (0.0, 1.0)
    config.grid.batch_sizes = (1,)
    config.show_trace = False
    return config
