"""Whether what a drafter does depends on how many tokens its rounds verify."""

from __future__ import annotations

import jax
import numpy as np

from specjax import accept, decode, tree
from specjax.testing import loop
from specjax.testing.findings import Finding
from specjax.testing.models import prompts_of
from specjax.testing.state_checks import PROMPTS, TEMPERATURES
from specjax.types import LM, Drafter, ModelParams

NEW = 16


def widths_do_not_matter(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Text and rounds are those of verifying the whole draft, at every width.

    A drafter that reads what the target computed for nodes that do not exist gives other drafts
    when they are not verified. The law of the output does not show it.
    """
    name = "verified widths do not matter"
    widths = tree.widths(drafter)
    if len(widths) == 1:
        return Finding(name, True, "its rounds have one width")
    wrong, narrow, rounds = [], 0, 0
    for row in range(len(PROMPTS)):
        whole = _decoded(drafter, target, params, row, (drafter.nodes + 1,))
        few = _decoded(drafter, target, params, row, widths)
        equal = jax.tree.map(np.array_equal, whole[:-1], few[:-1])
        wrong += [] if all(jax.tree.leaves(equal)) else [row]
        ran = few[-1] > 0
        narrow, rounds = narrow + int((few[-1][ran] <= drafter.nodes).sum()), rounds + ran.sum()
    if wrong:
        return Finding(
            name,
            False,
            f"after prompt {PROMPTS[wrong[0]]} at temperature {TEMPERATURES[wrong[0]]:g}, text or "
            f"rounds differ from those of verifying all nodes ({len(wrong)} of {len(PROMPTS)} "
            "prompts)",
        )
    if not narrow:
        return Finding(name, True, "every round verified all nodes, so no other width was tried")
    return Finding(name, True, f"{narrow} of {rounds} rounds verified only a part")


def _decoded(
    drafter: Drafter, target: LM, params: ModelParams, row: int, widths: tuple[int, ...]
) -> tuple[np.ndarray, ...]:
    """The text, then what each round emitted, accepted, drafted, tested and verified."""
    rule = accept.load("chain" if drafter.siblings == "chain" else "recursive")
    longest = max(len(prompt) for prompt in PROMPTS)
    # All prompts have one shape, so there is one program.
    state = loop.begin(
        target,
        drafter,
        params,
        prompts_of(target, [PROMPTS[row]]),
        NEW,
        5,
        [row],
        width=longest,
        temperature=TEMPERATURES[row],
    )
    state, records = decode.generate(
        target, drafter, rule, params, state, max_steps=NEW, verify_widths=widths
    )
    decode.check(state)
    counts = records.emitted, records.accepted, records.drafted, records.tested, records.verified
    return tuple(np.asarray(x) for x in (state.tokens, *counts))
