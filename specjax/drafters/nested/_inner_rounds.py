"""The rounds of a speculative system inside a draft; see ``_system``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from specjax import logit_maps, step, tree
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
    StepInfo,
    Verdict,
)


class System(NamedTuple):
    """A model that drafts ``gamma`` tokens, and what drafts for this model. Static."""

    reader: Inner  # the model and the cache that it reads; ``commit`` gets the tokens it was fed
    drafter: Drafter  # drafts for the model
    rule: Accept  # of class L1, so that the model's probabilities are those of the tokens
    gamma: int
    # (params) -> the parameters of the model and of ``drafter``, as a pair.
    below: Callable[[ModelParams], ModelParams]
    # The largest number of tokens that its cache lacks when a draft begins: committed ones (without
    # the pending token), and the drafts of other systems that its draft continues.
    lag: int = 0
    # How many drafts of other systems its draft continues.
    offset: int = 0
    # 1, and one more for each system that it drafts inside.
    depth: int = 1

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
    """Rounds of the inner system until every row has ``gamma`` tokens, or has failed."""
    model, below = overlay.overlay(system.reader.model), system.below(params)
    batch, gamma = context.length.shape[0], system.gamma
    state = DecodeState(
        # A verdict is written as a whole, also where it is cut.
        tokens=jnp.pad(
            context.tokens, ((0, 0), (0, system.drafter.longest + 1)), constant_values=-1
        ),
        length=context.length,
        limit=context.length + gamma,
        # A row that the outer loop has finished needs no tokens.
        done=jnp.zeros((batch,), bool) if context.done is None else context.done,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        draft=inner,
        # Every round gets its keys from ``keys``.
        keys=jnp.zeros((batch,), jnp.uint32),
        round=jnp.zeros((), jnp.int32),
        sampling=context.sampling,
        made_for=system.drafter.tag,
    )
    # Only the shapes are needed.
    with jax.disable_jit(False):
        token = jnp.zeros((batch, 1), jnp.int32)
        shape = jax.eval_shape(lambda: model.apply(below.target, token, cache)[0].logits)
    logits = jnp.zeros((batch, gamma, shape.shape[-1]), shape.dtype)

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
    after, info = step.decide(model, drafter, system.rule, below, state, keys, draft, scored, None)
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
    sizes = tree.widths(drafter._replace(merges=1))
    plain = state.replace(sampling=state.sampling.replace(maps=None))

    def branch(width: int) -> Callable[[], tuple[Output, Any]]:
        def run() -> tuple[Output, Any]:
            few = tree.first_nodes(draft, width - 1)
            out, block, _ = step.score(model, drafter, params, plain, few)
            return tree.sized((out, block), sizes[-1])

        return run

    if len(sizes) == 1:
        out, block = branch(sizes[0])()
    else:
        fed = jnp.max(tree.fed_nodes(draft, state.done)) + 1
        index = jnp.searchsorted(jnp.asarray(sizes), fed)
        out, block = jax.lax.switch(index, [branch(width) for width in sizes])
    return Scored(out._replace(logits=_mapped(state, draft, out.logits)), block)


def _mapped(state: DecodeState, draft: Draft, logits: Array) -> Array:
    """The logits f[B,N+1,V] after the row's maps, as those of a draft (``logit_maps.for_draft``).

    The model may have none of the tokens that the maps leave.
    """
    maps = state.sampling.maps
    if maps is None:
        return logits
    text = logit_maps.read(maps, state.tokens, state.length, logits.shape[-1])
    visible = tree.block_visible(draft)[:, :, 1:]
    return logit_maps.for_draft(maps, text, logits, draft.tokens, visible)


def _places(draft: Draft, info: StepInfo) -> Array:
    """i32[B,M+1]: for each emitted token, the row of the logits that it was decided with."""
    size = info.tokens.shape[1]
    if draft.parents is None:
        return jnp.broadcast_to(jnp.arange(size), info.tokens.shape)
    exist = tree.exists(draft.valid, draft.parents)
    # Nodes with the same tokens before them have the same logits.
    at = [
        tree.nodes_at(
            info.tokens[:, :depth],
            jnp.minimum(info.accepted, depth),
            draft.tokens,
            exist,
            draft.parents,
        )
        for depth in range(size)
    ]
    return jnp.argmax(jnp.stack(at, 1), -1)


def _no_verdict(draft: Draft) -> Verdict:
    """A verdict of a round in which another drafter proposed."""
    batch, longest = draft.tokens.shape[0], draft.longest
    return Verdict(
        jnp.full((batch, longest + 1), -1, jnp.int32),
        jnp.zeros((batch,), jnp.int32),
        jnp.full((batch, longest), -1, jnp.int32),
    )


def _plain(state: Any) -> list[Any]:
    """The leaves of a state that are no overlays."""
    leaves = jax.tree.leaves(state, is_leaf=overlay.is_overlay)
    return [leaf for leaf in leaves if not overlay.is_overlay(leaf)]


def restored(state: Any, before: list[Any]) -> Any:
    """The state with the leaves ``before`` in place of those that are no overlays."""
    leaves, shape = jax.tree.flatten(state, is_leaf=overlay.is_overlay)
    rest = iter(before)
    return jax.tree.unflatten(
        shape, [leaf if overlay.is_overlay(leaf) else next(rest) for leaf in leaves]
    )
