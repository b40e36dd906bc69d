"""The exact law of what a drafter and a rule emit, by running the real code on every outcome.

Every history of a round is run once (``specjax.testing.expansion``). Nothing is sampled and nothing
is assumed about the rule.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax import accept, decode, rng, sampling, step
from specjax.testing import expansion, laws, verdicts
from specjax.testing import rounds as one_round
from specjax.testing.expansion import Expanded, TooLarge, expand
from specjax.testing.script import ImpossibleProbs, NoiseReused, NotEnumerable, Script
from specjax.testing.verdicts import WrongVerdict
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, StepInfo

__all__ = [
    "Enumerated",
    "Expanded",
    "Histories",
    "ImpossibleProbs",
    "NoiseReused",
    "NotEnumerable",
    "TooLarge",
    "WrongVerdict",
    "drafts",
    "enumerated",
    "exact_law",
    "expand",
    "histories",
]

# Drafts that are judged together; bounds the memory for their histories.
CHUNK = 4 * expansion.ROWS


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
    target = compiled(target)
    state, shared = _begin(target, drafter, params, prompt, steps, settings, after)
    begun = len(prompt)
    prompt = state["tokens"][0, : int(state["length"][0])].tolist()
    settings["written"] = len(prompt) - begun
    truth = laws.sequence_law(target, params.target, prompt, steps, **settings)
    weight, drafted, accepted = np.ones(1), 0.0, np.zeros(drafter.longest + 1)
    for number in itertools.count() if rounds is None else range(rounds):
        if not len(weight):
            break
        states, weights = [], []
        for part in _round(target, drafter, rule, params, state, shared, weight):
            if number == 0:
                drafted += float((part.info.drafted * part.weight).sum())
                accepted += np.bincount(part.info.accepted, part.weight, len(accepted))
            done = np.asarray(part.rows["done"])
            _add(law, truth, part.rows, part.weight, done, len(prompt))
            states.append(jax.tree.map(lambda x: x[~done], part.rows))  # noqa: B023
            weights.append(part.weight[~done])
        state = jax.tree.map(lambda *x: np.concatenate(x), *states)
        weight = np.concatenate(weights)
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
    target = compiled(target)
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
    target = compiled(target)
    state, shared = _begin(target, drafter, params, prompt, drafter.longest + 1, settings)
    parts = list(_round(target, drafter, rule, params, state, shared, np.ones(1)))
    info = jax.tree.map(lambda *x: np.concatenate(x), *(part.info for part in parts))
    return Histories(info, np.concatenate([part.weight for part in parts]))


@functools.cache
def compiled(target: LM) -> LM:
    """The model; each call is one program, also where jit is off. It needs no randomness."""

    def on(function: Callable) -> Callable:
        program = jax.jit(function)

        def call(*args, **keys):
            with jax.disable_jit(False):
                return program(*args, **keys)

        return call

    return target.changed(on)._replace(commit=on(target.commit))


_play = jax.jit(one_round.play, static_argnums=(0, 1, 2))


def _begin(
    target, drafter, params, prompt, steps: int, settings: dict, after: int = 0
) -> tuple[dict, dict]:
    """A state with ``steps`` tokens to go, after ``after`` rounds with the rule "match"."""
    # Rounded up, so that few different shapes occur: each compiles every operation again.
    packed, lengths = decode.pack_prompts([list(prompt)], width=-(-len(prompt) // 8) * 8)
    longest = len(prompt) + after * (drafter.longest + 1) + steps + 1
    # For one row, compiling would take longer than running without jit.
    with jax.disable_jit():
        state = decode.prefill(
            target,
            drafter,
            params,
            packed,
            lengths,
            rng.row_keys(0, 1),
            max_len=-(-longest // 32) * 32,
            sampling=sampling.make_sampling(1, **settings),
        )
    for _ in range(after):
        state, _ = _play(target, drafter, accept.load("match"), params, state)
    rows, shared = _rows(state.replace(limit=state.length + steps))
    # Not jax arrays: every new number of rows would compile their indexing again.
    return jax.tree.map(np.asarray, rows), shared


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
    rule = verdicts.enforced(rule)

    def decide(script, given):
        rows, draft, draft_state = given
        state = DecodeState(**rows, **shared)
        after, info = one_round.judge(
            target, drafter, rule, params, state, script, draft, draft_state
        )
        return _rows(after)[0], info

    drafted = expand(_proposer(drafter, params, shared), state, len(weight))
    weight = weight[drafted.source] * drafted.chance
    state = jax.tree.map(lambda x: x[drafted.source], state)
    for start in range(0, len(weight), CHUNK):
        part = slice(start, start + CHUNK)
        given = jax.tree.map(lambda x: x[part], (state, *drafted.value))  # noqa: B023
        decided = expand(decide, given, len(weight[part]), drafted.ledger)
        rows, info = decided.value
        yield _Part(rows, info, weight[part][decided.source] * decided.chance)
    shared["round"] = shared["round"] + 1


def _proposer(drafter: Drafter, params: ModelParams, shared: dict) -> Callable:
    """The function of a script and of the rows of states that gives drafts and draft states."""

    def propose(script: Script, rows: dict) -> Any:
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
