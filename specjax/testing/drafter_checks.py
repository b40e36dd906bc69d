"""Checks of a drafter alone: the form of its drafts, and the probs that it gives for any text."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, checks, step, tree
from specjax.accept.verdict import parents as parents_of
from specjax.errors import UserError
from specjax.testing import loop
from specjax.testing.claims import existing
from specjax.testing.findings import Finding, where
from specjax.testing.models import prompts_of
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    IID,
    LM,
    WITHOUT_REPLACEMENT,
    Context,
    Draft,
    Drafter,
    ModelParams,
    same_state,
)

# How far from 1 the sum of float32 probabilities may be.
SUM = 1e-4
PROMPTS = ([0, 1, 1], [1], [1, 1, 0, 1, 1], [0, 0])


# The functions of a drafter, and what they are called with.
_TAKES = {
    "init_params": ("key",),
    "init": ("params", "context", "target_out", "slots"),
    "propose": ("params", "keys", "context", "state"),
    "update": ("params", "state", "draft", "verdict", "target_out"),
}


def wrong_form(drafter: Drafter, target: LM, params: ModelParams) -> str | None:
    """What is wrong with the numbers of a drafter or with what its functions take and return.

    One line, of the first thing that is wrong in one traced round; None: nothing is wrong.
    """
    try:
        checks.whole(f"nodes of {drafter.name}", drafter.nodes, 0)
        checks.whole(f"depth of {drafter.name}", drafter.longest, 0)
        for name, arguments in _TAKES.items():
            _check_call(drafter, name, arguments)
        _check_state(drafter, *jax.eval_shape(lambda: _one_round(drafter, target, params)))
    except Exception as error:
        return where(error)
    return None


def _one_round(drafter: Drafter, target: LM, params: ModelParams) -> tuple[Any, Any]:
    """The drafter's state before and after the first round."""
    state = loop.begin(target, drafter, params, prompts_of(target, PROMPTS), 7, 0)
    after = step.speculative_step(target, drafter, accept.load("match"), params, state)[0]
    return state.draft, after.draft


def _check_call(drafter: Drafter, name: str, arguments: tuple[str, ...]) -> None:
    """Raises UserError unless the function can be called with these arguments."""
    function, taken = getattr(drafter, name), ", ".join(arguments)
    which = f"{name} of {drafter.name}"
    if not callable(function):
        raise UserError(f"{which} is {function!r}; it must be a function ({taken})")
    shown = inspect.signature(function)
    try:
        shown.bind(*arguments)
    except TypeError:
        raise UserError(f"{which} takes {shown}; it is called with ({taken})") from None


def _check_state(drafter: Drafter, before: Any, after: Any) -> None:
    """Raises UserError unless a round keeps the structure, the shapes and the dtypes of a state."""
    first, second = tree.shown(before), tree.shown(after)
    given, names = "update" if drafter.update is not same_state else "propose", [*first, *second]
    wrong = [name for name in names if first.get(name) != second.get(name)]
    if wrong:
        old, new = (each.get(wrong[0], "nothing") for each in (first, second))
        raise UserError(
            f"{given} of {drafter.name} returned a state with {new} at state{wrong[0]}, and init "
            f"one with {old}; every round must keep shapes and dtypes"
        )
    if jax.tree.structure(before) != jax.tree.structure(after):
        old, new = (type(state).__name__ for state in (before, after))
        raise UserError(
            f"{given} of {drafter.name} returned a state of another structure ({new}) than init "
            f"({old}); every round must keep it"
        )


def well_formed(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """Every array of the drafts of three rounds is what the drafter's ``siblings`` require."""
    name = "drafts are well formed"
    prompts, temperature = prompts_of(target, PROMPTS), [1.0, 1.0, 0.5, 0.0]
    state = loop.begin(target, drafter, params, prompts, 7, 0, temperature=temperature)
    greedy = np.asarray(state.sampling.greedy)
    propose = jax.jit(lambda state: loop.propose(drafter, params, state))
    try:
        for number in range(3):
            draft = propose(state.replace(round=jnp.asarray(number)))
            check_draft(draft, target.vocab_size, drafter.siblings, greedy=greedy)
            # A text of one token has no feature yet.
            empty = np.asarray(state.length) == 1 if drafter.features else np.zeros(4, bool)
            fed = 0 if draft.fed is None else np.asarray(draft.fed)[:, None]
            full = (np.asarray(draft.valid) | (np.arange(drafter.nodes) < fed)).all(-1) | empty
            if drafter.whole and not full.all():
                row = int(np.argmin(full))
                raise UserError(f"row {row} has an invalid node, and the drafter declares whole")
    except UserError as error:
        return Finding(name, False, str(error))
    return Finding(name, True, f"{drafter.siblings}, {drafter.nodes} nodes, {drafter.longest} deep")


def probs_of_text(drafter: Drafter, target: LM, params: ModelParams) -> Finding:
    """In five rounds, the first draft token is drawn from ``Drafter.probs`` of the whole text."""
    name = "its first token is drawn from Drafter.probs"
    state = loop.begin(target, drafter, params, prompts_of(target, PROMPTS), 23, 3)
    rule, worst = accept.load("match"), 0.0

    @jax.jit
    def play_round(state):
        draft = loop.propose(drafter, params, state)
        if drafter.probs is None or draft.probs is None:
            return state, None
        text = Context(jnp.maximum(state.tokens, 0), state.length, state.sampling)
        expected = jax.vmap(lambda row, n: row[n - 1])(drafter.probs(params, text), state.length)
        error = jnp.abs(draft.probs[:, 0] - expected).max(-1)
        after, _ = step.speculative_step(target, drafter, rule, params, state)
        return after, jnp.where(state.done, 0, error).max()

    for _ in range(5):
        state, error = play_round(state)
        if error is None:
            return Finding(name, True, "its drafts are deterministic")
        worst = max(worst, float(error))
    return Finding(name, worst < 1e-4, f"its probs are off by at most {worst:.1e} in five rounds")


def check_draft(
    draft: Draft, vocab_size: int, siblings: str, greedy: np.ndarray | None = None
) -> None:
    """Raises UserError, naming row and node, unless ``draft`` is what ``siblings`` requires.

    Args:
        draft: the result of ``propose``, concrete arrays.
        vocab_size: V.
        siblings: the drafter's kind, one of ``types.SIBLINGS``.
        greedy: bool[B] rows of temperature 0; their probs are not checked.
    """
    tokens = np.asarray(draft.tokens)
    parents, valid = np.asarray(parents_of(draft)), np.asarray(draft.valid)
    if (draft.parents is None) != (siblings == CHAIN):
        raise UserError(
            f"siblings are {siblings!r}: parents must be None for a chain, and only for a chain"
        )
    _check_topology(parents, valid, vocab_size)
    valid = existing(parents, valid)
    _refuse(valid & ((tokens < 0) | (tokens >= vocab_size)), f"a token outside 0..{vocab_size - 1}")
    if draft.probs is None:
        return
    if siblings == DETERMINISTIC:
        raise UserError(
            "a deterministic draft has no probs; leave them out, or declare how the siblings "
            "were drawn (Drafter.siblings)"
        )
    sampled = valid if greedy is None else valid & ~np.asarray(greedy)[:, None]
    probs = np.asarray(draft.probs, np.float64)
    tokens = np.clip(tokens, 0, vocab_size - 1)
    _check_probs(probs, tokens, sampled)
    _check_siblings(probs, tokens, parents, sampled, siblings)


def _check_topology(parents: np.ndarray, valid: np.ndarray, vocab_size: int) -> None:
    size = parents.shape[1]
    _refuse(
        valid & (parents >= np.arange(size)),
        "a parent that does not come before it; order the nodes topologically",
    )
    _refuse(valid & (parents < -1), "a parent below -1")
    for node in range(size):
        count = ((parents == parents[:, [node]]) & valid).sum(1)
        if valid[:, node].any() and (count[valid[:, node]] > vocab_size).any():
            raise UserError(
                f"node {node} is one of {count.max()} siblings; the vocabulary has {vocab_size} "
                "tokens"
            )


def _check_probs(probs: np.ndarray, tokens: np.ndarray, sampled: np.ndarray) -> None:
    _refuse(sampled & ~np.isfinite(probs).all(-1), "probs that are not finite")
    _refuse(sampled & (probs.min(-1) < 0), "a negative probability; give probs, not logits")
    _refuse(sampled & (np.abs(probs.sum(-1) - 1) > SUM), "probs that do not sum to 1")
    own = np.take_along_axis(probs, tokens[..., None], -1)[..., 0]
    _refuse(sampled & (own <= 0), "a token of probability 0 in its own probs")


def _check_siblings(
    probs: np.ndarray,
    tokens: np.ndarray,
    parents: np.ndarray,
    sampled: np.ndarray,
    siblings: str,
) -> None:
    row = np.arange(len(probs))
    for node in range(probs.shape[1]):
        for earlier in range(node):
            both = sampled[:, node] & sampled[:, earlier]
            pair = both & (parents[:, node] == parents[:, earlier])
            if siblings == IID:
                bad = np.abs(probs[:, node] - probs[:, earlier]).max(-1) > SUM
                what = "other probs than its sibling; i.i.d. siblings share one distribution"
            elif siblings == WITHOUT_REPLACEMENT:
                bad = probs[row, node, tokens[:, earlier]] > 0
                what = "a positive probability for the token of an earlier sibling"
            else:
                return
            _refuse((pair & bad)[:, None], what, node)


def _refuse(bad: np.ndarray, what: str, node: int | None = None) -> None:
    if bad.any():
        row, place = np.argwhere(bad)[0]
        raise UserError(f"row {row}, node {place if node is None else node} has {what}")
