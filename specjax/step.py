"""One round: propose, verify, accept, commit.

The map of a round, in order:

1. A token is proposed: ``drafter.propose``, called in ``propose``.
2. The width is chosen: the smallest of a few static widths that covers the valid nodes of every
   row: ``verify``. Steps 3 to 6 are compiled for each width (``_pass``).
3. The target scores the block (the pending token and the draft): ``target.apply`` in ``score``.
   It changes nothing. The row's penalties, biases and bans: ``outcome.mapped``.
4. A token's probability is computed: ``outcome.target_probs`` turns the logits into the target's
   distribution under the row's sampling settings (``sampling.to_probs``).
5. A token is accepted: ``accept.sampled`` (from probabilities) or ``accept.greedy`` (from logits),
   called in ``outcome.verdict_of``. The rules are in ``specjax/accept``, one per file.
6. The verdict is cut at end-of-sequence and at the row's limit: ``outcome.cut``. Rows with logits
   that are not finite get an empty verdict: ``outcome.finite`` and ``outcome.withdraw``. The
   drafter keeps its own state: ``drafter.update``.
7. A token's cache entry is committed: ``target.commit`` in ``_finish`` (for the built-in models
   ``specjax.cache.commit``).
8. A token enters the text: ``outcome.advance`` writes it to ``state.tokens`` and moves
   ``state.length``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import outcome, tree
from specjax import sampling as sampling_lib
from specjax.accept import check_pair
from specjax.outcome import EosId
from specjax.rng import RowKeys
from specjax.tree import Widths, duplicates
from specjax.types import (
    COUPLED,
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


def speculative_step(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    eos_id: EosId = None,
    verify_widths: Widths = None,
) -> tuple[DecodeState, StepInfo]:
    """One round, a pure function; drafters inside a drafter call its parts.

    Rows that are done are frozen: they emit no token and no length changes. The output law has the
    lossless class of ``accept`` (L1: exactly the target's), given that ``Draft.probs`` are the
    probabilities that the drafter drew from.

    Args:
        target, drafter, accept: static.
        params: the pair's parameters.
        state: from ``prefill`` or the last round.
        eos_id: an id or several; None: no token ends a row.
        verify_widths: see ``tree.widths``. The tokens do not depend on it, apart from rounding: a
            pass over fewer tokens may differ in the last bit of a logit. With several rows, the
            width depends on the other rows.

    Raises:
        UserError: a rule that does not take such drafts, a draft of another size than
            ``drafter.nodes``, which all buffers are sized for, or wrong widths.
    """
    check_pair(drafter, accept)
    fixed = Round(target, drafter, accept, keys_of(drafter, state), eos_id)
    draft, draft_state = propose(target, drafter, params, state, fixed.keys)
    return verify(fixed, params, state.replace(draft=draft_state), draft, verify_widths)


class Round(NamedTuple):
    """What a round needs beside parameters, state and draft."""

    target: LM
    drafter: Drafter
    accept: Accept
    keys: RowKeys
    eos_id: EosId = None


def keys_of(drafter: Drafter, state: DecodeState) -> RowKeys:
    """The keys of the next round."""
    return RowKeys(state.keys, state.round, state.length, nodes=drafter.nodes)


def context_of(state: DecodeState) -> Context:
    """What a drafter may read."""
    fields = ("tokens", "length", "sampling", "cache", "taps", "done", "limit")
    context = Context(**{name: getattr(state, name) for name in fields})
    return context.replace(sampling=sampling_lib.for_draft(state.sampling))


def propose(
    target: LM, drafter: Drafter, params: ModelParams, state: DecodeState, keys: RowKeys
) -> tuple[Draft, Any]:
    """The draft of a round and the drafter's new state.

    Nodes are invalid if their id is outside the vocabulary (a foreign table or text). In finished
    rows all nodes are invalid: their verdict is not used, and the loops of a rule end at once.
    """
    proposal = drafter.propose(params, keys, context_of(state), state.draft)
    draft, draft_state = tree.proposed(drafter, proposal, len(state.length), target.vocab_size)
    real = (draft.tokens >= 0) & (draft.tokens < target.vocab_size)
    return draft.replace(valid=draft.valid & real & ~state.done[:, None]), draft_state


def verify(
    fixed: Round,
    params: ModelParams,
    state: DecodeState,
    draft: Draft,
    verify_widths: Widths = None,
    *,
    empty: bool = False,
) -> tuple[DecodeState, StepInfo]:
    """The rest of a round: the target's pass, the verdict and its cut, and the commit.

    ``state.draft`` is the drafter's state after its proposal. ``empty``, static: the draft has
    no valid node, so only the width 1 is compiled.
    """
    drafter = fixed.drafter
    sizes = (1,) if empty else tree.widths(drafter, verify_widths)
    merged = drafter.rare.merges > 1 and draft.parents is not None and not empty
    unique = duplicates.unique(draft) if merged else None
    branches = [functools.partial(_pass, fixed, width) for width in sizes]
    if len(sizes) == 1:
        judged = branches[0](params, state, draft, unique)
        return _finish(fixed, params, state, draft, judged, sizes[0])
    fed = tree.fed_nodes(draft if unique is None else unique.draft, state.done)
    index = jnp.searchsorted(jnp.asarray(sizes), jnp.max(fed) + 1)
    judged = jax.lax.switch(index, branches, params, state, draft, unique)
    return _finish(fixed, params, state, draft, judged, jnp.asarray(sizes)[index])


class Scored(NamedTuple):
    """The target's output for a pending token and its draft, and their block."""

    out: Output  # its logits are those after the row's maps (penalties, biases, bans)
    block: Any
    raw: jax.Array | None = None  # f32[B,N+1,V] the model's own logits, for ``logprobs``


def score(
    target: LM, drafter: Drafter, params: ModelParams, state: DecodeState, draft: Draft
) -> Scored:
    """The target's pass over the pending token and the draft, in the state after its proposal."""
    target, own = drafter.scoring(target, params, state.draft)
    pending = context_of(state).pending
    tokens = jnp.concatenate([pending[:, None], draft.tokens], axis=1)
    out, block = target.apply(own, tokens, state.cache, tree.block_layout(draft))
    return Scored(out._replace(logits=outcome.mapped(state, draft, out.logits)), block, out.logits)


def decide(
    fixed: Round, params: ModelParams, state: DecodeState, draft: Draft, scored: Scored
) -> tuple[DecodeState, StepInfo]:
    """The second half of ``verify``, for a draft that was scored with all its nodes."""
    judged = _judge(fixed, params, state, draft, scored, draft.longest)
    return _finish(fixed, params, state, draft, judged, fixed.drafter.nodes + 1)


class _Judged(NamedTuple):
    """The result of a pass; the shapes do not depend on the width."""

    verdict: Verdict
    kept: Any  # the block of the emitted tokens' inputs, [B,M+1,...]: pending token, path
    # The drafter's new state; None: it does not read the target's output (``_finish`` updates it).
    draft_state: Any
    ended: jax.Array  # bool[B]
    failed: jax.Array  # bool[B]
    accepted: jax.Array  # i32[B], before the cut
    drafted: jax.Array  # i32[B]
    tested: jax.Array  # i32[B]
    taps: tuple[jax.Array, ...]
    logprobs: jax.Array | None  # f32[B,M+1]


def _pass(
    fixed: Round,
    width: int,
    params: ModelParams,
    state: DecodeState,
    draft: Draft,
    unique: duplicates.Unique | None,
) -> _Judged:
    """Verifies the pending token and the first ``width`` - 1 nodes; of ``unique``, if given."""
    longest = draft.longest
    if unique is None:
        draft = tree.first_nodes(draft, width - 1)
        scored = score(fixed.target, fixed.drafter, params, state, draft)
    else:
        unique = unique.first(width - 1)
        scored = unique.spread(score(fixed.target, fixed.drafter, params, state, unique.draft))
    return _judge(fixed, params, state, draft, scored, longest)


def _judge(
    fixed: Round,
    params: ModelParams,
    state: DecodeState,
    draft: Draft,
    scored: Scored,
    longest: int,
) -> _Judged:
    """The verdict, its cut, and the drafter's update; ``longest`` is M of all widths."""
    _, drafter, accept, keys, eos_id = fixed
    out, block, raw = scored
    verdict = outcome.verdict_of(accept, keys, draft, out.logits, state)
    accepted = jnp.where(state.done, 0, (verdict.path >= 0).sum(-1))
    copies = drafter.siblings in (IID, INDEPENDENT, COUPLED)
    drafted, tested = outcome.counts(draft, verdict, copies)
    verdict, ended = outcome.cut(verdict, state, eos_id)
    failed = ~outcome.finite(draft, verdict, out.logits, accept.whole_tree) & ~state.done
    verdict = outcome.withdraw(verdict, failed)
    # The inputs of the emitted tokens: the pending token, then the accepted nodes.
    more = longest - verdict.path.shape[1]
    verdict = Verdict(_pad(verdict.tokens, more), verdict.count, _pad(verdict.path, more))
    draft_state = None
    if drafter.features:
        draft_state = drafter.update(params, state.draft, draft, verdict, out)
    path = jnp.pad(verdict.path + 1, ((0, 0), (1, 0)))
    place = jnp.arange(longest + 1)
    # The accepted nodes of a chain are the first ones; ``commit`` keeps ``count`` of them.
    kept = tree.sized(block, longest + 1)
    if draft.parents is not None:
        kept = tree.take(block, path, place < verdict.count[:, None])
    newest = jnp.where(place == verdict.count[:, None] - 1, path, 0).sum(-1)
    taps = outcome.newest_taps(out.taps, newest, state, verdict.count > 0)
    more = (taps, outcome.log_probs(state, verdict, raw, out.logits))
    return _Judged(verdict, kept, draft_state, ended, failed, accepted, drafted, tested, *more)


def _finish(
    fixed: Round,
    params: ModelParams,
    state: DecodeState,
    draft: Draft,
    judged: _Judged,
    width: jax.Array | int,
) -> tuple[DecodeState, StepInfo]:
    """Commits the accepted tokens: to the target's cache and to the text.

    A drafter that does not read the target's output is updated here, outside of the conditional
    over the widths, where XLA would copy a cache in its state.
    """
    target, verdict = fixed.target, judged.verdict
    draft_state = judged.draft_state
    if not fixed.drafter.features:
        nothing = target.no_output(len(verdict.count))
        draft_state = fixed.drafter.update(params, state.draft, draft, verdict, nothing)
    cache = target.commit(state.cache, judged.kept, verdict.count)
    counts = (judged.accepted, judged.drafted, judged.tested)
    verified = jnp.where(state.done, 0, width).astype(jnp.int32)
    info = StepInfo(draft, verdict.tokens, verdict.count, *counts, verified)
    state = outcome.advance(state, verdict, judged.ended, judged.failed, judged.logprobs)
    return state.replace(cache=cache, draft=draft_state, taps=judged.taps), info


def _pad(ids: jax.Array, more: int) -> jax.Array:
    return jnp.pad(ids, ((0, 0), (0, more)), constant_values=-1)
