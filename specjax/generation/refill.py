"""Many prompts with a constant number of rows: a finished row gets the next prompt.

A batch that waits for its slowest row decodes with fewer and fewer rows, which hides what
speculation gains. Here the loop runs in segments of a few rounds; after each, finished rows are
replaced from the queue. Everything is compiled once: the segment, the prefill of one row, and its
insertion. For evaluation, not a server: all prompts are known, and nothing is scheduled.

A row counts its rounds from its own prefill, so its text is the one that it has alone, however the
others end. (With a controller that is shared by the rows, only the law of the text is.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, outcome, rng
from specjax import sampling as sampling_lib
from specjax.checks import whole
from specjax.errors import UserError
from specjax.outcome import EosId
from specjax.prompt import make_prefill
from specjax.sharding import states
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams


class Finished(NamedTuple):
    """The text of one prompt."""

    number: int  # of its prompt
    tokens: list[int]  # the new ones
    rounds: int  # of its row, until it was finished


def decode_all(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    max_new_tokens: int | Sequence[int],
    segment: int = 8,
    eos_id: EosId = None,
    seed: int = 0,
    **settings: Any,
) -> Iterator[Finished]:
    """Decodes all prompts in ``batch_size`` rows; yields each answer when its row is replaced.

    Args:
        target, drafter, accept, params: as for ``generate``.
        prompts: token ids.
        batch_size: rows that are decoded together, at most the number of prompts.
        max_new_tokens: the longest text; one number, or one for each prompt.
        segment: rounds between two looks at the rows. A finished row waits for the end of its
            segment; each look waits for the device.
        eos_id: an id or several; None: no token ends a row.
        seed: of the noise. A text depends on the seed and the number of its prompt.
        settings: of ``sampling.make_sampling``, one value for all rows.

    Raises:
        UserError: no prompt, a number below 1, more rows than prompts, and the errors of
            ``prefill``; a drafter with an array that belongs to no row.
        NonFiniteLogits: a model gave NaN or infinite logits.
    """
    whole("segment", segment, 1)
    count = len(prompts)
    limits = _limits(max_new_tokens, count)
    if whole("batch_size", batch_size, 1) > count:
        raise UserError(f"the batch size is {batch_size} and there are {count} prompts; lower it")
    packed, lengths = decode.pack_prompts(prompts)
    prefill = make_prefill(target, drafter, int((np.asarray(lengths) + limits).max()))
    stop = outcome.stop_ids(eos_id)

    def read(numbers: list[int]) -> DecodeState:
        """The state of the prompts of these numbers."""
        chosen = np.asarray(numbers)
        limit = lengths[chosen] + jnp.asarray(limits, jnp.int32)[chosen]
        sampling = sampling_lib.make_sampling(len(numbers), **settings)
        keys = rng.row_keys(seed, numbers)
        return prefill(params, packed[chosen], lengths[chosen], limit, keys, sampling)

    pair = (target, drafter, accept, params)
    return _answers(pair, prefill, read, packed, lengths, batch_size, segment, stop)


def _answers(
    pair: tuple[LM, Drafter, Accept, ModelParams],
    prefill: Callable[..., DecodeState],
    read: Callable[[list[int]], DecodeState],
    packed: jax.Array,
    lengths: jax.Array,
    batch_size: int,
    segment: int,
    stop: jax.Array,
) -> Iterator[Finished]:
    """The answers; ``read(numbers)`` gives the state of these prompts."""
    rows = list(range(batch_size))  # the prompt of each row
    state = read(rows)
    # Each row counts its own rounds.
    state = state.replace(round=jnp.zeros((batch_size,), jnp.int32))
    arrays = (packed, state.length, state.limit, state.keys, state.sampling)
    why = "its rows cannot be replaced one by one"
    axes = states.row_axes(pair[1], prefill, pair[3], arrays, why)[0]
    waiting = iter(range(batch_size, len(lengths)))
    rounds, sizes = np.zeros(batch_size, int), np.asarray(lengths)
    while any(row >= 0 for row in rows):
        state, records = decode.generate(*pair, state, max_steps=segment, eos_id=stop)
        decode.check(state)
        rounds += ((np.asarray(records.emitted) > 0) | (np.asarray(records.drafted) > 0)).sum(0)
        done, length, tokens = (np.asarray(x) for x in (state.done, state.length, state.tokens))
        for row, number in enumerate(rows):
            if number < 0 or not done[row]:
                continue
            ids = tokens[row, sizes[number] : length[row]].tolist()
            yield Finished(number, ids, int(rounds[row]))
            rows[row], rounds[row] = next(waiting, -1), 0
            if rows[row] >= 0:
                state = _inserted(state, read([rows[row]]), jnp.asarray(row), axes)


def _limits(value: int | Sequence[int], count: int) -> list[int]:
    """The longest text of each prompt. Raises UserError."""
    limits = list(value) if isinstance(value, Sequence | np.ndarray) else [value] * count
    if len(limits) != count:
        raise UserError(
            f"max_new_tokens has {len(limits)} numbers and there are {count} prompts; give one "
            "for each, or one for all"
        )
    return [whole("max_new_tokens", limit, 1) for limit in limits]


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _inserted(
    state: DecodeState, one: DecodeState, row: jax.Array, axes: tuple[int | None, ...]
) -> DecodeState:
    """The state with the only row of ``one`` in the place of ``row``."""
    leaves, treedef = jax.tree.flatten(state)

    def put(leaf: jax.Array, new: jax.Array, axis: int | None) -> jax.Array:
        new, axis = (new[None], 0) if axis is None else (new, axis)
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, row, axis)

    new = zip(leaves, jax.tree.leaves(one), axes, strict=True)
    return jax.tree.unflatten(treedef, [put(*each) for each in new])
