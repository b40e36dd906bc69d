"""Staged speculation: a lookup drafts for a small model, which drafts a tree for the target. L1.

Spector and Ré 2023 (2308.04623). The small model writes a chain in rounds of speculative decoding
with the lookup as its drafter. These tokens are exact samples of the small model, one after
another; at each depth, further tokens drawn from the same probabilities without replacement are
siblings of the chain's token, and leaves of the tree. ``cascade`` has several models and chains.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import accept, drafters, sampling
from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters._growth.siblings import without_replacement
from specjax.drafters.draft_models import _small_model
from specjax.drafters.nested import _inside, _row, _stages, _system
from specjax.drafters.nested._stages import Stages
from specjax.drafters.nested._system import Drawn, System
from specjax.errors import UserError
from specjax.prompt import check_window
from specjax.rng import DRAFT, RowKeys
from specjax.topology import shapes
from specjax.types import (
    CHAIN,
    LM,
    WITHOUT_REPLACEMENT,
    Array,
    Context,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)

REFERENCE = "spector2023accelerating"


class _Settings(NamedTuple):
    """The static settings; see ``make``."""

    system: System
    width: int

    @property
    def gamma(self) -> int:
        return self.system.gamma

    @property
    def parents(self) -> list[int]:
        """[N]: the chain has the first numbers, then come the siblings of each depth."""
        chain = range(-1, self.gamma - 1)
        return [*chain, *(above for above in chain for _ in range(self.width - 1))]


def check(drafters: Stages | None = None, **_: Any) -> None:
    """Raises UserError unless the inner drafter has a known name and keys it takes."""
    if drafters is not None:
        _stages.check("staged", drafters)
        if len(drafters) != 1:
            raise UserError(f"staged takes one drafter for its model and got {len(drafters)}")


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    drafters: Stages | None = None,
    gamma: int = 4,
    width: int = 2,
    params: Params = None,
) -> Drafter:
    """Drafts a tree with a small model, which is drafted for by a lookup.

    Args:
        target: the model to be accelerated.
        model: the small model: an ``LM``, or any model that ``hf.load`` takes.
        drafters: what drafts for it, as label -> its keys, or a list with a ready-made ``Drafter``.
            None: ``prompt_lookup``.
        gamma: depth of the tree.
        width: nodes at each depth; 1: a chain.
        params: the small model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: gamma or width below 1, more nodes at a depth than tokens, another vocabulary
            than the target's, a drafter that cannot be inside.
    """
    check(drafters)
    whole("gamma", gamma, 1)
    whole("width", width, 1)
    lm, own = _small_model.load(target, model, params)
    lookup = _lookup(target, drafters)
    rule = accept.load(accept.default_rule(lookup))
    reader = _system.own_cache(lm, _model_params)
    system = System(reader, _row.with_params(lookup, "drafter"), rule, gamma, _below, lag=1)
    settings = _Settings(system, width)
    shapes.check(settings.parents, target.vocab_size)
    forecast = Bound(_of_model, _small_model.foresee, target, lm, gamma)
    drafter = Drafter(
        init_params=Bound(_init_params, own, lookup),
        init=Bound(_init, settings, lm),
        propose=Bound(_propose, settings),
        update=Bound(_update, settings),
        nodes=gamma * width,
        name="staged",
        siblings=CHAIN if width == 1 else WITHOUT_REPLACEMENT,
        depth=gamma,
        constant_cost=False,
        whole=True,
        history=lookup.history,
        check_rows=lookup.check_rows,
        gaps=False,
        probs=Bound(_probs, lm),
        training=Training(foresee=forecast) if width == 1 else None,
    )
    check_window(lm, drafter)
    return drafter


def _lookup(target: LM, stages: Stages | None) -> Drafter:
    """What drafts for the model. Raises UserError for a drafter that cannot be inside."""
    if stages is None:
        stages = [drafters.make("prompt_lookup", target)]
    [lookup] = _stages.build(target, stages, gaps=True)
    return _inside.allowed("staged", lookup)


def _model_params(params: ModelParams) -> Params:
    return params.draft["model"]


def _below(params: ModelParams) -> ModelParams:
    return ModelParams(params.draft["model"], params.draft)


def _of_model(function: Any, target: LM, model: LM, depth: int, params: ModelParams, *rest: Any):
    """A forecast of ``_small_model``, for the small model."""
    own = params._replace(draft=params.draft["model"])
    return function(target, model, depth, own, *rest)


def _probs(model: LM, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    return _small_model.probs(model, params._replace(draft=params.draft["model"]), context)


def _init_params(own: Params, lookup: Drafter, key: Any) -> Params:
    """``Drafter.init_params``. Raises UserError if the model's parameters are not given."""
    if own is None:
        raise UserError("staged was made from an LM without params; give params=, or a directory")
    return {"model": own, "drafter": lookup.init_params(key)}


def _init(
    settings: _Settings,
    model: LM,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> _system.State:
    _small_model.check_positions(model, slots - settings.gamma * settings.width)
    return _system.init(settings.system, params, context, target_out, slots)


def _propose(
    settings: _Settings,
    params: ModelParams,
    keys: RowKeys,
    context: Context,
    state: _system.State,
) -> tuple[Draft, _system.State]:
    drawn, state = _system.draw(settings.system, params, keys.inner(0), context, state)
    probs = _system.probs_of(context, drawn)
    if settings.width == 1:
        return Draft(drawn.tokens, drawn.valid, probs=probs, finite=drawn.finite), state
    tokens, exist, all_probs = _siblings(settings, keys, context, drawn, probs)
    batch = context.length.shape[0]
    parents = jnp.asarray(settings.parents, jnp.int32)

    def joined(chain: Array, others: Array) -> Array:
        """[B,gamma,...] and [B,gamma,width-1,...] -> [B,N,...]."""
        flat = others.reshape(batch, -1, *others.shape[3:])
        return jnp.concatenate([chain, flat], 1)

    draft = Draft(
        joined(drawn.tokens, tokens),
        joined(drawn.valid, exist & drawn.valid[..., None]),
        jnp.broadcast_to(parents, (batch, len(parents))),
        joined(probs, all_probs),
        finite=drawn.finite,
        depth=settings.gamma,
    )
    return draft, state


def _siblings(
    settings: _Settings, keys: RowKeys, context: Context, drawn: Drawn, probs: Array
) -> tuple[Array, Array, Array]:
    """The other nodes of each depth: tokens [B,gamma,width-1], which of them exist, their probs.

    Drawn without replacement from the probabilities of the chain's token, without that token. In
    greedy rows they are the most probable tokens after the best one.
    """
    others, vocab = settings.width - 1, probs.shape[-1]

    def best() -> Array:
        return sampling.top(drawn.logits, settings.width)[1][..., 1:]

    def sampled() -> tuple[Array, Array, Array]:
        weights = jnp.where(jnp.arange(vocab) == drawn.tokens[..., None], 0, probs)
        tokens, exist = keys.draw_distinct(DRAFT, weights, others, jnp.arange(settings.gamma))
        order = jnp.concatenate([drawn.tokens[..., None], tokens], -1)
        greedy = context.sampling.greedy[:, None, None]
        each = without_replacement(probs, order)[:, :, 1:]
        return jnp.where(greedy, best(), tokens), greedy | exist, each

    def greedy() -> tuple[Array, Array, Array]:
        tokens = best()
        return (
            tokens,
            jnp.ones(tokens.shape, bool),
            jnp.zeros((*tokens.shape, vocab), probs.dtype),
        )

    return jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)


def _update(
    settings: _Settings,
    params: ModelParams,
    state: _system.State,
    draft: Draft,
    verdict: Verdict,
    target_out: Output,
) -> _system.State:
    on_chain = (verdict.path >= 0) & (verdict.path < settings.gamma)
    accepted = on_chain.sum(-1, dtype=jnp.int32)
    return _system.settle(settings.system, params, state, accepted, verdict, target_out)
