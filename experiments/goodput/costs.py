"""The time of passes over so many tokens in so many rows, on this machine.

    PYTHONPATH=. python experiments/goodput/costs.py --target=DIR   (5 minutes)

(SmolLM2-135M-Instruct on two CPU cores.) Times passes of the target over 1 to 7 tokens in 1 to 8
rows, after texts of 192 tokens, and drafts by prompt lookup (``specjax.bench.measuring``, medians).
A pass over the same number of tokens in all rows counts as the same pass: ``passes`` is the mean
over batch sizes, and ``spread`` the largest deviation of a measured time from it. ``context`` is
the additional time of a pass for each additional slot of the cache, from passes with longer
buffers. Writes ``costs.json`` beside this file, which ``run.py`` reads. Run it on an idle
machine.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from experiments.common import checked, options, record, start, without_folder
from specjax import accept, drafters
from specjax.bench import measuring
from specjax.bench.passes import Job, Method
from specjax.files import write_json
from specjax.models import hf
from specjax.types import ModelParams

TIMES = frozenset({"grid", "passes", "spread", "drafts", "context"})


def make_job(target: hf.Loaded, rows: int, context: int) -> Job:
    """Random prompts of ``context`` tokens; the times do not depend on the text."""
    random = np.random.default_rng(0)
    return Job(
        target=target.lm,
        params=target.params,
        prompts=random.integers(5, target.lm.vocab_size, (rows, context)).tolist(),
        settings={"temperature": 0.0},
        batch_size=rows,
        max_new_tokens=16,
        eos_id=(),
        seed=0,
        repeats=1,
    )


def measure(target: hf.Loaded, rows: Sequence[int], widths: Sequence[int], args) -> dict:
    """The times of all cells, and what follows from them."""
    drafter = drafters.make("prompt_lookup", target.lm, gamma=max(widths) - 1)
    method = Method("prompt_lookup", drafter, accept.load("chain"), ModelParams(target.params, {}))
    grid, drafts = [], []
    for many in rows:
        job = make_job(target, many, args.context)
        for width in widths:
            seconds = measuring.time_of_verify(job, None, width, args.samples)
            grid.append([many, width, seconds])
            print(f"{many} rows x {width} tokens: {1e3 * seconds:.2f} ms", flush=True)
        drafts.append([many, measuring.time_of_draft(job, method, args.samples)])
        jax.clear_caches()
    longer = make_job(target, max(rows), args.context + args.more)
    more = measuring.time_of_verify(longer, None, 1, args.samples)
    [base] = [seconds for many, width, seconds in grid if (many, width) == (max(rows), 1)]
    # The prompt of a new row, as one pass of one row.
    prompt = measuring.time_of_verify(make_job(target, 1, args.context), None, args.prompt)
    grid.append([1, args.prompt, prompt])
    passes, spread = curve(grid)
    return {
        "grid": grid,
        "passes": passes,
        "spread": spread,
        "drafts": drafts,
        "context": max(0.0, more - base) / (max(rows) * args.more),
    }


def curve(grid: Sequence[Sequence[float]]) -> tuple[list[list[float]], float]:
    """Rows (tokens, seconds), not falling, and the largest relative deviation of a cell."""
    cells = defaultdict(list)
    for rows, width, seconds in grid:
        cells[rows * width].append(seconds)
    sizes = sorted(cells)
    means = np.maximum.accumulate([np.mean(cells[size]) for size in sizes])
    curve = dict(zip(sizes, means.tolist(), strict=True))
    spread = max(abs(seconds / curve[rows * width] - 1) for rows, width, seconds in grid)
    return [[size, seconds] for size, seconds in curve.items()], spread


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = options(__file__, __doc__)
    parser.set_defaults(out=Path(__file__).with_name("costs.json"))
    add = parser.add_argument
    add("--target", required=True, help="its directory")
    add("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--widths", type=int, nargs="+", default=[1, 2, 3, 5, 7])
    add("--context", type=int, default=192, help="tokens of each text")
    add("--more", type=int, default=512, help="further tokens, for the cost of the context")
    add("--prompt", type=int, default=64, help="tokens of the widest pass of one row")
    add("--samples", type=int, default=5)
    args = parser.parse_args(argv)
    stopwatch, target = start(args), hf.load(args.target)
    cells = measure(target, args.rows, args.widths, args)
    result = record(__file__, [without_folder(a) for a in argv], stopwatch)
    result["target"] = Path(args.target).name
    write_json(args.out, checked(result | cells, stopwatch, TIMES))
    print(f"spread {cells['spread']:.1%}; other processes {result['others_cpu']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
