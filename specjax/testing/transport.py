"""The largest acceptance that any rule can reach with k draws, for tiny vocabularies.

A bound to compare rules with several candidates against.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np
import scipy.optimize
import scipy.sparse


def best_acceptance(target: np.ndarray, draft: np.ndarray, count: int) -> float:
    """The largest chance that the emitted token is one of ``count`` independent draft draws.

    The maximum is over all rules that emit ``target``: optimal transport with membership cost
    (SpecTr, 2310.15141, section 3), as a linear program over couplings of the draws with the
    emitted token, V**count * V variables.

    Args:
        target, draft: float[V].
        count: k.

    Raises:
        ArithmeticError: the linear program was not solved.
    """
    draft = np.asarray(draft, np.float64)
    draws = list(itertools.product(range(len(draft)), repeat=count))
    return best_coverage(target, draws, [float(np.prod(draft[list(each)])) for each in draws])


def best_coverage(
    target: np.ndarray, draws: Sequence[Collection[int]], chances: Sequence[float]
) -> float:
    """The largest chance that the emitted token is in the set of candidates.

    The maximum is over all rules that emit ``target`` f[V]. ``draws`` are the sets that can occur,
    ``chances`` their probabilities. Raises ArithmeticError if the linear program was not solved.
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
