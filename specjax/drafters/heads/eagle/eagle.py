"""EAGLE: a small decoder continues the target's features, and reads the token one step ahead.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4): slot t reads fc([embedding of token t + 1 ; feature
of token t]) and predicts the next feature; the target's own LM head turns it into probabilities of
token t + 2. Without keys the draft is EAGLE-2's dynamic tree (Li et al. 2024, 2406.16858, section
4); ``gamma`` and ``tree`` give EAGLE-1's chains and fixed trees. HASS (Zhang et al. 2024,
2408.15766) trains the same network in another way, so its files are read here too.

A dynamic tree, and siblings "top_k", are deterministic: L1 with "deterministic", "match" and other
rules for such drafts. Drafts sampled from the network's probabilities are L1 with "recursive" and
its variants.
"""

from __future__ import annotations

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.heads import _shape
from specjax.drafters.heads.eagle import _drafter, _loss, _network
from specjax.drafters.heads.eagle._files import Eagle
from specjax.drafters.heads.eagle._network import Shape
from specjax.drafters.shared_keys import EagleKeys
from specjax.types import LM, Drafter

REFERENCE = ("li2024eagle", "li2024eagle2", "zhang2024learning")

# Name of a target -> a head for it on the Hub.
RELEASED = {
    "vicuna-7b-v1.3": "yuhuili/EAGLE-Vicuna-7B-v1.3",
    "vicuna-13b-v1.3": "yuhuili/EAGLE-Vicuna-13B-v1.3",
    "vicuna-33b-v1.3": "yuhuili/EAGLE-Vicuna-33B-v1.3",
    "Llama-2-7b-chat-hf": "yuhuili/EAGLE-llama2-chat-7B",
    "Llama-2-13b-chat-hf": "yuhuili/EAGLE-llama2-chat-13B",
    "Meta-Llama-3-8B-Instruct": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
}

NAME = "eagle"


class Keys(EagleKeys):
    """The keys of ``eagle``."""

    fc_bias: bool = key(
        True,
        "whether the first map of a new network has a bias, as the authors' have; vLLM reads "
        "networks without it",
        size=lambda params: "bias" in params["fc"],
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with an EAGLE network.

    Raises:
        UserError: files without a network or of another target, sizes that differ from the files, a
            tree that does not fit.
    """
    given, keys = files.read(NAME, target, keys)
    config = _shape.config_of(NAME, target, given, keys)
    shape = Shape(config, given.ends.width, fc_bias=keys.fc_bias, shift=keys.shift)
    network = _network.build(NAME, shape, given, keys, target.vocab_size, None)
    training = Bound(_loss.training, network, target, defaults=_loss.EAGLE)
    return _drafter.build(target, network, keys, given, training)


CODEC = Eagle(NAME)
