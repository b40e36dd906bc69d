"""Stop strings: a text ends before the first of them. Looked for on the host, between rounds.

The cut text is a function of the uncut text alone: the cut is at the stop string that is complete
first, wherever tokens and rounds end. So its law is that of the target's cut text, with any method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, outcome
from specjax.data.spelling import spell
from specjax.errors import UserError
from specjax.outcome import EosId
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, Records

# Rounds between two looks. A row that ends goes on for at most so many rounds, which are dropped.
ROUNDS = 8
# What a decoder gives for bytes that are no whole character.
PART = "\ufffd"

Decode = Callable[[list[int]], str]


class Cut(NamedTuple):
    """A text without its stop string and what follows."""

    text: str
    tokens: int  # how many tokens it takes to complete the stop string, or all
    stop: str | None  # the stop string; None: the text has none


def check(stop: str | Sequence[str]) -> tuple[str, ...]:
    """The stop strings. Raises UserError for one that is empty or no text."""
    several = isinstance(stop, Sequence) and not isinstance(stop, str)
    stops: tuple = tuple(stop) if several else (stop,)
    for each in stops:
        if not isinstance(each, str) or not each:
            raise UserError(f"a stop string is {each!r}; it must be a text that is not empty")
    return stops


def find(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """[begin, end) of the stop string that is complete first, the longest of them; None: none.

    Those that are complete at ``start`` or before are passed over.
    """
    found = ((each, text.find(each, max(start - len(each) + 1, 0))) for each in stops)
    places = [(at + len(each), at) for each, at in found if at >= 0]
    if not places:
        return None
    end, begin = min(places)
    return begin, end


def cut(ids: Sequence[int], stop: str | Sequence[str], decode: Decode, prompt=()) -> Cut:
    """The text of ``ids`` after ``prompt``, up to the first stop string."""
    row = Row(list(prompt), decode, check(stop))
    row.add(ids, last=True)
    return row.cut()


class Row:
    """The text of one row, as it grows."""

    def __init__(self, prompt: list[int], decode: Decode, stops: tuple[str, ...]):
        self._decode, self._stops = decode, stops
        self._before, self._waiting = prompt, []
        self.pieces: list[str] = []  # the text that each token adds; only whole characters
        self._text = ""
        self._found: tuple[int, int] | None = None

    def add(self, ids: Sequence[int], *, last: bool = False) -> bool:
        """Appends tokens; whether the text has a stop string. ``last``: no more will come."""
        if self._found is not None:
            return True
        self._waiting += [int(token) for token in ids]
        if not self._waiting:
            return False
        pieces = spell(self._waiting, self._decode, self._before)
        new = "".join(pieces)
        # Bytes of a character that is not complete are no text yet.
        known = self._text + (new if last else new.rstrip(PART))
        self._found = find(known, self._stops, len(self._text))
        if self._found is not None or last or not new.endswith(PART):
            self._before = self._before + self._waiting
            self.pieces, self._text = self.pieces + pieces, self._text + new
            self._waiting = []
        return self._found is not None

    @property
    def settled(self) -> str:
        """The beginning of the cut text that no further token can change."""
        if self._found is not None:
            return self._text[: self._found[0]]
        longest = max(map(len, self._stops), default=1)
        return self._text[: max(0, len(self._text) - longest + 1)]

    def cut(self) -> Cut:
        """The text so far."""
        if self._found is None:
            return Cut(self._text, len(self.pieces), None)
        begin, end = self._found
        ends = np.cumsum([len(piece) for piece in self.pieces])
        return Cut(self._text[:begin], int(np.searchsorted(ends, end)) + 1, self._text[begin:end])


def decode_until(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    prompts: Sequence[Sequence[int]],
    *,
    stop: str | Sequence[str],
    decode_ids: Decode,
    max_steps: int,
    eos_id: EosId = None,
) -> tuple[DecodeState, Records, list[Cut]]:
    """``decode.generate``, where a row is done when its text has a stop string.

    The loop is called for a few rounds at a time, so one program serves all ``max_steps``, with
    and without stop strings.

    Args:
        target, drafter, accept, params, state, max_steps, eos_id: as in ``decode.generate``.
            ``state`` is donated.
        prompts: the tokens of each row's prompt.
        stop: texts; a row ends before the first of them.
        decode_ids: token ids to text.

    Returns:
        The state, the counts of all rounds (also of those that were dropped), and the text of each
        row up to its stop string. ``decode.outputs`` gives all its tokens; ``Cut.tokens`` of them
        belong to the text.

    Raises:
        UserError: an empty stop string, and the errors of ``decode.generate``.
        NonFiniteLogits: names row and round. Other errors of ``decode.check`` are UserErrors.
    """
    stops, ends = check(stop), outcome.stop_ids(eos_id)
    rows = [Row(target.continued(prompt), decode_ids, stops) for prompt in prompts]
    seen, done, left = [len(prompt) for prompt in prompts], np.asarray(state.done), max_steps
    nothing: Any = np.zeros((0, len(rows)), np.int32)
    parts = [Records(*[nothing] * len(Records._fields))]
    while left > 0 and not done.all():
        steps = min(ROUNDS if stops else decode.ROUNDS, left)
        pair = (target, drafter, accept, params)
        state, records = decode.generate(*pair, state, max_steps=steps, eos_id=ends)
        new, done = decode.outputs(state, seen), np.asarray(state.done)
        # On the host: there each number of parts would be a program.
        parts.append(jax.tree.map(lambda x, end=steps: np.asarray(x)[:end], records))
        left -= steps
        seen = np.asarray(state.length).tolist()
        hit = [row.add(ids, last=bool(end)) for row, ids, end in zip(rows, new, done, strict=True)]
        done = done | np.asarray(hit)
        state = state.replace(done=jnp.asarray(done))
    for row in rows:
        row.add((), last=True)
    records = jax.tree.map(lambda *each: np.concatenate(each), *parts)
    return state, records, [row.cut() for row in rows]
