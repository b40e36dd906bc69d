"""Cascade: each draft model is drafted for by the next smaller one. L1 with a rule for chains.

CS Drafting, Chen et al. 2023 (2312.11462). Vertical: a model writes its drafts in rounds of
speculative decoding, with a smaller model as its drafter; the last drafter is a lookup, so no model
decodes token by token. Horizontal: the first tokens of a draft, which are tested most often, are of
the largest model, and later ones of smaller models. The published code decodes greedily. Here every
inner round is lossless, so the tokens are exact samples of the model that ``Draft.probs`` is of,
and sampled text has the target's law too.

``lengths`` is the published matrix K, by rows: row r is what drafts for model r (0: the target) and
has the number of tokens of each model after it, the lookup last. "5,14,10;1,10;10" with two models:
for the target 5 tokens of the first model, then 14 of the second, then 10 of the lookup; for the
first model 1 of the second and 10 of the lookup; for the second 10 of the lookup.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from specjax import accept, drafters
from specjax.accept import chain, lenient
from specjax.bound import Bound
from specjax.drafters import none
from specjax.drafters.draft_models import _small_model, specinfer
from specjax.drafters.nested import _inside, _row, _stages, _system
from specjax.drafters.nested._lengths import Lengths, parse
from specjax.drafters.nested._row import Row
from specjax.drafters.nested._stages import Stages
from specjax.drafters.nested._system import System
from specjax.errors import UserError
from specjax.prompt import check_window
from specjax.types import (
    CHAIN,
    LM,
    Accept,
    Context,
    Drafter,
    ModelParams,
    Output,
    Params,
    Training,
)

REFERENCE = ("chen2024cascade", "leviathan2023fast")


class _Cascade(NamedTuple):
    """The static settings."""

    models: tuple[LM, ...]  # the largest one first
    lengths: Lengths
    leaf: Drafter | None
    rule: Accept  # of the inner rounds


def check(drafters: Stages | None = None, **_: Any) -> None:
    """Raises UserError unless the inner drafter has a known name and keys it takes."""
    if drafters is not None:
        _stages.check("cascade", drafters)
        if len(drafters) != 1:
            raise UserError(f"cascade takes one drafter without a model and got {len(drafters)}")


def make(
    target: LM,
    *,
    models: Sequence[LM | str | os.PathLike] | str,
    lengths: str | Sequence[Sequence[int]] | None = None,
    drafters: Stages | None = None,
    lenience: float = 1.0,
    params: Sequence[Params] | None = None,
) -> Drafter:
    """Drafts with a cascade of models.

    Args:
        target: the model to be accelerated.
        models: the draft models, the largest one first: each an ``LM``, or any model that
            ``hf.load`` takes; or the directories as one text, separated by commas.
        lengths: the matrix K: rows separated by ";", or a list of lists; rows may have the zeros of
            the published form at their begin. None: 5 tokens of the first model for the target, 3
            of each further one for the model before it, and 10 of the lookup for the last one.
        drafters: the lookup, as label -> its keys, or a list with a ready-made ``Drafter`` of
            chains. None: ``prompt_lookup``.
        lenience: in (0, 1]: inner rounds accept a token whose probability is at least this share of
            the best one's. Only in greedy rows: there the target compares tokens, so the text stays
            the same. Below 1 the drafter is meant for temperature 0 only.
        params: the models' parameters, when they are LMs.

    Raises:
        UserError: models of different vocabularies, lengths of another form, a model that no length
            uses, a drafter that cannot be inside, numbers out of range.
    """
    check(drafters)
    given = specinfer.list_of(models)
    each = [None] * len(given) if params is None else list(params)
    if len(each) != len(given):
        raise UserError(
            f"there are {len(given)} models and {len(each)} params; give one for each model"
        )
    loaded = [_small_model.load(target, model, own) for model, own in zip(given, each, strict=True)]
    sizes = parse(lengths, len(given))
    leaf = _leaf(target, sizes, drafters)
    cascade = _Cascade(tuple(lm for lm, _ in loaded), sizes, leaf, _inner_rule(lenience))
    init_params = Bound(_init_params, [own for _, own in loaded], leaf)
    made = _drafter_of(cascade, 0, (), 0, init_params)
    for model in cascade.models:
        check_window(model, made)
    made = made._replace(init=Bound(_init, cascade, made), greedy_only=lenience < 1)
    first = sizes.rows[0]
    if first[0] != made.nodes or lenience < 1:
        return made
    # All tokens are samples of the first model: its probabilities are those of a draft model.
    forecast = Bound(_of_first, _small_model.foresee, target, cascade.models[0])
    return made._replace(
        probs=Bound(_probs, cascade.models[0]),
        training=Training(foresee=Bound(forecast, made.nodes)),
    )


def _inner_rule(lenience: float) -> Accept:
    """Speculative sampling, lenient in greedy rows; the outer target's verdict is exact there."""
    if lenience == 1:
        return accept.load("chain")
    greedy = lenient.make(lenience=lenience).greedy
    return Accept(chain.chain, greedy, "chain, lenient in greedy rows", "L2")


def _leaf(target: LM, sizes: Lengths, stages: Stages | None) -> Drafter | None:
    """The lookup. Raises UserError for one that cannot be inside, or one without effect."""
    longest = max(row[-1] for row in sizes.rows)
    if not longest:
        if stages is not None:
            raise UserError("cascade: lengths has no tokens of the lookup; leave drafters out")
        return None
    if stages is None:
        stages = [drafters.make("prompt_lookup", target, gamma=longest)]
    [leaf] = _stages.build(target, stages, gaps=True)
    leaf = _inside.allowed("cascade", leaf)
    if leaf.siblings != CHAIN:
        raise UserError(f"cascade takes drafts that are chains; {leaf.name} drafts trees")
    if longest > leaf.nodes:
        raise UserError(
            f"cascade: lengths has {longest} tokens of {leaf.name}, which drafts {leaf.nodes}; "
            "lower the length or raise its gamma"
        )
    return leaf


def _drafter_of(
    cascade: _Cascade, first: int, above: tuple[int, ...], behind: int, init_params: Any = None
) -> Drafter:
    """What drafts for model ``first`` (0: the target): row ``first`` of the lengths.

    ``above``: gamma of each system that it drafts inside. ``behind``: how many tokens the caches of
    its models can lack because of these systems.
    """
    sizes = cascade.lengths.rows[first]
    total, before, systems = sum(sizes), 0, []
    if not total:
        return none.make(cascade.models[0])
    for index, gamma in enumerate(sizes[:-1], first):
        if not gamma:
            continue
        # After a draft that was accepted as a whole, the cache lacks its own newest token, and the
        # tokens of later parts.
        lag = behind + total - before - gamma + 1
        inner = _drafter_of(cascade, index + 1, (*above, gamma), lag + before)
        accept.check_pair(inner, cascade.rule)
        params = Bound(_model_params, index)
        rooms = [size + lag + before for size in above]
        reader = _system.own_cache(cascade.models[index], params, rooms)
        below = Bound(_below, index)
        depth = len(above) + 1
        part = System(reader, inner, cascade.rule, gamma, below, lag + before, before, depth)
        systems.append(part)
        before += gamma
    leaf = None
    if sizes[-1]:
        assert cascade.leaf is not None
        leaf = _row.with_params(_row.shortened(cascade.leaf, sizes[-1]), "leaf")
    row = Row(tuple(systems), leaf, cascade.models[0].vocab_size)
    return _row.build("cascade", row, init_params)


def _model_params(index: int, params: ModelParams) -> Params:
    return params.draft["models"][index]


def _below(index: int, params: ModelParams) -> ModelParams:
    return ModelParams(params.draft["models"][index], params.draft)


def _init_params(models: Sequence[Params], leaf: Drafter | None, key: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    if any(params is None for params in models):
        raise UserError("cascade was made from LMs without params; give params=, or directories")
    own = {} if leaf is None else leaf.init_params(key)
    return {"models": tuple(models), "leaf": own}


def _init(
    cascade: _Cascade,
    made: Drafter,
    params: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    for model in cascade.models:
        _small_model.check_positions(model, slots - made.nodes)
    return made.init(params, context, target_out, slots)


def _of_first(function: Any, target: LM, model: LM, depth: int, params: ModelParams, *rest: Any):
    """A forecast of ``_small_model``, for the first model."""
    own = params._replace(draft=_model_params(0, params))
    return function(target, model, depth, own, *rest)


def _probs(model: LM, params: ModelParams, context: Context) -> jax.Array:
    """f32[B,S,V]: ``Drafter.probs``."""
    own = params._replace(draft=_model_params(0, params))
    return _small_model.probs(model, own, context)
