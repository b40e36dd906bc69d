"""SuffixDecoding: the best-scored continuation over all match lengths. L1.

Oliaro et al. 2024 (2411.04975). The row's text and earlier outputs are searched. For every length m
of a matched suffix there is a candidate of at most ``factor * m + offset`` tokens: a tree of the
most probable continuations, or the path of the most frequent child. A token's probability is the
share of the occurrences of the m tokens that continue with it. A candidate's score is the sum of
its tokens' probabilities, the expected number of accepted tokens. The candidate with the highest
score over all m and both places is proposed; among equal scores the one of the longest match.

The original keeps suffix trees, one per request and one of all outputs. Their counts are counts of
occurrences. Here the occurrences are counted by comparing (the row's text) and with a suffix array
(earlier outputs). The counts are exact up to ``samples`` occurrences per match, and no state has to
follow the text. A tree of all outputs carries text from one user to another, so it is empty unless
a ``datastore`` is given or the caller lets the drafter learn (``warm``).

Defaults that differ from the original's: trees (there paths), at most 16 tokens per match and per
draft (there suffix trees of depth 64, which match and draft share, and drafts of up to 64 tokens),
and no earlier outputs (there a tree of all outputs).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import declare
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters.lookup import _frequency, _memory
from specjax.drafters.lookup._match import (
    Sizes,
    find,
    follow,
    last_tokens,
    own_continuations,
    sample,
)
from specjax.drafters.shared_keys import DatastoreKeys
from specjax.errors import UserError
from specjax.types import LM, Array, Drafter

REFERENCE = "oliaro2025suffixdecoding"

SIZE = 16  # nodes and depth, where they are not given


class Settings(NamedTuple):
    """Static settings; see ``make``."""

    keys: Keys
    nodes: int
    depth: int  # at most nodes
    sizes: Sizes

    @property
    def lengths(self) -> Array:
        """i32[M] the match lengths."""
        return jnp.arange(1, self.sizes.most + 1, dtype=jnp.int32)

    @property
    def limits(self) -> Array:
        """f32[M] the most tokens of a candidate, for each match length."""
        keys, sizes = self.keys, np.arange(1, self.sizes.most + 1, dtype=np.float32)
        limits = np.clip(np.floor(keys.factor * sizes + keys.offset + 1e-6), 0, self.nodes)
        return jnp.asarray(np.where(sizes >= keys.min_ngram, limits, 0), jnp.float32)


class _Candidates(NamedTuple):
    """Continuations after each match length m = 1..M: one entry per ``_frequency.Prefixes``."""

    tokens: Array  # i32[M,K,D] last token of each prefix
    first: Array  # i32[M,K,D] the first continuation with this prefix
    prob: Array  # f32[M,K,D] share of the occurrences; 0 where ``is_first`` is False


class Keys(DatastoreKeys):
    """The keys of ``suffix``."""

    LENGTH = "depth"

    nodes: int | None = key(None, "most tokens drafted. None: 16, of a path ``depth``.", least=1)
    depth: int | None = key(None, "longest path. None: 16, of a path ``nodes``.", least=1)
    mode: str = key(
        "tree",
        '"tree", or "path" for a chain, which has no more nodes than ``depth``',
        choices=("tree", "path"),
    )
    max_ngram: int = key(16, "longest match")
    min_ngram: int = key(1, "shortest match")
    factor: float = key(
        1.0, "a match of m tokens may propose ``factor * m + offset`` tokens", least=0
    )
    offset: float = key(0.0, "see ``factor``")
    min_prob: float = key(
        0.1, "tokens with a lower probability, given the match, are not proposed", least=0, most=1
    )
    min_score: float = key(
        0.0,
        "candidates with a lower score are not proposed (``escalate`` then asks its next drafter)",
        least=0,
    )
    samples: int = key(
        32,
        "occurrences used for each match; in the row's own text the longest matches, the latest "
        "first",
        least=1,
    )

    def check(self) -> None:
        super().check()
        if self.mode == "path" and self.nodes and self.depth and self.nodes > self.depth:
            raise UserError(
                f"nodes is {self.nodes} and depth {self.depth}: a path has at most {self.depth} "
                "nodes; lower nodes, or raise depth"
            )
        if self.factor * self.max_ngram + self.offset < 1:
            raise UserError(
                f"factor is {self.factor} and offset {self.offset}: "
                f"even a match of {self.max_ngram} tokens may propose no token; raise one of them"
            )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts by suffix statistics.

    Raises:
        UserError: numbers out of range, unknown ``mode``, more nodes than a path can have, a
            datastore of another tokenizer.
    """
    tree = keys.mode == "tree"
    nodes = keys.nodes or (None if tree else keys.depth) or SIZE
    depth = min(keys.depth or SIZE, nodes) if tree else nodes
    store = _memory.load(target, keys.datastore, keys.max_ngram)
    # The limits leave out what is shorter than ``min_ngram``.
    sizes = Sizes(keys.max_ngram, 1, _memory.reach(store, keys.max_ngram))
    settings = Settings(keys.settings(), nodes, depth, sizes)
    row = Bound(_row, settings)
    return _memory.drafter("suffix", keys, store, row, nodes, depth if tree else None)


def _row(settings: Settings, store, text, length, state) -> tuple:
    """One row's draft: tokens i32[N], valid bool[N], and for a tree parents i32[N]."""
    limit, candidates = settings.limits, _own(settings, text, length)
    if store:
        stored = _stored(settings, **store, text=text, length=length)
        candidates = jax.tree.map(lambda *x: jnp.concatenate(x), candidates, stored)
        limit = jnp.concatenate([limit, limit])
    tree = settings.keys.mode == "tree"
    scored = _tree_score if tree else lambda *args: _as_path(*args)[2]
    score = jax.vmap(Bound(scored, settings))(candidates, limit)
    best = _best_candidate(settings, score)
    chosen = jax.tree.map(lambda x: x[best], candidates)
    good = (score[best] > 0) & (score[best] >= settings.keys.min_score)
    if tree:
        tokens, parents, valid = _as_tree(settings, chosen, limit[best])
        return tokens, valid & good, parents
    tokens, valid, _ = _as_path(settings, chosen, limit[best])
    return tokens, valid & good


def _own(settings: Settings, text, length) -> _Candidates:
    """The candidates of the row's own text."""
    samples, depth = settings.keys.samples, settings.depth
    windows, _, runs = own_continuations(text, length, settings.sizes, samples, depth)
    prefixes = _frequency.prefixes(windows)
    # The longest runs come first. So the occurrences of each length are the first few, and a prefix
    # that is new among all occurrences is new among these. [M,K]: those of the last m tokens.
    among = runs >= settings.lengths[:, None]
    count = among.sum(-1)
    same = prefixes.common[..., None] > jnp.arange(depth)
    weight = jnp.einsum("mj,ijd->mid", among.astype(jnp.float32), same.astype(jnp.float32))
    new = prefixes.is_first & (jnp.arange(samples) < count[:, None])[..., None]
    prob = jnp.where(new, weight / jnp.maximum(count, 1)[:, None, None], 0)
    tokens, first = (jnp.broadcast_to(x, prob.shape) for x in (prefixes.tokens, prefixes.first))
    return _Candidates(tokens, first, prob)


def _stored(settings: Settings, tokens, order, text, length) -> _Candidates:
    """The candidates of earlier outputs."""
    pattern = last_tokens(text, length, settings.sizes.most)
    low, high = find(tokens, order, pattern, settings.sizes.reach)

    def one(low, high, size):
        places = sample(order, low, high, settings.keys.samples)
        places = jnp.where(places >= 0, places + size, -1)
        prefixes = _frequency.prefixes(follow(tokens, places, settings.depth))
        # A document may end here. Only occurrences with a continuation count, as in the row's text.
        continued = (jnp.diagonal(prefixes.common) > 0).astype(jnp.float32)
        prob = _frequency.weigh(prefixes, continued) / jnp.maximum(continued.sum(), 1)
        return _Candidates(prefixes.tokens, prefixes.first, jnp.where(prefixes.is_first, prob, 0))

    return jax.vmap(one)(low, high, settings.lengths)


def _tree_score(settings: Settings, candidate: _Candidates, limit) -> Array:
    """The score of one candidate as a tree of at most ``limit`` f32[] tokens, f32[]."""
    prob = jnp.where(candidate.prob >= settings.keys.min_prob, candidate.prob, 0).reshape(-1)
    best = jax.lax.top_k(prob, min(settings.nodes, prob.shape[0]))[0]
    return jnp.where(jnp.arange(best.shape[0]) < limit, best, 0).sum()


def _best_candidate(settings: Settings, score) -> Array:
    """The number of the candidate with the highest score, i32[].

    Among equal scores the longest match, and the row's own text before earlier outputs.
    """
    size, count = settings.sizes.most, len(score)
    order = jnp.argsort(jnp.tile(settings.lengths, count // size) * 2 + (jnp.arange(count) < size))
    return order[count - 1 - jnp.argmax(score[order][::-1])]


def _as_tree(settings: Settings, candidate: _Candidates, limit):
    """One candidate as a tree: tokens i32[N], parents i32[N], valid bool[N]."""
    nodes = settings.nodes
    tree = _frequency.heaviest(candidate.tokens, candidate.first, candidate.prob, nodes)
    valid = tree.valid & (jnp.arange(nodes) < limit) & (tree.weight >= settings.keys.min_prob)
    return tree.tokens, tree.parents, valid


def _as_path(settings: Settings, candidate: _Candidates, limit):
    """The path of the most frequent child: tokens i32[N], valid bool[N] and its score f32[]."""
    tokens, valid, score, going, above = [], [], jnp.zeros(()), jnp.asarray(True), None
    for level in range(settings.depth):
        prob = candidate.prob[:, level]
        if above is not None:
            prob = jnp.where(candidate.first[:, level - 1] == above, prob, 0)
        above = jnp.argmax(prob)
        going &= (prob[above] > 0) & (prob[above] >= settings.keys.min_prob) & (level < limit)
        tokens.append(candidate.tokens[above, level])
        valid.append(going)
        score += jnp.where(going, prob[above], 0)
    pad = (0, settings.nodes - settings.depth)
    return jnp.pad(jnp.stack(tokens), pad), jnp.pad(jnp.stack(valid), pad), score
