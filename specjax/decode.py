"""The decode loop: prefill, one speculative round, the compiled loop over rounds, and the autoregressive oracle.

A round (propose, verify, accept, commit) is in ``specjax.step``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from specjax import sampling as sampling_lib
from specjax import step as step_lib
from specjax.accept import check_pair
from specjax.errors import NonFiniteLogits, UserError
from specjax.rng import RowKeys
from specjax.sampling import Sampling
from specjax.step import EosId, speculative_step
from specjax.types import (
    LM,
    Accept,
    Context,
    DecodeState,
    Drafter,
    ModelParams,
    Output,
    Records,
    StepInfo,
    Verdict,
)


def pack_prompts(
    prompts: Sequence[Sequence[int]], width: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Right-pads token lists: (i32[B,P], lengths i32[B]). Raises UserError for an empty batch or prompt."""
    if not prompts:
        raise UserError("there is no prompt; give at least one")
    for row, ids in enumerate(prompts):
        if not len(ids):
            raise UserError(f"prompt {row} is empty; a prompt needs at least one token")
    width = width or max(map(len, prompts))
    if width < max(map(len, prompts)):
        raise UserError(f"a prompt has {max(map(len, prompts))} tokens and the buffer {width}")
    packed = np.full((len(prompts), width), -1, np.int32)
    for row, ids in enumerate(prompts):
        packed[row, : len(ids)] = ids
    return jnp.asarray(packed), jnp.asarray([len(p) for p in prompts], jnp.int32)


def feed(
    model: LM, params, tokens: jax.Array, count: jax.Array, cache, chunk: int = 256
) -> tuple[Output, object]:
    """Feeds the first ``count[b]`` of tokens i32[B,L] to an empty cache, ``chunk`` at a time.

    Returns the ``Output`` of all L tokens, its logits empty ([B,0,V]): they are never computed, so a long prompt costs no
    [B,L,V] array.
    """
    batch, size = tokens.shape

    def block(cache, piece, start):
        out, cache = model.apply(params, piece, cache)
        # A row that ends inside or before this block stops there; the rest of its block is beyond its length.
        cache = model.commit(cache, jnp.clip(count - start, 0, piece.shape[1]))
        return cache, (out.hidden, out.taps)

    if size == 0:  # a prompt of one token: it is pending, and there is nothing to feed
        _, parts = jax.eval_shape(
            lambda cache: block(cache, jnp.zeros((batch, 1), jnp.int32), 0), cache
        )
        hidden, taps = jax.tree.map(lambda x: jnp.zeros((batch, 0, *x.shape[2:]), x.dtype), parts)
        return Output(jnp.zeros((batch, 0, model.vocab_size)), hidden, taps), cache
    whole = size // chunk
    pieces = []
    if whole:
        stacked = tokens[:, : whole * chunk].reshape(batch, whole, chunk).swapaxes(0, 1)
        step = lambda cache, xs: block(cache, *xs)  # noqa: E731
        cache, parts = jax.lax.scan(step, cache, (stacked, jnp.arange(whole) * chunk))
        pieces.append(
            jax.tree.map(
                lambda x: x.swapaxes(0, 1).reshape(batch, whole * chunk, *x.shape[3:]), parts
            )
        )
    if size % chunk:
        cache, part = block(cache, tokens[:, whole * chunk :], whole * chunk)
        pieces.append(part)
    hidden, taps = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *pieces)
    return Output(jnp.zeros((batch, 0, model.vocab_size)), hidden, taps), cache


def prefill(
    target: LM,
    drafter: Drafter,
    params: ModelParams,
    prompt: jax.Array,
    lengths: jax.Array,
    keys: jax.Array,
    *,
    max_len: int,
    sampling: Sampling | None = None,
    limit: jax.Array | None = None,
    chunk: int = 256,
) -> DecodeState:
    """Reads the prompts and makes the state that the loops carry.

    Args:
        target, drafter: static; the same objects again do not recompile.
        params: the pair's parameters.
        prompt: i32[B,P], right-padded.
        lengths: i32[B], each in 1..P.
        keys: key[B] from ``rng.row_keys``.
        max_len: longest text, prompt included; sizes every buffer.
        sampling: settings per row; None = temperature 1.
        limit: i32[B] length at which a row stops, at most ``max_len`` (the default).
        chunk: tokens of the prompt fed at once.

    Raises:
        UserError: a prompt that is empty, longer than ``max_len``, or has ids outside the vocabulary; ``max_len`` beyond
            the model's positions.
    """
    batch, width = prompt.shape
    if target.max_positions is not None and max_len > target.max_positions:
        raise UserError(
            f"prompt and new tokens need {max_len} positions, and the model has {target.max_positions}; shorten them"
        )
    if width > max_len:
        raise UserError(
            f"the prompt has {width} tokens and max_len is {max_len}; it must be at least as long"
        )
    limit = (
        jnp.full((batch,), max_len, jnp.int32) if limit is None else jnp.asarray(limit, jnp.int32)
    )
    if not isinstance(prompt, Tracer) and not isinstance(lengths, Tracer):
        _check_prompt(
            np.asarray(prompt), np.asarray(lengths), np.asarray(limit), target.vocab_size, max_len
        )
    if sampling is None:
        sampling = sampling_lib.make_sampling(batch)
    return _prefill(
        target,
        drafter,
        params,
        prompt,
        lengths,
        limit,
        keys,
        sampling,
        max_len=max_len,
        chunk=chunk,
    )


def _check_prompt(
    prompt: np.ndarray, lengths: np.ndarray, limit: np.ndarray, vocab: int, max_len: int
) -> None:
    if (lengths < 1).any() or (lengths > prompt.shape[1]).any():
        row = int(np.argmax((lengths < 1) | (lengths > prompt.shape[1])))
        raise UserError(
            f"prompt {row} has length {lengths[row]}; it must be in 1..{prompt.shape[1]}"
        )
    if (limit > max_len).any():
        raise UserError(
            f"limit is {limit.max()} and max_len {max_len}; a row cannot outgrow its buffer"
        )
    real = np.arange(prompt.shape[1]) < lengths[:, None]
    bad = real & ((prompt < 0) | (prompt >= vocab))
    if bad.any():
        row, at = np.argwhere(bad)[0]
        raise UserError(
            f"prompt {row} has the token id {prompt[row, at]}; ids must be in 0..{vocab - 1}"
        )


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("max_len", "chunk"))
def _prefill(target, drafter, params, prompt, lengths, limit, keys, sampling, *, max_len, chunk):
    batch, width = prompt.shape
    # Copies: the state will be donated, and what the caller handed in must outlive it.
    lengths, limit, keys, sampling = jax.tree.map(jnp.copy, (lengths, limit, keys, sampling))
    slots = (
        max_len + drafter.nodes
    )  # a block of nodes + 1 starts at the pending token, at most at max_len - 1
    tokens = jnp.full((batch, slots + 1), -1, jnp.int32)
    real = jnp.arange(width) < lengths[:, None]
    tokens = tokens.at[:, :width].set(jnp.where(real, prompt, -1))
    cache = target.init_cache(batch, slots)
    out, cache = feed(target, params.target, tokens[:, : width - 1], lengths - 1, cache, chunk)
    context = Context(tokens[:, :width], lengths, sampling)
    return DecodeState(
        tokens=tokens,
        length=lengths,
        limit=limit,
        done=lengths >= limit,
        failed=jnp.full((batch,), -1, jnp.int32),
        cache=cache,
        draft=drafter.init(params, context, out, slots),
        keys=keys,
        round=jnp.zeros((), jnp.int32),
        sampling=sampling,
        made_for=drafter.tag,
    )


def _check_state(drafter: Drafter, accept: Accept, state: DecodeState) -> None:
    check_pair(drafter, accept)
    if state.made_for != drafter.tag:
        raise UserError(
            f"the state was prefilled for {state.made_for}, and the drafter is {drafter.tag}; prefill for it"
        )


def generate(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    max_steps: int,
    eos_id: EosId = None,
) -> tuple[DecodeState, Records]:
    """Rounds until every row is done, at most ``max_steps``: one compiled program, nothing returns to the host inside.

    ``state`` is donated: its buffers are reused and it must not be read again. ``eos_id`` is an id or several.
    Call ``check(state)`` on the result: it raises if a model gave logits that are not finite.
    """
    _check_state(drafter, accept, state)
    return _generate(
        target, drafter, accept, params, state, step_lib.stop_ids(eos_id), max_steps=max_steps
    )


@functools.partial(
    jax.jit, static_argnums=(0, 1, 2), static_argnames=("max_steps",), donate_argnums=(4,)
)
def _generate(target, drafter, accept, params, state, eos_id, *, max_steps):
    batch = state.length.shape[0]
    zeros = jnp.zeros((max_steps, batch), jnp.int32)

    def running(carry):
        state, _, step = carry
        return (step < max_steps) & ~state.done.all()

    def body(carry):
        state, records, step = carry
        state, info = speculative_step(target, drafter, accept, params, state, eos_id=eos_id)
        seen = Records(info.emitted, info.accepted, info.drafted, info.tested)
        records = jax.tree.map(lambda all_, now: all_.at[step].set(now), records, seen)
        return state, records, step + 1

    state, records, _ = jax.lax.while_loop(
        running, body, (state, Records(zeros, zeros, zeros, zeros), jnp.zeros((), jnp.int32))
    )
    return state, records


_step = jax.jit(speculative_step, static_argnums=(0, 1, 2), donate_argnums=(4,))


def stream(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    eos_id: EosId = None,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """The same rounds from the host, one at a time: for showing text as it comes. The same tokens as ``generate``.

    Yields the state after each round (good until the next one: it is donated) and what the round did.

    Raises:
        NonFiniteLogits: naming row and round, as soon as it happens.
    """
    _check_state(drafter, accept, state)
    stop = step_lib.stop_ids(eos_id)
    while not bool(state.done.all()):
        state, info = _step(target, drafter, accept, params, state, eos_id=stop)
        check(state)
        yield state, info


def autoregressive(
    target: LM, params: ModelParams, state: DecodeState, *, max_steps: int, eos_id: EosId = None
) -> DecodeState:
    """Plain decoding, one token a pass: the oracle that every method is compared with, and the baseline of every speed-up.

    ``state`` comes from ``prefill`` (any drafter) and is donated; the drafter's part of it is left behind, so what comes out
    is not for ``generate``. Noise is keyed by position, as in the rule ``match``.
    """
    return _autoregressive(target, params, state, jnp.asarray(max_steps), step_lib.stop_ids(eos_id))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def _autoregressive(target, params, state, max_steps, eos_id):
    def running(carry):
        state, step = carry
        return (step < max_steps) & ~state.done.all()

    def body(carry):
        state, step = carry
        pending = Context(state.tokens, state.length, state.sampling).pending
        out, cache = target.apply(params.target, pending[:, None], state.cache)
        keys = RowKeys(state.keys, state.round, state.length).at_position(
            jnp.zeros((1,), jnp.int32)
        )
        token = jax.lax.cond(
            jnp.all(state.sampling.greedy | state.done),
            lambda: sampling_lib.argmax(out.logits),
            lambda: sampling_lib.draw_rows(keys, step_lib.target_probs(out.logits, state.sampling)),
        )
        failed = ~jnp.isfinite(out.logits.max(-1))[:, 0] & ~state.done
        batch = token.shape[0]
        verdict = Verdict(token, jnp.ones((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32))
        verdict, ended = step_lib.cut(verdict, state, eos_id)
        verdict = step_lib.nothing(verdict, failed)
        cache = target.commit(cache, verdict.count)
        return step_lib.advance(state, verdict, ended, failed).replace(cache=cache), step + 1

    return jax.lax.while_loop(running, body, (state, jnp.zeros((), jnp.int32)))[0]


def check(state: DecodeState) -> None:
    """Raises NonFiniteLogits, naming row and round, if a model gave NaN or infinite logits."""
    failed = np.asarray(state.failed)
    if (failed >= 0).any():
        row = int(np.argmax(failed >= 0))
        raise NonFiniteLogits(
            f"NaN or infinite logits in row {row}, round {failed[row]}; the weights or the precision of the target or of "
            "the draft model are at fault"
        )


def outputs(state: DecodeState, lengths: Sequence[int]) -> list[list[int]]:
    """The new tokens of each row, the prompt (``lengths`` tokens) left out."""
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [tokens[b, int(lengths[b]) : length[b]].tolist() for b in range(tokens.shape[0])]
