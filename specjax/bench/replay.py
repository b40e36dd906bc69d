"""Replay: the block efficiency of any drafter on recorded conversations, without running the model.

The recorded outputs may come from any source; they are taken to be the greedy outputs of a target.
Tokens, rounds and block efficiency are those of this target's own greedy decoding with any lossless
rule: at temperature 0 all of them accept the same tokens. In the last round the text after the end
of the recording is unknown, so no draft token is judged beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table
from rich.text import Text

from specjax import accept, decode, drafters, rng, sampling
from specjax.bench import metrics
from specjax.bench.methods import MethodChoice
from specjax.bench.passes import Method
from specjax.bench.recorded_target import RECORDED, fold, recorded
from specjax.data import recordings
from specjax.data.recordings import Recording, Trace
from specjax.errors import UserError
from specjax.models import hf
from specjax.models.token_bytes import TokenBytes
from specjax.types import LM, Accept, Drafter, ModelParams, Records

# Slots of the smallest buffers. Buffers have few sizes, because a loop is compiled for each.
SHORTEST = 64


class Tally(NamedTuple):
    """The counts of one category, or of all conversations."""

    prompts: int
    counts: metrics.Counts

    def plus(self, other: Tally) -> Tally:
        """The sums over both."""
        return Tally(self.prompts + other.prompts, self.counts.plus(other.counts))


class _Batch(NamedTuple):
    """Conversations that are replayed together."""

    slots: int  # longest text that the buffers hold
    rows: list[int]  # numbers of the conversations
    totals: list[int]  # tokens of prompt and output at which each one stops


def measure(
    method: Method,
    recording: Sequence[Trace],
    *,
    batch_size: int = 32,
    max_new_tokens: int = 0,
    seed: int = 0,
    report: Callable[[str], None] = lambda _: None,
) -> dict[str | None, Tally]:
    """Replays the conversations with a drafter and its rule at temperature 0.

    The counts of a row depend on its own text alone.

    Args:
        method: ``params.draft`` are the drafter's parameters; ``params.target`` is not used.
        recording: conversations; their ids must be below the vocabulary size of the drafter.
        batch_size: rows of a batch. The last batch of each buffer size is filled up with rows that
            are finished from the start.
        max_new_tokens: cuts every output at this length; 0 = no limit.
        seed: for drafters that draw.
        report: is called with a status message before every batch.

    Returns:
        None -> tally over all, then category -> tally, sorted by name. Conversations without a
        category count in the first only.

    Raises:
        UserError: as ``recorded_target.fold`` and the drafter; NonFiniteLogits of a draft model.
    """
    system = fold(method.drafter, method.accept)
    tallies: dict[str | None, Tally] = {}
    batches = _batches(recording, batch_size, max_new_tokens)
    for number, batch in enumerate(batches):
        report(f"batch {number + 1} of {len(batches)}, {batch.slots} tokens")
        texts = [recording[row] for row in batch.rows]
        spare = [len(recording)] * (batch_size - len(texts))
        keys = rng.row_keys(seed, [*batch.rows, *spare])
        records = _replay(system, method.params.draft, batch, texts, keys)
        kinds = [text.category for text in texts]
        for kind in dict.fromkeys([None, *kinds]):
            own = [kind is None or kind == each for each in kinds]
            own += [False] * len(spare)
            counts = metrics.count(records, own, method.drafter.longest)
            # The target is a recording: how much of it is fed has no meaning.
            tally = Tally(sum(own), counts._replace(verified=None))
            tallies[kind] = tallies[kind].plus(tally) if kind in tallies else tally
    named = sorted(kind for kind in tallies if kind is not None)
    return {kind: tallies[kind] for kind in (None, *named)}


def _batches(recording: Sequence[Trace], batch_size: int, max_new_tokens: int) -> list[_Batch]:
    """Batches of one buffer size each; conversations of similar length are together."""
    totals = [
        len(t.prompt) + min(len(t.output), max_new_tokens or len(t.output)) for t in recording
    ]
    # The next power of 2, but no more than the longest text needs.
    slots = [min(max(SHORTEST, 1 << (n - 1).bit_length()), max(totals)) for n in totals]
    batches = []
    for size in sorted(set(slots)):
        rows = sorted((r for r, own in enumerate(slots) if own == size), key=lambda r: totals[r])
        for start in range(0, len(rows), batch_size):
            some = rows[start : start + batch_size]
            batches.append(_Batch(size, some, [totals[r] for r in some]))
    return batches


def _replay(
    system: tuple[LM, Drafter, Accept],
    draft_params: Any,
    batch: _Batch,
    texts: Sequence[Trace],
    keys: jax.Array,
) -> Records:
    """Replays one batch; the records are on the host.

    ``system`` is the result of ``fold``; ``keys`` has one key per row, spare rows included.
    """
    (target, drafter, rule), batch_size = system, len(keys)
    record, lengths = _pack(texts, batch_size, batch.slots + drafter.nodes + 1)
    limits = lengths.at[: len(texts)].set(jnp.asarray(batch.totals, jnp.int32))
    prompt = jnp.where(jnp.arange(batch.slots) < lengths[:, None], RECORDED, -1)
    params = ModelParams({}, {"record": record, "drafter": draft_params})
    state = decode.prefill(
        target,
        drafter,
        params,
        prompt,
        lengths,
        keys,
        max_len=batch.slots,
        limit=limits,
        sampling=sampling.make_sampling(batch_size, 0.0),
    )
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=batch.slots)
    decode.check(state)
    return jax.device_get(records)


def _pack(texts: Sequence[Trace], batch: int, width: int) -> tuple[jax.Array, jax.Array]:
    """The texts i32[B,width] and the lengths i32[B] of their prompts; spare rows hold one token."""
    packed = np.full((batch, width), -1, np.int32)
    for row, text in enumerate(texts):
        whole = (text.prompt + text.output)[:width]
        packed[row, : len(whole)] = whole
    lengths = [len(text.prompt) for text in texts] + [1] * (batch - len(texts))
    return jnp.asarray(packed), jnp.asarray(lengths, jnp.int32)


# The objects that settings name -----------------------------------------------------------------


def load(
    recording: str,
    *,
    target: str = "",
    vocab_size: int = 0,
    max_new_tokens: int = 0,
    skip_bad: bool = False,
    num_traces: int = 0,
    temperatures: Sequence[float] = (0.0,),
) -> tuple[LM, Recording]:
    """A recording, and the target that drafters are made for. No weights are read.

    Args:
        recording: the file.
        target: a model directory, for its vocabulary; "" = none.
        vocab_size: used without a target; 0 = the largest recorded id plus one.
        max_new_tokens, num_traces, temperatures: checked here; ``num_traces`` conversations are
            read at most, 0 = all.
        skip_bad: whether bad lines are left out, and listed; otherwise they are errors.

    Raises:
        UserError: settings that a recording cannot have, a target without a vocabulary, and as
            ``recordings.read``.
    """
    for name, value in (
        ("vocab_size", vocab_size),
        ("max_new_tokens", max_new_tokens),
        ("num_traces", num_traces),
    ):
        if value < 0:
            raise UserError(f"config.{name} is {value}; it must be at least 0")
    if any(temperatures):
        raise UserError(
            "a recording is one text: it is replayed at temperature 0 only; "
            "set config.sampling.temperature=0"
        )
    if not recording:
        raise UserError(
            "config.traces is empty; give a .jsonl file whose lines have prompt_ids and output_ids"
        )
    vocabulary = None, None
    if target:
        own, spelled = vocabulary_of(target)
        vocabulary = spelled and spelled.name, spelled
        if vocab_size not in (0, own):
            raise UserError(
                f"config.vocab_size is {vocab_size} and {target} has {own} tokens; "
                "leave one of them out"
            )
        vocab_size = own
    texts = recordings.read(recording, vocab_size, skip_bad=skip_bad, most=num_traces)
    return recorded(texts.vocab_size, *vocabulary), texts


def vocabulary_of(directory: str) -> tuple[int, TokenBytes | None]:
    """A model's vocabulary size, and its tokens if it has a tokenizer, for any architecture."""
    path = hf.resolve(directory, weights=False)
    size = hf.read_config(path).get("vocab_size")
    if type(size) is not int or not 0 < size <= recordings.LARGEST:
        raise UserError(
            f"the config.json of {path} has no vocab_size; "
            "give config.vocab_size instead of config.target"
        )
    tokenizer = hf.load_tokenizer(path, size)
    return size, None if tokenizer is None else hf.token_bytes(path, tokenizer)


def method(
    target: LM, choice: MethodChoice, seed: int, label: str, guessed: bool = False
) -> Method:
    """A drafter made for a recorded target, with its rule.

    ``guessed``: the vocabulary size is the largest recorded id plus one, which an error then names.

    Raises:
        UserError: unknown names and keys, a warm run, and as ``recorded_target.fold``.
    """
    if choice.warm:
        raise UserError(
            f"method {label} has warm=True, and replay measures every conversation by itself; "
            "leave it out"
        )
    try:
        drafter = drafters.make(target=target, **choice.drafter)
    except UserError as error:
        if target.token_bytes is None and "the target has no tokenizer" in str(error):
            raise UserError(
                f"method {label} compares the texts of tokens, and the recording has ids alone; "
                "give config.target, a model directory with the tokenizer"
            ) from None
        if guessed and "vocabulary" in str(error):
            raise UserError(
                f"{error}; the vocabulary size was taken from the largest recorded id: "
                "give config.vocab_size"
            ) from None
        raise
    rule = accept.load(choice.rule or accept.default_rule(drafter), **choice.rule_keys)
    fold(drafter, rule)  # raises for a pair that cannot be replayed
    return Method(label, drafter, rule, ModelParams({}, drafter.init_params(jax.random.key(seed))))


def table(rows: Sequence[dict]) -> Table:
    """The rows of results.json, one line per method and category."""
    result = Table(box=None, pad_edge=False)
    for head in ("method", "rule", "category"):
        result.add_column(head, no_wrap=True)
    for head in ("prompts", "tokens", "rounds", "tau", "alpha"):
        result.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        whole = row["category"] is None
        numbers = [str(row[key]) for key in ("prompts", "tokens", "rounds")]
        for key in ("block_efficiency", "acceptance_rate"):
            numbers.append("-" if row[key] is None else f"{row[key]:.2f}")
        # Labels and categories come from the user: Text does not interpret markup in them.
        names = (row["method"], row["accept"], "all" if whole else row["category"])
        result.add_row(*map(Text, names), *numbers, style="bold" if whole else "")
    return result
