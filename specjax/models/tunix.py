"""Models of the library tunix that are in memory: their parameters stay where they are.

``from_model`` gives a decoder of this package that computes what the model computes, with the
parameters of the model itself (``adapter.mapped``). Dense Llama 3, Qwen 2 and Qwen 3 of tunix
0.1.7. Other models decode with ``adapter.from_call``; not those of Gemma that have sliding windows,
which count the slots of the cache and not positions. Nothing of tunix is imported.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import jax
from flax import nnx

from specjax.bound import Bound
from specjax.errors import UserError
from specjax.models import adapter, families, lm
from specjax.types import LM, Params

# Class -> the family, and the name of the key that ties the LM head to the embedding.
_KINDS = {
    "Llama3": ("llama", "weight_tying"),
    "Qwen2": ("qwen2", "use_tied_embedding"),
    "Qwen3": ("qwen3", "use_tied_embedding"),
}
# Sizes that have our names.
_SIZES = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "norm_eps")


def from_model(model: nnx.Module, max_positions: int = 1 << 17) -> tuple[LM, Params]:
    """A tunix model as an ``LM``, and its parameters, which are those of the model, not copies.

    Args:
        model: a ``Llama3``, ``Qwen2`` or ``Qwen3`` of tunix without experts.
        max_positions: the longest text; tunix does not state it.

    ``params_of(model)`` gives the parameters again after they have changed. Models of equal shapes
    give equal functions, so nothing is compiled again. Raises UserError for another model.
    """
    name = type(model).__name__
    if name not in _KINDS:
        how = "decode with its own forward pass: models.adapter.from_call"
        if getattr(getattr(model, "config", None), "sliding_window_size", None):
            how = "its sliding windows count slots of the cache and not positions, so from_call "
            how += "gives other texts; save it, and load its files"
        raise UserError(f"{name} is not one of tunix's {', '.join(_KINDS)}; {how}")
    family, tied = _KINDS[name]
    theirs: Any = getattr(model, "config")  # noqa: B009  (its type is not known here)
    if getattr(theirs, "num_experts", None):
        raise UserError(f"the {name} has experts, which are not mapped; decode with from_call")
    params = params_of(model)
    config = families.shape(
        family,
        **{size: getattr(theirs, size) for size in _SIZES},
        hidden_size=theirs.embed_dim,
        intermediate_size=theirs.hidden_dim,
        max_positions=max_positions,
        rope_theta=float(_theta(model, theirs)),
        tie_embeddings=bool(getattr(theirs, tied)),
    )
    decoder = lm.from_config(config, params["embedder"]["input_embedding"].dtype)
    return adapter.mapped(decoder, Bound(_renamed, config.num_layers)), params


def params_of(model: nnx.Module) -> Params:
    """The parameters of a tunix model as a dict; no array is copied."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _theta(model: nnx.Module, config: Any) -> float:
    """The rotary base of the computation.

    In tunix 0.1.7 the attention of Llama 3 and Qwen 3 calls ``apply_rope`` without
    ``config.rope_theta``, so that its default counts.
    """
    module = sys.modules[type(model).__module__]
    # Qwen 2 has another function, which is given the base of the configuration.
    rotate = getattr(module, "apply_rope", None)
    if rotate is None or "rope_theta" in inspect.getsource(module.Attention):
        return config.rope_theta
    return inspect.signature(rotate).parameters["rope_theta"].default


def _renamed(layers: int, tree: Params) -> Params:
    """The parameters of tunix with the names and shapes of ``models.lm``."""
    params = {
        "embed": {"embedding": tree["embedder"]["input_embedding"]},
        "norm": {"scale": tree["final_norm"]["w"]},
        "layers": {i: _layer(tree["layers"][i]) for i in range(layers)},
    }
    return params | ({"head": {"kernel": tree["lm_head"]["w"]}} if "lm_head" in tree else {})


def _layer(tree: Params) -> Params:
    theirs, attention = tree["attn"], {}
    for part in "qkvo":
        kernel: jax.Array = theirs[f"{part}_proj"]["w"]  # [E,N,D], of o [N,D,E]
        shape = (-1, kernel.shape[-1]) if part == "o" else (kernel.shape[0], -1)
        attention[part] = {"kernel": kernel.reshape(shape)}
        if f"{part}_bias" in theirs:
            attention[part]["bias"] = theirs[f"{part}_bias"]
    norms = theirs.keys() & {"q_norm", "k_norm"}
    attention |= {norm: {"scale": theirs[norm]["w"]} for norm in norms}
    names = {part: f"{part}_proj" for part in ("gate", "up", "down")}
    mlp = {part: {"kernel": tree["mlp"][name]["kernel"]} for part, name in names.items()}
    return {
        "attention": attention,
        "attention_norm": {"scale": tree["input_layernorm"]["w"]},
        "mlp": mlp,
        "mlp_norm": {"scale": tree["post_attention_layernorm"]["w"]},
    }
