"""The modules of block drafters, made of the parts of ``specjax.models.transformer``.

DFlash (2602.06036, section 3): c = norm(fc(taps of the target)) gives every layer the keys and
values of the committed text; the tokens of the block are embeddings, and run through ordinary
decoder layers that attend to the text and to the block. DFlare (2606.02091): every layer has its
own mixture of the taps, softmax-weighted, and its own projections of it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.cache import KVBlock, KVCache
from specjax.models import rope
from specjax.models.attention import Past, stored
from specjax.models.linear import Linear, linear_options
from specjax.models.norm import Norm
from specjax.models.transformer import Block
from specjax.models.transformer_config import TransformerConfig
from specjax.types import Params

CONTEXTS = ("shared", "mixed")
CORRECTIONS = ("none", "markov", "gated", "rnn", "gru")


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """The static facts of a block drafter; D is the width of the target too."""

    config: TransformerConfig  # of its layers; ``hidden_size`` is D
    taps: tuple[int, ...]  # layers of the target that it reads
    positions: int  # K, how many tokens it was trained to draft
    vocab: int
    context: str = "shared"  # one of CONTEXTS
    causal: bool = False  # whether a token of the block attends only to those before it
    anchor: bool = False  # whether the pending token's place predicts, and so each place the next
    correction: str = "none"  # one of CORRECTIONS
    rank: int = 0  # R, of the correction
    state: int = 0  # G, the width of the GRU
    plain: int = 0  # how many first tokens the GRU does not correct
    confidence: bool = False
    mask_id: int | None = None  # the token at the masked places; None: an embedding of its own
    head: int | None = None  # V_d, of an LM head of its own; None: the target's
    sure_of_token: bool = True  # whether the confidence reads the token before ("markov")

    @property
    def markov(self) -> bool:
        """Whether the correction is one of DSpark's."""
        return self.correction in ("markov", "gated", "rnn")

    @property
    def drafted(self) -> int:
        """V_d: how many tokens it has logits for."""
        return self.vocab if self.head is None else self.head

    def fed(self, tokens: int) -> int:
        """The places of a block that drafts so many tokens."""
        return tokens if self.anchor else tokens + 1


class _Layer(Block):
    """A decoder layer; ``mixed``: it has its own projections of the committed text."""

    def __init__(
        self, config: TransformerConfig, dtype, rngs: nnx.Rngs, layer: int, mixed: bool = False
    ):
        super().__init__(config, dtype, rngs, layer)
        if mixed:
            kw = linear_options(config.attention_bias, dtype, rngs)
            width = config.num_kv_heads * config.head_dim
            self.context_k = Linear(config.hidden_size, width, **kw)
            self.context_v = Linear(config.hidden_size, width, **kw)

    def read(self, context: jax.Array, angle: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """[B,T,D] -> keys and values [B,T,H,head_dim] of the committed text."""
        own = self.attention
        to_k, to_v = (
            (self.context_k, self.context_v) if hasattr(self, "context_k") else (own.k, own.v)
        )
        shape = (*context.shape[:2], own.kv_heads, own.width)
        k, v = to_k(context).reshape(shape), to_v(context).reshape(shape)
        if own.qk_norm == "head":
            k = own.k_norm(k)
        if angle is None or own.rope is None:
            return k, v
        return rope.rotate(k, angle, own.rope), v


class BlockNet(nnx.Module):
    """The network without the target's embeddings and head."""

    def __init__(self, shape: BlockShape, dtype, rngs: nnx.Rngs):
        config, count = shape.config, len(shape.taps)
        mixed = shape.context == "mixed"
        if mixed:
            self.mix = nnx.Param(jnp.zeros((config.num_layers, count), dtype))
        else:
            kw = linear_options(False, dtype, rngs)
            self.fc = Linear(count * config.hidden_size, config.hidden_size, **kw)
        self.hidden_norm = Norm(config, dtype)
        self.layers = nnx.Dict(
            {str(i): _Layer(config, dtype, rngs, i, mixed) for i in range(config.num_layers)}
        )
        self.norm = Norm(config, dtype)

    def read(self, taps: jax.Array, angle: jax.Array | None) -> tuple[tuple, tuple]:
        """Taps [B,T,n,D] -> the keys and the values of every layer, [B,T,H,head_dim] each."""
        if hasattr(self, "fc"):
            shared = self.hidden_norm(self.fc(taps.reshape(*taps.shape[:-2], -1)))
            contexts = [shared] * len(self.layers)
        else:
            weights = jax.nn.softmax(self.mix[...], -1)
            mixed = self.hidden_norm(jnp.einsum("ln,btnd->lbtd", weights, taps))
            contexts = list(mixed)
        pairs = [self.layers[str(i)].read(each, angle) for i, each in enumerate(contexts)]
        return tuple(zip(*pairs, strict=True))  # pyright: ignore[reportReturnType]

    def __call__(
        self,
        x: jax.Array,
        angle: jax.Array | None,
        past: Past,
        cache: KVCache,
        read: KVBlock | None,
    ) -> jax.Array:
        """[B,P,D] -> [B,P,D]; the text is in ``cache``, or in ``read`` as if it were fed before."""
        for index in range(len(self.layers)):
            x, _, _ = self.layers[str(index)](x, angle, past, stored(cache, read, index))
        return self.norm(x)


@functools.cache
def abstract(shape: BlockShape, dtype: Any) -> tuple[Any, Any]:
    """(graph, state) of the module, without arrays."""
    return nnx.split(nnx.eval_shape(lambda: BlockNet(shape, dtype, nnx.Rngs(0))))


def new(shape: BlockShape, key: jax.Array) -> Params:
    """Random parameters (normal, standard deviation 0.02) as a plain dict."""
    return nnx.to_pure_dict(nnx.state(BlockNet(shape, jnp.float32, nnx.Rngs(key))))
