"""Multi-token prediction modules: a decoder layer for each further token, with the target's ends.

DeepSeek-V3 (DeepSeek-AI 2024, 2412.19437, section 2.2). Slot t of the first module reads fc([norm
of the embedding of token t + 1 ; norm of the target's hidden state of token t]) and predicts token
t + 2; the next module reads its output and token t + 2, and so on. The embedding and the LM head
are the target's. Drafts may be deeper than there are modules: the last one then reads its own
output, as serving programs do with the one released module.

Without keys the draft is a chain of one token per module, and of 3 with fewer modules. Siblings
"top_k" are deterministic: L1 with "deterministic", "match" and other rules for such drafts. Drafts
sampled from the modules' probabilities ("without_replacement", "iid") are L1 with "chain",
"recursive" and their variants.
"""

from __future__ import annotations

from typing import Any

from specjax.bound import Bound
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import (
    _features,
    _given,
    _mtp_network,
    _mtp_shape,
    _rollout,
    _rollout_loss,
)
from specjax.topology import shapes
from specjax.types import LM, Drafter

REFERENCE = "deepseekai2024v3"

SHARED = NetworkKeys
NAME = "mtp_module"
# Tokens of a chain without keys, if there are fewer modules.
GAMMA = 3


def make(
    target: LM,
    *,
    modules: int = 0,
    hidden_first: bool = False,
    hidden: str = "",
    recycled: str = "",
    zero_first: bool = False,
    **shared: Any,
) -> Drafter:
    """Drafts with multi-token prediction modules.

    The switches are for new modules, and for files that do not state them: no tensor shows them,
    and a wrong one makes drafts worse and never changes the text.

    Args:
        target: the model whose hidden states they read.
        modules: how many; 0: as in the files, or 1.
        hidden_first: the linear map reads [hidden ; token], not [token ; hidden].
        hidden: which hidden state of the target is read: "normed", after its last norm, or "raw",
            before it; "": as in the files, or "normed".
        recycled: which output of a module the next one reads, in the same words.
        zero_first: the token of slot 0 is read as zeros (vLLM).
        shared: the keys of ``NetworkKeys``; ``model`` may be the directory of a whole model with
            such modules.

    Raises:
        UserError: files without modules or of another target, a decoder layer that cannot be
            computed, sizes that differ from the files, a tree that does not fit.
    """
    given = _given.read(NAME, target, keys := NetworkKeys(**shared))
    switches = _mtp_shape.Switches(hidden_first, hidden, recycled, zero_first)
    shape = _mtp_shape.read(NAME, target, given, keys, modules, switches)
    network = _mtp_network.build(
        NAME,
        shape,
        given.ends,
        target.layers or 0,
        own=() if given.params is None else given.params.keys() & set(_mtp_shape.ENDS),
        dtype=_mtp_shape.dtype_of(given.params),
        facts=_mtp_shape.facts(target, shape),
    )
    defaults = _rollout_loss.MTP | {"steps": shape.modules}
    training = Bound(_rollout.training, network, target, defaults=defaults)
    chain = shapes.chain(max(shape.modules, GAMMA))
    return _features.build(target, network, keys, given, training, chain)
