"""Grammars, penalties, biases and bans: maps of logits that depend on the text before a token.

They change the target: speculative decoding is lossless with respect to the mapped target. So the
same function is applied to the logits of the target and of the draft, at each node with the tokens
of its own path (``mapped``, ``for_draft``).

The order of the maps is that of vLLM: the grammar; end-of-sequence ids before the minimum number of
new tokens, bias and bans; then the repetition, the frequency and the presence penalty; then the
temperature and the cut-offs of ``specjax.sampling``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer

from specjax.checks import per_row
from specjax.errors import UserError
from specjax.logit_maps import grammar as grammars
from specjax.logit_maps.grammar import Automaton, Grammar

# The settings of the maps, one value per row.


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
    grammar: Grammar | None = None  # None = off


# Names of the numbers in a message, and a test for them: see ``checks.per_row``.
COUNT = ("a whole number >= 0 (0 = off)", lambda x: (x >= 0) & (x == np.floor(x)) & (x < 2**31))
_PENALTY = ("in [-1e6, 1e6] (0 = off)", lambda x: np.abs(x) <= 1e6)
_ALLOWED = {
    "repetition_penalty": ("in (0, 1e6] (1 = off)", lambda x: (x > 0) & (x <= 1e6)),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "min_new_tokens": COUNT,
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
    grammar: Automaton | Sequence[Automaton | None] | None = None,
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
    grammar_rows = grammars.of_rows(grammar, batch, vocab_size)
    if grammar_rows is not None:
        stays = np.ones(grammar_rows.classes.shape, bool) if bias is None else bias > -np.inf
        stays[np.ix_(rows["min_new_tokens"] > 0, ends)] = False
        grammars.check_left(grammar_rows, stays)
    off = {"repetition_penalty": 1.0}
    plain = bias is None and grammar_rows is None
    if plain and all((rows[name] == off.get(name, 0)).all() for name in rows):
        return None
    return LogitMaps(
        repetition=jnp.asarray(rows["repetition_penalty"], jnp.float32),
        presence=jnp.asarray(rows["presence_penalty"], jnp.float32),
        frequency=jnp.asarray(rows["frequency_penalty"], jnp.float32),
        min_new_tokens=jnp.asarray(rows["min_new_tokens"], jnp.int32),
        ends=jnp.broadcast_to(jnp.asarray(ends, jnp.int32), (batch, len(ends))),
        prompt=jnp.zeros((batch,), jnp.int32),
        bias=None if bias is None else jnp.asarray(bias, jnp.float32),
        grammar=grammar_rows,
    )


def _bias(batch: int, logit_bias: Any, banned: Any, vocab_size: int | None) -> np.ndarray | None:
    """f32[B,V], or None. Raises UserError."""
    biases = _by_row("logit_bias", logit_bias, batch, lambda each: each is None or _many(each))
    bans = _by_row("banned", banned if _many(banned) else [banned], batch, _many)
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
            result[row] = _numbers(values, vocab_size)
        result[row, _ids("banned", out, vocab_size)] = -np.inf
    wrong = ~((np.abs(result) <= 1e6) | (result == -np.inf))
    if wrong.any():
        raise UserError(
            f"a logit_bias is {result[wrong][0]:g}; it must be in [-1e6, 1e6], or -inf for a ban"
        )
    return result


def _numbers(values: Any, vocab_size: int | None = None) -> np.ndarray:
    """f32[n], or f32[V] of a whole vocabulary. Raises UserError."""
    try:
        array = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise UserError(f"logit_bias has {values!r}; its values must be numbers") from None
    if vocab_size is not None and array.shape != (vocab_size,):
        raise UserError(
            f"a logit_bias has shape {array.shape}; "
            f"give one number for each of the {vocab_size} tokens, or id -> number"
        )
    return array


def _by_row(name: str, value: Any, batch: int, whole: Callable[[Any], bool]) -> list:
    """The value of each row: one for all, or the entries if any of them is ``whole``.

    Raises UserError for another number of entries.
    """
    if value is None or isinstance(value, Mapping) or not any(map(whole, value)):
        return [value] * batch
    if len(value) != batch:
        raise UserError(
            f"{name} has {len(value)} entries; "
            f"give one for each of the {batch} rows, or one for all"
        )
    return list(value)


def _many(value: Any) -> bool:
    """Whether it has entries. (Their lengths may differ, so it cannot be made an array.)"""
    return hasattr(value, "__len__") if not hasattr(value, "ndim") else value.ndim > 0


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
    classes = None if maps.grammar is None else maps.grammar.classes
    for what, array in (("grammar was", classes), ("logit_bias and banned were", maps.bias)):
        if array is not None and array.shape[-1] != vocab_size:
            raise UserError(
                f"{what} made for {array.shape[-1]} tokens, and the target has {vocab_size}; "
                f"give vocab_size={vocab_size}"
            )
    if not isinstance(maps.ends, Tracer):
        _ids("end_ids", np.asarray(maps.ends).ravel(), vocab_size)


# The maps: what is known of the text before a token, and the logits that follow from it.


def begun(maps: LogitMaps, lengths: jax.Array) -> LogitMaps:
    """The maps for texts whose first ``lengths`` i32[B] tokens are the prompt."""
    grammar = None if maps.grammar is None else grammars.begun(maps.grammar, lengths)
    # A copy: states are donated, and the lengths may be a field of the same state.
    return maps.replace(prompt=jnp.copy(lengths), grammar=grammar)


def advanced(maps: LogitMaps | None, tokens: jax.Array, length: jax.Array) -> LogitMaps | None:
    """The maps after a round: the automata have read the first ``length`` i32[B] tokens.

    Nothing depends on it but time: ``read`` goes on from where they are.
    """
    if maps is None or maps.grammar is None:
        return maps
    return maps.replace(grammar=grammars.walked(maps.grammar, tokens, length))


class Text(struct.PyTreeNode):
    """What the maps read of the committed text of each row, the pending token included."""

    used: jax.Array  # bool[B,V] tokens of prompt and output
    count: jax.Array  # i32[B,V] occurrences in the output
    new: jax.Array  # i32[B] tokens of the output
    state: jax.Array | None = None  # i32[B] of the row's automaton; None: there is no grammar


def read(
    maps: LogitMaps | None, tokens: jax.Array, length: jax.Array, vocab_size: int
) -> Text | None:
    """The ``Text`` of tokens i32[B,S], of which the first ``length`` i32[B] are the text.

    Without maps None. Counted from the text in every round, so it cannot differ from the text.
    """
    if maps is None:
        return None
    batch, place = tokens.shape[0], jnp.arange(tokens.shape[1])
    inside, rows = place < length[:, None], jnp.arange(batch)[:, None]
    output = inside & (place >= maps.prompt[:, None])
    ids = _inside(jnp.where(inside, tokens, -1), vocab_size)
    used = jnp.zeros((batch, vocab_size), bool).at[rows, ids].set(True, mode="drop")
    count = jnp.zeros((batch, vocab_size), jnp.int32)
    count = count.at[rows, ids].add(output.astype(jnp.int32), mode="drop")
    grammar = maps.grammar
    state = None if grammar is None else grammars.walked(grammar, tokens, length).state
    return Text(used, count, output.sum(-1).astype(jnp.int32), state)


def mapped(
    maps: LogitMaps | None,
    text: Text | None,
    logits: jax.Array,
    nodes: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """The target's logits after the maps: f[B,T,V] -> f[B,T,V]. Without maps they are unchanged.

    Args:
        maps: the settings of the rows.
        text: of ``read``.
        logits: at T places, each of which continues the committed text and a path of nodes.
        nodes: i32[B,P] the tokens of nodes after the committed text; None: no path.
        visible: bool[B,T,P], or [1,T,P], which of them are on the path of each place.
    """
    if maps is None or text is None:
        return logits
    here: Text = jax.tree.map(lambda x: x[:, None], text)
    if nodes is not None and visible is not None and nodes.shape[1]:
        here = _after(here, nodes, visible, visible, maps.grammar)
    return _map(maps, logits, here)


def for_draft(
    maps: LogitMaps | None,
    text: Text | None,
    logits: jax.Array,
    nodes: jax.Array | None = None,
    visible: jax.Array | None = None,
) -> jax.Array:
    """``mapped`` for the logits of a draft.

    Where the maps leave no token that the draft can have (a draft of a few tokens, all banned), the
    logits are unchanged: any distribution will do for a draft, and the target rejects its token.
    """
    if maps is None:
        return logits
    return _or_unchanged(mapped(maps, text, logits, nodes, visible), logits)


def along_text(maps: LogitMaps | None, logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """``for_draft`` for the logits f[B,S,V] after each prefix of a text i32[B,S].

    Needs S^2 memory; for tests and measurements.
    """
    if maps is None:
        return logits
    batch, size = tokens.shape
    place = jnp.arange(size)
    before = jnp.broadcast_to(place <= place[:, None], (batch, size, size))
    output = before & (place >= maps.prompt[:, None])[:, None]
    nothing = read(maps, tokens[:, :0], jnp.zeros((batch,), jnp.int32), logits.shape[-1])
    assert nothing is not None
    nothing = nothing.replace(state=None if maps.grammar is None else maps.grammar.start)
    start: Text = jax.tree.map(lambda x: x[:, None], nothing)
    after = _after(start, tokens, before, output, maps.grammar)
    return _or_unchanged(_map(maps, logits, after), logits)


def _or_unchanged(result: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.where(result.max(-1, keepdims=True) == -jnp.inf, logits, result)


def _after(
    text: Text,
    nodes: jax.Array,
    visible: jax.Array,
    output: jax.Array,
    grammar: Grammar | None = None,
) -> Text:
    """The texts [B,T,...] with the tokens of nodes on each path.

    ``visible`` and ``output`` bool[B,T,P]: the nodes that count as text, and as output.
    """
    batch, size = nodes.shape
    vocab = text.used.shape[-1]
    places, same, state = visible.shape[1], output is visible, text.state
    if grammar is not None and state is not None:
        on = jnp.broadcast_to(output, (batch, places, size))
        state = grammars.along(grammar, state, nodes, on)
    visible = jnp.broadcast_to(visible, (batch, places, size)).astype(jnp.int32)
    output = visible if same else output.astype(jnp.int32)
    rows, place = jnp.arange(batch)[:, None, None], jnp.arange(places)[:, None]
    ids = _inside(nodes, vocab)[:, None]
    zeros = jnp.zeros((batch, places, vocab), jnp.int32)
    seen = zeros.at[rows, place, ids].add(visible, mode="drop")
    # Draft nodes are all output: one scatter is enough.
    written = seen if output is visible else zeros.at[rows, place, ids].add(output, mode="drop")
    return Text(text.used | (seen > 0), text.count + written, text.new + output.sum(-1), state)


def _map(maps: LogitMaps, logits: jax.Array, text: Text) -> jax.Array:
    """The maps in their order, for one text of each place [B,T,...] or of all [B,1,...]."""
    dtype, vocab = logits.dtype, logits.shape[-1]

    def per_row(values: jax.Array) -> jax.Array:
        return values[:, None, None].astype(dtype)

    if maps.grammar is not None and text.state is not None:
        logits = jnp.where(grammars.allowed(maps.grammar, text.state), logits, -jnp.inf)
    if maps.ends.shape[1]:
        rows, ids = jnp.arange(logits.shape[0])[:, None], _inside(maps.ends, vocab)
        ends = jnp.zeros((logits.shape[0], vocab), bool).at[rows, ids].set(True, mode="drop")
        early = text.new < maps.min_new_tokens[:, None]
        logits = jnp.where(ends[:, None] & early[..., None], -jnp.inf, logits)
    if maps.bias is not None:
        logits = logits + maps.bias[:, None].astype(dtype)
    factor = per_row(maps.repetition)
    again = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(text.used, again, logits)
    logits = logits - per_row(maps.frequency) * text.count.astype(dtype)
    return logits - jnp.where(text.count > 0, per_row(maps.presence), 0)


def _inside(ids: jax.Array, vocab_size: int) -> jax.Array:
    """The ids, with ``vocab_size`` for those outside the vocabulary: a scatter drops them."""
    return jnp.where((ids >= 0) & (ids < vocab_size), ids, vocab_size)
