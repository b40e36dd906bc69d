"""Block drafters: DFlash, and after a colon dflash2, dspark, jetspec, domino, dflare or xpress.

    python -m specjax.run --config=configs/block_head.py:dspark --workdir=runs/dspark \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=block_head --config.drafter.model=runs/dspark
    ... --config.drafter.tree=best_first --config.drafter.nodes=32 --config.accept=match   # DDTree
    ... --config.drafter.tree=best_parents --config.drafter.nodes=64 --config.accept=match # JetSpec
    ... --config.drafter.tree=dynamic --config.drafter.nodes=16 --config.drafter.top_k=4   # PCTree

The sizes are for a small target: two layers, the published ones have five and taps of five layers
of the target. Without a shape the draft is a sampled chain of the whole block. Trees from one list
per depth (DDTree, JetSpec) need a network without a correction: dflash, jetspec or dflare; PCTree
is for those with one. Minutes on two CPU cores for a small target. EAGLE-3 in one pass (P-EAGLE) is
configs/p_eagle.py. dflash2 and xpress have the losses of the speculators library, with the text's
token in the place of the target's preferred one in the cross-entropy (its ce_from_data).
"""

from ml_collections import ConfigDict, config_dict

from specjax.errors import UserError
from specjax.run.settings import trained, training

# exp(-1/4): the factor of the weights exp(-k/4) of DSpark, and of DFlash with blocks of 8.
DECAY = 0.779
# Method -> (keys of the drafter, keys of the loss). DSpark's loss has 0.9 of the L1 distance, which
# is twice the total variation.
METHODS = {
    "dflash": ({}, {}),
    "dspark": (
        {"block": 7, "anchor": True, "correction": "markov", "confidence": True},
        {"ce": 0.1, "teacher": 1.8, "divergence": "total_variation", "confidence": 1.0},
    ),
    # Published without decay. On stories260K, 600 steps at a rate of 3e-3 on text that it wrote,
    # tau at temperature 0 was 2.00 then, and is 2.07 with it.
    "jetspec": ({"causal": True}, {"ce": 0.0, "teacher": 1.0}),
    "domino": ({"anchor": True, "correction": "gru"}, {"base": 1.0}),
    "dflare": ({"context": "mixed"}, {}),
    "dflash2": (
        {"conv": 2, "correction": "selector"},
        {"ce": 0.0, "teacher": 1.0, "selector": 1.0},
    ),
    "xpress": (
        {"correction": "refiner"},
        {
            "ce": 0.1,
            "teacher": 0.9,
            "divergence": "total_variation",
            "uncorrected": 0.6,
            "consistency": 0.3,
            "passes": 3,
        },
    ),
}


def get_config(method: str = "dflash") -> ConfigDict:
    """The configuration of one of ``METHODS``."""
    if method not in METHODS:
        raise UserError(
            f"configs/block_head.py:{method} is unknown; it must be {', '.join(METHODS)}"
        )
    own, loss = METHODS[method]
    keys = {
        "block": 8,
        "layers": 2,
        "qk_norm": True,
        "context": "shared",
        "causal": False,
        "correction": "none",
        "confidence": False,
    }
    usual = {
        "ce": 1.0,
        "teacher": 0.0,
        "divergence": "forward_kl",
        "decay": DECAY,  # 1 with pace (D-PACE)
        "pace": config_dict.placeholder(float),
        "places": 32,
        "confidence": 0.0,
        "base": 0.0,
    }
    return training(
        "heads",
        drafter=trained("block_head", **keys | own),
        loss=usual | loss,
        train={"steps": 600},
    )
