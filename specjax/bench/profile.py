"""Measures what rounds cost by draft length, and how much is accepted: the profile of a controller.

The controllers ``goodput``, ``bandit``, ``calibrated``, ``budget`` and ``ltd`` read it. Rounds with
a draft of every length run in the compiled decode loop, one length after the other in turns, on
prompts that are not measured afterwards. The median of the samples counts. A longer draft cannot
cost less, so times that are not in order are noise and replaced by their mean (isotonic
regression). Lookups have no draft in some rounds, so their costs are measured with drafts of
arbitrary tokens, which cost as much to verify, and without any; how often they have one is counted.
Acceptance is that of 64 rounds after each prompt. The time of a call with one round is subtracted:
the first round of a call touches memory that the others use again, in plain decoding too. A draft
model reads what was written while it rested before it drafts again: the time of a draft after a
rest, less that of a draft without one.

For ``ltd`` rounds are recorded too, each with trees of every depth, and its policies are fitted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import isotonic_regression

from specjax import control, decode, sharding, tree
from specjax.bench import metrics, passes, timing
from specjax.bench.passes import Job, Method, batches, begin, one_part
from specjax.control import Controller, calibrated, ltd
from specjax.control import costs as control_costs
from specjax.control._controller import FOREVER
from specjax.control.costs import ACCEPTANCE, Costs, Profile, RoundCosts
from specjax.control.fixed import Length
from specjax.drafters import _limited
from specjax.theory import calibration
from specjax.topology import dynamic
from specjax.types import Context, DecodeState, Draft

# Rounds of a sample: the most, and the least in which the time of a call does not count.
ROUNDS, FEW = 16, 4
# Samples of each length, after one that may compile: at least so many, at most so many, and in
# between until they took so many seconds. Rounds of small models take 0.1 ms: with few samples all
# of them would be taken in one moment of the machine. The median of five is right if two of them
# were taken while something else ran.
SAMPLES = (5, 100)
ENOUGH_SECONDS = 0.4
# Of the time of what was missed: samples, and calls of the loop without drafts before them.
MISSED_SAMPLES, RESTS = 21, 3
# Rounds of each prompt in which acceptance and confidences are recorded.
TEXT_ROUNDS = 64
# Rounds of all prompts together that are recorded for ``ltd``, each with a tree of every depth.
POLICY_ROUNDS = 400
# A key beside lengths: rounds in which a lookup finds nothing.
EMPTY = -1
# A rate is counted as if one more token had been tested, and accepted with this probability.
PRIOR = 0.5


class Forced(Length):
    """The state of a controller ``fixed`` that also says which drafts a lookup has."""

    drafts: jax.Array  # i32[B] one of DRAFTS
    deepest: jax.Array  # i32[B] the most levels of a tree whose length is a number of nodes


# Of a lookup: what it finds; arbitrary tokens in every round; none.
DRAFTS = FOUND, ALWAYS, NEVER = 0, 1, 2


class _Sample(NamedTuple):
    """One run of the loop."""

    seconds: float  # of a round
    counts: metrics.Counts
    # Of a lookup: the rows' rounds with a draft, and all of them. None: every round has one.
    found: tuple[int, int] | None


def by_nodes(text: str | Controller | None) -> bool:
    """Whether this controller needs the times by nodes of a tree."""
    controller = control.parse(text or "") if control.wants_profile(text) else None
    return controller is not None and controller.size is not None


def lengths_of(longest: int) -> tuple[int, ...]:
    """The draft lengths that are measured for a drafter whose longest draft is ``longest``."""
    return tuple(sorted({0, *(n for n in control_costs.LENGTHS if n <= longest), longest}))


def measure(
    jobs: Sequence[Job],
    make: Callable[[str | Controller], Method],
    report: Callable[[str], None] = print,
    *,
    names: tuple[str, str],
    acceptance: bool = True,
    confidences: bool = False,
    nodes: bool = False,
    policies: bool = False,
) -> Profile:
    """The profile of a drafter; on a mesh, batch sizes are the rows of one device.

    Args:
        jobs: one for each batch size and kind of sampling, with the prompts to measure on.
        make: the method with a controller, as ``control.parse`` reads it.
        report: is called with a status message before every job.
        names: of the target and of the drafter.
        acceptance: False: the profile has what is assumed in the place of what was measured.
        confidences: whether to fit a temperature to the drafter's confidence at each depth.
        nodes: whether the lengths are numbers of nodes, whose acceptance is not measured.
        policies: with ``nodes``, whether to fit the policies of ``ltd``.
    """
    found: dict[int, dict[bool, RoundCosts]] = {}
    plain = make("fixed:0").drafter
    lengths = control_costs.sizes(plain.nodes) if nodes else lengths_of(plain.longest)
    method = _with_drafts(make(_forced(lengths[-1], nodes)), nodes)
    if known := method.drafter.rare.lengths:
        # A controller that chooses from these lengths verifies the same widths.
        rare = method.drafter.rare._replace(lengths=known + lengths)
        method = method._replace(drafter=method.drafter._replace(rare=rare))
    for job in jobs:
        greedy = not job.settings.get("temperature", 1.0)
        # Those of one device: its rows choose their lengths together.
        rows = job.batch_size // (1 if job.mesh is None else job.mesh.shape[sharding.DATA])
        report(f"profile: batch {job.batch_size}, {'greedy' if greedy else 'sampled'}")
        own = _measured(job, method, lengths)
        if confidences:
            own = own._replace(heats=_heats(job, make, lengths[-1]))
        if policies:
            rounds = _rounds(job, make(ltd.recorder(plain.longest, plain.nodes)), lengths[1:])
            report(f"profile: fits the policies to {len(rounds.tokens)} rounds")
            times = _by_level(job, method, plain.longest)[:, None] + own.times[1:] - own.times[1]
            own = own._replace(policy=ltd.fit(rounds, np.maximum(times, 1.0), report))
        if acceptance and not nodes:
            rates, finds = _accepted(job, method, lengths[-1])
            own = own._replace(acceptance=rates, finds=finds)
        # If only greedy or only sampled rounds are measured, both kinds get the same costs.
        found.setdefault(rows, {True: own, False: own})[greedy] = own
    costs = {size: Costs(lengths, kinds[True], kinds[False]) for size, kinds in found.items()}
    unit = control_costs.NODES if nodes else control_costs.LEVELS
    return Profile(control_costs.device(), *names, costs, unit)


def _measured(job: Job, method: Method, lengths: tuple[int, ...]) -> RoundCosts:
    """The times. The loop is compiled once: what the rounds differ in are numbers in its state."""
    state = _begun(job, method)
    lookup = isinstance(state.draft, _limited.State)
    # Each cell is a length; for lookups also rounds of the longest one in which nothing is found.
    always = state.replace(draft=with_drafts(state.draft, ALWAYS)) if lookup else state
    cells = {length: (method, always, length) for length in lengths}
    if lookup:
        never = state.replace(draft=with_drafts(state.draft, NEVER))
        cells |= {EMPTY: (method, never, lengths[-1])}
    seconds = _seconds(job, cells)
    order = [0, EMPTY, *lengths[1:]] if lookup else lengths
    times = [seconds[cell] / seconds[0] for cell in order]
    # The first is the unit.
    fixed = np.where(np.arange(len(times)), 1.0, 1e6)
    times = np.maximum(isotonic_regression(times, weights=fixed).x, 1.0).tolist()
    empty = times.pop(1) if lookup else 1.0
    missed = 0.0 if lookup else _missed(job, method, lengths[1]) / seconds[0]
    return RoundCosts(tuple(times), (ACCEPTANCE,) * lengths[-1], empty=empty, missed=missed)


def _accepted(job: Job, method: Method, length: int) -> tuple[tuple[float, ...], float]:
    """The acceptance at each depth, and how often there is a draft, in rounds after all prompts."""
    samples = []
    for batch in batches(job):
        state = begin(job, method.drafter, method.params, *batch)
        samples.append(_run(job, method, state, length, TEXT_ROUNDS - 1))
    passed, tested = (sum(getattr(x.counts, n) for x in samples) for n in ("passed", "tested"))
    rates = np.clip((passed + PRIOR) / (tested + 1), 0, 1)
    looked = [sample.found for sample in samples if sample.found is not None]
    if not looked:
        return tuple(rates.tolist()), 1.0
    found, rounds = np.sum(looked, 0)
    return tuple(rates.tolist()), float((found + PRIOR) / (rounds + 1))


def _begun(job: Job, method: Method) -> DecodeState:
    """The state before the first round of the first batch."""
    first = next(batches(job))
    return jax.block_until_ready(begin(job, method.drafter, method.params, *first))


def _seconds(job: Job, cells: dict[int, tuple[Method, DecodeState, int]]) -> dict[int, float]:
    """The time of a round of each cell, whose runs are taken in turns."""
    for cell in cells.values():  # may compile
        _run(job, *cell, FEW)
    one = _run(job, *cells[0], FEW).seconds
    rounds = min(max(math.ceil(ENOUGH_SECONDS / SAMPLES[0] / one), FEW), ROUNDS)
    runs: dict[int, list[float]] = {cell: [] for cell in cells}
    while lacking := [cell for cell, own in runs.items() if not _enough(own, rounds)]:
        for cell in lacking:
            runs[cell].append(_run(job, *cells[cell], rounds).seconds)
    return {cell: statistics.median(own) for cell, own in runs.items()}


def _by_level(job: Job, method: Method, depth: int) -> np.ndarray:
    """f64[D]: the time of a round with a tree of 1, ..., D levels, of which one node is verified.

    In units of a round without a draft.
    """
    state = _begun(job, method)

    def of(levels: int) -> DecodeState:
        return state.replace(draft=_changed(state.draft, Forced, "deepest", levels))

    cells = {level: (method, of(level), min(level, 1)) for level in range(depth + 1)}
    seconds = _seconds(job, cells)
    return isotonic_regression([seconds[level] / seconds[0] for level in range(1, depth + 1)]).x


def _missed(job: Job, method: Method, length: int) -> float:
    """Seconds that the next draft of this length takes longer, per round without a draft."""
    if method.drafter.rare.rest is None:
        return 0.0
    job, method = one_part(job, method)
    state = _begun(job, method)
    rested = state.replace(draft=with_length(state.draft, 0))
    for _ in range(RESTS):
        rested, _ = _generate(job, method, jax.tree.map(jnp.copy, rested), ROUNDS)
    rounds = int((rested.length - state.length).max())
    clock = timing.Clock(timing.of_draft(method.drafter).loop, 1)
    times: tuple[list[float], ...] = [], []
    for _ in range(1 + MISSED_SAMPLES):
        for each, own in zip((rested, state), times, strict=True):
            drafting = each.replace(draft=with_length(each.draft, length))
            own.append(clock.sample(method.params, drafting))
    later, first = sharding.slowest([statistics.median(own[1:]) for own in times])
    return max(later - first, 0.0) / max(rounds, 1)


def _forced(length: int, nodes: bool = False) -> Controller:
    """The controller ``fixed`` with the state ``Forced``; its length may be a number of nodes."""

    def init(context: Context) -> Forced:
        rows = context.length.shape
        return Forced(*(jnp.full(rows, value, jnp.int32) for value in (length, FOUND, FOREVER)))

    made = control.parse(f"fixed:{length}")
    assert made is not None
    made = made._replace(init=init)
    if not nodes:
        return made
    return made._replace(limit=_any_levels, size=_so_many, most_nodes=length, lengths=())


def _any_levels(state: Forced) -> jax.Array:
    return jnp.where(state.levels > 0, state.deepest, 0)


def _so_many(state: Forced, draft: Draft, log_prob: Any) -> tuple[jax.Array, jax.Array, Forced]:
    chance = jnp.zeros(draft.valid.shape) if log_prob is None else log_prob
    order, _ = dynamic.by_chance(chance, draft.parents, draft.valid)
    return order, state.levels, state


def _with_drafts(method: Method, nodes: bool = False) -> Method:
    """The method; if it is a lookup, it has the drafts that its controller's state says."""
    drafter = method.drafter

    def propose(params: Any, keys: Any, context: Any, state: Any) -> tuple[Draft, Any]:
        draft, state = drafter.propose(params, keys, context, state)
        if not isinstance(state, _limited.State):
            return draft, state
        levels, drafts = state.control.levels[:, None], state.control.drafts[:, None]
        batch, size = draft.tokens.shape
        place = tree.depths(None if nodes else draft.parents, batch, size)
        tokens = jnp.where(drafts == FOUND, draft.tokens, jnp.maximum(draft.tokens, 0))
        valid = jnp.where(drafts == FOUND, draft.valid, (drafts == ALWAYS) & (place < levels))
        return draft.replace(tokens=tokens, valid=valid), state

    return method._replace(drafter=drafter._replace(propose=propose))


def _enough(seconds: Sequence[float], rounds: int) -> bool:
    least, most = SAMPLES
    return len(seconds) >= (least if rounds * sum(seconds) >= ENOUGH_SECONDS else most)


def _heats(job: Job, make: Callable[..., Method], longest: int) -> tuple[float, ...]:
    """The temperatures of the confidences, from the rounds of all prompts of the job."""
    method = make(calibrated.recorder(longest, TEXT_ROUNDS))
    sure, accepted = [], []
    for batch in batches(job):
        state = begin(job, method.drafter, method.params, *batch)
        after, _ = _generate(job, method, state, TEXT_ROUNDS)
        for own in tree.of_type(after.draft, calibrated.Recorded):
            shares, kept, rounds = sharding.fetch((own.confidences, own.accepted, own.rounds))
            shares, cut = shares.copy(), sharding.fetch(after.done) & (rounds > 0)
            # The limit has cut the last round of these rows: what follows was not rejected.
            for row, last in zip(np.flatnonzero(cut), rounds[cut] - 1, strict=True):
                shares[row, last, kept[row, last] :] = -1
            sure.append(shares[kept >= 0])
            accepted.append(kept[kept >= 0])
    heats = calibration.fit(np.concatenate(sure), np.concatenate(accepted))
    return tuple(heats.tolist())


def _rounds(job: Job, method: Method, sizes: Sequence[int]) -> ltd.Rounds:
    """Rounds of all prompts of the job, each played from one state with trees of every depth.

    A size would have brought the accepted nodes within it; with the rule "traversal", whose draws
    depend on the whole tree, the mean alone is right. The last round of a text may have one more.
    """
    depth, rows = method.drafter.longest, max(len(job.prompts), 1)
    found: list[ltd.Rounds] = []
    for batch in batches(job):
        state = begin(job, method.drafter, method.params, *batch)
        for _ in range(-(-POLICY_ROUNDS // rows)):
            before, tried = state, []
            # The next state is that of the tree of one level: more places of a text are seen.
            for levels in range(depth, 0, -1):
                own = jax.tree.map(jnp.copy, before)
                draft = _changed(own.draft, ltd.Recorded, "deepest", levels)
                state, _ = _generate(job, method, own.replace(draft=draft), 1)
                seen = tree.of_type(state.draft, ltd.Recorded)[0]
                tried.append(sharding.fetch((seen.candidates, seen.nodes, seen.accepted)))
            live = np.asarray(sharding.fetch(state.length) > sharding.fetch(before.length))
            if not live.any():
                break
            candidates, nodes, accepted = (
                np.stack(each[::-1], 1)[live] for each in zip(*tried, strict=True)
            )
            tokens = 1 + accepted.cumsum(-1)[..., np.array(sizes) - 1]
            found.append(ltd.Rounds(candidates[:, -1], nodes, tokens.astype(np.float32)))
    return ltd.Rounds(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _run(job: Job, method: Method, state: DecodeState, length: int, rounds=ROUNDS) -> _Sample:
    """Rounds with drafts of this length, after the state; it is copied, as a loop takes its own."""
    times = []
    for most in (1, 1 + rounds):
        own = jax.tree.map(jnp.copy, state)
        own = jax.block_until_ready(own.replace(draft=with_length(own.draft, length)))
        began = time.perf_counter()
        after, records = _generate(job, method, own, most)
        times.append(time.perf_counter() - began)
    times = sharding.slowest(times)
    decode.check(sharding.on_host(after))
    records = sharding.fetch(records)
    drafted, emitted = np.asarray(records.drafted, int), np.asarray(records.emitted, int)
    counts = metrics.count(records, [True] * drafted.shape[1], method.drafter.longest)
    live = emitted > 0
    found = int(((drafted > 0) & live).sum()), int(live.sum())
    lookup = isinstance(state.draft, _limited.State)
    # Not below a tenth of what was measured, however noisy the two are. A draft may end all rows in
    # the first round.
    more = int((emitted.any(1) | drafted.any(1)).sum()) - 1
    seconds = max(times[1] - times[0], times[1] / 10) / more if more > 0 else times[1]
    return _Sample(seconds, counts, found if lookup else None)


def _generate(job: Job, method: Method, state: DecodeState, rounds: int) -> tuple:
    """At most so many rounds; the state and the records of the loop."""
    job = job._replace(max_new_tokens=rounds, eos_id=())
    return jax.block_until_ready(passes.generate(job, method, state))


def with_length(draft_state: Any, length: int) -> Any:
    """A drafter's state with another length in its controllers ``fixed``."""
    return _changed(draft_state, Length, "levels", length)


def with_drafts(draft_state: Any, drafts: int) -> Any:
    """A lookup's state with other drafts, one of ``DRAFTS``."""
    return _changed(draft_state, Forced, "drafts", drafts)


def _changed(draft_state: Any, kind: type, field: str, value: int) -> Any:
    def change(x: Any) -> Any:
        if not isinstance(x, kind):
            return x
        return x.replace(**{field: jnp.full_like(getattr(x, field), value)})

    return jax.tree.map(change, draft_state, is_leaf=lambda x: isinstance(x, kind))
