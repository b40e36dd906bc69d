"""PARD: a small language model that was taught to draft several tokens in one pass.

An et al. 2025 (2504.18583). After the pending token the draft model is fed copies of one mask
token; its output at each of them is the distribution of the token after it, without knowledge of
the tokens between. So a round costs one pass of the draft model for any length, and the
probabilities of a depth are the same on all paths: best-first trees (``tree="best_first"``) cost no
further pass. Any decoder can be taught it (objective distill, ``configs/pard.py``).

Each token is drawn from the declared probabilities of its depth. L1 with the rules for the draft's
siblings; ``chain`` for the default, a sampled chain.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from specjax import declare
from specjax.bound import Bound
from specjax.checks import whole
from specjax.declare import key
from specjax.drafters import _foresee, growth
from specjax.drafters.draft_models import _small_model
from specjax.drafters.growth import Begun, Stepper
from specjax.drafters.growth.plans import Method
from specjax.drafters.heads import _along_text, _masked_text
from specjax.drafters.heads._masked_text import Read, Reader
from specjax.drafters.objectives import Distilled
from specjax.drafters.shared_keys import DraftKeys, check_mask
from specjax.errors import UserError
from specjax.models import lm
from specjax.topology import shapes
from specjax.tree import Layout
from specjax.types import LM, Array, Batch, Context, Drafter, ModelParams, Training

REFERENCE = "an2025pard"

# Name of a target -> a draft model for it on the Hub.
RELEASED = {"Llama-3.1-8B-Instruct": "amd/PARD-Llama-3.2-1B", "Qwen3-8B": "amd/PARD-Qwen3-0.6B"}

NAME, GAMMA = "pard", 5
# Keys of config.json: the mask (released models may name it otherwise), and how many
# tokens were trained.
MASK, TOKENS = "pard_token", "pard_tokens"


class Keys(DraftKeys):
    """The keys of ``pard``."""

    mask_id: int | None = key(
        None,
        "the token that stands for unknown ones; None: as in the files of ``model``",
        example=0,
    )


class DraftModelKeys(declare.Keys, owner="config.drafter."):
    """config.drafter of objective distill: a draft model that drafts in one pass."""

    gamma: int = key(8, "of a draft in one pass", least=1)
    mask_id: int | None = key(
        None,
        "the token that stands for unknown ones, best an unused one; None: the last of the "
        "vocabulary",
        least=0,
    )


@declare.method(Keys)
def make(target: LM, keys: Keys) -> Drafter:
    """Drafts with one pass of a small language model.

    Raises:
        UserError: gamma below 1, without effect or beyond what was trained, a mask_id outside the
            draft model's vocabulary or none at all, another vocabulary than the target's, a
            directory that cannot be loaded, a shape that does not fit.
    """
    files = {} if isinstance(keys.model, LM) else keys_of(keys.model)
    trained, mask_id = files.get(TOKENS), _mask(files, keys.mask_id)
    model, params = _small_model.read(keys.model, keys.params)
    # The mask is read by the draft model alone, whose embeddings may be padded otherwise.
    check_mask(mask_id, model, "draft model")
    model, params = _small_model.load(target, model, params)
    chain = shapes.chain(trained or GAMMA)
    method = Method(NAME, chain, "iid", target.vocab_size, trained, True)
    plan = growth.read(method, keys)
    depth, reader = plan.growth.depth, reader_of(target, model, mask_id)
    stepper = Stepper(Bound(_begin, model, mask_id, depth), growth.step_at_depth, independent=True)
    forecasts = _foresee.forecasts(Bound(_masked_text.along, reader), plan, before=0)
    training = Training(loss=Bound(_masked_text.loss, reader, depth), **forecasts)
    more = {"behind": depth + 1, "gaps": keys.gaps, "training": training}
    return _small_model.build(NAME, model, params, plan, stepper, **more)


def keys_of(model: str | os.PathLike) -> dict[str, int]:
    """What config.json of a directory says about drafting in one pass. Raises UserError."""
    # Imported here: drafters made from an LM need no file formats.
    from specjax.models import hf
    from specjax.models.config_values import mask_id_of

    path = hf.resolve(model)
    if not (path / "config.json").exists():
        return {}
    raw = hf.read_json(path / "config.json")
    mask = mask_id_of(path, raw)
    keys = {} if mask is None else {MASK: mask}
    return keys | {key: whole(f"{key} of {path}", raw[key], 1) for key in (TOKENS,) if key in raw}


def facts(keys: Mapping[str, Any]) -> dict[str, int]:
    """What config.json says of a model that these keys of the drafter trained or train further."""
    trained = {TOKENS: keys["gamma"]} if keys.get("model") is None else keys_of(keys["model"])
    return trained if keys.get("mask_id") is None else trained | {MASK: keys["mask_id"]}


def _trained_keys(target: LM, keys: DraftModelKeys) -> dict[str, Any]:
    """The keys of the drafter whose loss is trained."""
    mask = target.vocab_size - 1 if keys.mask_id is None else keys.mask_id
    return {"gamma": keys.gamma, "mask_id": mask}


DISTILLED = Distilled(DraftModelKeys, drafter=_trained_keys, facts=facts)


def _mask(files: dict[str, int], asked: int | None) -> int:
    """The id of the mask. Raises UserError."""
    if asked is None and MASK not in files:
        raise UserError(
            "pard needs the token that stands for unknown ones; give mask_id, or a model that was "
            f"trained for pard ({MASK} in its config.json)"
        )
    if asked is not None and files.get(MASK, asked) != whole("mask_id", asked, 0):
        raise UserError(
            f"mask_id is {asked}, and the model was trained with {files[MASK]}; leave it out"
        )
    return files[MASK] if asked is None else asked


def _begin(
    model: LM, mask_id: int, depth: int, params: ModelParams, context: Context, cache: Any
) -> Begun:
    """One pass over the committed tokens that the cache lacks, and the masks after them.

    Of the tokens the cache lacks 1 to ``depth`` + 1, or none in a finished row; only they are
    committed.
    """
    behind = depth + 1  # the pending token, and drafts that were accepted and never fed
    missing, tokens = growth.lacking(context.tokens, context.length, cache.length, behind)
    masks = jnp.full((len(tokens), depth - 1), mask_id, jnp.int32)
    layout = _masked_text.layout_of_draft(missing, behind, depth - 1)
    out, own = model.apply(params.draft, jnp.concatenate([tokens, masks], 1), cache, layout)
    logits = _masked_text.of_draft(out.logits, missing, behind)
    path = jnp.broadcast_to(jnp.arange(behind), (len(tokens), behind))
    cache = model.commit(cache, own, missing, path)
    return Begun(logits[:, 0], cache, reads=logits)


def reader_of(target: LM, model: LM, mask_id: int) -> Reader:
    """The draft model reads tokens, and predicts the next one at each."""
    text = Bound(_read, target, model)
    return Reader(text, Bound(_masked, model, mask_id), ahead=1)


def _read(target: LM, model: LM, params: ModelParams, batch: Batch) -> Read:
    text, layout = batch.tokens[:, :-1], _along_text.layout_of(batch)
    teacher = lm.forward(target, params.target, text, _along_text.segments_of(batch)).logits
    out, block = model.apply(params.draft, text, model.init_cache(len(text), 0), layout)
    return Read(out.logits, layout, block, teacher)


def _masked(model: LM, mask_id: int, params: ModelParams, read: Read, layout: Layout) -> Array:
    rows, count = layout.visible.shape[:2]
    tokens, cache = jnp.full((rows, count), mask_id, jnp.int32), model.init_cache(rows, 0)
    return model.apply(params.draft, tokens, cache, layout, read.block)[0].logits
