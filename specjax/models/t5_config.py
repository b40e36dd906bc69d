"""The shape of a T5 model, its config.json, and the names of its tensors.

Sources: T5 (1910.10683), the configuration of transformers 4 and 5 (they differ in
``tie_word_embeddings``: see ``read``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from specjax.errors import UserError
from specjax.models.config_values import check_read, check_supported, token_id, value_of
from specjax.models.families import ACTIVATIONS, Family
from specjax.models.transformer_config import TransformerConfig

ARCHITECTURE = "T5ForConditionalGeneration"
# Relative positions have no longest text.
UNBOUNDED = 2**30
# Field -> key of config.json, its type, and what a missing key means (None: it must be there).
_KEYS: dict[str, tuple[str, type, Any]] = {
    "vocab_size": ("vocab_size", int, None),
    "hidden_size": ("d_model", int, None),
    "intermediate_size": ("d_ff", int, None),
    "num_heads": ("num_heads", int, None),
    "head_dim": ("d_kv", int, None),
    "buckets": ("relative_attention_num_buckets", int, 32),
    "max_distance": ("relative_attention_max_distance", int, 128),
    "encoder_layers": ("num_layers", int, None),
    "norm_eps": ("layer_norm_epsilon", float, 1e-6),
}
_TOKENS = {
    "start_token_id": "decoder_start_token_id",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
}
_SWITCHES: dict[str, Any] = {"family": "t5", "positions": "relative", "max_positions": UNBOUNDED}
_SWITCHES |= {"gated": False, "activation": "relu", "norm_eps": 1e-6, "eos_token_id": (1,)}
# Keys that change the computation, which no T5 model of this kind has.
_REFUSED = ("is_decoder", "tie_encoder_decoder", "encoder_no_repeat_ngram_size", "num_experts")


@dataclasses.dataclass(frozen=True)
class T5Config(TransformerConfig):
    """A T5 model: the fields of ``TransformerConfig`` describe its decoder, and what both share.

    ``num_layers`` are those of the decoder. There are no rotary positions and no biases of linear
    maps, and scores are not divided.
    """

    encoder_layers: int = 0
    buckets: int = 32  # of relative positions
    max_distance: int = 128  # from here on all positions are in the last bucket
    scale_logits: bool = True  # hidden states are divided by the root of the hidden size: T5 1.0
    start_token_id: int | None = None  # the decoder begins with it
    pad_token_id: int | None = 0


def t5(**fields: Any) -> T5Config:
    """A T5 model of these sizes (the fields of ``T5Config``), with the switches of the family.

    ``num_kv_heads`` and ``encoder_layers`` are the heads and layers of the decoder by default.
    Raises UserError for buckets that hold no position, or that begin beyond ``max_distance``.
    """
    sizes = {"num_kv_heads": fields["num_heads"], "encoder_layers": fields["num_layers"]}
    config = T5Config(**_SWITCHES | sizes | fields)
    if config.buckets < 4 or config.buckets % 2:
        raise UserError(
            f"relative_attention_num_buckets is {config.buckets}; it must be an even number of at "
            "least 4: half of the encoder's are for later tokens"
        )
    # The decoder's buckets of single distances end at the half.
    if config.max_distance <= config.buckets // 2:
        raise UserError(
            f"relative_attention_max_distance is {config.max_distance}; with {config.buckets} "
            f"buckets it must be above {config.buckets // 2}"
        )
    return config


def is_t5(raw: dict) -> bool:
    """Whether a config.json is that of an encoder-decoder T5 model."""
    names = raw.get("architectures")
    if isinstance(names, list) and names:
        return ARCHITECTURE in names
    return raw.get("model_type") == "t5"


def read(raw: dict, eos: tuple[int, ...]) -> T5Config:
    """The model of a config.json; ``eos`` are its end-of-sequence ids.

    Raises UserError for missing or wrong values, and for settings that are not supported.
    """
    for key in _REFUSED:
        if raw.get(key) not in (None, False, 0):
            raise UserError(f"{key} {raw[key]!r} is not supported for {ARCHITECTURE}")
    if raw.get("is_encoder_decoder") is False:
        raise UserError("is_encoder_decoder is false; a T5 model needs both of its parts")
    values: dict[str, Any] = {field: value_of(raw, *row) for field, row in _KEYS.items()}
    values["num_layers"] = value_of(raw, "num_decoder_layers", int, values["encoder_layers"])
    values["gated"], values["activation"] = _feed_forward(raw)
    # transformers 4 writes one key for a tied head and scaled logits. transformers 5 writes true
    # for every model, and the scale in a key of its own; then the weights decide whether there is a
    # head (``with_head``).
    values["tie_embeddings"] = tied = value_of(raw, "tie_word_embeddings", bool, True)
    values["scale_logits"] = value_of(raw, "scale_decoder_outputs", bool, tied)
    values |= {field: token_id(raw, key, 0) for field, key in _TOKENS.items()}
    return t5(eos_token_id=eos, **values)


def _feed_forward(raw: dict) -> tuple[bool, str]:
    """Whether the feed-forward part is gated, and its activation."""
    name = raw.get("feed_forward_proj") or "relu"
    parts = name.split("-") if isinstance(name, str) else []
    if not parts or len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise UserError(
            f"feed_forward_proj is {name!r}; it must be the name of an activation, or gated-NAME"
        )
    gated = len(parts) == 2
    # As in transformers: the gate of T5 1.1 is the approximation by tanh.
    act = "gelu_new" if name == "gated-gelu" else parts[-1]
    for key, value in (("is_gated_act", gated), ("dense_act_fn", act)):
        if raw.get(key) is not None and raw[key] != value:
            raise UserError(
                f"{key} is {raw[key]!r} and feed_forward_proj {name!r}; they do not agree"
            )
    check_supported("feed_forward_proj", act, ACTIVATIONS)
    return gated, ACTIVATIONS[act]


def with_head(config: T5Config, present: bool) -> T5Config:
    """The model, if its weights have a tensor for the head or not."""
    # The weights of T5 1.0 may have the embedding twice.
    tied = config.scale_logits or not present
    return dataclasses.replace(config, tie_embeddings=tied) if config.tie_embeddings else config


def write(config: T5Config) -> dict:
    """The config.json of a model.

    Raises UserError for a model that no config.json describes: scaled logits with an own head, and
    other switches than those of ``t5``.
    """
    if config.scale_logits and not config.tie_embeddings:
        raise UserError(f"a {ARCHITECTURE} cannot have scaled logits and a head of its own")
    raw: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "t5"}
    raw |= {key: getattr(config, field) for field, (key, *_) in _KEYS.items()}
    eos = config.eos_token_id
    raw |= {
        "is_encoder_decoder": True,
        "num_decoder_layers": config.num_layers,
        "feed_forward_proj": _feed_forward_name(config),
        "tie_word_embeddings": config.tie_embeddings,
        **{key: getattr(config, field) for field, key in _TOKENS.items()},
        "eos_token_id": list(eos) if len(eos) > 1 else next(iter(eos), None),
    }
    if config.scale_logits != config.tie_embeddings:
        raw["scale_decoder_outputs"] = config.scale_logits
    check_read(config, read(raw, eos), ARCHITECTURE)
    return raw


def _feed_forward_name(config: T5Config) -> str:
    """``feed_forward_proj``."""
    if config.gated and config.activation == "gelu_tanh":
        return "gated-gelu"
    name = next(name for name, own in ACTIVATIONS.items() if own == config.activation)
    return f"gated-{name}" if config.gated else name


# The tensors of T5 checkpoints: their names.

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
    names = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
    tail = "layer_norm" if module.endswith("_norm") else f"{kind}.{names.get(part[0], part[0])}"
    return f"{_STACKS[stack]}.{layer}.layer.{number}.{tail}.weight"
