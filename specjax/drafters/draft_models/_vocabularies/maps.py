"""Tables between two vocabularies, made once on the host: tokens with equal bytes, and spellings.

Sources: Timor et al. 2025 (2502.05202): the intersection of two vocabularies, and the probability
of a string.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from specjax.models.token_bytes import TokenBytes

# The most draft tokens that one target token is written as; of a longer one the last are kept.
PIECES = 16


class Maps(NamedTuple):
    """From the target's tokens to those of the draft model, V and W of them."""

    draft_of: np.ndarray  # i32[V] the draft token with the same bytes, -1: there is none
    pieces: np.ndarray  # i32[V,P] the draft tokens that a target token is written as, -1 padded
    sizes: np.ndarray  # i32[V] how many, at least 1
    spelled: bool  # whether a target token that is not special is written in draft tokens exactly

    @property
    def shared(self) -> int:
        """The number of tokens that both have."""
        return int((self.draft_of >= 0).sum())

    @property
    def ratio(self) -> int:
        """Draft tokens per target token, averaged over the vocabulary and rounded up."""
        return int(np.ceil(self.sizes.mean()))


# Equal vocabularies have the same tables: they take seconds for large ones.
@functools.lru_cache(maxsize=8)
def between(target: TokenBytes, draft: TokenBytes, size: int, width: int) -> Maps:
    """The tables for a target of ``size`` tokens and a draft model of ``width`` tokens."""
    draft_of, spelled = _same(target, draft, size, width), False
    # For a target token that the draft cannot express. Any token is right: the draft only reads it.
    unknown = draft.special.get("<unk>", 0)
    unknown = unknown if unknown < width else 0
    names = {i: text for text, i in target.special.items()}
    lists: list[list[int]] = []
    for token in range(size):
        data = target.tokens[token] if token < len(target.tokens) else None
        if token == target.begin and draft_of[token] < 0 and draft.begin is not None:
            pieces = [draft.begin]
        elif draft_of[token] >= 0:
            pieces = [int(draft_of[token])]
            spelled |= data is not None
        else:
            named = names.get(token, "").encode() if data is None else data
            pieces = [i for i in draft.encode(named) if i < width]
            written = b"".join(draft.tokens[i] or b"" for i in pieces)
            spelled |= bool(data) and written == data
        lists.append((pieces or [unknown])[-PIECES:])
    sizes = np.array([len(pieces) for pieces in lists], np.int32)
    table = np.full((size, sizes.max()), -1, np.int32)
    for token, pieces in enumerate(lists):
        table[token, : len(pieces)] = pieces
    return Maps(draft_of, table, sizes, spelled)


def _same(target: TokenBytes, draft: TokenBytes, size: int, width: int) -> np.ndarray:
    """i32[size]: ``Maps.draft_of``; no draft token is used twice.

    Tokens of a vocabulary with equal bytes (a letter, and its byte token) are paired in turn: byte
    tokens with byte tokens first. Special tokens are paired by name, then those that begin and end
    a text.
    """
    result = np.full(size, -1, np.int32)
    used: set[int] = set()

    def pair(ours: int | None, theirs: int | None) -> None:
        if ours is None or theirs is None or not (0 <= ours < size and 0 <= theirs < width):
            return
        if result[ours] < 0 and theirs not in used:
            result[ours] = theirs
            used.add(theirs)

    for text, token in target.special.items():
        pair(token, draft.special.get(text))
    # Ends first: a token can be the begin and the end of texts.
    for ours, theirs in zip(target.ends, draft.ends, strict=False):
        pair(ours, theirs)
    pair(target.begin, draft.begin)
    every = reversed(list(enumerate(draft.tokens)))
    known = {(data, i in draft.fallback): i for i, data in every if data}
    for token, data in enumerate(target.tokens):
        if data:
            pair(token, known.get((data, token in target.fallback)))
    for token in target.ids.values():
        pair(token, draft.ids.get(target.tokens[token] or b""))
    return result


class Trie(NamedTuple):
    """The target's tokens by their bytes: node 0 is the empty text."""

    keys: np.ndarray  # i32[K] ascending: node * 256 + byte
    children: np.ndarray  # i32[K] the node that follows
    token: np.ndarray  # i32[nodes] the token of a node, -1: none
    depth: int  # bytes of the longest token


@functools.lru_cache(maxsize=8)
def trie(vocabulary: TokenBytes, size: int, longest: int) -> Trie:
    """The trie of all tokens of at most ``longest`` bytes."""
    children: list[dict[int, int]] = [{}]
    token, depth = [-1], 0
    for data, i in vocabulary.ids.items():
        if i >= size or len(data) > longest:
            continue
        node, depth = 0, max(depth, len(data))
        for byte in data:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                token.append(-1)
            node = children[node][byte]
        token[node] = i
    edges = sorted((n * 256 + b, c) for n, below in enumerate(children) for b, c in below.items())
    pairs = np.array(edges, np.int32).reshape(-1, 2)
    return Trie(pairs[:, 0], pairs[:, 1], np.array(token, np.int32), depth)


class Spellings(NamedTuple):
    """All ways to write the target's tokens in draft tokens, as a tree of draft tokens.

    A node is a sequence of draft tokens whose bytes begin a target token. An edge adds the draft
    token that completes one.
    """

    tokens: np.ndarray  # i32[N] the newest draft token of each node
    parents: np.ndarray  # i32[N] the node without it, before it in order; -1: the empty sequence
    sources: np.ndarray  # i32[K] the node of each edge, -1: the empty sequence
    last: np.ndarray  # i32[K] the draft token that an edge adds
    completes: np.ndarray  # i32[K] the target token


@functools.lru_cache(maxsize=8)
def spellings(
    target: TokenBytes, draft: TokenBytes, size: int, width: int, most: int
) -> Spellings | None:
    """The spellings, sizes as in ``between``; None if they have more than ``most`` nodes."""
    maps = between(target, draft, size, width)
    prefixes = {data[:n] for data in target.ids for n in range(1, len(data))}
    pieces = [(i, data) for i, data in enumerate(draft.tokens[:width]) if data]
    tokens, parents, edges = [], [], []
    # Special tokens are one draft token.
    for token, special in enumerate(maps.draft_of):
        if special >= 0 and (token >= len(target.tokens) or target.tokens[token] is None):
            edges.append((-1, int(special), token))
    queue: list[tuple[int, bytes]] = [(-1, b"")]
    for node, text in queue:
        for i, data in pieces:
            longer = text + data
            if longer in target.ids and target.ids[longer] < size:
                edges.append((node, i, target.ids[longer]))
            if longer in prefixes:
                queue.append((len(tokens), longer))
                tokens.append(i)
                parents.append(node)
            if len(tokens) > most:
                return None
    table = np.array(edges, np.int32).reshape(-1, 3)
    return Spellings(np.array(tokens, np.int32), np.array(parents, np.int32), *table.T)
