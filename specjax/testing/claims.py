"""Whether a drafter draws its tokens from the probs that it declares, by enumeration.

A rule relies on two things, whatever the target is: given the nodes before it, a token is drawn
from exactly its declared probs; and whether a node is valid does not depend on its own token, nor
on later ones. Both are one equation: among all drafts with the same nodes before node i, and with
the same valid nodes up to i, the share of those with token x at node i is ``Draft.probs[i, x]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.accept.verdict import parents as parents_of
from specjax.testing import exact, loop
from specjax.testing.findings import Finding
from specjax.types import LM, Drafter, ModelParams

# Largest difference of a probability.
EXACT = 1e-9


class Worst(NamedTuple):
    """The largest difference between a declared and the actual probability of a token."""

    error: float
    node: int
    token: int
    declared: float
    actual: float


def drawn_as_declared(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[dict],
    after: Sequence[int] = (2,),
) -> Finding:
    """The claims of all drafts after these prompts, under each of the settings.

    In the first round after each prompt, and in the rounds with the numbers ``after``.

    Not proven if the drafts cannot be listed, or if no token was drafted. A drafter that declares
    no probs claims nothing: rules treat its tokens as given.
    """
    name, number, seen, at = "tokens are drawn from the declared probs", 0, False, ""
    worst = Worst(-1.0, 0, 0, 0.0, 0.0)
    if not drafter.nodes:
        return Finding(name, True, "it drafts no tokens")
    if not _declares(target, drafter, params, prompts[0]):
        return Finding(name, True, "it declares none: its tokens are taken as given")
    with jax.enable_x64(True):
        wide = jax.tree.map(widen, params)
        for prompt, played in [*((p, 0) for p in prompts), *((prompts[-1], n) for n in after)]:
            for each in settings:
                try:
                    drafts = exact.drafts(target, drafter, wide, prompt, after=played, **each)
                except (exact.NoiseReused, exact.ImpossibleProbs) as error:
                    return Finding(name, False, str(error))
                except (exact.NotEnumerable, exact.TooLarge) as error:
                    return Finding(name, None, str(error))
                number += len(drafts.chance)
                if not np.asarray(drafts.value.valid).any():
                    continue
                seen = True
                found = largest_error(drafts)
                if found.error > worst.error:
                    worst = found
                    at = f"{setting_name(each)}, {played} rounds after {list(prompt)}"
    if not seen:
        return Finding(name, None, "no token was drafted; give prompts after which it drafts")
    detail = f"{number} drafts; a probability is off by at most {max(worst.error, 0):.1e}"
    if worst.error > EXACT:
        detail += (
            f": {at}, node {worst.node}, token {worst.token}: declared {worst.declared:.4g}, "
            f"drawn with {worst.actual:.4g}, given the nodes before it and that it is valid"
        )
    return Finding(name, worst.error <= EXACT, detail)


def _declares(target: LM, drafter: Drafter, params: ModelParams, prompt: Sequence[int]) -> bool:
    """Whether its drafts have probs."""
    state = loop.begin(target, drafter, params, [prompt], 1, 0)
    shape = jax.eval_shape(lambda state: loop.propose(drafter, params, state), state)
    return shape.probs is not None


def largest_error(drafts: exact.Expanded) -> Worst:
    """The largest difference over all nodes of all drafts from one text."""
    draft, chance = drafts.value, drafts.chance
    valid, tokens, probs = (np.asarray(x) for x in (draft.valid, draft.tokens, draft.probs))
    parents = np.asarray(parents_of(draft))
    valid = existing(parents, valid)
    # A node that is not valid has the parent -9.
    before, above = np.where(valid, tokens, -1), np.where(valid, parents, -9)
    declared = np.round(np.where(valid[..., None], probs, 0), 9)
    worst = Worst(-1.0, 0, 0, 0.0, 0.0)
    for node in range(valid.shape[1]):
        here = valid[:, node]
        if not here.any():
            continue
        own = declared[here][:, : node + 1].reshape(here.sum(), -1)
        key = np.concatenate([before[here, :node], above[here, : node + 1], own], 1)
        _, first, group = np.unique(key, axis=0, return_index=True, return_inverse=True)
        mass = np.zeros((len(first), probs.shape[-1]))
        np.add.at(mass, (group.ravel(), tokens[here, node]), chance[here])
        actual, claim = mass / mass.sum(-1, keepdims=True), probs[here, node][first]
        error = np.abs(actual - claim)
        place = np.unravel_index(np.argmax(error), error.shape)
        if error[place] > worst.error:
            found = (float(error[place]), node, int(place[1]))
            worst = Worst(*found, float(claim[place]), float(actual[place]))
    return worst


def existing(parents: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """bool[B,N]: valid nodes whose ancestors are all valid."""
    valid, row = valid.copy(), np.arange(len(valid))
    for node in range(valid.shape[1]):
        above = parents[:, node]
        valid[:, node] &= (above < 0) | valid[row, np.maximum(above, 0)]
    return valid


def setting_name(settings: dict) -> str:
    """Settings as a line of text."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def widen(x: Any) -> jax.Array:
    """Float arrays as float64, under ``jax.enable_x64``."""
    floating = jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating)
    return jnp.asarray(x, jnp.float64) if floating else jnp.asarray(x)
