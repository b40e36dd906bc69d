"""The acceptance rate by its definition: alpha = E[sum_x min(target(x), draft(x))] on every position of text that the target
wrote, whether a draft would have survived that far or not (Leviathan et al. 2023, definition 3.1; card A3).

What a decode loop accepts is another thing: there a token is only tested where its prefix was accepted, that is, in
easier places. By depth, class of token and category of prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.bench import token_classes
from specjax.bench.token_probs import views
from specjax.types import DETERMINISTIC, LM, Batch, Drafter, ModelParams


def overlap(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    settings: dict,
    *,
    categories: Sequence[str | None] = (),
    decode: Callable[[list[int]], str] | None = None,
    width: int = 0,
) -> dict | None:
    """How often the draft's token would be accepted, token by token of the outputs; None: the drafter cannot tell.

    From ``Drafter.probs``: the sum of minima itself. Without one from ``Training.foresee`` at depth 1: min(1, draft / target) of
    the text's own token, whose mean is the same (of a deterministic tree: whether some sibling is the text's). ``by_depth``
    is from ``foresee``: the draft's d-th token, if those before it are the text's; None without it.

    Args:
        target, drafter, params: the pair.
        prompts, outputs: token ids; the outputs must be the target's own, under these settings.
        settings: of ``sampling.make_sampling``; at temperature 0 both laws are certain, and the overlap is agreement.
        categories: of the prompts, for ``by_category``.
        decode: token ids to text, for ``by_class`` (``specjax.token_classes``).
        width: longest text, so that several calls share what is compiled; 0 = that of these.

    Returns:
        {"alpha", "tokens", "by_depth", "by_class", "by_category"}; what was not asked for is None.
    """
    # Of a deterministic tree the law is what its tokens were chosen by, not what any was drawn from.
    probs = None if drafter.siblings == DETERMINISTIC else drafter.probs
    foresee = None if drafter.training is None else drafter.training.foresee
    if not sum(map(len, outputs)) or (probs is None and foresee is None):
        return None
    kept = (
        None if foresee is None else _foreseen(foresee, params, prompts, outputs, settings, width)
    )
    if probs is not None:
        values = views(target, params, prompts, outputs, settings, drafter, width=width).overlap
    else:
        assert kept is not None
        values = np.concatenate([row[:, 0] for row in kept])
    found = {"alpha": float(values.mean()), "tokens": len(values), "by_depth": None}
    if kept is not None:
        depths = range(kept[0].shape[1])
        by_depth = [
            np.concatenate([row[: max(len(row) - d, 0), d] for row in kept]) for d in depths
        ]
        found["by_depth"] = [float(each.mean()) for each in by_depth if len(each)]
    kinds = None
    if decode is not None:
        kinds = [
            k
            for p, o in zip(prompts, outputs, strict=True)
            for k in token_classes.classify([*p, *o], decode)[len(p) :]
        ]
    found["by_class"] = _by(values, kinds)
    named = (
        [c for c, o in zip(categories, outputs, strict=True) for _ in o]
        if any(categories)
        else None
    )
    found["by_category"] = _by(values, named)
    return found


def _by(values: np.ndarray, kinds: Sequence[str | None] | None) -> dict | None:
    if kinds is None:
        return None
    names, which = np.unique([str(kind) for kind in kinds], return_inverse=True)
    sums, counts = np.bincount(which, values), np.bincount(which)
    return {
        str(name): {"alpha": float(total / count), "tokens": int(count)}
        for name, total, count in zip(names, sums, counts, strict=True)
    }


def _foreseen(
    foresee: Callable[..., jax.Array],
    params: ModelParams,
    prompts,
    outputs,
    settings: dict,
    width: int,
) -> list[np.ndarray]:
    """Of every output token f[M]: the probability that a draft of which it is the first token goes on being accepted."""
    found, batch = [], 8
    width = width or max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    for start in range(0, len(prompts), batch):
        pairs = list(zip(prompts, outputs, strict=True))[start : start + batch]
        tokens = np.zeros((batch, width), np.int32)
        for i, (p, o) in enumerate(pairs):
            tokens[i, : len(p) + len(o)] = [*p, *o]
        kept = np.asarray(
            _look(
                foresee,
                params,
                Batch(jnp.asarray(tokens)),
                sampling.make_sampling(batch, **settings),
            ),
            np.float64,
        )
        found += [kept[i, len(p) - 1 : len(p) + len(o) - 1] for i, (p, o) in enumerate(pairs)]
    return found


@functools.partial(jax.jit, static_argnums=0)
def _look(foresee: Callable[..., jax.Array], params: ModelParams, batch: Batch, how):
    return foresee(params, batch, how)
