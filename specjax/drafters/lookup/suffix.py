"""SuffixDecoding: the best-scored continuation over all match lengths, in the row's text and in earlier outputs. L1.

Oliaro et al. 2024 (2411.04975), card C8. For every length m of a matched suffix there is a candidate of at most
``factor * m + offset`` tokens: a tree of the most probable continuations, or the path of the most frequent child. A token's
probability is the share of the occurrences of the m tokens that went on to it; a candidate's score is the sum over its
tokens, which is the number of tokens that it expects to be accepted. The best over m and over both places wins, the longer
match among equals.

The original keeps suffix trees, one per request and one of all outputs. Their counts are counts of occurrences, which are
found here by comparing (the row's text) and through a suffix array (earlier outputs): exact up to ``samples`` occurrences a
match, without any state that has to follow the text. The tree of all outputs leaks between users, so it is empty unless a
``datastore`` is given or the caller asks it to learn (``warm``).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import counts, ngrams, number, one_of
from specjax.drafters.lookup import _frequency, _match, _memory
from specjax.drafters.lookup._suffix_array import find, follow, last_tokens, sample
from specjax.errors import UserError
from specjax.types import CHAIN, DETERMINISTIC, LM, Draft, Drafter


class _Found(NamedTuple):
    """Continuations after each match length m = 1..M: an entry per prefix (see ``_frequency.Prefixes``)."""

    tokens: jax.Array  # i32[M,K,D] last token of each prefix
    first: jax.Array  # i32[M,K,D] the continuation that speaks for it
    prob: (
        jax.Array
    )  # f32[M,K,D] share of the occurrences; 0 where the entry is no prefix of its own


def make(
    target: LM,
    *,
    nodes: int = 16,
    depth: int = 16,
    mode: str = "tree",
    max_ngram: int = 16,
    min_ngram: int = 1,
    factor: float = 1.0,
    offset: float = 0.0,
    min_prob: float = 0.1,
    min_score: float = 0.0,
    samples: int = 32,
    datastore: _memory.Given = None,
    memory: int = 65536,
) -> Drafter:
    """Drafts by suffix statistics.

    Args:
        target: the model to be accelerated; only its vocabulary is read.
        nodes: tokens drafted at the most.
        depth: longest path.
        mode: "tree", or "path" for a chain.
        max_ngram: longest match looked for.
        min_ngram: shortest match looked for.
        factor, offset: a match of m tokens may propose ``factor * m + offset`` of them.
        min_prob: tokens below this probability, given the match, are not proposed.
        min_score: nothing is proposed below this score (``escalate`` then asks its next drafter).
        samples: occurrences looked at for each match; in the own text the latest of those with the longest match.
        datastore: earlier outputs to begin with: a ``Store`` or the directory of one.
        memory: tokens of earlier outputs kept, beside the datastore, when it learns.

    Raises:
        UserError: numbers out of range, unknown ``mode``, a datastore of another tokenizer.
    """
    counts(nodes=nodes, depth=depth, samples=samples)
    ngrams(max_ngram, min_ngram)
    one_of("mode", mode, ("tree", "path"))
    number("min_prob", min_prob, "in [0, 1]", lambda x: 0 <= x <= 1)
    number("min_score", min_score, ">= 0", lambda x: x >= 0)
    number("factor", factor, ">= 0", lambda x: x >= 0)
    number("offset", offset, "that is finite", lambda x: True)
    if factor * max_ngram + offset < 1:
        raise UserError(
            f"factor is {factor} and offset {offset}: even a match of {max_ngram} tokens may propose nothing; raise one"
        )
    store = _memory.load(target, datastore, max_ngram)
    reach = _memory.reach(store, max_ngram)
    sizes = jnp.arange(1, max_ngram + 1)
    allowed = jnp.where(
        sizes >= min_ngram, jnp.clip(jnp.floor(factor * sizes + offset + 1e-6), 0, nodes), 0
    )
    depth = min(depth, nodes)

    def own(text, length) -> _Found:
        ends, got = _match.best(_match.own_runs(text, length, max_ngram), samples, max_ngram)
        windows = jnp.where((got > 0)[:, None], _match.windows(text, ends, depth, length), -1)
        given = _frequency.prefixes(windows)
        # The longest matches come first, so the occurrences of each length are the first few: a new prefix stays new.
        among = got >= sizes[:, None]  # [M,K] the occurrences of the last m tokens
        count = among.sum(-1)
        same = given.common[..., None] > jnp.arange(depth)
        weight = jnp.einsum("mj,ijd->mid", among.astype(jnp.float32), same.astype(jnp.float32))
        mine = given.kept & (jnp.arange(samples) < count[:, None])[..., None]
        prob = jnp.where(mine, weight / jnp.maximum(count, 1)[:, None, None], 0)
        spread = lambda x: jnp.broadcast_to(x, prob.shape)  # noqa: E731
        return _Found(spread(given.tokens), spread(given.first), prob)

    def others(tokens, order, text, length) -> _Found:
        low, high = find(tokens, order, last_tokens(text, length, max_ngram), reach)

        def one(low, high, size):
            places = sample(order, low, high, samples)
            given = _frequency.prefixes(
                follow(tokens, jnp.where(places >= 0, places + size, -1), depth)
            )
            # A document may end here: only occurrences that something follows count, as in the row's own text.
            going = (jnp.diagonal(given.common) > 0).astype(jnp.float32)
            weight = _frequency.weigh(given, going) / jnp.maximum(going.sum(), 1)
            return _Found(given.tokens, given.first, jnp.where(given.kept, weight, 0))

        return jax.vmap(one)(low, high, sizes)

    def as_tree(found: _Found, count):
        """One candidate, count f32[]: (tokens i32[N], parents, valid, score)."""
        tokens, parents, valid, prob = _frequency.heaviest(
            found.tokens, found.first, found.prob, nodes
        )
        return tokens, parents, valid & (jnp.arange(nodes) < count) & (prob >= min_prob)

    def tree_score(found: _Found, count):
        flat = jnp.where(found.prob >= min_prob, found.prob, 0).reshape(-1)
        best = jax.lax.top_k(flat, min(nodes, flat.shape[0]))[0]
        return jnp.where(jnp.arange(best.shape[0]) < count, best, 0).sum()

    def as_path(found: _Found, count):
        """The most frequent child, again and again: tokens i32[N], valid bool[N] and its score."""
        tokens, valid, score, on, above = [], [], jnp.zeros(()), jnp.asarray(True), None
        for level in range(depth):
            prob = found.prob[:, level]
            if above is not None:
                prob = jnp.where(found.first[:, level - 1] == above, prob, 0)
            above = jnp.argmax(prob)
            on &= (prob[above] > 0) & (prob[above] >= min_prob) & (level < count)
            tokens.append(found.tokens[above, level])
            valid.append(on)
            score += jnp.where(on, prob[above], 0)
        pad = (0, nodes - depth)
        return jnp.pad(jnp.stack(tokens), pad), jnp.pad(jnp.stack(valid), pad), score

    def row(store, text, length):
        found, count = own(text, length), allowed
        if store:
            more = others(store["tokens"], store["order"], text, length)
            found = jax.tree.map(lambda *x: jnp.concatenate(x), found, more)
            count = jnp.concatenate([allowed, allowed])
        score: jax.Array = jax.vmap(tree_score if mode == "tree" else lambda *x: as_path(*x)[2])(
            found, count
        )
        # The longest match among equals, and the row's own text before others': the last one of this order.
        order = jnp.argsort(
            jnp.tile(sizes, len(count) // max_ngram) * 2 + (jnp.arange(len(count)) < max_ngram)
        )
        best = order[len(count) - 1 - jnp.argmax(score[order][::-1])]
        chosen = jax.tree.map(lambda x: x[best], found)
        good = (score[best] > 0) & (score[best] >= min_score)
        if mode == "path":
            tokens, valid, _ = as_path(chosen, count[best])
            return tokens, valid & good
        tokens, parents, valid = as_tree(chosen, count[best])
        return tokens, valid & good, parents

    def propose(params, keys, context, state):
        found = jax.vmap(row, (None, 0, 0))(params.draft, context.tokens, context.length)
        return Draft(*found, depth=None if mode == "path" else depth), state

    return Drafter(
        init_params=lambda key: _memory.params(store),
        init=lambda params, context, target_out, slots: (),
        propose=propose,
        update=lambda params, state, draft, verdict, target_out: state,
        nodes=nodes,
        name="suffix",
        siblings=CHAIN if mode == "path" else DETERMINISTIC,
        depth=None if mode == "path" else depth,
        learn=_memory.learner(store, max_ngram, memory),
    )
