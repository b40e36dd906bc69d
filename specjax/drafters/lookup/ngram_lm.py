"""An n-gram language model drafts a chain: tables of counts, no network. L1 with the chain rules.

Leviathan et al. 2023 (2211.17192), section 3.6 (bigrams), and the bottom of cascades (2312.11462,
2308.04623). Trigram, bigram and unigram distributions are mixed with fixed weights (Jelinek and
Mercer 1980). The mixture sums to 1 for any counts: where a context never occurred, the lower orders
get its weight.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import declare, logit_maps, sampling
from specjax.bound import Bound
from specjax.data import ngram_tables
from specjax.data.ngram_tables import PROBES, Tables
from specjax.declare import key
from specjax.drafters._limited import limited
from specjax.drafters.shared_keys import LimitedKeys
from specjax.errors import UserError
from specjax.rng import DRAFT
from specjax.types import LM, Array, Draft, Drafter

REFERENCE = ("leviathan2023fast", "spector2023accelerating", "chen2024cascade")

MODES = ("argmax", "sample")
BIGRAM_WEIGHT, TRIGRAM_WEIGHT = 0.9, 0.8


class Weights(NamedTuple):
    """The weights of the mixture."""

    order: int
    bigram: float  # of the bigram row, against the unigram distribution
    trigram: float  # of the trigram row, against all lower orders


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    vocab_size: int
    gamma: int
    mode: str
    weights: Weights


class Keys(LimitedKeys):
    """The keys of ``ngram_lm``."""

    tables: Tables | str | os.PathLike = key(
        help="``Tables``, or their directory (``configs/ngram_tables.py`` builds them)"
    )
    gamma: int = key(4, "draft tokens per round", least=1)
    mode: str = key(
        "argmax",
        '"argmax" proposes the most probable tokens; "sample" draws them with the row\'s '
        "sampling settings and gives the rules their probabilities, f32[B,gamma,V]",
        choices=MODES,
    )
    order: int = key(3, "1, 2 or 3, the longest n-grams used", least=1, most=3)
    bigram_weight: float | None = key(
        None,
        "in [0, 1], the weight of a row of bigrams where there is one; lower orders get the rest. "
        "Below 1, every token has a positive probability. None: 0.9",
        least=0,
        most=1,
    )
    trigram_weight: float | None = key(
        None, "the same of a row of trigrams, with ``order`` 3 only. None: 0.8", least=0, most=1
    )

    def check(self) -> None:
        for name, needed in (("bigram_weight", 2), ("trigram_weight", 3)):
            if (value := getattr(self, name)) is not None and self.order < needed:
                raise UserError(
                    f"{name} is {value} and order {self.order}: n-grams of {needed} tokens are not "
                    f"used; raise order, or leave {name} out"
                )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with tables of n-gram counts.

    Raises:
        UserError: numbers out of range, unknown mode, a weight that ``order`` excludes, a directory
            without tables for this target.
    """
    given = keys.tables
    counts = given if isinstance(given, Tables) else ngram_tables.load(given, target)
    ngram_tables.check(counts, target)
    bigram = BIGRAM_WEIGHT if keys.bigram_weight is None else float(keys.bigram_weight)
    trigram = TRIGRAM_WEIGHT if keys.trigram_weight is None else float(keys.trigram_weight)
    weights = Weights(keys.order, bigram, trigram)
    settings = Settings(target.vocab_size, keys.gamma, keys.mode, weights)
    drafter = Drafter(
        init_params=lambda key: jax.tree.map(jnp.asarray, counts),
        propose=Bound(_propose, settings),
        nodes=keys.gamma,
        name="ngram_lm",
        probs=Bound(_probs, settings),
    )
    return limited(drafter, keys.control)


def _propose(settings: Settings, params, keys, context, state):
    tables, how = params.draft, context.sampling.maps
    batch, vocab = context.length.shape[0], settings.vocab_size
    text = logit_maps.read(how, context.tokens, context.length, vocab)

    def step(carry, index):
        before, newest, drawn = carry
        if drawn is not None:
            token, probs = _draw_mapped(settings, tables, keys, index, carry, context, text)
            drawn = drawn.at[:, index].set(token)
        elif settings.mode == "argmax":
            token, probs = _most_probable(tables, settings.weights, before, newest), None
        else:
            token, probs = _draw(settings, tables, keys, index, before, newest, context)
        return (newest, token, drawn), (token, probs)

    second_last = jnp.maximum(context.length - 2, 0)[:, None]
    before = jnp.take_along_axis(context.tokens, second_last, 1)[:, 0]
    before = jnp.where(context.length > 1, before, -1)
    drawn = None if how is None else jnp.zeros((batch, settings.gamma), jnp.int32)
    start = (before, context.pending, drawn)
    _, (tokens, probs) = jax.lax.scan(step, start, jnp.arange(settings.gamma))
    probs = None if probs is None else jnp.moveaxis(probs, 0, 1)
    tokens = tokens.T
    return Draft(tokens=tokens, valid=jnp.ones_like(tokens, bool), probs=probs), state


def _draw_mapped(settings: Settings, tables, keys, index, carry, context, text):
    """As ``_draw`` or ``_most_probable``, after the row's penalties, biases and bans.

    ``carry``: the last two tokens i32[B], and the draft i32[B,gamma] up to ``index``.
    """
    before, newest, drawn = carry
    logits = jnp.log(_mixture(tables, settings.weights, before, newest))[:, None]
    above = (jnp.arange(settings.gamma) < index)[None, None]
    logits = logit_maps.for_draft(context.sampling.maps, text, logits, drawn, above)[:, 0]
    if settings.mode == "argmax":
        return sampling.argmax(logits), None
    probs = sampling.to_probs(logits, context.sampling)
    return keys.draw(DRAFT, probs, index), probs


def _draw(settings: Settings, tables, keys, index, before, newest, context):
    """One draft token per row, i32[B], and its probabilities, f32[B,V]."""

    def sampled():
        mixed = _mixture(tables, settings.weights, before, newest)
        probs = sampling.to_probs(jnp.log(mixed), context.sampling)
        return keys.draw(DRAFT, probs, index), probs

    def greedy():
        # The rule then compares token ids only and reads no probabilities.
        unread = jnp.zeros((context.length.shape[0], settings.vocab_size), tables.unigram.dtype)
        return _most_probable(tables, settings.weights, before, newest), unread

    return jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)


def _probs(settings: Settings, params, context):
    before = jnp.pad(context.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    how, argmax = context.sampling.maps, settings.mode == "argmax"
    each = _most_probable if argmax and how is None else _mixture
    each = jax.vmap(each, (None, None, 0, 0))
    result = each(params.draft, settings.weights, before, context.tokens)
    if argmax and how is None:
        return jax.nn.one_hot(result, settings.vocab_size)
    logits = logit_maps.along_text(how, jnp.log(result), context.tokens)
    if argmax:
        return jax.nn.one_hot(sampling.argmax(logits), settings.vocab_size)
    return sampling.to_probs(logits, context.sampling)


def _row(
    tables: Tables, weights: Weights, before: Array, newest: Array
) -> tuple[Array, Array, Array]:
    """The distribution after the tokens ``before``, ``newest`` i32[] (-1: no token).

    Sparse rows plus a share of the unigram distribution: the weight f[] of this; the successors
    i32[2,K] in the trigram and the bigram row, -1 = none; their weighted probabilities f[2,K].
    """
    two_ids = jnp.where(newest >= 0, jnp.take(tables.bigram_ids, newest, axis=0, mode="clip"), -1)
    two = jnp.take(tables.bigram_probs, newest, axis=0, mode="clip")
    has_two = (two_ids[0] >= 0) & (weights.order >= 2)
    weight_two = jnp.where(has_two, weights.bigram, 0).astype(two.dtype)
    slots = tables.trigram_keys.shape[0]
    places = (ngram_tables.slot(before, newest, slots) + jnp.arange(PROBES)) % slots
    keys = tables.trigram_keys[places]
    match = (keys[:, 0] == before) & (keys[:, 1] == newest)
    has_three = match.any() & (before >= 0) & (newest >= 0)
    at = tables.trigram_rows[places[jnp.argmax(match)]]
    if tables.trigram_ids.shape[0] == 0:
        # Counted from a text of fewer than three tokens.
        three_ids, three = jnp.full_like(two_ids, -1), jnp.zeros_like(two)
    else:
        three_ids, three = tables.trigram_ids[at], tables.trigram_probs[at]
    weight_three = jnp.where(has_three & (weights.order >= 3), weights.trigram, 0).astype(two.dtype)
    three_ids = jnp.where(weight_three > 0, three_ids, -1)
    ids = jnp.stack([three_ids, jnp.where(weight_two > 0, two_ids, -1)])
    mass = jnp.stack([weight_three * three, (1 - weight_three) * weight_two * two])
    return (1 - weight_three) * (1 - weight_two), ids, mass


def mixture(tables: Tables, weights: Weights, before: Array, newest: Array) -> Array:
    """The probabilities of the next token after ``before``, ``newest`` i32[] (-1: no token).

    f32[V].
    """
    share, ids, mass = _row(tables, weights, before, newest)
    # Ids beyond the end are dropped.
    flat = jnp.where(ids >= 0, ids, tables.unigram.shape[0]).reshape(-1)
    return (share * tables.unigram).at[flat].add(mass.reshape(-1), mode="drop")


def most_probable(tables: Tables, weights: Weights, before: Array, newest: Array) -> Array:
    """The token where ``mixture`` is largest, i32[]; the lowest id on ties.

    It is in one of the sparse rows, or is the most probable unigram, so the f32[V] probabilities
    are not computed.
    """
    share, sparse, mass = _row(tables, weights, before, newest)
    ids = jnp.append(sparse.reshape(-1), sampling.argmax(jnp.asarray(tables.unigram)))
    rows = ((ids[:, None, None] == sparse) * mass).sum((1, 2))
    score = share * tables.unigram[jnp.maximum(ids, 0)] + rows
    score = jnp.where(ids >= 0, score, -1)
    return jnp.min(jnp.where(score == score.max(), ids, tables.unigram.shape[0])).astype(jnp.int32)


# Over rows.
_mixture = jax.vmap(mixture, (None, None, 0, 0))
_most_probable = jax.vmap(most_probable, (None, None, 0, 0))
