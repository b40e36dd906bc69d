"""The decode loop on an accelerator, at the shapes of Llama 3.2 1B and Llama 3.1 8B in bfloat16.

    # one GPU: what 10 minutes allow, then more of it
    PYTHONPATH=. python experiments/accelerator/run.py
    PYTHONPATH=. python experiments/accelerator/run.py --sections contexts attention
    # a test on a CPU with tiny shapes, about a minute
    PYTHONPATH=. python experiments/accelerator/run.py --tiny --out=FILE

It needs the packages of specjax; ``peer`` needs torch and transformers too. The weights are random,
made on the device; the embeddings are large compared with the layers, so that bfloat16's rounding
never decides the greedy token and every rate is exact. The text has no meaning. Sections, chosen
with ``--sections``; they are for GPUs, TPUs and CPUs unless they name others:

- ``bandwidth``: bytes read and written per second by a copy of a large array.
- ``autoregressive``: plain decoding at batch 1 and 8, and its share of what that bandwidth allows:
  no step takes less time than reading the weights, and the keys and values of the text so far.
- ``contexts``: the same at batch 1, 8 and 64 after prompts of 1,024 and 8,192 tokens; what does not
  fit is named.
- ``verify``: target passes over 1 to 64 tokens, chains and binary trees, relative to a pass over
  one token.
- ``attention``: one layer's attention over cached contexts, as it is in the decoder (compiled by
  XLA), beside ``jax.nn``'s with XLA and, on NVIDIA GPUs, with cuDNN: time, and error in bfloat16.
  The decoder uses its own everywhere; this section says where another one would be faster.
- ``controlled``: speculation with the drafter ``controlled`` (a draft model really runs, and its
  tokens are right at a chosen rate): measured speed-up, the speed-up predicted from the costs of
  the parts measured alone, and their ratio, system efficiency. ``gap`` is the time of a round
  without drafting, verifying and accepting measured alone. The draft for 8B has the shape of 1B,
  the draft for 1B that of its first two layers.
- ``buffers``, GPUs only: the same at one rate with XLA's command buffers (CUDA graphs): default,
  off, and with loops and conditionals inside them. They are a flag, so each variant has its own
  process.
- ``peer``, GPUs and CPUs only: ``transformers.generate``, eager, dynamic cache, same shape,
  precision and batch, on the same device. Figures that developers of other engines have published
  are shown beside them (``published``).

Trained heads are measured by another study, which runs on the same device:
``experiments/trained_drafters/questions.py``, then ``experiments/trained_drafters/run.py`` with
``--target=`` a chat model, ``--questions=`` and ``--bench=`` these files and
``--features=bfloat16``: every drafter, trained for ``--steps`` steps, with tau and speed-up.

Where ``specjax.theory.devices`` has the device, the tables also show the share of the datasheet's
bandwidth, and tokens per second and speed-up as ``specjax.theory.scaling`` predicts them from the
datasheet ("on paper"); for other devices the output has the line "no datasheet".

Every size runs in its own process, which writes each section when it is complete: if the study is
killed, the measured sections are kept. A section that is not for this backend, that lacks a package
or that fails does not stop the others. It is named under ``skipped`` with the reason, as is a size
that does not fit, and what the time limit ended. ``results.json`` is written beside this file,
unless the study ran on a CPU: then only to ``--out``. Rows that another run on the same device with
the same versions has left in the file stay, unless they are measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import specjax
from experiments.accelerator import paper
from experiments.accelerator.child import PER_SIZE, reason
from experiments.accelerator.models import scale
from experiments.accelerator.tables import tables
from specjax.bench.results import machine
from specjax.errors import UserError
from specjax.files import write_json

# The flag: https://openxla.org/xla/flags_guidance. An empty value turns command buffers off; "+"
# adds to the default.
FLAG = "--xla_gpu_enable_command_buffer="
BUFFERS = {"default": "", "off": FLAG, "with loops": f"{FLAG}+WHILE,+CONDITIONAL"}
SIZES = ("1b", "8b")
SECTIONS = ("bandwidth", *PER_SIZE, "attention", "buffers", "peer", "contexts")


class Needs(NamedTuple):
    """What a section needs."""

    backends: tuple[str, ...]  # of jax
    why: str  # not others
    packages: tuple[str, ...] = ()


# The other sections run everywhere.
NEEDS = {
    "buffers": Needs(("gpu",), "command buffers are CUDA graphs"),
    "peer": Needs(
        ("gpu", "cpu"),
        "transformers would run on the CPU of the host, which is another device",
        ("torch", "transformers"),
    ),
}
ROOT = Path(__file__).parents[2]
MIN_SECONDS = 20  # a process is not started with less time left


def tasks(chosen: Sequence[str], sizes: Sequence[str], tiny: bool) -> list[tuple[str, str]]:
    """The processes to run, in order: (task, what it adds to XLA_FLAGS)."""
    result = [("bandwidth", "")] if "bandwidth" in chosen else []
    per_size = [(size, "") for size in sizes if set(PER_SIZE) & set(chosen)]
    result += per_size[:1]
    result += [("peer", "")] if "peer" in chosen else []
    if "buffers" in chosen:
        # Without a GPU the variants are all the same.
        variants = ("with loops",) if tiny else tuple(BUFFERS)
        result += [(f"1b:{name}", BUFFERS[name]) for name in variants]
    result += per_size[1:]
    # Last: prefilling long prompts, and compiling many programs.
    slow = [name for name in ("contexts", "attention") if name in chosen]
    return result + [(f"{size}:{name}", "") for name in slow for size in sizes]


def unfit(section: str, backend: str, tiny: bool) -> str | None:
    """Why a section is left out on this machine, or None."""
    needs = NEEDS.get(section)
    if needs is None:
        return None
    # A test of the code on a CPU.
    backends = (*needs.backends, "cpu") if tiny else needs.backends
    if backend not in backends:
        return f"it is for {' and '.join(needs.backends)}, not for {backend}: {needs.why}"
    missing = [name for name in needs.packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs {' and '.join(missing)}; run pip install {' '.join(missing)}"
    return None


def run(args: argparse.Namespace, earlier: dict, result: dict, write: Callable[[], None]) -> None:
    """Runs all tasks within the time limit; adds the sections to ``result`` and writes it."""
    end = time.perf_counter() + 60 * args.minutes
    chosen = []
    for section in args.sections:
        if (why := unfit(section, args.backend, args.tiny)) is None:
            chosen.append(section)
            continue
        result["skipped"].append({"task": section, "why": why, "of": section})
        print(f"{section}: left out; {why}", flush=True)
        write()
    for task, flag in tasks(chosen, args.models, args.tiny):
        left = end - time.perf_counter()
        if left < MIN_SECONDS:
            why = f"the {args.minutes:g} minutes were over"
            result["skipped"].append({"task": task, "why": why, "of": task})
            write()
            continue
        result["runs"][-1]["tasks"].append(task)
        began = time.perf_counter()
        why = run_task(task, flag, args, result, left)
        if why:
            result["skipped"].append({"task": task, "why": why, "of": task})
        seconds = f"{task}: {time.perf_counter() - began:.0f} s"
        print(f"{seconds}; {why}" if why else seconds, flush=True)
        write()
        try:
            both = merged(earlier, result)  # with the rows themselves, not with copies of them
            add_shares(both)
            paper.add(both, scale(args.tiny).models)
            result["datasheet"] = both["datasheet"]
        except Exception as error:  # what was measured is kept, whatever is predicted
            traceback.print_exc()
            name = f"predictions after {task}"
            result["skipped"].append({"task": name, "why": reason(error), "of": task})
        write()


def run_task(
    task: str, flag: str, args: argparse.Namespace, result: dict, seconds: float
) -> str | None:
    """Runs one process and adds its sections to ``result``; why it was not complete, or None."""
    why = None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines.jsonl"
        command = [sys.executable, "-m", "experiments.accelerator.child", task, str(file)]
        command += ["--sections", *args.sections, f"--backend={args.backend}"]
        command += ["--tiny"] if args.tiny else []
        try:
            code = subprocess.run(command, env=environment(flag, args.tiny), timeout=seconds)
            if code.returncode:
                why = f"its process ended with status {code.returncode}; its messages are above"
        except subprocess.TimeoutExpired:
            why = f"the {args.minutes:g} minutes were over while it ran"
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            part = json.loads(line)
            rows = part["rows"]
            if part["section"] == "skipped":
                rows = [row | {"of": task} for row in rows]
            result[part["section"]] = result.get(part["section"], []) + rows
            if part["device"] is not None:
                result["versions"] |= part["device"]
    return why


def environment(flag: str, tiny: bool) -> dict[str, str]:
    """The environment of a process, with ``flag`` added to XLA_FLAGS."""
    env = dict(os.environ)
    env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {flag}".strip()
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if tiny:  # most of the time of a test is compilation
        env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env


def add_shares(result: dict) -> None:
    """Adds to plain decoding the share of the speed that the copy's bandwidth allows."""
    rows = result.get("autoregressive", []) + result.get("contexts", [])
    for row in rows if result.get("bandwidth") else []:
        steps = row["tokens_per_second"] / row["batch_size"]
        bandwidth = result["bandwidth"][0]["bytes_per_second"]
        row["share_of_bandwidth"] = steps * row["bytes_per_step"] / bandwidth


def merged(earlier: dict, result: dict) -> dict:
    """``result`` and what an earlier run on the same device has measured and this one has not."""
    same = all(earlier.get(key) == result[key] for key in ("schema", "machine", "tiny"))
    if not same or not result["versions"].items() <= earlier["versions"].items():
        return result
    both = earlier | result
    for section in SECTIONS:
        rows = result.get(section, [])
        again = {_cell(row) for row in rows}
        kept = [row for row in earlier.get(section, []) if _cell(row) not in again]
        both |= {section: kept + rows} if kept or rows else {}
    begun = {*result["runs"][-1]["tasks"], *(row["of"] for row in result["skipped"])}
    old = [row for row in earlier["skipped"] if row["of"] not in begun]
    return both | {
        "skipped": old + result["skipped"],
        "runs": earlier["runs"] + result["runs"],
        "versions": earlier["versions"],
        "datasheet": result.get("datasheet", earlier.get("datasheet")),
    }


def _cell(row: dict) -> tuple:
    """What a row was measured for: all but the numbers that were measured."""
    kinds = ("model", "buffers", "batch_size", "context", "gamma", "rate")
    return tuple(row.get(name) for name in (*kinds, "shape", "tokens", "implementation"))


def find_backend() -> str:
    """The name of jax's backend; another process asks, since asking takes device memory.

    Raises UserError if jax cannot start one.
    """
    code = "import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"jax cannot start a backend ({why}); mend its installation")
    return done.stdout.split()[-1]


def versions() -> dict[str, str]:
    """The version of each package that is installed."""
    result = {"specjax": specjax.__version__}
    for name in ("jax", "flax", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            result[name] = metadata.version(name)
    return result


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    every = {"nargs": "+", "default": list(SECTIONS), "choices": SECTIONS, "metavar": "SECTION"}
    add("--sections", **every)
    add("--models", **(every | {"default": list(SIZES), "choices": SIZES, "metavar": "MODEL"}))
    add("--minutes", type=float, default=9.5, help="sections not complete by then are left out")
    add("--tiny", action="store_true", help="tiny shapes: a test, on any device")
    add("--out", type=Path, default=None, help="path of the results; needed on a CPU")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    args = parse(argv)
    args.backend = find_backend()
    result: dict[str, Any] = {
        "schema": 2,
        "runs": [
            {
                "command": shlex.join(["python", "experiments/accelerator/run.py", *argv]),
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "tasks": [],
            }
        ],
        "machine": machine(),
        "versions": versions() | {"backend": args.backend},
        "tiny": args.tiny,
        "skipped": [],
    }

    if args.out is None and not args.tiny and args.backend == "cpu":
        raise UserError(
            "there is no accelerator; give --tiny for a test, or --out=FILE to measure this machine"
        )
    out = args.out
    if out is None and not args.tiny:
        out = Path(__file__).with_name("results.json")
    earlier = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {}

    def write() -> None:
        if out is not None:
            write_json(out, merged(earlier, result))

    run(args, earlier, result, write)
    print(tables(merged(earlier, result)))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
