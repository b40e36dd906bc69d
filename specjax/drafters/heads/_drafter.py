"""The drafter of a family of heads: its stepper, and the training part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.bound import Bound
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import HeadKeys
from specjax.drafters.heads import _loss, _prefix, _text
from specjax.drafters.heads._family import Heads
from specjax.drafters.heads._given import Given
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import (
    LM,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)


class State(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    # [B,E] feature of the token before the pending one; with a prefix, what the prefix makes of it.
    feature: jax.Array
    # bool[B] False: there is no feature yet, because the prompt has one token only.
    known: jax.Array
    # The prefix's cache.
    cache: Any = None


def build(target: LM, heads: Heads, keys: HeadKeys, given: Given) -> Drafter:
    """The drafter of these heads; without keys, their default shape of the most probable tokens.

    L1 with a rule that takes its siblings. Raises UserError for a tree deeper than there are heads,
    and for a search without measured accuracies.
    """
    method = Method(
        heads.name,
        heads.tree or shapes.chain(heads.depth),
        "top_k",
        target.vocab_size,
        None if heads.looped else heads.depth,
        heads.independent,
        given.config.get("accuracy"),
        heads.depth,
    )
    plan = _growth.read(method, keys)
    stepper = Stepper(
        init=Bound(_init, heads),
        begin=Bound(_begin, heads),
        step=Bound(_step, heads),
        commit=Bound(_commit, heads),
        looped=heads.looped,
        independent=heads.independent,
        lazy=True,
    )
    drafter = _growth.build(
        heads.name,
        stepper,
        plan,
        Bound(_init_params, heads.name, given.params),
        training=_training(target, heads, plan),
        features=True,
    )
    return drafter._replace(taps=heads.taps)


def _training(target: LM, heads: Heads, plan: Plan) -> Training:
    target = target.with_taps(heads.taps) if heads.taps else target
    along = Bound(_text.along, heads, target)
    return Training(
        loss=Bound(_loss.loss, heads, target),
        start=heads.start,
        foresee=_text.foresee(along, plan),
        ranks=Bound(_text.ranks, along, heads.depth),
        facts=heads.facts,
    )


def _init_params(name: str, params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            f"{name} has no heads yet; give model=, a directory of trained ones (mode train makes "
            "them)"
        )
    return params


def _init(
    heads: Heads, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    batch, size = target_out.hidden.shape[:2]
    count = context.length - 1
    features, cache, prefix = heads.read(target_out), None, heads.prefix
    if prefix is not None:
        cache, apply = prefix.init_cache(batch, slots), Bound(prefix.apply, params)
        if size:
            features, cache = _prefix.feed(apply, prefix.commit, features, count, cache)
        else:
            one = jnp.zeros((batch, 1, features.shape[-1]), features.dtype)
            # Only the shape is needed.
            with jax.disable_jit(False):
                features = jax.eval_shape(apply, one, cache)[0]
    if not size:
        return State(jnp.zeros((batch, features.shape[-1]), features.dtype), count > 0, cache)
    return State(_at(features, jnp.maximum(count - 1, 0)), count > 0, cache)


def _begin(heads: Heads, params: ModelParams, context: Context, state: State) -> Begun:
    """``Stepper.begin``: the first head reads the feature and the pending token.

    Heads that do not read the draft's tokens give the logits of all depths, the memory [B,1,K,V].
    """
    inner = heads.begin(params, state.feature[:, None])
    if heads.every is not None:
        every = jnp.moveaxis(heads.every(params, inner), 0, 2)
        return Begun(every[:, 0, 0], state, every, state.known)
    logits, memory = heads.step(params, inner, 0, context.pending[:, None])
    return Begun(logits[:, 0], state, memory, state.known)


def _step(
    heads: Heads, params: ModelParams, state: State, nodes: Nodes, block: Any
) -> tuple[jax.Array, Any]:
    """``Stepper.step``: the memory of a node is the heads' state after it."""
    memory = _growth.at(block, nodes.parents)
    if heads.every is not None:
        return memory[:, :, nodes.depth], memory
    return heads.step(params, memory, nodes.depth, nodes.tokens)


def _commit(
    heads: Heads,
    params: ModelParams,
    state: State,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> State:
    # The last committed token that the target was fed: the pending token or an accepted node, the
    # one before the newest token.
    last = jnp.maximum(verdict.count - 1, 0)
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    cache, features = state.cache, heads.read(target_out)
    if heads.prefix is None:
        feature = _at(features, jnp.take_along_axis(fed, last[:, None], 1)[:, 0])
    else:
        features = jnp.take_along_axis(features, jnp.maximum(fed, 0)[..., None], 1)
        features, block = heads.prefix.apply(params, features, cache)
        cache = heads.prefix.commit(cache, block, verdict.count)
        feature = _at(features, last)
    alive = verdict.count > 0
    return State(jnp.where(alive[:, None], feature, state.feature), state.known | alive, cache)


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    """values [B,T,E], index i32[B] -> [B,E]."""
    return jnp.take_along_axis(values, index[:, None, None], 1)[:, 0]
