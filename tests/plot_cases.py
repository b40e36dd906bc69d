"""Made-up rows of results.json, and what a figure shows, for tests of the plots."""

from __future__ import annotations

import random

from specjax import theory

CLASSES = {
    "by_class": {"word": {"alpha": 0.7, "tokens": 90}, "digits": {"alpha": 0.4, "tokens": 9}}
}
# The plots that one row of ``row`` has data for.
ALWAYS = {"predicted_and_measured", "acceptance_by_depth", "time_split"}


def row(method="draft_model", gamma=4, temperature=0.0, batch=1, **more) -> dict:
    """A finished row, somewhat slower than theory predicts; ``more`` replaces its values."""
    rng = random.Random(f"{method}{gamma}{temperature}{batch}{more}")
    alpha = 0.6 + 0.2 * rng.random()
    costs = {"step": 2.0, "draft": 0.1 * gamma, "verify": 2.0 + 0.2 * gamma}
    tokens = theory.expected_tokens(alpha, gamma)
    predicted = theory.speedup(tokens, costs["draft"], costs["verify"], costs["step"])
    gain = predicted * rng.uniform(0.8, 1.0)
    return {
        "method": method,
        "drafter": "draft_model",
        "accept": "chain",
        "class": "L1",
        "temperature": temperature,
        "batch_size": batch,
        "prompt_set": "stories",
        "category": None,
        "gamma": gamma,
        "nodes": gamma,
        "parameters": {"target": 70_000_000, "draft": 10_000_000},
        "context": 120.0,
        "block_efficiency": tokens,
        "acceptance_rate": alpha,
        "acceptance_by_depth": [alpha] * gamma,
        "speedup": gain,
        "predicted_speedup": predicted,
        "spread": {"speedup": [gain * 0.9, gain * 1.1]},
        "costs_ms": costs,
        "time_split": {"draft": 0.2, "verify": 0.6, "accept": 0.1, "host": 0.1},
        "overlap": None,
        "warm": False,
    } | more


def texts(figure) -> list[str]:
    """All texts of a figure, without matplotlib's escapes."""
    from matplotlib.text import Text

    return [text.get_text().replace(r"\$", "$") for text in figure.findobj(Text)]


def legend(figure) -> list[str]:
    """The labels of the legend."""
    return [text.get_text().replace(r"\$", "$") for text in figure.legends[0].get_texts()]


def caption(figure) -> str:
    """The caption on one line."""
    return figure.texts[-1].get_text().replace("\n", " ")


def points(ax) -> list:
    """The measured points of each series: of the lines that have bars."""
    return [container.lines[0].get_xydata().tolist() for container in ax.containers]
