"""P-EAGLE along a text: its loss, and which drafts would have been accepted.

Slot t of the text has token t + 1 and the feature of token t, and predicts token t + 2; masks
follow it as in ``_masked_text``.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.bound import Bound
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _columns, _masked_text, _text
from specjax.drafters.heads._masked_text import Read, Reader
from specjax.drafters.heads._network import Network
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Training

# Conditional drop of deeper masks (2602.01469), and the target's probs for labels.
DEFAULTS = {"ce": 0.0, "teacher": 1.0, "keep": 0.8, "floor": 0.2}


def training(network: Network, target: LM, plan: Plan) -> Training:
    """The training part of a drafter that grows this network in the way of ``plan``."""
    assert network.parallel is not None
    reader = reader_of(network, target.with_taps(network.taps))
    texts = Bound(_masked_text.along, reader)
    return Training(
        loss=Bound(_masked_text.loss, reader, network.parallel.tokens, **DEFAULTS),
        start=network.start,
        foresee=_text.foresee(texts, plan),
        ranks=Bound(_text.ranks, texts, plan.growth.depth),
        facts=network.facts,
    )


def reader_of(network: Network, target: LM) -> Reader:
    """The network reads slots, and predicts two tokens ahead of the feature of each."""
    text = Bound(_read, network, target)
    masked = Bound(_masked, network)
    return Reader(text, masked, ahead=2, ids=network.ids, target=target)


def _read(network: Network, target: LM, params: ModelParams, batch: Batch) -> Read:
    out, text = _text.output(target, params.target, batch), _columns.text(batch)
    fed, block = _columns.step(network, text, 0, params, network.read(params, out), ())
    return Read(network.logits(params, fed.hidden), text.layout, block, out.logits)


def _masked(network: Network, params: ModelParams, read: Read, layout: Layout) -> Array:
    assert network.parallel is not None and network.masked is not None
    rows, count = layout.visible.shape[:2]
    tokens = jnp.full((rows, count), network.parallel.mask_id, jnp.int32)
    features = jnp.broadcast_to(network.masked(params), (rows, count, network.width))
    cache = network.init_cache(rows, 0)
    fed, _ = network.apply(params, tokens, features, cache, layout, read.block)
    return network.logits(params, fed.hidden)
