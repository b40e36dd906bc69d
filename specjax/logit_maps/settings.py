"""The settings of the maps, one value per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from specjax.checks import per_row
from specjax.errors import UserError

Ids = int | Sequence[int] | np.ndarray | jax.Array
# Token id -> what is added to its logit, or an array of the whole vocabulary.
Bias = Mapping[int, float] | np.ndarray | jax.Array


class LogitMaps(struct.PyTreeNode):
    """The settings of each row."""

    repetition: jax.Array  # f32[B], 1 = off
    presence: jax.Array  # f32[B], 0 = off
    frequency: jax.Array  # f32[B], 0 = off
    min_new_tokens: jax.Array  # i32[B], 0 = off
    ends: jax.Array  # i32[B,E] ids that end a text, padded with -1
    prompt: jax.Array  # i32[B] tokens of the prompt; ``prefill`` sets it
    bias: jax.Array | None = None  # f32[B,V] added to the logits, -inf = banned; None = off


_PENALTY = ("in [-1e6, 1e6] (0 = off)", lambda x: np.abs(x) <= 1e6)
_ALLOWED = {
    "repetition_penalty": ("in (0, 1e6] (1 = off)", lambda x: (x > 0) & (x <= 1e6)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_new_tokens": (
        "a whole number >= 0 (0 = off)",
        lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31),
    ),
}


def make(
    batch: int,
    *,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    logit_bias: Bias | Sequence[Bias | None] | None = None,
    banned: Ids | Sequence[Ids] = (),
    min_new_tokens: Any = 0,
    end_ids: Ids = (),
    vocab_size: int | None = None,
) -> LogitMaps | None:
    """The settings of ``batch`` rows, or None if no map has an effect.

    Args: as in ``sampling.make_sampling``.

    Raises:
        UserError: a value out of range, an id outside the vocabulary, a bias or a ban without
            ``vocab_size``, ``min_new_tokens`` without ``end_ids``, or no token left.
    """
    given = {
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "min_new_tokens": min_new_tokens,
    }
    rows = {name: per_row(name, value, batch, *_ALLOWED[name]) for name, value in given.items()}
    bias = _bias(batch, logit_bias, banned, vocab_size)
    ends = _ids("end_ids", end_ids, vocab_size)
    if rows["min_new_tokens"].any() and not len(ends):
        raise UserError(
            "min_new_tokens is given without end_ids, the ids that end a text and must wait; "
            "give end_ids"
        )
    if bias is not None:
        _check_left(bias, ends, rows["min_new_tokens"] > 0)
    off = {"repetition_penalty": 1.0}
    if bias is None and all((rows[name] == off.get(name, 0)).all() for name in rows):
        return None
    repetition, presence, frequency = (
        jnp.asarray(rows[f"{name}_penalty"], jnp.float32)
        for name in ("repetition", "presence", "frequency")
    )
    return LogitMaps(
        repetition,
        presence,
        frequency,
        min_new_tokens=jnp.asarray(rows["min_new_tokens"], jnp.int32),
        ends=jnp.broadcast_to(jnp.asarray(ends, jnp.int32), (batch, len(ends))),
        prompt=jnp.zeros((batch,), jnp.int32),
        bias=None if bias is None else jnp.asarray(bias, jnp.float32),
    )


def _bias(batch: int, logit_bias: Any, banned: Any, vocab_size: int | None) -> np.ndarray | None:
    """f32[B,V], or None. Raises UserError."""
    biases, bans = _biases(logit_bias, batch), _bans(banned, batch)
    if not any(each is not None and len(each) for each in (*biases, *bans)):
        return None
    if vocab_size is None:
        name = "banned" if any(len(each) for each in bans) else "logit_bias"
        raise UserError(f"{name} needs the size of the vocabulary; give vocab_size")
    result = np.zeros((batch, vocab_size), np.float32)
    for row, (values, out) in enumerate(zip(biases, bans, strict=True)):
        if isinstance(values, Mapping):
            ids = _ids("logit_bias", list(values), vocab_size)
            result[row, ids] = _numbers(list(values.values()))
        elif values is not None:
            result[row] = _whole(values, vocab_size)
        result[row, _ids("banned", out, vocab_size)] = -np.inf
    wrong = ~((np.abs(result) <= 1e6) | (result == -np.inf))
    if wrong.any():
        raise UserError(
            f"a logit_bias is {result[wrong][0]:g}; it must be in [-1e6, 1e6], or -inf for a ban"
        )
    return result


def _whole(values: Any, vocab_size: int) -> np.ndarray:
    """f32[V]. Raises UserError for another shape."""
    array = _numbers(values)
    if array.shape != (vocab_size,):
        raise UserError(
            f"a logit_bias has shape {array.shape}; "
            f"give one number for each of the {vocab_size} tokens, or id -> number"
        )
    return array


def _numbers(values: Any) -> np.ndarray:
    try:
        return np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise UserError(f"logit_bias has {values!r}; its values must be numbers") from None


def _biases(value: Any, batch: int) -> list:
    """The bias of each row. Raises UserError."""
    if value is None or isinstance(value, Mapping):
        return [value] * batch
    if not any(each is None or _many(each) for each in value):
        return [value] * batch
    return _one_each("logit_bias", value, batch)


def _bans(value: Any, batch: int) -> list:
    """The banned ids of each row. Raises UserError."""
    if not _many(value):
        value = [value]
    return _one_each("banned", value, batch) if any(map(_many, value)) else [value] * batch


def _many(value: Any) -> bool:
    """Whether it has entries. (Their lengths may differ, so it cannot be made an array.)"""
    return hasattr(value, "__len__") if not hasattr(value, "ndim") else value.ndim > 0


def _one_each(name: str, value: Any, batch: int) -> list:
    if len(value) != batch:
        raise UserError(
            f"{name} has {len(value)} entries; "
            f"give one for each of the {batch} rows, or one for all"
        )
    return list(value)


def _ids(name: str, ids: Any, vocab_size: int | None) -> np.ndarray:
    """i64[n]. Raises UserError for values that are no ids of the vocabulary."""
    array = np.atleast_1d(np.asarray(ids))
    if not array.size:
        return np.zeros((0,), np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"{name} is {ids!r}; it must have token ids, which are whole numbers")
    wrong = (array < 0) if vocab_size is None else (array < 0) | (array >= vocab_size)
    if wrong.any():
        most = "" if vocab_size is None else f" and at most {vocab_size - 1}"
        raise UserError(f"{name} has the id {array[wrong][0]}; ids must be at least 0{most}")
    return array.astype(np.int64)


def _check_left(bias: np.ndarray, ends: np.ndarray, waits: np.ndarray) -> None:
    """Raises UserError for a row in which no token can be emitted."""
    left = bias > -np.inf
    none = ~left.any(-1)
    if none.any():
        raise UserError(
            f"all tokens are banned in row {int(np.argmax(none))}; at least one must stay"
        )
    left[:, ends] = False
    none = waits & ~left.any(-1)
    if none.any():
        raise UserError(
            f"in row {int(np.argmax(none))} all tokens but the end_ids are banned, and "
            "min_new_tokens lets these wait; at least one more must stay"
        )


def check(maps: LogitMaps | None, vocab_size: int) -> None:
    """Raises UserError for a bias of another vocabulary, or end_ids outside it."""
    if maps is None:
        return
    if maps.bias is not None and maps.bias.shape[-1] != vocab_size:
        raise UserError(
            f"logit_bias and banned were made for {maps.bias.shape[-1]} tokens, and the target has "
            f"{vocab_size}; give vocab_size={vocab_size}"
        )
    if not isinstance(maps.ends, Tracer):
        _ids("end_ids", np.asarray(maps.ends).ravel(), vocab_size)
