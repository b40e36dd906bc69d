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
learns nothing from inner verdicts (``_stages.inside``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import outcome, sampling, step, tree
from specjax.bound import Bound
from specjax.drafters.draft_models import _small_model
from specjax.drafters.growth import Drafted
from specjax.drafters.self_speculation._own_cache import Inner
from specjax.models import overlay
from specjax.rng import RowKeys
from specjax.step import Scored
from specjax.types import (
    LM,
    Accept,
    Array,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Output,
    Params,
    StepInfo,
    Verdict,
)

# The rounds of a speculative system inside a draft; see ``_system``.


class System(NamedTuple):
    """A model that drafts ``gamma`` tokens, and what drafts for this model. Static."""

    reader: Inner  # the model and the cache that it reads; ``commit`` gets the tokens it was fed
    drafter: Drafter  # drafts for the model
    rule: Accept  # of class L1, so that the model's probabilities are those of the tokens
    gamma: int
    # The largest number of tokens that its cache lacks when a draft begins: committed ones (without
    # the pending token), and the drafts of other systems that its draft continues.
    lag: int = 0
    # How many drafts of other systems its draft continues.
    offset: int = 0
    # 1, and one more for each system that it drafts inside.
    depth: int = 1

    def below(self, params: ModelParams) -> ModelParams:
        """The parameters of the model and of ``drafter``, as a pair."""
        return ModelParams(self.reader.params(params), params.draft)

    @property
    def room(self) -> int:
        """Places of its buffer."""
        return self.lag + self.gamma


class Run(struct.PyTreeNode):
    """The inner rounds so far."""

    state: DecodeState
    logits: Array  # f[B,gamma,V] those that each token was drawn from
    before: list[Any]  # parts of the inner drafter's state that are no overlays, see ``restored``
    number: Array  # i32[] rounds


def run(
    system: System,
    params: ModelParams,
    keys: RowKeys,
    context: Context,
    cache: overlay.OverlayCache,
    inner: Any,
) -> Run:
    """Rounds of the inner system until every row has ``gamma`` tokens, or has failed.

    ``cache`` is an overlay's, and ``inner`` the state of the inner drafter.
    """
    model, below = overlay.overlay(system.reader.model), system.below(params)
    batch, gamma = context.length.shape[0], system.gamma
    # A verdict is written as a whole, also where it is cut.
    more = ((0, 0), (0, system.drafter.longest + 1))
    state = DecodeState(
        tokens=jnp.pad(context.tokens, more, constant_values=-1),
        length=context.length,
        limit=context.length + gamma,
        # A row that the outer loop has finished needs no tokens.
        done=context.finished,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        draft=inner,
        # Every round gets its keys from ``keys``.
        keys=jnp.zeros((batch,), jnp.uint32),
        round=jnp.zeros((), jnp.int32),
        sampling=context.sampling,
        made_for=system.drafter.tag,
    )
    token = jnp.zeros((batch, 1), jnp.int32)
    like = tree.shapes(lambda: model.apply(below.target, token, cache)[0].logits)
    logits = jnp.zeros((batch, gamma, like.shape[-1]), like.dtype)

    def one(carry: Run) -> Run:
        return _round(system, model, below, keys.inner(carry.number), context, carry)

    start = Run(state, logits, _plain(inner), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(lambda carry: ~carry.state.done.all(), one, start)


def _round(
    system: System, model: LM, below: ModelParams, keys: RowKeys, context: Context, run: Run
) -> Run:
    """One round. Rows that have their tokens are frozen, and draw nothing: they are greedy."""
    drafter, state = system.drafter, run.state
    heat = jnp.where(state.done, 0, state.sampling.temperature)
    state = state.replace(sampling=state.sampling.replace(temperature=heat))
    draft, proposed = step.propose(model, drafter, below, state, keys)
    before = run.before
    if before:
        nothing = _no_verdict(draft)
        output = model.no_output(len(heat))
        still = _plain(drafter.update(below, proposed, draft, nothing, output))
        first = run.number == 0
        before = [jnp.where(first, new, old) for new, old in zip(still, before, strict=True)]
    scored = _scored(model, drafter, below, state, draft)
    state = state.replace(draft=proposed)
    fixed = step.Round(model, drafter, system.rule, keys)
    after, info = step.decide(fixed, below, state, draft, scored)
    rows = jnp.take_along_axis(scored.out.logits, _places(draft, info)[..., None], axis=1)
    index = jnp.arange(rows.shape[1])
    at = jnp.where(index < info.emitted[:, None], run.state.length[:, None] + index, -1)
    at = jnp.where(at < 0, system.gamma, at - context.length[:, None])
    put = jax.vmap(lambda all_, new, place: all_.at[place].set(new, mode="drop"))
    after = after.replace(sampling=run.state.sampling)
    return Run(after, put(run.logits, rows, at), before, run.number + 1)


def _scored(
    model: LM, drafter: Drafter, params: ModelParams, state: DecodeState, draft: Draft
) -> Scored:
    """The model's pass over the smallest width that covers the draft (``tree.widths``).

    Where fewer nodes are scored, logits and block are zero beyond; those nodes are not valid.
    """
    sizes = tree.widths(drafter._replace(rare=drafter.rare._replace(merges=1)))
    plain = state.replace(sampling=state.sampling.replace(maps=None))

    def score(width: int) -> tuple[Output, Any]:
        few = tree.first_nodes(draft, width - 1)
        out, block, _ = step.score(model, drafter, params, plain, few)
        return tree.sized((out, block), drafter.nodes + 1)

    if len(sizes) == 1:
        out, block = score(sizes[0])
    else:
        fed = jnp.max(tree.fed_nodes(draft, state.done)) + 1
        index = jnp.searchsorted(jnp.asarray(sizes), fed)
        out, block = jax.lax.switch(index, [Bound(score, width) for width in sizes])
    logits = outcome.mapped(state, draft, out.logits, for_draft=True)
    return Scored(out._replace(logits=logits), block)


def _places(draft: Draft, info: StepInfo) -> Array:
    """i32[B,M+1]: for each emitted token, the row of the logits that it was decided with."""
    size = info.tokens.shape[1]
    if draft.parents is None:
        return jnp.broadcast_to(jnp.arange(size), info.tokens.shape)
    exist = tree.exists(draft.valid, draft.parents)
    # Nodes with the same tokens before them have the same logits.
    nodes = draft.tokens, exist, draft.parents
    at = [
        tree.nodes_at(info.tokens[:, :depth], jnp.minimum(info.accepted, depth), *nodes)
        for depth in range(size)
    ]
    return jnp.argmax(jnp.stack(at, 1), -1)


def _no_verdict(draft: Draft) -> Verdict:
    """A verdict of a round in which another drafter proposed."""
    batch, size = draft.tokens.shape[0], draft.longest
    tokens = jnp.full((batch, size + 1), -1, jnp.int32)
    return Verdict(tokens, jnp.zeros((batch,), jnp.int32), jnp.full((batch, size), -1, jnp.int32))


def _plain(state: Any) -> list[Any]:
    """The leaves of a state that are no overlays."""
    leaves = jax.tree.leaves(state, is_leaf=overlay.is_overlay)
    return [leaf for leaf in leaves if not overlay.is_overlay(leaf)]


def restored(state: Any, before: list[Any]) -> Any:
    """The state with the leaves ``before`` in place of those that are no overlays."""
    leaves, shape = jax.tree.flatten(state, is_leaf=overlay.is_overlay)
    rest = iter(before)
    return shape.unflatten([leaf if overlay.is_overlay(leaf) else next(rest) for leaf in leaves])


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


def init(system: System, params: ModelParams, context: Context, out: Output, slots: int) -> State:
    """The state after the prompt; the arguments are those of ``Drafter.init``."""
    reader, below = system.reader, system.below(params)
    # The text of the inner rounds is longer than the committed one.
    inner_slots = slots + system.gamma + system.drafter.longest + 1
    nothing = reader.model.no_output(context.length.shape[0])
    inner = system.drafter.init(below, context, nothing, inner_slots)
    kept = reader.init(params, context, out, slots + system.room)

    zero = jnp.zeros_like(context.length)
    block = tree.zeros(lambda: _open(system, params, context, kept)[0].block)
    return State(kept, inner, block, zero, zero, context.length)


def draw(
    system: System, params: ModelParams, keys: RowKeys, context: Context, state: State
) -> tuple[Draft, Array, State]:
    """``gamma`` tokens after ``context``, whose last ``offset`` tokens are drafts.

    All of the draft are valid, unless logits were not finite. The logits f[B,gamma,V] are the
    model's, after the row's maps, that each token was drawn from.
    """
    cache, kept = _open(system, params, context, state.kept)
    begin = cache.base.length
    # Of the tokens before the pending one, those that the overlay does not have yet.
    if width := min(system.lag, CHUNK):
        model, own = overlay.overlay(system.reader.model), system.reader.params(params)
        last = context.length - 1
        cache = _small_model.catch_up(model, width, own, context.tokens, last, cache)
    end = run(system, params, keys, context, cache, state.inner)
    place = context.length[:, None] + jnp.arange(system.gamma)
    tokens = jnp.take_along_axis(end.state.tokens, place, axis=1)
    tokens, valid = jnp.maximum(tokens, 0), place < end.state.length[:, None]
    finite, after = end.state.failed < 0, end.state.cache
    inner = restored(end.state.draft, end.before)
    state = State(kept, inner, after.block, after.count, begin, context.length - system.offset)
    probs = _probs_of(context, tokens, end.logits)
    return Draft(tokens, valid, probs=probs, finite=finite), end.logits, state


def settle(
    system: System,
    params: ModelParams,
    state: State,
    accepted: Array,
    verdict: Verdict,
    out: Output,
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
    kept = system.reader.commit(params, state.kept, drafted, verdict, out)
    inner = overlay.settle_all(state.inner, system.depth, length, alive)
    return state.replace(kept=kept, inner=inner)


def _probs_of(context: Context, tokens: Array, logits: Array) -> Array:
    """f[B,gamma,V]: ``Draft.probs``. In greedy rows 1 for the token; zeros if all rows are greedy.

    In greedy rows a token need not be the model's best one: the inner rule may be lenient there.
    """

    def sampled() -> Array:
        probs = sampling.to_probs(logits, context.sampling)
        one_hot = jax.nn.one_hot(tokens, probs.shape[-1], dtype=probs.dtype)
        return jnp.where(context.sampling.greedy[:, None, None], one_hot, probs)

    zeros = jnp.zeros(logits.shape, sampling.dtype_of(logits))
    return jax.lax.cond(jnp.all(context.sampling.greedy), lambda: zeros, sampled)


def _open(
    system: System, params: ModelParams, context: Context, kept: Any
) -> tuple[overlay.OverlayCache, Any]:
    """An empty overlay on the cache of the committed text, and what the reader keeps."""
    reader = system.reader
    cache, kept = reader.view(params, context, kept)
    return overlay.open_on(reader.model, reader.params(params), cache, system.room), kept


def own_cache(
    model: LM, params: Callable[[ModelParams], Params], rooms: Sequence[int] = ()
) -> Inner:
    """The reader of a model that has a cache of its own, with the committed text.

    ``rooms``: for each system that it drafts inside, the outermost one first, the places of the
    overlay that this system puts on the cache.
    """
    init, outermost = Bound(_begin, model, params, tuple(rooms)), model
    for _ in rooms:
        outermost = overlay.overlay(outermost)
    return Inner(outermost, params, _same_view, init, Bound(_commit, outermost))


def _begin(
    model: LM,
    params: Callable[[ModelParams], Params],
    rooms: tuple[int, ...],
    given: ModelParams,
    context: Context,
    target_out: Output,
    slots: int,
) -> Any:
    own = params(given)
    cache = _small_model.fed(model, own, context, slots + sum(rooms))
    for room in rooms:
        cache, model = overlay.open_on(model, own, cache, room), overlay.overlay(model)
    return cache


def _commit(model: LM, given: ModelParams, cache: Any, drafted: Drafted, *_: Any) -> Any:
    return model.commit(cache, drafted.block, drafted.count)


def _same_view(given: ModelParams, context: Context, cache: Any) -> tuple[Any, Any]:
    return cache, cache
