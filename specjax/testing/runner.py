"""Runs a drafter with a rule through the compiled loop, on thousands of rows of unequal length.

Every run has the same shapes, so one compiled program serves every check of a pair.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, rng, sampling
from specjax.drafters import none
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams

# Rows of a run, the longest prompt, the most new tokens, and the rounds in one call of generate.
BATCH, WIDTH, NEW, STEPS = 3_000, 6, 9, 3
# An id outside every vocabulary: no token ends a row.
NO_EOS = -5


class Rows(NamedTuple):
    """The inputs of one run."""

    tokens: jax.Array  # i32[B,WIDTH] prompts, padded with -1
    lengths: jax.Array  # i32[B]
    new: jax.Array  # i32[B] tokens to generate, at most NEW
    settings: dict[str, Any]  # of sampling.make_sampling, numbers or [B]
    keys: jax.Array  # key[B]


class Outputs(NamedTuple):
    """The texts at the end of a run."""

    tokens: np.ndarray  # i32[B,S]
    lengths: np.ndarray  # i32[B]

    def equal(self, other: Outputs) -> np.ndarray:
        """bool[B]: which rows have the same text."""
        # The widths of the buffers depend on the drafter; the slots beyond the limit stay empty.
        size = min(self.tokens.shape[1], other.tokens.shape[1])
        same = (self.tokens[:, :size] == other.tokens[:, :size]).all(1)
        return (self.lengths == other.lengths) & same


def masked(drafter: Drafter) -> Drafter:
    """The drafter with nodes made invalid by the first token of the text.

    0: all nodes. 1: none. Another token: the first node of a tree and its descendants, or all
    nodes of a chain but the first. This depends on committed text only, so any drafter may do it
    and every rule must accept it.
    """

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        first = context.tokens[:, :1]
        node = jnp.arange(drafter.nodes)
        keep = jnp.where(
            first == 0, False, (first == 1) | (node == 0 if draft.parents is None else node > 0)
        )
        return draft.replace(valid=draft.valid & keep), state

    return drafter._replace(propose=propose)


class _Prepared(NamedTuple):
    """A target and a drafter whose traces are counted."""

    plain: LM
    target: LM
    drafter: Drafter
    traces: list[int]


@functools.lru_cache(maxsize=4)  # the rules of one drafter share its compiled programs
def _prepare(drafter: Drafter, target: LM) -> _Prepared:
    traces: list[int] = []

    def counted(*args):
        traces.append(1)
        return target.apply(*args)

    return _Prepared(target, target._replace(apply=counted), masked(drafter), traces)


class Runner:
    """The runs of one drafter with one rule.

    Attributes:
        ragged: BATCH rows with prompts of 1 to WIDTH tokens, 0 to NEW new tokens, and a mixture of
            settings; every third row is greedy.
        finished, frozen, donated: what held in all runs: every row ended, finished rows kept their
            tokens and lengths, the buffers of the previous state were freed.
    """

    def __init__(
        self, drafter: Drafter, rule: Accept, target: LM, params: ModelParams, seed: int = 0
    ):
        self.plain, self.target, self.drafter, self._traces = _prepare(drafter, target)
        self.rule, self.params, self.vocab = rule, params, target.vocab_size
        self.ragged = _ragged_rows(self.vocab, seed)
        self.finished = self.frozen = self.donated = True
        self._outputs: dict[tuple[str, int], Outputs] = {}
        self._traced_once: int | None = None

    @property
    def retraces(self) -> int:
        """How often the target was traced after the first run."""
        return len(self._traces) - (self._traced_once or 0)

    def run(self, rows: Rows, eos: int = NO_EOS) -> Outputs:
        """Decodes all rows; updates ``finished``, ``frozen`` and ``donated``."""
        state = self._begin(rows)
        done, before = np.asarray(state.done), _texts(state)
        for _ in range(NEW + 2):
            if done.all():
                break
            previous = state
            state, _ = decode.generate(
                self.target,
                self.drafter,
                self.rule,
                self.params,
                state,
                max_steps=STEPS,
                eos_id=(eos,),
            )
            self.donated &= all(
                x.is_deleted() for x in jax.tree.leaves(previous.cache) if x.ndim > 1
            )
            after = _texts(state)
            self.frozen &= all(
                (a[done] == b[done]).all() for a, b in zip(before, after, strict=True)
            )
            done, before = np.asarray(state.done), after
        self.finished &= bool(done.all())
        decode.check(state)
        if self._traced_once is None:
            self._traced_once = len(self._traces)
        return Outputs(np.asarray(state.tokens), np.asarray(state.length))

    def greedy(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows, all greedy; decoded once."""
        return self._once("greedy", self.ragged._replace(settings={"temperature": 0.0}), eos)

    def mixture(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows with their mixture of settings; decoded once."""
        return self._once("mixture", self.ragged, eos)

    def plain_greedy(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows by plain greedy decoding of the target alone."""
        rows, params = self.ragged, ModelParams(self.params.target)
        state = decode.prefill(
            self.plain,
            none.make(self.plain),
            params,
            rows.tokens,
            rows.lengths,
            rows.keys,
            max_len=WIDTH + NEW,
            limit=rows.lengths + rows.new,
            sampling=sampling.make_sampling(BATCH, 0.0),
        )
        state = decode.autoregressive(self.plain, params, state, max_steps=NEW, eos_id=(eos,))
        return Outputs(np.asarray(state.tokens), np.asarray(state.length))

    def _once(self, name: str, rows: Rows, eos: int) -> Outputs:
        if (name, eos) not in self._outputs:
            self._outputs[name, eos] = self.run(rows, eos)
        return self._outputs[name, eos]

    def _begin(self, rows: Rows) -> DecodeState:
        return decode.prefill(
            self.target,
            self.drafter,
            self.params,
            rows.tokens,
            rows.lengths,
            rows.keys,
            max_len=WIDTH + NEW,
            limit=rows.lengths + rows.new,
            sampling=sampling.make_sampling(BATCH, **rows.settings),
        )


def _ragged_rows(vocab: int, seed: int) -> Rows:
    random, row = np.random.default_rng(seed), np.arange(BATCH)
    lengths = random.integers(1, WIDTH + 1, BATCH)
    tokens = random.integers(0, vocab, (BATCH, WIDTH))
    settings = {
        "temperature": np.select([row % 3 == 0, row % 3 == 1], [0.0, 1.0], 0.6),
        "top_p": np.where(row % 2 == 0, 1.0, 0.8),
    }
    return Rows(
        jnp.asarray(np.where(np.arange(WIDTH) < lengths[:, None], tokens, -1), jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(random.integers(0, NEW + 1, BATCH), jnp.int32),
        settings,
        rng.row_keys(0, BATCH),
    )


def _texts(state: DecodeState) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(x) for x in (state.tokens, state.length, state.cache.length))
