"""Whether a drafter's forecast of its own speed is what decoding shows."""

from __future__ import annotations

import jax
import numpy as np

from specjax import accept, decode, sampling
from specjax.testing import loop
from specjax.testing.findings import Finding
from specjax.testing.models import prompts_of
from specjax.train import examine
from specjax.types import LM, Batch, Drafter, ModelParams

# Texts, their prompts' longest length, and the tokens that are written.
ROWS, LONGEST, NEW = 768, 5, 20
# Standard deviations of the difference at temperature 1.
MOST = 5.0


def forecast_equals_decoding(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """``Training.foresee`` against decoding, on the very texts that decoding wrote.

    At temperature 0 every row must take exactly the rounds that the forecast expects. At
    temperature 1 the difference must have mean 0: below 5 standard deviations of its sum over the
    rows, which are independent.
    """
    name, details = "its forecast equals decoding", []
    for temperature in (0.0, 1.0):
        rounds, expected, tokens = _rounds(drafter, target, params, temperature)
        difference = rounds - expected
        line = (
            f"at temperature {temperature:g} {tokens / rounds.sum():.4f} tokens per round, "
            f"forecast {tokens / expected.sum():.4f}"
        )
        if temperature == 0:
            good = bool((np.abs(difference) < 1e-6).all())
        else:
            size = float(np.sqrt((difference**2).sum()))
            good = abs(float(difference.sum())) <= MOST * max(size, 1e-6)
            line += f" ({abs(float(difference.sum())) / max(size, 1e-6):.1f} standard deviations)"
        if not good:
            return Finding(name, False, line)
        details.append(line)
    return Finding(name, True, "; ".join(details))


def _rounds(
    drafter: Drafter, target: LM, params: ModelParams, temperature: float
) -> tuple[np.ndarray, np.ndarray, int]:
    """The rounds of each row, the number that the forecast expects, and all tokens."""
    random = np.random.default_rng(0)
    starts = random.integers(1, LONGEST + 1, ROWS).tolist()
    drawn = [random.integers(0, target.vocab_size, n).tolist() for n in starts]
    prompts = prompts_of(target, drawn)
    starts = list(map(len, prompts))
    state = loop.begin(
        target, drafter, params, prompts, NEW, 11, width=LONGEST, temperature=temperature
    )
    rule = accept.load(accept.default_rule(drafter))
    state, records = decode.generate(target, drafter, rule, params, state, max_steps=NEW)
    decode.check(state)
    text = np.maximum(np.asarray(state.tokens), 0)[:, : LONGEST + NEW]
    assert drafter.training is not None and drafter.training.foresee is not None
    rows = sampling.make_sampling(ROWS, temperature)
    kept = jax.jit(drafter.training.foresee)(params, Batch(jax.numpy.asarray(text)), rows)
    kept, ends = np.asarray(kept, np.float64), np.asarray(state.length).tolist()
    expected = [
        NEW / examine.forecast(kept[row : row + 1], starts[row : row + 1], ends[row : row + 1]).tau
        for row in range(ROWS)
    ]
    return (np.asarray(records.emitted) > 0).sum(0), np.array(expected), ROWS * NEW
