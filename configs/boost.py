"""Boost-tuning (SpecInfer, 2305.09781): a second draft model learns what the first gets wrong.

    python -m specjax.run --config=configs/boost.py          # trains a target first
    python -m specjax.run --config=configs/boost.py:assets   # with the shipped target

Trains two one-layer draft models one after the other, the second on the tokens that the first does
not predict, and a third on all tokens with another seed. Then measures ``specinfer`` with the first
and the second model, with the first and the third, and with the first alone, all with as many
nodes. About two minutes of training on two CPU cores beyond the target's.
"""

from ml_collections import ConfigDict

from configs import distill, pretrain, quickstart
from specjax.run.settings import drafter


def get_config(models: str = "") -> ConfigDict:
    """The configuration; ``models`` is a folder with a target; empty: train one."""
    config = quickstart.pair(models)
    config.stages = ConfigDict()
    if not models:
        config.stages.target = pretrain.get_config()
    for name in ("first", "boosted", "other"):
        stage = config.stages[name] = distill.get_config()
        stage.target = config.target
        stage.data.dir = quickstart.text_of(models)
        stage.model.update({"hidden_size": 64, "intermediate_size": 192})
        stage.seed = int(name != "first")
    config.stages.boosted.boosted = "{workdir}/first"
    config.prepare = tuple(config.stages)
    methods = config.grid.methods = ConfigDict()
    pairs = {"boosted": ("boosted",), "unboosted": ("other",), "alone": ()}
    for label, more in pairs.items():
        methods[label] = drafter(
            "specinfer",
            models=",".join("{workdir}/" + name for name in ("first", *more)),
            # Two trees of 6 nodes, or one of 12.
            tree="2x1x1" if more else "4x1x1",
            sibling_order="random",
        )
    config.grid.batch_sizes = (1,)
    config.show_trace = False
    return config
