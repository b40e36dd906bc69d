"""Block drafters: DFlash, and after a colon dspark, jetspec, domino or dflare (2026).

    python -m specjax.run --config=configs/block_head.py:dspark --workdir=runs/dspark \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=block_head --config.drafter.model=runs/dspark
    ... --config.drafter.tree=best_first --config.drafter.nodes=32 --config.accept=match   # DDTree
    ... --config.drafter.tree=best_parents --config.drafter.nodes=64 --config.accept=match # JetSpec

The sizes are for a small target: two layers, the published ones have five and taps of five layers
of the target. Without a shape the draft is a sampled chain of the whole block. Trees from one list
per depth (DDTree, JetSpec) need a network without a correction: dflash, jetspec or dflare. Minutes
on two CPU cores for a small target. EAGLE-3 in one pass (P-EAGLE) is configs/p_eagle.py.
"""

from ml_collections import ConfigDict, config_dict

from configs import heads
from specjax.errors import UserError

METHODS = ("dflash", "dspark", "jetspec", "domino", "dflare")
# exp(-1/4): the factor of the weights exp(-k/4) of DSpark, and of DFlash with blocks of 8.
DECAY = 0.779


def get_config(method: str = "dflash") -> ConfigDict:
    """The configuration of one of ``METHODS``."""
    if method not in METHODS:
        raise UserError(
            f"configs/block_head.py:{method} is unknown; it must be {', '.join(METHODS)}"
        )
    config = heads.get_config("block_head")
    drafter = config.drafter = ConfigDict({"name": "block_head"})
    # Places of a block, with the pending token's.
    drafter.block = 7 if method == "dspark" else 8
    # Layers of the target, from 0, as "1,5,9"; None: as many as the network has, evenly spaced.
    drafter.taps = config_dict.placeholder(str)
    drafter.layers = 2
    drafter.heads = config_dict.placeholder(int)  # attention heads
    drafter.kv_heads = config_dict.placeholder(int)
    drafter.head_dim = config_dict.placeholder(int)
    drafter.inner = config_dict.placeholder(int)  # width of the feed-forward
    drafter.qk_norm = True
    # Layers but the last attend to less than so many positions before; None: to all.
    drafter.window = config_dict.placeholder(int)
    # A token of the target that stands for the masks; None: an embedding of their own.
    drafter.mask_id = config_dict.placeholder(int)
    drafter.context = "mixed" if method == "dflare" else "shared"
    drafter.causal = method == "jetspec"
    # Whether the pending token's place predicts; None: no, or as in the files of drafter.model.
    drafter.anchor = config_dict.placeholder(bool)
    if method in ("dspark", "domino"):
        drafter.anchor = True
    drafter.correction = {"dspark": "markov", "domino": "gru"}.get(method, "none")
    # Rank of the correction; None: 256.
    drafter.rank = config_dict.placeholder(int)
    drafter.state = config_dict.placeholder(int)  # width of the GRU; None: the target's
    drafter.plain = config_dict.placeholder(int)  # first tokens that it does not correct; None: 1
    drafter.confidence = method == "dspark"
    # The shape of drafts in the forecasts of training; None: a chain of the whole block.
    drafter.gamma = config_dict.placeholder(int)
    drafter.tree = config_dict.placeholder(str)
    config.loss.decay = DECAY  # 1 with config.loss.pace (D-PACE), which heads.py has
    config.loss.places = 32  # blocks of each row in a step
    config.loss.confidence = 0.0  # weight of the confidence's cross-entropy
    if method == "dspark":
        # 0.9 of the L1 distance, which is twice the total variation.
        config.loss.ce, config.loss.teacher = 0.1, 1.8
        config.loss.divergence = "total_variation"
        config.loss.confidence = 1.0
    if method == "jetspec":
        config.loss.ce, config.loss.teacher, config.loss.decay = 0.0, 1.0, 1.0
    return config
