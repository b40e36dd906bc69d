"""A module for multi-token prediction: norms, one linear map, a decoder layer, a norm.

DeepSeek-AI 2024 (2412.19437, section 2.2): x = fc([norm(token) ; norm(hidden)]) is the input of a
decoder layer; its normed output goes to the target's own LM head. Checkpoints and programs differ
in the order of the two, in the hidden state that is read, and in the one that is handed on.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock
from specjax.drafters.heads._eagle_layers import Fed, _Layer, _Net
from specjax.models.linear import Linear, linear_options
from specjax.models.norm import Norm
from specjax.models.transformer_config import TransformerConfig
from specjax.types import Params

NORMED, RAW = "normed", "raw"


@dataclasses.dataclass(frozen=True)
class MtpShape:
    """The static facts of the modules."""

    config: TransformerConfig  # of the decoder layer of each; ``hidden_size`` is the target's width
    modules: int = 1
    hidden_first: bool = False  # fc reads [norm(hidden) ; norm(token)]
    hidden: str = NORMED  # the target's hidden state, after its last norm or before it
    recycled: str = NORMED  # a module's output for the next one, after its last norm or before it
    zero_first: bool = False  # the token at position 0 is read as zeros


class MtpModule(_Net):
    """One module."""

    def __init__(self, shape: MtpShape, dtype, rngs: nnx.Rngs):
        config = shape.config
        super().__init__(_Layer(config, dtype, rngs, first=False), config, dtype, rngs)
        self.shape, size = shape, config.hidden_size
        self.token_norm, self.feature_norm = Norm(config, dtype), Norm(config, dtype)
        self.fc = Linear(2 * size, size, **linear_options(False, dtype, rngs))
        self.norm = Norm(config, dtype)

    def __call__(self, embedded, features, angle, past, cache, block) -> tuple[Fed, KVBlock]:
        """[B,T,D] each -> (``Fed``, keys and values)."""
        read = [self.token_norm(embedded), self.feature_norm(features)]
        x = self.fc(jnp.concatenate(read[::-1] if self.shape.hidden_first else read, -1))
        x, own = self.run(x, angle, past, cache, block)
        hidden = self.norm(x)
        return Fed(hidden, hidden if self.shape.recycled == NORMED else x), own


@functools.cache
def abstract(shape: MtpShape, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of one module, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: MtpModule(shape, dtype, nnx.Rngs(0))))


def merge(shape: MtpShape, params: Params, dtype: Any = jnp.float32) -> MtpModule:
    """The module with these parameters (inside a traced function, free at run time)."""
    graph, state = abstract(shape, jnp.dtype(dtype))
    # A copy: tracers must not be written into the cached state.
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def new(shape: MtpShape, key: jax.Array) -> Params:
    """Random parameters of all modules (normal, standard deviation 0.02) as a plain dict."""
    keys = jax.random.split(key, shape.modules)
    modules = [MtpModule(shape, jnp.float32, nnx.Rngs(each)) for each in keys]
    return {"modules": {str(i): nnx.to_pure_dict(nnx.state(m)) for i, m in enumerate(modules)}}
