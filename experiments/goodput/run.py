"""Draft lengths under load: latency and goodput of a simulated server, by policy.

    PYTHONPATH=. python experiments/goodput/run.py       (10 minutes on one CPU core)

Requests arrive at random and share the rounds of a running batch (``specjax.theory.load``). Greedy
decoding is simulated exactly from recorded acceptance (``traces.py``); the time of a round comes
from a cost model. Settings:

- "two CPU cores": SmolLM2-135M-Instruct with prompt lookup; times measured by ``costs.py``, of
  padded batches as in ``specjax.decode``; at most 8 rows.
- "H100, draft model": a Llama of 8B parameters and a draft of 1B, at most 256 rows. Bandwidth and
  operations per second are those of NVIDIA's datasheet, and the sizes of the models those of
  Llama 3; **every time is derived from them by the roofline model, none was measured**. The
  acceptance is that of stories260K and its distilled draft model.
- "H100, lookup": the same target with drafts that cost nothing, and the acceptance of SmolLM2 with
  prompt lookup.

Policies: every fixed length from 0 (plain decoding) to ``--longest``; "follow acceptance", which
cannot see the load; "goodput" (SmartSpec) and "goodput by row". Loads are multiples of the requests
per second that plain decoding can serve with a full batch. All policies of a seed get the same
requests. For each load the best fixed length is the one with the highest goodput (for latency: with
the lowest mean latency) over all seeds. ``relative`` is the goodput as a multiple of the best fixed
one, and its latency as a multiple of the policy's: below 1 is worse. Standard errors over seeds,
paired. Deterministic; writes ``results.json`` beside this file.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import Stopwatch, options, record
from experiments.goodput import traces as traces_lib
from specjax.files import write_json
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import load, policies, roofline, round_costs
from specjax.theory.devices import named

HERE = Path(__file__).parent
LOADS = (0.1, 0.25, 0.5, 0.75, 0.95, 1.25)
LLAMA_8B = TransformerConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_embeddings=False
)
LLAMA_1B = TransformerConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072)
PERCENTILES = ("mean", "p50", "p90", "p99")


class Setting(NamedTuple):
    """A server and its requests."""

    name: str
    costs: round_costs.RoundCosts
    traces: load.AcceptanceTraces
    max_batch: int
    about: str  # where the costs come from


def two_cores(folder: Path) -> Setting:
    """Measured times, as ``costs.py`` wrote them."""
    path = folder / "costs.json"
    times = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not times.get("passes"):
        raise SystemExit(
            f"{path} has no times; measure them with experiments/goodput/costs.py, "
            "or leave this setting out with --only"
        )
    costs = round_costs.measured(
        times["passes"], times["drafts"], context=times["context"], by_step=False, padded=True
    )
    about = f"measured: {times['machine']['cpu']}, {times['machine']['cores']} cores, "
    about += f"{times['date']}; cells deviate by at most {times['spread']:.0%}"
    return Setting("two CPU cores", costs, traces_lib.read(folder / "lookup.npz")[0], 8, about)


def h100(folder: Path, *, draft: bool) -> Setting:
    """Times derived from the datasheet."""
    target, small = roofline.model_of(LLAMA_8B), roofline.model_of(LLAMA_1B)
    costs = round_costs.RooflineRounds(
        named("H100 SXM").machine(), target, small if draft else None
    ).checked()
    name, file = ("H100, draft model", "draft.npz") if draft else ("H100, lookup", "lookup.npz")
    about = "derived from the datasheet by the roofline model"
    return Setting(name, costs, traces_lib.read(folder / file)[0], 256, about)


SETTINGS: dict[str, Callable[[Path], Setting]] = {
    "two CPU cores": two_cores,
    "H100, draft model": functools.partial(h100, draft=True),
    "H100, lookup": functools.partial(h100, draft=False),
}


def all_policies(
    costs: round_costs.RoundCosts, longest: int
) -> dict[str, Callable[[], policies.Policy]]:
    """Label -> a new policy of its kind."""
    fixed: dict[str, Callable[[], policies.Policy]] = {
        f"fixed {k}": functools.partial(policies.FixedLength, k) for k in range(longest + 1)
    }
    return fixed | {
        "follow acceptance": lambda: policies.FollowAcceptance(longest),
        "goodput": lambda: policies.GoodputLength(costs, longest),
        "goodput by row": lambda: policies.GoodputRows(costs, longest),
    }


def saturation(setting: Setting) -> float:
    """Requests per second of plain decoding in full batches."""
    rows, traces = setting.max_batch, setting.traces
    output = float(traces.output.mean())
    context = rows * (float(traces.prompt.mean()) + output / 2)
    # As many rows join in a round as leave it.
    prompt = round(rows / output * float(traces.prompt.mean()))
    work = round_costs.work_of(np.zeros(rows, int), context, prompt)
    return rows / output / setting.costs(work)


def serve(setting: Setting, share: float, seed: int, longest: int, size: float) -> dict:
    """Label of a policy -> ``LoadSummary``, for the same requests."""
    count = round(size * (150 + 10 * setting.max_batch * min(share, 1.3)))
    requests = load.poisson(share * saturation(setting), count, setting.traces, seed)
    result = {}
    for label, make in all_policies(setting.costs, longest).items():
        served = load.simulate(
            requests, setting.traces, make(), setting.costs, max_batch=setting.max_batch
        )
        result[label] = load.summarise(requests, served)
    return result


def rows_of(setting: Setting, share: float, runs: Sequence[dict]) -> list[dict]:
    """One row for each policy: means over seeds, and comparisons with the best fixed length."""
    goodput = {n: np.array([run[n].goodput for run in runs]) for n in runs[0]}
    latency = {n: np.array([run[n].latency.mean for run in runs]) for n in runs[0]}
    fixed = [name for name in runs[0] if name.startswith("fixed")]
    best = max(fixed, key=lambda name: goodput[name].mean())
    quick = min(fixed, key=lambda name: latency[name].mean())
    rows = []
    for name in runs[0]:
        summaries = [run[name] for run in runs]
        row = {"setting": setting.name, "load": share, "policy": name}
        row["requests_per_second"] = share * saturation(setting)
        for key in ("latency", "per_token", "first", "wait"):
            parts = [getattr(each, key) for each in summaries]
            row[key] = {p: float(np.mean([getattr(x, p) for x in parts])) for p in PERCENTILES}
        for key in ("goodput", "offered", "rows", "drafted", "tau"):
            row[key] = float(np.mean([getattr(each, key) for each in summaries]))
        row["relative_goodput"] = ratio(goodput[name], goodput[best])
        row["relative_latency"] = ratio(latency[quick], latency[name])
        row["best_fixed"] = {"goodput": best, "latency": quick}
        rows.append(row)
    return rows


def ratio(value: np.ndarray, base: np.ndarray) -> list[float]:
    """[ratio of the means, its standard error over seeds] of paired values."""
    mean = value.mean() / base.mean()
    error = (value - mean * base).std(ddof=1) / base.mean() / len(value) ** 0.5
    return [float(mean), float(error) if len(value) > 1 else 0.0]


def show(rows: Sequence[dict]) -> None:
    """Prints the adaptive policies beside the best fixed length of each load."""
    for row in rows:
        if row["policy"].startswith("fixed"):
            continue
        best = row["best_fixed"]
        print(
            f"{row['setting']:18} {row['load']:.2f} {row['policy']:18}"
            f" goodput {row['relative_goodput'][0]:.3f} of {best['goodput']},"
            f" latency {row['relative_latency'][0]:.3f} of {best['latency']},"
            f" {row['rows']:.1f} rows, {row['drafted']:.2f} drafted",
            flush=True,
        )


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    add = parser.add_argument
    add("--files", type=Path, default=HERE, help="folder of the traces and costs")
    add("--longest", type=int, default=6, help="longest draft")
    add("--seeds", type=int, default=5)
    add("--loads", type=float, nargs="+", default=LOADS)
    add("--only", choices=SETTINGS, help="simulates one setting; keeps the others' results")
    add("--size", type=float, default=1.0, help="multiplies the number of requests")
    args = parser.parse_args(argv)
    stopwatch, rows, about = Stopwatch(), [], {}
    if args.only and args.out.exists():
        earlier = json.loads(args.out.read_text(encoding="utf-8"))
        rows = [row for row in earlier["rows"] if row["setting"] != args.only]
        about = earlier["settings"]
    for name in [args.only] if args.only else SETTINGS:
        setting = SETTINGS[name](args.files)
        about[name] = setting.about
        for share in args.loads:
            runs = [
                serve(setting, share, seed, args.longest, args.size) for seed in range(args.seeds)
            ]
            some = rows_of(setting, share, runs)
            show(some)
            rows += some
    result = record(__file__, argv, stopwatch)
    write_json(args.out, result | {"settings": about, "seeds": args.seeds, "rows": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
