"""One process of experiments/accelerator: it measures the sections of one task.

    python -m experiments.accelerator.child TASK FILE [--sections SECTION ...] [--tiny]

Appends a line of JSON to FILE for each row when it is measured. A section that fails does not
stop the others: its line says why.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from experiments.accelerator import attention, sections
from experiments.accelerator.models import Scale, bytes_needed, cells, scale, weights
from specjax.errors import UserError
from specjax.models.hf_config import config_to_hf
from specjax.theory import devices

# Sections that are measured for each size of the target, with one set of weights.
PER_SIZE = {
    "autoregressive": sections.autoregressive,
    "verify": sections.verify,
    "controlled": sections.controlled,
}


def measure(
    task: str, chosen: Sequence[str], size: Scale, file: Path, backend: str = "cpu"
) -> None:
    """Measures one task: "bandwidth", "peer", a model, "model:contexts" or another variant.

    ``backend``: of jax, for "peer", which starts none before it has measured.
    """
    if task == "bandwidth":
        return attempt(file, task, "bandwidth", functools.partial(sections.bandwidth, size))
    if task == "peer":
        return attempt(file, task, "peer", functools.partial(peer, size, backend))
    name, _, variant = task.partition(":")
    if variant == "contexts":
        return contexts(name, size, file)
    if variant == "attention":
        return attempt(file, task, "attention", functools.partial(attention.compare, name, size))
    if (needed := bytes_needed(name, size)) > device_bytes():
        return append(file, "skipped", [{"task": task, "why": too_large(needed)}])
    params = weights(size.models[name], 0)
    if variant:
        buffers = functools.partial(sections.buffers, name, size, params)
        return attempt(file, task, "buffers", buffers, {"buffers": variant})
    for section in (section for section in PER_SIZE if section in chosen):
        run = functools.partial(PER_SIZE[section], name, size, params)
        attempt(file, f"{name} {section}", section, run, {"model": name})


def attempt(
    file: Path,
    task: str,
    section: str,
    run: Callable[[], Iterable[dict]],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Measures a section and writes each row with ``more``, or why there are no more."""
    try:
        for row in run():
            append(file, section, [{**more, **row}])
    except Exception as error:  # any failure of a section: the others go on
        if not isinstance(error, UserError):
            traceback.print_exc()
        append(file, "skipped", [{"task": task, "why": reason(error)}])


def reason(error: Exception) -> str:
    """An exception in one line."""
    if "RESOURCE_EXHAUSTED" in str(error):
        return "the memory of the device was full"
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, UserError) else f"{type(error).__name__}: {first}"


def contexts(name: str, size: Scale, file: Path) -> None:
    """Plain decoding after long prompts: each cell is written when it is complete."""
    params = None
    for needed, batch, context in cells(name, size):
        task = f"{name}, batch {batch}, context {context}"
        if needed > device_bytes():
            append(file, "skipped", [{"task": task, "why": too_large(needed)}])
            continue
        params = weights(size.models[name], 0) if params is None else params

        run = functools.partial(sections.after_context, name, size, params, batch, context)
        attempt(file, task, "contexts", lambda run=run: [run()], {"model": name})


def too_large(needed: float) -> str:
    """Why something was not measured."""
    return f"it needs about {needed / 1e9:.0f} GB and the device has {device_bytes() / 1e9:.0f}"


def append(file: Path, section: str, rows: list[dict]) -> None:
    """Writes rows of a section."""
    device = None
    # Not where nothing ran on it: the peer's process leaves the device to torch.
    if section not in ("peer", "skipped"):
        device = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"section": section, "rows": rows, "device": device}) + "\n")


def device_bytes() -> float:
    """Bytes of the device that this process may use."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Where no datasheet has it, the allocation itself fails.
    sheet = devices.of_kind(device.device_kind)
    return float("inf") if sheet is None else sheet.memory


def peer(size: Scale, backend: str) -> list[dict]:
    """transformers at the 1B shape: tokens per second of ``generate``, including prefill.

    No array of jax is on the device. Raises UserError if torch has not the device of jax.
    """
    import torch
    import transformers

    if backend == "gpu" and not torch.cuda.is_available():
        raise UserError("torch has no GPU here, and jax has one; install torch for this GPU")
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
            for _ in range(size.passes + 1):  # the first pass is not counted
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


def main(argv: Sequence[str]) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("file", type=Path)
    parser.add_argument("--sections", nargs="+", default=[])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args(argv)
    measure(args.task, args.sections, scale(args.tiny), args.file, args.backend)


if __name__ == "__main__":
    main(sys.argv[1:])
