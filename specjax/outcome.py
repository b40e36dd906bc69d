"""From the target's logits to what a row emits: the verdict, its cut, and what is counted.

Parts of a round; their order is in ``specjax.step``.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from specjax import logit_maps, tree
from specjax import sampling as sampling_lib
from specjax.errors import UserError
from specjax.rng import RowKeys
from specjax.sampling import Sampling
from specjax.types import Accept, DecodeState, Draft, Verdict

EosId = int | Sequence[int] | jax.Array | None


def mapped(
    state: DecodeState, draft: Draft, logits: jax.Array, for_draft: bool = False
) -> jax.Array:
    """The logits f[B,N+1,V] after the row's maps, at each node with the tokens of its path.

    ``for_draft``: of a model that drafts, which may have none of the tokens that the maps leave.
    """
    maps = state.sampling.maps
    if maps is None:
        return logits
    text = logit_maps.read(maps, state.tokens, state.length, logits.shape[-1])
    # Column i + 1 is node i. The pending token, column 0, is part of the text.
    visible = tree.block_visible(draft)[:, :, 1:]
    rule = logit_maps.for_draft if for_draft else logit_maps.mapped
    return rule(maps, text, logits, draft.tokens, visible)


def target_probs(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """f32[B,N+1,V]: the distribution that every emitted token must have."""
    return sampling_lib.to_probs(logits, sampling)


def verdict_of(
    accept: Accept, keys: RowKeys, draft: Draft, logits: jax.Array, state: DecodeState
) -> Verdict:
    if state.sampling.lenience is not None:
        if accept.of_rows is None:
            raise UserError(
                f"the rule {accept.name} takes no lenience; the rule with one is lenient, "
                "or leave lenience out of make_sampling"
            )
        accept = accept.of_rows(state.sampling.lenience)

    def sampled() -> Verdict:
        verdict = accept.sampled(keys, draft, target_probs(logits, state.sampling))
        # At temperature 0 the probabilities are one-hot: an L1 rule then gives the greedy verdict.
        if accept.lossless_class == "L1":
            return verdict
        return tree.where_rows(state.sampling.greedy, accept.greedy(draft, logits), verdict)

    all_greedy = jnp.all(state.sampling.greedy | state.done)
    return jax.lax.cond(all_greedy, lambda: accept.greedy(draft, logits), sampled)


def counts(draft: Draft, verdict: Verdict, copies: bool) -> tuple[jax.Array, jax.Array]:
    """i32[B] each: nodes that could be tested, and depths at which one was tested.

    ``copies``: siblings may have the same token. Then the children of all copies are tested.
    """
    exist = tree.exists(draft.valid, draft.parents)
    accepted = (verdict.path >= 0).sum(-1)
    if draft.parents is None:
        drafted = exist.sum(-1)
        return drafted, jnp.minimum(accepted + 1, drafted)
    if copies:
        here = tree.nodes_at(verdict.tokens[:, :-1], accepted, draft.tokens, exist, draft.parents)
        below = jnp.take_along_axis(here, draft.parents + 1, 1)
    else:
        path = jnp.pad(verdict.path, ((0, 0), (1, 0)), constant_values=-1)
        below = draft.parents == jnp.take_along_axis(path, accepted[:, None], 1)
    return exist.sum(-1), accepted + (exist & below).any(-1)


def finite(draft: Draft, verdict: Verdict, logits: jax.Array, whole_tree: bool) -> jax.Array:
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


def log_probs(
    state: DecodeState, verdict: Verdict, raw: jax.Array | None, mapped: jax.Array
) -> jax.Array | None:
    """f32[B,M+1]: the log-probability of each emitted token.

    By the logits ``raw`` f[B,N+1,V] of the target, or with ``sampled_logprobs`` by the
    distribution of which tokens are drawn: ``mapped`` at the row's temperature, top_k, ... None if
    the state has no place for them.
    """
    if state.logprobs is None or raw is None:
        return None
    logits = mapped if state.sampled_logprobs else raw
    # The first token follows the pending one, the others the nodes of the path.
    place = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    rows = jnp.take_along_axis(logits, jnp.maximum(place, 0)[..., None], 1)
    token = jnp.maximum(verdict.tokens, 0)[..., None]
    own = jnp.take_along_axis(rows, token, -1)[..., 0]
    if state.sampled_logprobs:
        own = jnp.take_along_axis(target_probs(rows, state.sampling), token, -1)[..., 0]
        return jnp.log(own).astype(jnp.float32)
    return (own - jax.nn.logsumexp(rows, -1)).astype(jnp.float32)


def advance(
    state: DecodeState,
    verdict: Verdict,
    ended: jax.Array,
    failed: jax.Array,
    logprobs: jax.Array | None = None,
) -> DecodeState:
    """Appends the verdict's tokens to the text; updates lengths, ``done``, ``failed``, ``round``.

    ``ended`` bool[B]: rows that emitted an end-of-sequence token. ``failed`` bool[B]: rows with
    logits that are not finite. ``logprobs`` of ``log_probs``, for the state's. A row that could go
    on and gets no token is done: it would get none in all further rounds.
    """
    stalled = (verdict.count <= 0) & (state.length < state.limit) & ~state.done & ~failed
    length = state.length + verdict.count
    if logprobs is not None:
        emitted = jnp.where(verdict.tokens >= 0, logprobs, 0)
        state = state.replace(logprobs=tree.put(state.logprobs, emitted, state.length))
    tokens = tree.put(state.tokens, verdict.tokens, state.length)
    maps = logit_maps.advanced(state.sampling.maps, tokens, length)
    return state.replace(
        tokens=tokens,
        length=length,
        sampling=state.sampling.replace(maps=maps),
        done=state.done | (ended & ~failed) | failed | stalled | (length >= state.limit),
        failed=jnp.where(failed, state.round, jnp.where(stalled, -2 - state.round, state.failed)),
        round=state.round + 1,
    )


def newest_taps(
    taps: tuple[jax.Array, ...], place: jax.Array, state: DecodeState, alive: jax.Array
) -> tuple[jax.Array, ...]:
    """``DecodeState.taps`` after a round: [B,E] each, from taps [B,T,E] at ``place`` i32[B]."""
    return tuple(
        jnp.where(alive[:, None], jnp.take_along_axis(new, place[:, None, None], 1)[:, 0], old)
        for new, old in zip(taps, state.taps, strict=True)
    )


def stop_ids(eos_id: EosId) -> jax.Array:
    """i32[E]: an array, so that another id does not recompile."""
    return jnp.atleast_1d(jnp.asarray(() if eos_id is None else eos_id, jnp.int32))
