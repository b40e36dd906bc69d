"""The acceptance rate by its definition: alpha = E[sum_x min(target(x), draft(x))].

The mean is over all positions of texts that the target wrote (Leviathan et al. 2023, definition
3.1). A decode loop measures another number: it tests a token only if its prefix was accepted, that
is, at easier positions. The overlap is also computed by depth, class of token and category of
prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sampling
from specjax.bench import token_classes
from specjax.bench.token_probs import compare, rows
from specjax.types import DETERMINISTIC, LM, Batch, Drafter, ModelParams

TokenIds = Sequence[Sequence[int]]


def overlap(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompts: TokenIds,
    outputs: TokenIds,
    settings: dict,
    *,
    categories: Sequence[str | None] = (),
    decode: Callable[[list[int]], str] | None = None,
    width: int = 0,
) -> dict | None:
    """The probability that a draft token is accepted, averaged over the tokens of the outputs.

    With ``Drafter.probs``: the sum of minima itself. Otherwise ``Training.foresee`` at depth 1:
    min(1, draft / target) of the text's own token, which has the same mean (of a deterministic
    tree: whether some sibling is the text's token). ``by_depth`` needs ``foresee``: the draft's
    d-th token, given that the tokens before it are the text's.

    Args:
        target, drafter, params: the pair.
        prompts, outputs: token ids; the outputs must be the target's own, with these settings.
        settings: arguments of ``sampling.make_sampling``. At temperature 0 both distributions are
            one-hot, and the overlap is the rate of agreement.
        categories: of the prompts, for ``by_category``.
        decode: token ids to text, for ``by_class`` (``specjax.bench.token_classes``).
        width: length of the longest text, so that several calls share one program; 0 = of these.

    Returns:
        {"alpha", "tokens", "by_depth", "by_class", "by_category"}; None for each part that cannot
        be computed. None without output tokens, and for a drafter that has neither function.
    """
    # The probs of a deterministic tree choose its tokens; no token is drawn from them.
    probs = None if drafter.siblings == DETERMINISTIC else drafter.probs
    foresee = None if drafter.training is None else drafter.training.foresee
    if sampling.make_sampling(1, **settings).maps is not None:
        foresee = None  # forecasts are made without penalties, biases and bans
    if not sum(map(len, outputs)) or (probs is None and foresee is None):
        return None
    by_token = None
    if foresee is not None:
        by_token = _acceptance_probs(
            foresee, target.vocab_size, params, prompts, outputs, settings, width
        )
    if probs is not None:
        values = compare(target, params, prompts, outputs, settings, drafter, width=width).overlap
    else:
        assert by_token is not None
        values = np.concatenate([row[:, 0] for row in by_token])
    classes = None if decode is None else _token_classes(prompts, outputs, decode)
    kinds = None if not any(categories) else _repeated(categories, outputs)
    return {
        "alpha": float(values.mean()),
        "tokens": len(values),
        "by_depth": None if by_token is None else _by_depth(by_token),
        "by_class": _by_kind(values, classes),
        "by_category": _by_kind(values, kinds),
    }


def _by_depth(by_token: list[np.ndarray]) -> list[float]:
    """Means by depth, of the positions where the draft of that depth is inside the text."""
    columns = [
        np.concatenate([row[: max(len(row) - d, 0), d] for row in by_token])
        for d in range(by_token[0].shape[1])
    ]
    return [float(column.mean()) for column in columns if len(column)]


def _token_classes(
    prompts: TokenIds, outputs: TokenIds, decode: Callable[[list[int]], str]
) -> list[str]:
    """The class of every output token, in order."""
    return [
        kind
        for p, o in zip(prompts, outputs, strict=True)
        for kind in token_classes.classify([*p, *o], decode)[len(p) :]
    ]


def _repeated(categories: Sequence[str | None], outputs: TokenIds) -> list[str | None]:
    """The category of every output token, in order."""
    return [c for c, o in zip(categories, outputs, strict=True) for _ in o]


def _by_kind(values: np.ndarray, kinds: Sequence[str | None] | None) -> dict | None:
    if kinds is None:
        return None
    names, which = np.unique([str(kind) for kind in kinds], return_inverse=True)
    sums, counts = np.bincount(which, values), np.bincount(which)
    return {
        str(name): {"alpha": float(total / count), "tokens": int(count)}
        for name, total, count in zip(names, sums, counts, strict=True)
    }


def _acceptance_probs(
    foresee: Callable[..., jax.Array],
    vocab_size: int,
    params: ModelParams,
    prompts: TokenIds,
    outputs: TokenIds,
    settings: dict,
    width: int,
) -> list[np.ndarray]:
    """Per row f64[tokens,M]: for the draft that begins at each output token, the probability that
    its token at each depth is accepted, given that those before it are."""
    result = []
    width = width or max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    batch = rows(width, vocab_size)
    for start in range(0, len(prompts), batch):
        pairs = list(zip(prompts, outputs, strict=True))[start : start + batch]
        tokens = np.zeros((batch, width), np.int32)
        for i, (p, o) in enumerate(pairs):
            tokens[i, : len(p) + len(o)] = [*p, *o]
        how = sampling.make_sampling(batch, **settings)
        values = np.asarray(_call(foresee, params, Batch(jnp.asarray(tokens)), how), np.float64)
        # Row t belongs to the draft that begins with the token at t + 1.
        result += [values[i, len(p) - 1 : len(p) + len(o) - 1] for i, (p, o) in enumerate(pairs)]
    return result


@functools.partial(jax.jit, static_argnums=0)
def _call(foresee: Callable[..., jax.Array], params: ModelParams, batch: Batch, how):
    return foresee(params, batch, how)
