"""Runs a drafter with a rule through the compiled loop, on thousands of rows of unequal length.

Every run has the same shapes, so one compiled program serves every check of a pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, rng, sampling
from specjax.drafters import none
from specjax.testing import verdicts
from specjax.testing.models import is_table, whole_text
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams

# Rows of a run, the longest prompt, the most new tokens, and the rounds in one call of generate.
BATCH, WIDTH, NEW, STEPS = 3_000, 6, 9, 3
# An id outside every vocabulary: no token ends a row.
NO_EOS = -5
# Values of min_p that exclude no token. They choose which nodes ``masked`` makes invalid: no node,
# all, all but some at the top, and every second one.
MASKS = (0.0, 1e-30, 2e-30, 3e-30)


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
    drafted: float = 0.0  # nodes per round and row that could be tested

    def equal(self, other: Outputs) -> np.ndarray:
        """bool[B]: which rows have the same text."""
        # The widths of the buffers depend on the drafter; the slots beyond the limit stay empty.
        size = min(self.tokens.shape[1], other.tokens.shape[1])
        same = (self.tokens[:, :size] == other.tokens[:, :size]).all(1)
        return (self.lengths == other.lengths) & same


def masked(drafter: Drafter) -> Drafter:
    """The drafter with nodes made invalid by the row's ``min_p``, one of ``MASKS``.

    0: no node. 1: all. 2: the first node of a tree and its descendants, or all nodes of a chain but
    the first. 3: every second node, so that a valid node can have an invalid child. This depends on
    the settings only, so any drafter may do it and every rule must accept it.
    """

    def propose(params, keys, context, state):
        draft, state = drafter.propose(params, keys, context, state)
        kind = jnp.round(context.sampling.min_p / MASKS[1])[:, None]
        node = jnp.arange(drafter.nodes)
        some = node == 0 if draft.parents is None else node > 0
        keep = jnp.where(kind == 2, some, jnp.where(kind == 3, node % 2 == 0, kind != 1))
        return draft.replace(valid=draft.valid & keep), state

    return drafter._replace(propose=propose, whole=False)


@functools.lru_cache(maxsize=4)  # the rules of one drafter share its compiled programs
def _prepare(drafter: Drafter, target: LM) -> tuple[LM, LM, Drafter, list[int]]:
    """The target, the target and the drafter whose traces are counted, and these traces."""
    traces: list[int] = []
    # A table reads two tokens: a wrong cache entry could stay unseen.
    target = whole_text(target) if is_table(target) else target

    def counting(apply: Callable) -> Callable:
        def counted(*args):
            traces.append(1)
            return apply(*args)

        return counted

    return target, target.changed(counting), masked(drafter), traces


class Runner:
    """The runs of one drafter with one rule.

    Attributes:
        ragged: BATCH rows with prompts of 1 to WIDTH tokens, 0 to NEW new tokens, and a mixture of
            settings; every third row is greedy.
        more: settings that all rows have.
        finished, frozen, donated: what held in all runs: every row ended, finished rows kept their
            tokens and lengths, the buffers of the previous state were freed.
        mistakes: how often each of ``verdicts.MISTAKES`` occurred, in all runs.
    """

    def __init__(
        self,
        drafter: Drafter,
        rule: Accept,
        target: LM,
        params: ModelParams,
        seed: int = 0,
        more: Mapping[str, Any] | None = None,
    ):
        self.plain, self.target, self.drafter, self._traces = _prepare(drafter, target)
        self.rule, self.vocab = verdicts.marked(rule), target.vocab_size
        # ``masked`` does not change what the engine may do: whole drafts are verified whole.
        self._widths = () if drafter.whole else None
        self.params = params._replace(target=tied(params.target)) if is_table(target) else params
        self.ragged, self.more = _ragged_rows(target, seed), dict(more or {})
        self.finished = self.frozen = self.donated = True
        self.mistakes = np.zeros(len(verdicts.MISTAKES), int)
        self._outputs: dict[tuple[str, int], Outputs] = {}
        self._traced_once = 0

    @property
    def retraces(self) -> int:
        """How often the target was traced after the first run."""
        return len(self._traces) - self._traced_once

    def run(self, rows: Rows, eos: int = NO_EOS) -> Outputs:
        """Decodes all rows; updates ``finished``, ``frozen``, ``donated`` and ``mistakes``."""
        state, drafted, tried = self._begin(self.target, self.drafter, self.params, rows), 0, 0
        done, before = np.asarray(state.done), _texts(state)
        for _ in range(NEW + 2):
            if done.all():
                break
            previous = state
            pair = (self.target, self.drafter, self.rule, self.params)
            how = {"eos_id": (eos, *verdicts.marks(self.vocab)), "verify_widths": self._widths}
            state, records = decode.generate(*pair, state, max_steps=STEPS, **how)
            drafted += int(records.drafted.sum())
            tried += int((records.emitted > 0).sum())
            buffers = [x for x in jax.tree.leaves(previous.cache) if x.ndim > 1]
            self.donated &= all(x.is_deleted() for x in buffers)
            after = _texts(state)
            same = [a[done] == b[done] for a, b in zip(before, after, strict=True)]
            self.frozen &= all(map(np.all, same))
            done, before = np.asarray(state.done), after
        self.finished &= bool(done.all())
        decode.check(state)
        self._traced_once = self._traced_once or len(self._traces)
        outputs = Outputs(*before[:2], drafted / (tried or 1))
        wrong = verdicts.marked_rows(outputs.tokens, self.vocab)
        self.mistakes += np.bincount(wrong, minlength=len(self.mistakes))
        return outputs

    def greedy(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows, all greedy; decoded once."""
        settings = {"temperature": 0.0, "min_p": self.ragged.settings["min_p"]}
        return self._once("greedy", self.ragged._replace(settings=settings), eos)

    def mixture(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows with their mixture of settings; decoded once."""
        return self._once("mixture", self.ragged, eos)

    def plain_greedy(self, eos: int = NO_EOS) -> Outputs:
        """The ragged rows by plain greedy decoding of the target alone."""
        rows = self.ragged._replace(settings={"temperature": 0.0})
        params = ModelParams(self.params.target)
        state = self._begin(self.plain, none.make(self.plain), params, rows)
        state = decode.autoregressive(self.plain, params, state, max_steps=NEW, eos_id=(eos,))
        return Outputs(*_texts(state)[:2])

    def _begin(self, target: LM, drafter: Drafter, params: ModelParams, rows: Rows) -> DecodeState:
        """The state before the first round of a run."""
        return decode.prefill(
            target,
            drafter,
            params,
            rows.tokens,
            rows.lengths,
            rows.keys,
            max_len=WIDTH + NEW,
            limit=rows.lengths + rows.new,
            sampling=sampling.make_sampling(BATCH, **rows.settings, **self.more),
        )

    def _once(self, name: str, rows: Rows, eos: int) -> Outputs:
        if (name, eos) not in self._outputs:
            self._outputs[name, eos] = self.run(rows, eos)
        return self._outputs[name, eos]


def tied(table: jax.Array) -> jax.Array:
    """The logits f[...,V] of a table with two best tokens in half of the contexts."""
    second = jnp.sort(table, -1)[..., -2:-1]
    chosen = np.random.default_rng(0).random((*table.shape[:-1], 1)) < 0.5
    return jnp.where(jnp.asarray(chosen), jnp.minimum(table, second), table)


def _ragged_rows(target: LM, seed: int) -> Rows:
    random, row = np.random.default_rng(seed), np.arange(BATCH)
    lengths = random.integers(1, WIDTH + 1, BATCH)
    tokens = random.integers(0, target.vocab_size, (BATCH, WIDTH))
    if target.encoder is not None:
        lengths, start = np.maximum(lengths, 2), target.encoder.start
        tokens = np.where(tokens == start, (start + 1) % target.vocab_size, tokens)
        tokens[row, lengths - 1] = start
    settings = {
        "temperature": np.select([row % 3 == 0, row % 3 == 1], [0.0, 1.0], 0.6),
        "top_p": np.where(row % 2 == 0, 1.0, 0.8),
        "min_p": np.asarray(MASKS)[row // 6 % len(MASKS)],
    }
    tokens = np.where(np.arange(WIDTH) < lengths[:, None], tokens, -1)
    return Rows(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(random.integers(0, NEW + 1, BATCH), jnp.int32),
        settings,
        rng.row_keys(0, BATCH),
    )


def _texts(state: DecodeState) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(state.tokens), np.asarray(state.length), np.asarray(state.cache.length)
