"""The drafter of a ``Network``: feature autoregression with the token one step ahead.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4). Slot t of the draft cache has the token t + 1 and
the target's feature of token t, and predicts token t + 2. So when a draft is grown, the cache has
one slot less than the text has tokens, and its newest slot predicts the children of the pending
token. A draft node is the next slot, with the network's own output at its parent in the place of
the feature.

A verdict leaves what the target computed for the pending token and the accepted nodes; the next
round begins by feeding these slots. So the cache is written once in a round, and holds nothing that
was computed from the network's own outputs or for a rejected node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import DYNAMIC, Method
from specjax.drafters._keys import NetworkKeys
from specjax.drafters.heads import _further, _masked_text, _prefix, _vocabulary
from specjax.drafters.heads._further import Further
from specjax.drafters.heads._given import Given
from specjax.drafters.heads._network import Network
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import LM, Context, Drafter, ModelParams, Output, Params, Training, Verdict


class Kept(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    # The slots of the committed text that were fed, all of them with the target's features.
    cache: KVCache
    # [B,M+1,D] the target's features of the slots that follow those of the cache, as the network
    # reads them.
    features: jax.Array
    # [B,D] the network's output at the newest slot of the cache: the children of the pending token
    # read it.
    recycled: jax.Array
    pending: jax.Array  # i32[B] the pending token, while a draft grows
    # What the modules after the first keep, for networks that have several.
    more: tuple[Further, ...] = ()


class Memory(struct.PyTreeNode):
    """What the children of fed nodes read."""

    tokens: jax.Array  # i32[B,P]
    slots: KVBlock
    feature: jax.Array  # [B,P,D] the network's output


def build(
    target: LM,
    network: Network,
    keys: NetworkKeys,
    given: Given,
    training: Callable[[Plan], Training],
    shape: Topology | str = DYNAMIC,
) -> Drafter:
    """The drafter of a network; ``shape`` is that of a draft without keys.

    Of a parallel network it is a chain of all tokens, drawn from their probabilities. ``training``
    makes the training part for drafts of a plan. L1 with a rule that takes its siblings. Raises
    UserError for keys that do not fit.
    """
    size = target.vocab_size if network.ids is None else len(network.ids)
    method = Method(network.name, shape, "top_k", size, accuracy=given.config.get("accuracy"))
    if network.parallel is not None:
        method = _parallel_method(network.parallel.tokens, method, keys)
    plan = _growth.read(method, keys)
    depth = plan.growth.depth
    begin = Bound(_begin, network, target.vocab_size)
    step = Bound(_step if network.modules == 1 else _further.step, network, target.vocab_size)
    if network.parallel is not None:
        begin = Bound(_begin_parallel, network, target.vocab_size, depth)
        step = _step_parallel
    stepper = Stepper(
        init=Bound(_init, network, depth),
        begin=begin,
        step=step,
        commit=Bound(_commit, network),
        looped=network.modules == 1,
        independent=network.parallel is not None,
    )
    drafter = _growth.build(
        network.name,
        stepper,
        plan,
        Bound(_init_params, network.name, given.params),
        training=training(plan),
        features=True,
    )
    return drafter._replace(taps=network.taps)


def _parallel_method(tokens: int, method: Method, keys: NetworkKeys) -> Method:
    if keys.gamma is not None and keys.gamma > tokens:
        raise UserError(
            f"gamma is {keys.gamma}, and the network was trained to draft {tokens} tokens in one "
            f"pass; give at most {tokens}, or train it for more"
        )
    chain = shapes.chain(tokens)
    return method._replace(tree=chain, siblings="iid", heads=tokens, independent=True)


def _init_params(name: str, params: Params, key: Any) -> Params:
    del key
    if params is None:
        raise UserError(
            f"{name} has no network yet; give model=, a directory of a trained one (mode train "
            "makes it)"
        )
    return params


def _init(
    network: Network,
    longest: int,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Kept:
    """Feeds all slots of the prompt but the last one, whose feature is kept.

    The prompt's last slot has its pending token and the feature of the token before that.
    """
    batch, size = target_out.hidden.shape[:2]
    cache, count = network.init_cache(batch, slots), context.length - 1
    outputs, fed = None, jnp.maximum(count - 1, 0)
    if size:
        features = network.read(params, target_out)
        shifted = context.tokens[:, network.shift : network.shift + size]
        inputs = shifted, features
        feed = Bound(_feed, network, params)
        outputs, cache = _prefix.feed(feed, network.commit, inputs, fed, cache)
        # A prompt of one token has no slot.
        newest = jnp.maximum(count - 1, 0)[:, None]
        first = tree.take(features, newest, (count > 0)[:, None])
    else:
        # Only the shapes are needed.
        with jax.disable_jit(False):
            like = jax.eval_shape(network.read, params, _one(target_out))
        first = jnp.zeros((batch, 1, network.width), like.dtype)
    features = jnp.pad(first, ((0, 0), (0, longest), (0, 0)))
    recycled = jnp.zeros_like(features[:, 0])
    more = _further.init(network, params, context, outputs, recycled, fed, slots)
    return Kept(cache, features, recycled, context.pending, more)


def _feed(
    network: Network, params: ModelParams, inputs: tuple[jax.Array, jax.Array], cache: KVCache
) -> tuple[jax.Array | None, KVBlock]:
    fed, block = network.apply(params, *inputs, cache)
    return (None if network.modules == 1 else fed.feature), block


def _one(out: Output) -> Output:
    """The output for one token, of the shapes of an output for none."""
    return jax.tree.map(lambda x: jnp.zeros((x.shape[0], 1, *x.shape[2:]), x.dtype), out)


def _begin(
    network: Network, vocab_size: int, params: ModelParams, context: Context, kept: Kept
) -> Begun:
    """Feeds and commits the slots that the cache lacks; the last of them predicts the first nodes.

    A row that is finished gets no new token. If the round in which it ended has left slots that are
    not fed yet, the next round feeds them; after that it lacks none, and a round changes nothing:
    it feeds the same slots, commits 0 of them and keeps ``recycled``. Its draft has no meaning. A
    row whose text has one token cannot draft.
    """
    cache = kept.cache
    missing, tokens = _missing(network, context, kept)
    fed, slots = network.apply(params, tokens, kept.features, cache)
    last = jnp.maximum(missing - 1, 0)[:, None, None]
    hidden, feature = (jnp.take_along_axis(x, last, 1) for x in fed)
    logits = _vocabulary.spread(network.ids, network.logits(params, hidden), vocab_size)
    more = _further.begin(network, params, context, kept.cache, fed.feature, missing, kept.more)
    cache = network.commit(cache, slots, missing)
    recycled = jnp.where((missing > 0)[:, None], feature[:, 0], kept.recycled)
    kept = Kept(cache, kept.features, recycled, context.pending, more)
    # Module k has no slot for the pending token before the text has k + 1 tokens.
    ready = (cache.length > 0) & (context.length >= network.modules)
    return Begun(logits[:, 0], kept, None, ready)


def _missing(network: Network, context: Context, kept: Kept) -> tuple[jax.Array, jax.Array]:
    """(i32[B] how many slots the cache lacks, i32[B,M+1] their tokens)."""
    length, width = kept.cache.length, kept.features.shape[1]
    missing = jnp.clip(context.length - 1 - length, 0, width)
    places = length[:, None] + network.shift + jnp.arange(width)
    return missing, jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")


def _begin_parallel(
    network: Network,
    vocab_size: int,
    depth: int,
    params: ModelParams,
    context: Context,
    kept: Kept,
) -> Begun:
    """As ``_begin``, with masks behind the slots: the logits of all depths from one pass.

    Only the slots of the text are committed.
    """
    assert network.parallel is not None and network.masked is not None
    (batch, width, size), masks = kept.features.shape, depth - 1
    missing, tokens = _missing(network, context, kept)
    ids = jnp.full((batch, masks), network.parallel.mask_id, tokens.dtype)
    unknown = network.masked(params).astype(kept.features.dtype)
    unknown = jnp.broadcast_to(unknown, (batch, masks, size))
    fed, slots = network.apply(
        params,
        jnp.concatenate([tokens, ids], 1),
        jnp.concatenate([kept.features, unknown], 1),
        kept.cache,
        _masked_text.layout_of_draft(missing, width, masks),
    )
    last = jnp.maximum(missing - 1, 0)[:, None]
    behind = jnp.broadcast_to(width + jnp.arange(masks), (batch, masks))
    places = jnp.concatenate([last, behind], 1)[..., None]
    hidden = jnp.take_along_axis(fed.hidden, places, 1)
    logits = _vocabulary.spread(network.ids, network.logits(params, hidden), vocab_size)
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    cache = network.commit(kept.cache, slots, missing, path)
    kept = kept.replace(cache=cache, pending=context.pending)
    return Begun(logits[:, 0], kept, ready=cache.length > 0, reads=logits)


def _step_parallel(
    params: ModelParams, logits: jax.Array, nodes: Nodes, block: Any
) -> tuple[jax.Array, jax.Array]:
    """``Stepper.step``: the logits f[B,K,V] of all depths were computed before the draft."""
    return logits[:, nodes.depth][:, None], nodes.tokens


def _step(
    network: Network,
    vocab_size: int,
    params: ModelParams,
    kept: Kept,
    nodes: Nodes,
    block: Memory | None,
) -> tuple[jax.Array, Memory]:
    """``Stepper.step``: a node reads its token and the network's output at its parent."""
    own, tokens, size = None, nodes.tokens, nodes.tokens.shape[1]
    above = jnp.broadcast_to(kept.pending[:, None], tokens.shape)
    feature = jnp.broadcast_to(kept.recycled[:, None], (len(tokens), size, network.width))
    if block is not None:
        # A choice, not a product: an output that is not finite reaches only its own children.
        inside, own = jnp.asarray(nodes.parents) >= 0, block.slots
        parent: Memory = _growth.at(block, nodes.parents)
        above = jnp.where(inside, parent.tokens, above)
        feature = jnp.where(inside[..., None], parent.feature, feature)
    read = tokens if network.shift else above
    fed, slots = network.apply(params, read, feature, kept.cache, nodes.layout, own)
    logits = _vocabulary.spread(network.ids, network.logits(params, fed.hidden), vocab_size)
    return logits, Memory(tokens, slots, fed.feature)


def _commit(
    network: Network,
    params: ModelParams,
    kept: Kept,
    drafted: None,
    verdict: Verdict,
    target_out: Output,
) -> Kept:
    """Keeps the target's features of the pending token and the accepted nodes."""
    fed = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    inside = jnp.arange(fed.shape[1]) < verdict.count[:, None]
    hidden, taps = tree.take((target_out.hidden, target_out.taps), fed, inside)
    features = network.read(params, Output(target_out.logits, hidden, taps))
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))
