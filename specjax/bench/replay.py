"""Replay: recorded conversations in, block efficiency of any drafter out, overall and by category; no model is run.

The recorded outputs are taken for what a target says at temperature 0, however they came about. Tokens, rounds and block
efficiency are those that this target's own greedy decoding would have had, with any lossless rule: they are all the same
there. In the last round nobody knows what would have come after the recording, so no draft token is judged beyond it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import metrics
from specjax.bench.passes import Method
from specjax.bench.recorded_target import RECORDED, fold, recorded
from specjax.config import Config
from specjax.data import recordings
from specjax.data.recordings import Recording, Trace
from specjax.errors import UserError
from specjax.models import hf
from specjax.run.resolve import Choice
from specjax.types import LM, ModelParams

SHORTEST = 64  # slots of the smallest buffers: texts are run in a few sizes only, for each of which a loop is compiled


class Tally(NamedTuple):
    """Counts of one category, or of all."""

    prompts: int
    counts: metrics.Counts


def measure(
    method: Method,
    recording: Sequence[Trace],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 0,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str | None, Tally]:
    """Replays the conversations with a drafter and its rule at temperature 0. A row's counts depend on its own text alone.

    Args:
        method: ``params.draft`` are the drafter's; ``params.target`` is not used.
        recording: conversations, their ids below the vocabulary that the drafter was made for.
        batch_size: rows run together; the last batch of a size is filled up with rows that are finished from the start.
        max_new_tokens: cuts every output there; 0 = all of it.
        seed: for drafters that draw.
        say: is told how far it is.

    Returns:
        None -> tally over all, then category -> tally, in order of their names; conversations without one are in the first.

    Raises:
        UserError: what ``recorded.fold`` and the drafter raise; NonFiniteLogits for a draft model's.
    """
    target, drafter, rule = fold(method.drafter, method.accept)
    totals = [
        len(t.prompt) + min(len(t.output), max_new_tokens or len(t.output)) for t in recording
    ]
    sizes = [min(max(SHORTEST, 1 << (n - 1).bit_length()), max(totals)) for n in totals]
    tallies: dict[str | None, Tally] = {}
    for done, (size, rows) in enumerate(plan := _batches(sizes, totals, batch_size)):
        say(f"batch {done + 1} of {len(plan)}, {size} tokens")
        texts = [recording[r] for r in rows]
        record, lengths = _pack(texts, batch_size, size + drafter.nodes + 1)
        limits = lengths.at[: len(rows)].set(jnp.asarray([totals[r] for r in rows], jnp.int32))
        prompt = jnp.where(jnp.arange(size) < lengths[:, None], RECORDED, -1)
        params = ModelParams({}, {"record": record, "drafter": method.params.draft})
        keys = rng.row_keys(seed, [*rows, *[len(recording)] * (batch_size - len(rows))])
        state = decode.prefill(
            target, drafter, params, prompt, lengths, keys,
            max_len=size, limit=limits, sampling=sampling.make_sampling(batch_size, 0.0),
        )  # fmt: skip
        state, records = decode.generate(target, drafter, rule, params, state, max_steps=size)
        decode.check(state)
        records = jax.device_get(records)
        kinds = [t.category for t in texts]
        for kind in dict.fromkeys([None, *kinds]):
            own = [kind is None or kind == each for each in kinds] + [False] * (
                batch_size - len(rows)
            )
            now = Tally(sum(own), metrics.count(records, own, drafter.longest))
            was = tallies.get(kind)
            tallies[kind] = (
                now
                if was is None
                else Tally(was.prompts + now.prompts, was.counts.plus(now.counts))
            )
    return {
        kind: tallies[kind]
        for kind in (None, *sorted(kind for kind in tallies if kind is not None))
    }


def _batches(
    sizes: Sequence[int], totals: Sequence[int], batch_size: int
) -> list[tuple[int, list[int]]]:
    """(buffer, row numbers): rows of one buffer size, those of like length together."""
    plan = []
    for size in sorted(set(sizes)):
        rows = sorted((r for r, own in enumerate(sizes) if own == size), key=lambda r: totals[r])
        plan += [
            (size, rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)
        ]
    return plan


def _pack(texts: Sequence[Trace], batch: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The record i32[B,width] of the texts, and the lengths i32[B] of their prompts; rows to spare hold one token."""
    packed = np.full((batch, width), -1, np.int32)
    for row, text in enumerate(texts):
        whole = (text.prompt + text.output)[:width]
        packed[row, : len(whole)] = whole
    lengths = [len(text.prompt) for text in texts] + [1] * (batch - len(texts))
    return jnp.asarray(packed), jnp.asarray(lengths, jnp.int32)


# --- from a configuration --------------------------------------------------------------------------------------------


def load(config: Config) -> tuple[LM, Recording]:
    """The recording of ``config.traces``, and the target that drafters are made for. No weights are read.

    The vocabulary is ``config.vocab_size`` or that of the directory ``config.target``, else the largest recorded id says it.

    Raises:
        UserError: settings that a recording cannot have, a target without a vocabulary, and what ``traces.read`` raises.
    """
    for name in ("vocab_size", "max_new_tokens", "num_traces"):
        if config[name] < 0:
            raise UserError(f"config.{name} is {config[name]}; it must be at least 0")
    grid = config.get("grid") or {}
    if config.sampling.temperature != 0 or grid.get("temperatures"):
        raise UserError(
            "a recording is one text: it is replayed at temperature 0 only; set config.sampling.temperature=0"
        )
    if not config.traces:
        raise UserError(
            "config.traces is empty; give a .jsonl file whose lines have prompt_ids and output_ids"
        )
    vocab_size, vocabulary = config.vocab_size, None
    if config.target:
        own, vocabulary = _vocabulary(config.target)
        if vocab_size not in (0, own):
            raise UserError(
                f"config.vocab_size is {vocab_size} and {config.target} has {own} tokens; leave one of them out"
            )
        vocab_size = own
    recording = recordings.read(
        config.traces, vocab_size, skip_bad=config.skip_bad, most=config.num_traces
    )
    return recorded(recording.vocab_size, vocabulary), recording


def _vocabulary(directory: str) -> tuple[int, str | None]:
    """The size of a model's vocabulary, and its tokenizer's fingerprint; the model may be of any architecture."""
    path = hf.resolve(directory)
    try:
        raw = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} has no config.json that can be read ({error}); give a model directory"
        ) from None
    size = raw.get("vocab_size") if isinstance(raw, dict) else None
    if type(size) is not int or not 0 < size <= recordings.LARGEST:
        raise UserError(
            f"{path / 'config.json'} has no vocab_size; give config.vocab_size instead of config.target"
        )
    tokenizer = hf.load_tokenizer(path, size)
    return size, None if tokenizer is None else hf.fingerprint(tokenizer)


def method(target: LM, choice: Choice, seed: int, label: str, guessed: bool = False) -> Method:
    """A drafter made for a recorded target, with its rule. ``guessed``: the largest id has told the vocabulary's size.

    Raises UserError, also for what ``recorded.fold`` refuses, and for a warm run.
    """
    if choice.warm:
        raise UserError(
            f"method {label} has warm=True, and replay measures every conversation by itself; leave it out"
        )
    try:
        drafter = drafters.make(target=target, **choice.drafter)
    except UserError as error:
        if guessed and "vocabulary" in str(error):
            raise UserError(
                f"{error}; the recording's largest id was taken for its end: give config.vocab_size"
            ) from None
        raise
    rule = accept.load(choice.rule, **choice.rule_keys)
    fold(drafter, rule)
    return Method(label, drafter, rule, ModelParams({}, drafter.init_params(jax.random.key(seed))))


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, a line for each method and category."""
    out = Table(box=None, pad_edge=False)
    for head in ("method", "rule", "category"):
        out.add_column(head, no_wrap=True)
    for head in ("prompts", "tokens", "rounds", "tau", "alpha"):
        out.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        whole = row["category"] is None
        numbers = [str(row[key]) for key in ("prompts", "tokens", "rounds")]
        for key in ("block_efficiency", "acceptance_rate"):
            numbers.append("-" if row[key] is None else f"{row[key]:.2f}")
        # Labels and categories are the user's: no markup is looked for in them.
        words = (
            Text(row["method"]),
            Text(row["accept"]),
            Text("all" if whole else row["category"]),
        )
        out.add_row(*words, *numbers, style="bold" if whole else "")
    return out
