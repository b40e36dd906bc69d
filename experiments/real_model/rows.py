"""The rows of experiments/real_model: counts and speeds by task, from the batches of its cells."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.real_model.measuring import Run
from specjax import drafters
from specjax.bench import lossless, results, uncertainty
from specjax.bench.metrics import Counts, total
from specjax.bench.passes import Method
from specjax.bench.uncertainty import Work
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import devices, roofline

PLAIN = "plain decoding"
DEVICES = ("H100 SXM", "TPU v5e")  # of the predictions
CONTEXT = 256  # cached tokens of each row in the predictions
Batches = Sequence[Mapping[str, Any]]  # of ``to_json``


def to_json(run: Run) -> dict[str, Any]:
    """A run as JSON."""
    counts = [
        each._asdict() | {"tested": each.tested.tolist(), "passed": each.passed.tolist()}
        for each in run.counts
    ]
    return {"outputs": run.outputs, "seconds": run.seconds, "counts": counts}


def _counts(batches: Batches) -> list[Counts]:
    """The counts of every prompt."""
    every = itertools.chain(*(batch["counts"] for batch in batches))
    return [
        Counts(
            each["tokens"],
            each["rounds"],
            each["accepted"],
            np.asarray(each["tested"], int),
            np.asarray(each["passed"], int),
            each["verified"],
        )
        for each in every
    ]


def rows(
    cells: Mapping[str, Mapping[str, Batches]],
    methods: Mapping[str, Method],
    batch_size: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """Per method a row over all tasks, followed by one row per task.

    Args:
        cells: task -> label -> batches; plain decoding is one of the labels.
        methods: by label.
        batch_size: of the cells.
        temperature: of the cells.
    """
    result = []
    for label, method in methods.items():
        for task in (None, *cells):
            some = [cells[task]] if task is not None else list(cells.values())
            ours = list(itertools.chain(*(cell[label] for cell in some)))
            plain = list(itertools.chain(*(cell[PLAIN] for cell in some)))
            result.append(_row(method, ours, plain, batch_size, temperature, task))
    return result


def _row(
    method: Method,
    ours: Batches,
    plain: Batches,
    batch_size: int,
    temperature: float,
    task: str | None,
) -> dict[str, Any]:
    counts, outputs = _counts(ours), _outputs(ours)
    fast, slow = ([_work(batch) for batch in batches] for batches in (ours, plain))
    ratios = [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in _pairs(fast, slow)]
    whole = _rate(fast) / _rate(slow)
    row = results.new_row(
        method.name,
        method.accept,
        total(counts),
        temperature=temperature,
        batch_size=batch_size,
        prompts=len(counts),
        rate=_rate(fast),
        category=task,
        outputs=outputs,
    )
    row |= {
        "gamma": method.drafter.longest,
        "nodes": method.drafter.nodes,
        "autoregressive_tokens_per_second": _rate(slow),
        "speedup": statistics.median(ratios),
        "speedup_of_totals": whole,
        "speedup_interval": uncertainty.speedup_interval(whole, fast, slow),
        "standard_errors": uncertainty.standard_errors(counts, [[each] for each in outputs]),
    }
    if temperature == 0:
        row["lossless"] = lossless.greedy_identity(_outputs(plain), outputs)._asdict()
    return row


def predicted(
    row: Mapping[str, Any], method: Method, config: TransformerConfig
) -> dict[str, float]:
    """Device -> the speed-up by the roofline in bfloat16, from the measured tokens per round.

    Each depth of a draft reads all parameters of the drafter once; Hydra has a head for each depth,
    and lookups read nothing. Launches are not modelled. Empty for other families of drafters, whose
    drafts are passes of several models or of the target.
    """
    name, families = method.drafter.name, drafters.families()
    if name not in [*families["lookup"], *families["draft_models"], *families["heads"]]:
        return {}
    size = 0
    if name not in families["lookup"]:
        size = sum(leaf.size for leaf in jax.tree.leaves(method.params.draft))
    if name == "hydra":
        size //= len(method.params.draft["head"])
    draft = roofline.Model(size, 2 * size, 0, 2 * size)
    target, found = roofline.model_of(config), {}
    depth, nodes, rows = row["gamma"], row["nodes"], row["batch_size"]
    for device in DEVICES:
        machine = devices.named(device).machine()
        one, verify = (
            roofline.pass_time(machine, target, rows, CONTEXT, tokens) for tokens in (1, nodes + 1)
        )
        step = roofline.pass_time(machine, draft, rows, 0, -(-nodes // depth)) if size else 0.0
        found[device] = row["block_efficiency"] * one / (verify + depth * step)
    return found


def _outputs(batches: Batches) -> list[list[int]]:
    return list(itertools.chain(*(batch["outputs"] for batch in batches)))


def _work(batch: Mapping[str, Any]) -> Work:
    return Work(float(sum(map(len, batch["outputs"]))), batch["seconds"])


def _pairs(fast: Sequence[Work], slow: Sequence[Work]) -> Iterable[tuple[Work, Work]]:
    return zip(fast, slow, strict=True)


def _rate(works: Sequence[Work]) -> float:
    """Tokens per second over all batches."""
    return sum(work.tokens for work in works) / sum(work.seconds for work in works)


def table(every: Sequence[Mapping[str, Any]]) -> str:
    """Text: a line per method and setting, over all tasks."""
    lines = []
    for row in every:
        if row["category"] is None:
            error = row["standard_errors"]["block_efficiency"]
            lines.append(
                f"T={row['temperature']:g}, batch {row['batch_size']}: {row['method']:18} tau "
                f"{row['block_efficiency']:.2f} ± {error or 0:.2f}, loops "
                f"{row['repeated_4grams'] or 0:.0%}, {row['speedup']:.2f}x"
            )
    return "\n".join(lines)
