"""PARD along a text: its loss, and which drafts would have been accepted.

``heads/_masked_text`` has what the masks see and predict.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import tree
from specjax.bound import Bound
from specjax.drafters import _foresee
from specjax.drafters._growth import Plan
from specjax.drafters.heads import _masked_text
from specjax.drafters.heads._masked_text import Read, Reader
from specjax.models import lm
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, ModelParams, Training


def training(target: LM, model: LM, mask_id: int, plan: Plan) -> Training:
    """The training part of a drafter that grows its drafts as ``plan`` describes."""
    reader, depth = reader_of(target, model, mask_id), plan.growth.depth
    texts = Bound(_masked_text.along, reader)
    return Training(
        loss=Bound(_masked_text.loss, reader, depth),
        foresee=_foresee.of_plan(texts, plan),
        ranks=Bound(_foresee.ranks_along, texts, depth),
    )


def reader_of(target: LM, model: LM, mask_id: int) -> Reader:
    """The draft model reads tokens, and predicts the next one at each."""
    text = Bound(_read, target, model)
    return Reader(text, Bound(_masked, model, mask_id), ahead=1)


def _read(target: LM, model: LM, params: ModelParams, batch: Batch) -> Read:
    text = batch.tokens[:, :-1]
    rows, size = text.shape
    segments = None if batch.segments is None else batch.segments[:, :-1]
    teacher = lm.forward(target, params.target, text, segments).logits
    layout = tree.chain_layout(rows, size) if segments is None else tree.segments(segments)
    out, block = model.apply(params.draft, text, model.init_cache(rows, 0), layout)
    return Read(out.logits, layout, block, teacher)


def _masked(model: LM, mask_id: int, params: ModelParams, read: Read, layout: Layout) -> Array:
    rows, count = layout.visible.shape[:2]
    tokens, cache = jnp.full((rows, count), mask_id, jnp.int32), model.init_cache(rows, 0)
    return model.apply(params.draft, tokens, cache, layout, read.block)[0].logits
