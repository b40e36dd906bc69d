"""The exact law of a round, and what is counted where it cannot be enumerated."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
import scipy.special

from specjax.testing import exact, loop
from specjax.testing.claims import setting_name, widen
from specjax.testing.findings import Finding
from specjax.theory import statistics
from specjax.types import LM, Accept, Drafter, ModelParams

# Largest total variation of an enumerated law.
EXACT = 1e-12
# Rows that are counted, the smallest p-value, and the rows that a cell has on average.
ROWS, LEVEL, PER_CELL = 120_000, 1e-4, 20
_Models = tuple[LM, Drafter, Accept, ModelParams]


def check_law(
    target: LM,
    drafter: Drafter,
    rule: Accept,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    *,
    after: Sequence[int] = (),
    count: bool = True,
    depths: bool = False,
    **settings,
) -> Finding:
    """The exact law of one round: its total variation from the target's law is below 1e-12.

    It is that of the first round after each prompt, and of the rounds with the numbers ``after``:
    a drafter may draft nothing, or other tokens, in its first round.

    A law that cannot be enumerated is counted in the compiled loop, on ROWS rows and over several
    rounds. Without ``count`` it is not proven. It is not proven either if nothing was drafted.
    With ``depths`` a draft must be accepted to every depth in some outcome: a rule that never
    accepts has the target's law too.
    """
    name = f"exact law of a round, {setting_name(settings)}" if settings else "exact law of a round"
    models, steps = (target, drafter, rule, params), drafter.longest + 1
    starts = [*((prompt, 0) for prompt in prompts), *((prompts[-1], n) for n in after)]
    try:
        results = _enumerated(models, starts, settings)
    except (exact.NoiseReused, exact.ImpossibleProbs, exact.WrongVerdict) as error:
        return Finding(name, False, str(error))
    except (exact.NotEnumerable, exact.TooLarge) as error:
        if not count:
            return Finding(name, None, f"not enumerated: {error}")
        return _counted(name, str(error), models, prompts, settings)
    worst = max(statistics.total_variation(each.law, each.truth) for each in results)
    drafted = float(np.mean([each.drafted for each in results]))
    accepted = np.mean([each.accepted for each in results], axis=0)
    mean = float(accepted @ np.arange(steps))
    detail = f"total variation {worst:.1e}; {drafted:.3g} nodes drafted, {mean:.3g} accepted"
    if worst >= EXACT:
        return Finding(name, False, detail)
    if not drafted and drafter.nodes:
        return Finding(name, None, f"nothing was drafted after these prompts; {detail}")
    missing = [depth for depth in range(1, steps) if accepted[depth:].sum() <= 0]
    if depths and missing:
        return Finding(name, False, f"{detail}: never a token at depth {missing[0]}")
    return Finding(name, True, detail)


def distance(target, drafter, rule, params, prompts, **settings) -> Finding:
    """How far the law of a round's text is from the target's, for a rule that is not exact.

    The largest total variation, and the largest KL divergence (law of the text from the target's,
    in nats), of the first round after each prompt. It has no bound to fail.
    """
    name, far = f"distance of a round's law, {setting_name(settings)}", np.zeros(2)
    starts = [(prompt, 0) for prompt in prompts]
    try:
        results = _enumerated((target, drafter, rule, params), starts, settings)
    except (exact.NotEnumerable, exact.TooLarge) as error:
        return Finding(name, None, f"not enumerated: {error}")
    for each in results:
        pair = each.law, each.truth
        one = statistics.total_variation(*pair), scipy.special.rel_entr(*pair).sum()
        far = np.maximum(far, one)
    return Finding(name, True, f"total variation {far[0]:.3g}, KL divergence {far[1]:.3g} nats")


def _enumerated(
    models: _Models, starts: Sequence[tuple[Sequence[int], int]], settings: dict
) -> list[exact.Enumerated]:
    """The law of one round, in float64, after each prompt and number of rounds before it."""
    target, drafter, rule, params = models
    steps, how = drafter.longest + 1, {"rounds": 1, **settings}
    with jax.enable_x64(True):
        wide = jax.tree.map(widen, params)
        return [
            exact.enumerated(target, drafter, rule, wide, list(prompt), steps, after=played, **how)
            for prompt, played in starts
        ]


def _counted(name: str, reason: str, models: _Models, prompts, settings: dict) -> Finding:
    """The law of the compiled loop over several rounds, by counting."""
    target, drafter, *_ = models
    most = int(np.log(ROWS / PER_CELL) / np.log(target.vocab_size))
    steps = max(min(drafter.longest + 2, most), 1)
    worst, detectable = 1.0, 0.0
    for seed, prompt in enumerate(prompts):
        try:
            fit = loop.loop_fit(*models, prompt, steps, ROWS, seed, **settings)
        except exact.WrongVerdict as error:
            return Finding(name, False, str(error))
        worst, detectable = min(worst, fit.p_value), max(detectable, fit.detectable)
    detail = (
        f"counted, not enumerated ({reason}): {ROWS} rows, {steps} tokens, p = {worst:.2g}; a "
        f"total variation of {detectable:.3f} would fail"
    )
    return Finding(name, worst > LEVEL, detail)
