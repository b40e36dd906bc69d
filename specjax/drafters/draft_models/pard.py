"""PARD: a small language model that was taught to draft several tokens in one pass.

An et al. 2025 (2504.18583). After the pending token the draft model is fed copies of one mask
token; its output at each of them is the distribution of the token after it, without knowledge of
the tokens between. So a round costs one pass of the draft model for any length, and the
probabilities of a depth are the same on all paths: best-first trees (``tree="best_first"``) cost no
further pass. Any decoder can be taught it (``config.pard`` of objective distill).

Each token is drawn from the declared probabilities of its depth. L1 with the rules for the draft's
siblings; ``chain`` for the default, a sampled chain.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp

from specjax.bound import Bound
from specjax.checks import whole
from specjax.drafters import _growth
from specjax.drafters._growth import Begun, Nodes, Plan, Stepper
from specjax.drafters._growth.plans import Method
from specjax.drafters._keys import TreeKeys
from specjax.drafters.draft_models import _pard_text, _small_model
from specjax.drafters.heads import _masked_text
from specjax.errors import UserError
from specjax.topology import shapes
from specjax.types import LM, Context, Drafter, ModelParams, Params

REFERENCE = "an2025pard"

SHARED = TreeKeys
NAME, GAMMA = "pard", 5
# Keys of config.json: the mask (released models may name it otherwise), and how many
# tokens were trained.
MASK, TOKENS = "pard_token", "pard_tokens"


def make(
    target: LM,
    *,
    model: LM | str | os.PathLike,
    gamma: int | None = None,
    mask_id: int | None = None,
    gaps: bool = False,
    params: Params = None,
    **shared: Any,
) -> Drafter:
    """Drafts with one pass of a small language model.

    Args:
        target: the model to be accelerated.
        model: the draft model: an ``LM``, or any model that ``hf.load`` takes.
        gamma: draft tokens per round of a chain; None: as many as it was trained for, or 5.
        mask_id: the token that stands for unknown ones; None: as in the files of ``model``.
        gaps: whether other drafters may propose in some rounds; ``escalate`` sets it.
        params: the draft model's parameters when ``model`` is an ``LM``.
        shared: the keys of ``TreeKeys``; the default is a chain, drawn from the probabilities
            ("iid").

    Raises:
        UserError: gamma below 1, without effect or beyond what was trained, a mask_id outside the
            draft model's vocabulary or none at all, another vocabulary than the target's, a
            directory that cannot be loaded, a shape that does not fit.
    """
    keys = TreeKeys(**shared)
    if gamma is not None and keys.tree:
        raise UserError(f"gamma is {gamma} and the tree is given too; give one of them")
    files = {} if isinstance(model, LM) else keys_of(model)
    trained, mask_id = files.get(TOKENS), _mask(files, mask_id)
    gamma = (trained or GAMMA) if gamma is None else whole("gamma", gamma, 1)
    if trained is not None and gamma > trained:
        raise UserError(
            f"gamma is {gamma}, and {model} was trained to draft {trained} tokens in one pass; "
            f"give at most {trained}, or train it for more"
        )
    model, params = _small_model.read(model, params)
    # The mask is read by the draft model alone, whose embeddings may be padded otherwise.
    if mask_id >= model.vocab_size:
        raise UserError(
            f"mask_id is {mask_id}; the draft model's tokens are 0..{model.vocab_size - 1}"
        )
    model, params = _small_model.load(target, model, params)
    method = Method(NAME, shapes.chain(gamma), "iid", target.vocab_size, trained, True)
    plan = _growth.read(method, keys)
    return _build(target, model, params, mask_id, plan, gaps)


def keys_of(model: str | os.PathLike) -> dict[str, int]:
    """What config.json of a directory says about drafting in one pass. Raises UserError."""
    # Imported here: drafters made from an LM need no file formats.
    from specjax.models import hf
    from specjax.models.config_values import mask_id_of

    path = hf.resolve(model)
    if not (path / "config.json").is_file():
        return {}
    raw = hf.read_json(path / "config.json")
    mask = mask_id_of(path, raw)
    keys = {} if mask is None else {MASK: mask}
    return keys | {key: whole(f"{key} of {path}", raw[key], 1) for key in (TOKENS,) if key in raw}


def _mask(files: dict[str, int], asked: int | None) -> int:
    """The id of the mask. Raises UserError."""
    if asked is None and MASK not in files:
        raise UserError(
            "pard needs the token that stands for unknown ones; give mask_id, or a model that was "
            f"trained for pard ({MASK} in its config.json)"
        )
    if asked is None:
        return files[MASK]
    if files.get(MASK, asked) != whole("mask_id", asked, 0):
        raise UserError(
            f"mask_id is {asked}, and the model was trained with {files[MASK]}; leave it out"
        )
    return asked


def _build(target: LM, model: LM, params: Params, mask_id: int, plan: Plan, gaps: bool) -> Drafter:
    depth = plan.growth.depth
    behind = depth + 1  # the pending token, and drafts that were accepted and never fed
    lazy = gaps or (plan.controller is not None and plan.controller.limit is not None)
    room = max(behind, _small_model.CATCH_UP * lazy)
    stepper = Stepper(
        init=Bound(_small_model.init, model, plan.growth.nodes, room),
        begin=Bound(_begin, model, mask_id, depth, behind, lazy),
        step=_step,
        commit=_unchanged,
        looped=True,
        independent=True,
        lazy=lazy,
    )
    drafter = _growth.build(
        NAME,
        stepper,
        plan,
        Bound(_small_model.init_params, NAME, params),
        training=_pard_text.training(target, model, mask_id, plan),
        gaps=gaps,
    )
    _small_model.check_window(model, drafter)
    return drafter


def _begin(
    model: LM,
    mask_id: int,
    depth: int,
    behind: int,
    lazy: bool,
    params: ModelParams,
    context: Context,
    cache: Any,
) -> Begun:
    """One pass over the committed tokens that the cache lacks, and the masks after them.

    Of the tokens the cache lacks 1 to ``behind``, or none in a finished row; only they are
    committed.
    """
    if lazy:
        cache = _small_model.catch_up(model, behind, params, context, cache)
    slots = cache.length[:, None] + jnp.arange(behind)
    tokens = jnp.take_along_axis(context.tokens, slots, axis=1, mode="clip")
    missing = jnp.clip(context.length - cache.length, 0, behind)
    masks = jnp.full((len(tokens), depth - 1), mask_id, jnp.int32)
    layout = _masked_text.layout_of_draft(missing, behind, depth - 1)
    out, own = model.apply(params.draft, jnp.concatenate([tokens, masks], 1), cache, layout)
    last = jnp.maximum(missing - 1, 0)[:, None]
    places = jnp.concatenate([last, jnp.broadcast_to(_after(behind, depth), masks.shape)], 1)
    logits = jnp.take_along_axis(out.logits, places[..., None], 1)
    path = jnp.broadcast_to(jnp.arange(behind), (len(tokens), behind))
    cache = model.commit(cache, own, missing, path)
    return Begun(logits[:, 0], cache, reads=logits)


def _after(behind: int, depth: int) -> jax.Array:
    """The places of the masks in the block."""
    return behind + jnp.arange(depth - 1)


def _step(
    params: ModelParams, logits: jax.Array, nodes: Nodes, block: Any
) -> tuple[jax.Array, jax.Array]:
    """``Stepper.step``: the logits f[B,K,V] of all depths were computed before the draft."""
    return logits[:, nodes.depth][:, None], nodes.tokens


def _unchanged(params: ModelParams, cache: Any, drafted: None, verdict: Any, out: Any) -> Any:
    return cache
