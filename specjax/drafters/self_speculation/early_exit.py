"""Early exit: the first layers of the target and a head draft. L1 with the rule "chain".

LayerSkip, Elhoushi et al. 2024 (2404.16710), section 4.3, for drafts with the target's own head;
Kangaroo, Liu et al. 2024 (2404.18911), section 3, for a trained adapter between the exit and the
head. The keys and values of the first layers are the target's own for all committed tokens, so
without an adapter the drafter has no cache and no parameters. Draft probabilities depend on the
text alone. Kangaroo's second exit, where the draft is unsure, is ``control="threshold:0.6"``.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from specjax.bound import Bound
from specjax.checks import one_of, whole
from specjax.drafters import _growth
from specjax.drafters._growth import Plan
from specjax.drafters._growth.plans import Fixed, Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.self_speculation import (
    _exit_adapter,
    _exit_keys,
    _exit_rounds,
    _exit_text,
    _own_cache,
)
from specjax.drafters.self_speculation._exit_adapter import NONE, Adapter
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import CHAIN, LM, Drafter, Params, Training

REFERENCE = ("elhoushi2024layerskip", "liu2024kangaroo")

SHARED = TreeKeys
GAMMA = 5


def make(
    target: LM,
    *,
    exit_layer: int = 0,
    adapter: str = "",
    head: str = "",
    head_dim: int = 0,
    gamma: int | None = None,
    model: str | os.PathLike | None = None,
    params: Params = None,
    dtype: Any = None,
    reuse: bool = False,
    **shared: Any,
) -> Drafter:
    """Drafts with the first ``exit_layer`` layers of the target.

    Args:
        target: the model to be accelerated.
        exit_layer: how many of its layers are computed, from 1 to all; 0: as in the files, else a
            quarter of them (LayerSkip's 8 of 32 for Llama 2 7B).
        adapter: what is between the exit and the head: "none", "norm", "linear", or "layer"
            (Kangaroo's); all but the first are trained. "": as in the files or params, else "none".
        head: "shared", the target's, or "own", a trained copy of it. "": as in the files or params,
            else "shared".
        head_dim: width of an attention head of a new layer; 0: the largest even divisor of the
            width up to 64.
        gamma: draft tokens per round of a chain; None: 5.
        model: directory of an adapter that specjax has trained.
        params: its parameters, instead of ``model``.
        dtype: in which ``model`` is read; None: float32 on CPUs, bfloat16 elsewhere.
        reuse: whether the verification of a chain goes on from the layers that drafting computed
            (LayerSkip's cache): only its last token passes them again. Apart from rounding, texts
            are the same.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the exit's
            probabilities ("iid").

    Raises:
        UserError: an exit layer that the target does not have, keys without effect, files of
            another target, a shape that does not fit, reuse for a tree.
    """
    keys = TreeKeys(**shared)
    whole("exit_layer", exit_layer, 0)
    one_of("adapter", adapter, ("", *_exit_adapter.KINDS))
    one_of("head", head, ("", *_exit_adapter.HEADS))
    asked = _exit_keys.Asked(exit_layer, adapter, head, whole("head_dim", head_dim, 0))
    exit_, own, config = _exit_keys.read(target, asked, model, params, dtype)
    plan = _plan(target, keys, gamma, config.get("accuracy"))
    if reuse:
        _check_reuse(target, plan)
    drafter = _own_cache.build(
        "early_exit",
        _exit_rounds.inner(exit_, plan.growth.depth, reuse),
        plan,
        init_params=Bound(_init_params, exit_, own),
        gaps=exit_.shape.kind != _exit_adapter.LAYER,
        probs=Bound(_exit_text.probs, exit_),
        training=_training(target, exit_, plan),
    )
    return drafter._replace(taps=() if exit_.shape.kind == NONE else exit_.taps)


def _plan(target: LM, keys: TreeKeys, gamma: int | None, accuracy: Any) -> Plan:
    """The shape of the drafts. Raises UserError."""
    for key in ("tree", "nodes"):
        if gamma is not None and getattr(keys, key):
            raise UserError(f"gamma is {gamma} and {key} is given too; give one of them")
    chain = shapes.chain(GAMMA if gamma is None else whole("gamma", gamma, 1))
    method = Method("early_exit", chain, "iid", target.vocab_size, accuracy=accuracy)
    return _growth.read(method, keys)


def _check_reuse(target: LM, plan: Plan) -> None:
    """Raises UserError unless the target can go on from the layers of such a draft."""
    if plan.growth.siblings != CHAIN:
        raise UserError(
            "reuse is True and the draft is a tree, whose leaves have passed no layer; draft a "
            "chain (gamma), or leave reuse out"
        )
    target.with_lower()


def _init_params(exit_: Adapter, params: Params, key: jax.Array) -> Params:
    """``Drafter.init_params``. Raises UserError for an adapter that does not exist yet."""
    del key
    if exit_.shape.trained and params is None:
        raise UserError(
            "early_exit has no adapter yet; give model=, a directory of a trained one (mode train "
            "makes it)"
        )
    return params or {}


def _training(target: LM, exit_: Adapter, plan: Plan) -> Training:
    """Forecasts, and with parameters how they are trained.

    A draft that stops early, or is no sampled chain, has no forecast.
    """
    growth = plan.growth
    if exit_.shape.kind != NONE:
        target = target.with_taps(exit_.taps)
    training = Training(ranks=Bound(_exit_text.ranks, exit_, growth.depth), facts=exit_.facts)
    sampled = isinstance(growth, Fixed) and growth.how != "top_k"
    if sampled and growth.siblings == CHAIN and plan.controller is None:
        foresee = Bound(_exit_text.foresee, exit_, target, growth.depth)
        training = training._replace(foresee=foresee)
    if not exit_.shape.trained:
        return training
    return training._replace(
        loss=Bound(_exit_text.loss, exit_, target),
        start=Bound(_exit_adapter.start, exit_, target),
    )
