"""Lookahead decoding: one pass refines a window of guesses and tests n-grams of earlier rounds. L1.

Fu et al. 2024 (2402.02057). The window has N - 1 rows and W columns. Token (r, c) is the guess for
the position c + r after the pending token, which is token (0, 0). It attends to the text, to row 0
up to column c, and to rows 1..r of its own column. This is a tree: the parent of (0, c) is
(0, c - 1), and the parent of (r, c) is (r - 1, c). So the window goes to the target as nodes of the
draft that are not valid: rules skip them, and ``update`` reads the target's outputs after them. It
always takes the argmax, so the draft is a function of the past however the rows are sampled.

A round takes the argmax after the last row. Each column with its argmax is an n-gram, which is
stored in the pool of its first token. Then every row moves up, and the argmax becomes the last row.
The candidates are the N - 1 tokens after the pending token in its G newest n-grams, merged into a
trie; they are the first nodes of the draft.

Differences from the original code: a round that emits several tokens moves the window by all of
them (there by one position); columns that enter on the right begin as pieces of the row's own text;
an accepted n-gram of N - 1 tokens yields the bonus token too (there it is lost); end-of-sequence is
an ordinary token in the window, because a drafter does not receive its id.

Memory: B * V * G * (N - 1) * 4 bytes (3.6 MB per row at V = 32 000 and the defaults).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import declare, sampling
from specjax.bound import Bound
from specjax.declare import key
from specjax.drafters.parallel.jacobi import pieces
from specjax.topology import shapes
from specjax.types import DETERMINISTIC, LM, Array, Draft, Drafter

REFERENCE = "fu2024break"


class State(struct.PyTreeNode):
    """Each row's window and pool."""

    window: Array  # i32[B,N-1,W]
    filled: Array  # i32[B] rows of the window that are filled, 1..N-1
    length: Array  # i32[B] length of the text at column 0; a longer text drops columns
    pool: Array  # i32[B,V,G,N-1] what followed each token, the newest first; -1 = empty


def insert(pool: Array, key: Array, gram: Array) -> Array:
    """The pool with ``gram`` as the newest n-gram of token ``key``.

    An equal n-gram moves to the front; otherwise the oldest is dropped.

    Args:
        pool: i32[B,V,G,L].
        key: i32[B]; V: no insertion in this row.
        gram: i32[B,L].
    """
    row, slot = jnp.arange(pool.shape[0]), jnp.arange(pool.shape[2])
    held = pool[row, jnp.minimum(key, pool.shape[1] - 1)]
    same = (held == gram[:, None]).all(-1)
    # The slot of the n-gram that is dropped or moved.
    gap = jnp.where(same.any(-1), jnp.argmax(same, -1), pool.shape[2] - 1)
    moved = jnp.where((slot <= gap[:, None])[..., None], jnp.roll(held, 1, axis=1), held)
    return pool.at[row, key].set(moved.at[:, 0].set(gram), mode="drop")


class Keys(declare.Keys):
    """The keys of ``lookahead``."""

    LENGTH = "ngram"

    window: int = key(7, "W, columns of the window: n-grams harvested per round", least=1)
    ngram: int = key(
        5,
        "N, tokens of an n-gram, the first of which is its key; at most N - 1 draft tokens are "
        "accepted",
        least=2,
    )
    candidates: int = key(7, "G, n-grams kept for each token, and tested per round", least=1)
    pool_from_prompt: bool = key(
        False, "whether the prompt's own n-grams are put into the pool first"
    )

    @property
    def rows(self) -> int:
        """Rows of the window, and the longest path of a draft."""
        return self.ngram - 1

    @property
    def tested(self) -> int:
        """Nodes of the candidates."""
        return self.candidates * self.rows


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts n-grams of the target's own outputs in earlier rounds.

    A draft has ``(ngram - 1) * (window + candidates) - 1`` nodes.

    Raises:
        UserError: window or candidates below 1, ngram below 2, ``pool_from_prompt`` neither true
            nor false.
    """
    return Drafter(
        init=Bound(_init, keys, target.vocab_size),
        propose=Bound(_propose, keys),
        update=Bound(_update, keys, target.vocab_size),
        nodes=keys.tested + keys.rows * keys.window - 1,
        name="lookahead",
        siblings=DETERMINISTIC,
        depth=keys.rows,
        features=True,
        history=True,
    )


def _init(settings: Keys, vocab: int, params, context, target_out, slots):
    rows, ngram = settings.rows, settings.ngram
    batch, size = context.tokens.shape
    pool = jnp.full((batch, vocab, settings.candidates, rows), -1, jnp.int32)

    def from_prompt(start, pool):
        piece = jax.lax.dynamic_slice_in_dim(context.tokens, start, ngram, 1)
        key = jnp.where(start + rows < context.length, piece[:, 0], vocab)
        return insert(pool, key, piece[:, 1:])

    if settings.pool_from_prompt and size >= ngram:
        pool = jax.lax.fori_loop(0, size - rows, from_prompt, pool)
    columns = _new_columns(settings, context)
    return State(columns, jnp.ones((batch,), jnp.int32), context.length, pool)


def _new_columns(settings: Keys, context) -> Array:
    """A column for each of the W positions from the pending token on, i32[B,N-1,W]."""
    places = context.length[:, None] - 1 + jnp.arange(settings.window)
    return pieces(context.tokens, context.length, places, settings.rows).swapaxes(1, 2)


def _window_parents(settings: Keys) -> np.ndarray:
    """The parents of the window's nodes in the draft, row by row, without the pending token."""
    window = settings.window
    place = np.arange(1, settings.rows * window)
    above = np.where(place < window, place - 1, place - window)
    return np.where(above > 0, settings.tested + above - 1, -1).astype(np.int32)


def _propose(settings: Keys, params, keys, context, state):
    batch, pending, window = context.length.shape[0], context.pending, settings.window
    column = (context.length - state.length)[:, None] + jnp.arange(window)
    kept = jnp.take_along_axis(state.window, jnp.minimum(column, window - 1)[:, None], 2)
    view = jnp.where((column < window)[:, None], kept, _new_columns(settings, context))
    view = view.at[:, 0, 0].set(pending)
    grams = state.pool[jnp.arange(batch), pending]
    tokens, parents, valid = shapes.merge_batched(grams, grams >= 0)
    guesses = view.reshape(batch, -1)[:, 1:]
    guess_parents = jnp.broadcast_to(jnp.asarray(_window_parents(settings)), guesses.shape)
    draft = Draft(
        tokens=jnp.concatenate([tokens, guesses], 1),
        valid=jnp.concatenate([valid, jnp.zeros_like(guesses, bool)], 1),
        parents=jnp.concatenate([parents, guess_parents], 1),
        # The window is invalid, and the target's output at each of its places is read.
        fed=jnp.full((batch,), settings.tested + guesses.shape[1], jnp.int32),
        depth=settings.rows,
    )
    return draft, state.replace(window=view, length=context.length)


def _update(settings: Keys, vocab: int, params, state, draft, verdict, target_out):
    rows, window = settings.rows, settings.window
    moved, full = verdict.count > 0, state.filled == rows
    # The last filled row, numbered in the window row by row.
    last = (state.filled[:, None] - 1) * window + jnp.arange(window)
    node = jnp.where(last == 0, 0, settings.tested + last)
    new = sampling.argmax(jnp.take_along_axis(target_out.logits, node[..., None], 1))
    rolled = jnp.concatenate([state.window[:, 1:], new[:, None]], 1)
    key = jnp.where((moved & full)[:, None], state.window[:, 0], vocab)

    def harvest(column, pool):
        return insert(pool, key[:, column], rolled[:, :, column])

    # In the first N - 2 rounds the argmax fills the next row, and no row moves up.
    next_row = jnp.arange(rows)[:, None] == state.filled[:, None, None]
    grown = jnp.where(next_row, new[:, None], state.window)
    after = jnp.where(full[:, None, None], rolled, grown)
    return State(
        window=jnp.where(moved[:, None, None], after, state.window),
        filled=jnp.minimum(state.filled + moved, rows),
        # Rows that move up advance by one position; ``_propose`` drops columns for the rest.
        length=state.length + (moved & full),
        pool=jax.lax.fori_loop(0, window, harvest, state.pool),
    )
