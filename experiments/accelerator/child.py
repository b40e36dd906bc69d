"""One process of experiments/accelerator: it measures the sections of one task.

    python -m experiments.accelerator.child TASK FILE [--sections SECTION ...] [--tiny]

Appends a line of JSON to FILE for each section when it is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.accelerator import attention, sections
from experiments.accelerator.models import Scale, bytes_needed, cells, scale, weights
from specjax.models.hf_config import config_to_hf

# Sections that are measured for each size of the target, with one set of weights.
PER_SIZE = {
    "autoregressive": sections.autoregressive,
    "verify": sections.verify,
    "controlled": sections.controlled,
}


def measure(task: str, chosen: Sequence[str], size: Scale, file: Path) -> None:
    """Measures one task: "bandwidth", "peer", a model, "model:contexts" or another variant."""
    if task == "bandwidth":
        return append(file, "bandwidth", sections.bandwidth(size))
    if task == "peer":
        return append(file, "peer", peer(size))
    name, _, variant = task.partition(":")
    if variant == "contexts":
        return contexts(name, size, file)
    if variant == "attention":
        return append(file, "attention", attention.compare(name, size))
    if (needed := bytes_needed(name, size)) > device_bytes():
        return append(file, "skipped", [{"task": task, "why": too_large(needed)}])
    params = weights(size.models[name], 0)
    if variant:
        rows = sections.buffers(name, size, params)
        return append(file, "buffers", [{"buffers": variant} | row for row in rows])
    for section in (section for section in PER_SIZE if section in chosen):
        rows = PER_SIZE[section](name, size, params)
        append(file, section, [{"model": name} | row for row in rows])


def contexts(name: str, size: Scale, file: Path) -> None:
    """Plain decoding after long prompts: each cell is written when it is complete."""
    params = None
    for needed, batch, context in cells(name, size):
        task = f"{name}, batch {batch}, context {context}"
        if needed > device_bytes():
            append(file, "skipped", [{"task": task, "why": too_large(needed)}])
            continue
        params = weights(size.models[name], 0) if params is None else params
        try:
            row = sections.after_context(name, size, params, batch, context)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            append(file, "skipped", [{"task": task, "why": "the memory of the device was full"}])
            continue
        append(file, "contexts", [{"model": name} | row])


def too_large(needed: float) -> str:
    """Why something was not measured."""
    return f"it needs about {needed / 1e9:.0f} GB and the device has {device_bytes() / 1e9:.0f}"


def append(file: Path, section: str, rows: list[dict]) -> None:
    """Writes one section."""
    device = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"section": section, "rows": rows, "device": device}) + "\n")


def device_bytes() -> float:
    """Bytes of the device that this process may use."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peer(size: Scale) -> list[dict]:
    """transformers at the 1B shape: tokens per second of ``generate``, including prefill.

    No array of jax is on the device.
    """
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
    args = parser.parse_args(argv)
    measure(args.task, args.sections, scale(args.tiny), args.file)


if __name__ == "__main__":
    main(sys.argv[1:])
