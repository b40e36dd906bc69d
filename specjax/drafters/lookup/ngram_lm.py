"""An n-gram language model drafts a chain: tables of counts, no network. L1 with the chain rules.

Leviathan et al. 2023 (2211.17192), section 3.6 (bigrams), and the bottom of cascades (2312.11462, 2308.04623); card C1.
Trigram, bigram and unigram are mixed with fixed weights (Jelinek and Mercer 1980), which is a law whatever the counts are; a
context that was never seen leaves the mixing to the lower orders.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.checks import one_of, whole
from specjax.data import ngram_tables
from specjax.data.ngram_tables import PROBES, Tables
from specjax.errors import UserError
from specjax.rng import DRAFT
from specjax.types import LM, Draft, Drafter

MODES = ("argmax", "sample")


class Weights(NamedTuple):
    """What the mixture is made of."""

    order: int
    bigram: float  # of the bigram row against the unigram law
    trigram: float  # of the trigram row against all below


def make(
    target: LM,
    *,
    tables: Tables | str | os.PathLike,
    gamma: int = 4,
    mode: str = "argmax",
    order: int = 3,
    bigram_weight: float = 0.9,
    trigram_weight: float = 0.8,
) -> Drafter:
    """Drafts with tables of n-gram counts.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        tables: ``Tables``, or the directory of some (``configs/ngram_tables.py`` builds them).
        gamma: draft tokens per round.
        mode: "argmax" proposes the most probable tokens, "sample" draws them under the row's own settings (and gives the
            rules their law, f32[B,gamma,V]).
        order: 1, 2 or 3, the longest n-grams used.
        bigram_weight, trigram_weight: in [0, 1], the share of a row where there is one; the lower orders get the rest. At
            less than 1 every token has some mass.

    Raises:
        UserError: numbers out of range, unknown mode, a directory without tables for this target.
    """
    whole("gamma", gamma, 1)
    one_of("mode", mode, MODES)
    if order not in (1, 2, 3):
        raise UserError(f"order is {order}; it must be 1, 2 or 3")
    for name, weight in (("bigram_weight", bigram_weight), ("trigram_weight", trigram_weight)):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1:
            raise UserError(f"{name} is {weight!r}; it must be a number in [0, 1]")
    counts = tables if isinstance(tables, Tables) else ngram_tables.load(tables, target)
    ngram_tables.check(counts, target)
    weights = Weights(order, float(bigram_weight), float(trigram_weight))
    dense = jax.vmap(mixture, (None, None, 0, 0))
    best = jax.vmap(most_probable, (None, None, 0, 0))

    def propose(params, keys, context, state):
        tables = params.draft
        batch = context.length.shape[0]

        def step(carry, index):
            before, newest = carry
            if mode == "argmax":
                token, probs = best(tables, weights, before, newest), None
            else:
                token, probs = draw(tables, keys, index, before, newest, context)
            return (newest, token), (token, probs)

        def draw(tables, keys, index, before, newest, context):
            def sampled():
                probs = sampling.to_probs(
                    jnp.log(dense(tables, weights, before, newest)), context.sampling
                )
                return keys.draw(DRAFT, probs, index), probs

            def greedy():  # the rule then looks at token ids only: no law
                nothing = jnp.zeros((batch, target.vocab_size), tables.unigram.dtype)
                return best(tables, weights, before, newest), nothing

            return jax.lax.cond(jnp.all(context.sampling.greedy), greedy, sampled)

        known = jnp.take_along_axis(context.tokens, jnp.maximum(context.length - 2, 0)[:, None], 1)[
            :, 0
        ]
        before = jnp.where(context.length > 1, known, -1)
        _, (tokens, probs) = jax.lax.scan(step, (before, context.pending), jnp.arange(gamma))
        probs = None if probs is None else jnp.moveaxis(probs, 0, 1)
        tokens = tokens.T
        return Draft(tokens=tokens, valid=jnp.ones_like(tokens, bool), probs=probs), state

    def probs(params, context):
        before = jnp.pad(context.tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        if mode == "argmax":
            tokens = jax.vmap(best, (None, None, 0, 0))(
                params.draft, weights, before, context.tokens
            )
            return jax.nn.one_hot(tokens, target.vocab_size)
        each = jax.vmap(dense, (None, None, 0, 0))(params.draft, weights, before, context.tokens)
        return sampling.to_probs(jnp.log(each), context.sampling)

    return Drafter(
        init_params=lambda key: jax.tree.map(jnp.asarray, counts),
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=gamma,
        name="ngram_lm",
        probs=probs,
    )


class _Row(NamedTuple):
    """The law after one context, as a sum of sparse rows and a share of the unigram law."""

    share: jax.Array  # f[] of the unigram law
    ids: jax.Array  # i32[2,K] successors by the trigram and the bigram row, -1 = none
    mass: jax.Array  # f[2,K]


def _row(tables: Tables, weights: Weights, before: jax.Array, newest: jax.Array) -> _Row:
    """What the tables say after the tokens ``before``, ``newest`` i32[] (-1: there is none)."""
    two_ids = jnp.where(newest >= 0, jnp.take(tables.bigram_ids, newest, axis=0, mode="clip"), -1)
    two = jnp.take(tables.bigram_probs, newest, axis=0, mode="clip")
    l2 = jnp.where((two_ids[0] >= 0) & (weights.order >= 2), weights.bigram, 0).astype(two.dtype)
    slots = tables.trigram_keys.shape[0]
    places = (ngram_tables.slot(before, newest, slots) + jnp.arange(PROBES)) % slots
    keys = tables.trigram_keys[places]
    match = (keys[:, 0] == before) & (keys[:, 1] == newest)
    found = match.any() & (before >= 0) & (newest >= 0)
    at = tables.trigram_rows[places[jnp.argmax(match)]]
    if tables.trigram_ids.shape[0] == 0:  # a text of less than three tokens
        three_ids, three = jnp.full_like(two_ids, -1), jnp.zeros_like(two)
    else:
        three_ids, three = tables.trigram_ids[at], tables.trigram_probs[at]
    l3 = jnp.where(found & (weights.order >= 3), weights.trigram, 0).astype(two.dtype)
    ids = jnp.stack([jnp.where(l3 > 0, three_ids, -1), jnp.where(l2 > 0, two_ids, -1)])
    mass = jnp.stack([l3 * three, (1 - l3) * l2 * two])
    return _Row((1 - l3) * (1 - l2), ids, mass)


def mixture(tables: Tables, weights: Weights, before: jax.Array, newest: jax.Array) -> jax.Array:
    """f32[V]: the law of the next token after ``before``, ``newest`` i32[] (-1: there is none)."""
    row = _row(tables, weights, before, newest)
    size = tables.unigram.shape[0]
    flat = jnp.where(row.ids >= 0, row.ids, size).reshape(-1)  # beyond the end: dropped
    return (row.share * tables.unigram).at[flat].add(row.mass.reshape(-1), mode="drop")


def most_probable(
    tables: Tables, weights: Weights, before: jax.Array, newest: jax.Array
) -> jax.Array:
    """i32[]: the token where ``mixture`` is largest, the lowest on ties, without writing the law out.

    It is in one of the sparse rows, or else the unigram law's own best.
    """
    row = _row(tables, weights, before, newest)
    ids = jnp.append(row.ids.reshape(-1), sampling.argmax(jnp.asarray(tables.unigram)))
    rows = ((ids[:, None, None] == row.ids) * row.mass).sum((1, 2))
    score = row.share * tables.unigram[jnp.maximum(ids, 0)] + rows
    score = jnp.where(ids >= 0, score, -1)
    return jnp.min(jnp.where(score == score.max(), ids, tables.unigram.shape[0])).astype(jnp.int32)
