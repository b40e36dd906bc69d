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

from ml_collections import ConfigDict

from specjax.errors import UserError
from specjax.run.settings import trained, training


def get_config(method: str = "eagle") -> ConfigDict:
    """The configuration; "hass" unrolls three steps of the draft in training."""
    if method not in ("eagle", "hass"):
        raise UserError(f"configs/eagle.py:{method} is unknown; it must be eagle or hass")
    hass = {"steps": 3, "detach": True, "top_k": 10, "top_k_weight": 1.0}
    own = hass if method == "hass" else {}
    return network("eagle", feature=1.0, weight=0.1, noise=0.1, **own)


def network(name: str, **loss: float) -> ConfigDict:
    """A network that predicts features; ``loss`` has keys of its loss."""
    usual = {"steps": 1, "decay": 1.0, "divergence": "forward_kl", "places": 0}
    return training("heads", drafter=trained(name), loss=usual | loss, train={"steps": 600})
