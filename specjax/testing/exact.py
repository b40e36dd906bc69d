"""The exact law of what a drafter and a rule emit, by walking through every outcome of the real code.

Rules and drafters get all their randomness from ``RowKeys``: coins, draws, draws without replacement. Here a ``Script`` stands
in its place. It answers each request from a list of outcomes; a request beyond the list stops the run, every row is split into
one row for each outcome that can happen, with its probability, and the code runs again. At the end every row is one
possible history, and the weights add up to 1. Nothing is sampled and nothing is assumed about the rule; jit is off
meanwhile, so that loops run in Python and the script can look at values.

The script also keeps a ledger: noise that is asked for twice in one round (the same purpose and index) is an error, because
the outcomes would not be independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, rng, sampling, step
from specjax.testing import laws
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, StepInfo

BUCKETS = (4096, 32_768)  # row counts: without jit every new shape compiles every operation again
CHUNK = 4096  # drafts judged at once
LARGEST = 4_000_000  # histories at once


class NotEnumerable(TypeError):
    """The code asked for raw noise (``at_round``, ``base``): its outcomes cannot be listed. Test it statistically."""


class TooLarge(ValueError):
    """There are too many histories to walk through."""


class NoiseReused(AssertionError):
    """The same noise was asked for twice in one round."""


class ImpossibleLaw(AssertionError):
    """The code drew from, or tossed a coin with, masses that are negative, not finite, or nothing at all."""


class _Split(Exception):
    def __init__(self, rows: np.ndarray, values: np.ndarray, chance: np.ndarray):
        self.rows, self.values, self.chance = rows, values, chance


class Script:
    """Stands for ``RowKeys``: gives scripted outcomes, or splits the rows at the first request beyond them."""

    def __init__(self, outcomes: list[np.ndarray], batch: int, ledger: Iterable[tuple] = ()):
        self.outcomes, self.batch, self.asked, self.ledger = outcomes, batch, 0, set(ledger)

    def coins(self, count: int, dtype=jnp.float32) -> _Coins:
        self._enter(("coins",))
        return _Coins(self, count)

    def draw(self, purpose: int, weights: jax.Array, index=None) -> jax.Array:
        if purpose == rng.ACCEPT:
            raise NoiseReused("a token was drawn with the purpose of the coins")
        masses = np.asarray(weights, np.float64)
        if masses.ndim == 2:
            self._enter((purpose, None if index is None else int(index)))
            return self._one(masses)
        columns = []
        for place, number in enumerate(np.asarray(index).tolist()):
            self._enter((purpose, number))
            columns.append(self._one(masses[:, place]))
        return jnp.stack(columns, 1)

    def draw_at(self, depth, weights: jax.Array, active: jax.Array | None = None) -> jax.Array:
        self._enter(("position", int(depth)))
        masses = np.asarray(weights, np.float64)
        if active is not None:
            masses = np.where(np.asarray(active)[:, None], masses, np.eye(1, masses.shape[1]))
        return self._one(masses)

    def draw_distinct(
        self, purpose: int, weights: jax.Array, count: int, index=None
    ) -> tuple[jax.Array, jax.Array]:
        masses = np.asarray(weights, np.float64)
        flat = masses[:, None] if masses.ndim == 2 else masses
        numbers = [None] if index is None else np.atleast_1d(np.asarray(index)).tolist()
        tokens = np.zeros((*flat.shape[:2], count), np.int32)
        exist = np.zeros(tokens.shape, bool)
        for place, number in enumerate(numbers):
            self._enter((purpose, number))
            left = flat[:, place].copy()
            for rank in range(count):
                some = left.sum(-1) > 0
                token = np.asarray(
                    self._one(np.where(some[:, None], left, np.eye(1, left.shape[1])))
                )
                tokens[:, place, rank], exist[:, place, rank] = token, some
                left[np.arange(len(left)), token] = 0
        if masses.ndim == 2:
            return jnp.asarray(tokens[:, 0]), jnp.asarray(exist[:, 0])
        return jnp.asarray(tokens), jnp.asarray(exist)

    def inner(self, index: int, same_target: bool = False) -> _Inner:
        return _Inner(self, index, same_target)

    def __getattr__(self, name: str):
        raise NotEnumerable(f"RowKeys.{name} is raw noise; only coins and draws can be enumerated")

    def _enter(self, place: tuple) -> None:
        if place in self.ledger:
            raise NoiseReused(f"the noise {place} was asked for twice in one round")
        self.ledger.add(place)

    def _one(self, weights: np.ndarray) -> jax.Array:
        """One outcome of each row from unnormalised float64 weights [R,K]."""
        if self.asked < len(self.outcomes):
            self.asked += 1
            return jnp.asarray(self.outcomes[self.asked - 1])
        total = weights.sum(-1, keepdims=True)
        if not np.isfinite(total).all() or (total <= 0).any() or (weights < 0).any():
            raise ImpossibleLaw("a law with NaN, negative or no mass was drawn from")
        rows, values = np.nonzero(weights)
        raise _Split(rows, values.astype(np.int32), (weights / total)[rows, values])


class _Inner(Script):
    """A part of another's script, with noise of its own."""

    def __init__(self, outer: Script, index: int, same_target: bool):
        self.outer, self.index, self.batch, self.same_target = (
            outer,
            index,
            outer.batch,
            same_target,
        )

    def _enter(self, place: tuple) -> None:
        shared = self.same_target and place[0] == "position"
        self.outer._enter(place if shared else (self.index, *place))

    def _one(self, weights: np.ndarray) -> jax.Array:
        return self.outer._one(weights)


class _Coins:
    def __init__(self, script: Script, count: int):
        self.script, self.tossed = script, np.zeros((script.batch, count), bool)

    def flip(self, kept: jax.Array, total: jax.Array, node: jax.Array | None = None) -> jax.Array:
        above, below = np.broadcast_arrays(
            np.asarray(kept, np.float64), np.asarray(total, np.float64)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            chance = np.where(above >= below, (above > 0) * 1.0, above / below)
        if np.isnan(chance).any() or (above < 0).any():
            raise ImpossibleLaw("a coin with NaN or negative masses was tossed")
        if node is not None:
            return self._toss(chance, np.asarray(node))
        columns = [
            self._toss(chance[:, i], np.full(len(chance), i)) for i in range(chance.shape[1])
        ]
        return jnp.stack(columns, 1) if columns else jnp.zeros(chance.shape, bool)

    def _toss(self, chance: np.ndarray, node: np.ndarray) -> jax.Array:
        rows = np.nonzero((chance > 0) & (chance < 1))[
            0
        ]  # the others come out one way whatever the noise is
        if self.tossed[rows, node[rows]].any():
            raise NoiseReused("the coin of a node was tossed twice")
        self.tossed[rows, node[rows]] = True
        return self.script._one(np.stack([1 - chance, chance], -1)).astype(bool)


class Expanded(NamedTuple):
    """Every history of a function."""

    value: Any  # what the function returned, a row per history
    source: np.ndarray  # i64[R] the row each history began from
    chance: np.ndarray  # f64[R] its probability, given that beginning
    ledger: frozenset[tuple] = frozenset()  # the noise that it asked for


def expand(function: Callable, rows: Any, batch: int, ledger: Iterable[tuple] = ()) -> Expanded:
    """All outcomes of ``function(script, rows)``, where ``rows`` is a pytree of arrays [batch, ...].

    ``ledger`` is noise that was asked for before, in the same round.
    """
    source, chance, outcomes = np.arange(batch), np.ones(batch), []
    while True:
        count = len(source)
        if count > LARGEST:
            raise TooLarge(
                f"more than {LARGEST} histories; take a smaller vocabulary or a smaller draft"
            )
        size = next((b for b in BUCKETS if b >= count), -(-count // BUCKETS[-1]) * BUCKETS[-1])
        padded = np.resize(np.arange(count), size)  # rows again, thrown away below
        script = Script([each[padded] for each in outcomes], size, ledger)
        given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[source[padded]]), rows)  # noqa: B023
        try:
            with jax.disable_jit():
                value = function(script, given)
            real = jax.tree.map(lambda x: np.asarray(x)[:count], value)  # noqa: B023
            return Expanded(real, source, chance, frozenset(script.ledger))
        except _Split as split:
            real = split.rows < count
            kept = split.rows[real]
            source, chance = source[kept], chance[kept] * split.chance[real]
            outcomes = [each[kept] for each in outcomes] + [split.values[real]]


def exact_law(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    steps: int,
    *,
    rounds: int | None = None,
    **settings,
) -> np.ndarray:
    """The exact law of the next ``steps`` tokens after ``prompt``, as this drafter and this rule emit them.

    Args:
        target, drafter, rule, params: as for ``generate``; a tiny vocabulary, or there is no end to it. Run it under
            ``jax.enable_x64`` with float64 params, and the result is exact to about 1e-15.
        prompt: token ids.
        steps: how many tokens; the table has V**steps entries.
        rounds: real rounds to walk through, commits included; after them the target goes on by itself. None: all.
        settings: of ``sampling.make_sampling``.

    Returns:
        float64[V,...,V], ``steps`` axes.

    Raises:
        NotEnumerable: raw noise was asked for. NoiseReused: the same noise twice in a round.
    """
    vocab = target.vocab_size
    truth = laws.sequence_law(target, params.target, prompt, steps, **settings)
    out = np.zeros((vocab,) * steps)
    state, shared = _begin(target, drafter, params, prompt, steps, settings)
    weight = np.ones(1)
    for _ in itertools.count() if rounds is None else range(rounds):
        if not len(weight):
            break
        states, weights = [], []
        for one, _, each in _round(target, drafter, rule, params, state, shared, weight):
            done = np.asarray(one["done"])
            _collect(out, truth, one, each, done, len(prompt))
            states.append(jax.tree.map(lambda x: x[~done], one))  # noqa: B023
            weights.append(each[~done])
        state = jax.tree.map(lambda *x: np.concatenate(x), *states)
        weight = np.concatenate(weights)
    _collect(out, truth, state, weight, np.ones(len(weight), bool), len(prompt))
    return out


class Histories(NamedTuple):
    """All that can happen in one round."""

    info: StepInfo  # a row per history
    chance: np.ndarray  # f64[R]

    @property
    def accepted(self) -> float:
        """The expected number of accepted draft tokens."""
        return float((self.info.accepted * self.chance).sum())

    def first_token(self, vocab: int) -> np.ndarray:
        """f64[V]: the law of the first token that is emitted."""
        return np.bincount(np.asarray(self.info.tokens)[:, 0], self.chance, vocab)


def histories(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    **settings,
) -> Histories:
    """Everything that can happen in the first round after ``prompt``, with its probability."""
    state, shared = _begin(target, drafter, params, prompt, drafter.longest + 1, settings)
    seen = [
        (info, each)
        for _, info, each in _round(target, drafter, rule, params, state, shared, np.ones(1))
    ]
    infos, chances = zip(*seen, strict=True)
    return Histories(jax.tree.map(lambda *x: np.concatenate(x), *infos), np.concatenate(chances))


def _begin(target, drafter, params, prompt, steps: int, settings: dict) -> tuple[dict, dict]:
    packed, lengths = decode.pack_prompts([list(prompt)])
    knobs = sampling.make_sampling(1, **settings)
    limit, room = (
        lengths + steps,
        -(-(len(prompt) + steps + 1) // 8) * 8,
    )  # rounded up: the same shapes again and again
    with jax.disable_jit():  # one row: compiling would take longer
        state = decode.prefill(
            target, drafter, params, packed, lengths, rng.row_keys(0, 1), max_len=room, limit=limit,
            sampling=knobs,
        )  # fmt: skip
    return _rows(state)


ROWLESS = ("round", "keys", "made_for")  # of a DecodeState: not split with the rows


def _rows(state: DecodeState) -> tuple[dict, dict]:
    parts = {name: getattr(state, name) for name in state.__dataclass_fields__}
    return {k: v for k, v in parts.items() if k not in ROWLESS}, {
        k: v for k, v in parts.items() if k in ROWLESS
    }


def _round(target, drafter, rule, params, state: dict, shared: dict, weight: np.ndarray):
    """Yields (rows of states after the round, what the round did, their weights), a chunk at a time."""

    def whole(rows: dict) -> DecodeState:
        return DecodeState(**rows, **shared)

    def drafted(script, rows):
        context = step.Context(rows["tokens"], rows["length"], rows["sampling"])
        return drafter.propose(params, script, context, rows["draft"])

    opened = expand(drafted, state, len(weight))
    weight = weight[opened.source] * opened.chance
    state = jax.tree.map(lambda x: x[opened.source], state)
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        some = jax.tree.map(lambda x: x[part], (state, *opened.value))  # noqa: B023

        def judged(script, given):
            rows, draft, draft_state = given
            fixed = drafter._replace(propose=lambda *_: (draft, draft_state))
            scored = step.propose(target, fixed, params, whole(rows), script)
            after, info = step.decide(
                target, drafter, rule, params, whole(rows), script, scored, None
            )
            return _rows(after)[0], info

        closed = expand(judged, some, len(weight[part]), opened.ledger)
        yield *closed.value, weight[part][closed.source] * closed.chance
    shared["round"] = shared["round"] + 1


def _collect(out, truth, rows: dict, weight, chosen, begin: int) -> None:
    """Adds what the chosen rows emitted, continued by the target's own law."""
    tokens, length = np.asarray(rows["tokens"])[chosen], np.asarray(rows["length"])[chosen]
    weight, steps = weight[chosen], out.ndim
    for count in np.unique(length - begin):
        here = length - begin == count
        heads, each = tokens[here, begin : begin + count], weight[here]
        masses: dict[tuple[int, ...], float] = {}
        unique, inverse = np.unique(heads, axis=0, return_inverse=True)
        for head, mass in zip(unique, np.bincount(inverse.ravel(), each, len(unique)), strict=True):
            masses[tuple(head.tolist())] = mass
        for head, mass in masses.items():
            rest = truth[head]
            if count == steps:
                out[head] += mass
            elif (total := rest.sum()) > 0:
                out[head] += mass * rest / total
            else:  # the target never says this: the mass goes anywhere below, the truth has none there
                out[head].flat[0] += mass
