"""``generate_text``: from prompts or chats to texts, with any method."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, logit_maps, rng, sampling
from specjax.bench import metrics
from specjax.checks import number, whole
from specjax.errors import UserError
from specjax.generation import samples as samples_lib
from specjax.generation import stops
from specjax.generation.loading import Choice, Model
from specjax.generation.prompts import Prompt, encode
from specjax.generation.stops import Cut
from specjax.types import DecodeState

# The packed prompts and the room for new tokens are multiples of so many tokens wide, so that few
# programs are compiled: the number of new tokens is data within its class.
WIDTH = 64
_SETTINGS = {
    *inspect.signature(sampling.make_sampling).parameters,
    *inspect.signature(logit_maps.make).parameters,
} - {"batch", "maps", "temperature", "vocab_size"}


class Completion(NamedTuple):
    """One text."""

    prompt: int  # number of its prompt
    sample: int  # number among the samples of its prompt
    text: str  # without the stop string
    tokens: list[int]  # the new ones, up to the one that ends the text
    finish: str  # "eos", "stop" (a stop string) or "length"
    logprobs: list[float] | None  # of the tokens, by the model's own logits; None: not wanted


class Generated(NamedTuple):
    """The texts, prompt by prompt, and what they cost."""

    completions: list[Completion]
    # Tokens per round of a row, the target's own included; what a stop string cut off counts too.
    tau: float
    counts: metrics.Counts

    @property
    def texts(self) -> list[str]:
        """The text of each completion."""
        return [each.text for each in self.completions]


def generate_text(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    *,
    drafter: Choice = None,
    accept: str = "",
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    stop: str | Sequence[str] = (),
    n: int = 1,
    logprobs: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
    ignore_eos: bool = False,
    chat: str = "",
    **settings: Any,
) -> Generated:
    """Continues texts, or answers chats.

    Args:
        model: of ``load``.
        prompts: one or several: a text, the turns of a chat ({"role", "content"}), or token ids.
        drafter, accept: the method, see ``Model.method``. An L1 rule (every default) leaves the law
            of the texts unchanged.
        max_new_tokens: the longest text, in tokens.
        temperature: 0 is greedy.
        stop: texts; a text ends before the first of them.
        n: samples of each prompt. Sample i of a prompt is the same for every ``n`` above i.
        logprobs: whether to return the log-probability of each token.
        seed: of the noise. A text depends on the seed and the numbers of its prompt and sample.
        batch_size: rows that are decoded together; None: all.
        ignore_eos: whether texts go on after the end-of-sequence token.
        chat: the template of chats: "" is the model's own; see ``data.chat.load``.
        settings: further ones of ``sampling.make_sampling``: top_k, top_p, min_p, penalties, bans
            (one value for all rows). ``end_ids`` are the model's unless they are given.

    Raises:
        UserError: wrong arguments, a text longer than the model's positions, several greedy
            samples.
        NonFiniteLogits: a model gave NaN or infinite logits.
    """
    whole("max_new_tokens", max_new_tokens, 1)
    number("temperature", temperature, ">= 0", lambda x: x >= 0)
    if whole("seed", seed, 0) >= 2**32:
        raise UserError(f"seed is {seed}; it must be in 0..{2**32 - 1}")
    if whole("n", n, 1) > 1 and temperature == 0:
        raise UserError(f"n is {n} and the temperature 0: all samples would be equal; raise it")
    method = model.method(drafter, accept, temperature=temperature)
    # -1 is no token: the same number of ids runs the same program.
    eos = (-1,) * len(model.eos_ids) if ignore_eos else model.eos_ids
    ends = {"end_ids": model.eos_ids} if settings.get("min_new_tokens") else {}
    how = {"temperature": temperature, "vocab_size": model.lm.vocab_size, **ends, **settings}
    run = _Run(model, method, how, max_new_tokens, stops.check(stop), logprobs, eos)
    _check_settings(settings)
    ids = encode(model, prompts, chat)
    rows = [_Row(prompt, i, j) for i, prompt in enumerate(ids) for j in range(n)]
    size = len(rows) if batch_size is None else min(whole("batch_size", batch_size, 1), len(rows))
    return _all(run, rows, rng.sample_keys(seed, len(ids), n), size)


def _all(run: _Run, rows: list[_Row], keys: jax.Array, size: int) -> Generated:
    """The completions of all rows, ``size`` at a time."""
    sizes = _sizes(run.model, [row.ids for row in rows], run.max_new_tokens)
    # A batch has whole prompts, each of which is read once, or samples of single prompts.
    samples = sum(row.prompt == rows[0].prompt for row in rows)
    samples = samples if samples <= size else 1
    size -= size % samples
    completions, counts = [], []
    for start in range(0, len(rows), size):
        # The last part is filled up with rows that are finished from the start.
        numbers = [*range(start, min(start + size, len(rows)))]
        count, more = len(numbers), size - len(numbers)
        numbers += [*range(samples)] * (more // samples)
        filled = [rows[number] for number in numbers]
        whole_batch = numbers == [*range(len(rows))]
        own_keys = keys if whole_batch else _taken(keys, np.asarray(numbers))
        new, own = _decode(run, filled, count, samples, own_keys, sizes)
        completions += new
        counts.append(own)
    total = metrics.total(counts)
    return Generated(completions, total.tokens / max(total.rounds, 1), total)


@jax.jit
def _taken(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    return keys[numbers]


def _check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UserError for unknown settings, and for a value per row: rows are made here."""
    for name, value in settings.items():
        if name not in _SETTINGS:
            raise UserError(
                f"generate_text has no setting {name!r}; it has {', '.join(sorted(_SETTINGS))}"
            )
        own = isinstance(value, list | tuple) and any(
            each is None or isinstance(each, Mapping) for each in value
        )
        depth = 0 if value is None or isinstance(value, Mapping | str) else _depth(value)
        if own or depth > (name in ("banned", "end_ids", "logit_bias")):
            raise UserError(
                f"{name} has a value for each row; generate_text takes one for all texts, "
                "and prefill takes a value per row"
            )


def _depth(value: Any) -> int:
    """The number of dimensions; lists of several lengths have one for each level."""
    if isinstance(value, list | tuple):
        return 1 + max(map(_depth, value), default=0)
    return np.ndim(value)


class _Row(NamedTuple):
    """One text to be written."""

    ids: list[int]
    prompt: int
    sample: int


class _Run(NamedTuple):
    """What all batches share."""

    model: Model
    method: Any
    settings: dict
    max_new_tokens: int
    stops: tuple[str, ...]
    logprobs: bool
    eos: tuple[int, ...]


def _sizes(model: Model, ids: Sequence[Sequence[int]], new: int) -> tuple[int, int]:
    """The width of the packed prompts, and the longest text that the buffers have room for.

    Raises UserError for a text that is too long.
    """
    longest, most = max(map(len, ids)), model.lm.max_positions
    if most is not None and longest + new > most:
        raise UserError(
            f"the longest prompt has {longest} tokens, with max_new_tokens = {new} that is "
            f"{longest + new}, and the model has {most} positions; shorten one of them"
        )
    width, room = (-(-size // WIDTH) * WIDTH for size in (longest, new))
    # Not beyond the positions of the models for the sake of padding.
    draft = None if model.draft is None else model.draft.lm.max_positions
    bounds = [each for each in (most, draft) if each is not None]
    max_len = max(longest + new, min([width + room, *bounds]))
    return min(width, max_len), max_len


def _decode(
    run: _Run,
    rows: list[_Row],
    count: int,
    samples: int,
    keys: jax.Array,
    sizes: tuple[int, int],
) -> tuple[list[Completion], metrics.Counts]:
    """The completions of the first ``count`` rows of a batch, and their counts.

    ``samples`` neighbours have one prompt; ``sizes`` of ``_sizes``.
    """
    model, method, prompts = run.model, run.method, [row.ids for row in rows]
    width, max_len = sizes
    packed, lengths = decode.pack_prompts(prompts[::samples], width)
    new = np.where(np.arange(len(rows)) < count, run.max_new_tokens, 0)
    limit = np.asarray([len(ids) for ids in prompts]) + new
    state = samples_lib.prefill(
        *(model.lm, method.drafter, method.params, packed, lengths, keys, samples),
        max_len=max_len,
        limit=jnp.asarray(limit, jnp.int32),
        sampling=sampling.make_sampling(len(rows), **run.settings),
    )
    if run.logprobs:
        # The prompts are read by the same program, with and without.
        state = state.replace(logprobs=np.zeros(state.tokens.shape, np.float32))
    state, records, cuts = stops.decode_until(
        *(model.lm, method.drafter, method.accept, method.params, state, prompts),
        stop=run.stops,
        decode_ids=model.tokenizer.decode,
        max_steps=run.max_new_tokens,
        eos_id=run.eos,
    )
    counts = metrics.count(records, [i < count for i in range(len(rows))], method.drafter.longest)
    completions = _completions(run, rows[:count], state, cuts)
    return completions, counts


def _completions(
    run: _Run, rows: list[_Row], state: DecodeState, cuts: list[Cut]
) -> list[Completion]:
    lengths = [len(row.ids) for row in rows]
    # Rows that fill up the batch have no text.
    every = [*lengths, *[0] * (len(cuts) - len(rows))]
    tokens = decode.outputs(state, every)
    values = decode.logprobs(state, every) if run.logprobs else None
    result = []
    for i, row in enumerate(rows):
        end = cuts[i].tokens
        own = tokens[i][:end]
        finish = "eos" if own and own[-1] in run.eos else "length"
        result.append(
            Completion(
                row.prompt,
                row.sample,
                cuts[i].text,
                own,
                "stop" if cuts[i].stop is not None else finish,
                None if values is None else values[i][:end],
            )
        )
    return result
