"""The drafter of a block network: one pass for all depths, then a correction token by token.

The cache has the target's taps of the committed text as keys and values. A verdict leaves the taps
of the pending token and the accepted nodes, and ``commit`` appends them: the cache never holds what
was computed for a draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.divergences import overlap
from specjax.drafters import _foresee, growth
from specjax.drafters.files import Given
from specjax.drafters.growth import Begun, Nodes, Plan, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _depth_loss, _prefix, _vocabulary
from specjax.drafters.heads._along_text import PLACES, Drafts, Texts
from specjax.drafters.heads._depth_loss import DepthKeys, Terms
from specjax.drafters.heads.block import _network as network
from specjax.drafters.heads.block._corrections import Given as Before
from specjax.drafters.heads.block._network import Net
from specjax.drafters.heads.eagle._network import logits as logits_of
from specjax.drafters.shared_keys import StackedKeys
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
    Training,
    Verdict,
)

NAME = "block_head"


class Block(struct.PyTreeNode):
    """What a round's pass over the block leaves for all depths."""

    logits: jax.Array  # f[B,K,V] without a correction
    hidden: jax.Array  # [B,K,D]


class Memory(struct.PyTreeNode):
    """What the children of nodes read."""

    state: jax.Array  # [B,P,S] of the correction
    confidence: jax.Array | None  # f32[B,P] that the next token is accepted


def build(
    target: LM,
    net: Net,
    keys: StackedKeys,
    given: Given,
    facts: tuple[tuple[str, Any], ...],
) -> Drafter:
    """The drafter of a network; without keys, a sampled chain of full length.

    ``facts`` are what config.json must hold in addition to the tensors.

    L1 with a rule that takes its siblings. Raises UserError for keys that do not fit.
    """
    shape = net.shape
    independent = shape.correction == "none"
    chain = shapes.chain(shape.positions)
    accuracy = given.config.get("accuracy")
    method = Method(NAME, chain, "iid", shape.drafted, shape.positions, independent, accuracy)
    plan = growth.read(method, keys)
    stepper = Stepper(
        init=Bound(_init, net),
        begin=Bound(_begin, net, plan.growth.depth),
        step=Bound(_step, net),
        commit=Bound(_commit, net),
        looped=True,
        independent=independent,
        lazy=True,
        confidence=_confidence if shape.confidence else None,
    )
    drafter = growth.build(
        NAME,
        stepper,
        plan,
        given.init_params(NAME),
        training=_training(net, target.with_taps(shape.taps), plan, facts),
        features=True,
    )
    return drafter._replace(taps=shape.taps)


def _init(
    net: Net, params: ModelParams, context: Context, target_out: Output, slots: int
) -> kv.KVCache:
    batch, size = target_out.hidden.shape[:2]
    cache = network.init_cache(net, batch, slots)
    if not size:
        return cache
    feed = Bound(_feed, net, params)
    return _prefix.feed(feed, kv.commit, target_out.taps, context.length - 1, cache)[1]


def _feed(
    net: Net, params: ModelParams, taps: tuple[jax.Array, ...], cache: kv.KVCache
) -> tuple[None, kv.KVBlock]:
    positions = cache.length[:, None] + jnp.arange(taps[0].shape[1])
    return None, network.read(net, params, taps, positions)


def _begin(net: Net, depth: int, params: ModelParams, context: Context, cache: kv.KVCache) -> Begun:
    """``Stepper.begin``: one pass over the block of ``depth`` tokens.

    A row whose text has one token cannot draft: there are no taps to read.
    """
    hidden = network.draft(net, params, context.pending, depth, cache)
    block = Block(logits_of(net.ends, params, hidden), hidden)
    state = network.no_state(net, params, len(hidden), 1)
    first, memory = _depth(net, params, block, state, context.pending[:, None], 0)
    return Begun(first[:, 0], cache, memory, cache.length > 0, reads=block)


def _step(
    net: Net, params: ModelParams, block: Block, nodes: Nodes, above: Memory
) -> tuple[jax.Array, Memory]:
    """``Stepper.step``: the memory of a node is the correction's state after its token."""
    state = growth.at(above.state, nodes.parents)
    state = jnp.broadcast_to(state, (*nodes.tokens.shape, state.shape[-1]))
    return _depth(net, params, block, state, nodes.tokens, nodes.depth)


def _depth(
    net: Net, params: ModelParams, block: Block, state: jax.Array, tokens: jax.Array, depth: Any
) -> tuple[jax.Array, Memory]:
    """The logits f[B,n,V] after n nodes, ``depth`` tokens after the pending one; their memory."""

    def at_nodes(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, depth][:, None], (*tokens.shape, x.shape[-1]))

    before = Before(tokens, at_nodes(block.hidden), at_nodes(block.logits), depth)
    after = network.correct(net, params, state, before)
    logits = _vocabulary.spread(net.ids, after.logits, net.shape.vocab)
    sure = after.confidence
    return logits, Memory(after.state, None if sure is None else jax.nn.sigmoid(sure))


def _confidence(memory: Memory) -> jax.Array:
    """``Stepper.confidence``."""
    assert memory.confidence is not None
    return memory.confidence


def _commit(
    net: Net,
    params: ModelParams,
    cache: kv.KVCache,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> kv.KVCache:
    """Appends the pending token and the accepted nodes, without the newest token."""
    taps = growth.fed_to_target(target_out.taps, verdict)
    return kv.commit(cache, _feed(net, params, taps, cache)[1], verdict.count)


# The correction's state after a depth, and its confidence f[B,P] there before the sigmoid.
State = tuple[Array, Array | None]


def _training(net: Net, target: LM, plan: Plan, facts: tuple[tuple[str, Any], ...]) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    return Training(
        loss=Bound(loss, net, target),
        start=Bound(network.start, net.shape),
        **_foresee.forecasts(Bound(along, net, target), plan),
        facts=facts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossKeys(DepthKeys):
    """The keys of the loss."""

    confidence: float = key(
        0.0,
        "weight of the cross-entropy of the confidence with the overlap of draft and target",
        least=0,
    )
    places: int = key(PLACES, "random features of each row that blocks are behind", least=1)


@declare.method(LossKeys)
def loss(
    net: Net,
    target: LM,
    params: Params,
    target_params: Params,
    batch: Batch,
    key: Array,
    keys: LossKeys,
) -> tuple[Array, dict[str, Any]]:
    """Loss f32[] per label of the first depth (with ``Batch.depths``: of all), and metrics.

    ``_depth_loss.loss`` of blocks behind random features, or all of them where there are fewer, and
    at every depth the confidence's term, without the weights of ``pace``. Metrics are also
    ``alpha_<d>``, the acceptance rate at temperature 1. The target's logits are constants, its
    hidden states not.

    Raises:
        UserError: weights out of range or without effect, a batch of fewer than 3 tokens.
    """
    if keys.confidence and not net.shape.confidence:
        raise UserError(
            f"loss.confidence is {keys.confidence}, and the network has no confidence; set "
            "drafter.confidence, or leave loss.confidence out"
        )
    if batch.tokens.shape[1] < 3:
        raise UserError("blocks predict two tokens ahead; raise train.length to 2 or more")
    pair, count = ModelParams(target_params, params), net.shape.positions
    batch = _along_text.of_output(target, batch)
    out = _along_text.output(target, target_params, batch)
    rows, size = out.hidden.shape[:2]
    chosen = _along_text.random_places(key, rows, size, keys.places)
    run = _run(net, pair, out, batch, count)
    drafts = _drafts(net, pair, out, batch, run(chosen), chosen)
    number = drafts.number_of_labels(count)
    more = Bound(_confidence_term, net, keys.confidence)
    return _depth_loss.loss(drafts, keys, count, number, more)


def _confidence_term(
    net: Net,
    weight: float,
    terms: Terms,
    state: State,
    logits: Array,
    teacher: Array,
    counted: Array,
) -> tuple[Array, dict[str, Array]]:
    """``_depth_loss.More``: the acceptance rate, and the loss of the confidence."""
    logits = _vocabulary.spread(net.ids, logits, net.shape.vocab)
    shared = jax.lax.stop_gradient(overlap(teacher, logits))
    number, value = counted.sum(), jnp.zeros(())
    sizes = {"alpha": _depth_loss.mean(shared, counted)}
    confidence = state[1]
    if weight and confidence is not None:
        # Cross-entropy of sigmoid(x) with the share c: log(1 + e^x) - c x.
        wrong = jax.nn.softplus(confidence) - shared * confidence
        value = weight * jnp.where(counted, wrong, 0).sum() / terms.first
        sizes["scale"] = weight * number / terms.first
        sizes["uniform"] = weight * jnp.log(2.0) * number / terms.first
    return value, sizes


def along(net: Net, target: LM, params: ModelParams, batch: Batch, depth: int) -> Texts:
    """``_along_text.Along``: blocks of ``depth`` tokens behind every feature."""
    out = _along_text.output(target, params.target, batch)
    rows, size = out.hidden.shape[:2]
    run = _run(net, params, out, batch, depth)
    hidden = _along_text.in_pieces(lambda places: run(jnp.tile(places, (rows, 1))), size)
    yield from _drafts(net, params, out, batch, hidden).along(depth)


def _drafts(
    net: Net,
    params: ModelParams,
    out: Output,
    batch: Batch,
    hidden: Array,
    places: Array | None = None,
) -> Drafts:
    """The corrected logits of blocks with these outputs [B,P,K,D] behind places; None: all."""

    def step(state: State, depth: int) -> tuple[Array, State]:
        tokens = _along_text.ahead(batch.tokens, depth + 1, out.hidden.shape[1])
        tokens = tokens if places is None else _along_text.at(tokens, places)
        own = hidden[:, :, depth]
        before = Before(tokens, own, logits_of(net.ends, params, own), depth)
        after = network.correct(net, params, state[0], before)
        return after.logits, (after.state, after.confidence)

    state = network.no_state(net, params, *hidden.shape[:2]), None
    chosen = places if places is None else (places,) * hidden.shape[2]
    return Drafts(batch, out.logits, step, state, chosen, net.ids)


def _run(
    net: Net, params: ModelParams, out: Output, batch: Batch, depth: int
) -> Callable[[Array], Array]:
    """A function of places i32[B,P]: the outputs [B,P,K,D] of blocks of ``depth`` tokens there."""
    text, fed = _along_text.layout_of(batch), net.shape.fed(depth)
    block, inside = network.read(net, params, out.taps, text.depth), network.inside(net, depth)
    cache = network.init_cache(net, len(batch.tokens), 0)

    def run(places: Array) -> Array:
        group, step = jnp.divmod(jnp.arange(places.shape[1] * fed), fed)
        among = (group[:, None] == group) & inside[step[:, None], step]
        layout = _along_text.layout_behind(text, jnp.repeat(places, fed, 1), 1 + step, among)
        pending = _along_text.at(batch.tokens, places + 1)
        return network.run(net, params, pending, depth, cache, layout, block)

    return run
