"""The shape of a decoder and the switches of its computation."""

from __future__ import annotations

import dataclasses

from specjax.errors import UserError
from specjax.models.rope import Rope as Rope
from specjax.models.rope import RopeScaling as RopeScaling


@dataclasses.dataclass(frozen=True)
class Experts:
    """A router and experts in the place of a feed-forward part (``transformer.ExpertMlp``)."""

    experts: int
    chosen: int  # how many of them compute a token
    intermediate_size: int  # of one expert
    renormalise: bool = False
    layers: tuple[int, ...] = ()  # which layers have experts; the others have the plain part
    # Inner units of one more expert, which computes every token, times a gate; None: there is none.
    shared_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """Layers with a state in the place of attention.

    ``kind`` "delta": ``recurrent.GatedDelta``; "mamba2": ``recurrent.Mamba2``, whose groups are the
    key heads, and whose state size is the width of a key.
    """

    key_heads: int
    value_heads: int  # a multiple of ``key_heads``; each has a state [key_dim, value_dim]
    key_dim: int
    value_dim: int
    kernel: int  # inputs of the convolution: a token and those before it
    layers: tuple[int, ...] = ()  # which layers are recurrent; the others have attention
    kind: str = "delta"
    least_step: float = 0.0  # mamba2: the least step size, after the softplus

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder and its switches; the defaults of the switches are Llama's.

    ``family`` is the row of ``families.FAMILIES`` by which checkpoints are read and written. The
    computation depends on the other fields alone; ``families.shape`` sets those of a family.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = True
    attention_bias: bool = False  # of q, k and v
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm of each head's queries and keys before the rotation (Qwen3)
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    # The rest are switches.
    output_bias: bool | None = None  # of the attention's output; None: as ``attention_bias``
    head_bias: bool = False
    # "rms", "rms_once" (rounded after the scale), "rms1p" (factor 1 + the parameter), or "layer"
    norm: str = "rms"
    pre_norm: bool = True  # a norm before attention and before the feed-forward part
    post_norm: bool = False  # a norm of the result of each, before it is added
    parallel: bool = False  # both read the input of the layer, and both results are added to it
    qk_norm_whole: bool = False  # with ``qk_norm``: one norm of all heads together (OLMo 2)
    activation: str = "silu"  # a key of ``transformer.ACTIVATIONS``
    gated: bool = True  # activation(gate(x)) * up(x), else activation(up(x))
    # "rotary", "none", "learned" (a table that is added to the embeddings), or "relative" (T5)
    positions: str = "rotary"
    rotary_dim: int | None = None  # dimensions of a head that are rotated; None: all
    unrotated: tuple[int, ...] = ()  # layers without rotary positions
    # Per layer: a token attends to the tokens less than this number of positions before it; None:
    # to all before it. (): no layer has a window.
    windows: tuple[int | None, ...] = ()
    local_rope: Rope | None = None  # of layers with a window; None: as the others
    query_scalar: float | None = None  # scores are divided by its root; None: ``head_dim``
    attention_softcap: float | None = None  # scores become c tanh(score / c)
    final_softcap: float | None = None  # and logits
    embedding_scale: float | None = None  # factor of the embeddings, rounded to their dtype
    experts: Experts | None = None
    attention_gate: bool = False  # the attention's output is multiplied by sigmoid(gate(x))
    recurrent: Recurrent | None = None
    without_mlp: tuple[int, ...] = ()  # layers that are attention or a recurrence alone

    @property
    def longest_text(self) -> int:
        """``max_positions``, or less: the end of longrope's short factors (see ``RopeScaling``)."""
        own = self.rope_scaling if self.positions == "rotary" else None
        if own is None or own.kind != "longrope" or own.long:
            return self.max_positions
        return min(self.max_positions, own.original_max_positions)

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        return self.windows[layer] if self.windows else None

    def rope(self, layer: int = 0) -> Rope | None:
        """The rotary positions of a layer; None if it has none."""
        if self.positions != "rotary" or layer in self.unrotated:
            return None
        if self.local_rope is not None and self.window(layer) is not None:
            return self.local_rope
        return self.rope_of_full()

    def rope_of_full(self) -> Rope:
        """The rotary positions of layers without a window, if there are any."""
        return Rope(self.rope_theta, self.rotary_dim or self.head_dim, scaling=self.rope_scaling)

    def check_taps(self, taps: tuple[int, ...]) -> None:
        """Raises UserError for taps that are no layers."""
        if any(not 0 <= tap < self.num_layers for tap in taps):
            raise UserError(f"taps are {taps}; layers are numbered 0..{self.num_layers - 1}")

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a state in the place of keys and values."""
        return self.recurrent is not None and layer in self.recurrent.layers

    def has_experts(self, layer: int) -> bool:
        """Whether a router chooses experts for the tokens of a layer."""
        return self.experts is not None and layer in self.experts.layers
