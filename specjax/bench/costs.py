"""The cost of the parts of a round: what is timed, and what a pass over all prompts spent on it."""

from __future__ import annotations

import statistics

import jax

from specjax import tree
from specjax.bench import timing
from specjax.bench.passes import Job, Method, Pass, batches, begin, drafter_and_params, one_part

VERIFY = "verify "  # the clock of one width is "verify 6"


def clocks(job: Job, method: Method | None) -> dict[str, timing.Clock]:
    """The clocks of a method, or of plain decoding (None), "step".

    Those of a method are "draft" and one for each width that its rounds may verify. There are none
    if a method drafts nothing, or if the cost of a draft depends on the text.
    """
    job, method = one_part(job, method)
    if method is None:
        return {"step": timing.of_pass(job.target, 1)}
    if not method.drafter.nodes or not method.drafter.constant_cost:
        return {}
    widths = tree.widths(method.drafter, job.verify_widths)
    verify = {
        f"{VERIFY}{width}": timing.of_verify(job.target, method.drafter, width) for width in widths
    }
    return {"draft": timing.of_draft(method.drafter), **verify}


def sample(job: Job, method: Method | None, parts: dict[str, timing.Clock]) -> dict[str, float]:
    """Seconds of each part, one sample, after the prompts of the first batch.

    On a mesh: on the devices of one part of its rows, as all parts run at the same time.
    """
    if not parts:
        return {}
    job, method = one_part(job, method)
    drafter, params = drafter_and_params(job, method)
    state = jax.block_until_ready(begin(job, drafter, params, *next(batches(job))))
    return {name: clock.sample(params, state) for name, clock in parts.items()}


def of_pass(
    job: Job, method: Method | None, parts: dict[str, timing.Clock], one: Pass
) -> dict[str, float]:
    """Seconds of "step", or of "draft" and "verify", for the rounds of this pass.

    The cost of verification is the mean over its rounds: each costs what its width costs.
    """
    ran = {f"{VERIFY}{width}": count for width, count in one.widths.items()}
    used = {
        name: clock for name, clock in parts.items() if not name.startswith(VERIFY) or name in ran
    }
    seconds = sample(job, method, used)
    result = {name: value for name, value in seconds.items() if name not in ran}
    if parts and ran:
        total = sum(seconds[name] * count for name, count in ran.items())
        result["verify"] = total / sum(ran.values())
    return result


def time_of_verify(job: Job, method: Method | None, size: int, samples: int = 5) -> float:
    """Median seconds of one target pass over a chain of ``size`` tokens per row.

    The buffers are those of the method, or of plain decoding (None).
    """
    parts = {"pass": timing.of_pass(job.target, size)}
    return statistics.median(sample(job, method, parts)["pass"] for _ in range(samples))


def time_of_draft(job: Job, method: Method, samples: int = 5) -> float:
    """Median seconds of one call of the drafter's ``propose``."""
    parts = {"draft": timing.of_draft(method.drafter)}
    return statistics.median(sample(job, method, parts)["draft"] for _ in range(samples))
