"""The exact law of what a drafter and a rule emit, by running the real code on every outcome.

Every history of a round is run once: ``expand`` runs it with a ``_Script`` in place of ``RowKeys``;
the probabilities of the histories add up to 1. jit is off meanwhile, so that loops run in Python
and the script can read values. Nothing is sampled, and nothing is assumed about the rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, rng, step
from specjax.testing import laws, loop, verdicts
from specjax.testing.verdicts import WrongVerdict as WrongVerdict
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, StepInfo

# Rows of every run: one number, because every new shape compiles every operation again.
ROWS = 4096
# Histories of one function.
LARGEST = 4_000_000
# Drafts that are judged together; bounds the memory for their histories.
CHUNK = 4 * ROWS


class Enumerated(NamedTuple):
    """What drafter and rule emit, over all histories."""

    law: np.ndarray  # f64[V,...,V] of the tokens
    truth: np.ndarray  # f64[V,...,V] the target's law of the same tokens
    drafted: float  # the expected number of nodes that the first round could test
    accepted: np.ndarray  # f64[M+1] the probability of each number of accepted nodes in that round


def exact_law(*args, **keys) -> np.ndarray:
    """The law alone, f64[V,...,V]; the arguments are those of ``enumerated``."""
    return enumerated(*args, **keys).law


def enumerated(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    steps: int,
    *,
    rounds: int | None = None,
    after: int = 0,
    **settings,
) -> Enumerated:
    """The exact law of the next ``steps`` tokens after ``prompt``, as drafter and rule emit them.

    Args:
        target, drafter, rule, params: as for ``generate``, with a tiny vocabulary. Under
            ``jax.enable_x64`` with float64 params the result is exact to about 1e-15.
        prompt: token ids.
        steps: number of tokens; the table has V**steps entries.
        rounds: number of real rounds, commits included; the target alone continues after them.
            None: all.
        after: rounds that are played first, with one outcome each; the law is that of the tokens
            after them.
        settings: of ``sampling.make_sampling``.

    Raises:
        NotEnumerable: raw noise was requested.
        NoiseReused: the same noise was requested twice in a round.
        WrongVerdict: a verdict whose path is not a path of the draft, or has other tokens.
        TooLarge: there are more than LARGEST histories.
    """
    law = np.zeros((target.vocab_size,) * steps)
    target = _compiled(target)
    state, shared = _begin(target, drafter, params, prompt, steps, settings, after)
    begun = len(prompt)
    prompt = state["tokens"][0, : int(state["length"][0])].tolist()
    settings["written"] = len(prompt) - begun
    truth = laws.sequence_law(target, params.target, prompt, steps, **settings)
    weight, drafted, accepted = np.ones(1), 0.0, np.zeros(drafter.longest + 1)
    for number in itertools.count() if rounds is None else range(rounds):
        if not len(weight):
            break
        parts = []
        for rows, info, chance in _round(target, drafter, rule, params, state, shared, weight):
            if number == 0:
                drafted += float((info.drafted * chance).sum())
                accepted += np.bincount(info.accepted, chance, len(accepted))
            done = np.asarray(rows["done"])
            _add(law, truth, rows, chance, done, len(prompt))
            parts.append(jax.tree.map(lambda x: x[~done], (rows, chance)))  # noqa: B023
        state, weight = _joined(parts)
    _add(law, truth, state, weight, np.ones(len(weight), bool), len(prompt))
    return Enumerated(law, truth, drafted, accepted)


def drafts(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: Sequence[int],
    *,
    after: int = 0,
    **settings,
) -> Expanded:
    """Every draft that the drafter can propose after ``prompt`` and ``after`` rounds.

    ``value`` is a ``Draft``.
    """
    target = _compiled(target)
    state, shared = _begin(target, drafter, params, prompt, drafter.longest + 1, settings, after)
    propose = _proposer(drafter, params, shared)
    return expand(lambda *given: propose(*given)[0], state, 1)


class Histories(NamedTuple):
    """Every history of one round."""

    info: StepInfo  # a row per history
    chance: np.ndarray  # f64[R]

    @property
    def accepted(self) -> float:
        """The expected number of accepted draft tokens."""
        return float((self.info.accepted * self.chance).sum())

    def first_token(self, vocab: int) -> np.ndarray:
        """f64[V]: the law of the first emitted token."""
        return np.bincount(np.asarray(self.info.tokens)[:, 0], self.chance, vocab)


def histories(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompt: Sequence[int],
    **settings,
) -> Histories:
    """Every history of the first round after ``prompt``, with its probability."""
    target = _compiled(target)
    state, shared = _begin(target, drafter, params, prompt, drafter.longest + 1, settings)
    parts = _round(target, drafter, rule, params, state, shared, np.ones(1))
    return Histories(*_joined([part[1:] for part in parts]))


def _joined(parts: list) -> Any:
    """Pytrees of arrays [R,...], as one."""
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


@functools.cache
def _compiled(target: LM) -> LM:
    """The model; each call is one program, also where jit is off. It needs no randomness."""

    def on(function: Callable) -> Callable:
        program = jax.jit(function)

        def call(*args, **keys):
            with jax.disable_jit(False):
                return program(*args, **keys)

        return call

    return target.changed(on)._replace(commit=on(target.commit))


_play = jax.jit(step.speculative_step, static_argnums=(0, 1, 2))


def _begin(
    target, drafter, params, prompt, steps: int, settings: dict, after: int = 0
) -> tuple[dict, dict]:
    """A state with ``steps`` tokens to go, after ``after`` rounds with the rule "match"."""
    # Rounded up, so that few different shapes occur: each compiles every operation again.
    longest = len(prompt) + after * (drafter.longest + 1) + steps + 1
    size = -(-longest // 32) * 32
    settings = {"width": -(-len(prompt) // 8) * 8, "max_len": size, **settings}
    # For one row, compiling would take longer than running without jit.
    with jax.disable_jit():
        state = loop.begin(target, drafter, params, [prompt], size - len(prompt), 0, **settings)
    for _ in range(after):
        state, _ = _play(target, drafter, accept.load("match"), params, state)
    rows, shared = _rows(state.replace(limit=state.length + steps))
    # Not jax arrays: every new number of rows would compile their indexing again.
    return jax.tree.map(np.asarray, rows), shared


# Fields of a DecodeState that are not divided into rows.
ROWLESS = ("round", "keys", "made_for", "sampled_logprobs")


def _rows(state: DecodeState) -> tuple[dict, dict]:
    """The fields that have rows, and the others."""
    parts = {name: getattr(state, name) for name in state.__dataclass_fields__}
    rows = {name: value for name, value in parts.items() if name not in ROWLESS}
    return rows, {name: parts[name] for name in ROWLESS}


def _round(
    target, drafter, rule, params, state: dict, shared: dict, weight: np.ndarray
) -> Iterator[tuple[dict, StepInfo, np.ndarray]]:
    """Every history of one round from states with these weights, a part at a time.

    The rows of the states after the round, its ``StepInfo``, and the probability f64[R] of each.
    """
    rule = verdicts.enforced(rule)

    def decide(script, given):
        rows, *proposed = given
        state = DecodeState(**rows, **shared)
        known = drafter._replace(propose=lambda *_: proposed)
        draft, draft_state = step.propose(target, known, params, state, script)
        state, whole = state.replace(draft=draft_state), (drafter.nodes + 1,)
        fixed = step.Round(target, drafter, rule, script)
        after, info = step.verify(fixed, params, state, draft, whole)
        return _rows(after)[0], info

    drafted = expand(_proposer(drafter, params, shared), state, len(weight))
    weight = weight[drafted.source] * drafted.chance
    state = jax.tree.map(lambda x: x[drafted.source], state)
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        given = jax.tree.map(lambda x: x[part], (state, *drafted.value))  # noqa: B023
        decided = expand(decide, given, len(weight[part]), drafted.ledger)
        rows, info = decided.value
        yield rows, info, weight[part][decided.source] * decided.chance
    shared["round"] = shared["round"] + 1


def _proposer(drafter: Drafter, params: ModelParams, shared: dict) -> Callable:
    """The function of a script and of the rows of states that gives drafts and draft states."""

    def propose(script: _Script, rows: dict) -> Any:
        state = DecodeState(**rows, **shared)
        return drafter.propose(params, script, step.context_of(state), state.draft)

    return propose


def _add(law, truth, rows: dict, weight, chosen, begin: int) -> None:
    """Adds the texts of the chosen rows to ``law``, each continued by the target's own law."""
    tokens, length = np.asarray(rows["tokens"])[chosen], np.asarray(rows["length"])[chosen]
    weight, steps = weight[chosen], law.ndim
    for count in np.unique(length - begin):
        here = length - begin == count
        heads, each = tokens[here, begin : begin + count], weight[here]
        unique, inverse = np.unique(heads, axis=0, return_inverse=True)
        masses = np.bincount(inverse.ravel(), each, len(unique))
        for head, mass in zip(map(tuple, unique.tolist()), masses, strict=True):
            rest = truth[head]
            if count == steps:
                law[head] += mass
            elif (total := rest.sum()) > 0:
                law[head] += mass * rest / total
            else:
                # The target never emits this text: any continuation gives the same error.
                law[head].flat[0] += mass


class NotEnumerable(TypeError):
    """The outcomes cannot be listed: raw noise (``at_round``, ``base``), or rows that interact.

    Test such code by counting (``testing.loop_fit``).
    """


class NoiseReused(AssertionError):
    """The same noise was requested twice in one round."""


class ImpossibleProbs(AssertionError):
    """The weights of a draw or a coin are negative, not finite, or all zero."""


class _Pending(NamedTuple):
    """Histories that have not been run: each is a starting row and its first choices."""

    source: np.ndarray  # i64[W] the row that the history begins from
    choices: np.ndarray  # i32[W,C] its first outcomes, only where at least two are possible
    given: np.ndarray  # i64[W] how many of the C outcomes are set

    @staticmethod
    def join(parts: list[_Pending]) -> _Pending:
        """All histories of the parts."""
        width = max(part.choices.shape[1] for part in parts)
        choices = [np.pad(p.choices, ((0, 0), (0, width - p.choices.shape[1]))) for p in parts]
        padded = zip(parts, choices, strict=True)
        return _joined([part._replace(choices=own) for part, own in padded])


class _Branches:
    """Gives every row of one run a history, and lists the histories that still have to be run.

    The rows that have had the same outcomes so far are a group; they are neighbours. At each
    request a group is divided among the possible outcomes. A group with fewer rows than outcomes
    takes the first ones; the others become pending and start again from the beginning in a later
    run, with their choices so far.

    Attributes:
        source: i64[R], the starting row of each row.
        chance: f64[R], the probability of each row's history, given its starting row.
    """

    def __init__(self, histories: _Pending, rows: int):
        item = np.arange(rows) * len(histories.source) // rows
        self.source, self._given = histories.source[item], histories.given[item]
        self._choices = histories.choices[item]
        self._used = np.zeros(rows, np.int64)
        self._first = np.append(True, item[1:] != item[:-1])
        self._later: list[_Pending] = []
        self.chance = np.ones(rows)

    @property
    def histories(self) -> np.ndarray:
        """i64[H]: one row of each history."""
        return np.flatnonzero(self._first)

    def pending(self) -> list[_Pending]:
        """The histories that had no row in this run, which is complete."""
        self._check((self._used >= self._given).all())
        return self._later

    def choose(self, weights: np.ndarray) -> np.ndarray:
        """One outcome i32[R] per row, from unnormalised weights f64[R,K]."""
        total = weights.sum(-1, keepdims=True)
        if not np.isfinite(total).all() or (total <= 0).any() or (weights < 0).any():
            raise ImpossibleProbs("a draw from weights that are NaN, negative or all zero")
        row, possible = np.arange(len(weights)), weights > 0
        outcomes = possible.sum(-1)
        open_, repeated = outcomes > 1, self._used < self._given
        if self._used.max() == self._choices.shape[1]:
            self._choices = np.pad(self._choices, ((0, 0), (0, 8)))
        # Divide each group evenly: rows that repeat a choice stay together.
        group = np.cumsum(self._first) - 1
        start, size = np.flatnonzero(self._first)[group], np.bincount(group)[group]
        rank = np.where(size >= outcomes, (row - start) * outcomes // size, row - start)
        rank = np.where(open_ & ~repeated, rank, 0)
        value = np.where(open_ & repeated, self._choices[row, self._used], _nth(possible, rank))
        self._check((value < weights.shape[1]).all() and possible[row, value].all())
        self._postpone(np.flatnonzero(self._first & ~repeated & (outcomes > size)), size, possible)
        self._choices[row[open_], self._used[open_]] = value[open_]
        self._used += open_
        self._first = self._first | np.append(True, rank[1:] != rank[:-1])
        self.chance *= weights[row, value] / total[:, 0]
        return value.astype(np.int32)

    def _postpone(self, rows: np.ndarray, size: np.ndarray, possible: np.ndarray) -> None:
        """Makes the outcomes pending for which the groups that begin at ``rows`` are too small."""
        if not len(rows):
            return
        extra = possible[rows].sum(-1) - size[rows]
        rank = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra)
        rows = np.repeat(rows, extra)
        choices = self._choices[rows]
        used = self._used[rows]
        choices[np.arange(len(rows)), used] = _nth(possible[rows], size[rows] + rank)
        self._later.append(_Pending(self.source[rows], choices, used + 1))

    @staticmethod
    def _check(repeatable) -> None:
        if not repeatable:
            raise NotEnumerable("what a row may draw depends on other rows; test it by counting")


def _nth(possible: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """i64[R]: the position of the ``rank``-th True in each row of bool[R,K]."""
    return np.argmax(possible & (np.cumsum(possible, -1) == rank[:, None] + 1), -1)


class _Script:
    """Replaces ``RowKeys`` in one run: ``_Branches`` chooses the outcomes of every request.

    Rules and drafters get all their randomness from ``RowKeys``: coins, draws, draws without
    replacement. Each row gets one outcome, so a few runs of the real code cover every history with
    its probability. The ledger makes an error of noise that is requested twice in one round (the
    same purpose and index), because the outcomes would not be independent.
    """

    def __init__(self, branches: _Branches, ledger: set[tuple], prefix=(), target=()):
        self.branches, self.batch, self.ledger = branches, len(branches.source), ledger
        # What ``inner`` puts before the places of a part: of all noise, and of its target's draws.
        self._prefix, self._target = prefix, target

    def coins(self, count: int, dtype=jnp.float32) -> _Coins:
        self._enter(("coins",))
        return _Coins(self, count)

    def draw(self, purpose: int, weights: jax.Array, index=None) -> jax.Array:
        if purpose == rng.ACCEPT:
            raise NoiseReused("a token was drawn with the purpose of the coins")
        return self._at_places(purpose, weights, index, self._one)

    def draw_at(self, depth, weights: jax.Array, active: jax.Array | None = None) -> jax.Array:
        self._enter(("position", int(depth)))
        masses = np.asarray(weights, np.float64)
        if active is not None:
            masses = np.where(np.asarray(active)[:, None], masses, np.eye(1, masses.shape[1]))
        return self._one(masses)

    def draw_coupled(
        self, depth, weights: jax.Array, streams: int, active: jax.Array | None = None
    ) -> jax.Array:
        del streams
        return self.draw_at(depth, weights, active)

    def guess_coupled(self, depth, weights: jax.Array, streams) -> jax.Array:
        """Here independent of the target's draws: the law of the text is that of these alone."""
        masses = np.asarray(weights, np.float64)
        self._enter(("guess", int(depth)))
        return jnp.stack([self._one(masses[:, n]) for n in range(len(streams))], 1)

    def draw_distinct(
        self, purpose: int, weights: jax.Array, count: int, index=None
    ) -> tuple[jax.Array, jax.Array]:
        def distinct(left: np.ndarray) -> tuple[jax.Array, jax.Array]:
            tokens, exist = [], []
            for _ in range(count):
                exist.append(left.sum(-1) > 0)
                token = self._one(np.where(exist[-1][:, None], left, np.eye(1, left.shape[1])))
                tokens.append(token)
                left = np.where(np.arange(left.shape[1]) == np.asarray(token)[:, None], 0, left)
            return jnp.stack(tokens, -1), jnp.asarray(np.stack(exist, -1))

        return self._at_places(purpose, weights, index, distinct)

    def _at_places(self, purpose: int, weights: jax.Array, index, choose: Callable) -> Any:
        """``choose`` of the weights f64[R,K], or of those at each place of f64[R,P,K], stacked."""
        masses, results = np.asarray(weights, np.float64), []
        places = masses[:, None] if masses.ndim == 2 else masses
        for place, number in enumerate([None] if index is None else np.atleast_1d(index).tolist()):
            self._enter((purpose, number))
            results.append(choose(places[:, place]))
        if masses.ndim == 2:
            return results[0]
        return jax.tree.map(lambda *x: jnp.stack(x, 1), *results)

    def inner(self, index: int | jax.Array, same_target: bool = False) -> _Script:
        prefix = (*self._prefix, int(index))
        return _Script(self.branches, self.ledger, prefix, self._target if same_target else prefix)

    def __getattr__(self, name: str):
        raise NotEnumerable(f"RowKeys.{name} is raw noise; only coins and draws can be enumerated")

    def _enter(self, place: tuple) -> None:
        place = (*(self._target if place[0] == "position" else self._prefix), *place)
        if place in self.ledger:
            raise NoiseReused(f"the noise {place} was requested twice in one round")
        self.ledger.add(place)

    def _one(self, weights: np.ndarray) -> jax.Array:
        """One outcome per row, from unnormalised weights f64[R,K]."""
        return jnp.asarray(self.branches.choose(weights))


class _Coins:
    def __init__(self, script: _Script, count: int):
        self.script, self.tossed = script, np.zeros((script.batch, count), bool)

    def flip(self, kept: jax.Array, total: jax.Array, node: jax.Array | None = None) -> jax.Array:
        above, below = np.broadcast_arrays(*(np.asarray(x, np.float64) for x in (kept, total)))
        with np.errstate(divide="ignore", invalid="ignore"):
            chance = np.where(above >= below, (above > 0) * 1.0, above / below)
        if np.isnan(chance).any() or (above < 0).any():
            raise ImpossibleProbs("a coin with NaN or negative masses")
        if node is not None:
            return self._toss(chance, np.asarray(node))
        columns = [self._toss(each, np.full(len(each), i)) for i, each in enumerate(chance.T)]
        return jnp.stack(columns, 1) if columns else jnp.zeros(chance.shape, bool)

    def _toss(self, chance: np.ndarray, node: np.ndarray) -> jax.Array:
        # A coin with chance 0 or 1 needs no noise.
        rows = np.flatnonzero((chance > 0) & (chance < 1))
        if self.tossed[rows, node[rows]].any():
            raise NoiseReused("the coin of a node was tossed twice")
        self.tossed[rows, node[rows]] = True
        return self.script._one(np.stack([1 - chance, chance], -1)).astype(bool)


class TooLarge(ValueError):
    """There are too many histories to enumerate."""


class Expanded(NamedTuple):
    """Every history of a function."""

    value: Any  # what the function returned, a row per history
    source: np.ndarray  # i64[R] the row that each history began from
    chance: np.ndarray  # f64[R] its probability, given that row
    ledger: frozenset[tuple] = frozenset()  # the noise that was requested


def expand(function: Callable, rows: Any, batch: int, ledger: Iterable[tuple] = ()) -> Expanded:
    """All outcomes of ``function(script, rows)``; ``rows`` is a pytree of arrays [batch, ...].

    ``ledger`` is noise that was requested before, in the same round. The order of the histories is
    arbitrary.
    """
    waiting = _Pending(np.arange(batch), np.zeros((batch, 8), np.int32), np.zeros(batch, np.int64))
    runs: list[tuple[Any, np.ndarray, np.ndarray]] = []
    requested, count = frozenset(ledger), 0
    while len(waiting.source):
        now = _Pending(*(x[-ROWS:] for x in waiting))
        waiting = _Pending(*(x[:-ROWS] for x in waiting))
        branches = _Branches(now, ROWS)
        script = _Script(branches, set(ledger))
        given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[branches.source]), rows)  # noqa: B023
        with jax.disable_jit():
            value = function(script, given)
        waiting = _Pending.join([waiting, *branches.pending()])
        kept = branches.histories
        value = jax.tree.map(lambda x: np.asarray(x)[kept], value)  # noqa: B023
        runs.append((value, branches.source[kept], branches.chance[kept]))
        requested, count = requested | script.ledger, count + len(kept)
        if count + len(waiting.source) > LARGEST:
            raise TooLarge(
                f"more than {LARGEST} histories; take a smaller vocabulary or a smaller draft"
            )
    value, source, chance = _joined(runs)
    return Expanded(value, source, chance, requested)
