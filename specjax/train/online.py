"""Online speculative decoding: a drafter learns from the target's corrections between requests.

Liu et al. 2023 (2310.07177). Requests are decoded in batches. The texts of the last I of them are
kept in a ring (``Ring``), and after every I requests one optimiser step is made on them: a
divergence from the target's distribution to the drafter's, at the places where the target rejected
the draft. Both distributions are computed again, by one pass of each over the ring: only token ids
are stored, and drafters that read the target's features get them from the same pass.

Parameters change between batches and never within one: a round accepts a token by the probabilities
that the token was drawn from. Given the texts before it, a request is decoded with fixed
parameters, so it has the lossless class of its rule, whatever the updates did.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import decode
from specjax.bench import metrics, passes
from specjax.bench.passes import Job, Method
from specjax.errors import UserError
from specjax.train import evaluate, objectives, update
from specjax.train.objectives import Loss
from specjax.train.optimise import Optimiser
from specjax.train.settings import OnlineKeys
from specjax.types import LM, Array, Batch, Drafter, ModelParams, Records

_NOTHING = (
    "drafter {} has no parameters that a loss trains; take a draft model or heads, such as "
    "draft_model, medusa or eagle"
)


def loss_of(
    target: LM,
    drafter: Drafter,
    size: int,
    *,
    temperature: float = 1.0,
    keys: Mapping[str, Any] | None = None,
) -> Loss:
    """The loss of a drafter on texts of at most ``size`` tokens.

    A drafter that is a language model is distilled at ``temperature``, that of decoding. Others
    have their own loss, whose defaults are here: no cross-entropy with the text, the divergence
    alone, no noise, and as many steps as a draft has. ``keys`` are keys of the loss.

    Raises UserError for a drafter without trained parameters, and for unknown keys.
    """
    training, keys = drafter.training, dict(keys or {})
    if training is not None and training.model is not None:
        make = objectives.distill_loss
        objectives.check_loss_keys(keys, objectives.keywords(make), drafter.name)
        return make(target, training.model, **{"temperature": temperature, **keys})
    if training is None or training.loss is None:
        raise UserError(_NOTHING.format(drafter.name))
    # A stream has no number of steps, and so nothing that falls with them; the batches are small.
    falling = {objectives.RUN_STEPS, "fall", "base", objectives.REMAT}
    known = objectives.keywords(training.loss).keys() - falling
    objectives.check_loss_keys(keys, known, drafter.name)
    usual = objectives.QUIET | {
        "ce": 0.0,
        "teacher": 1.0,
        "steps": drafter.longest,
        "places": size,
        "keep": 1.0,
    }
    chosen = {name: value for name, value in usual.items() if name in known}
    return functools.partial(training.loss, **chosen | keys)


class State(struct.PyTreeNode):
    """Everything that the next request and the next update depend on; a checkpoint holds it."""

    train: dict[str, Any]  # of ``update.fresh``: parameters in float32, optimiser state, updates
    ring: Ring
    requests: Array  # i32[] how many requests have been decoded


class Learner(NamedTuple):
    """The compiled update of a drafter."""

    options: OnlineKeys
    begin: Callable[[], State]
    # (train state, target params, Ring) -> (train state, metrics); donates the first.
    advance: Callable[..., tuple[dict[str, Any], dict[str, Any]]]
    # train state -> the drafter's parameters, in the precision in which they decode.
    params: Callable[[dict[str, Any]], Any]


def learner(
    job: Job, method: Method, loss: Loss, optimiser: Optimiser, options: OnlineKeys
) -> Learner:
    """Compiles the update, so that no request waits for that.

    Raises UserError for options that do not fit, for a loss that does not take such texts, and for
    parameters that are no floating-point arrays.
    """
    options.check_stream(job.batch_size, len(job.prompts))
    draft = method.params.draft
    if not jax.tree.leaves(draft):
        raise UserError(_NOTHING.format(method.drafter.name))
    if not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(draft)):
        raise UserError(f"drafter {method.drafter.name} has parameters that no loss can train")
    size = job.width + job.max_new_tokens

    def begin() -> State:
        train = update.fresh(draft, optimiser, ema=0.0)
        return State(train, empty(options.rows, size), jnp.zeros((), jnp.int32))

    step = update.step(loss, optimiser, options.accumulate, ema=0.0)
    key = jax.random.key(job.seed)

    def advance(train: dict[str, Any], target_params: Any, ring: Ring):
        return step(train, target_params, batch_of(ring, options.positions), key)

    def params(train: dict[str, Any]) -> Any:
        # The same arrays where decoding is in float32.
        return jax.tree.map(lambda new, old: new.astype(old.dtype), train["params"], draft)

    state = jax.eval_shape(begin)
    compiled = jax.jit(advance, donate_argnums=0).lower(state.train, job.params, state.ring)
    return Learner(options, begin, compiled.compile() if options.learn else advance, params)


class Served(NamedTuple):
    """What a batch of requests gave; lists have one entry per request."""

    first: int  # the number of the first request
    outputs: list[list[int]]
    counts: list[metrics.Counts]
    wrong: list[int]  # wrong places
    seconds: float  # from the prompts of the batch to its tokens on the host
    updates: int  # made before the batch
    update: dict[str, float] | None  # loss and metrics of the update after the batch, "seconds" too


def serve(
    job: Job, method: Method, learner: Learner, state: State
) -> Iterator[tuple[State, Served]]:
    """Decodes the requests of the job from ``state.requests`` on, and updates the drafter.

    Yields the state after each batch. It is valid until the next batch, which reuses its buffers.
    The result is a function of ``state``: a stream that is continued from a stored state goes on
    with the same bits. Raises NonFiniteLogits, and UserError for a loss that is not finite.
    """
    start = int(state.requests)
    passes.run_pass(job, method, brief=True)  # compiles the programs
    for rows, prompts in passes.batches(job):
        if rows[0] < start:
            continue
        learnt = method._replace(params=ModelParams(job.params, learner.params(state.train)))
        began, updates = time.perf_counter(), int(state.train["step"])
        begun = passes.begin(job, learnt.drafter, learnt.params, rows, prompts)
        decoded, records = passes.generate(job, learnt, begun)
        lengths = [len(prompt) for prompt in prompts]
        outputs = decode.outputs(decoded, lengths)
        seconds = time.perf_counter() - began
        real = np.asarray(rows) >= 0
        ring, wrong = remember(
            *(state.ring, decoded.tokens, decoded.length, records),
            *(jnp.asarray(lengths, jnp.int32), jnp.asarray(real)),
            positions=learner.options.positions,
        )
        state = state.replace(ring=ring, requests=state.requests + int(real.sum()))
        changed = None
        if learner.options.learn and int(state.requests) % learner.options.every == 0:
            state, changed = _update(job, learner, state)
        depth = method.drafter.longest
        host, kept = jax.device_get(records), np.flatnonzero(real)
        counts = [metrics.count(host, np.arange(len(rows)) == i, depth) for i in kept]
        found = np.asarray(wrong)[kept].tolist()
        outputs = [outputs[i] for i in kept]
        yield state, Served(rows[0], outputs, counts, found, seconds, updates, changed)


def _update(job: Job, learner: Learner, state: State) -> tuple[State, dict[str, float]]:
    began = time.perf_counter()
    train, values = learner.advance(state.train, job.params, state.ring)
    jax.block_until_ready(train)
    seconds, state = time.perf_counter() - began, state.replace(train=train)
    values = evaluate.mean([jax.device_get(values)])
    if not np.isfinite(values["loss"]):
        raise UserError(
            f"the loss of update {int(train['step'])} is {values['loss']}; lower "
            "config.optimiser.learning_rate, or take another config.loss.divergence"
        )
    return state, {**{name: float(value) for name, value in values.items()}, "seconds": seconds}


class Places(NamedTuple):
    """The wrong places of texts: where a target corrected its drafter.

    A round ends by rejection where a draft token was tested and none was accepted: on a tree, where
    the last accepted node has children and all of them were rejected. The token that the target
    puts there is a correction, and its index in the text is a wrong place: the prediction that was
    wrong is the one made after the token before it. ``Batch.labelled`` has the same meaning. The
    token after a draft that was accepted to its end (the bonus token) is no correction, because no
    draft token was tested there.
    """

    wrong: Array  # bool[B,S]
    depth: Array  # i32[B,S] how many draft tokens were accepted before it in its round; else -1


def wrong_places(records: Records, starts: Array, size: int) -> Places:
    """The wrong places of the rows of a decode loop, from its counts.

    ``starts`` i32[B] are the lengths of the prompts, ``size`` is S. A rejection that a text does
    not contain, because it was cut before, has no place.
    """
    before = starts + jnp.cumsum(records.emitted, 0) - records.emitted  # i32[R,B]
    rejected = records.tested > records.accepted
    rejected &= records.emitted == records.accepted + 1
    place = jnp.where(rejected, before + records.accepted, size)
    rows = jnp.arange(starts.shape[0])
    wrong = jnp.zeros((starts.shape[0], size), bool).at[rows, place].set(True, mode="drop")
    depth = jnp.full(wrong.shape, -1, jnp.int32)
    return Places(wrong, depth.at[rows, place].set(records.accepted, mode="drop"))


class Ring(struct.PyTreeNode):
    """The texts of the last I requests, and which of their tokens are labels."""

    tokens: Array  # i32[I,S] 0 beyond the text
    labelled: Array  # bool[I,S]
    depths: Array  # i32[I,S] depth of the draft at a wrong place, -1 elsewhere
    newest: Array  # i32[] the row that is written next


def empty(rows: int, size: int) -> Ring:
    """A ring of ``rows`` texts of at most ``size`` tokens, without a label."""
    tokens = jnp.zeros((rows, size), jnp.int32)
    return Ring(tokens, tokens > 0, tokens - 1, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnames=("positions",), donate_argnums=(0,))
def remember(
    ring: Ring,
    tokens: Array,
    length: Array,
    records: Records,
    starts: Array,
    real: Array,
    *,
    positions: str = "wrong",
) -> tuple[Ring, Array]:
    """Puts the texts of a batch into the ring; also returns the number of wrong places i32[B].

    ``tokens``, ``length`` and ``records`` are those of a decode loop, ``starts`` i32[B] the lengths
    of the prompts; rows that are not ``real`` bool[B] only fill up the batch. Labels are the wrong
    places, or with ``positions`` "emitted" all new tokens. A batch has at most as many rows as the
    ring.
    """
    rows, size = ring.tokens.shape
    places = wrong_places(records, starts, size)
    index = jnp.arange(size)
    inside = index < length[:, None]
    labelled = inside & (index >= starts[:, None]) if positions == "emitted" else places.wrong
    row = jnp.where(real, (ring.newest + jnp.cumsum(real) - 1) % rows, rows)
    put = lambda old, new: old.at[row].set(new, mode="drop")  # noqa: E731
    ring = Ring(
        put(ring.tokens, jnp.where(inside, tokens[:, :size], 0)),
        put(ring.labelled, labelled),
        put(ring.depths, places.depth),
        (ring.newest + real.sum()) % rows,
    )
    return ring, places.wrong.sum(-1)


def batch_of(ring: Ring, positions: str = "wrong") -> Batch:
    """The ring as text to train on. At a wrong place only the depth that was wrong learns."""
    depths = ring.depths if positions == "wrong" else None
    return Batch(ring.tokens, ring.labelled, depths=depths)
