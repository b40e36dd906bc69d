"""How far two targets are apart, on texts that the first of them wrote.

A drafter is often used with another target than the one it was trained for: quantised, or trained
further. Its tokens per round then change with how far the two targets are apart. Both read the same
texts here, so every number is of pairs, and intervals are over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.bench import lossless, metrics, uncertainty
from specjax.bench.passes import Job, Pass, one_part
from specjax.bound import Bound
from specjax.drafters import none
from specjax.drafters.draft_models import _small_model
from specjax.drafters.pairs import in_size
from specjax.types import ModelParams


def between(first: Job, other: Job, texts: Sequence[Pass]) -> dict[str, Any]:
    """The distance of a target from the first one.

    Args:
        first, other: jobs with the same prompts and settings.
        texts: passes of plain decoding, of the first target and of the other one.

    Returns:
        "texts", "texts_equal": the texts, and how many are the same (of sampled ones, with the same
        noise); "tokens" of the first target's texts, after each of which the next-token
        distributions of both are compared: "total_variation" under the settings of the job (at
        temperature 0, where it would be 0 or 1, under temperature 1), and "argmax_agreement", how
        often the most probable token is the same. Both are means with an interval, "..._interval".
    """
    (first, _), (other, _) = one_part(first, None), one_part(other, None)
    outputs = texts[0].outputs
    pairs = zip(outputs, texts[1].outputs, strict=True)
    result: dict[str, Any] = {
        "texts": len(outputs),
        "texts_equal": sum(list(a) == list(b) for a, b in pairs),
        "tokens": sum(map(len, outputs)),
    }
    model = in_size(other.target, first.target.vocab_size)
    drafter = none.make(first.target)._replace(probs=Bound(_small_model.probs, model))
    params, width = ModelParams(first.params, other.params), first.width + first.max_new_tokens
    scored = lossless.Texts(
        first.target, params, first.prompts, outputs, first.settings, drafter, width
    )
    sampled = first.settings["temperature"] or 1.0
    for name, temperature in (("total_variation", sampled), ("argmax_agreement", 0.0)):
        settings = first.settings | {"temperature": temperature}
        shared = lossless.compare(scored._replace(settings=settings)).overlap
        values = shared if temperature == 0 else 1 - shared
        result |= _mean(name, values, outputs)
    return result


def _mean(name: str, values: np.ndarray, outputs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The mean over all tokens, and its interval over prompts."""
    lengths = [len(own) for own in outputs]
    if not sum(lengths):
        return {name: None, f"{name}_interval": None}
    sums = [own.sum() for own in np.split(values, np.cumsum(lengths)[:-1])]
    mean, prompts = float(values.mean()), sum(length > 0 for length in lengths)
    ends = uncertainty.around(mean, uncertainty.ratio_error(sums, lengths), prompts)
    # A share: an interval of few prompts may leave [0, 1].
    ends = ends and [min(max(end, 0.0), 1.0) for end in ends]
    return {name: mean, f"{name}_interval": ends}


def tau_ratio(first: Sequence[Pass], other: Sequence[Pass]) -> dict[str, Any]:
    """The tokens per round of a method with the other target, over those with the first one.

    Returns:
        "tau_ratio" and "tau_ratio_interval" (``uncertainty.speedup_interval``, with rounds in the
        place of seconds: what makes a prompt easy for both cancels). Both are None without rounds.
    """
    above, below = (
        [metrics.total(each) for each in zip(*(run.counts for run in runs), strict=True)]
        for runs in (other, first)
    )
    taus = [metrics.summary(metrics.total(each))["block_efficiency"] for each in (above, below)]
    if not all(taus):
        return {"tau_ratio": None, "tau_ratio_interval": None}
    works = [[uncertainty.Work(one.tokens, one.rounds) for one in each] for each in (above, below)]
    ratio = taus[0] / taus[1]
    interval = uncertainty.speedup_interval(ratio, works[0], works[1])
    return {"tau_ratio": ratio, "tau_ratio_interval": interval}
