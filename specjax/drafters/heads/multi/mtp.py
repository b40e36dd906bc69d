"""Multi-token prediction: further last layers, which all read the same hidden state of the target.

Gloeckle et al. 2024 (2404.19737, section 2). The target without its last layer is the trunk. Head 1
is the target's last layer; n - 1 further decoder layers of the same kind each read the trunk's
output z, and the target's own last norm and LM head give the probs of token t + 2, t + 3, ... So
all probs of a draft come from one hidden state and do not depend on the draft's tokens. Each head
attends to all z of the committed text, with a cache of its own.

The published models are pretrained with their heads (``configs/mtp_pretrain.py``); heads for a
target that was trained without them are trained beside it. Rules and lossless classes are those of
``medusa``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from specjax import declare
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters import files
from specjax.drafters.files import Given, decoder_layers
from specjax.drafters.files.codec import Codec, Config, Found, Leaves, Sizes, Tensors
from specjax.drafters.heads import _prefix, _shape
from specjax.drafters.heads._prefix import Prefix
from specjax.drafters.heads.multi import _heads
from specjax.drafters.objectives import Pretrained
from specjax.drafters.shared_keys import HeadKeys, stored_size
from specjax.errors import UserError
from specjax.models import rope
from specjax.models.attention import past, stored
from specjax.models.hf_config import read_json
from specjax.models.layers import Module, dtype_of
from specjax.models.transformer import Block
from specjax.models.transformer_config import TransformerConfig
from specjax.tree import Layout
from specjax.types import LM, Array, Drafter, ModelParams, Params

REFERENCE = "gloeckle2024better"

NAME = "mtp"
HEADS = 3


class Keys(HeadKeys):
    """The keys of ``mtp``."""

    heads: int = stored_size(
        "how many without the target's own last layer (the paper's n - 1)",
        lambda params: len(params["layers"]),
        new=HEADS,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with further last layers of the target.

    Raises:
        UserError: files without heads or of another target, a target of one layer or with experts
            in its last one, another number of heads than the files have, a draft deeper than there
            are heads.
    """
    config, layer = _last_layer(target)
    given, keys = files.read(NAME, target, keys)
    shape, logits = TrunkShape(config, layer, keys.heads), Bound(_logits, target)
    if given.params is not None:
        _check(target, shape, given)
    family = _heads.Heads(
        name=NAME,
        depth=shape.heads,
        begin=Bound(_begin, shape.heads),
        step=Bound(_step, logits),
        start=Bound(_start, shape, target),
        every=Bound(_every, logits),
        prefix=_prefix_of(shape, dtype_of(given.params)),
        taps=((target.layers or 0) - 2,),
        facts=_facts(target, shape),
    )
    return _heads.build(target, family, keys, given)


def new(target: LM, key: Array, keys: Mapping[str, Any]) -> Params:
    """Random parameters, to train heads together with a target that is trained from scratch."""
    return _new(TrunkShape(*_last_layer(target), keys.get("heads") or HEADS), key)


PRETRAINED = Pretrained({}, ("decay", "slots"), new)


# The layers are a ``Prefix`` whose output [B,T,K*E] has the outputs of the K layers side by side:
# the cache holds the committed text with the target's true hidden states. Parameters: {layers:
# {"0", "1", ...: a layer of ``models.transformer``}}.


class TrunkShape(NamedTuple):
    """The static facts of the layers."""

    config: TransformerConfig  # of a decoder with such a layer
    layer: int  # the number of this layer
    heads: int  # K


def _layer(shape: TrunkShape, dtype: Any, rngs: nnx.Rngs) -> Block:
    return Block(shape.config, dtype, rngs, shape.layer)


MODULE = Module(_layer)


def _last_layer(target: LM) -> tuple[TransformerConfig, int]:
    """The kind of the target's last layer: (shape of the decoder, number of the layer).

    Of a target that is no decoder of ``specjax.models``: a Llama layer of its width. Raises
    UserError for a target of one layer, or a layer that has experts.
    """
    layers, config = _shape.layers_of(NAME, target), target.inside.decoder
    if layers < 2:
        raise UserError(
            f"{NAME} reads the output of the target's last layer but one, and {target.name} has 1 "
            "layer; take a target of 2 layers or more"
        )
    if config is None:
        return _prefix.new(target.width or 0, target), 0
    other = config.is_recurrent(layers - 1) or config.attention_gate
    if other or config.has_experts(layers - 1):
        what = "is recurrent or has a gate after its attention" if other else "has experts"
        raise UserError(
            f"{NAME} has further layers of the kind of the target's last one, which {what}; such "
            "layers are not supported"
        )
    return config, layers - 1


def _check(target: LM, shape: TrunkShape, given: Given) -> None:
    """Raises UserError unless the given parameters and facts are those of such layers."""
    one = flatten_dict(MODULE.leaves(shape))
    wanted = {("layers", str(j), *path): x for j in range(shape.heads) for path, x in one.items()}
    _shape.check_leaves(NAME, wanted, flatten_dict(given.params))
    # The layers are computed as the target's: files that state something else are of another one.
    for fact, own in _facts(target, shape):
        found = given.config.get(fact)
        if found not in (None, own):
            raise UserError(
                f"the files of the {NAME} heads have {fact} {found!r}, and this target has {own}; "
                "use heads made for this target"
            )


def _new(shape: TrunkShape, key: Array) -> Params:
    """Random parameters (normal, standard deviation 0.02), other ones for each head."""
    keys = jax.random.split(key, shape.heads)
    return {"layers": {str(j): MODULE.new(shape, each) for j, each in enumerate(keys)}}


def _start(shape: TrunkShape, target: LM, target_params: Params, key: Array) -> Params:
    """Parameters to start from beside a trained target: copies of its last layer.

    Of a target that is no decoder of ``specjax.models`` the layers begin as the identity.
    """
    if target.inside.decoder is not None:
        own = target_params["layers"][shape.layer]
        return {"layers": {str(j): jax.tree.map(jnp.asarray, own) for j in range(shape.heads)}}
    layers = _new(shape, key)["layers"]
    return {"layers": {name: _prefix.without_branches(own) for name, own in layers.items()}}


def _prefix_of(shape: TrunkShape, dtype: Any) -> Prefix:
    """The layers as a map of hidden states; ``dtype`` is that of their caches."""
    window = shape.config.window(shape.layer)
    windows = () if window is None else (window,) * shape.heads
    cache = Bound(_prefix.init_cache, shape.config, dtype, shape.heads, windows=windows)
    return Prefix(cache, Bound(_apply, shape))


def _facts(target: LM, shape: TrunkShape) -> tuple[tuple[str, Any], ...]:
    """What config.json must hold about the layers in addition to their tensors."""
    return (*_prefix.facts(shape.config), ("num_hidden_layers", target.layers))


def _apply(
    shape: TrunkShape,
    params: ModelParams,
    features: Array,
    cache: KVCache,
    layout: Layout | None = None,
) -> tuple[Array, KVBlock]:
    """[B,T,E] -> ([B,T,K*E] before the target's last norm, keys and values of these tokens)."""
    every = params.draft["layers"]
    dtype = jax.tree.leaves(every)[0].dtype
    view = past(cache, features.shape[1], layout)
    own = shape.config.rope(shape.layer)
    angle = None if own is None else rope.angle(own, view.positions)
    computed = []
    for head in range(shape.heads):
        layer = MODULE.merge(shape, every[str(head)])
        computed.append(layer(features.astype(dtype), angle, view, stored(cache, None, head)))
    outputs, keys, values = zip(*computed, strict=True)
    # One number that depends on the reads of all layers.
    read = functools.reduce(jnp.add, (x[..., 0].astype(jnp.float32) for x in outputs))
    block = KVBlock(keys, values, read)
    return jnp.concatenate(outputs, -1).astype(features.dtype), block


def _begin(heads: int, params: ModelParams, features: Array) -> Array:
    """[...,K*E] -> [...,K,E]: the outputs of the layers."""
    return features.reshape(*features.shape[:-1], heads, -1)


def _step(
    logits: Any, params: ModelParams, state: Array, depth: Any, *_: Any
) -> tuple[Array, Array]:
    """``Heads.step``: head ``depth`` predicts, whatever the draft's tokens."""
    return logits(params, jnp.take(state, depth, axis=-2)), state


def _every(logits: Any, params: ModelParams, state: Array) -> Array:
    """``Heads.every``: [...,K,E] -> f[K,...,V]."""
    return logits(params, jnp.moveaxis(state, -2, 0))


def _logits(target: LM, params: ModelParams, x: Array) -> Array:
    """The target's own last norm, if it has one, and its LM head."""
    assert target.unembed is not None
    if target.inside.last_norm is not None:
        x = target.inside.last_norm(params.target, x)
    return target.unembed(params.target, x)


# What every layer has; another part is in all layers or in none.
_ALWAYS = ("attention.q", "attention.k", "attention.v", "attention.o")
_POST_NORMS = {
    "attention_post_norm": "self_attn.output_layernorm",
    "mlp_post_norm": "mlp.output_layernorm",
}
# Module of a layer here -> its name: Llama's, or specjax's of what Llama has not; and Meta's.
_LLAMA = decoder_layers.NAMES | _POST_NORMS
_META = {
    **{module: f"attention.w{module[-1]}" for module in _ALWAYS},
    **{"mlp.gate": "feed_forward.w1", "mlp.down": "feed_forward.w2", "mlp.up": "feed_forward.w3"},
    **{"attention_norm": "attention_norm", "mlp_norm": "ffn_norm"},
}
# The norms of all queries and of all keys may have two widths.
_DIMS = decoder_layers.DIMS | dict.fromkeys(_POST_NORMS, "D")
_DIMS |= {"attention.q_norm": "Q", "attention.k_norm": "K"}
HUGGING_FACE, META = "huggingface", "meta"


class _Files(Codec):
    """Layouts with the names of Llama and with Meta's, whose consolidated.pth has the target too.

    In Meta's the rotary pairs of a head are (2i, 2i + 1) and here (i, i + d/2), so the columns of
    queries and keys have another order.
    """

    files = ("mtp_heads.safetensors", "consolidated.pth")
    layouts = (HUGGING_FACE, META)
    # ``extra_heads`` is the name in Meta's release (facebook/multi-token-prediction).
    tables: ClassVar = {
        HUGGING_FACE: decoder_layers.decoder_layer(
            *("extra_heads.{i}.", "layers.{i}.", _LLAMA, _DIMS),
            parts={module: module for module in _LLAMA if module not in _ALWAYS},
            biases={module: f"{module}.bias" for module in _LLAMA},
        ),
        META: decoder_layers.decoder_layer(
            "extra_heads.{i}.", "layers.{i}.", _META, parts={}, biases={}
        ),
    }

    def select(self, where: Path, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
        whole = "tok_embeddings.weight" in tensors
        return {x: y for x, y in tensors.items() if not whole or x.startswith("extra_heads.")}

    def decode(self, found: Found, leaves: Leaves, sizes: Sizes) -> tuple[Leaves, Config]:
        if any(name.endswith(".attention.wq.weight") for name in found.layout):
            width, params = found.config.get("head_dim"), Path(found.where) / "params.json"
            if width is None and params.is_file():
                width = _head_dim_in(params)
            if width is None:
                raise UserError(
                    f"{found.where}: the width of an attention head is missing; give params.json, "
                    "or head_dim in config.json"
                )
            leaves = _ordered(leaves, (-1, width // 2, 2))
        return super().decode(found, leaves, sizes)

    def arrange(self, layout: str, leaves: Leaves, config: Mapping[str, Any]) -> Leaves:
        if layout != META:
            return leaves
        if "head_dim" not in config:
            raise UserError(f"head_dim is missing; the layout {META} needs the width of a head")
        for path in leaves:
            module, bias = ".".join(path[2:-1]), path[-1] == "bias"
            if module in _LLAMA and (bias or module not in _META):
                raise UserError(
                    f"the layout {META} has no name for "
                    f"{_LLAMA[module]}.{'bias' if bias else 'weight'}; write the layout "
                    f"{HUGGING_FACE}"
                )
        return _ordered(leaves, (-1, 2, config["head_dim"] // 2))


def _head_dim_in(sizes: Path) -> int:
    """The width of an attention head in Meta's params.json. Raises UserError."""
    values = read_json(sizes)
    for name in ("dim", "n_heads"):
        if type(value := values.get(name)) is not int or value < 1:
            raise UserError(f"{sizes}: {name} is {value!r}; it must be a whole number > 0")
    if values["dim"] % values["n_heads"] or values["dim"] // values["n_heads"] % 2:
        raise UserError(
            f"{sizes}: dim is {values['dim']} and n_heads {values['n_heads']}; the width of a "
            "head, dim / n_heads, must be an even number"
        )
    return values["dim"] // values["n_heads"]


def _ordered(leaves: Leaves, shape: tuple[int, int, int]) -> Leaves:
    """The leaves; columns of queries and keys, as (heads, a, b), in the order (heads, b, a)."""

    def one(path: tuple, leaf: Any) -> Any:
        if path[-3:] not in (("attention", "q", "kernel"), ("attention", "k", "kernel")):
            return leaf
        return leaf.reshape(len(leaf), *shape).swapaxes(-1, -2).reshape(leaf.shape)

    return {path: one(path, leaf) for path, leaf in leaves.items()}


CODEC = _Files(NAME)
