"""The exact law of what a drafter and a rule emit, by running the real code on every outcome.

``expand`` runs a function with a ``Script`` in place of ``RowKeys`` until every history has been
run once; the probabilities of the histories add up to 1. Nothing is sampled and nothing is assumed
about the rule. jit is off meanwhile, so that loops run in Python and the script can read values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, rng, sampling, step
from specjax.testing import laws
from specjax.testing.script import (
    Branches,
    ImpossibleProbs,
    NoiseReused,
    NotEnumerable,
    Pending,
    Script,
)
from specjax.types import LM, Accept, Context, DecodeState, Drafter, ModelParams, StepInfo

__all__ = [
    "Expanded",
    "Histories",
    "ImpossibleProbs",
    "NoiseReused",
    "NotEnumerable",
    "TooLarge",
    "exact_law",
    "expand",
    "histories",
]

# Rows of every run: one number, because every new shape compiles every operation again.
ROWS = 4096
# Drafts that are judged together; bounds the memory for their histories.
CHUNK = 4 * ROWS
# Histories of one function.
LARGEST = 4_000_000


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
    waiting = Pending(np.arange(batch), np.zeros((batch, 8), np.int32), np.zeros(batch, np.int64))
    runs: list[tuple[Any, np.ndarray, np.ndarray]] = []
    requested, count = frozenset(ledger), 0
    while len(waiting.source):
        waiting, now = waiting.split(ROWS)
        branches = Branches(now, ROWS)
        script = Script(branches, ledger)
        given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[branches.source]), rows)  # noqa: B023
        with jax.disable_jit():
            value = function(script, given)
        waiting = Pending.join([waiting, *branches.pending()])
        kept = branches.histories
        value = jax.tree.map(lambda x: np.asarray(x)[kept], value)  # noqa: B023
        runs.append((value, branches.source[kept], branches.chance[kept]))
        requested, count = requested | script.ledger, count + len(kept)
        if count + len(waiting.source) > LARGEST:
            raise TooLarge(
                f"more than {LARGEST} histories; take a smaller vocabulary or a smaller draft"
            )
    values, sources, chances = zip(*runs, strict=True)
    value = jax.tree.map(lambda *x: np.concatenate(x), *values)
    return Expanded(value, np.concatenate(sources), np.concatenate(chances), requested)


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
    """The exact law of the next ``steps`` tokens after ``prompt``, as drafter and rule emit them.

    Args:
        target, drafter, rule, params: as for ``generate``, with a tiny vocabulary. Under
            ``jax.enable_x64`` with float64 params the result is exact to about 1e-15.
        prompt: token ids.
        steps: number of tokens; the table has V**steps entries.
        rounds: number of real rounds, commits included; the target alone continues after them.
            None: all.
        settings: of ``sampling.make_sampling``.

    Returns:
        float64[V,...,V], ``steps`` axes.

    Raises:
        NotEnumerable: raw noise was requested.
        NoiseReused: the same noise was requested twice in a round.
        TooLarge: there are more than LARGEST histories.
    """
    truth = laws.sequence_law(target, params.target, prompt, steps, **settings)
    law = np.zeros((target.vocab_size,) * steps)
    state, shared = _begin(target, drafter, params, prompt, steps, settings)
    weight = np.ones(1)
    for _ in itertools.count() if rounds is None else range(rounds):
        if not len(weight):
            break
        states, weights = [], []
        for part in _round(target, drafter, rule, params, state, shared, weight):
            done = np.asarray(part.rows["done"])
            _add(law, truth, part.rows, part.weight, done, len(prompt))
            states.append(jax.tree.map(lambda x: x[~done], part.rows))  # noqa: B023
            weights.append(part.weight[~done])
        state = jax.tree.map(lambda *x: np.concatenate(x), *states)
        weight = np.concatenate(weights)
    _add(law, truth, state, weight, np.ones(len(weight), bool), len(prompt))
    return law


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
    state, shared = _begin(target, drafter, params, prompt, drafter.longest + 1, settings)
    parts = list(_round(target, drafter, rule, params, state, shared, np.ones(1)))
    info = jax.tree.map(lambda *x: np.concatenate(x), *(part.info for part in parts))
    return Histories(info, np.concatenate([part.weight for part in parts]))


def _begin(target, drafter, params, prompt, steps: int, settings: dict) -> tuple[dict, dict]:
    packed, lengths = decode.pack_prompts([list(prompt)])
    # Rounded up, so that few different shapes occur.
    room = -(-(len(prompt) + steps + 1) // 8) * 8
    # For one row, compiling would take longer than running without jit.
    with jax.disable_jit():
        state = decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            rng.row_keys(0, 1),
            max_len=room,
            limit=lengths + steps,
            sampling=sampling.make_sampling(1, **settings),
        )
    return _rows(state)


# Fields of a DecodeState that are not divided into rows.
ROWLESS = ("round", "keys", "made_for")


def _rows(state: DecodeState) -> tuple[dict, dict]:
    """The fields that have rows, and the others."""
    parts = {name: getattr(state, name) for name in state.__dataclass_fields__}
    rows = {name: value for name, value in parts.items() if name not in ROWLESS}
    return rows, {name: parts[name] for name in ROWLESS}


class _Part(NamedTuple):
    """Some of the histories of a round."""

    rows: dict  # of the states after the round
    info: StepInfo
    weight: np.ndarray  # f64[R] the probability of each history


def _round(
    target, drafter, rule, params, state: dict, shared: dict, weight: np.ndarray
) -> Iterator[_Part]:
    """Every history of one round from states with these weights, a part at a time."""

    def propose(script, rows):
        context = Context(rows["tokens"], rows["length"], rows["sampling"])
        return drafter.propose(params, script, context, rows["draft"])

    def decide(script, given):
        rows, draft, draft_state = given
        state = DecodeState(**rows, **shared)
        proposed = drafter._replace(propose=lambda *_: (draft, draft_state))
        scored = step.propose(target, proposed, params, state, script)
        after, info = step.decide(target, drafter, rule, params, state, script, scored, None)
        return _rows(after)[0], info

    drafted = expand(propose, state, len(weight))
    weight = weight[drafted.source] * drafted.chance
    state = jax.tree.map(lambda x: x[drafted.source], state)
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        given = jax.tree.map(lambda x: x[part], (state, *drafted.value))  # noqa: B023
        decided = expand(decide, given, len(weight[part]), drafted.ledger)
        rows, info = decided.value
        yield _Part(rows, info, weight[part][decided.source] * decided.chance)
    shared["round"] = shared["round"] + 1


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
