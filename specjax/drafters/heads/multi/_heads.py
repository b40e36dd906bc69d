"""Heads on the target's last feature as pure functions, their drafter and their training.

The feature f of a token is the vector that the target's LM head multiplies. With tokens[t] pending,
heads read f[t-1] (the feature that the pending token was drawn from); the head of depth d, counted
from 0, predicts tokens[t+1+d]. Drafting and training call the same ``step``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import declare, tree
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import growth
from specjax.drafters.files import Given
from specjax.drafters.growth import Begun, Nodes, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss, _prefix
from specjax.drafters.heads._along_text import Drafts, Texts
from specjax.drafters.heads._depth_loss import DepthKeys
from specjax.drafters.heads._prefix import Prefix
from specjax.drafters.shared_keys import HeadKeys
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import (
    LM,
    Array,
    Batch,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Verdict,
)


def begin_with_feature(params: Any, feature: Array) -> Array:
    """``Heads.begin`` where the state is the feature itself."""
    return feature


class Heads(NamedTuple):
    """A family of heads as pure functions of the parameters ``ModelParams`` and a state.

    Leading dimensions [...] are free. ``begin(params, feature [...,E]) -> state``.
    ``step(params, state, depth, tokens i32[...]) -> (logits f[...,V], state)``: ``tokens`` is the
    newest token, which is the pending one at depth 0 and then the draft's own.
    """

    name: str
    depth: int  # how many heads
    step: Callable[..., tuple[Array, Any]]
    # (target_params, key) -> new parameters to start training with.
    start: Callable[..., Params]
    begin: Callable[..., Any] = begin_with_feature
    # (params, state) -> f[K,...,V], the logits of all depths in one pass, for heads that do not
    # read the draft's tokens: ``step`` then takes a traced depth and returns the state unchanged.
    # None: heads read them.
    every: Callable[..., Array] | None = None
    # None: heads read one feature.
    prefix: Prefix | None = None
    # The layer of the target whose output they read in the place of its last feature, as a tuple of
    # one number; (): none.
    taps: tuple[int, ...] = ()
    # Whether all depths have the same parameters: a draft may be deeper than ``depth``, and
    # ``step`` takes a traced depth.
    looped: bool = False
    # The shape of a draft without keys, as ``Method.tree``; "": a chain of ``depth`` tokens.
    tree: str = ""
    # What config.json must hold about the parameters in addition to their shapes.
    facts: tuple[tuple[str, Any], ...] = ()

    def read(self, out: Output) -> Array:
        """[B,T,E]: what they read of the target's output."""
        return out.taps[0] if self.taps else out.hidden


# (the target's parameters, [...]) -> [...]: ``LM.unembed`` or ``LM.embed``.
OfTarget = Callable[[Params, Array], Array]
# Of one head: (its parameters, the target's, feature) -> logits f[...,V].
Head = Callable[[Params, Params, Array], Array]


def step_of(
    head: Head, params: ModelParams, feature: Array, depth: Any, *_: Any
) -> tuple[Array, Array]:
    """``Heads.step`` of heads that do not read the draft's tokens, see ``at_all_depths``."""
    return head(jax.tree.map(lambda x: x[depth], params.draft), params.target, feature), feature


def at_all_depths(head: Head, params: ModelParams, feature: Array) -> Array:
    """f[K,...,V]: ``Heads.every`` of these heads.

    The leaves of ``params.draft`` are stacked on axis 0. One product of stacks reads the kernels in
    place; taking one head of a stack copies its kernels.
    """
    heads = jax.tree.leaves(params.draft)[0].shape[0]
    # The feature is repeated: without a stacked axis of its own, the kernels would be transposed.
    features = jnp.broadcast_to(feature, (heads, *feature.shape))
    return jax.vmap(head, (0, None, 0))(params.draft, params.target, features)


def zeros(read: int, size: int) -> Params:
    """A linear map with a bias that gives zeros."""
    return {"kernel": jnp.zeros((read, size)), "bias": jnp.zeros(size)}


class State(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    # [B,E] feature of the token before the pending one; with a prefix, what the prefix makes of it.
    feature: Array
    # bool[B] False: there is no feature yet, because the prompt has one token only.
    known: Array
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
        heads.every is not None,
        given.config.get("accuracy"),
        heads.depth,
    )
    plan = growth.read(method, keys)
    stepper = Stepper(
        init=Bound(_init, heads),
        begin=Bound(_begin, heads),
        step=Bound(_step, heads),
        commit=Bound(_commit, heads),
        looped=heads.looped,
        independent=heads.every is not None,
        lazy=True,
    )
    target = target.with_taps(heads.taps) if heads.taps else target
    training = _along_text.training(
        Bound(loss, heads, target),
        heads.start,
        Bound(along, heads, target),
        plan,
        heads.facts,
        ranked=heads.depth,
    )
    own = given.init_params(heads.name)
    drafter = growth.build(heads.name, stepper, plan, own, training=training, features=True)
    return drafter._replace(taps=heads.taps)


def _init(heads: Heads, params: ModelParams, context: Context, out: Output, slots: int) -> State:
    batch, size = out.hidden.shape[:2]
    count = context.length - 1
    features, cache, prefix = heads.read(out), None, heads.prefix
    if prefix is not None:
        cache, apply = prefix.init_cache(batch, slots), Bound(prefix.apply, params)
        if size:
            features, cache = _prefix.feed(apply, kv.commit, features, count, cache)
        else:
            one = jnp.zeros((batch, 1, features.shape[-1]), features.dtype)
            features = tree.shapes(apply, one, cache)[0]
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
) -> tuple[Array, Any]:
    """``Stepper.step``: the memory of a node is the heads' state after it."""
    memory = growth.at(block, nodes.parents)
    if heads.every is not None:
        return memory[:, :, nodes.depth], memory
    return heads.step(params, memory, nodes.depth, nodes.tokens)


def _commit(
    heads: Heads, params: ModelParams, state: State, drafted: None, verdict: Verdict, out: Output
) -> State:
    cache, features = state.cache, growth.fed_to_target(heads.read(out), verdict)
    if heads.prefix is not None:
        features, block = heads.prefix.apply(params, features, cache)
        cache = kv.commit(cache, block, verdict.count)
    # The last committed token that the target was fed: the pending token or an accepted node, the
    # one before the newest token.
    feature, alive = _at(features, jnp.maximum(verdict.count - 1, 0)), verdict.count > 0
    return State(jnp.where(alive[:, None], feature, state.feature), state.known | alive, cache)


def _at(values: Array, index: Array) -> Array:
    """values [B,T,E], index i32[B] -> [B,E]."""
    return jnp.take_along_axis(values, index[:, None, None], 1)[:, 0]


def along(heads: Heads, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along`` of heads, after its first two arguments."""
    return drafts(heads, target, params, batch).along(depth)


def drafts(
    heads: Heads, target: LM, params: ModelParams, batch: Batch, places: Array | None = None
) -> Drafts:
    """What the heads predict at the features ``places`` i32[B,P], None: at all.

    The state is that of the heads.
    """
    out = _along_text.output(target, params.target, batch)
    features = heads.read(out)
    if heads.prefix is not None:
        cache = heads.prefix.init_cache(features.shape[0], 0)
        layout = None if batch.segments is None else tree.segments(batch.segments[:, :-1])
        features, _ = heads.prefix.apply(params, features, cache, layout)
    step, every = Bound(_step_along, heads, params, batch.tokens, places), None
    if places is not None:
        features, every = _along_text.at(features, places), (places,) * heads.depth
    few = _along_text.few(target, params.target, out, places, heads.depth)
    return Drafts(batch, out.logits, step, heads.begin(params, features), every, few=few)


def _step_along(
    heads: Heads, params: ModelParams, tokens: Array, places: Array | None, state: Any, depth: Any
) -> tuple[Array, Any]:
    newest = _along_text.ahead(tokens, depth + 1, tokens.shape[1] - 1)
    newest = newest if places is None else _along_text.at(newest, places)
    return heads.step(params, state, depth, newest)


class LossKeys(DepthKeys):
    """The keys of the loss of heads."""

    slots: str = key(
        "all",
        '"one" draws one depth per batch, uniformly: in expectation the mean over depths, in the'
        " memory of one head (Stern et al. 2018, 1811.03115, section 6)",
        choices=("all", "one"),
    )
    places: int = key(
        0,
        "features of each row that heads read: first those with a label, at random; 0: all",
        least=0,
    )


@declare.method(LossKeys)
def loss(
    heads: Heads,
    target: LM,
    params: Any,
    target_params: Any,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per labelled position, and metrics: ``_depth_loss.loss`` at every feature.

    The target's logits are constants; its features are not, for a caller that differentiates
    ``target_params``.

    Raises:
        UserError: weights out of range, a batch of fewer than 3 tokens.
    """
    _check(heads, batch, keys)
    batch = _along_text.of_output(target, batch)
    places = None
    if 0 < keys.places < batch.tokens.shape[1] - 1:
        own, key = jax.random.split(key)
        places = _along_text.random_places(own, batch, 2, heads.depth, keys.places)
    found = drafts(heads, target, ModelParams(target_params, params), batch, places)
    number = found.number_of_labels(heads.depth)
    if keys.slots == "all":
        return _depth_loss.loss(found, keys, heads.depth, number)
    depth = jax.random.randint(key, (), 0, heads.depth)
    term = _depth_loss.term_of(found, keys, number)
    term = jax.checkpoint(term) if keys.remat else term
    value, sizes, _ = term((found.state, None), depth)
    sizes = {name: keys.decay**depth * sizes[name] for name in ("scale", "uniform")}
    return keys.decay**depth * value, {**sizes, "weight": jnp.float32(number)}


def _check(heads: Heads, batch: Batch, keys: LossKeys) -> None:
    if keys.slots == "one" and heads.every is None:
        raise UserError(
            f"each head of {heads.name} continues from the head before it; loss.slots must be 'all'"
        )
    for name, value in (("places", keys.places or None), ("pace", keys.pace)):
        if keys.slots == "one" and value is not None:
            raise UserError(
                f"loss.{name} is {value}, and loss.slots 'one' trains one depth at a time; leave "
                "one out"
            )
    _along_text.check_length(batch, 2, "heads predict at least two tokens ahead")
