"""How many draft tokens a rule accepts, against closed forms and against the best possible.

A rule that never accepts a token has the target's law, and is useless.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
import scipy.optimize
import scipy.sparse

from specjax import rng, theory
from specjax.accept import k_seq
from specjax.testing import exact, loop, plain_cases, verdicts
from specjax.testing.findings import Finding
from specjax.theory import statistics
from specjax.types import CHAIN, DETERMINISTIC, IID, INDEPENDENT, WITHOUT_REPLACEMENT, Accept

EXACT = 1e-12
# Rows with an empty draft, and the smallest p-value of their tokens.
ROWS, LEVEL = 6000, 1e-4


def empty_drafts(rule: Accept, siblings: str) -> Finding:
    """Drafts of 0 nodes: one token of the target, by chi-square over ROWS rows.

    Compiled: loops over nothing cannot be run one operation at a time.
    """
    name = f"{siblings}: a draft of 0 nodes"
    _, target, drafter, params = plain_cases.star(siblings, 0)
    state = loop.begin(target, drafter, params, [plain_cases.PROMPT] * ROWS, 1, 0)
    draft = loop.propose(drafter, params, state)
    probs = jax.nn.softmax(params.target[tuple(plain_cases.PROMPT[-2:])])
    rows = jax.numpy.broadcast_to(probs, (ROWS, 1, len(probs)))
    keys = rng.RowKeys(state.keys, state.round, state.length)
    sampled = jax.jit(rule.sampled)(keys, draft, rows)
    greedy = jax.jit(rule.greedy)(draft, rows)
    for verdict in (sampled, greedy):
        wrong = np.asarray(verdicts.mistakes(draft, verdict, len(probs)))
        if (wrong >= 0).any():
            return Finding(name, False, f"the rule gave {verdicts.MISTAKES[wrong.max()]}")
    if not (np.asarray(greedy.tokens)[:, 0] == int(np.argmax(probs))).all():
        return Finding(name, False, "at temperature 0 another token than the argmax")
    counts = np.bincount(np.asarray(sampled.tokens)[:, 0], minlength=len(probs))
    value = statistics.chi_square(counts, np.asarray(probs))[2]
    return Finding(name, value > LEVEL, f"{ROWS} rows, p = {value:.2g}")


def chance_of(rule: Accept, siblings: str, width: int) -> Finding:
    """The chance that one of ``width`` siblings is accepted.

    It is at most that of the best rule for such siblings, positive, and equal to the closed form
    where one is known for the rule's name.
    """
    seen, target, drafts = _first_round(rule, siblings, width)
    sets = _sets(siblings, width, drafts, len(target))
    best = best_coverage(target, list(sets), list(sets.values()))
    name = f"{width} {siblings} token{'s' * (width > 1)}: chance of acceptance"
    detail = f"{seen.accepted:.6f}; the best rule has {best:.6f}"
    form = CLOSED_FORMS.get((rule.name, siblings))
    if seen.accepted <= 0 or seen.accepted > best + 1e-9:
        return Finding(name, False, detail)
    if form is None or (known := form(target, drafts, width)) is None:
        return Finding(name, True, detail)
    good = abs(known - seen.accepted) < EXACT
    return Finding(name, good, f"{detail}; its closed form is {known:.6f}")


def law_of_test(rule: Accept, siblings: str) -> Finding:
    """``Accept.law`` where one draft token is tested, against the enumerated law of that token."""
    seen, target, (draft, *_) = _first_round(rule, siblings, 1)
    if siblings == DETERMINISTIC:
        draft = np.eye(len(draft))[np.argmax(draft)]
    assert rule.law is not None
    with jax.enable_x64(True):
        law = np.asarray(rule.law(*map(jax.numpy.asarray, (target, draft, 1))))
    error = statistics.total_variation(law, seen.first_token(len(target)))
    detail = f"total variation {error:.1e} from the enumerated one"
    return Finding(f"{siblings}: the law of a tested token", error < EXACT, detail)


def _first_round(rule: Accept, siblings: str, width: int) -> tuple[exact.Histories, Any, list]:
    """The histories of a round, and the probs f64[V] of the target and of each draft table."""
    with jax.enable_x64(True):
        _, lm, drafter, params = plain_cases.star(siblings, width)
        seen = exact.histories(lm, drafter, rule, params, plain_cases.PROMPT)
        logits = [table[tuple(plain_cases.PROMPT[-2:])] for table in (params.target, *params.draft)]
        target, *drafts = (np.asarray(jax.nn.softmax(x), np.float64) for x in logits)
    return seen, target, drafts


def _sets(
    siblings: str, width: int, drafts: list[np.ndarray], vocab: int
) -> dict[frozenset[int], float]:
    """Each set of candidates that can be drawn, with its probability."""
    if siblings == DETERMINISTIC:
        return {frozenset(np.argsort(-drafts[0], kind="stable")[:width].tolist()): 1.0}
    sets: dict[frozenset[int], float] = {}
    for draws in itertools.product(range(vocab), repeat=width):
        left, chance = np.ones(vocab), 1.0
        for rank, token in enumerate(draws):
            probs = drafts[rank if siblings == INDEPENDENT else 0] * left
            chance *= probs[token] / probs.sum() if probs.sum() > 0 else 0.0
            if siblings == WITHOUT_REPLACEMENT:
                left[token] = 0
        if chance > 0:
            sets[frozenset(draws)] = sets.get(frozenset(draws), 0.0) + chance
    return sets


def _overlap(target, drafts, width):
    return float(theory.overlap(target, drafts[0])) if width == 1 else None


def _covered(target, drafts, width):
    return float(np.sort(target[np.argsort(-drafts[0], kind="stable")[:width]]).sum())


def _product(target, drafts, width):
    return float((target * drafts[0]).sum()) if width == 1 else None


def _rejection(target, drafts, width):
    return float((drafts[0] / target).min())


def _k_seq(target, drafts, width):
    with jax.enable_x64(True):
        arrays = np.array([width]), target[None], drafts[0][None]
        rho = k_seq.solve(*(jax.numpy.asarray(x) for x in arrays))
        beta = np.minimum(drafts[0], target / float(rho[0])).sum()
    return float(1 - (1 - beta) ** width)


def _last_draw(target, drafts, width):
    order = np.argsort(target / drafts[0], kind="stable")
    until = np.cumsum(drafts[0][order])
    law = until**width - np.concatenate([[0], until[:-1]]) ** width
    return float(np.minimum(target[order], law).sum())


ClosedForm = Callable[[np.ndarray, list[np.ndarray], int], float | None]
"""(target f[V], draft distributions, number of siblings) -> the chance, None: not known."""

_SAMPLED = (CHAIN, IID, INDEPENDENT, WITHOUT_REPLACEMENT)
# (rule, siblings) -> the chance that one sibling is accepted.
CLOSED_FORMS: dict[tuple[str, str], ClosedForm] = {
    # Leviathan et al. 2023 (2211.17192), corollary 3.6; the tree rules with one sibling are equal.
    **{(rule, CHAIN): _overlap for rule in ("chain", "block")},
    **{(rule, kind): _overlap for rule in ("recursive", "traversal") for kind in _SAMPLED},
    # The sampler's token is one of the candidates.
    **{(rule, kind): _product for rule in ("match", "deterministic") for kind in _SAMPLED},
    **{
        (rule, DETERMINISTIC): _covered
        for rule in ("match", "deterministic", "recursive", "traversal")
    },
    # Leviathan et al. 2023, appendix A.2: 1/M.
    ("rejection", CHAIN): _rejection,
    # Sun et al. 2023 (2310.15141), section 3.
    **{("k_seq", kind): _k_seq for kind in (CHAIN, IID)},
    # Thomas and Pal 2026 (2602.16961): the last of the draws by target / draft.
    **{("gbv", kind): _last_draw for kind in (CHAIN, IID)},
}


def best_coverage(
    target: np.ndarray, draws: Sequence[Collection[int]], chances: Sequence[float]
) -> float:
    """The largest chance that the emitted token is in the set of candidates.

    The maximum is over all rules that emit ``target`` f[V]. ``draws`` are the sets that can occur,
    ``chances`` their probabilities. A linear program over couplings of the sets with the emitted
    token; ``theory.best_acceptance`` is its closed form for independent draws. Raises
    ArithmeticError if the linear program was not solved.
    """
    target, mass = np.asarray(target, np.float64), np.asarray(chances, np.float64)
    vocab = len(target)
    gain = np.array([[token in each for token in range(vocab)] for each in draws], float)
    size = len(draws)
    of_draws = scipy.sparse.kron(scipy.sparse.eye(size), np.ones((1, vocab)))
    of_tokens = scipy.sparse.kron(np.ones((1, size)), scipy.sparse.eye(vocab))
    result = scipy.optimize.linprog(
        -gain.ravel(),
        A_eq=scipy.sparse.vstack([of_draws, of_tokens]).tocsr(),
        b_eq=np.concatenate([mass, target]),
        method="highs",
    )
    if not result.success:
        raise ArithmeticError(f"the linear program was not solved: {result.message}")
    return float(-result.fun)
