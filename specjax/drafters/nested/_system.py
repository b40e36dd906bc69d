"""A speculative system as a drafter: a model, and a drafter that drafts for it.

In ``draw`` the model continues the text in rounds of speculative decoding, ``step.propose`` and
``step.decide`` with an overlay of the model (``models.overlay``) as the target, until every row has
its tokens. A lossless rule emits exact samples of the model's own probabilities under the row's
settings, whatever drafted for it, so the outer rule may test the tokens against these. (With a
token that is drawn from the whole distribution after a rejection, or with lenience, they would have
another distribution.) Tokens beyond the wanted number are cut off by their place, never by their
value. The noise of an inner round is ``RowKeys.inner`` of its number.

No cache is written while the inner rounds run. ``settle`` commits what the outer target accepted.
The parts of the inner drafter's state that are no overlays return to what they were before the
inner text; so an inner drafter must not need the model's outputs, must be able to miss rounds, and
learns nothing from inner verdicts (``_inside``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import decode, sampling
from specjax.bound import Bound
from specjax.drafters._growth import Drafted
from specjax.drafters.nested import _inner_rounds
from specjax.drafters.nested._inner_rounds import System
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.models import overlay
from specjax.rng import RowKeys
from specjax.types import LM, Array, Context, ModelParams, Output, Params, Verdict

# Tokens that a model is fed in one pass to read what its cache lacks.
CHUNK = 8


class State(struct.PyTreeNode):
    """What a system keeps between rounds, and from a draft to its verdict."""

    kept: Any  # the reader's
    inner: Any  # the inner drafter's
    block: Any  # arrays [B,P,...]: what the model computed for the tokens it was fed for a draft
    count: Array  # i32[B] how many tokens that are
    begin: Array  # i32[B] length of the cache that they continue
    text: Array  # i32[B] length of the committed text


class Drawn(NamedTuple):
    """The tokens of a system."""

    tokens: Array  # i32[B,gamma]
    valid: Array  # bool[B,gamma] all, unless logits were not finite
    logits: Array  # f[B,gamma,V] the model's, after the row's maps, that each token was drawn from
    finite: Array  # bool[B]


def init(
    system: System, params: ModelParams, context: Context, target_out: Output, slots: int
) -> State:
    """The state after the prompt; the arguments are those of ``Drafter.init``."""
    reader, below = system.reader, system.below(params)
    # The text of the inner rounds is longer than the committed one.
    inner_slots = slots + system.gamma + system.drafter.longest + 1
    nothing = reader.model.no_output(context.length.shape[0])
    inner = system.drafter.init(below, context, nothing, inner_slots)
    kept = reader.init(params, context, target_out, slots + system.room)

    def block() -> Any:
        return _open(system, params, context, kept)[0].block

    with jax.disable_jit(False):
        shapes = jax.eval_shape(block)
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = jnp.zeros_like(context.length)
    return State(kept, inner, empty, zero, zero, context.length)


def draw(
    system: System, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Drawn, State]:
    """``gamma`` tokens after ``context``, whose last ``offset`` tokens are drafts."""
    cache, kept = _open(system, params, context, state.kept)
    begin = cache.base.length
    cache = _caught_up(system, params, context, cache)
    end = _inner_rounds.run(system, params, keys, context, cache, state.inner)
    place = context.length[:, None] + jnp.arange(system.gamma)
    tokens = jnp.take_along_axis(end.state.tokens, place, axis=1)
    drawn = Drawn(
        jnp.maximum(tokens, 0),
        place < end.state.length[:, None],
        end.logits,
        end.state.failed < 0,
    )
    after = end.state.cache
    inner = _inner_rounds.restored(end.state.draft, end.before)
    text = context.length - system.offset
    return drawn, State(kept, inner, after.block, after.count, begin, text)


def settle(
    system: System,
    params: ModelParams,
    state: State,
    accepted: Array,
    verdict: Verdict,
    target_out: Output,
) -> State:
    """The state after a verdict. ``accepted`` i32[B]: how many tokens of its main chain are kept.

    The main chain begins with the other systems' drafts. Rows with verdict count 0 keep their
    state.
    """
    alive = verdict.count > 0
    # The newest token of a verdict is the pending one of the next round, which is not committed.
    length = state.text + jnp.minimum(accepted, verdict.count - 1)
    count = jnp.where(alive, jnp.clip(length - state.begin, 0, state.count), 0)
    drafted = Drafted(state.block, count, None)
    kept = system.reader.commit(params, state.kept, drafted, verdict, target_out)
    inner = overlay.settle_all(state.inner, system.depth, length, alive)
    return state.replace(kept=kept, inner=inner)


def probs_of(context: Context, drawn: Drawn) -> Array:
    """f[B,gamma,V]: ``Draft.probs``. In greedy rows 1 for the token; zeros if all rows are greedy.

    In greedy rows a token need not be the model's best one: the inner rule may be lenient there.
    """

    def sampled() -> Array:
        probs = sampling.to_probs(drawn.logits, context.sampling)
        one_hot = jax.nn.one_hot(drawn.tokens, probs.shape[-1], dtype=probs.dtype)
        return jnp.where(context.sampling.greedy[:, None, None], one_hot, probs)

    zeros = jnp.zeros(drawn.logits.shape, sampling.dtype_of(drawn.logits))
    return jax.lax.cond(jnp.all(context.sampling.greedy), lambda: zeros, sampled)


def _open(
    system: System, params: ModelParams, context: Context, kept: Any
) -> tuple[overlay.OverlayCache, Any]:
    """An empty overlay on the cache of the committed text, and what the reader keeps."""
    reader = system.reader
    cache, kept = reader.view(params, context, kept)
    return overlay.open_on(reader.model, reader.params(params), cache, system.room), kept


def _caught_up(
    system: System, params: ModelParams, context: Context, cache: overlay.OverlayCache
) -> overlay.OverlayCache:
    """The overlay with all tokens before the pending one; a loop without a turn if none lacks."""
    width = min(system.lag, CHUNK)
    if not width:
        return cache
    model, own = overlay.overlay(system.reader.model), system.reader.params(params)

    def lacking(cache: overlay.OverlayCache) -> Array:
        return context.length - 1 - cache.length

    def feed(cache: overlay.OverlayCache) -> overlay.OverlayCache:
        places = cache.length[:, None] + jnp.arange(width)
        tokens = jnp.take_along_axis(context.tokens, places, axis=1, mode="clip")
        block = model.apply(own, tokens, cache)[1]
        return model.commit(cache, block, jnp.clip(lacking(cache), 0, width))

    return jax.lax.while_loop(lambda cache: (lacking(cache) > 0).any(), feed, cache)


def own_cache(
    model: LM, params: Callable[[ModelParams], Params], rooms: Sequence[int] = ()
) -> Inner:
    """The reader of a model that has a cache of its own, with the committed text.

    ``rooms``: for each system that it drafts inside, the outermost one first, the places of the
    overlay that this system puts on the cache.
    """
    models = [model]
    for _ in rooms:
        models.append(overlay.overlay(models[-1]))

    init = Bound(_begin, tuple(models), params, tuple(rooms))
    return Inner(models[-1], params, _same_view, init, Bound(_commit, models[-1]))


def _begin(
    models: tuple[LM, ...],
    params: Callable[[ModelParams], Params],
    rooms: tuple[int, ...],
    given: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    own, batch = params(given), context.length.shape[0]
    cache = models[0].init_cache(batch, slots + sum(rooms))
    cache = decode.feed(models[0], own, context.tokens[:, :-1], context.length - 1, cache)[1]
    for lower, room in zip(models, rooms, strict=False):
        cache = overlay.open_on(lower, own, cache, room)
    return cache


def _commit(
    model: LM,
    given: ModelParams,
    cache: Any,
    drafted: Drafted,
    verdict: Verdict,
    target_out: Output,
) -> Any:
    return model.commit(cache, drafted.block, drafted.count)


def _same_view(given: ModelParams, context: Context, cache: Any) -> tuple[Any, Any]:
    return cache, cache
