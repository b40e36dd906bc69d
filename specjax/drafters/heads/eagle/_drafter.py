"""The drafter of a ``Network``: feature autoregression with the token one step ahead.

EAGLE-1 (Li et al. 2024, 2401.15077, section 4). Slot t of the draft cache has the token t + 1 and
the target's feature of token t, and predicts token t + 2. So when a draft is grown, the cache has
one slot less than the text has tokens, and its newest slot predicts the children of the pending
token. A draft node is the next slot, with the network's own output at its parent in the place of
the feature.

After a verdict the drafter stores the target's features of the pending token and the accepted
nodes; the next round begins by feeding these slots. So the cache is written once in a round, and
holds nothing that was computed from the network's own outputs or for a rejected node.

In a network of several modules in sequence, module k > 0 reads at slot t the output of module k - 1
at slot t and token t + k + 1, and predicts token t + k + 2; its attention reads its own slots up to
t (DeepSeek-V3, 2412.19437, section 2.2). Each module has a cache of its own, which holds the slots
of the committed text: one slot less than that of the module before. The newest output of the module
before is not in it yet, because the token of its slot is not known.

Modules are numbered from 0. A draft node of depth d (1: a child of the pending token) is in slot t
of module d, in slot t - 1 of module d + 1, and so on, where t is the newest slot of module 0. Its
children are predicted by module d, or by the last one, which reads its own output from there on.
The modules after d compute the node too: they attend to it when they predict deeper nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from specjax import cache as kv
from specjax import tree
from specjax.bound import Bound
from specjax.cache import KVBlock, KVCache
from specjax.drafters import growth
from specjax.drafters.files import Given
from specjax.drafters.growth import Begun, Nodes, Plan, Stepper
from specjax.drafters.growth.plans import DYNAMIC, Method
from specjax.drafters.heads import _masked_text, _prefix
from specjax.drafters.heads.eagle._network import Network
from specjax.drafters.shared_keys import NetworkKeys
from specjax.models.layers import at_least
from specjax.topology import shapes
from specjax.topology.shapes import Topology
from specjax.types import LM, Array, Context, Drafter, ModelParams, Output, Training, Verdict


class LaterModule(struct.PyTreeNode):
    """What a module after the first keeps from round to round."""

    # The slots of the committed text that were fed, with the outputs of the module before.
    cache: KVCache
    # [B,D] the output of the module before at its newest slot, which is the next one of this one.
    before: Array


class Kept(struct.PyTreeNode):
    """What the stepper keeps from round to round."""

    # The slots of the committed text that were fed, all of them with the target's features.
    cache: KVCache
    # [B,M+1,D] the target's features of the slots that follow those of the cache, as the network
    # reads them.
    features: Array
    # [B,D] the network's output at the newest slot of the cache: the children of the pending token
    # read it.
    recycled: Array
    pending: Array  # i32[B] the pending token, while a draft grows
    # What the modules after the first keep, for networks that have several.
    more: tuple[LaterModule, ...] = ()


class Memory(struct.PyTreeNode):
    """Tokens, keys, values and outputs of the nodes that are fed: their children read them."""

    tokens: Array  # i32[B,P]
    slots: KVBlock
    feature: Array  # [B,P,D] the network's output


class ComputedNodes(struct.PyTreeNode):
    """Keys, values and outputs that the modules after the first computed for nodes."""

    # Keys and values of each module after the first; zeros where it did not compute the node.
    slots: tuple[KVBlock, ...]
    outputs: Array  # [B,P,n-1,D] the outputs of these modules


def build(
    target: LM,
    network: Network,
    keys: NetworkKeys,
    given: Given,
    training: Callable[[Plan], Training],
    shape: Topology | str = DYNAMIC,
) -> Drafter:
    """The drafter of a network; ``shape`` is that of a draft without keys.

    For a parallel network the default is a chain of all tokens of a pass, each drawn from its own
    probabilities. ``training`` makes the training part for drafts of a plan. L1 with a rule that
    takes its siblings. Raises UserError for keys that do not fit.
    """
    parallel, modules = network.shape.parallel, network.shape.modules
    size = target.vocab_size if network.ids is None else len(network.ids)
    method = Method(network.name, shape, "top_k", size, accuracy=given.config.get("accuracy"))
    if parallel:
        chain = shapes.chain(parallel)
        method = method._replace(tree=chain, siblings="iid", heads=parallel, independent=True)
    plan = growth.read(method, keys)
    depth = plan.growth.depth
    begin, step = Bound(_begin, network), Bound(_step if modules == 1 else _step_modules, network)
    if parallel:
        begin, step = Bound(_begin_parallel, network, depth), growth.step_at_depth
    stepper = Stepper(
        init=Bound(_init, network, depth),
        begin=begin,
        step=step,
        commit=Bound(_commit, network),
        looped=modules == 1,
        independent=bool(parallel),
    )
    own, part = given.init_params(network.name), training(plan)
    drafter = growth.build(network.name, stepper, plan, own, training=part, features=True)
    return drafter._replace(taps=network.shape.taps)


def _init(
    network: Network, longest: int, params: ModelParams, context: Context, out: Output, slots: int
) -> Kept:
    """Feeds all slots of the prompt but the last one, whose feature is kept.

    The prompt's last slot has its pending token and the feature of the token before that.
    """
    batch, size = out.hidden.shape[:2]
    cache, count = network.init_cache(batch, slots), context.length - 1
    outputs, fed = None, jnp.maximum(count - 1, 0)
    if size:
        features = network.read(params, out)
        inputs = context.tokens[:, network.shape.shift : network.shape.shift + size], features
        feed = Bound(_feed, network, params, 0)
        outputs, cache = _prefix.feed(feed, kv.commit, inputs, fed, cache)
        # A prompt of one token has no slot.
        first = tree.take(features, fed[:, None], (count > 0)[:, None])
    else:
        first = jnp.zeros((batch, 1, network.width), at_least(network.dtype, params.draft))
    features = jnp.pad(first, ((0, 0), (0, longest), (0, 0)))
    recycled = jnp.zeros_like(features[:, 0])
    more = _init_modules(network, params, context, outputs, recycled, fed, slots)
    return Kept(cache, features, recycled, context.pending, more)


def _feed(
    network: Network, params: ModelParams, module: int, inputs: tuple[Array, Array], cache: KVCache
) -> tuple[Array | None, KVBlock]:
    tokens, features = inputs
    fed, block = network.apply(params, tokens, features, cache, module=module)
    return (None if network.shape.modules == 1 else fed.feature), block


def _begin(network: Network, params: ModelParams, context: Context, kept: Kept) -> Begun:
    """Feeds and commits the slots that the cache lacks; the last of them predicts the first nodes.

    In a finished row the next round feeds the slots of the tokens that were accepted last. Later
    rounds commit 0 slots and keep ``recycled``. The draft of a finished row is not used. A row
    whose text has one token cannot draft.
    """
    cache, width = kept.cache, kept.features.shape[1]
    lacks = context.tokens, context.length - 1, cache.length, width
    missing, tokens = growth.lacking(*lacks, network.shape.shift)
    fed, slots = network.apply(params, tokens, kept.features, cache)
    last = jnp.maximum(missing - 1, 0)[:, None, None]
    hidden, feature = (jnp.take_along_axis(x, last, 1) for x in fed)
    logits = network.spread_logits(params, hidden)
    more = _begin_modules(network, params, context, kept, fed.feature, missing)
    cache = kv.commit(cache, slots, missing)
    recycled = jnp.where((missing > 0)[:, None], feature[:, 0], kept.recycled)
    kept = Kept(cache, kept.features, recycled, context.pending, more)
    # Module k has no slot for the pending token before the text has k + 1 tokens.
    ready = (cache.length > 0) & (context.length >= network.shape.modules)
    return Begun(logits[:, 0], kept, None, ready)


def _begin_parallel(
    network: Network, depth: int, params: ModelParams, context: Context, kept: Kept
) -> Begun:
    """As ``_begin``, with masks behind the slots: the logits of all depths from one pass.

    Only the slots of the text are committed.
    """
    (batch, width, size), masks = kept.features.shape, depth - 1
    lacks = context.tokens, context.length - 1, kept.cache.length, width
    missing, tokens = growth.lacking(*lacks, network.shape.shift)
    ids = jnp.full((batch, masks), network.shape.mask_id, tokens.dtype)
    unknown = network.masked(params).astype(kept.features.dtype)
    unknown = jnp.broadcast_to(unknown, (batch, masks, size))
    tokens = jnp.concatenate([tokens, ids], 1)
    features = jnp.concatenate([kept.features, unknown], 1)
    layout = _masked_text.layout_of_draft(missing, width, masks)
    fed, slots = network.apply(params, tokens, features, kept.cache, layout)
    logits = network.spread_logits(params, _masked_text.of_draft(fed.hidden, missing, width))
    path = jnp.broadcast_to(jnp.arange(width), (batch, width))
    cache = kv.commit(kept.cache, slots, missing, path)
    kept = kept.replace(cache=cache, pending=context.pending)
    return Begun(logits[:, 0], kept, ready=cache.length > 0, reads=logits)


def _step(
    network: Network, params: ModelParams, kept: Kept, nodes: Nodes, block: Memory | None
) -> tuple[Array, Memory]:
    """``Stepper.step``: a node reads its token and the network's output at its parent."""
    own, tokens, size = None, nodes.tokens, nodes.tokens.shape[1]
    above = jnp.broadcast_to(kept.pending[:, None], tokens.shape)
    feature = jnp.broadcast_to(kept.recycled[:, None], (len(tokens), size, network.width))
    if block is not None:
        # ``where``, not a product with a mask: 0 * NaN is NaN and would reach other nodes.
        inside, own = jnp.asarray(nodes.parents) >= 0, block.slots
        parent: Memory = growth.at(block, nodes.parents)
        above = jnp.where(inside, parent.tokens, above)
        feature = jnp.where(inside[..., None], parent.feature, feature)
    read = tokens if network.shape.shift else above
    fed, slots = network.apply(params, read, feature, kept.cache, nodes.layout, own)
    return network.spread_logits(params, fed.hidden), Memory(tokens, slots, fed.feature)


def _commit(
    network: Network, params: ModelParams, kept: Kept, drafted: None, verdict: Verdict, out: Output
) -> Kept:
    """Keeps the target's features of the pending token and the accepted nodes."""
    hidden, taps = growth.fed_to_target((out.hidden, out.taps), verdict)
    features = network.read(params, Output(out.logits, hidden, taps))
    alive = (verdict.count > 0)[:, None, None]
    return kept.replace(features=jnp.where(alive, features, kept.features))


def _init_modules(
    network: Network,
    params: ModelParams,
    context: Context,
    outputs: Array | None,
    like: Array,
    count: Array,
    slots: int,
) -> tuple[LaterModule, ...]:
    """Feeds the prompt to the modules after the first.

    ``outputs`` [B,T,D] are those of the first module, of which count[b] slots were fed; None: no
    slot. ``like`` [B,D] are zeros.
    """
    result, batch = [], len(like)
    for module in range(1, network.shape.modules):
        cache, before = network.init_cache(batch, slots), jnp.zeros_like(like)
        if outputs is not None:
            size = outputs.shape[1]
            newest = jnp.take_along_axis(outputs, jnp.maximum(count - 1, 0)[:, None, None], 1)
            before = jnp.where((count > 0)[:, None], newest[:, 0], before)
            places = jnp.broadcast_to(jnp.arange(size), (batch, size)) + module
            places = places + network.shape.shift
            inputs = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip"), outputs
            count = jnp.maximum(count - 1, 0)
            feed = Bound(_feed, network, params, module)
            outputs, cache = _prefix.feed(feed, kv.commit, inputs, count, cache)
        result.append(LaterModule(cache, before))
    return tuple(result)


def _begin_modules(
    network: Network,
    params: ModelParams,
    context: Context,
    kept: Kept,
    fresh: Array,
    missing: Array,
) -> tuple[LaterModule, ...]:
    """Feeds and commits the slots that the caches of the modules after the first lack.

    The first module had the slots of ``kept.cache``, and missing[b] were fed, with the outputs
    ``fresh`` [B,W,D].
    """
    result, length, width = [], kept.cache.length, fresh.shape[1]
    for module, own in enumerate(kept.more, 1):
        # Entry i is the output of the module before at its slot length + i - 1.
        outputs = jnp.concatenate([own.before[:, None], fresh], 1)
        newest = jnp.take_along_axis(outputs, missing[:, None, None], 1)[:, 0]
        start = (own.cache.length - length + 1)[:, None] + jnp.arange(width)
        features = jnp.take_along_axis(outputs, start[..., None], 1, mode="clip")
        length, ahead = own.cache.length, module + network.shape.shift
        lacks = context.tokens, context.length - 1 - module, length, width
        missing, tokens = growth.lacking(*lacks, ahead)
        fed, slots = network.apply(params, tokens, features, own.cache, module=module)
        fresh = fed.feature
        result.append(LaterModule(kv.commit(own.cache, slots, missing), newest))
    return tuple(result)


def _step_modules(
    network: Network, params: ModelParams, kept: Kept, nodes: Nodes, block: ComputedNodes | None
) -> tuple[Array, ComputedNodes]:
    """``Stepper.step`` of n > 1 modules; the depth is static.

    The modules from min(depth, n - 1) on compute the nodes, and the first of them predicts.
    """
    depth, count, computed = int(nodes.depth), network.shape.modules, []
    predicts = min(depth, count - 1)
    above = None if block is None else growth.at(block.outputs, nodes.parents)
    for module in range(predicts, count):
        own = kept.more[module - 1]
        if above is None:
            feature = jnp.broadcast_to(own.before[:, None], (*nodes.tokens.shape, network.width))
        else:
            # The output of the module before, or of the last module itself if it continues.
            feature = above[:, :, (module if depth >= count else module - 1) - 1]
        fed_before = None if block is None else block.slots[module - 1]
        given = params, nodes.tokens, feature, own.cache, nodes.layout, fed_before
        computed.append(network.apply(*given, module=module))
    logits = network.spread_logits(params, computed[0][0].hidden)
    pairs = [(slots, fed.feature) for fed, slots in computed]
    # What a module did not compute is zeros.
    zeros = jax.tree.map(jnp.zeros_like, pairs[0])
    slots, outputs = zip(*[zeros] * (predicts - 1), *pairs, strict=True)
    return logits, ComputedNodes(slots, jnp.stack(outputs, 2))
