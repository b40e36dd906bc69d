"""The target as an author: it continues prompts with speculative decoding, a batch at a time.

For text that has to be the target's own: drafter and rule must be a pair that loses nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import metrics
from specjax.models import hf
from specjax.types import LM, Accept, Drafter, ModelParams


class Writer(NamedTuple):
    """What decodes."""

    target: LM
    params: ModelParams
    drafter: Drafter
    rule: Accept
    eos_id: tuple[int, ...]


def make_writer(target: hf.Loaded, keys: Mapping, rule: str = "chain", seed: int = 0) -> Writer:
    """The target with the drafter of these keys and a rule. Raises UserError: no such drafter or rule, or no such pair."""
    drafter, accepts = drafters.make(target=target.lm, **keys), accept.load(rule)
    accept.check_pair(drafter, accepts)
    params = ModelParams(target.params, drafter.init_params(jax.random.key(seed)))
    return Writer(target.lm, params, drafter, accepts, target.config.eos_token_id)


def row_keys(seed: int, numbers: Sequence[int], index: int = 0) -> jax.Array:
    """key[B] that depend on the seed, the numbers of the prompts, and the number of the setting they are continued with."""
    return jax.vmap(lambda key: jax.random.fold_in(key, index))(rng.row_keys(seed, numbers))


def write(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    settings: Mapping[str, float],
    new_tokens: int,
    batch_size: int,
) -> tuple[list[list[int]], list[int]]:
    """(new tokens, rounds) of each prompt: at most ``batch_size`` of them, continued by at most ``new_tokens``.

    ``keys`` are key[n], one a prompt; ``settings`` those of ``sampling.make_sampling``. Prompts of one length and one
    ``batch_size`` compile once. Raises UserError: prompts that do not fit the model, NonFiniteLogits.
    """
    rows = np.minimum(
        np.arange(batch_size), len(prompts) - 1
    )  # fills the batch up with rows that are finished at once
    real = np.arange(batch_size) < len(prompts)
    packed, lengths = decode.pack_prompts([prompts[row] for row in rows])
    state = decode.prefill(
        writer.target,
        writer.drafter,
        writer.params,
        packed,
        lengths,
        keys[rows],
        max_len=packed.shape[1] + new_tokens,
        limit=lengths + jnp.where(real, new_tokens, 0),
        sampling=sampling.make_sampling(batch_size, **settings),
    )
    state, records = decode.generate(
        writer.target,
        writer.drafter,
        writer.rule,
        writer.params,
        state,
        max_steps=new_tokens,
        eos_id=writer.eos_id,
    )
    decode.check(state)
    outputs = decode.outputs(state, np.asarray(lengths).tolist())[: len(prompts)]
    # As in ``metrics``: a round that emitted or proposed something was run.
    rounds = [
        metrics.count(records, np.arange(batch_size) == row, 1).rounds
        for row in range(len(prompts))
    ]
    return outputs, rounds


class Meter:
    """How far the writing is: a bar with the time that is left on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._done = self._skipped = self._tokens = self._rounds = 0
        self._first: tuple[float, int] | None = (
            None  # when the first batch was through, and the tokens by then
        )
        self._began = self._said = time.monotonic()
        console, self._bar = Console(stderr=True), None
        if console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, TextColumn("{task.fields[told]}"), console=console)
            self._task = self._bar.add_task(what, total=total, told="")

    def __enter__(self) -> Meter:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind, *_) -> None:
        if self._bar:
            self._bar.stop()
        if kind is None and self._tokens:
            print(f"{self._what}: {self._told()}", file=sys.stderr, flush=True)

    def skip(self, count: int) -> None:
        """``count`` units were there before."""
        self._skipped += count
        self._show()

    def add(self, count: int, tokens: int, rounds: int) -> None:
        """``count`` units are done: so many tokens, in so many rounds of a row."""
        self._done, self._tokens, self._rounds = (
            self._done + count,
            self._tokens + tokens,
            self._rounds + rounds,
        )
        self._show()
        # The first batch is compilation for the most part: it says nothing about those to come.
        self._first = self._first or (time.monotonic(), self._tokens)

    def _told(self) -> str:
        parts = [f"{self._tokens:,} tokens"]
        began, before = self._first or (self._began, 0)
        if self._tokens == before:  # there is no other batch
            began, before = self._began, 0
        if (seconds := time.monotonic() - began) > 0:
            parts.append(f"{(self._tokens - before) / seconds:,.0f} tokens/s")
        if self._rounds:
            parts.append(f"{self._tokens / self._rounds:.2f} tokens a round")
        return ", ".join(parts)

    def _show(self) -> None:
        done, now = self._done + self._skipped, time.monotonic()
        if self._bar:
            self._bar.update(
                self._task,
                completed=min(done, self._total),
                told=self._told() if self._tokens else "",
            )
        elif now - self._said >= 10 and self._done:
            left = (now - self._began) / self._done * max(self._total - done, 0)
            told = f"{self._what}: {done:,} of {self._total:,}, {self._told()}, {left:.0f} s left"
            print(told, file=sys.stderr, flush=True)
            self._said = now
