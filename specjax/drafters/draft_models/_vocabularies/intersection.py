"""Drafts with the tokens that both vocabularies have: TLI, token-level intersection. L1.

Timor et al. 2025 (2502.05202). The draft model's logits of tokens that the target does not have are
left out, and the others become probabilities, so a draft token is drawn from the renormalised
distribution, which is that of ``Draft.probs``. The target may emit any token; the draft model reads
one that it does not have as several of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.bound import Bound
from specjax.drafters import _foresee, growth, pairs
from specjax.drafters.draft_models import _small_model
from specjax.drafters.draft_models._vocabularies import draft_text
from specjax.drafters.draft_models._vocabularies.draft_text import Kept, Reader
from specjax.drafters.draft_models._vocabularies.maps import Maps
from specjax.drafters.growth import Drafted, Nodes, Plan, Stepper
from specjax.types import LM, Array, Context, Drafter, ModelParams, Output, Params, Verdict


def build(target: LM, model: LM, params: Params, maps: Maps, plan: Plan) -> Drafter:
    """The drafter of a draft model with another vocabulary."""
    model = pairs.with_logits(model, target.vocab_size, Bound(shared, maps))
    # The pending token and the last accepted one, which is one draft token. Of a longer pending
    # token the first draft tokens are read by a pass of their own.
    behind = 1 + min(maps.pieces.shape[1], 2 * maps.ratio)
    reader = Reader(model, maps, plan.growth.nodes, behind)
    begin, step, commit = (Bound(each, reader) for each in (draft_text.begin, _step, _commit))
    stepper = Stepper(begin, step, commit=commit, commits_block=True)
    # Where a text can be too long for the room, the probs depend on the room.
    along = None if reader.bounded else Bound(_probs, reader)
    # The first draft tokens of a long token of the target are read by a pass of their own.
    one_pass = 1 + maps.pieces.shape[1] <= behind
    return draft_text.build(reader, stepper, plan, params, one_pass, along)


def shared(maps: Maps, logits: Array) -> Array:
    """Logits f[...,W] of the draft's tokens -> f[...,V] of the target's; -inf: it has no such."""
    known = jnp.take(logits, jnp.maximum(maps.draft_of, 0), axis=-1)
    return jnp.where(jnp.asarray(maps.draft_of) >= 0, known, -jnp.inf)


def _in_draft(maps: Maps, tokens: Array) -> Array:
    """i32: the draft token of each token of the target, -1: there is none."""
    return jnp.take(jnp.asarray(maps.draft_of), tokens, mode="clip")


def _step(
    reader: Reader, params: ModelParams, kept: Kept, nodes: Nodes, block: Any
) -> tuple[Array, Any]:
    """``Stepper.step``: the memory of a node is its part of the model's block."""
    # Where fewer tokens are possible than a node has children, one may have probability 0.
    tokens = jnp.maximum(_in_draft(reader.maps, nodes.tokens), 0)
    given = params.draft, tokens, kept.cache, nodes.layout, block
    return growth.logits_and_block(reader.model, *given)


def _commit(
    reader: Reader, params: ModelParams, kept: Kept, drafted: Drafted, verdict: Verdict, out: Output
) -> Kept:
    """The accepted nodes that were fed, up to one that the draft model does not have."""
    known = jnp.cumprod(_in_draft(reader.maps, verdict.tokens) >= 0, 1).sum(1)
    drafted = drafted.replace(count=jnp.minimum(drafted.count, known).astype(jnp.int32))
    cache = _small_model.commit(reader.model, params, kept.cache, drafted, verdict, out)
    return kept.replace(cache=cache)


def _probs(reader: Reader, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    logits = draft_text.logits_along(reader, params.draft, context.tokens)
    return _foresee.probs_along(logits, context)
