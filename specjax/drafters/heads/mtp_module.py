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

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax import declare
from specjax.bound import Bound
from specjax.cache import KVBlock
from specjax.declare import key
from specjax.drafters import files
from specjax.drafters.heads import _eagle_shape, _network_drafter, _rollout
from specjax.drafters.heads._mtp_files import ModuleFiles
from specjax.drafters.heads._network import (
    Fed,
    Layer,
    Layers,
    Network,
    layer_facts,
)
from specjax.drafters.shared_keys import NetworkKeys
from specjax.models.layers import Linear, Norm, linear_options
from specjax.models.modules import Module, dtype_of
from specjax.models.transformer_config import TransformerConfig
from specjax.topology import shapes
from specjax.types import LM, Drafter, ModelParams, Params

REFERENCE = "deepseekai2024v3"

NAME = "mtp_module"
# Tokens of a chain without keys, if there are fewer modules.
GAMMA = 3
NORMED, RAW = "normed", "raw"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Keys(NetworkKeys):
    """The keys of ``mtp_module``."""

    modules: int = key(0, "how many", least=0, new=1, size=lambda params: len(params["modules"]))
    hidden_first: bool = key(
        False, "the linear map reads [hidden ; token], not [token ; hidden]", fact="hidden_first"
    )
    hidden: str = key(
        "",
        'which hidden state of the target is read: "normed", after its last norm, or "raw", '
        'before it; "": as in the files, or "normed"',
        choices=("", "normed", "raw"),
        fact="hidden",
    )
    recycled: str = key(
        "",
        "which output of a module the next one reads, in the same words",
        choices=("", "normed", "raw"),
        fact="recycled",
    )
    zero_first: bool = key(False, "the token of slot 0 is read as zeros (vLLM)", fact="zero_first")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with multi-token prediction modules.

    The switches are for new modules, and for files that do not state them: no tensor shows them,
    and a wrong one makes drafts worse and never changes the text.

    Raises:
        UserError: files without modules or of another target, a decoder layer that cannot be
            computed, sizes that differ from the files, a tree that does not fit.
    """
    given, keys = files.read(NAME, target, keys)
    module = None if given.params is None else given.params["modules"]["0"]
    config = _eagle_shape.config_of(NAME, given, keys, module)
    hidden, recycled = keys.hidden or NORMED, keys.recycled or NORMED
    taps = (_eagle_shape.layers_of(NAME, target) - 1,) if hidden == RAW else ()
    switches = keys.hidden_first, hidden, recycled, keys.zero_first
    shape = MtpShape(config, taps, keys.modules, *switches)
    leaves = MODULE.leaves(shape)
    _eagle_shape.check(NAME, given, {"modules": {str(i): leaves for i in range(shape.modules)}})
    layers = () if target.layers is None else (("num_hidden_layers", target.layers),)
    facts = (*layer_facts(config), *files.facts(Keys, shape), *layers)
    network = MtpNetwork(NAME, shape, given.ends, dtype_of(given.params), facts=facts)
    defaults = _rollout.MTP | {"steps": shape.modules}
    training = Bound(_rollout.training, network, target, defaults=defaults)
    chain = shapes.chain(max(shape.modules, GAMMA))
    return _network_drafter.build(target, network, keys, given, training, chain)


# In a module x = fc([norm(token) ; norm(hidden)]) is the input of a decoder layer; its normed
# output goes to the LM head. Checkpoints and programs differ in the order of the two, in the hidden
# state that is read, and in the one that is handed on.
#
# Parameters: {modules: {"0", "1", ...: {token_norm, feature_norm, norm: {scale}, fc: {kernel},
# layers: {"0": a decoder layer}}}}, and, where files have copies of the target's, {embed:
# {embedding}, head: {kernel}}.


@dataclasses.dataclass(frozen=True)
class MtpShape:
    """The static facts of the modules."""

    config: TransformerConfig  # of the decoder layer of each; ``hidden_size`` is the target's width
    taps: tuple[int, ...] = ()  # the last layer of the target, for its raw hidden state
    modules: int = 1
    hidden_first: bool = False  # fc reads [norm(hidden) ; norm(token)]
    hidden: str = NORMED  # the target's hidden state, after its last norm or before it
    recycled: str = NORMED  # a module's output for the next one, after its last norm or before it
    zero_first: bool = False  # the token at position 0 is read as zeros
    # As in ``_network.Shape``.
    vocab: ClassVar[int | None] = None
    shift: ClassVar[int] = 1
    parallel: ClassVar[int] = 0


class MtpModule(Layers):
    """One module."""

    def __init__(self, shape: MtpShape, dtype, rngs: nnx.Rngs):
        config = shape.config
        super().__init__(Layer(config, dtype, rngs, first=False), config, dtype, rngs)
        self.shape, size = shape, config.hidden_size
        self.token_norm, self.feature_norm = Norm(config, dtype), Norm(config, dtype)
        self.fc = Linear(2 * size, size, **linear_options(False, dtype, rngs))
        self.norm = Norm(config, dtype)

    def read(self, taps: jax.Array) -> jax.Array:
        """Taps [B,T,1,D] -> [B,T,D]."""
        return taps[..., 0, :]

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        read = [self.token_norm(embedded), self.feature_norm(features)]
        x = self.fc(jnp.concatenate(read[::-1] if self.shape.hidden_first else read, -1))
        x, own = self.run(x, angle, past, cache, block)
        hidden = self.norm(x)
        return Fed(hidden, hidden if self.shape.recycled == NORMED else x), own


MODULE = Module(MtpModule)


class MtpNetwork(Network):
    """Modules in sequence."""

    def module(self, params: ModelParams, number: int = 0) -> MtpModule:
        return MODULE.merge(self.shape, params.draft["modules"][str(number)], self.dtype)

    def start(self, target_params: Params, key: jax.Array) -> Params:
        keys = jax.random.split(key, self.modules)
        return {"modules": {str(i): MODULE.new(self.shape, each) for i, each in enumerate(keys)}}


CODEC = ModuleFiles(NAME)
