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
from collections.abc import Sequence
from typing import Any

import jax

from specjax import theory
from specjax.bench import (
    lossless,
    metrics,
    passes,
    proofs,
    results,
    text_checks,
    uncertainty,
)
from specjax.bench.measuring import Measured
from specjax.bench.overlap import overlap
from specjax.bench.passes import Job, Method, Pass, one_part


def measured_rows(
    job: Job, methods: Sequence[Method], measured: Measured, **options: Any
) -> list[dict]:
    """The rows of all methods: ``rows_of`` each, which has the ``options``."""
    rows = []
    for method, runs in zip(methods, measured.methods, strict=True):
        rows += rows_of(job, method, runs, measured.plain, **options)
    return rows


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
        by_definition: whether to compute the overlap with ``check``; it takes one too.
        proven: reports on the lossless class of drafters and rules that are not the package's.
    """
    row = _method_row(job, method, runs, plain)
    row["class_status"] = proofs.status(method.drafter, method.accept, job.target, proven)
    if check:
        row["lossless"] = _check(job, method, runs, plain)
        row["overlap"] = _overlap(job, method, plain) if by_definition else None
    categories = dict.fromkeys(c for c in job.categories if c is not None)
    return [row, *(_category_row(job, method, runs, plain, each, row) for each in categories)]


def _different(job: Job, runs: Sequence[Pass]) -> Sequence[Pass]:
    """The passes whose counts are added up in a row.

    Every pass has its own seed, so sampled passes differ, as do those of a drafter that uses chance
    at temperature 0 (``controlled``): all of them. Otherwise every pass is the same: the first.
    """
    same = all(run.emitted == runs[0].emitted for run in runs)
    return runs[:1] if same and job.settings["temperature"] == 0 else runs


def _by_prompt(runs: Sequence[Pass], prompts: Sequence[int]) -> list[metrics.Counts]:
    """The counts of each prompt, over these passes."""
    return [metrics.total([run.counts[i] for run in runs]) for i in prompts]


def _outputs(runs: Sequence[Pass], prompts: Sequence[int]) -> list[list[list[int]]]:
    """The new tokens of each prompt in each of these passes."""
    return [[run.outputs[i] for run in runs] for i in prompts]


def _interval(
    speedup: float, runs: Sequence[Pass], plain: Sequence[Pass], groups: Sequence[Sequence[int]]
) -> list[float] | None:
    """The confidence interval of the speed-up over groups of prompts decoded together."""
    ours, other = (uncertainty.works(each, groups) for each in (runs, plain))
    return uncertainty.speedup_interval(speedup, ours, other)


def _rates(runs: Sequence[Pass]) -> list[float]:
    """Tokens per second of the decode loop, per pass."""
    return [p.tokens / p.loop for p in runs]


def _method_row(job: Job, method: Method, runs: list[Pass], plain: list[Pass]) -> dict:
    fast, slow = _rates(runs), _rates(plain)
    ratios = [a / b for a, b in zip(fast, slow, strict=True)]
    speedup = statistics.median(fast) / statistics.median(slow)
    predicted, costs, split = _prediction(method, runs, plain)
    every = range(len(job.prompts))
    counted = _different(job, runs)
    counts, outputs = _by_prompt(counted, every), _outputs(counted, every)
    groups = [[row for row in rows if row >= 0] for rows, _ in passes.batches(job)]
    row = results.new_row(
        method.name,
        method.accept,
        metrics.total(counts),
        temperature=float(job.settings["temperature"]),
        batch_size=job.batch_size,
        prompts=len(job.prompts),
        rate=statistics.median(fast),
        outputs=list(itertools.chain(*outputs)),
    )
    return row | {
        "drafter": method.drafter.name,
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "prompt_set": job.name,
        "context": statistics.fmean(map(len, job.prompts)),
        "parameters": {"target": size(job.params), "draft": size(method.params.draft)},
        "random_prompts": text_checks.random_prompts(job.prompts, job.target.vocab_size),
        "standard_errors": uncertainty.standard_errors(counts, outputs),
        "autoregressive_tokens_per_second": statistics.median(slow),
        "speedup": speedup,
        "speedup_interval": _interval(speedup, runs, plain, groups),
        "predicted_speedup": predicted,
        "system_efficiency": None if predicted is None else speedup / predicted,
        "spread": {
            "tokens_per_second": _range(fast),
            "autoregressive_tokens_per_second": _range(slow),
            "speedup": _range(ratios),
            "costs_ms": {
                part: _range([1e3 * p.costs[part] for p in (*plain, *runs) if part in p.costs])
                for part in costs or ()
            },
        },
        "costs_ms": costs,
        "time_split": split,
        "prefill_seconds": statistics.median(p.prefill for p in runs),
        "compile_seconds": None,
        "warm": method.warm,
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
    job, method = one_part(job, method)
    if job.settings["temperature"] == 0:
        # Of several passes the first that failed.
        result = min(
            (lossless.greedy_identity(plain[0].outputs, run.outputs) for run in runs),
            key=lambda each: bool(each.passed),
        )
    else:
        result = lossless.law_check(
            job.target,
            method.params,
            list(job.prompts) * len(runs),
            [o for run in runs for o in run.outputs],
            job.settings,
            method.drafter,
            width=job.width + job.max_new_tokens,
        )
        if result.passed and method.accept.lossless_class != "L1":
            # A test that has found no difference does not show that a lossy rule has none.
            detail = f"{result.detail}; the rule {method.accept.name} is lossy"
            result = result._replace(passed=None, detail=detail)
    return result._asdict()


def _overlap(job: Job, method: Method, plain: list[Pass]) -> dict | None:
    """The field "overlap"."""
    job, method = one_part(job, method)
    return overlap(
        job.target,
        method.drafter,
        method.params,
        job.prompts,
        plain[0].outputs,
        job.settings,
        categories=job.categories,
        decode=job.spell,
        width=job.width + job.max_new_tokens,
    )


def _category_row(
    job: Job, method: Method, runs: list[Pass], plain: list[Pass], category: str, whole: dict
) -> dict:
    """The row of one category: its counts, and with batch size 1 its speed.

    A larger batch may contain several categories. The costs of the parts of a round are those of
    ``whole``, the row over all prompts: they depend on shapes, not on the text.
    """
    own = [i for i, c in enumerate(job.categories) if c == category]
    counted = _different(job, runs)
    counts, outputs = _by_prompt(counted, own), _outputs(counted, own)
    row = results.new_row(
        method.name,
        method.accept,
        metrics.total(counts),
        temperature=float(job.settings["temperature"]),
        batch_size=job.batch_size,
        prompts=len(own),
        category=category,
        status=whole["class_status"],
        outputs=list(itertools.chain(*outputs)),
    )
    row |= {
        "drafter": method.drafter.name,
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "prompt_set": job.name,
        "context": statistics.fmean(len(job.prompts[i]) for i in own),
        "warm": method.warm,
        "parameters": whole["parameters"],
        "random_prompts": whole["random_prompts"],
        "standard_errors": uncertainty.standard_errors(counts, outputs),
        "system_efficiency": None,
        "costs_ms": whole["costs_ms"],
        "spread": dict.fromkeys(whole["spread"]) | {"costs_ms": whole["spread"]["costs_ms"]},
    }
    return row | (_category_speed(runs, plain, own, row) if job.batch_size == 1 else {})


def _category_speed(runs: list[Pass], plain: list[Pass], own: Sequence[int], row: dict) -> dict:
    """The fields of a category's row that hold its speed, at batch size 1."""
    fast, slow = _category_rates(runs, own), _category_rates(plain, own)
    speedup, costs = statistics.median(fast) / statistics.median(slow), row["costs_ms"]
    predicted = None
    if costs:
        # At batch size 1 a round is an iteration of the loop, and plain decoding gives one token.
        gains = [metrics.summary(metrics.total([r.counts[i] for i in own])) for r in runs]
        gain = statistics.median(each["block_efficiency"] or 0.0 for each in gains)
        predicted = theory.speedup(gain, costs["draft"], costs["verify"], costs["step"])
    return {
        "tokens_per_second": statistics.median(fast),
        "autoregressive_tokens_per_second": statistics.median(slow),
        "speedup": speedup,
        "speedup_interval": _interval(speedup, runs, plain, [[i] for i in own]),
        "predicted_speedup": predicted,
        "system_efficiency": speedup / predicted if predicted else None,
        "spread": row["spread"]
        | {
            "tokens_per_second": _range(fast),
            "autoregressive_tokens_per_second": _range(slow),
            "speedup": _range([a / b for a, b in zip(fast, slow, strict=True)]),
        },
    }


def _category_rates(runs: Sequence[Pass], prompts: Sequence[int]) -> list[float]:
    """Tokens per second of some prompts, per pass."""
    return [
        sum(len(p.outputs[i]) for i in prompts) / sum(p.seconds[i] for i in prompts) for p in runs
    ]


def size(params: object) -> int:
    """How many numbers a pytree of parameters holds, in its arrays of floats."""
    # A single number is a setting, not a parameter.
    leaves = (x for x in jax.tree.leaves(params) if getattr(x, "ndim", 0))
    return sum(x.size for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating))


def _range(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
