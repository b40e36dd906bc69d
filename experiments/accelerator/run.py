"""What an accelerator makes of the decode loop, at the shapes of Llama 3.2 1B and Llama 3.1 8B: bfloat16, random weights.

    PYTHONPATH=. python experiments/accelerator/run.py                        (one GPU, under 10 minutes)
    PYTHONPATH=. python experiments/accelerator/run.py --tiny --out=FILE      (a rehearsal on a CPU, about a minute)

It needs jax, flax, numpy, torch and transformers. Sections, of which ``--sections`` chooses:

- ``bandwidth``: bytes read and written a second by a copy of a large array.
- ``autoregressive``: plain decoding at batch 1 and 8, and its share of what that bandwidth allows: no step is quicker than
  reading the weights and the keys and values of the text so far.
- ``verify``: target passes over 1 to 64 tokens, chains and binary trees, relative to a pass over one token.
- ``controlled``: speculation with the drafter ``controlled`` (a real draft model is run and paid for, its tokens are right at
  a chosen rate): measured speed-up, the speed-up predicted from the costs of the parts measured alone, and their ratio,
  system efficiency. ``gap`` is what a round takes beyond drafting, verifying and accepting measured alone. The draft for 8B
  has the shape of 1B, that for 1B its first two layers'.
- ``buffers``: the same at one rate with XLA's command buffers (CUDA graphs) as they are by default, off, and with loops and
  conditionals inside them; a process for each, for it is a flag.
- ``peer``: ``transformers.generate``, eager, dynamic cache, same shape, precision and batch, on the same device.

Every size is a process of its own, which writes down a section as soon as it is measured whole: whoever kills this keeps
what was done. A size that does not fit, and what the time limit cut off, is named under ``skipped``. The weights are made on
the device; the embeddings are large beside the layers, so that the greedy token never hangs on bfloat16's rounding and a rate
is what it says. The text is of no interest. ``results.json`` is written beside this file, unless it ran on a CPU: then
only to ``--out``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from experiments.accelerator import sections
from experiments.accelerator.sections import Scale
from experiments.vs_transformers.run import machine
from specjax.errors import UserError
from specjax.models.hf_config import config_to_hf

# Which flag: https://openxla.org/xla/flags_guidance. Nothing after "=" turns them off; "+" adds to the default.
FLAG = "--xla_gpu_enable_command_buffer="
BUFFERS = {"default": "", "off": FLAG, "with loops": f"{FLAG}+WHILE,+CONDITIONAL"}
SIZES = ("1b", "8b")
PER_SIZE = ("autoregressive", "verify", "controlled")
SECTIONS = ("bandwidth", *PER_SIZE, "buffers", "peer")
ROOT = Path(__file__).parents[2]
LEAST = 20  # seconds that must be left for a process to be worth starting


# In a child process ------------------------------------------------------------------------------------------------


def child(task: str, chosen: Sequence[str], size: Scale, file: Path) -> None:
    """Measures the sections of one task and writes a line for each as soon as it is done."""

    def put(section: str, rows: list[dict], **more: Any) -> None:
        device = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(
                json.dumps({"section": section, "rows": rows, "device": device} | more) + "\n"
            )

    if task == "bandwidth":
        return put("bandwidth", sections.bandwidth(size))
    if task == "peer":
        return put("peer", peer(size))
    name, _, variant = task.partition(":")
    free, need = limit(), sections.needed(name, size)
    if need > free:
        told = f"{name} needs about {need / 1e9:.0f} GB and the device has {free / 1e9:.0f}"
        return put("skipped", [{"task": task, "why": told}])
    params = sections.weights(size.models[name], 0)
    if variant:
        return put(
            "buffers", [{"buffers": variant} | row for row in sections.buffers(name, size, params)]
        )
    for section in PER_SIZE:
        if section in chosen:
            put(
                section,
                [{"model": name} | row for row in getattr(sections, section)(name, size, params)],
            )


def limit() -> float:
    """Bytes that this process may use of its device."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peer(size: Scale) -> list[dict]:
    """transformers at the 1B shape: tokens a second of ``generate``, prefill included. Nothing of ours is on the device."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    config, device = size.models["1b"], "cuda" if torch.cuda.is_available() else "cpu"
    shape = transformers.LlamaConfig(**config_to_hf(config))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model: Any = transformers.LlamaForCausalLM(shape).eval()
    rows = []
    for batch in size.batches:
        tokens = torch.randint(config.vocab_size, (batch, size.prompt), device=device)
        settings = {"max_new_tokens": size.new, "do_sample": False, "pad_token_id": 0}
        seconds = []
        with torch.inference_mode():
            for _ in range(size.passes + 1):  # the first warms up
                began = time.perf_counter()
                out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **settings)
                out.tolist()
                seconds.append(time.perf_counter() - began)
        rates = [batch * size.new / s for s in seconds[1:]]
        rows.append(
            {
                "model": "1b",
                "batch_size": batch,
                "tokens_per_second": statistics.median(rates),
                "spread": [min(rates), max(rates)],
                "device": torch.cuda.get_device_name() if device == "cuda" else device,
            }
        )
    return rows


# The parent, which never touches the device -------------------------------------------------------------------------


def tasks(chosen: Sequence[str], sizes: Sequence[str], tiny: bool) -> list[tuple[str, str]]:
    """What is run, in this order, each in a process of its own: (task, what it adds to XLA_FLAGS)."""
    found = [("bandwidth", "")] if "bandwidth" in chosen else []
    per_size = [(size, "") for size in sizes if set(PER_SIZE) & set(chosen)]
    found += per_size[:1]
    found += [("peer", "")] if "peer" in chosen else []
    variants = [
        name for name in BUFFERS if name == "with loops" or not tiny
    ]  # without a GPU they are all the same
    found += [(f"1b:{name}", BUFFERS[name]) for name in variants] if "buffers" in chosen else []
    return found + per_size[1:]


def run(args: argparse.Namespace, result: dict, write: Any) -> None:
    """Runs all tasks within the time limit; what each has measured goes into ``result``, which is written every time."""
    ends = time.perf_counter() + 60 * args.minutes
    for task, flag in tasks(args.sections, args.models, args.tiny):
        left = ends - time.perf_counter()
        if left < LEAST:
            result["skipped"].append(
                {"task": task, "why": f"the {args.minutes:g} minutes were over"}
            )
            write()
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "lines.jsonl"
            command = [
                sys.executable,
                "-m",
                "experiments.accelerator.run",
                f"--child={task}",
                f"--lines={file}",
            ]
            command += ["--sections", *args.sections, *(["--tiny"] if args.tiny else [])]
            env = dict(os.environ) | {
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
            }
            env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
            if args.tiny:  # most of a rehearsal is compiling
                env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
            env["PYTHONPATH"] = os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
            try:
                code = subprocess.run(command, env=env, timeout=left).returncode
                why = (
                    f"its process ended with status {code}; what it said is above" if code else None
                )
            except subprocess.TimeoutExpired:
                why = f"the {args.minutes:g} minutes were over while it ran"
            for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
                found = json.loads(line)
                result[found["section"]] = result.get(found["section"], []) + found["rows"]
                result["versions"] |= found["device"]
        if why:
            result["skipped"].append({"task": task, "why": why})
        print(
            f"{task}: {time.perf_counter() - began:.0f} s" + (f"; {why}" if why else ""), flush=True
        )
        shares(result)
        write()


def shares(result: dict) -> None:
    """What plain decoding reaches of what the copy's bandwidth allows."""
    for row in result.get("autoregressive", []) if result.get("bandwidth") else []:
        steps = row["tokens_per_second"] / row["batch_size"]
        row["share_of_bandwidth"] = (
            steps * row["bytes_per_step"] / result["bandwidth"][0]["bytes_per_second"]
        )


def table(result: dict) -> str:
    """The results as Markdown, a table for each section that there is."""
    versions = result["versions"]
    parts = [
        f"{versions.get('device')}, jax {versions['jax']}, {result['date']}: `{result['command']}`"
    ]

    def add(title: str, head: str, rows: Sequence[str]) -> None:
        if rows:
            parts.append(
                "\n".join([f"{title}\n", head, "|" + "---|" * (head.count("|") - 1), *rows])
            )

    for row in result.get("bandwidth", []):
        parts.append(f"Copy: {row['bytes_per_second'] / 1e9:.0f} GB/s.")
    theirs = {
        (row["model"], row["batch_size"]): row["tokens_per_second"]
        for row in result.get("peer", [])
    }
    lines = []
    for row in result.get("autoregressive", []):
        peer_rate = theirs.get((row["model"], row["batch_size"]))
        ratio = f"{peer_rate:.1f} ({row['with_prefill'] / peer_rate:.2f}x)" if peer_rate else ""
        share = f"{row['share_of_bandwidth']:.0%}" if "share_of_bandwidth" in row else ""
        lines.append(
            f"| {row['model']} | {row['batch_size']} | {row['tokens_per_second']:.1f} | {share} | {row['step_ms']:.2f} "
            f"| {row['pass_alone_ms']:.2f} | {row['with_prefill']:.1f} | {ratio} |"
        )
    head = "| model | batch | tokens/s | of the bandwidth | step, ms | pass alone, ms | with prefill | transformers |"
    add("Plain decoding", head, lines)
    lines = [
        f"| {row['model']} | {row['batch_size']} | {row['shape']} | {row['tokens']} | {row['ms']:.2f} "
        f"| {row['relative']:.2f} |"
        for row in result.get("verify", [])
    ]
    add("Verifying", "| model | batch | shape | tokens | ms | relative |", lines)
    for title, section, key in (
        ("Controlled acceptance", "controlled", "model"),
        ("Buffers", "buffers", "buffers"),
    ):
        lines = []
        for row in result.get(section, []):
            cost = row["costs_ms"]
            parts_ms = " + ".join(f"{cost[part]:.2f}" for part in ("draft", "verify", "accept"))
            lines.append(
                f"| {row[key]} | {row['batch_size']} | {row['gamma']} | {row['rate']:g} | {row['block_efficiency']:.2f} "
                f"| {row['speedup']:.2f} | {row['predicted_speedup']:.2f} | {row['system_efficiency']:.2f} "
                f"| {cost['step']:.2f} | {parts_ms} | {row['round_ms']:.2f} | {row['gap_ms']:.2f} |"
            )
        head = f"| {key} | batch | gamma | rate | tau | speed-up | predicted | efficiency | step | draft + verify + accept "
        add(f"{title} (times in ms)", head + "| round | gap |", lines)
    parts += [f"Skipped: {row['task']}, {row['why']}." for row in result["skipped"]]
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS, metavar="SECTION"
    )
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES, metavar="MODEL")
    parser.add_argument(
        "--minutes", type=float, default=9.5, help="what is not done by then is left out"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes: a test that it runs, on any device"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="where the results go; needed on a CPU"
    )
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        return child(args.child, args.sections, sections.scale(args.tiny), args.lines)
    result: dict[str, Any] = {
        "schema": 1,
        "command": shlex.join(["python", "experiments/accelerator/run.py", *argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {
            name: version(name) for name in ("specjax", "jax", "flax", "torch", "transformers")
        },
        "tiny": args.tiny,
        "skipped": [],
    }

    def write() -> None:
        out = args.out
        if out is None and not args.tiny and result["versions"].get("backend", "cpu") != "cpu":
            out = Path(__file__).with_name("results.json")
        if out is not None:
            out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    if args.out is None and not args.tiny and not accelerated():
        raise UserError(
            "there is no accelerator here; give --tiny to rehearse, or --out=FILE to measure this machine"
        )
    run(args, result, write)
    print(table(result))


def accelerated() -> bool:
    """Whether a child would find an accelerator. Asked in a process of its own: to ask is to take its memory."""
    told = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.default_backend())"],
        capture_output=True,
        text=True,
    )
    return told.stdout.strip() not in ("", "cpu")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
