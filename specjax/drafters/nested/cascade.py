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

import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax import accept, declare
from specjax.accept import chain, lenient
from specjax.bound import Bound
from specjax.checks import whole
from specjax.declare import key
from specjax.drafters import _foresee, none
from specjax.drafters.draft_models import _small_model, specinfer
from specjax.drafters.nested import _row, _stages, _system
from specjax.drafters.nested._row import Row
from specjax.drafters.nested._stages import Stages
from specjax.drafters.nested._system import System
from specjax.errors import UserError
from specjax.types import (
    CHAIN,
    LM,
    Accept,
    Drafter,
    Params,
    Training,
)

# The matrix K of a cascade: how many tokens of which model are in a draft.


# The defaults: tokens for the target, for each model, and of the lookup.
FIRST, FURTHER, LOOKUP = 5, 3, 10


# Row r has the tokens of model r, r + 1, ... and of the lookup in a draft for model r - 1. Row 0 is
# the draft for the target.
Lengths = tuple[tuple[int, ...], ...]


def parse(given: str | Sequence[Sequence[int]] | None, models: int) -> Lengths:
    """The lengths for so many models.

    Raises:
        UserError: another form, numbers below 0, an empty draft for the target, or a model that no
            draft uses.
    """
    if given is None:
        first = [(FURTHER if row else FIRST, *[0] * (models - row)) for row in range(models)]
        return (*first, (LOOKUP,))
    rows = _read(given)
    if len(rows) != models + 1:
        raise UserError(
            f"lengths has {len(rows)} rows; with {models} models it needs {models + 1}, one for "
            "the target and one for each model"
        )
    rows = [_upper(row, number, models + 1) for number, row in enumerate(rows)]
    if not any(rows[0]):
        raise UserError("lengths has no tokens in its first row; the target needs a draft")
    used = {0}
    for number, row in enumerate(rows):
        if number in used:
            used |= {number + 1 + index for index, size in enumerate(row[:-1]) if size}
    missing = sorted(set(range(models + 1)) - used)
    if missing:
        raise UserError(
            f"lengths uses no token of model {missing[0]} (of {models}); leave the model out, or "
            "give it tokens"
        )
    return tuple(rows)


def _read(given: str | Sequence[Sequence[int]]) -> list[list[int]]:
    """The rows of a text "5,14,10;1,10;10", or of lists."""
    number: Any = int if isinstance(given, str) else operator.index
    rows: Any = [row.split(",") for row in given.split(";")] if isinstance(given, str) else given
    try:
        return [[number(size) for size in row] for row in rows]
    except (TypeError, ValueError):
        raise UserError(
            f"lengths is {given!r}; give rows of whole numbers, as in '5,14,10;1,10;10'"
        ) from None


def _upper(row: list[int], number: int, size: int) -> tuple[int, ...]:
    """Row ``number`` without the zeros of the published form at its begin."""
    for length in row:
        whole("a length of the cascade", length, 0)
    if len(row) == size and not any(row[:number]):
        row = row[number:]
    if len(row) != size - number:
        raise UserError(
            f"row {number + 1} of lengths has {len(row)} numbers; it needs {size - number}: one "
            "for each smaller model, and one for the lookup"
        )
    return tuple(row)


REFERENCE = ("chen2024cascade", "leviathan2023fast")


# Where the first model's parameters are.
FIRST_MODEL = ("models", 0)


class _Cascade(NamedTuple):
    """The static settings."""

    models: tuple[LM, ...]  # the largest one first
    lengths: Lengths
    leaf: Drafter | None
    rule: Accept  # of the inner rounds


class Keys(declare.Keys):
    """The keys of ``cascade``."""

    LENGTH = "lengths"

    models: Sequence[LM | str | os.PathLike] | str = key(
        help="the draft models, the largest one first: each an ``LM``, or any model that "
        "``hf.load`` takes; or the directories as one text, separated by commas"
    )
    lengths: str | Sequence[Sequence[int]] | None = key(
        None,
        'the matrix K: rows separated by ";", or a list of lists; rows may have the zeros of the '
        "published form at their begin. None: 5 tokens of the first model for the target, 3 of "
        "each further one for the model before it, and 10 of the lookup for the last one.",
    )
    drafters: Stages | None = key(
        None,
        "the lookup, as label -> its keys, or a list with a ready-made ``Drafter`` of chains. "
        "None: ``prompt_lookup``.",
    )
    lenience: float = key(
        1.0,
        "in (0, 1]: inner rounds accept a token whose probability is at least this share of the "
        "best one's. Only in greedy rows: there the target compares tokens, so the text stays the"
        " same. Below 1 the drafter is meant for temperature 0 only.",
    )
    params: Sequence[Params] | None = key(
        None, "the models' parameters, when they are LMs", python=True
    )

    def check(self) -> None:
        if self.drafters is not None:
            _stages.check("cascade", self.drafters, "one drafter without a model and got {got}")


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with a cascade of models.

    Raises:
        UserError: models of different vocabularies, lengths of another form, a model that no length
            uses, a drafter that cannot be inside, numbers out of range.
    """
    loaded = _small_model.load_all(target, specinfer.list_of(keys.models), keys.params)
    sizes = parse(keys.lengths, len(loaded))
    leaf = _leaf(target, sizes, keys.drafters)
    cascade = _Cascade(tuple(lm for lm, _ in loaded), sizes, leaf, _inner_rule(keys.lenience))
    init_params = Bound(_init_params, [own for _, own in loaded], leaf)
    made = _row.checked(_drafter_of(cascade, 0, (), 0, init_params), *cascade.models)
    made = made._replace(greedy_only=keys.lenience < 1)
    if sizes[0][0] != made.nodes or keys.lenience < 1:
        return made
    # All tokens are samples of the first model: its probabilities are those of a draft model.
    both = Bound(_small_model.both, target, cascade.models[0])
    forecast = Bound(_foresee.chain_of_text, both, made.nodes)
    return made._replace(
        probs=_stages.at(FIRST_MODEL, Bound(_small_model.probs, cascade.models[0])),
        training=Training(foresee=_stages.at(FIRST_MODEL, forecast)),
    )


def _inner_rule(lenience: float) -> Accept:
    """Speculative sampling, lenient in greedy rows; the outer target's verdict is exact there."""
    if lenience == 1:
        return accept.load("chain")
    greedy = lenient.make(lenience=lenience).greedy
    return Accept(chain.chain, greedy, "chain, lenient in greedy rows", "L2")


def _leaf(target: LM, sizes: Lengths, stages: Stages | None) -> Drafter | None:
    """The lookup. Raises UserError for one that cannot be inside, or one without effect."""
    longest = max(row[-1] for row in sizes)
    if not longest:
        if stages is not None:
            raise UserError("cascade: lengths has no tokens of the lookup; leave drafters out")
        return None
    leaf = _stages.inside("cascade", target, stages, gamma=longest)
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
    sizes = cascade.lengths[first]
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
        params = Bound(_stages.params_at, ("models", index))
        rooms = [size + lag + before for size in above]
        reader = _system.own_cache(cascade.models[index], params, rooms)
        depth = len(above) + 1
        systems.append(System(reader, inner, cascade.rule, gamma, lag + before, before, depth))
        before += gamma
    leaf = None
    if cascade.leaf is not None and sizes[-1]:
        leaf = _stages.with_params(_row.shortened(cascade.leaf, sizes[-1]), "leaf")
    row = Row(tuple(systems), leaf, cascade.models[0].vocab_size)
    return _row.build("cascade", row, init_params)


def _init_params(models: Sequence[Params], leaf: Drafter | None, key: Any) -> Params:
    """``Drafter.init_params``: the parameters of ``make``. Raises UserError for None."""
    if any(params is None for params in models):
        raise UserError("cascade was made from LMs without params; give params=, or directories")
    own = {} if leaf is None else leaf.init_params(key)
    return {"models": tuple(models), "leaf": own}
