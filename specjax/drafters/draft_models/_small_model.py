"""What drafters with a small language model share: loading it, feeding it, its probabilities.

The draft cache holds the committed text without its newest tokens: the pending token, and tokens
that the last round accepted and this model was never fed (the last draft token, or all of them if
another drafter proposed them). A round begins by committing these. The cache is not written while
the draft grows; ``commit`` appends the accepted nodes that were fed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode, logit_maps, sampling
from specjax.bound import Bound
from specjax.drafters import _foresee, _growth
from specjax.drafters._growth import Begun, Drafted, Fixed, Nodes, Plan, Stepper
from specjax.drafters.draft_models._kinds import check_vocabulary, in_size
from specjax.errors import UserError
from specjax.models.lm import forward
from specjax.prompt import check_window
from specjax.sampling import Sampling
from specjax.types import (
    CHAIN,
    LM,
    Batch,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
    Verdict,
)

# Tokens that the draft cache may lack: the pending one, and the last accepted node if never fed.
BEHIND = 2
# How many tokens are fed at once to a cache that lacks more than that.
CATCH_UP = 16


def load(
    target: LM, model: LM | str | os.PathLike, params: Params, translates: bool = False
) -> tuple[LM, Params]:
    """The draft model and its parameters, from an ``LM`` or a Hugging Face directory.

    Its logits have the size of the target's vocabulary: see ``in_size``. ``translates`` as in
    ``check_vocabulary``.

    Raises UserError for a directory that cannot be loaded, or another vocabulary than the target's.
    """
    model, params = read(model, params)
    check_vocabulary(target, model, translates)
    return in_size(model, target.vocab_size), params


def read(model: LM | str | os.PathLike, params: Params) -> tuple[LM, Params]:
    """The draft model and its parameters. Raises UserError if it cannot be loaded."""
    if isinstance(model, LM):
        return model, params
    check_source(model, params)
    # Imported here: drafters made from an LM need no file formats.
    from specjax.models import hf

    loaded = hf.load(model)
    return loaded.lm, loaded.params


def check_source(model: str | os.PathLike, params: Params) -> None:
    """Raises UserError for a directory with parameters beside it."""
    if params is not None:
        raise UserError(
            f"params are for a model that is an LM, and {model} has its own; leave params out"
        )


def params_of(models: Sequence[Any], params: Sequence[Params] | None) -> list[Params]:
    """The parameters of each model. Raises UserError for another number of them."""
    if params is None:
        return [None] * len(models)
    if len(params) != len(models):
        raise UserError(
            f"there are {len(models)} models and {len(params)} params; give one for each model"
        )
    return list(params)


def build(
    name: str,
    model: LM,
    params: Params,
    plan: Plan,
    *,
    behind: int = BEHIND,
    gaps: bool = False,
    training: Training | None = None,
) -> Drafter:
    """The drafter ``name``, which grows its drafts with this model.

    ``behind``: the largest number of committed tokens that the draft cache may lack when a round
    begins. ``gaps``: it may lack more, because other drafters propose in some rounds. It may also
    lack more after rounds in which a controller let all rows rest.

    Raises UserError for drafts longer than a sliding window of the model.
    """
    lazy = gaps or (plan.controller is not None and plan.controller.limit is not None)
    stepper = Stepper(
        init=Bound(init, model, plan.growth.nodes, max(behind, CATCH_UP * lazy)),
        begin=Bound(begin, model, behind, lazy),
        step=Bound(_step, model),
        commit=Bound(commit, model),
        looped=True,
        commits_block=True,
        lazy=lazy,
    )
    drafter = _growth.build(
        name,
        stepper,
        plan,
        Bound(init_params, name, params),
        probs=Bound(probs, model),
        training=Training(model=model) if training is None else training,
        gaps=gaps,
    )
    check_window(model, drafter)
    return drafter


def init_params(name: str, params: Params, key: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    del key
    if params is None:
        raise UserError(f"{name} was made from an LM without params; give params=, or a directory")
    return params


def init(
    model: LM,
    nodes: int,
    room: int,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    """The cache of the prompt without its pending token, with room for ``room`` tokens more."""
    check_positions(model, slots - nodes)
    cache = model.init_cache(context.tokens.shape[0], slots + room)
    return decode.feed(model, params.draft, context.tokens[:, :-1], context.length - 1, cache)[1]


def check_positions(model: LM, longest: int) -> None:
    """Raises UserError if the draft model has fewer positions than the longest text."""
    if model.max_positions is not None and longest > model.max_positions:
        raise UserError(
            f"prompt and new tokens need {longest} positions, and the draft model has "
            f"{model.max_positions}; shorten them or take another draft model"
        )


def begin(
    model: LM, behind: int, lazy: bool, params: ModelParams, context: Context, cache: Any
) -> Begun:
    """Commits the tokens that the cache lacks: 1 to ``behind``, or if ``lazy`` any number.

    The pending token is the last of them. All but the last ``behind`` are fed in larger pieces.
    """
    if lazy:
        cache = catch_up(model, behind, params, context, cache)
    return Begun(*_feed(model, behind, params.draft, context.tokens, context.length, cache))


def catch_up(model: LM, behind: int, params: ModelParams, context: Context, cache: Any) -> Any:
    """The cache with all committed tokens but the last ``behind``, fed ``CATCH_UP`` at a time."""
    most = context.length - behind
    early = Bound(_feed, model, CATCH_UP, params.draft, context.tokens, most)
    lacking = lambda cache: (cache.length < most).any()  # noqa: E731
    return jax.lax.while_loop(lacking, lambda cache: early(cache)[1], cache)


def _feed(
    model: LM, width: int, params: Params, tokens: jax.Array, end: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Feeds and commits up to ``width`` of the tokens i32[B,S] before ``end`` i32[B].

    It begins after those in the cache. Returns the logits f[B,V] after the last, and the cache.
    """
    slots = cache.length[:, None] + jnp.arange(width)
    block = jnp.take_along_axis(tokens, slots, axis=1, mode="clip")
    # 0 in a finished row, whose draft is not used.
    missing = jnp.clip(end - cache.length, 0, width)
    out, own = model.apply(params, block, cache)
    last = jnp.maximum(missing - 1, 0)[:, None, None]
    return jnp.take_along_axis(out.logits, last, axis=1)[:, 0], model.commit(cache, own, missing)


def _step(
    model: LM, params: ModelParams, cache: Any, nodes: Nodes, block: Any
) -> tuple[jax.Array, Any]:
    """``Stepper.step``: the memory of a node is its part of the model's block."""
    out, own = model.apply(params.draft, nodes.tokens, cache, nodes.layout, block)
    return out.logits, own


def commit(
    model: LM,
    params: ModelParams,
    cache: Any,
    drafted: Drafted,
    verdict: Verdict,
    target_out: Output,
) -> Any:
    fed = jax.tree.leaves(drafted.block)[0].shape[1]
    # Nothing was fed, or the round verified no node.
    if not fed or (drafted.places is not None and not drafted.places.shape[1]):
        return cache
    return model.commit(cache, drafted.block, drafted.count, drafted.places)


def training_of(target: LM, model: LM, plan: Plan) -> Training:
    """``Drafter.training`` of a model that is trained by distillation."""
    growth, forecast = plan.growth, None
    # A draft that stops early, or is no sampled chain, has no forecast.
    sampled = isinstance(growth, Fixed) and growth.how != "top_k"
    if sampled and growth.siblings == CHAIN and plan.controller is None:
        forecast = Bound(foresee, target, model, growth.depth)
    ranked = Bound(ranks, model, growth.depth)
    return Training(model=model, foresee=forecast, ranks=ranked)


def foresee(
    target: LM, model: LM, depth: int, params: ModelParams, batch: Batch, sampling_: Sampling
) -> jax.Array:
    """f32[B,T,depth]: ``Training.foresee`` of a chain drawn from the model's probabilities."""
    tokens = batch.tokens
    logits, target_logits = (
        forward(m, p, tokens[:, :-1]).logits
        for m, p in ((model, params.draft), (target, params.target))
    )
    accepted = _foresee.accept_probs(logits, target_logits, tokens[:, 1:], sampling_)
    return by_depth(accepted, depth, 0)


def ranks(model: LM, depth: int, params: ModelParams, batch: Batch) -> jax.Array:
    """i32[B,T,depth]: ``Training.ranks``; the model reads the text, so depths differ by a shift."""
    logits = forward(model, params.draft, batch.tokens[:, :-1]).logits
    return by_depth(_foresee.rank(logits, batch.tokens[:, 1:]), depth, -1)


def by_depth(values: jax.Array, depth: int, beyond: float) -> jax.Array:
    """[B,T] values of the token after each position -> [B,T,depth], of the next ``depth`` tokens.

    ``beyond`` is the value after the end of the text.
    """
    padded = jnp.pad(values, ((0, 0), (0, depth)), constant_values=beyond)
    return jnp.stack([padded[:, d : d + values.shape[1]] for d in range(depth)], -1)


def probs(model: LM, params: ModelParams, context: Context) -> jax.Array:
    """f32[B,S,V]: ``Drafter.probs``, what the model would draw from after each prefix."""
    logits = forward(model, params.draft, context.tokens).logits
    logits = logit_maps.along_text(context.sampling.maps, logits, context.tokens)
    return sampling.to_probs(logits, context.sampling)
