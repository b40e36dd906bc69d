"""The committed text in the tokens of a draft model with another vocabulary, and its cache.

Each token of the target is written as draft tokens by a table, so the draft model's text is a
function of the committed one, whatever was drafted. It need not be the text that the draft's own
tokenizer would give: only acceptance depends on it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import decode
from specjax.bound import Bound
from specjax.drafters import growth
from specjax.drafters.draft_models import _small_model
from specjax.drafters.draft_models._vocabularies.maps import Maps
from specjax.drafters.growth import Begun, Plan, Stepper
from specjax.models.lm import forward
from specjax.types import LM, Array, Context, Drafter, ModelParams, Output, Params

# How many tokens of the target are translated at once.
TOKENS = 16


class DraftText(struct.PyTreeNode):
    """The text in draft tokens; there is room for D of them."""

    tokens: Array  # i32[B,D]
    size: Array  # i32[B] draft tokens of the text; more than D: the rest is not kept
    read: Array  # i32[B] tokens of the target that were translated


class Kept(struct.PyTreeNode):
    """What is carried from round to round."""

    cache: Any  # the draft model's
    text: DraftText


class Reader(NamedTuple):
    """A draft model that reads the text of a target with another vocabulary."""

    model: LM
    maps: Maps
    ahead: int  # draft tokens that a draft may have after the text
    behind: int  # draft tokens that the last pass of ``begin`` takes

    @property
    def bounded(self) -> bool:
        """Whether a text can have more draft tokens than there is room for."""
        maps, limited = self.maps, self.model.max_positions is not None
        return maps.pieces.shape[1] > maps.ratio or (limited and maps.ratio > 1)

    def room(self, tokens: int) -> int:
        """Draft tokens that there is room for, for a text of so many tokens of the target.

        ``Maps.ratio`` of them per token, and at most as many as the model has positions.
        """
        room, most = tokens * self.maps.ratio, self.model.max_positions
        return room if most is None else min(room, most)


def build(
    reader: Reader, stepper: Stepper, plan: Plan, params: Params, one_pass: bool, probs: Any = None
) -> Drafter:
    """The drafter of a stepper whose ``begin`` is that of this module.

    ``one_pass``: whether the last pass of ``begin`` takes all tokens that a round can add.
    ``probs`` as in ``Drafter``.
    """
    own = Bound(_small_model.init_params, "draft_model", params)
    start = Bound(init, reader, nodes=plan.growth.nodes)
    stepper = stepper._replace(init=start, looped=True, lazy=True)
    drafter = growth.build("draft_model", stepper, plan, own, probs=probs, gaps=True)
    whole, constant = drafter.whole and not reader.bounded, drafter.constant_cost and one_pass
    return drafter._replace(whole=whole, constant_cost=constant)


def init(
    reader: Reader, params: ModelParams, context: Context, _: Output, slots: int, nodes: int = 0
) -> Kept:
    """The text of the prompt, and its cache without the pending token.

    ``slots`` as in ``Drafter.init``; ``nodes`` are those of the drafter.
    """
    model, maps, longest = reader.model, reader.maps, slots - nodes
    _small_model.check_positions(model, longest)
    room = reader.room(longest)
    text = write(maps, context.tokens, context.length, room)
    more = reader.ahead + max(reader.behind, _small_model.CATCH_UP)
    cache = model.init_cache(context.tokens.shape[0], room + more)
    # All but the pending token; of a prompt with more draft tokens the rest is read by ``begin``.
    width = min((context.tokens.shape[1] - 1) * maps.ratio, room)
    last = jnp.take(jnp.asarray(maps.sizes), context.pending, mode="clip")
    count = jnp.clip(text.size - last, 0, width)
    cache = decode.feed(model, params.draft, text.tokens[:, :width], count, cache)[1]
    return Kept(cache, text)


def begin(reader: Reader, params: ModelParams, context: Context, kept: Kept) -> Begun:
    """``Stepper.begin``: reads the committed text. The rows whose text has room can draft."""
    # All tokens before the end of the text, translated ``TOKENS`` at a time.
    more = Bound(_more, reader.maps, context.tokens, context.length, TOKENS)
    text = jax.lax.while_loop(lambda text: (text.read < context.length).any(), more, kept.text)
    room = text.tokens.shape[1]
    own = context.replace(tokens=text.tokens, length=jnp.minimum(text.size, room))
    begun = _small_model.begin(reader.model, reader.behind, params, own, kept.cache)
    ready = text.size <= room if reader.bounded else None
    return begun._replace(kept=Kept(begun.kept, text), ready=ready)


def write(maps: Maps, tokens: Array, length: Array, room: int) -> DraftText:
    """The first ``length`` i32[B] of the tokens i32[B,S] in draft tokens, translated at once."""
    none = jnp.zeros((len(tokens),), jnp.int32)
    empty = DraftText(jnp.zeros((len(tokens), room), jnp.int32), none, none)
    return _more(maps, tokens, length, tokens.shape[1], empty)


def _more(maps: Maps, tokens: Array, length: Array, width: int, text: DraftText) -> DraftText:
    """The text with up to ``width`` tokens of the target more."""
    places = text.read[:, None] + jnp.arange(width)
    ids = jnp.take_along_axis(tokens, places, axis=1, mode="clip")
    sizes = jnp.take(jnp.asarray(maps.sizes), ids, mode="clip")
    sizes = jnp.where(places < length[:, None], sizes, 0)
    pieces = jnp.take(jnp.asarray(maps.pieces), ids, axis=0, mode="clip")  # [B,width,P]
    first = text.size[:, None] + jnp.cumsum(sizes, 1) - sizes
    piece = jnp.arange(pieces.shape[2])
    room = text.tokens.shape[1]
    place = jnp.where(piece < sizes[..., None], first[..., None] + piece, room)
    rows = jnp.arange(ids.shape[0])[:, None, None]
    return text.replace(
        tokens=text.tokens.at[rows, place].set(pieces, mode="drop"),
        size=text.size + sizes.sum(1, dtype=jnp.int32),
        read=jnp.clip(length, text.read, text.read + width),
    )


def logits_along(reader: Reader, params: Params, tokens: Array) -> Array:
    """f[B,S,...]: the model's logits after each token i32[B,S] of a text of the target."""
    (batch, size), room = tokens.shape, reader.room(tokens.shape[1])
    text = write(reader.maps, tokens, jnp.full((batch,), size), room)
    logits = forward(reader.model, params, text.tokens).logits
    ends = jnp.cumsum(jnp.take(jnp.asarray(reader.maps.sizes), tokens, mode="clip"), 1) - 1
    return jnp.take_along_axis(logits, jnp.minimum(ends, room - 1)[..., None], 1)
