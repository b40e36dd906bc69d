"""What drafters with a small language model share: loading it, feeding it, its probabilities.

The draft cache holds the committed text without its newest tokens: the pending token, and tokens
that the last round accepted and this model was never fed (the last draft token, or all of them if
another drafter proposed them). A round begins by committing these. The cache is not written while
the draft grows; ``commit`` appends the accepted nodes that were fed.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specjax import decode
from specjax.bound import Bound
from specjax.drafters import _foresee, growth
from specjax.drafters.growth import Begun, Drafted, Plan, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.pairs import check_vocabulary, in_size
from specjax.drafters.shared_keys import DraftKeys
from specjax.errors import UserError
from specjax.models.lm import forward
from specjax.prompt import check_window
from specjax.topology.shapes import Topology
from specjax.types import LM, Array, Batch, Context, Drafter, ModelParams, Output, Params, Training

# Tokens that the draft cache may lack: the pending one, and the last accepted node if never fed.
BEHIND = 2
# How many tokens are fed at once to a cache that lacks more than that.
CATCH_UP = 16
# (``ModelParams``) -> the draft model's parameters.
_OWN = operator.attrgetter("draft")


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


def read(
    model: LM | str | os.PathLike, params: Params, loader: Callable[..., Any] | None = None
) -> tuple[LM, Params]:
    """The draft model and its parameters, from a directory by ``loader`` (None: ``hf.load``).

    Raises UserError for a directory that cannot be loaded, or with parameters beside it.
    """
    if isinstance(model, LM):
        return model, params
    if params is not None:
        raise UserError(
            f"params are for a model that is an LM, and {model} has its own; leave params out"
        )
    # Imported here: drafters made from an LM need no file formats.
    from specjax.models import hf

    loaded = (loader or hf.load)(model)
    return loaded.lm, loaded.params


def load_all(
    target: LM, models: Sequence[LM | str | os.PathLike], params: Sequence[Params] | None
) -> list[tuple[LM, Params]]:
    """``load`` of each model. Raises UserError for another number of parameters."""
    each = [None] * len(models) if params is None else params
    if len(each) != len(models):
        raise UserError(
            f"there are {len(models)} models and {len(each)} params; give one for each model"
        )
    return [load(target, model, own) for model, own in zip(models, each, strict=True)]


def make(
    name: str,
    target: LM,
    keys: DraftKeys,
    tree: Topology | str,
    siblings: str = "iid",
    loaded: tuple[LM, Params] | None = None,
) -> Drafter:
    """The drafter ``name`` with the model of the keys, or with one that was ``loaded``.

    ``tree`` and ``siblings`` are those of keys without them.

    Raises UserError.
    """
    model, params = loaded or load(target, keys.model, keys.params)
    plan = growth.read(Method(name, tree, siblings, target.vocab_size), keys)
    forecasts = _foresee.of_text(Bound(logits_of, model), Bound(both, target, model), plan)
    training = Training(model=model, **forecasts)
    return build(name, model, params, plan, gaps=keys.gaps, training=training)


def build(
    name: str,
    model: LM,
    params: Params,
    plan: Plan,
    stepper: Stepper | None = None,
    *,
    behind: int = BEHIND,
    gaps: bool = False,
    training: Training | None = None,
) -> Drafter:
    """The drafter ``name``, which grows its drafts with this model.

    ``stepper``: its ``begin`` reads the committed tokens of which the cache lacks at most
    ``behind``; None: the next tokens are the model's own.

    ``behind``: the largest number of committed tokens that the draft cache may lack when a round
    begins. ``gaps``: it may lack more, because other drafters propose in some rounds. It may also
    lack more after rounds in which a controller let all rows rest.

    Raises UserError for drafts longer than a sliding window of the model.
    """
    lazy = gaps or (plan.controller is not None and plan.controller.limit is not None)
    along = Bound(probs, model) if stepper is None else None
    if stepper is None:
        read, step = Bound(_read, model, behind), Bound(growth.step_of_model, model, _OWN)
        stepper = Stepper(read, step, commit=Bound(commit, model), commits_block=True)
    if lazy:
        stepper = stepper._replace(begin=Bound(_begin, model, behind, stepper.begin))
    start = Bound(init, model, plan.growth.nodes, max(behind, CATCH_UP * lazy))
    stepper = stepper._replace(init=start, looped=True, lazy=lazy)
    own = Bound(init_params, name, params)
    more = {"probs": along, "training": training, "gaps": gaps}
    drafter = growth.build(name, stepper, plan, own, **more)
    check_window(model, drafter)
    return drafter


def init_params(name: str, params: Params, *_: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    if params is None:
        raise UserError(f"{name} was made from an LM without params; give params=, or a directory")
    return params


def init(
    model: LM, nodes: int, room: int, params: ModelParams, context: Context, _: Output, slots: int
) -> Any:
    """The cache of the prompt without its pending token, with room for ``room`` tokens more."""
    check_positions(model, slots - nodes)
    return fed(model, params.draft, context, slots + room)


def fed(model: LM, params: Params, context: Context, slots: int) -> Any:
    """A cache of so many slots, with the text without its pending token."""
    cache = model.init_cache(context.tokens.shape[0], slots)
    return decode.feed(model, params, context.tokens[:, :-1], context.length - 1, cache)[1]


def check_positions(model: LM, longest: int) -> None:
    """Raises UserError if the draft model has fewer positions than the longest text."""
    if model.max_positions is not None and longest > model.max_positions:
        raise UserError(
            f"prompt and new tokens need {longest} positions, and the draft model has "
            f"{model.max_positions}; shorten them or take another draft model"
        )


def begin(model: LM, behind: int, params: ModelParams, context: Context, cache: Any) -> Begun:
    """Commits all tokens that the cache lacks, the last ``behind`` in a pass of their own."""
    return _begin(model, behind, Bound(_read, model, behind), params, context, cache)


def _begin(
    model: LM, behind: int, read: Callable, params: ModelParams, context: Context, cache: Any
) -> Begun:
    """``read``, after all but the last ``behind`` tokens were fed in larger pieces."""
    most = context.length - behind
    cache = catch_up(model, CATCH_UP, params.draft, context.tokens, most, cache)
    return read(params, context, cache)


def _read(model: LM, behind: int, params: ModelParams, context: Context, cache: Any) -> Begun:
    """Commits the tokens that the cache lacks, 1 to ``behind``; the pending one is the last."""
    return Begun(*_feed(model, behind, params.draft, context.tokens, context.length, cache))


def catch_up(model: LM, width: int, params: Params, tokens: Array, end: Array, cache: Any) -> Any:
    """The cache with all tokens before ``end`` i32[B], fed ``width`` at a time."""
    feed = Bound(_feed, model, width, params, tokens, end)
    lacking = lambda cache: (cache.length < end).any()  # noqa: E731
    return jax.lax.while_loop(lacking, lambda cache: feed(cache)[1], cache)


def _feed(
    model: LM, width: int, params: Params, tokens: Array, end: Array, cache: Any
) -> tuple[Array, Any]:
    """Feeds and commits up to ``width`` of the tokens i32[B,S] before ``end`` i32[B].

    It begins after those in the cache. Returns the logits f[B,V] after the last, and the cache.
    """
    # None are missing in a finished row, whose draft is not used.
    missing, block = growth.lacking(tokens, end, cache.length, width)
    out, own = model.apply(params, block, cache)
    last = jnp.maximum(missing - 1, 0)[:, None, None]
    return jnp.take_along_axis(out.logits, last, axis=1)[:, 0], model.commit(cache, own, missing)


def commit(model: LM, params: ModelParams, cache: Any, drafted: Drafted, *_: Any) -> Any:
    fed = jax.tree.leaves(drafted.block)[0].shape[1]
    # Nothing was fed, or the round verified no node.
    if not fed or (drafted.places is not None and not drafted.places.shape[1]):
        return cache
    return model.commit(cache, drafted.block, drafted.count, drafted.places)


def both(target: LM, model: LM, params: ModelParams, batch: Batch) -> tuple[Array, Array]:
    """f[B,T,V] each: logits of the draft model and the target, for all tokens but the last."""
    theirs = forward(target, params.target, batch.tokens[:, :-1]).logits
    return logits_of(model, params, batch), theirs


def logits_of(model: LM, params: ModelParams, batch: Batch) -> Array:
    """The first of ``both``."""
    return forward(model, params.draft, batch.tokens[:, :-1]).logits


def probs(model: LM, params: ModelParams, context: Context) -> Array:
    """f32[B,S,V]: ``Drafter.probs``, what the model would draw from after each prefix."""
    return _foresee.probs_along(forward(model, params.draft, context.tokens).logits, context)
