"""From measured passes to the rows of results.json: medians and spread, predicted speed-up and system efficiency, where the
time went, whether anything was lost, and the true overlap of target and draft."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import jax

from specjax import theory
from specjax.bench import lossless, metrics, results
from specjax.bench.overlap import overlap
from specjax.bench.passes import Job, Measured, Method, Pass


def rows(
    job: Job,
    methods: Sequence[Method],
    measured: Measured,
    compiled: dict[str | None, float] | None = None,
    *,
    check: bool = True,
) -> list[dict]:
    """A row for each method, each followed by one for every category of the prompts, if they have any.

    Args:
        job: what was measured.
        methods: in the order of ``measured.methods``.
        measured: the passes.
        compiled: seconds that compiling took, by name.
        check: whether the outputs are checked and the overlap computed; costs a forward pass of both models.
    """
    found = []
    for method, runs in zip(methods, measured.methods, strict=True):
        whole = _row(job, method, runs, measured.plain, (compiled or {}).get(method.name))
        if check:
            whole |= _checked(job, method, runs, measured.plain)
        found.append(whole)
        for category in dict.fromkeys(c for c in job.categories if c is not None):
            found.append(_category(job, method, runs, measured.plain, category))
    return found


def rate(passes: Sequence[Pass]) -> float:
    """Tokens per second of the decode loop, median over the passes."""
    return statistics.median(_rates(passes))


def _rates(passes: Sequence[Pass]) -> list[float]:
    return [p.tokens / p.loop for p in passes]


def _row(
    job: Job, method: Method, runs: list[Pass], plain: list[Pass], compiled: float | None
) -> dict:
    counts = metrics.total(runs[0].counts)
    fast, slow = _rates(runs), _rates(plain)
    pairs = [a / b for a, b in zip(fast, slow, strict=True)]
    speedup = statistics.median(fast) / statistics.median(slow)
    predicted, costs, split = _prediction(method, runs, plain)
    found = results.row(
        method.name,
        method.accept,
        counts,
        temperature=float(job.settings["temperature"]),
        batch_size=job.batch_size,
        prompts=len(job.prompts),
        rate=statistics.median(fast),
    )
    return found | {
        "drafter": method.drafter.name,
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "prompt_set": job.name,
        "context": statistics.fmean(map(len, job.prompts)),
        "parameters": {"target": size(job.params), "draft": size(method.params.draft)},
        "autoregressive_tokens_per_second": statistics.median(slow),
        "speedup": speedup,
        "predicted_speedup": predicted,
        "system_efficiency": None if predicted is None else speedup / predicted,
        "spread": {
            "tokens_per_second": _ends(fast),
            "autoregressive_tokens_per_second": _ends(slow),
            "speedup": _ends(pairs),
            "costs_ms": {
                part: _ends([1e3 * p.costs[part] for p in (*plain, *runs) if part in p.costs])
                for part in costs or ()
            },
        },
        "costs_ms": costs,
        "time_split": split,
        "prefill_seconds": statistics.median(p.prefill for p in runs),
        "compile_seconds": compiled,
        "warm": method.warm,
    }


def _prediction(
    method: Method, runs: list[Pass], plain: list[Pass]
) -> tuple[float | None, dict | None, dict | None]:
    """(predicted speed-up, what the parts cost in ms, shares of the time)."""
    if not all(p.costs for p in runs):
        return None, None, None
    cost = {part: statistics.median(p.costs[part] for p in runs) for part in ("draft", "verify")}
    step = statistics.median(p.costs["step"] for p in plain)
    # Tokens per turn of the loop, not per round of a row: a batch goes on until its slowest row is done, in both loops.
    # Pass by pass, for sampled passes (and controlled ones) accept differently, and the median one is what is measured.
    gains = [(a.tokens / a.loops) / (b.tokens / b.loops) for a, b in zip(runs, plain, strict=True)]
    predicted = theory.speedup(statistics.median(gains), cost["draft"], cost["verify"], step)
    # A turn's whole time, from the loop itself; what drafting and verifying leave is acceptance and bookkeeping.
    whole = statistics.median(p.loop / p.loops for p in runs)
    parts = cost | {"accept": max(whole - cost["draft"] - cost["verify"], 0.0)}
    parts["host"] = statistics.median(p.host / p.loops for p in runs)
    split = {part: seconds / sum(parts.values()) for part, seconds in parts.items()}
    return (
        predicted,
        {part: 1e3 * seconds for part, seconds in {"step": step, **cost}.items()},
        split,
    )


def _checked(job: Job, method: Method, runs: list[Pass], plain: list[Pass]) -> dict:
    """The fields "lossless" and "overlap"."""
    width = job.width + job.max_new_tokens
    outputs = [o for run in runs for o in run.outputs]
    if job.settings["temperature"] == 0:
        outcome = min(
            (lossless.greedy_identity(plain[0].outputs, run.outputs) for run in runs),
            key=lambda o: bool(o.passed),
        )
    else:
        prompts = list(job.prompts) * len(runs)
        outcome = lossless.law_check(
            job.target, method.params, prompts, outputs, job.settings, method.drafter, width=width
        )
    seen = overlap(
        job.target, method.drafter, method.params, job.prompts, plain[0].outputs, job.settings,
        categories=job.categories, decode=job.spell, width=width,
    )  # fmt: skip
    return {"lossless": outcome._asdict(), "overlap": seen}


def _category(job: Job, method: Method, runs: list[Pass], plain: list[Pass], category: str) -> dict:
    """The row of one category: its counts; its speed where a batch is one prompt, and so has one category."""
    own = [i for i, c in enumerate(job.categories) if c == category]
    found = results.row(
        method.name,
        method.accept,
        metrics.total([runs[0].counts[i] for i in own]),
        temperature=float(job.settings["temperature"]),
        batch_size=job.batch_size,
        prompts=len(own),
        category=category,
    )
    found |= {
        "drafter": method.drafter.name,
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "prompt_set": job.name,
        "context": statistics.fmean(len(job.prompts[i]) for i in own),
        "warm": method.warm,
    }
    if job.batch_size == 1:
        fast, slow = (
            statistics.median(
                sum(len(p.outputs[i]) for i in own) / sum(p.seconds[i] for i in own) for p in each
            )
            for each in (runs, plain)
        )
        found |= {
            "tokens_per_second": fast,
            "autoregressive_tokens_per_second": slow,
            "speedup": fast / slow,
        }
    return found


def size(params: object) -> int:
    """Numbers in a pytree of parameters: those of its arrays of floats."""
    leaves = (
        x for x in jax.tree.leaves(params) if getattr(x, "ndim", 0)
    )  # a single number is a setting
    return sum(x.size for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating))


def _ends(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
