"""What the comparisons of drafters with references in plain NumPy share.

A reference is a function ``after(text, path)``: the logits f64[V] after the tokens ``path``, which
were drafted after a text whose last token is pending.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from eagle_reference import log_softmax
from head_cases import softmax

from specjax import accept, step, testing
from specjax.models import lm
from specjax.testing import loop
from specjax.types import Batch, ModelParams

After = Callable[[list[int], list[int]], np.ndarray]

VOCAB, LAYERS, WIDTH, NEW, SIZE = 16, 4, 32, 9, 20
SHARP = 6.0
# Rows of unequal length; every second one is greedy, and the second cannot draft at first.
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3]]
TEMPERATURES = [1.0, 0.0, 1.0, 0.0]
TEXTS = np.random.default_rng(0).integers(0, VOCAB, (2, 10))
# The documents of each row of ``TEXTS``.
DOCUMENTS = ([0] * 6 + [1] * 4, [0] * 10)


@functools.cache
def target_of():
    """The target and its parameters."""
    return testing.tiny("llama", 0, 8.0, layers=LAYERS, vocab_size=VOCAB)


def pair_of(drafter) -> ModelParams:
    """The parameters of target and drafter."""
    return ModelParams(target_of()[1], drafter.init_params(None))


def sharpened(params):
    """The parameters with larger queries.

    Where all weights of attention are nearly equal, positions and masks hardly matter.
    """
    if not isinstance(params, dict):
        return np.asarray(params)
    params = {name: sharpened(each) for name, each in params.items()}
    if {"q", "k", "v"} <= params.keys():
        name = "q_norm" if "q_norm" in params else "q"
        params[name] = {leaf: SHARP * each for leaf, each in params[name].items()}
    return params


def wide(params):
    """Parameters in float64."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@functools.cache
def embedding() -> np.ndarray:
    """f64[V,D]: the target's; its LM head is the transpose."""
    return np.asarray(target_of()[1]["embed"]["embedding"], np.float64)


class Target(NamedTuple):
    """What the target computes of a text of T tokens."""

    logits: np.ndarray  # f64[T,V]
    hidden: np.ndarray  # f64[T,D]
    taps: np.ndarray  # f64[T,LAYERS,D] the outputs of all layers


@functools.partial(jax.jit, static_argnums=0)
def _forward(target, params, tokens):
    out = lm.forward(target, params, tokens)
    return out.logits, out.hidden, jnp.stack(out.taps, 2)


@functools.cache
def _target(text) -> Target:
    target, params = target_of()
    padded = np.zeros((1, SIZE), np.int32)
    padded[0, : len(text)] = text
    found = _forward(target.with_taps(tuple(range(LAYERS))), params, padded)
    return Target(*(np.asarray(x, np.float64)[0, : len(text)] for x in found))


def target_along(text) -> Target:
    """The target's own outputs, from specjax."""
    return _target(tuple(int(token) for token in text))


def rounds(drafter, rule: str, number: int = 4):
    """(state before, ``StepInfo``) of each round of a ragged batch."""
    (target, _), params = target_of(), pair_of(drafter)
    state = loop.begin(target, drafter, params, PROMPTS, NEW, 0, temperature=TEMPERATURES)
    play = jax.jit(functools.partial(step.speculative_step, target, drafter, accept.load(rule)))
    for _ in range(number):
        before = state
        state, info = play(params, state)
        yield jax.device_get((before, info))


def error_of_drafts(drafter, after: After, rule: str = "chain", least: int = 2) -> float:
    """The largest error of the probs of drafts; greedy rows must draft the best tokens.

    Texts have ``least`` tokens to be drafted after. The rounds have rejections, and tokens that are
    accepted.
    """
    worst, seen, counts = 0.0, 0, set()
    for state, info in rounds(drafter, rule):
        for row in np.flatnonzero(~state.done):
            text, draft = state.tokens[row, : state.length[row]].tolist(), info.draft
            assert draft.valid[row].any() == (len(text) >= least)
            if len(text) >= least:
                parents = range(-1, drafter.nodes - 1)
                if draft.parents is not None:
                    parents = draft.parents[row].tolist()
                own = list(parents), draft.tokens[row], draft.probs[row]
                worst = max(worst, _error_of_draft(after, text, *own, TEMPERATURES[row] == 0))
                seen, counts = seen + 1, counts | {int(info.accepted[row])}
    assert seen >= 8 and 0 in counts and len(counts) > 1, (seen, counts)
    return worst


def _error_of_draft(after, text, parents, tokens, probs, greedy) -> float:
    """Of the first sibling at each node, which is drawn from the whole distribution."""
    worst, paths = 0.0, []
    for node, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else []
        paths.append([*above, int(tokens[node])])
        if parent in parents[:node]:
            continue
        logits = after(text, above)
        right = np.eye(VOCAB)[logits.argmax()] if greedy else softmax(logits)
        worst = max(worst, float(np.abs(probs[node] - right).max()))
        if greedy and tokens[node] != logits.argmax():
            worst = 1.0
    return worst


class Place(NamedTuple):
    """A place of the packed texts at which a draft begins."""

    row: int
    place: int  # of the feature that the pending token was drawn from
    text: list[int]  # the document up to the pending token
    rest: list[int]  # what follows in the document


def batch_of() -> Batch:
    return Batch(jnp.asarray(TEXTS), segments=jnp.asarray(DOCUMENTS))


def places() -> Iterator[Place]:
    for row, documents in enumerate(DOCUMENTS):
        for place in range(len(documents) - 1):
            same = [i for i, each in enumerate(documents) if each == documents[place]]
            if place + 1 in same:
                text = TEXTS[row, same].tolist()
                cut = same.index(place) + 2
                yield Place(row, place, text[:cut], text[cut:])


class Compared(NamedTuple):
    """A label of training: the reference and the target give these logits and log-probs."""

    label: int
    depth: int
    logits: np.ndarray  # f64[V]
    draft: np.ndarray  # f64[V]
    teacher: np.ndarray  # f64[V] logits
    target: np.ndarray  # f64[V]
    where: Place


def compared(after: After, depths: int, least: int = 2) -> Iterator[Compared]:
    """All labels behind texts of at least so many tokens."""
    for where in places():
        if len(where.text) < least:
            continue
        target = target_along([*where.text, *where.rest]).logits
        for depth, label in enumerate(where.rest[:depths]):
            right, teacher = (
                after(where.text, where.rest[:depth]),
                target[len(where.text) + depth - 1],
            )
            both = right, log_softmax(right), teacher, log_softmax(teacher)
            yield Compared(label, depth, *both, where)


def error_of_logits(logits, right: np.ndarray, each: Compared) -> float:
    """Of logits f[depths][B,T,V] along the texts; relative to the largest, if this is above 1."""
    own, seen = np.asarray(logits[each.depth])[each.where.row, each.where.place], np.isfinite(right)
    if (np.isfinite(own) != seen).any():
        return np.inf  # other tokens can be drafted
    error = np.abs(own[seen] - right[seen]).max()
    return float(error / max(np.abs(right[seen]).max(), 1))


# Keys of the loss of drafters that compare every depth, and its term.
WEIGHTS = {"ce": 0.3, "teacher": 0.7, "decay": 0.5}


def depth_term(each: Compared) -> float:
    p = np.exp(each.target)
    term = -0.3 * each.draft[each.label] + 0.7 * (p * (each.target - each.draft)).sum()
    return 0.5**each.depth * term


def error_of_training(
    logits, loss: float, after: After, depths: int, value: Callable[[Compared], float]
) -> float:
    """The largest error of ``logits``, and the relative one of the loss.

    ``value(Compared)`` is the term of a label; the loss is their sum per label of depth 0.
    """
    found = list(compared(after, depths))
    total = sum(map(value, found)) / sum(each.depth == 0 for each in found)
    worst = max(error_of_logits(logits, each.logits, each) for each in found)
    return max(worst, abs(float(loss) / total - 1))


def error_with(mistake, patch, made, plain_of, error) -> float:
    """``error(case, drafter)`` of the drafter that is made with a mistake (``mutants.patches``)."""
    plain_of(mistake.caught_by)  # with the parameters of the right drafter
    mistake.change(patch)
    # Another name: the programs of the right drafter are not used again.
    drafter = made.__wrapped__(mistake.caught_by)._replace(name=mistake.name)
    return error(mistake.caught_by, drafter)
