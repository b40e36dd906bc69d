"""The shape of a decoder: what config.json holds about it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (the only kind supported)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder.

    ``family`` is "llama" (RMSNorm, rotary positions, SwiGLU) or "gpt2" (LayerNorm, learned
    positions, GELU).
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
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # a norm of each head's queries and keys before the rotation (Qwen3)
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
