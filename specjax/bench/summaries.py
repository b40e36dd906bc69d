"""The rows of results.json from measured passes.

They hold medians and spreads, predicted speed-up and system efficiency, the shares of the time, the
result of the lossless check, and the overlap of target and draft. The counts (tokens, rounds, and
what follows from them: tau, alpha) of a sampled row are pooled over all timed passes, as its speed
is; greedy passes are equal, and their row has the counts of one. Standard errors and intervals are
over prompts (``specjax.bench.uncertainty``).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from specjax import sharding, theory
from specjax.bench import (
    lossless,
    metrics,
    passes,
    proofs,
    results,
    token_traces,
    uncertainty,
)
from specjax.bench.measuring import Measured
from specjax.bench.overlap import overlap
from specjax.bench.passes import Job, Method, Pass, one_part
from specjax.theory import devices
from specjax.types import is_lossless


def measured_rows(
    job: Job, methods: Sequence[Method], measured: Measured, **options: Any
) -> list[dict]:
    """The rows of all methods: ``rows_of`` each, which has the ``options``."""
    every = zip(methods, measured.methods, strict=True)
    return [row for each in every for row in rows_of(job, *each, measured.plain, **options)]


def rows_of(
    job: Job,
    method: Method,
    runs: list[Pass],
    plain: list[Pass],
    *,
    check: bool = True,
    by_definition: bool = True,
    proven: Sequence[proofs.Proof] = (),
) -> list[dict]:
    """The row of a method, and one row per category of the prompts, if they have any.

    Args:
        job: what was measured.
        method, runs: a method, and its passes.
        plain: the passes of plain decoding.
        check: whether to check the outputs; sampled ones take a forward pass of the models.
        by_definition: whether to compute the overlap with ``check``; it takes one too. And of a
            lossy rule the distance from the target's law, which decodes sampled texts once more.
        proven: reports on the lossless class of drafters and rules that are not the package's.
    """
    row = _method_row(job, method, runs, plain)
    row["class_status"] = proofs.status(method.drafter, method.accept, job.target, proven)
    if check:
        row["lossless"] = _check(job, method, runs, plain)
        row["overlap"] = None
        if by_definition:
            texts = _texts(job, method, plain[0].outputs)
            row["overlap"] = overlap(texts, categories=job.categories, decode=job.spell)
        row |= _distance(job, method, runs, plain, by_definition)
        row["argmax_gap"] = _argmax_gap(job, method, runs, plain)
        row["width_gap"] = _width_gap(job, method, runs)
    categories = dict.fromkeys(c for c in job.categories if c is not None)
    return [row, *(_category_row(job, method, runs, plain, each, row) for each in categories)]


def _different(job: Job, runs: Sequence[Pass]) -> Sequence[Pass]:
    """The passes whose counts are added up in a row.

    Every pass has its own seed, so sampled passes differ, as do those of a drafter that uses chance
    at temperature 0 (``controlled``): all of them. Otherwise every pass is the same: the first.
    """
    same = all(run.emitted == runs[0].emitted for run in runs)
    return runs[:1] if same and job.settings["temperature"] == 0 else runs


def _speed(
    runs: Sequence[Pass],
    plain: Sequence[Pass],
    groups: Sequence[Sequence[int]],
    predicted: float | None,
) -> dict:
    """The fields of a row that hold its speed.

    Args:
        runs, plain: the passes of the method and of plain decoding.
        groups: numbers of the row's prompts, of those that were decoded together.
        predicted: the predicted speed-up, if it is known.
    """
    fast, slow = ([_rate(one, groups) for one in each] for each in (runs, plain))
    works = uncertainty.works(runs, groups), uncertainty.works(plain, groups)
    speedup = statistics.median(fast) / statistics.median(slow)
    return {
        "tokens_per_second": statistics.median(fast),
        "autoregressive_tokens_per_second": statistics.median(slow),
        "speedup": speedup,
        "speedup_interval": uncertainty.speedup_interval(speedup, *works),
        "predicted_speedup": predicted,
        "system_efficiency": speedup / predicted if predicted else None,
        "spread": {
            "tokens_per_second": _range(fast),
            "autoregressive_tokens_per_second": _range(slow),
            "speedup": _range([a / b for a, b in zip(fast, slow, strict=True)]),
        },
    }


def _rate(one: Pass, groups: Sequence[Sequence[int]]) -> float:
    """Tokens per second of some prompts."""
    tokens = sum(len(one.outputs[i]) for group in groups for i in group)
    # The seconds of every prompt are those of its batch.
    return tokens / sum(one.seconds[group[0]] for group in groups)


def _counted_row(
    job: Job, method: Method, runs: Sequence[Pass], prompts: Sequence[int], **fields: Any
) -> dict:
    """A row with what follows from the counts of some prompts; ``fields`` of ``new_row``."""
    counted = _different(job, runs)
    # Of each prompt, over these passes.
    counts = [metrics.total([run.counts[i] for run in counted]) for i in prompts]
    outputs = [[run.outputs[i] for run in counted] for i in prompts]
    rounds = [[run.emitted[i] for run in counted] for i in prompts]
    lengths = [len(job.prompts[i]) for i in prompts]
    row = results.new_row(
        method.name,
        method.accept,
        metrics.total(counts),
        temperature=float(job.settings["temperature"]),
        batch_size=job.batch_size,
        prompts=len(prompts),
        outputs=list(itertools.chain(*outputs)),
        **fields,
    )
    return row | {
        "drafter": method.drafter.name,
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "prompt_set": job.name,
        "new_tokens": job.max_new_tokens,
        "context": statistics.fmean(lengths),
        "parameters": {"target": size(job.params), "draft": size(method.params.draft)},
        "random_prompts": metrics.random_prompts(job.prompts, job.target.vocab_size),
        "standard_errors": uncertainty.standard_errors(counts, outputs),
        **uncertainty.along_text(rounds, lengths),
        "system_efficiency": None,
        "warm": method.warm,
    }


def _method_row(job: Job, method: Method, runs: list[Pass], plain: list[Pass]) -> dict:
    predicted, costs, split = _prediction(method, runs, plain)
    groups = [[row for row in rows if row >= 0] for rows, _ in passes.batches(job)]
    row = _counted_row(job, method, runs, range(len(job.prompts)))
    row |= _speed(runs, plain, groups, predicted)
    row["spread"]["costs_ms"] = {
        part: _range([1e3 * p.costs[part] for p in (*plain, *runs) if part in p.costs])
        for part in costs or ()
    }
    return row | {
        "costs_ms": costs,
        "time_split": split,
        "prefill_seconds": statistics.median(p.prefill for p in runs),
        "compile_seconds": None,
        **_hardware(job, plain, row["tokens_per_second"]),
    }


def _hardware(job: Job, plain: list[Pass], rate: float) -> dict:
    """The fields about the devices: their number, and how much of them is used.

    ``step_bytes`` are those that plain decoding must read on each device: weights, and keys and
    values of the mean text. ``bandwidth_share`` is their share of what the device's datasheet
    allows in the time of a step; None if ``theory.devices`` does not have it.
    """
    mesh, device = job.mesh, jax.devices()[0]
    parts = 1 if mesh is None else mesh.shape[sharding.DATA]
    count = 1 if mesh is None else mesh.size
    read = dict(job.params) if isinstance(job.params, Mapping) else {"": job.params}
    # A step reads one row of an untied embedding, and nothing of an encoder.
    unread = ("embed",) * ("head" in read) + ("source_layers", "source_bias", "source_norm")
    read = {key: value for key, value in read.items() if key not in unread}
    weights = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(read))
    length = statistics.fmean(len(ids) for ids in job.prompts) + job.max_new_tokens / 2
    each = (weights * parts + passes.cache_bytes(job, round(length))) / count
    sheet, share = devices.of_kind(device.device_kind), None
    if sheet is not None:
        step = statistics.median(one.loop / one.loops for one in plain)
        share = each / step / sheet.bandwidth
    return {
        "devices": count,
        "tokens_per_second_per_device": rate / count,
        "step_bytes": each,
        "bandwidth_share": share,
    }


def _prediction(
    method: Method, runs: list[Pass], plain: list[Pass]
) -> tuple[float | None, dict | None, dict | None]:
    """(predicted speed-up, cost of the parts in ms, shares of the time); None without costs."""
    if not all(p.costs for p in runs):
        return None, None, None
    cost = {part: statistics.median(p.costs[part] for p in runs) for part in ("draft", "verify")}
    step = statistics.median(p.costs["step"] for p in plain)
    # Tokens per iteration of the loop, not per round of a row: in both loops a batch runs until its
    # slowest row is done. The gain is computed pass by pass, because sampled and controlled passes
    # accept differently and the speed-up is that of the median pass.
    gains = [(a.tokens / a.loops) / (b.tokens / b.loops) for a, b in zip(runs, plain, strict=True)]
    predicted = theory.speedup(statistics.median(gains), cost["draft"], cost["verify"], step)
    # The whole time of an iteration is that of the loop itself. What drafting and verifying leave
    # of it is acceptance and bookkeeping.
    whole = statistics.median(p.loop / p.loops for p in runs)
    parts = cost | {"accept": max(whole - cost["draft"] - cost["verify"], 0.0)}
    parts["host"] = statistics.median(p.host / p.loops for p in runs)
    split = {part: seconds / sum(parts.values()) for part, seconds in parts.items()}
    costs_ms = {part: 1e3 * seconds for part, seconds in {"step": step, **cost}.items()}
    return predicted, costs_ms, split


def _check(job: Job, method: Method, runs: list[Pass], plain: list[Pass]) -> dict:
    """The field "lossless"."""
    sampled = job.settings["temperature"] > 0
    if not sampled:
        # Of several passes the first that failed.
        result = min(
            (lossless.greedy_identity(plain[0].outputs, run.outputs) for run in runs),
            key=lambda each: bool(each.passed),
        )
    else:
        outputs = [o for run in runs for o in run.outputs]
        result = lossless.law_check(_texts(job, method, outputs))
    if result.passed and not is_lossless(method.accept.lossless_class, sampled):
        # Some texts without a difference do not show that a lossy rule makes none.
        detail = f"{result.detail}; the rule {method.accept.name} is lossy"
        result = result._replace(passed=None, detail=detail)
    return result._asdict()


def _distance(
    job: Job, method: Method, runs: list[Pass], plain: list[Pass], by_definition: bool
) -> dict[str, float | None]:
    """The fields "total_variation" and "kl_divergence", or "texts_changed", of a lossy rule."""
    if job.settings["temperature"] > 0:
        return token_traces.distance(job, method) if by_definition else {}
    if method.accept.lossless_class != "L3":
        return {}
    pairs = zip(runs[0].outputs, plain[0].outputs, strict=True)
    return {"texts_changed": statistics.fmean(list(a) != list(b) for a, b in pairs)}


def _argmax_gap(job: Job, method: Method, runs: list[Pass], plain: list[Pass]) -> dict | None:
    """The field "argmax_gap": of greedy texts that differ, and of all in a narrow dtype.

    Equal texts in float32 need no score, and no program for it. Of several passes the first one
    with another text counts.
    """
    expected = plain[0].outputs
    other = next((run.outputs for run in runs if run.outputs != expected), None)
    if job.settings["temperature"] or (other is None and not _narrow(job)):
        return None
    texts = _texts(job, method, runs[0].outputs if other is None else other)
    return lossless.argmax_gap(texts, expected)


def _narrow(job: Job) -> bool:
    """Whether the target computes in a dtype narrower than float32."""
    return jax.numpy.dtype(lossless.dtype_of(job.target, job.params)).itemsize < 4


def _width_gap(job: Job, method: Method, runs: list[Pass]) -> dict | None:
    """The field "width_gap": of sampled texts in a narrow dtype, by the widest verification.

    Of decoders: an encoder reads a source at once.
    """
    if not job.settings["temperature"] or not _narrow(job) or job.target.encoder is not None:
        return None
    return lossless.width_gap(_texts(job, method, runs[0].outputs), method.drafter.nodes + 1)


def _texts(job: Job, method: Method, outputs: Sequence[Sequence[int]]) -> lossless.Texts:
    """Outputs of one pass or of several ones, for the devices of one part of the rows."""
    job, method = one_part(job, method)
    prompts = list(job.prompts) * (len(outputs) // len(job.prompts))
    width = job.width + job.max_new_tokens
    return lossless.Texts(
        job.target, method.params, prompts, outputs, job.settings, method.drafter, width
    )


def _category_row(
    job: Job, method: Method, runs: list[Pass], plain: list[Pass], category: str, whole: dict
) -> dict:
    """The row of one category: its counts, and with batch size 1 its speed.

    A larger batch may contain several categories. The costs of the parts of a round are those of
    ``whole``, the row over all prompts: they depend on shapes, not on the text.
    """
    own = [i for i, c in enumerate(job.categories) if c == category]
    status, costs = whole["class_status"], whole["costs_ms"]
    row = _counted_row(job, method, runs, own, category=category, status=status)
    row |= {"costs_ms": costs, "spread": dict.fromkeys(whole["spread"])}
    if job.batch_size == 1:
        predicted = _category_prediction(runs, own, costs) if costs else None
        row |= _speed(runs, plain, [[i] for i in own], predicted)
    row["spread"]["costs_ms"] = whole["spread"]["costs_ms"]
    return row


def _category_prediction(runs: Sequence[Pass], own: Sequence[int], costs: dict) -> float:
    """The predicted speed-up of a category's prompts, at batch size 1.

    There a round is an iteration of the loop, and plain decoding gives one token.
    """
    gains = [metrics.summary(metrics.total([r.counts[i] for i in own])) for r in runs]
    gain = statistics.median(each["block_efficiency"] or 0.0 for each in gains)
    return theory.speedup(gain, costs["draft"], costs["verify"], costs["step"])


def size(params: object) -> int:
    """How many numbers a pytree of parameters holds, in its arrays of floats and of int8."""
    # A single number is a setting, not a parameter.
    leaves = [x for x in jax.tree.leaves(params) if getattr(x, "ndim", 0)]
    kinds = (jax.numpy.floating, jax.numpy.int8)
    return sum(x.size for x in leaves if any(jax.numpy.issubdtype(x.dtype, k) for k in kinds))


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
