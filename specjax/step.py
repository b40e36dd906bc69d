"""One round: propose, verify, accept, commit.

The map of a round, in order:

1. A token is proposed: ``drafter.propose``, called in ``propose``.
2. The target scores the block (the pending token and the draft): ``target.apply`` in ``propose``.
3. A token's probability is computed: ``target_probs`` turns the logits into the target's
   distribution under the row's sampling settings (``sampling.to_probs``).
4. A token is accepted: ``accept.sampled`` (from probabilities) or ``accept.greedy`` (from logits),
   called in ``_verdict``. The rules are in ``specjax/accept``, one per file.
5. The verdict is cut at end-of-sequence and at the row's limit: ``cut``. Rows with logits that
   are not finite get an empty verdict: ``_finite`` and ``withdraw``.
6. A token's cache entry is committed: ``target.commit`` in ``decide`` (for the built-in models
   ``specjax.cache.commit``). The drafter keeps its own state: ``drafter.update``, next to it.
7. A token enters the text: ``advance`` writes it to ``state.tokens`` and moves ``state.length``.
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
    """One round. Pure: a drafter may run it with a smaller target.

    Rows that are done are frozen: they emit no token and no length changes. The output law has the
    lossless class of ``accept`` (L1: exactly the target's), given that ``Draft.probs`` are the
    probabilities that the drafter drew from.

    Raises:
        UserError: a rule that does not take such drafts, or a draft of another size than
            ``drafter.nodes``, which all buffers are sized for.
    """
    check_pair(drafter, accept)
    keys = RowKeys(state.keys, state.round, state.length)
    scored = propose(target, drafter, params, state, keys)
    return decide(target, drafter, accept, params, state, keys, scored, eos_id)


class Scored(NamedTuple):
    """A draft, and the target's output for it."""

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
    """The second half of a round: the verdict, its cut, and the commit of both caches."""
    draft, draft_state, out, cache = scored
    # Nodes are invalid if their id is outside the vocabulary (a foreign table or text). In finished
    # rows all nodes are: their verdict is discarded, and no loop of a rule should wait for it.
    real = (draft.tokens >= 0) & (draft.tokens < target.vocab_size)
    draft = draft.replace(valid=draft.valid & real & ~state.done[:, None])
    verdict = _verdict(accept, keys, draft, out.logits, state)
    accepted = jnp.where(state.done, 0, (verdict.path >= 0).sum(-1))
    drafted, tested = _counts(draft, verdict, drafter.siblings in (IID, INDEPENDENT))
    verdict, ended = cut(verdict, state, eos_id)
    failed = ~_finite(draft, verdict, out.logits, accept.whole_tree) & ~state.done
    verdict = withdraw(verdict, failed)

    cache = target.commit(cache, verdict.count, None if draft.parents is None else verdict.path)
    draft_state = drafter.update(params, draft_state, draft, verdict, out)
    info = StepInfo(draft, verdict.tokens, verdict.count, accepted, drafted, tested)
    return advance(state, verdict, ended, failed).replace(cache=cache, draft=draft_state), info


def block_parents(draft: Draft) -> jax.Array | None:
    """Parents in the block that the target scores: node 0 is the pending token."""
    if draft.parents is None:
        return None
    return jnp.pad(draft.parents + 1, ((0, 0), (1, 0)), constant_values=-1)


def target_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[B,N+1,V]: the distribution that every emitted token must have."""
    return sampling_lib.to_probs(logits, sampling)


def _verdict(
    accept: Accept, keys: RowKeys, draft: Draft, logits: jax.Array, state: DecodeState
) -> Verdict:
    def sampled() -> Verdict:
        verdict = accept.sampled(keys, draft, target_probs(logits, state.sampling))
        # At temperature 0 the probabilities are one-hot: an L1 rule then gives the greedy verdict.
        if accept.lossless_class == "L1":
            return verdict
        greedy = state.sampling.greedy
        pick = lambda g, s: jnp.where(greedy.reshape(-1, *[1] * (g.ndim - 1)), g, s)  # noqa: E731
        return jax.tree.map(pick, accept.greedy(draft, logits), verdict)

    all_greedy = jnp.all(state.sampling.greedy | state.done)
    return jax.lax.cond(all_greedy, lambda: accept.greedy(draft, logits), sampled)


def _counts(draft: Draft, verdict: Verdict, copies: bool) -> tuple[jax.Array, jax.Array]:
    """i32[B] each: nodes that could be tested, and depths at which one was tested.

    ``copies``: siblings may have the same token. Then the children of all copies are tested.
    """
    exist = tree.exists(draft.valid, draft.parents)
    accepted = (verdict.path >= 0).sum(-1)
    if draft.parents is None:
        drafted = exist.sum(-1)
        return drafted, jnp.minimum(accepted + 1, drafted)
    if copies:
        emitted = verdict.tokens[:, :-1]
        here = tree.nodes_at(emitted, accepted, draft.tokens, exist, draft.parents)
        has_child = (exist & jnp.take_along_axis(here, draft.parents + 1, 1)).any(-1)
        return exist.sum(-1), accepted + has_child
    path = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1)
    last = jnp.take_along_axis(path, accepted[:, None], 1)
    has_child = (exist & (draft.parents == last)).any(-1)
    return exist.sum(-1), accepted + has_child


def _check_draft(drafter: Drafter, draft: Draft, vocab: int) -> None:
    nodes = (draft.tokens.shape[0], drafter.nodes)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("tokens", "valid", "parents"), nodes)
    shapes["probs"] = (*nodes, vocab)
    for name, shape in shapes.items():
        array = getattr(draft, name)
        if array is not None and array.shape != shape:
            raise UserError(
                f"drafter {drafter.name} gave {name} of shape {array.shape}; "
                f"with {drafter.nodes} nodes it must be {shape}"
            )
    if draft.longest != drafter.longest:
        raise UserError(
            f"drafter {drafter.name} gave a draft of depth {draft.longest}; "
            f"it declares depth {drafter.longest}"
        )
    if (draft.parents is None) != (drafter.siblings == CHAIN):
        gave = "no parents" if draft.parents is None else "parents"
        raise UserError(
            f"drafter {drafter.name} declares siblings {drafter.siblings!r} and gave {gave}; "
            f"a draft has no parents exactly if its siblings are {CHAIN!r}"
        )
    if drafter.siblings == DETERMINISTIC and draft.probs is not None:
        raise UserError(
            f"drafter {drafter.name} declares siblings {DETERMINISTIC!r} and gave probs; "
            "probs must be None"
        )


def _finite(draft: Draft, verdict: Verdict, logits: jax.Array, whole_tree: bool) -> jax.Array:
    """bool[B]: whether all logits that the emitted tokens depend on are finite.

    These are the logits after the pending token and after each accepted node that is followed by
    another emitted token; for rules that read the probs at all nodes (``whole_tree``), after every
    node. Logits after a rejected node do not matter: plain decoding never reaches it.
    """
    node = jnp.arange(logits.shape[1])
    if whole_tree:
        exist = tree.exists(draft.valid, draft.parents)
        used = jnp.pad(exist, ((0, 0), (1, 0)), constant_values=True)
    else:
        followed = jnp.arange(verdict.path.shape[1]) < verdict.count[:, None] - 1
        path = jnp.where(followed, verdict.path, -1)
        used = (node == 0) | (path[..., None] + 1 == node).any(1) & (node > 0)
    good = jnp.all(jnp.isfinite(logits.max(-1)) | ~used, axis=-1)
    return good if draft.finite is None else good & draft.finite


def withdraw(verdict: Verdict, failed: jax.Array) -> Verdict:
    """The verdict, made empty in the rows ``failed`` bool[B]."""
    keep = ~failed[:, None]
    return Verdict(
        jnp.where(keep, verdict.tokens, -1),
        jnp.where(failed, 0, verdict.count),
        jnp.where(keep, verdict.path, -1),
    )


def cut(verdict: Verdict, state: DecodeState, eos_id: EosId) -> tuple[Verdict, jax.Array]:
    """Cuts a verdict at the first end-of-sequence token and at the row's limit.

    Returns the verdict, and the rows bool[B] that emitted an end-of-sequence token.
    """
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
    """Appends the verdict's tokens to the text; updates lengths, ``done``, ``failed``, ``round``.

    ``ended`` bool[B]: rows that emitted an end-of-sequence token. ``failed`` bool[B]: rows with
    logits that are not finite.
    """
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
