"""MagicDec: the target itself drafts, with a part of its cache of constant size. L1 ("chain").

Chen et al. 2024 (2408.11049). All weights are read for a draft token, but of the cache only
``budget`` tokens: with long texts and many rows most of the target's time is spent on its cache, so
drafts are cheap and, made by the same weights, often accepted. With short texts a draft token costs
as much as one of the target's own (``theory.roofline.critical_context``).
"""

from __future__ import annotations

from typing import Any

from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.self_speculation import _own_cache, _views
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Drafter

REFERENCE = ("chen2025magicdec", "xiao2024efficient", "li2024snapkv")

SHARED = TreeKeys
GAMMA = 4


def make(
    target: LM,
    *,
    view: str = "streaming",
    budget: int = 512,
    sinks: int | None = None,
    window: int | None = None,
    queries: int | None = None,
    pool: int | None = None,
    chunk: int | None = None,
    refresh: int | None = None,
    gamma: int | None = None,
    **shared: Any,
) -> Drafter:
    """Drafts with the target and a sparse view of its cache.

    Args:
        target: the model to be accelerated; a decoder with layers that read the whole text.
        view: "streaming" (the first and the most recent tokens), "snapkv" (those that the end of
            the prompt attends to, and the most recent ones), or "retrieval" (chunks that fit the
            newest query, chosen again every ``refresh`` rounds).
        budget: tokens of the view in each layer; "retrieval" has further slots for new tokens.
        sinks: of "streaming": the first tokens, of the budget; None: 4.
        window: of "snapkv": the most recent tokens, of the budget; None: 32.
        queries: of "snapkv": the last tokens of the prompt that choose; None: 32.
        pool: of "snapkv": neighbours over which attention is averaged, odd; None: 5.
        chunk: of "retrieval": tokens of a chunk; None: 8.
        refresh: of "retrieval": rounds after which the chunks are chosen again, at the cost of a
            token of the target; None: 16.
        gamma: draft tokens per round of a chain; None: 4.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the draft's
            probabilities ("iid").

    Raises:
        UserError: an unknown view, a key of another view, a budget that is too small for it, a
            target whose cache has no keys and values to choose from, a shape that does not fit.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and keys.tree:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    gamma = GAMMA if gamma is None else whole("gamma", gamma, 1)
    plan = _growth.read(Method("magicdec", shapes.chain(gamma), "iid", target.vocab_size), keys)
    own = {"sinks": sinks, "window": window, "queries": queries, "pool": pool}
    own |= {"chunk": chunk, "refresh": refresh}
    chosen = _views.make(view, target, budget, plan.growth.depth + 1, **own)
    drafter = _own_cache.build("magicdec", _views.inner(target, chosen), plan)
    return drafter._replace(history=drafter.history or chosen.history)
