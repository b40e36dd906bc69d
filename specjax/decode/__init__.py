"""The decode loops: the compiled loop over rounds, the same rounds from the host, plain decoding.

A round (propose, verify, accept, commit) is in ``specjax.step``. The prefill, which makes the state
that the loops carry, is in ``specjax.prompt``; its functions are also names of this module.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax import logit_maps, outcome
from specjax import sampling as sampling_lib
from specjax import step as step_lib
from specjax.accept import check_pair
from specjax.checks import whole
from specjax.decode._rests import idle_step, idle_steps, resting
from specjax.decode.beams import BeamDraft, Beams, beam_search
from specjax.errors import NonFiniteLogits, UserError
from specjax.outcome import EosId
from specjax.prompt import check_kinds, feed, pack_prompts, prefill
from specjax.rng import RowKeys
from specjax.step import speculative_step
from specjax.tree import Widths
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, Records, StepInfo, Verdict

# The buffers of the counts have a multiple of so many rows. The limit of rounds is a traced value,
# so all limits that round up to the same multiple run the same program.
ROUNDS = 64

__all__ = [
    "BeamDraft",
    "Beams",
    "autoregressive",
    "beam_search",
    "check",
    "feed",
    "generate",
    "logprobs",
    "outputs",
    "pack_prompts",
    "prefill",
    "speculative_step",
    "stream",
]


def generate(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    max_steps: int,
    eos_id: EosId = None,
    verify_widths: Widths = None,
) -> tuple[DecodeState, Records]:
    """Runs rounds until every row is done, at most ``max_steps``: one compiled program.

    ``state`` is donated: its buffers are reused and it must not be read again. ``eos_id`` is an id
    or several; ``verify_widths`` as in ``speculative_step``. The R of the records is the next
    multiple of 64 (``ROUNDS``) from ``max_steps`` on, so that another number compiles nothing.
    ``check(state)`` raises if a model gave logits that are not finite, or if a row that could go on
    got no token in a round; ``outputs`` and ``logprobs`` call it.

    Raises:
        UserError: a rule that does not take such drafts, a state of another drafter, wrong widths,
            or no round at all.
    """
    check_kinds(target=target, params=params)
    check_state(drafter, accept, state)
    whole("max_steps", max_steps, 1)
    stop, widths = outcome.stop_ids(eos_id), verify_widths and tuple(verify_widths)
    static = {"max_steps": -(-max_steps // ROUNDS) * ROUNDS, "verify_widths": widths}
    return _generate(target, drafter, accept, params, state, stop, np.int32(max_steps), **static)


def check_state(drafter: Drafter, accept: Accept, state: DecodeState, parts: int = 1) -> None:
    """Raises UserError unless the rule takes such drafts, and the state is that of the drafter.

    ``parts``: among how many devices the rows are divided.
    """
    check_kinds(drafter=drafter, accept=accept, state=state)
    check_pair(drafter, accept)
    if drafter.rare.check_rows is not None:
        drafter.rare.check_rows(state.length.shape[0] // parts)
    if state.made_for != drafter.tag:
        raise UserError(
            f"the state was prefilled for {state.made_for}, and the drafter is {drafter.tag}; "
            "prefill a state for this drafter"
        )


# A program of (target, drafter, rule, params, state, ...).
_jit = functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4,))


@functools.partial(_jit, static_argnames=("max_steps", "verify_widths"))
def _generate(
    target,
    drafter,
    accept,
    params,
    state,
    eos_id,
    most: jax.Array | int | None = None,
    *,
    max_steps: int,
    verify_widths: Widths,
):
    """At most ``most`` rounds (None: ``max_steps``); the records have ``max_steps`` rows."""
    zeros = jnp.zeros((max_steps, state.length.shape[0]), jnp.int32)
    most = max_steps if most is None else most

    def running(carry):
        state, _, step = carry
        return (step < most) & ~state.done.all()

    def round_with(one, fields=Records._fields):
        def body(carry):
            state, records, step = carry
            state, info = one(target, drafter, accept, params, state, eos_id=eos_id)
            # Other fields stay 0.
            new = {f: getattr(records, f).at[step].set(getattr(info, f)) for f in fields}
            return state, records._replace(**new), step + 1

        return body

    full = round_with(functools.partial(speculative_step, verify_widths=verify_widths))
    start = state, Records(*[zeros] * len(Records._fields)), jnp.zeros((), jnp.int32)
    rest = drafter.rare.rest
    if rest is None:
        return jax.lax.while_loop(running, full, start)[:2]
    idle = round_with(idle_step, ("emitted", "verified"))

    if rest.lasting is not None:
        pair = (target, drafter, accept, params)
        idle = lambda carry: idle_steps(*pair, *carry, most=most, eos_id=eos_id)  # noqa: E731

    # A loop with two inner loops, for rounds without drafts and for full ones. XLA would copy the
    # caches of a conditional.
    def both(carry):
        rests = lambda carry: resting(rest, carry[0])  # noqa: E731
        carry = jax.lax.while_loop(lambda c: running(c) & rests(c), idle, carry)
        return jax.lax.while_loop(lambda c: running(c) & ~rests(c), full, carry)

    return jax.lax.while_loop(running, both, start)[:2]


_idle, _step = _jit(idle_step), _jit(speculative_step, static_argnames="verify_widths")
_resting = jax.jit(resting, static_argnums=0)


def stream(
    target: LM,
    drafter: Drafter,
    accept: Accept,
    params: ModelParams,
    state: DecodeState,
    *,
    eos_id: EosId = None,
    verify_widths: Widths = None,
) -> Iterator[tuple[DecodeState, StepInfo]]:
    """The rounds of ``generate``, one at a time from the host: for showing text as it is written.

    The tokens are those of ``generate``. Yields the state after each round (valid until the next
    round, which reuses its buffers) and the ``StepInfo`` of the round.

    Raises:
        UserError: a rule that does not take such drafts, or a state of another drafter.
        NonFiniteLogits: names row and round, right after the round.
        UserError: a row got no token in a round.
    """
    check_kinds(target=target, params=params)
    check_state(drafter, accept, state)
    stop, widths = outcome.stop_ids(eos_id), verify_widths and tuple(verify_widths)
    pair, rest = (target, drafter, accept, params), drafter.rare.rest
    while not bool(state.done.all()):
        if rest is not None and bool(_resting(rest, state)):
            state, info = _idle(*pair, state, eos_id=stop)
        else:
            state, info = _step(*pair, state, eos_id=stop, verify_widths=widths)
        check(state)
        yield state, info


def autoregressive(
    target: LM, params: ModelParams, state: DecodeState, *, max_steps: int, eos_id: EosId = None
) -> DecodeState:
    """Plain decoding, one token per pass: the reference output, and the baseline of speed-ups.

    ``state`` comes from ``prefill`` (any drafter) and is donated. The drafter's part of it is not
    updated, so the result must not be passed to ``generate``. Noise is keyed by position, as in the
    rule ``match``.
    """
    check_kinds(target=target, params=params, state=state)
    return _autoregressive(target, params, state, jnp.asarray(max_steps), outcome.stop_ids(eos_id))


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(2,))
def _autoregressive(target, params, state, max_steps, eos_id):
    def running(carry):
        state, step = carry
        return (step < max_steps) & ~state.done.all()

    def body(carry):
        state, step = carry
        pending = step_lib.context_of(state).pending
        out, block = target.apply(params.target, pending[:, None], state.cache)
        maps, vocab = state.sampling.maps, target.vocab_size
        text = logit_maps.read(maps, state.tokens, state.length, vocab)
        logits = logit_maps.mapped(maps, text, out.logits)
        next_one = jnp.zeros((1,), jnp.int32)
        keys = RowKeys(state.keys, state.round, state.length).at_position(next_one)
        token = jax.lax.cond(
            jnp.all(state.sampling.greedy | state.done),
            lambda: sampling_lib.argmax(logits),
            lambda: sampling_lib.draw_rows(keys, outcome.target_probs(logits, state.sampling)),
        )
        failed = ~jnp.isfinite(logits.max(-1))[:, 0] & ~state.done
        batch = token.shape[0]
        verdict = Verdict(token, jnp.ones((batch,), jnp.int32), jnp.zeros((batch, 0), jnp.int32))
        verdict, ended = outcome.cut(verdict, state, eos_id)
        verdict = outcome.withdraw(verdict, failed)
        cache = target.commit(state.cache, block, verdict.count)
        logprobs = outcome.log_probs(state, verdict, out.logits, logits)
        state = outcome.advance(state, verdict, ended, failed, logprobs)
        return state.replace(cache=cache), step + 1

    return jax.lax.while_loop(running, body, (state, jnp.zeros((), jnp.int32)))[0]


def check(state: DecodeState | Beams) -> None:
    """Raises the errors that the loops have recorded, with the row and the round.

    ``state`` is that of the loops, or the result of ``beam_search``.

    Raises:
        NonFiniteLogits: a model gave NaN or infinite logits.
        UserError: a row that was neither done nor at its limit got no token in a round.
    """
    failed = np.asarray(state.failed)
    if (failed >= 0).any():
        row = int(np.argmax(failed >= 0))
        raise NonFiniteLogits(
            f"NaN or infinite logits in row {row}, round {failed[row]}; "
            "check the weights and the precision of the target and of the draft model"
        )
    if (failed < -1).any():
        row = int(np.argmax(failed < -1))
        raise UserError(
            f"row {row} got no token in round {-2 - failed[row]}, and was neither done nor at its "
            "limit; every verdict of a rule must have at least one token, the target's own"
        )


def logprobs(state: DecodeState, lengths: Sequence[int]) -> list[list[float]]:
    """The log-probability of each new token of each row, by the target's own logits.

    Raises UserError for a state that was prefilled without ``logprobs``, and as ``check`` does.
    """
    check(state)
    if state.logprobs is None:
        raise UserError("the state has no logprobs; prefill it with logprobs=True")
    return _new(state.logprobs, state, lengths)


def outputs(state: DecodeState, lengths: Sequence[int]) -> list[list[int]]:
    """The new tokens of each row, without the prompt (``lengths`` tokens).

    Raises as ``check`` does.
    """
    check(state)
    return _new(state.tokens, state, lengths)


def _new(values: jax.Array, state: DecodeState, lengths: Sequence[int]) -> list[list]:
    """Of values [B,S] of each token those of the new ones."""
    rows, end = np.asarray(values), np.asarray(state.length)
    return [row[int(lengths[b]) : end[b]].tolist() for b, row in enumerate(rows)]
