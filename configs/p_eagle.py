"""P-EAGLE (2602.01469): EAGLE-3 that drafts all tokens in one pass.

    python -m specjax.run --config=configs/p_eagle.py --workdir=runs/p_eagle \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/bench.py --config.target=runs/target \\
        --config.prompts=stdlib --config.drafter.name=eagle3 --config.drafter.model=runs/p_eagle
    ... --config.drafter.tree=best_first --config.drafter.nodes=32 --config.accept=match

The network is that of configs/eagle3.py with ``drafter.parallel``: masks with a learned feature
follow the slots of the text. The published one has four layers and trained embeddings.
Without a shape the draft is a sampled chain of all tokens. Deeper masks are dropped, so a step
costs about three passes over the text, not ``drafter.parallel``. Minutes on two CPU cores for a
small target.
"""

from ml_collections import ConfigDict, config_dict

from configs import eagle3


def get_config() -> ConfigDict:
    """The configuration: what differs from configs/eagle3.py."""
    config = eagle3.get_config()
    drafter = config.drafter
    drafter.parallel = 8  # tokens of a draft
    drafter.layers = 4
    drafter.embeddings = True  # of its own; they begin as the target's
    # The token of masks, best an unused one; None: the last of the vocabulary.
    drafter.mask_id = config_dict.placeholder(int)
    config.loss = ConfigDict()
    config.loss.ce = 0.0  # cross-entropy with the text
    config.loss.teacher = 1.0  # weight of the divergence from the target's probs
    config.loss.divergence = "forward_kl"
    config.loss.decay = 1.0  # factor on the loss from each depth to the next
    # Smoothing of D-PACE's weights of depths, instead of decay, such as 0.5; None: without.
    config.loss.pace = config_dict.placeholder(float)
    # The share of places that have masks at depth d is keep^d, and at least floor.
    config.loss.keep = 0.8
    config.loss.floor = 0.2
    return config
