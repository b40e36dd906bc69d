"""Grammars: the output matches a regular expression or a JSON schema, by an automaton over tokens.

After each prefix of the output, tokens after which it could not become a match any more have
probability 0; ids that end a text are allowed where the output matches. This is the law of plain
decoding with the same mask, token by token, as engines have it (Willard and Louf 2023,
2307.09702). It is not the target's law given that its text matches (Park et al. 2024, 2405.21047).
A text that reaches its limit of tokens may be an unfinished match.

The state of the automaton follows the path of each node of a draft. On the device a row has a
table of C classes of tokens that its automaton treats alike: [Q,C] instead of [Q,V].
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.errors import UserError, library, one_line

# In this state of every automaton all tokens are allowed, and it is not left.
FREE = 0
LAST = "\U0010ffff"
# How many of the tokens that a place forces are kept, the longest.
WAYS = 4
# Automata of similar sizes run the same program: states and classes are padded to a multiple.
PADDED = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Automaton:
    """An automaton over the tokens of a vocabulary, on the host. State 0 is ``FREE``."""

    following: np.ndarray  # i32[Q,C] the state after a token of each class; -1: not allowed
    classes: np.ndarray  # i32[V] the class of each token
    start: int
    # i32[Q,WAYS]: the allowed tokens where each is a beginning of the longest one, the longest
    # first, filled with -1; none where a state allows others.
    forced: np.ndarray


class Grammar(struct.PyTreeNode):
    """The automata of B rows, and how far each has read the text of its row."""

    following: jax.Array  # i16 or i32[B,Q,C]
    classes: jax.Array  # i16 or i32[B,V]
    forced: jax.Array  # i32[B,Q,WAYS]
    start: jax.Array  # i32[B]
    state: jax.Array  # i32[B] after the first ``read`` tokens of the text
    read: jax.Array  # i32[B]


# On the host: from an expression to an automaton.


Moves = Sequence[tuple[np.ndarray, np.ndarray]]


def of_table(
    table: np.ndarray,
    start: int,
    final: Iterable[int],
    ends: Sequence[int],
    tokens: Sequence[bytes | None] | None = None,
) -> Automaton:
    """The automaton of a table.

    Args:
        table: i32[Q,V], the state after each token in each state; -1: not allowed.
        start: the first state.
        final: the states in which the text may end.
        ends: ids that end a text. They are allowed in final states and nowhere else, whatever the
            table has for them.
        tokens: the bytes of each token; None: only single tokens are forced.

    Raises:
        UserError: no ids that end a text, a state or an id that is none, or no way from the start
            to a final state.
    """
    table = np.asarray(table)
    if table.ndim != 2 or table.max(initial=-1) >= len(table):
        raise UserError("a grammar's table must have a row for each state, of states or -1")
    moves = [(ids := np.flatnonzero(row >= 0), row[ids]) for row in table]
    return _of_moves(moves, table.shape[1], start, set(final), ends, tokens)


def _of_moves(
    moves: Moves,
    vocab_size: int,
    start: int,
    final: set[int],
    ends: Sequence[int],
    tokens: Sequence[bytes | None] | None,
) -> Automaton:
    """The automaton of the allowed tokens of each state and the states after them."""
    ids = np.asarray(ends, np.int64).ravel()
    if not len(ids):
        raise UserError("a grammar needs ids that end a text, and the model names none")
    if not 0 <= ids.min() <= ids.max() < vocab_size:
        raise UserError(f"ids that end a text are {ids.tolist()} of {vocab_size} tokens")
    if not all(0 <= each < len(moves) for each in (start, *final)):
        raise UserError(f"a grammar of {len(moves)} states has no state {max(start, *final)}")

    def row(state: int) -> np.ndarray:
        # State 0 is FREE.
        values = np.full(vocab_size, -1, np.int32)
        values[moves[state][0]] = moves[state][1] + 1
        values[ids] = FREE if state in final else -1
        return values

    classes, first = _classes(row, len(moves))
    free = np.zeros((1, len(first)), np.int32)
    following = np.stack([*free, *(row(state)[first] for state in range(len(moves)))])
    following, start = _trimmed(following, start + 1)
    return Automaton(following, classes, start, _forced(following, classes, tokens))


def _forced(
    following: np.ndarray, classes: np.ndarray, tokens: Sequence[bytes | None] | None
) -> np.ndarray:
    """``Automaton.forced``."""
    result, sizes = np.full((len(following), WAYS), -1, np.int32), np.bincount(classes)
    counts = ((following >= 0) * sizes).sum(1)
    longest = max((len(each or b"") for each in tokens or ()), default=1)
    # A token has no more beginnings than bytes.
    for state in np.flatnonzero(counts <= longest):
        ids = np.flatnonzero(following[state][classes] >= 0).tolist()
        if state == FREE or not ids:
            continue
        texts = {i: (tokens[i] if tokens is not None and i < len(tokens) else None) for i in ids}
        ids.sort(key=lambda i: -len(texts[i] or b""))
        whole = texts[ids[0]] or b""
        if len(ids) == 1 or all(each and whole.startswith(each) for each in texts.values()):
            result[state, : len(ids)] = ids[:WAYS]
    return result


def _classes(row: Callable[[int], np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(i32[V] the class of each token, i64[C] its first token): tokens with equal columns."""
    draw = np.random.default_rng(0)
    while True:
        # Columns are compared by a sum with random weights, and then entry by entry.
        weights = draw.integers(1, 2**63, count, np.uint64)
        total = sum(row(i).astype(np.int64).astype(np.uint64) * weights[i] for i in range(count))
        _, first, classes = np.unique(total, return_index=True, return_inverse=True)
        if all((row(i) == row(i)[first][classes]).all() for i in range(count)):
            return classes.astype(np.int32), first


def _trimmed(following: np.ndarray, start: int) -> tuple[np.ndarray, int]:
    """Only the states on a way from the start to an end. Raises UserError if there is none."""
    useful = np.arange(len(following)) == FREE
    while True:
        grown = useful | (useful[np.maximum(following, 0)] & (following >= 0)).any(1)
        if (grown == useful).all():
            break
        useful = grown
    if not useful[start]:
        raise UserError("no text of this vocabulary matches the grammar")
    following = np.where(useful[np.maximum(following, 0)], following, -1)
    reached, new = {FREE, start}, [start]
    while new:
        found = {int(x) for state in new for x in np.unique(following[state]) if x >= 0}
        new = sorted(found - reached)
        reached |= found
    kept = sorted(reached)
    # The last entry is for -1.
    number = np.full(len(following) + 1, -1, np.int32)
    number[kept] = np.arange(len(kept))
    return number[following[kept]], int(number[start])


@functools.lru_cache(maxsize=16)
def of_regex(pattern: str, tokens: Any, vocab_size: int, ends: tuple[int, ...]) -> Automaton:
    """The automaton of a regular expression, which the bytes of the whole output match.

    Args:
        pattern: in the syntax of Rust's package regex, without look-around and back references.
        tokens: ``LM.token_bytes``, the bytes of each token. Special tokens are not allowed.
        vocab_size: V of the target.
        ends: ids that end a text.

    Raises:
        UserError: no such expression, no text of the vocabulary matches, or the package
            outlines-core is not installed.
    """
    core = _outlines()
    size = min(vocab_size, len(tokens.tokens))
    # A last character that no text has, as one token. Without it the package loses moves from a
    # place at which a text may end (version 0.2.14: "a(bc)?" never gives "abc").
    ids: dict[bytes, list[int]] = {LAST.encode(): [vocab_size]}
    for i, data in enumerate(tokens.tokens[:size]):
        if data and i not in ends:
            ids.setdefault(data, []).append(i)
    letters = {bytes([byte]): [byte] for byte in range(256)}
    try:
        # By itself first: "a)|(b" is an expression only between brackets.
        core.Index(pattern, core.Vocabulary(256, letters))
        index = core.Index(f"(?:{pattern}){LAST}", core.Vocabulary(vocab_size + 1, ids))
    except (ValueError, OverflowError) as error:
        reason = one_line(error)
        raise UserError(f"the grammar {_short(pattern)} cannot be used: {reason}") from None
    moves: dict[int, dict[int, int]] = index.get_transitions()
    over = set(index.get_final_states())
    final = [name for name, own in moves.items() if own.get(vocab_size) in over]
    first = index.get_initial_state()
    names = np.array(sorted({first, *moves, *over}))

    def numbers(states: Iterable[int]) -> np.ndarray:
        return np.searchsorted(names, np.fromiter(states, np.int64))

    def pairs(own: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.fromiter(own, np.int64)
        # The last character, and the id by which the package ends a text.
        known = ids < vocab_size
        return ids[known], numbers(own.values())[known]

    paths = [pairs(moves.get(name, {})) for name in names.tolist()]
    start = int(numbers([first])[0])
    return _of_moves(paths, vocab_size, start, set(numbers(final).tolist()), ends, tokens.tokens)


def of_schema(
    schema: Mapping[str, Any] | str, tokens: Any, vocab_size: int, ends: tuple[int, ...]
) -> Automaton:
    """The automaton of a JSON schema, an object or its text; see ``of_regex``.

    Raises:
        UserError: also for a schema that no regular expression can state.
    """
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        pattern = _outlines().json_schema.build_regex_from_schema(text)
    except (ValueError, TypeError) as error:
        reason = one_line(error)
        raise UserError(f"the JSON schema {_short(text)} cannot be used: {reason}") from None
    return of_regex(pattern, tokens, vocab_size, ends)


def of_setting(value: Any, tokens: Any, vocab_size: int, ends: Sequence[int]) -> Automaton | None:
    """The automaton that a user specified for all rows; None for None and "".

    ``value`` is an automaton, a JSON schema (an object), a path that ends in ".json" with one, or
    a regular expression.

    Raises:
        UserError: as ``of_regex`` and ``of_schema``; a model without a tokenizer; no such file.
    """
    if value is None or value == "" or isinstance(value, Automaton):
        return value or None
    if not isinstance(value, str | Mapping):
        raise UserError(
            f"grammar is {value!r}; it must be a regular expression, a JSON schema as an object, "
            "or the path of a .json file with one"
        )
    if tokens is None:
        raise UserError("a grammar needs the bytes of the tokens, and the model has no tokenizer")
    given = tokens, vocab_size, tuple(int(each) for each in ends)
    if isinstance(value, Mapping):
        return of_schema(value, *given)
    if not value.endswith(".json"):
        return of_regex(value, *given)
    try:
        return of_schema(Path(value).read_text(encoding="utf-8"), *given)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"grammar: {value} cannot be read: {error}") from None


def _outlines() -> Any:
    """The package that compiles expressions. Raises UserError if it is not installed."""
    problem = "regular expressions and JSON schemas need the package outlines-core"
    return library("outlines_core", "grammar", problem)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# Of the rows of a batch.


def of_rows(given: Any, batch: int, vocab_size: int | None) -> Grammar | None:
    """The automata of ``batch`` rows, from one for all or one for each; None: no grammar.

    Raises:
        UserError: another number of rows, another vocabulary, or no automaton.
    """
    rows = [given] * batch if isinstance(given, Automaton | None) else given
    if not isinstance(rows, Sequence) or not all(isinstance(x, Automaton | None) for x in rows):
        raise UserError(
            "grammar must be an automaton of specjax.logit_maps.grammar, or one or None for each "
            "row; generate_text also takes expressions and schemas"
        )
    if len(rows) != batch:
        raise UserError(f"grammar has {len(rows)} entries; give one for each of the {batch} rows")
    known = [each for each in rows if each is not None]
    if not known:
        return None
    if vocab_size is None:
        raise UserError("grammar needs the size of the vocabulary; give vocab_size")
    for each in known:
        if len(each.classes) != vocab_size:
            raise UserError(
                f"a grammar was made for {len(each.classes)} tokens, and vocab_size is {vocab_size}"
            )
    states, classes = (
        -(-max(each.following.shape[axis] for each in known) // PADDED) * PADDED for axis in (0, 1)
    )
    # A row without a grammar stays in FREE.
    nothing = np.zeros((1, 1), np.int32), np.zeros(vocab_size, np.int32)
    free = Automaton(*nothing, FREE, np.full((1, WAYS), -1, np.int32))

    def padded(each: Automaton) -> tuple[np.ndarray, ...]:
        height, width = each.following.shape
        table = np.pad(each.following, ((0, states - height), (0, classes - width)))
        forced = np.pad(each.forced, ((0, states - height), (0, 0)), constant_values=-1)
        return table, each.classes, forced, np.asarray(each.start, np.int32)

    made = {id(each): padded(each) for each in [free, *known]}
    parts = zip(*(made[id(free if each is None else each)] for each in rows), strict=True)
    table, kinds, forced, start = (np.stack(each) for each in parts)
    return Grammar(
        following=jnp.asarray(table, _integer(states)),
        classes=jnp.asarray(kinds, _integer(classes)),
        forced=jnp.asarray(forced),
        start=jnp.asarray(start),
        state=jnp.asarray(start),
        read=jnp.zeros((batch,), jnp.int32),
    )


def _integer(most: int):
    return jnp.int16 if most < 2**15 else jnp.int32


def begun(grammar: Grammar, lengths: jax.Array) -> Grammar:
    """The grammars of outputs that begin after ``lengths`` i32[B] tokens."""
    return grammar.replace(state=jnp.copy(grammar.start), read=jnp.copy(lengths))


def step(grammar: Grammar, state: jax.Array, token: jax.Array) -> jax.Array:
    """i32[B,...]: the state after one more token in each state, both i32[B,...].

    After a token that is not allowed, or outside of the vocabulary, it is ``FREE``: no rule emits
    such a token, and the logits after it must have a maximum.
    """
    vocab = grammar.classes.shape[1]
    row = jnp.arange(len(grammar.start)).reshape(-1, *[1] * (state.ndim - 1))
    kind = grammar.classes[row, jnp.clip(token, 0, vocab - 1)]
    following = grammar.following[row, state, kind].astype(jnp.int32)
    return jnp.where((token >= 0) & (token < vocab), jnp.maximum(following, FREE), FREE)


def walked(grammar: Grammar, tokens: jax.Array, length: jax.Array) -> Grammar:
    """The grammars after the first ``length`` i32[B] tokens of the texts i32[B,S]."""

    def one(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, read = carry
        token = jnp.take_along_axis(tokens, read[:, None], 1, mode="clip")[:, 0]
        reads = read < length
        return jnp.where(reads, step(grammar, state, token), state), read + reads

    carry = grammar.state, grammar.read
    state, read = jax.lax.while_loop(lambda x: (x[1] < length).any(), one, carry)
    return grammar.replace(state=state, read=read)


def along(grammar: Grammar, state: jax.Array, nodes: jax.Array, visible: jax.Array) -> jax.Array:
    """i32[B,T]: the states after the nodes on the path of each place.

    ``state`` i32[B,1] or [B,T] before them; ``nodes`` i32[B,P], parents before their children;
    ``visible`` bool[B,T,P]: which of them are on the path.
    """
    state = jnp.broadcast_to(state, visible.shape[:2])

    def one(state, node):
        token, on = node
        new = step(grammar, state, jnp.broadcast_to(token[:, None], state.shape))
        return jnp.where(on, new, state), None

    return jax.lax.scan(one, state, (nodes.T, jnp.moveaxis(visible, 2, 0)))[0]


def allowed(grammar: Grammar, state: jax.Array) -> jax.Array:
    """bool[B,T,V]: the tokens that are allowed in the states i32[B,T]."""
    row = jnp.arange(len(grammar.start))[:, None]
    kinds = grammar.following[row, state] >= 0
    classes = grammar.classes[:, None].astype(jnp.int32)
    return jnp.take_along_axis(kinds, classes, axis=2, mode="clip")


def check_left(grammar: Grammar, stays: np.ndarray) -> None:
    """Raises UserError where a state has no token among those that stay, bool[B,V]."""
    table, classes = np.asarray(grammar.following), np.asarray(grammar.classes)
    for row, left in enumerate(stays):
        kinds = np.bincount(classes[row], weights=left, minlength=table.shape[2]) > 0
        if not ((table[row] >= 0) & kinds).any(1).all():
            raise UserError(
                f"in row {row} the grammar comes to a place at which all its tokens are banned, or "
                "are end_ids that wait for min_new_tokens; at least one must stay"
            )
