"""The sets of sublayers that a search tries, in order: alone, growing, then Bayesian optimisation.

Each set follows from the trials before it and the seed alone, so a search that was killed continues
as if it had not been.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.drafters.self_speculation._skip_sets import Skips
from specjax.errors import UserError

# The sizes of growing sets that are tried at most.
GROWING = 24
# The noise of the Gaussian process, as in the authors' code.
NOISE = 1e-2


class Trial(NamedTuple):
    """One set and its value."""

    skips: Skips
    value: float  # the objective: a speed-up, or tokens per second
    alpha: float
    cost: float
    gamma: int


def plan(
    layers: int, done: list[Trial], trials: int, seed: int
) -> Iterator[tuple[str, Callable[[], Skips]]]:
    """(name, function that gives the set) of each trial; ``done`` has the trials before it."""
    yield "nothing", lambda: Skips((), ())
    for index in range(2 * layers):
        yield f"alone {index}", functools.partial(_skips, [index], layers)
    order = _by_harm(done, layers)
    for size in _sizes(layers):
        yield f"growing {size}", functools.partial(_skips, order[:size], layers)
    for trial in range(trials):
        # A fit takes longer with every trial: it is left out where the trial is stored.
        yield f"search {trial}", functools.partial(_suggested, layers, done, seed + trial)


def count(layers: int, trials: int) -> int:
    """How many sets ``plan`` has."""
    return 1 + 2 * layers + len(_sizes(layers)) + trials


def _sizes(layers: int) -> list[int]:
    """The sizes of the growing sets."""
    if layers < 2:
        return []
    return np.unique(np.linspace(2, 2 * layers - 1, GROWING).round().astype(int)).tolist()


def library() -> Any:
    """The package of Bayesian optimisation. Raises UserError if it is not installed."""
    try:
        import bayes_opt  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(
            "the search needs bayesian-optimization: pip install 'specjax[search]'"
        ) from None
    return bayes_opt


def _skips(chosen: Sequence[int], layers: int) -> Skips:
    """The set of these numbers: attentions are 0 to L - 1, feed-forward parts L to 2 L - 1."""
    return Skips(
        tuple(sorted(int(i) for i in chosen if i < layers)),
        tuple(sorted(int(i) - layers for i in chosen if i >= layers)),
    )


def _by_harm(done: Sequence[Trial], layers: int) -> list[int]:
    """All sublayers, first those that cost little acceptance for the weights that they save."""
    nothing, alone = done[0], done[1 : 1 + 2 * layers]
    harm = [
        (nothing.alpha - trial.alpha) / max(nothing.cost - trial.cost, 1e-12) for trial in alone
    ]
    return [int(i) for i in np.argsort(harm, kind="stable")]


def _suggested(layers: int, done: Sequence[Trial], seed: int) -> Skips:
    """The next set, from the trials so far and the seed alone.

    A number in [0, 1] for each sublayer, left out above 0.5, as in the authors' search. Several
    points are one set: in the place of a set that was tried, a random neighbour of it is taken.
    """
    package = library()
    names = [f"x{i:04d}" for i in range(2 * layers)]
    optimiser = package.BayesianOptimization(
        f=None,
        pbounds=dict.fromkeys(names, (0.0, 1.0)),
        random_state=seed,
        verbose=0,
        allow_duplicate_points=True,
    )
    optimiser.set_gp_params(alpha=NOISE)
    # Of equal sets only the last: their values are equal.
    values = {trial.skips: trial.value for trial in done}
    for skips, value in values.items():
        left = {*skips.attention, *(layers + i for i in skips.mlp)}
        optimiser.register(
            params={name: float(i in left) for i, name in enumerate(names)}, target=value
        )
    suggested = optimiser.suggest()
    chosen = {i for i, name in enumerate(names) if suggested[name] > 0.5}
    return _new(chosen, layers, set(values), np.random.default_rng(seed))


def _new(chosen: set[int], layers: int, tried: set[Skips], draw: np.random.Generator) -> Skips:
    """The set, or if it was tried one that differs in few sublayers; it leaves something."""
    every, size = chosen, 1
    while len(every) == 2 * layers or _skips(list(every), layers) in tried:
        # More and more sublayers change, so this ends unless all sets were tried.
        every = chosen ^ set(draw.choice(2 * layers, min(size, 2 * layers), False).tolist())
        size += draw.random() < 0.5
        if size > 4 * layers:
            return _skips(sorted(chosen)[: 2 * layers - 1], layers)
    return _skips(sorted(every), layers)
