"""What the developers of other engines have published for models of these sizes, at batch 1.

They are shown beside the measurements and are not comparable in detail: real models and prompts,
other devices and other draft heads. MT-bench prompts where not said otherwise.
"""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """One published figure."""

    engine: str
    model: str
    device: str
    method: str
    tokens_per_second: float
    plain: float  # tokens per second of the same engine without speculation
    tokens_per_round: float | None
    source: str


_VLLM = "github.com/vllm-project/vllm/pull/16035, comment of 2025-04-09"
_SGLANG = "github.com/SafeAILab/EAGLE/pull/173, one prompt"
ROWS = (
    Published("vLLM V1", "Llama 3 8B", "not named", "EAGLE, 2 tokens", 175.49, 128.64, 1.89, _VLLM),
    Published("vLLM V1", "Llama 3 8B", "not named", "EAGLE, 4 tokens", 165.65, 128.64, 2.08, _VLLM),
    Published("SGLang", "Llama 2 7B", "H100", "EAGLE, tree of 64", 297.0, 156.0, None, _SGLANG),
    Published(
        *("SGLang", "Llama 2 7B", "H100", "EAGLE, tree of 64, torch.compile"),
        *(316.0, 156.0, None, _SGLANG),
    ),
)


def table() -> str:
    """Markdown: the published figures."""
    heads = (
        "engine",
        "model",
        "device",
        "method",
        "tokens/s",
        "plain",
        "speed-up",
        "tau",
        "source",
    )
    lines = ["Published by others\n", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in ROWS:
        tau = "" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"
        speedup = f"{row.tokens_per_second / row.plain:.2f}x"
        numbers = (f"{row.tokens_per_second:g}", f"{row.plain:g}", speedup, tau, row.source)
        lines.append(f"| {' | '.join((*row[:4], *numbers))} |")
    return "\n".join(lines)
