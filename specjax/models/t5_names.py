"""The tensors of T5 checkpoints: their names."""

from __future__ import annotations

from specjax.models.families import Family
from specjax.models.t5_config import ARCHITECTURE

FAMILY = Family(
    ARCHITECTURE,
    {},
    {"layers": "decoder.block", "head": "lm_head"},
    # Copies of the embedding, and a table of the first files that is not used.
    ignored=(
        "encoder.embed_tokens.",
        "decoder.embed_tokens.",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",
    ),
)
_STACKS = {"source_layers": "encoder.block", "layers": "decoder.block"}
_BIAS = "layer.0.SelfAttention.relative_attention_bias"
_SINGLE = {
    "embed": "shared",
    "source_bias": f"encoder.block.0.{_BIAS}",
    "source_norm": "encoder.final_layer_norm",
    "bias": f"decoder.block.0.{_BIAS}",
    "norm": "decoder.final_layer_norm",
    "head": "lm_head",
}


def name_of(path: tuple, gated: bool) -> str:
    """The name of the tensor that has the parameter at this path of ``t5.T5``."""
    stack, *inner = path[:-1]
    if stack not in _STACKS:
        return f"{_SINGLE[stack]}.weight"
    layer, module, *part = inner
    last = 1 if stack == "source_layers" else 2
    number, kind = {
        "attention": (0, "SelfAttention"),
        "cross": (1, "EncDecAttention"),
        "mlp": (last, "DenseReluDense"),
    }[module.removesuffix("_norm")]
    tail = "layer_norm" if module.endswith("_norm") else f"{kind}.{_part(part[0], gated)}"
    return f"{_STACKS[stack]}.{layer}.layer.{number}.{tail}.weight"


def _part(part: str, gated: bool) -> str:
    names = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
    return names.get(part, part)
