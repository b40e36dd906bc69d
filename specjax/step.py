"""One round: propose, verify, accept, commit.

Where a token's probability is computed: ``law``. Where it is accepted: ``accept.sampled`` or ``accept.greedy``, called in
``_verdict``. Where its cache entry is kept: ``target.commit``, called in ``decide``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import sampling as sampling_lib
from specjax import tree
from specjax.accept import check_pair
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.sampling import Sampling
from specjax.types import (
    CHAIN,
    DETERMINISTIC,
    IID,
    INDEPENDENT,
    LM,
    Accept,
    Context,
    DecodeState,
    Draft,
    Drafter,
    ModelParams,
    Output,
    StepInfo,
    Verdict,
)

EosId = int | Sequence[int] | jax.Array | None


def speculative_step(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    eos_id: EosId = None,
) -> tuple[DecodeState, StepInfo]:
    """One round: propose, verify in one target pass, accept, commit. Pure: a drafter may run it with a smaller target.

    Rows that are done are frozen: they emit nothing and no length moves. The emitted law has the class of ``accept``
    (L1: exactly the target's), given that ``Draft.probs`` is the law the drafter drew from.

    Raises:
        UserError: a rule that does not take such drafts, or a draft of another size than ``drafter.nodes``, by which every
            buffer was made.
    """
    check_pair(drafter, accept)
    keys = RowKeys(state.keys, state.round, state.length)
    return decide(
        target,
        drafter,
        accept,
        params,
        state,
        keys,
        propose(target, drafter, params, state, keys),
        eos_id,
    )


class Scored(NamedTuple):
    """A draft, and what the target thinks of it."""

    draft: Draft
    draft_state: Any
    out: Output
    cache: Any


def propose(
    target: LM, drafter: Drafter, params: ModelParams, state: DecodeState, keys: RowKeys
) -> Scored:
    """The first half of a round: the drafter's nodes, scored by the target in one pass."""
    context = Context(state.tokens, state.length, state.sampling)
    draft, draft_state = drafter.propose(params, keys, context, state.draft)
    _check_draft(drafter, draft, target.vocab_size)
    block = jnp.concatenate([context.pending[:, None], draft.tokens], axis=1)
    out, cache = target.apply(params.target, block, state.cache, block_parents(draft))
    return Scored(draft, draft_state, out, cache)


def decide(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    keys: RowKeys,
    scored: Scored,
    eos_id: EosId,
) -> tuple[DecodeState, StepInfo]:
    """The second half of a round: the verdict, cut at end-of-sequence and limits, and the commit of both caches."""
    draft, draft_state, out, cache = scored
    # A finished row has no draft: its verdict is thrown away, and no loop of a rule should wait for it. An id outside the
    # vocabulary (a foreign table or text) is no token: it could never be said.
    real = (draft.tokens >= 0) & (draft.tokens < target.vocab_size)
    draft = draft.replace(valid=draft.valid & real & ~state.done[:, None])
    verdict = _verdict(accept, keys, draft, out.logits, state)
    accepted = jnp.where(state.done, 0, (verdict.path >= 0).sum(-1))
    drafted, tested = _reach(draft, verdict, drafter.siblings in (IID, INDEPENDENT))
    verdict, ended = cut(verdict, state, eos_id)
    failed = ~_finite(draft, verdict, out.logits, accept.whole) & ~state.done
    verdict = nothing(verdict, failed)

    cache = target.commit(cache, verdict.count, None if draft.parents is None else verdict.path)
    draft_state = drafter.update(params, draft_state, draft, verdict, out)
    info = StepInfo(draft, verdict.tokens, verdict.count, accepted, drafted, tested)
    return advance(state, verdict, ended, failed).replace(cache=cache, draft=draft_state), info


def block_parents(draft: Draft) -> jax.Array | None:
    """Parents in the block that the target sees: the pending token is its node 0."""
    if draft.parents is None:
        return None
    return jnp.pad(draft.parents + 1, ((0, 0), (1, 0)), constant_values=-1)


def _verdict(
    accept: Accept, keys: RowKeys, draft: Draft, logits: jax.Array, state: DecodeState
) -> Verdict:
    def sampled() -> Verdict:
        verdict = accept.sampled(keys, draft, target_probs(logits, state.sampling))
        if accept.lossless_class == "L1":  # then a one-hot law gives the greedy verdict by itself
            return verdict
        greedy = state.sampling.greedy
        pick = lambda g, s: jnp.where(greedy.reshape(-1, *[1] * (g.ndim - 1)), g, s)  # noqa: E731
        return jax.tree.map(pick, accept.greedy(draft, logits), verdict)

    all_greedy = jnp.all(state.sampling.greedy | state.done)
    return jax.lax.cond(all_greedy, lambda: accept.greedy(draft, logits), sampled)


def _reach(draft: Draft, verdict: Verdict, twins: bool) -> tuple[jax.Array, jax.Array]:
    """i32[B] each: nodes that could be tested, and depths at which one was. ``twins``: siblings may have one token, and then
    the children of each are tested."""
    exists = tree.exists(draft.valid, draft.parents)
    accepted = (verdict.path >= 0).sum(-1)
    if draft.parents is None:
        drafted = exists.sum(-1)
        return drafted, jnp.minimum(accepted + 1, drafted)
    if twins:
        here = tree.standing(draft.tokens, exists, draft.parents, verdict.tokens[:, :-1], accepted)
        goes_on = (exists & jnp.take_along_axis(here, draft.parents + 1, 1)).any(-1)
        return exists.sum(-1), accepted + goes_on
    last = jnp.take_along_axis(
        jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1), accepted[:, None], 1
    )
    goes_on = (exists & (draft.parents == last)).any(-1)
    return exists.sum(-1), accepted + goes_on


def _check_draft(drafter: Drafter, draft: Draft, vocab: int) -> None:
    batch = draft.tokens.shape[0]
    right: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("tokens", "valid", "parents"), (batch, drafter.nodes)
    )
    right["probs"] = (batch, drafter.nodes, vocab)
    for name, shape in right.items():
        array = getattr(draft, name)
        if array is not None and array.shape != shape:
            raise UserError(
                f"drafter {drafter.name} gave {name} of shape {array.shape}; with {drafter.nodes} nodes: {shape}"
            )
    if draft.longest != drafter.longest:
        raise UserError(
            f"drafter {drafter.name} gave a draft of depth {draft.longest} and says it is {drafter.longest}"
        )
    if (draft.parents is None) != (drafter.siblings == CHAIN):
        raise UserError(
            f"drafter {drafter.name} says its siblings are {drafter.siblings!r} and gave "
            f"{'no parents' if draft.parents is None else 'a tree'}; a chain has none, a tree says how it was drawn"
        )
    if drafter.siblings == DETERMINISTIC and draft.probs is not None:
        raise UserError(
            f"drafter {drafter.name} says it is deterministic and gave the laws of its draws; leave them out"
        )


def _finite(draft: Draft, verdict: Verdict, logits: jax.Array, whole: bool) -> jax.Array:
    """bool[B]: whether every law that an emitted token rests on was finite: after the pending token, and after each accepted
    node that another emitted token follows; for rules that judge the tree as a whole, after every node.

    Otherwise a node that fell costs nothing, whatever the model said after it: plain decoding would never have gone there.
    """
    node = jnp.arange(logits.shape[1])
    if whole:
        used = jnp.pad(
            tree.exists(draft.valid, draft.parents), ((0, 0), (1, 0)), constant_values=True
        )
    else:
        followed = jnp.arange(verdict.path.shape[1]) < verdict.count[:, None] - 1
        path = jnp.where(followed, verdict.path, -1)
        used = (node == 0) | (path[..., None] + 1 == node).any(1) & (node > 0)
    good = jnp.all(jnp.isfinite(logits.max(-1)) | ~used, axis=-1)
    return good if draft.finite is None else good & draft.finite


def nothing(verdict: Verdict, failed: jax.Array) -> Verdict:
    """Takes everything back in the rows that failed."""
    keep = ~failed[:, None]
    return Verdict(
        jnp.where(keep, verdict.tokens, -1),
        jnp.where(failed, 0, verdict.count),
        jnp.where(keep, verdict.path, -1),
    )


def target_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[B,N+1,V]: the law that every emitted token must have."""
    return sampling_lib.to_probs(logits, sampling)


def cut(verdict: Verdict, state: DecodeState, eos_id: EosId) -> tuple[Verdict, jax.Array]:
    """Cuts a verdict at the first end-of-sequence token and at the row's limit; says which rows ended there."""
    index = jnp.arange(verdict.tokens.shape[1])
    count, ends = verdict.count, jnp.zeros_like(verdict.tokens, bool)
    stop = stop_ids(eos_id)
    if stop.size:
        ends = jnp.isin(verdict.tokens, stop) & (index < count[:, None])
        count = jnp.where(ends.any(-1), jnp.argmax(ends, -1) + 1, count)
    count = jnp.minimum(count, state.limit - state.length)
    count = jnp.where(state.done, 0, count).astype(jnp.int32)
    kept = index < count[:, None]
    tokens = jnp.where(kept, verdict.tokens, -1)
    path = jnp.where(kept[:, :-1], verdict.path, -1)
    return Verdict(tokens, count, path), (ends & kept).any(-1)


def advance(
    state: DecodeState, verdict: Verdict, ended: jax.Array, failed: jax.Array
) -> DecodeState:
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    length = state.length + verdict.count
    return state.replace(
        tokens=put(state.tokens, verdict.tokens, state.length),
        length=length,
        done=state.done | (ended & ~failed) | failed | (length >= state.limit),
        failed=jnp.where(failed, state.round, state.failed),
        round=state.round + 1,
    )


def stop_ids(eos_id: EosId) -> jax.Array:
    """i32[E]: an array, so that another id does not recompile."""
    return jnp.atleast_1d(jnp.asarray(() if eos_id is None else eos_id, jnp.int32))
