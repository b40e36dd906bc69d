"""Jobs and methods, and passes: decoding all prompts of a job once, timed.

Only the decode loop is timed. Prefill, compilation and transfers are outside, for plain decoding
and for methods, and are reported separately.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import decode, rng, sampling, sharding
from specjax.bench import metrics
from specjax.drafters import none
from specjax.tree import Widths
from specjax.types import LM, Accept, DecodeState, Drafter, ModelParams, Records

# New tokens of a brief pass. It compiles the programs and touches their memory: with memory that
# was never touched, the first rounds of a program are several times slower.
BRIEF_TOKENS = 4


class Method(NamedTuple):
    """A drafter and a rule to measure."""

    name: str
    drafter: Drafter
    accept: Accept
    params: ModelParams
    warm: bool = False  # whether it learns from other prompts before it is measured

    def pair(self, target: LM) -> tuple[LM, Drafter, Accept, ModelParams]:
        """The first arguments of the loops."""
        return target, self.drafter, self.accept, self.params


class Job(NamedTuple):
    """The model, prompts and settings with which all methods are measured."""

    target: LM
    params: Any
    prompts: Sequence[Sequence[int]]
    settings: dict  # arguments of sampling.make_sampling
    batch_size: int
    max_new_tokens: int
    eos_id: tuple[int, ...]
    seed: int = 0
    repeats: int = 1
    name: str | None = None  # of the prompt set
    categories: Sequence[str | None] = ()  # of the prompts
    spell: Callable[[list[int]], str] | None = None  # token ids to text
    verify_widths: Widths = None  # as in ``step.speculative_step``
    # The rows are divided among its devices; parameters are those of ``sharding.place``. None: one.
    mesh: Mesh | None = None

    @property
    def width(self) -> int:
        """The length of the longest prompt."""
        return max(map(len, self.prompts))


class Pass(NamedTuple):
    """One run over all prompts. Lists have one entry per prompt."""

    outputs: list[list[int]]
    counts: list[metrics.Counts]  # empty for plain decoding
    emitted: list[list[int]]  # tokens of every round
    seconds: list[float]  # in the compiled loop, of the prompt's batch
    # From the prompt's batch to its tokens on the host: prefill, loop, transfers.
    walls: list[float]
    # Seconds of all batches together.
    prefill: float
    loop: float
    host: float  # around the compiled programs: packing, dispatch, fetching tokens and records
    loops: int  # iterations of the compiled loop
    # Iterations of the compiled loop that verified so many tokens; the keys are numbers as text.
    widths: dict[str, int] = {}  # noqa: RUF012  (never mutated)
    # Seconds of "step", or of "draft" and "verify".
    costs: dict[str, float] = {}  # noqa: RUF012  (never mutated)

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return sum(map(len, self.outputs))

    def plus(self, other: Pass) -> Pass:
        """Both as one pass, without costs: lists one after the other, and sums of seconds."""
        pairs: Any = zip(self[:9], other[:9], strict=True)
        widths = dict(Counter(self.widths) + Counter(other.widths))
        return Pass(*(a + b for a, b in pairs), widths=widths)


def cache_bytes(job: Job, slots: int) -> int:
    """Bytes of the target's cache for all rows of a batch, with so many tokens each."""
    cache = jax.eval_shape(lambda: job.target.init_cache(job.batch_size, slots))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


NOTHING = Pass([], [], [], [], [], 0.0, 0.0, 0.0, 0)
Batch = tuple[list[int], list[list[int]]]  # row numbers, prompts


def batches(job: Job) -> Iterator[Batch]:
    """(row numbers, prompts) of each batch.

    The last batch is filled up with rows of number -1, which are finished from the start.
    """
    for start in range(0, len(job.prompts), job.batch_size):
        rows = list(range(start, min(start + job.batch_size, len(job.prompts))))
        rows += [-1] * (job.batch_size - len(rows))
        yield rows, [list(job.prompts[max(r, 0)]) for r in rows]


def begin(
    job: Job, drafter: Drafter, params: ModelParams, rows, prompts, *, brief: bool = False
) -> DecodeState:
    """The state before the first round.

    ``brief`` stops every row after ``BRIEF_TOKENS``: enough to compile and to warm up.
    """
    packed, lengths = decode.pack_prompts(prompts, job.width)
    most = min(BRIEF_TOKENS, job.max_new_tokens) if brief else job.max_new_tokens
    limit = lengths + jnp.asarray(np.where(np.asarray(rows) < 0, 0, most), jnp.int32)
    keys = rng.row_keys(job.seed, [r if r >= 0 else len(job.prompts) for r in rows])
    slots, how = job.width + job.max_new_tokens, sampling.make_sampling(len(rows), **job.settings)
    return sharding.loops(job.mesh).prefill(
        job.target, drafter, params, packed, lengths, keys, max_len=slots, limit=limit, sampling=how
    )


def drafter_and_params(job: Job, method: Method | None) -> tuple[Drafter, ModelParams]:
    """The drafter of a method and its parameters; for plain decoding (None) the drafter none."""
    if method is None:
        return none.make(job.target), ModelParams(job.params)
    return method.drafter, method.params


def run_pass(job: Job, method: Method | None, *, brief: bool = False) -> Pass:
    """Decodes all prompts with ``method``, or plainly if it is None. Raises NonFiniteLogits.

    ``brief`` decodes a few tokens of the first batch: that compiles all programs.
    """
    result = NOTHING
    for rows, prompts in batches(job):
        result = result.plus(run_batch(job, method, rows, prompts, brief=brief))
        if brief:
            break
    return result


def run_batch(
    job: Job,
    method: Method | None,
    rows: list[int],
    prompts: list[list[int]],
    *,
    brief: bool = False,
) -> Pass:
    """The pass over one batch. Raises NonFiniteLogits."""
    drafter, params = drafter_and_params(job, method)
    times = [time.perf_counter()]
    state = jax.block_until_ready(begin(job, drafter, params, rows, prompts, brief=brief))
    times.append(time.perf_counter())
    state, records = _decode(job, method, state)
    jax.block_until_ready(state.tokens)
    times.append(time.perf_counter())
    state, records = sharding.on_host(state), sharding.fetch(records)
    decode.check(state)
    outputs = decode.outputs(state, [len(p) for p in prompts])
    times.append(time.perf_counter())
    real = [i for i, r in enumerate(rows) if r >= 0]
    if records is None:
        emitted, counts = [[1] * len(outputs[i]) for i in real], []
        loops, widths = max(map(len, outputs)), {}
    else:
        single = [[i == j for j in range(len(rows))] for i in real]
        counts = [metrics.count(records, only, drafter.longest) for only in single]
        emitted = [[int(n) for n in records.emitted[:, i] if n] for i in real]
        loops = int(records.emitted.any(1).sum())
        # All rows of a round verify the same number of tokens; a finished row has 0.
        verified = records.verified.max(1)[:loops].tolist()
        widths = {str(width): count for width, count in Counter(verified).items()}
    prefill, loop, host = sharding.slowest(np.diff(times).tolist())
    return Pass(
        outputs=[outputs[i] for i in real],
        counts=counts,
        emitted=emitted,
        seconds=[loop] * len(real),
        walls=[prefill + loop + host] * len(real),
        prefill=prefill,
        loop=loop,
        host=host,
        loops=loops,
        widths=widths,
    )


@overload
def one_part(job: Job, method: Method) -> tuple[Job, Method]: ...
@overload
def one_part(job: Job, method: Method | None) -> tuple[Job, Method | None]: ...
def one_part(job: Job, method: Method | None) -> tuple[Job, Method | None]:
    """Both on the devices of one part of the rows, for what is measured or shown of one part."""
    if job.mesh is None:
        return job, method
    mesh, params = sharding.first_part(job.mesh, job.params)
    if method is not None:
        _, draft = sharding.first_part(job.mesh, method.params.draft)
        method = method._replace(params=ModelParams(params, draft))
    rows = max(1, job.batch_size // job.mesh.shape[sharding.DATA])
    return job._replace(mesh=mesh, params=params, batch_size=rows), method


def _decode(
    job: Job, method: Method | None, state: DecodeState
) -> tuple[DecodeState, Records | None]:
    """Decodes a batch; the records are None for plain decoding. ``state`` is donated."""
    if method is not None:
        return generate(job, method, state)
    loops, most = sharding.loops(job.mesh), job.max_new_tokens
    given = job.target, ModelParams(job.params), state
    return loops.autoregressive(*given, max_steps=most, eos_id=job.eos_id), None


def generate(job: Job, method: Method, state: DecodeState) -> tuple[DecodeState, Records]:
    """Decodes a batch with a method; ``state`` is donated."""
    loops, most = sharding.loops(job.mesh), job.max_new_tokens
    how = {"eos_id": job.eos_id, "verify_widths": job.verify_widths}
    return loops.generate(*method.pair(job.target), state, max_steps=most, **how)


def teach(job: Job, method: Method, prompts: Sequence[Sequence[int]]) -> Method:
    """The method after it decoded other prompts and learned from them, if it is warm.

    Untimed. It learns no more after that: no measured prompt gains from another one, and their
    order does not matter.
    """
    learn = method.drafter.rare.learn
    if not method.warm or learn is None:
        return method
    # The seeds of measured passes are job.seed .. job.seed + job.repeats - 1.
    other = job._replace(prompts=prompts, seed=job.seed + job.repeats)
    for rows, ids in batches(other):
        state = begin(other, method.drafter, method.params, rows, ids)
        state, _ = _decode(other, method, state)
        state = sharding.on_host(state)
        decode.check(state)
        if job.mesh is not None:
            state = state.replace(draft=sharding.fetch(state.draft))
        draft = learn(method.params, state, [len(i) for i in ids])
        if job.mesh is not None:
            draft = sharding.place_draft(job.mesh, draft)
        method = method._replace(params=method.params._replace(draft=draft))
    return method


def to_json(one: Pass) -> dict:
    """A pass as plain JSON data."""
    counts = [
        {key: np.asarray(value).tolist() for key, value in each._asdict().items()}
        for each in one.counts
    ]
    return one._asdict() | {"counts": counts}


def from_json(value: dict) -> Pass:
    """The pass that ``to_json`` turned into ``value``."""
    counts = [
        metrics.Counts(**each | {key: np.array(each[key], int) for key in ("tested", "passed")})
        for each in value["counts"]
    ]
    fields: dict[str, Any] = value | {"counts": counts}
    return Pass(**fields)
