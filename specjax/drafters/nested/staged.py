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

from specjax import accept, declare, sampling
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters import _foresee
from specjax.drafters.draft_models import _small_model
from specjax.drafters.growth.siblings import without_replacement
from specjax.drafters.nested import _row, _stages, _system
from specjax.drafters.nested._stages import Stages
from specjax.drafters.nested._system import System
from specjax.drafters.shared_keys import model_params
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
    Rare,
    Training,
    Verdict,
)

REFERENCE = "spector2023accelerating"

# Where the model's parameters are.
MODEL = ("model",)


class _Settings(NamedTuple):
    """The static settings; see ``make``."""

    system: System
    width: int

    @property
    def parents(self) -> list[int]:
        """[N]: the chain has the first numbers, then come the siblings of each depth."""
        chain = range(-1, self.system.gamma - 1)
        return [*chain, *(above for above in chain for _ in range(self.width - 1))]


class Keys(declare.Keys):
    """The keys of ``staged``."""

    model: LM | str | os.PathLike = key(
        help="the small model: an ``LM``, or any model that ``hf.load`` takes"
    )
    drafters: Stages | None = key(
        None,
        "what drafts for it, as label -> its keys, or a list with a ready-made ``Drafter``. None:"
        " ``prompt_lookup``.",
    )
    gamma: int = key(4, "depth of the tree", least=1)
    width: int = key(2, "nodes at each depth; 1: a chain", least=1)
    params: Params = model_params("small")

    def check(self) -> None:
        if self.drafters is not None:
            _stages.check("staged", self.drafters, "one drafter for its model and got {got}")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts a tree with a small model, which is drafted for by a lookup.

    Raises:
        UserError: gamma or width below 1, more nodes at a depth than tokens, another vocabulary
            than the target's, a drafter that cannot be inside.
    """
    lm, own = _small_model.load(target, keys.model, keys.params)
    lookup = _stages.inside("staged", target, keys.drafters)
    rule = accept.load(accept.default_rule(lookup))
    reader = _system.own_cache(lm, Bound(_stages.params_at, MODEL))
    system = System(reader, _stages.with_params(lookup, "drafter"), rule, keys.gamma, lag=1)
    settings = _Settings(system, keys.width)
    shapes.check(settings.parents, target.vocab_size)
    both = Bound(_small_model.both, target, lm)
    forecast = _stages.at(MODEL, Bound(_foresee.chain_of_text, both, keys.gamma))
    drafter = Drafter(
        init_params=Bound(_init_params, own, lookup),
        init=Bound(_system.init, system),
        propose=Bound(_propose, settings),
        update=Bound(_update, system),
        nodes=keys.gamma * keys.width,
        name="staged",
        siblings=CHAIN if keys.width == 1 else WITHOUT_REPLACEMENT,
        depth=keys.gamma,
        constant_cost=False,
        whole=True,
        history=lookup.history,
        rare=Rare(check_rows=lookup.rare.check_rows),
        gaps=False,
        probs=_stages.at(MODEL, Bound(_small_model.probs, lm)),
        training=Training(foresee=forecast) if keys.width == 1 else None,
    )
    return _row.checked(drafter, lm)


def _init_params(own: Params, lookup: Drafter, key: Any) -> Params:
    """``Drafter.init_params``. Raises UserError if the model's parameters are not given."""
    own = _small_model.init_params("staged", own, key)
    return {"model": own, "drafter": lookup.init_params(key)}


def _propose(
    settings: _Settings, params: ModelParams, keys: RowKeys, context: Context, state: _system.State
) -> tuple[Draft, _system.State]:
    drawn, logits, state = _system.draw(settings.system, params, keys.inner(0), context, state)
    if settings.width == 1:
        return drawn, state
    tokens, exist, probs = _siblings(settings, keys, context, drawn, logits)
    assert drawn.probs is not None
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
        joined(drawn.probs, probs),
        finite=drawn.finite,
        depth=settings.system.gamma,
    )
    return draft, state


def _siblings(
    settings: _Settings, keys: RowKeys, context: Context, drawn: Draft, logits: Array
) -> tuple[Array, Array, Array]:
    """The other nodes of each depth: tokens [B,gamma,width-1], which of them exist, their probs.

    Drawn without replacement from the probabilities of the chain's token, without that token. In
    greedy rows they are the most probable tokens after the best one.
    """
    others, vocab, probs = settings.width - 1, logits.shape[-1], drawn.probs
    assert probs is not None

    def best() -> Array:
        return sampling.top(logits, settings.width)[1][..., 1:]

    def sampled() -> tuple[Array, Array, Array]:
        weights = jnp.where(jnp.arange(vocab) == drawn.tokens[..., None], 0, probs)
        tokens, exist = keys.draw_distinct(DRAFT, weights, others, jnp.arange(probs.shape[1]))
        order = jnp.concatenate([drawn.tokens[..., None], tokens], -1)
        greedy = context.sampling.greedy[:, None, None]
        each = without_replacement(probs, order)[:, :, 1:]
        return jnp.where(greedy, best(), tokens), greedy | exist, each

    def greedy() -> tuple[Array, Array, Array]:
        tokens = best()
        zeros = jnp.zeros((*tokens.shape, vocab), probs.dtype)
        return tokens, jnp.ones(tokens.shape, bool), zeros

    return jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)


def _update(
    system: System, params: ModelParams, state: Any, draft: Draft, verdict: Verdict, out: Output
) -> _system.State:
    on_chain = (verdict.path >= 0) & (verdict.path < system.gamma)
    return _system.settle(system, params, state, on_chain.sum(-1, dtype=jnp.int32), verdict, out)
