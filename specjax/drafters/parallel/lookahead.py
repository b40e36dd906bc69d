"""Lookahead decoding: one pass refines a window of guesses, harvests n-grams from it, and tests n-grams of earlier rounds. L1.

Fu et al. 2024 (2402.02057), card C6. The window has N - 1 rows and W columns. Token (r, c) stands c + r positions after the
pending token, which is token (0, 0); it sees the text, row 0 up to column c, and rows 1..r of its own column. That is a
tree: (0, c) hangs from (0, c - 1), and (r, c) from (r - 1, c). So the window goes to the target as nodes of the draft that
are not valid: rules pass over them, and ``update`` reads what the target says after them. It always takes the argmax, so the
draft is a function of the past, however the rows are sampled.

A round takes the argmax after the last row. Each column with it is an n-gram, which goes into the pool of its first
token; then every row moves up, and the argmax becomes the last one. The N - 1 tokens that followed the pending token in each of
its G newest n-grams are merged into a trie: the candidates, which come first among the nodes.

Where this differs from the original code: a round that emits several tokens moves the window as far as the text went (there
by one position); columns that enter on the right begin as pieces of the row's own text; an accepted n-gram of N - 1 tokens
gives its free token (there it is lost); end-of-sequence is a token like others in the window, for a drafter is not told which
it is.

Memory: B * V * G * (N - 1) * 4 bytes (3.6 MB a row at V = 32 000 and the defaults).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import sampling
from specjax.checks import whole
from specjax.drafters.parallel._pieces import pieces
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import DETERMINISTIC, LM, Draft, Drafter


class State(struct.PyTreeNode):
    """A row's window and pool."""

    window: jax.Array  # i32[B,N-1,W]
    filled: jax.Array  # i32[B] rows of the window that mean something, 1..N-1
    length: jax.Array  # i32[B] the text's length that the window is made for; columns make up for what it grew since
    pool: jax.Array  # i32[B,V,G,N-1] what followed each token, the newest first; -1 = empty


def insert(pool: jax.Array, key: jax.Array, gram: jax.Array) -> jax.Array:
    """The pool i32[B,V,G,L] with ``gram`` i32[B,L] as the newest of token ``key`` i32[B]; a key of V changes nothing.

    An equal n-gram moves to the front, otherwise the oldest falls out.
    """
    row, slot = jnp.arange(pool.shape[0]), jnp.arange(pool.shape[2])
    held = pool[row, jnp.minimum(key, pool.shape[1] - 1)]
    same = (held == gram[:, None]).all(-1)
    gap = jnp.where(
        same.any(-1), jnp.argmax(same, -1), pool.shape[2] - 1
    )  # the slot that is given up
    moved = jnp.where((slot <= gap[:, None])[..., None], jnp.roll(held, 1, axis=1), held)
    return pool.at[row, key].set(moved.at[:, 0].set(gram), mode="drop")


@functools.cache  # equal arguments, the same drafter: nothing is compiled twice
def make(
    target: LM,
    *,
    window: int = 7,
    ngram: int = 5,
    candidates: int = 7,
    pool_from_prompt: bool = False,
) -> Drafter:
    """Drafts n-grams that the target itself wrote down in earlier rounds. ``(ngram - 1) * (window + candidates) - 1`` nodes.

    Args:
        target: any model; only its vocabulary's size is read.
        window: W, columns of the window: n-grams harvested per round.
        ngram: N, tokens of an n-gram, the first of which is its key; at most N - 1 draft tokens are accepted.
        candidates: G, n-grams kept of each token, and tested per round.
        pool_from_prompt: whether the prompt's own n-grams go into the pool first.

    Raises:
        UserError: window or candidates below 1, ngram below 2, ``pool_from_prompt`` neither true nor false.
    """
    whole("window", window, 1)
    whole("ngram", ngram, 2)
    whole("candidates", candidates, 1)
    if not isinstance(pool_from_prompt, bool):
        raise UserError(f"pool_from_prompt is {pool_from_prompt!r}; it must be True or False")
    vocab, rows, tested = target.vocab_size, ngram - 1, candidates * (ngram - 1)
    place = np.arange(1, rows * window)  # of the window's tokens but the pending one, row by row
    above = np.where(place < window, place - 1, place - window)
    looking = np.where(above > 0, tested + above - 1, -1).astype(np.int32)

    def refilled(context):
        """i32[B,N-1,W]: a column for each of the W positions from the pending token on."""
        places = context.length[:, None] - 1 + jnp.arange(window)
        return pieces(context.tokens, context.length, places, rows).swapaxes(1, 2)

    def init(params, context, target_out, slots):
        batch, size = context.tokens.shape
        pool = jnp.full((batch, vocab, candidates, rows), -1, jnp.int32)

        def from_prompt(start, pool):
            piece = jax.lax.dynamic_slice_in_dim(context.tokens, start, ngram, 1)
            return insert(
                pool, jnp.where(start + rows < context.length, piece[:, 0], vocab), piece[:, 1:]
            )

        if pool_from_prompt and size >= ngram:
            pool = jax.lax.fori_loop(0, size - rows, from_prompt, pool)
        return State(refilled(context), jnp.ones((batch,), jnp.int32), context.length, pool)

    def propose(params, keys, context, state):
        batch, pending = context.length.shape[0], context.pending
        column = (context.length - state.length)[:, None] + jnp.arange(window)
        kept = jnp.take_along_axis(state.window, jnp.minimum(column, window - 1)[:, None], 2)
        view = (
            jnp.where((column < window)[:, None], kept, refilled(context)).at[:, 0, 0].set(pending)
        )
        grams = state.pool[jnp.arange(batch), pending]
        tokens, parents, valid, _ = shapes.merge_batched(grams, grams >= 0)
        seen = view.reshape(batch, -1)[:, 1:]
        draft = Draft(
            tokens=jnp.concatenate([tokens, seen], 1),
            valid=jnp.concatenate([valid, jnp.zeros_like(seen, bool)], 1),
            parents=jnp.concatenate(
                [parents, jnp.broadcast_to(jnp.asarray(looking), seen.shape)], 1
            ),
            depth=rows,
        )
        return draft, state.replace(window=view, length=context.length)

    def update(params, state, draft, verdict, target_out):
        moved, full = verdict.count > 0, state.filled == rows
        last = (state.filled[:, None] - 1) * window + jnp.arange(
            window
        )  # of the window's tokens, row by row
        node = jnp.where(last == 0, 0, tested + last)
        new = sampling.argmax(jnp.take_along_axis(target_out.logits, node[..., None], 1))
        rolled = jnp.concatenate([state.window[:, 1:], new[:, None]], 1)
        key = jnp.where((moved & full)[:, None], state.window[:, 0], vocab)

        def harvest(column, pool):
            return insert(pool, key[:, column], rolled[:, :, column])

        # In the first N - 2 rounds the argmax fills the next row, and nothing moves up.
        grown = jnp.where(
            jnp.arange(rows)[:, None] == state.filled[:, None, None], new[:, None], state.window
        )
        after = jnp.where(full[:, None, None], rolled, grown)
        return State(
            window=jnp.where(moved[:, None, None], after, state.window),
            filled=jnp.minimum(state.filled + moved, rows),
            length=state.length
            + (moved & full),  # to move up is to move by one; the rest is for columns
            pool=jax.lax.fori_loop(0, window, harvest, state.pool),
        )

    return Drafter(
        init_params=lambda key: {},
        init=init,
        propose=propose,
        update=update,
        nodes=tested + rows * window - 1,
        name="lookahead",
        siblings=DETERMINISTIC,
        depth=rows,
        features=True,
    )
