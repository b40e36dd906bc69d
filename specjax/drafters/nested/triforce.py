"""TriForce: a small model drafts for the target with a retrieved part of its cache. L1 ("chain").

Sun et al. 2024 (2404.11912). Three levels: the small model has a streaming cache (the first and the
most recent tokens); the target's weights with the chunks of its cache that fit the newest query
test the small model's tokens; the target with its whole cache tests what these emit. A pass of each
of the lower levels takes the same time after a text of any length.

In the published code a token of the small model that is rejected is replaced by a sample of the
middle level's whole distribution, while the outer test takes this distribution for that of the
emitted tokens: sampled text then has another law. Here the middle level is an exact speculative
system (the residual distribution after a rejection), so its tokens are samples of its own
distribution, and the text has the target's law.
"""

from __future__ import annotations

import os
from typing import Any

from specjax import accept
from specjax import sparse_views as views
from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters import none
from specjax.drafters.draft_models import _small_model
from specjax.drafters.nested import _row, _system
from specjax.drafters.nested._row import Row
from specjax.drafters.nested._system import System
from specjax.drafters.self_speculation import _views
from specjax.errors import UserError
from specjax.prompt import check_window
from specjax.types import LM, Context, Drafter, ModelParams, Output, Params

REFERENCE = "sun2024triforce"

# The committed tokens that the small model's cache can lack when a draft begins: its own newest
# token that was accepted, and the last token of the middle level.
BEHIND = 2


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gamma: int = 6,
    budget: int = 4096,
    chunk: int | None = None,
    refresh: int | None = None,
    model_gamma: int = 1,
    model_budget: int = 256,
    sinks: int = 16,
    params: Params = None,
) -> Drafter:
    """Drafts with the target and a retrieved part of its cache, for which a small model drafts.

    Args:
        target: the model to be accelerated; a decoder with layers that read the whole text.
        model: the small model: an ``LM``, or any model that ``hf.load`` takes, without sliding
            windows. It needs positions for the whole text: its keys have their true positions.
        gamma: tokens per round that the middle level emits.
        budget: tokens of the target's cache that the middle level reads, a multiple of ``chunk``.
        chunk: tokens that are retrieved together; None: 8.
        refresh: rounds after which the chunks are chosen again; None: 16.
        model_gamma: tokens that the small model drafts for a pass of the middle level.
        model_budget: tokens of the small model's cache.
        sinks: the first tokens of the text that are always in it, of ``model_budget``.
        params: the small model's parameters when ``model`` is an ``LM``.

    Raises:
        UserError: numbers out of range, budgets that are too small, another vocabulary than the
            target's, a model that cannot be loaded, or whose cache has no keys to choose from.
    """
    gamma, inner_gamma = whole("gamma", gamma, 1), whole("model_gamma", model_gamma, 1)
    model, params = _small_model.load(target, model, params)
    small = views.streaming_model(
        model, budget=whole("model_budget", model_budget, 1), sinks=whole("sinks", sinks, 0)
    )
    keys = {"chunk": chunk, "refresh": refresh}
    view = _views.make("retrieval", target, budget, gamma + 1, **keys)
    rule = accept.load("chain")
    # The small model drafts inside the middle level, whose buffer has room for ``gamma`` tokens.
    reader = _system.own_cache(small, _of_model, [gamma + BEHIND])
    lowest = System(
        reader, none.make(small), rule, inner_gamma, _nothing_below, lag=BEHIND, depth=2
    )
    row = Row((lowest,), None, target.vocab_size)
    middle = System(
        _views.inner(target, view),
        _row.build("triforce", row, None),
        rule,
        gamma,
        _same,
    )
    made = _row.build(
        "triforce", Row((middle,), None, target.vocab_size), Bound(_init_params, params)
    )
    for each in (target, small):
        check_window(each, made)
    # Tokens of a prompt are fed together, so the small model reads more than in later rounds.
    return made._replace(init=Bound(_init, model, made), history=True)


def _same(params: ModelParams) -> ModelParams:
    """``System.below``: the middle level has the target's parameters."""
    return params


def _of_model(params: ModelParams) -> Params:
    return params.draft


def _nothing_below(params: ModelParams) -> ModelParams:
    return ModelParams(params.draft)


def _init_params(params: Params, key: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    if params is None:
        raise UserError("triforce was made from an LM without params; give params=, or a directory")
    return params


def _init(
    model: LM,
    made: Drafter,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    longest = slots - made.nodes
    if model.max_positions is not None and longest > model.max_positions:
        raise UserError(
            f"prompt and new tokens need {longest} positions, and the draft model has "
            f"{model.max_positions}; shorten them or take another draft model"
        )
    return made.init(params, context, target_out, slots)
