"""The draft length of the batch with the most tokens per second: SmartSpec's goodput.

Liu et al. 2024 (2406.14066, sections 4 and 5; later TurboSpec). Before every round, the tokens that
all rows together are expected to emit with a draft of k tokens are divided by the time of such a
round, and the best k is taken, 0 among them. The tokens follow from the acceptance at each depth,
a mean of what the row's own rounds showed, in which later rounds count more, and of the acceptance
known before. The times are measured (``profile``), or two numbers. The acceptance rate alone cannot
choose: under load every verified token costs time.

Where the best length is 0 nothing more would be learned. So a draft is tried from time to time: as
soon as ``explore`` times the rounds without a draft have paid for it. With ``explore=0`` it never
is.

The length depends on all rows, so the noise of a row's drafts does too; its output law does not. On
a mesh, the rows of a device share one length.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.control import _counts
from specjax.control import costs as costs_lib
from specjax.control._types import Controller
from specjax.control.costs import Costs, Profile
from specjax.types import Context, Draft, Verdict

REFERENCE = """\
@misc{liu2024optimizing,
  title = {{Optimizing Speculative Decoding for Serving Large Language Models Using Goodput}},
  author = {Liu, Xiaoxuan and Daniel, Cade and Hu, Langxiang and Kwon, Woosuk and Li, Zhuohan and
            Mo, Xiangxi and Cheung, Alvin and Deng, Zhijie and Stoica, Ion and Zhang, Hao},
  year = {2024},
  eprint = {2406.14066},
  archiveprefix = {arXiv},
}"""

LIMITS = True


class State(struct.PyTreeNode):
    """What is kept from round to round."""

    times: jax.Array  # f32[B,A] of a round with each length, in rounds without a draft
    # f32[B,K] tokens that were accepted, and tested, at each depth; later ones count more.
    passed: jax.Array
    tested: jax.Array
    live: jax.Array  # bool[B] the rows that are not finished
    length: jax.Array  # i32[B] of the next draft, equal in all rows
    saved: jax.Array  # f32[B] what rounds without drafts have paid for a trial, equal in all rows


def make(
    *,
    profile: str = "",
    most: int = 8,
    draft: float = 0.1,
    verify: float = 0.05,
    acceptance: float = costs_lib.ACCEPTANCE,
    weight: float = 4.0,
    memory: float = 0.95,
    explore: float = 0.01,
) -> Controller:
    """The length with the most expected tokens per second.

    Args:
        profile: a file that mode bench wrote into profiles/ of its workdir; "": the next four keys.
        most: the longest draft.
        draft, verify: what drafting and verifying one more token costs, in units of a round without
            a draft.
        acceptance: the share of tokens that is accepted if those before were, as first assumed.
        weight: of the acceptance known before, in tested tokens.
        memory: how much a tested token counts against the next one.
        explore: the share of the time that is spent on trials while nothing is drafted.

    Raises:
        UserError: a number out of range, a profile that cannot be read or lacks the batch size.
    """
    _counts.positive("goodput's weight", weight)
    _counts.share("goodput's memory", memory)
    _counts.share("goodput's explore", explore)
    linear = costs_lib.linear(most, draft, verify, acceptance)
    return of_costs(costs_lib.read(profile) if profile else linear, weight, memory, explore)


def of_costs(
    known: Costs | Profile, weight: float = 4.0, memory: float = 0.95, explore: float = 0.01
) -> Controller:
    """The controller for these costs; see ``make``."""
    return Controller(
        "goodput",
        init=functools.partial(_init, known, weight),
        update=functools.partial(_update, known, memory, explore),
        limit=lambda state: state.length,
        shared=True,
    )


def _init(known: Costs | Profile, weight: float, context: Context) -> State:
    batch = len(context.length)
    costs = costs_lib.known_of(known, batch)
    rates = costs.each("acceptance", context)
    state = State(
        costs.each("times", context),
        weight * rates,
        jnp.full(rates.shape, weight, jnp.float32),
        jnp.ones((batch,), bool),
        jnp.zeros((batch,), jnp.int32),
        jnp.zeros((batch,), jnp.float32),
    )
    return state.replace(length=_spread(state, _choice(costs, state)[0]))


def _update(
    known: Costs | Profile,
    memory: float,
    explore: float,
    state: State,
    draft: Draft,
    verdict: Verdict,
) -> State:
    costs = costs_lib.known_of(known, len(verdict.count))
    drafted, accepted = _counts.drafted(draft)[:, None], _counts.accepted(verdict)[:, None]
    depth = jnp.arange(costs.longest)
    tested = depth < jnp.minimum(accepted + 1, drafted)
    keep = jnp.where(tested, memory, 1)
    state = state.replace(
        passed=(keep * state.passed + (tested & (depth < accepted))).astype(jnp.float32),
        tested=(keep * state.tested + tested).astype(jnp.float32),
        live=verdict.count > 0,
    )
    best, trial, price = _choice(costs, state)
    rests = best == 0
    saved = jnp.where(rests, state.saved[0] + explore, 0)
    tries = rests & (saved >= price) & (explore > 0)
    length = jnp.where(tries, trial, best)
    saved = jnp.where(tries, saved - price, saved)
    return state.replace(length=_spread(state, length), saved=_spread(state, saved))


def _choice(costs: Costs, state: State) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best length, the best one above 0, and what it costs beyond a round without a draft."""
    lengths = np.array(costs.lengths)
    live = state.live[:, None]
    times = (state.times * live).sum(0) / jnp.maximum(live.sum(), 1)
    rates = state.passed / state.tested
    # Expected tokens of each row with a draft of each length: the target's own, and the accepted.
    accepted = jnp.pad(jnp.cumsum(jnp.cumprod(rates, -1), -1), ((0, 0), (1, 0)))
    tokens = 1 + accepted[:, lengths]
    # Without a live row any length will do.
    rate = (tokens * live).sum(0) / jnp.maximum(times, 1e-6)
    best = jnp.argmax(rate)
    trial = 1 + jnp.argmax(rate[1:])
    lengths = jnp.asarray(lengths, jnp.int32)
    return lengths[best], lengths[trial], times[trial] - 1


def _spread(state: State, value: jax.Array) -> jax.Array:
    """The value in all rows."""
    return jnp.broadcast_to(value, state.length.shape).astype(
        state.length.dtype if jnp.issubdtype(value.dtype, jnp.integer) else jnp.float32
    )
