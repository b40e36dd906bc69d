"""SpecDec's Spec-Drafter: a network with an encoder of its own that drafts a block in one pass.

Xia et al. 2023 (2203.16487), for encoder-decoder targets. A deep encoder reads the source once, a
shallow decoder reads what was written and a block of masks in both directions, and each mask gives
the distribution of its token, without knowledge of the other drafts. Nothing that the decoder
computed can be kept, so each round reads the output so far again: a draft costs one pass over the
output and the block, whose length grows with the output; of the last layer the masks alone are
computed. ``configs/spec_drafter.py`` trains it.

Each token is drawn from the declared probabilities of its place, or is the most probable one
("top_k"). L1 with the rules for the draft's siblings; the paper's Spec-Verification is the rule
``tolerance`` (L3). The probabilities of a depth are the same on all paths, so best-first trees
(``tree="best_first"``) cost no further pass.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import NetworkKeys, TreeKeys
from specjax.drafters.draft_models import _spec_network as network
from specjax.drafters.draft_models import _spec_text
from specjax.drafters.draft_models._spec_network import Net, Shape, Source
from specjax.drafters.heads import _eagle_shape, _given
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.models import t5_config
from specjax.models.t5_config import T5Config
from specjax.topology import shapes
from specjax.types import LM, Context, Drafter, ModelParams, Output, Params

REFERENCE = "xia2023speculative"

SHARED = TreeKeys
NAME, BLOCK, LAYERS = "spec_drafter", 7, 2
# Tokens of the output that a pass has room for: so many, twice as many, and so on.
PIECE = 32
# Our key -> the field of ``T5Config``.
_FIELDS = {
    "width": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_heads",
    "head_dim": "head_dim",
    "layers": "num_layers",
    "encoder_layers": "encoder_layers",
}


def make(
    target: LM,
    *,
    model: str | os.PathLike | None = None,
    gamma: int | None = None,
    block: int = 0,
    width: int = 0,
    inner: int = 0,
    heads: int = 0,
    head_dim: int = 0,
    layers: int = 0,
    encoder_layers: int = 0,
    params: Params = None,
    dtype: Any = None,
    **shared: Any,
) -> Drafter:
    """Drafts with a Spec-Drafter.

    The sizes are those of a new network. Of a stored one config.json decides, and another value is
    an error.

    Args:
        target: an encoder-decoder model.
        model: the directory of a network that ``configs/spec_drafter.py`` trained.
        gamma: draft tokens per round of a chain; None: as many as the block has. The network always
            fills its whole block, of which the first gamma tokens are drafted.
        block: masks of a pass, the most tokens of a draft; 0: as in the files, or 7.
        width: of the network; 0: the target's.
        inner: width of its feed-forward; 0: the target's.
        heads: attention heads; 0: the target's.
        head_dim: width of an attention head; 0: the target's.
        layers: of its decoder; 0: 2, the fewest with which a draft's places depend on each other.
        encoder_layers: of its encoder; 0: the target's.
        params: its parameters, instead of ``model``, with the keys that it was made with.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the probabilities
            ("iid").

    Raises:
        UserError: a target without an encoder, files without a network or of another target, sizes
            that differ from the files, a draft longer than the block, a tree that does not fit.
    """
    keys = TreeKeys(**shared)
    if target.encoder is None or not isinstance(target.encoder.config, T5Config):
        raise UserError(
            f"{NAME} drafts for encoder-decoder models, and {target.name} is none of "
            "specjax.models; take a T5 model as the target, or pard, which drafts in one pass for "
            "decoders"
        )
    own = NetworkKeys(model=model, params=params, dtype=dtype)
    given = _given.read(NAME, target, own, features=False)
    asked = {"width": width, "inner": inner, "heads": heads, "head_dim": head_dim}
    asked |= {"layers": layers, "encoder_layers": encoder_layers}
    shape = _shape(target.encoder.config, given.config, block, asked)
    plan = _plan(target, shape, given, keys, gamma)
    return _build(target, _net(target, shape, given), given.params, plan)


def _net(target: LM, shape: Shape, given: Given) -> Net:
    """The static facts. Raises UserError for parameters of another shape."""
    own = jnp.float32
    if given.params is not None:
        _eagle_shape.check_leaves(NAME, dict(network.leaves(shape)), flatten_dict(given.params))
        own = given.params["masks"].dtype
    assert target.encoder is not None
    return Net(shape, target.encoder.start, jnp.dtype(own))


def _plan(target: LM, shape: Shape, given: Given, keys: TreeKeys, gamma: int | None) -> Plan:
    """How the drafts grow. Raises UserError."""
    chain = shapes.chain(_length(gamma, shape.block, keys))
    measured, size = given.config.get("accuracy"), target.vocab_size
    return _growth.read(Method(NAME, chain, "iid", size, shape.block, True, measured), keys)


def _length(gamma: int | None, block: int, keys: TreeKeys) -> int:
    """The tokens of a chain. Raises UserError."""
    if gamma is None:
        return block
    if keys.tree or keys.nodes:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    if whole("gamma", gamma, 1) > block:
        raise UserError(
            f"gamma is {gamma}, and the network fills blocks of {block} tokens; give at most "
            f"{block}, or train one with a larger config.drafter.block"
        )
    return gamma


def _shape(
    target: T5Config, config: Mapping[str, Any], block: int, asked: Mapping[str, int]
) -> Shape:
    """The shape of the stored network, or of a new one. Raises UserError."""
    new = {key: getattr(target, field) for key, field in _FIELDS.items()} | {"layers": LAYERS}
    pairs = {key: (asked[key], new[key]) for key in _FIELDS} | {"block": (block, BLOCK)}
    if not config:
        base, stored = target, None
    else:
        if "block_size" not in config:
            raise UserError(
                f"config.json of the {NAME} lacks block_size; copy it again, or train it again"
            )
        base = t5_config.read(dict(config), target.eos_token_id)
        if base.start_token_id not in (None, target.start_token_id):
            raise UserError(
                f"the {NAME} was trained with the start token {base.start_token_id}, and outputs "
                f"of the target begin with {target.start_token_id}; take one of this target"
            )
        size = whole(f"block_size of the {NAME}", config["block_size"], 1)
        stored = (*(getattr(base, field) for field in _FIELDS.values()), size)
    sizes = _given.sizes(stored, "network has", **pairs)
    fields = dict(zip(_FIELDS.values(), sizes, strict=False))
    own = dataclasses.replace(
        base, **fields, num_kv_heads=fields["num_heads"], start_token_id=target.start_token_id
    )
    return Shape(own, sizes[-1])


def _build(target: LM, net: Net, params: Params, plan: Plan) -> Drafter:
    stepper = Stepper(
        init=Bound(_init, net),
        begin=Bound(_begin, net),
        step=_step,
        commit=_unchanged,
        looped=True,
        independent=True,
        lazy=True,
    )
    stored = t5_config.write(dataclasses.replace(net.shape.config, eos_token_id=()))
    facts = (
        *(
            (key, value)
            for key, value in stored.items()
            if key not in ("architectures", "model_type")
        ),
        ("block_size", net.shape.block),
    )
    drafter = _growth.build(
        NAME,
        stepper,
        plan,
        Bound(_init_params, params),
        training=_spec_text.training(net, target, plan, facts),
        gaps=True,
    )
    # A pass reads the output so far.
    return drafter._replace(constant_cost=False)


def _init_params(params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            f"{NAME} has no network yet; give model=, a directory of one that "
            "configs/spec_drafter.py trained"
        )
    return params


def _init(
    net: Net, params: ModelParams, context: Context, target_out: Output, slots: int
) -> Source:
    """``Stepper.init``: the encoder reads the sources, which end before the last token."""
    del target_out, slots
    return network.read(net, params, context.tokens[:, :-1])


def _begin(net: Net, params: ModelParams, context: Context, source: Source) -> Begun:
    """``Stepper.begin``: one pass over the outputs so far and the masks after them."""
    count = jnp.maximum(context.length - source.count, 0)
    longest = count if context.done is None else jnp.where(context.done, 0, count)
    widths = _widths(context.tokens.shape[1])

    def with_room(width: int) -> jax.Array:
        tokens = network.written(context.tokens, source, width)
        return network.logits(net, params, tokens, count, source)

    passes = [Bound(with_room, width) for width in widths]
    logits = jax.lax.switch(jnp.searchsorted(jnp.asarray(widths), longest.max()), passes)
    return Begun(logits[:, 0], source, reads=logits)


def _widths(slots: int) -> list[int]:
    """The numbers of tokens of an output that a pass may have room for, ascending."""
    widths = [PIECE]
    while widths[-1] < slots:
        widths.append(min(2 * widths[-1], slots))
    return widths


def _step(
    params: ModelParams, logits: jax.Array, nodes: Nodes, block: Any
) -> tuple[jax.Array, jax.Array]:
    """``Stepper.step``: the logits f[B,K,V] of all depths were computed before the draft."""
    return logits[:, nodes.depth][:, None], nodes.tokens


def _unchanged(params: ModelParams, source: Source, drafted: None, verdict: Any, out: Any) -> Any:
    return source
