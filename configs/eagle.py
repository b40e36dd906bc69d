"""EAGLE (Li et al. 2024): a decoder layer continues the target's features; also HASS.

    python -m specjax.run --config=configs/eagle.py --workdir=runs/eagle \\
        --config.target=runs/target --config.data.dir=runs/target/data
    python -m specjax.run --config=configs/eagle.py:hass ...   # HASS (Zhang et al. 2024)

EAGLE-1 and EAGLE-2 share this training; they differ in the tree. Without keys a draft is EAGLE-2's
dynamic tree; --config.drafter.gamma=4 is a chain, --config.drafter.tree a fixed shape. Only chains
and fixed shapes have a forecast of their tokens per round.

Measured on stories260K (experiments/trained_drafters: 1200 steps of 8 x 128 tokens, rate 3e-3, text
written by the target; two Intel Xeon cores, 2026-11-22), chain of 4 on 64 held-out prompts, tau
greedy and at temperature 1: EAGLE 2.59 and 1.57, HASS 2.81 and 1.62; ablations: without the shift
of the token 1.84 and 1.23, without noise 2.59 and 1.56. Medusa: 1.92 and 1.20, Hydra 2.61 and 1.46.
"""

from ml_collections import ConfigDict, config_dict

from configs import heads
from specjax.errors import UserError


def get_config(method: str = "eagle") -> ConfigDict:
    """The configuration; "hass" unrolls three steps of the draft in training."""
    if method not in ("eagle", "hass"):
        raise UserError(f"configs/eagle.py:{method} is unknown; it must be eagle or hass")
    config = network("eagle")
    config.loss.feature = 1.0  # smooth L1 distance from the target's next feature
    config.loss.weight = 0.1  # of the divergence from the target's probs
    config.loss.noise = 0.1  # uniform noise on the features that the first step reads
    if method == "hass":
        config.loss.steps = 3
        config.loss.detach = True  # no gradient passes from a step to the feature before it
        config.loss.top_k = 10  # best tokens of the target, with a cross-entropy of their own
        config.loss.top_k_weight = 1.0
    return config


def network(name: str) -> ConfigDict:
    """What the configurations of ``eagle`` and ``eagle3`` share."""
    config = heads.get_config(name)
    drafter = config.drafter = ConfigDict({"name": name})
    # The shape of a draft: a chain of gamma tokens, or a tree; None: EAGLE-2's dynamic tree.
    drafter.gamma = config_dict.placeholder(int)
    drafter.tree = config_dict.placeholder(str)
    # The shape of the network; None: one layer, with sizes that follow from the target's width.
    drafter.layers = config_dict.placeholder(int)
    drafter.heads = config_dict.placeholder(int)  # attention heads
    drafter.kv_heads = config_dict.placeholder(int)
    drafter.head_dim = config_dict.placeholder(int)
    drafter.inner = config_dict.placeholder(int)  # width of the feed-forward
    # Ablation: 0 reads the token of the feature instead of the next one; None: 1.
    drafter.shift = config_dict.placeholder(int)
    config.loss = ConfigDict()
    config.loss.steps = 1  # of the draft that are unrolled
    config.loss.decay = 1.0  # factor on the loss from each step to the next
    # How the target's probs are learnt: forward_kl, total_variation, lk, lk_hybrid, ...
    config.loss.divergence = "forward_kl"
    return config
