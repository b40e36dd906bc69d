"""The modules after the first, in the drafter of a network of several modules in sequence.

Module k, from 1, reads at slot t the output of module k - 1 at slot t and token t + k + 1, and
predicts token t + k + 2; its attention reads its own slots up to t (DeepSeek-V3, 2412.19437,
section 2.2). Each module has a cache of its own, which holds the slots of the committed text: one
slot less than that of the module before, whose newest output waits for its token.

A draft node of depth d, from 1, is the token of slot t of module 1, of slot t - 1 of module 2, and
so on, where t is the newest slot of the first module. Its children are predicted by module d, or by
the last one, which reads its own output from there on. The modules after d compute the node too:
they attend to it when they predict deeper nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import struct

from specjax.cache import KVBlock, KVCache
from specjax.drafters import _growth
from specjax.drafters._growth import Nodes
from specjax.drafters.heads import _prefix, _vocabulary
from specjax.drafters.heads._network import Network
from specjax.types import Context, ModelParams

if TYPE_CHECKING:
    from specjax.drafters.heads._features import Kept


class Further(struct.PyTreeNode):
    """What a module after the first keeps from round to round."""

    # The slots of the committed text that were fed, with the outputs of the module before.
    cache: KVCache
    # [B,D] the output of the module before at its newest slot, which is the next one of this one.
    before: jax.Array


class ComputedNodes(struct.PyTreeNode):
    """What the children of fed nodes read."""

    # Keys and values of each module after the first; zeros where it did not compute the node.
    slots: tuple[KVBlock, ...]
    outputs: jax.Array  # [B,P,n-1,D] the outputs of these modules


def init(
    network: Network,
    params: ModelParams,
    context: Context,
    outputs: jax.Array | None,
    like: jax.Array,
    count: jax.Array,
    slots: int,
) -> tuple[Further, ...]:
    """Feeds the prompt to the modules after the first.

    ``outputs`` [B,T,D] are those of the first module, of which count[b] slots were fed; None: no
    slot. ``like`` [B,D] are zeros.
    """
    result, batch = [], len(like)
    for module in range(1, network.modules):
        cache, before = network.init_cache(batch, slots), jnp.zeros_like(like)
        if outputs is not None:
            size = outputs.shape[1]
            newest = jnp.take_along_axis(outputs, jnp.maximum(count - 1, 0)[:, None, None], 1)
            before = jnp.where((count > 0)[:, None], newest[:, 0], before)
            places = jnp.broadcast_to(jnp.arange(size), (batch, size)) + module + network.shift
            tokens = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")

            def feed(inputs: Any, cache: KVCache, module: int = module):
                fed, block = network.apply(params, *inputs, cache, module=module)
                return fed.feature, block

            count = jnp.maximum(count - 1, 0)
            inputs = tokens, outputs
            outputs, cache = _prefix.feed(feed, network.commit, inputs, count, cache)
        result.append(Further(cache, before))
    return tuple(result)


def begin(
    network: Network,
    params: ModelParams,
    context: Context,
    cache: KVCache,
    fresh: jax.Array,
    missing: jax.Array,
    more: tuple[Further, ...],
) -> tuple[Further, ...]:
    """Feeds and commits the slots that the caches of the modules after the first lack.

    The first module had the slots of ``cache``, and missing[b] were fed, with the outputs ``fresh``
    [B,W,D].
    """
    result, length, width = [], cache.length, fresh.shape[1]
    for module, own in enumerate(more, 1):
        # Entry i is the output of the module before at its slot length + i - 1.
        outputs = jnp.concatenate([own.before[:, None], fresh], 1)
        newest = jnp.take_along_axis(outputs, missing[:, None, None], 1)[:, 0]
        start = (own.cache.length - length + 1)[:, None] + jnp.arange(width)
        features = jnp.take_along_axis(outputs, start[..., None], 1, mode="clip")
        places = own.cache.length[:, None] + module + network.shift + jnp.arange(width)
        tokens = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")
        fed, slots = network.apply(params, tokens, features, own.cache, module=module)
        length, fresh = own.cache.length, fed.feature
        missing = jnp.clip(context.length - 1 - module - length, 0, width)
        result.append(Further(network.commit(own.cache, slots, missing), newest))
    return tuple(result)


def step(
    network: Network,
    vocab_size: int,
    params: ModelParams,
    kept: Kept,
    nodes: Nodes,
    block: ComputedNodes | None,
) -> tuple[jax.Array, ComputedNodes]:
    """``Stepper.step`` of n > 1 modules; the depth is static.

    The modules from min(depth, n - 1) on compute the nodes, and the first of them predicts.
    """
    depth, count = int(nodes.depth), network.modules
    predicts, parent = min(depth, count - 1), None
    if block is not None:
        parent: ComputedNodes | None = _growth.at(block, nodes.parents)
    slots: list[KVBlock | None] = []
    outputs: list[jax.Array | None] = []
    logits = None
    for module, own in enumerate(kept.more, 1):
        if module < predicts:
            slots.append(None)
            outputs.append(None)
            continue
        if parent is None:
            feature = jnp.broadcast_to(own.before[:, None], (*nodes.tokens.shape, network.width))
        else:
            # The output of the module before, or of the last module itself if it continues.
            feature = parent.outputs[:, :, (module if depth >= count else module - 1) - 1]
        fed_before = None if block is None else block.slots[module - 1]
        fed, new = network.apply(
            params, nodes.tokens, feature, own.cache, nodes.layout, fed_before, module=module
        )
        if module == predicts:
            logits = network.logits(params, fed.hidden)
        slots.append(new)
        outputs.append(fed.feature)
    assert logits is not None and slots[-1] is not None and outputs[-1] is not None
    zeros = jax.tree.map(jnp.zeros_like, (slots[-1], outputs[-1]))
    filled = tuple(zeros[0] if each is None else each for each in slots)
    stacked = jnp.stack([zeros[1] if each is None else each for each in outputs], 2)
    return _vocabulary.spread(network.ids, logits, vocab_size), ComputedNodes(filled, stacked)
