"""The law of a token that the lenient rule emits, and the draft's most probable tokens.

All values are exact sums over the vocabulary, at every place of texts that the target wrote.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import accept, sampling
from specjax.bench import lossless
from specjax.models import lm
from specjax.types import LM, Drafter, ModelParams

TOPS = (1, 3, 5)
SMALLEST = np.finfo(np.float32).tiny  # less is 0 in float32; its logarithm must be finite


class Texts(NamedTuple):
    """Texts that the target wrote, as token ids."""

    prompts: list[list[int]]
    outputs: list[list[int]]


def emitted(target: np.ndarray, draft: np.ndarray, lenience: float) -> np.ndarray:
    """The law of the token that ``accept.lenient`` emits where it tests one draft token.

    Probabilities f64[...,V] of both models -> f64[...,V]. The token is drawn and accepted with the
    probability min(draft, target / lenience). Otherwise it is drawn from the residual, which is
    max(target - lenience * draft, 0), normalised. Leviathan et al. 2023, appendix A.5.
    """
    rule = accept.load("lenient", lenience=lenience)
    assert rule.law is not None
    with jax.enable_x64(True):
        return np.asarray(rule.law(*map(jnp.asarray, (target, draft, 1))))


def distances(target: np.ndarray, law: np.ndarray) -> dict[str, np.ndarray]:
    """Total variation, KL(target || law) and Jensen-Shannon, f64[...]; the last two in nats."""
    mean = (target + law) / 2
    return {
        "total_variation": np.abs(target - law).sum(-1) / 2,
        "kl": _kl(target, law),
        "jensen_shannon": (_kl(target, mean) + _kl(law, mean)) / 2,
    }


def _kl(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    logs = np.log(np.maximum(first, SMALLEST)) - np.log(np.maximum(second, SMALLEST))
    return np.maximum((first * logs).sum(-1), 0)  # no -0


def of_sampled(target: np.ndarray, draft: np.ndarray, lenience: float) -> dict[str, np.ndarray]:
    """alpha of the lenient rule, and ``distances`` of what it emits, at temperature 1; f64[...]."""
    alpha = np.minimum(draft, target / lenience).sum(-1)
    return {"alpha": alpha, **distances(target, emitted(target, draft, lenience))}


def of_greedy(target: np.ndarray, draft: np.ndarray, lenience: float) -> dict[str, np.ndarray]:
    """Whether the rule accepts the draft's best token at temperature 0, f64[...]."""
    token = draft.argmax(-1)[..., None]
    passed = np.take_along_axis(target, token, -1)[..., 0] >= lenience * target.max(-1)
    if lenience == 1:  # of tokens with equal probabilities one is accepted
        passed = token[..., 0] == target.argmax(-1)
    return {"alpha_greedy": passed.astype(np.float64)}


def tops(target: np.ndarray, draft: np.ndarray, greedy: bool) -> dict[int, np.ndarray]:
    """k -> whether the target's best token is among the draft's k best ones, f64[...].

    If not ``greedy``, the target's probability of these k tokens. Of tokens with equal
    probabilities the lower ids come first. Miao et al. 2024 (2305.09781), table 1.
    """
    best = np.argsort(-draft, -1, kind="stable")[..., : max(TOPS)]
    if greedy:
        each = (best == target.argmax(-1)[..., None]).astype(np.float64)
    else:
        each = np.take_along_axis(target, best, -1)
    mass = each.cumsum(-1)
    return {k: mass[..., k - 1] for k in TOPS}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _probs(target: LM, drafter: Drafter, params: ModelParams, context):
    assert drafter.probs is not None
    logits = lm.forward(target, params.target, context.tokens).logits
    return sampling.to_probs(logits, context.sampling), drafter.probs(params, context)


def places(
    target: LM, drafter: Drafter, params: ModelParams, texts: Texts
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Text by text the probabilities of target and draft at every output token, f64[tokens,V].

    At temperature 1, whatever temperature the text was written at.
    """
    pairs = list(zip(texts.prompts, texts.outputs, strict=True))
    width = max(len(prompt) + len(output) for prompt, output in pairs)
    for prompt, output in pairs:
        context = lossless.pack([[*prompt, *output]], [len(prompt)], 1, width, {"temperature": 1.0})
        here = slice(len(prompt) - 1, len(prompt) + len(output) - 1)
        both = _probs(target, drafter, params, context)
        first, second = (np.asarray(each[0, here], np.float64) for each in both)
        yield first / first.sum(-1, keepdims=True), second / second.sum(-1, keepdims=True)


def measured(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    sampled: Texts,
    greedy: Texts,
    leniences: Sequence[float],
) -> dict[str, list[dict[str, float]]]:
    """Means over all places: a row for each lenience, and one for each of ``TOPS``.

    Args:
        target, drafter, params: the pair; the drafter has ``probs``.
        sampled, greedy: texts of the target at temperature 1 and 0.
        leniences: of the rule.
    """
    rows: dict[str, dict[float, dict[str, float]]] = {"lenience": {}, "top": {}}
    for name, texts, of in (("sampled", sampled, of_sampled), ("greedy", greedy, of_greedy)):
        found: list[dict[tuple[str, float, str], np.ndarray]] = []
        for pair in places(target, drafter, params, texts):
            each = {("top", k, name): x for k, x in tops(*pair, greedy=of is of_greedy).items()}
            found.append(each | _by_lenience(of, pair, leniences))
        for kind, size, field in found[0]:
            values = np.concatenate([each[kind, size, field] for each in found])
            rows[kind].setdefault(size, {})[field] = float(values.mean())
    names = {"lenience": "lenience", "top": "k"}
    return {kind: [{names[kind]: k} | row for k, row in rows[kind].items()] for kind in rows}


def _by_lenience(
    of: Callable[..., dict[str, np.ndarray]], pair: Any, leniences: Sequence[float]
) -> dict[tuple[str, float, str], np.ndarray]:
    values = {each: of(*pair, each) for each in leniences}
    return {("lenience", each, key): x for each, row in values.items() for key, x in row.items()}
