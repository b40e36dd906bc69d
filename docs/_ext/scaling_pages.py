"""Predictions of ``specjax.theory.scaling`` as tables and curves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.lines import Line2D

from experiments.tables import table
from specjax.models.transformer_config import TransformerConfig
from specjax.report import canvas
from specjax.theory import devices, scaling
from specjax.theory.scaling import Setup, Speculation

# Llama 3.2 1B and Llama 3.1 8B.
SMALL = TransformerConfig("llama", 128256, 2048, 8192, 16, 32, 8, 64, 131072)
LARGE = TransformerConfig(
    "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, tie_embeddings=False
)
SHAPES = {"Llama 1B": SMALL, "Llama 8B": LARGE}
SHOWN = ("TPU v5p", "TPU v6e", "H100 SXM", "B200")
CONTEXT, SHORT, GAMMA, ALPHA = 1024, 256, 4, 0.7
PLAN = (
    f"A draft model with one layer of the target's shape and its vocabulary, {GAMMA} draft tokens, "
    "bfloat16, one chip, peak values of datasheets."
)
Axes = Any


def parts() -> dict[str, str]:
    """Name of a part -> its MyST text."""
    return {
        "scaling_devices": device_table(),
        "scaling_throughput": _picture(throughput()),
        "scaling_break_even": _picture(break_even()),
        "scaling_table": prediction_table(),
        "scaling_tensor": tensor_table(),
    }


def speculation(config: TransformerConfig, alpha: float = ALPHA) -> Speculation:
    """A chain from a draft model with one layer of the target."""
    return Speculation(GAMMA, alpha=alpha, draft=dataclasses.replace(config, num_layers=1))


def device_table() -> str:
    """The table of devices with its sources."""
    rows = [
        (
            device.name,
            f"{device.memory / 1e9:g}",
            f"{device.bandwidth / 1e9:,.0f}",
            f"{device.flops / 1e12:,.4g}",
            f"{device.interconnect / 1e9:g}",
            device.source,
        )
        for device in devices.DEVICES
    ]
    heads = ("device", "memory, GB", "bandwidth, GB/s", "bf16, TFLOP/s", "sends, GB/s", "source")
    return table(heads, rows)


def throughput() -> Any:
    """Tokens per second against the batch, plain (dashed) and with speculation."""
    caption = (
        f"Predictions, not measurements. Solid: speculation at acceptance rate {ALPHA:g}; dashed: "
        f"plain decoding. {CONTEXT} cached tokens per row. {PLAN} A line ends at the last power of "
        "two that fits into the memory."
    )

    def draw(ax: Axes, setup: Setup, config: TransformerConfig, colour: str) -> None:
        plan = speculation(config)
        most = scaling.largest_batch(setup, CONTEXT, plan.draft)
        batches = [2**power for power in range(int(math.log2(most)) + 1)]
        plain = [scaling.plain(setup, b, CONTEXT).tokens_per_second for b in batches]
        fast = [scaling.speculative(setup, plan, b, CONTEXT).tokens_per_second for b in batches]
        ax.plot(batches, plain, color=colour, linestyle="dashed", linewidth=1.2)
        ax.plot(batches, fast, color=colour, linewidth=1.4)

    figure = _panels("Predicted tokens per second", caption, draw)
    for ax in figure.axes:
        ax.set_ylim(80, 600_000)
        canvas.ticks(ax, [1, 8, 64, 512, 4096], str)
    _label(figure, "batch", "tokens per second", (100, 1000, 10_000, 100_000))
    return figure


def break_even() -> Any:
    """The largest batch at which speculation gains, against the acceptance rate."""
    caption = (
        f"Predictions, not measurements. The largest batch at which a round gains, with {SHORT} "
        f"cached tokens per row. {PLAN} The flat end of a line is the largest batch that fits into "
        "the memory: there speculation gains at every batch. Left of a line no batch gains."
    )
    alphas = [number / 100 for number in range(0, 101)]

    def draw(ax: Axes, setup: Setup, config: TransformerConfig, colour: str) -> None:
        plans = [speculation(config, alpha) for alpha in alphas]
        most = scaling.largest_batch(setup, SHORT, plans[0].draft)
        limits = [min(scaling.break_even(setup, plan, SHORT), most) for plan in plans]
        gains = [(a, limit) for a, limit in zip(alphas, limits, strict=True) if limit >= 1]
        ax.plot(*zip(*gains, strict=True), color=colour, linewidth=1.4)

    figure = _panels("Predicted break-even batch", caption, draw)
    for ax in figure.axes:
        ax.set(xlim=(0, 1), ylim=(10, 4000))
    _label(figure, "acceptance rate", "largest batch with a gain", (10, 100, 1000))
    return figure


def _panels(
    title: str, caption: str, draw: Callable[[Axes, Setup, TransformerConfig, str], None]
) -> Any:
    """A figure with a panel per shape and a line per device."""
    figure, axes = canvas.canvas(title, list(SHAPES), 3.2)
    styles = [{**canvas.style(index), "marker": ""} for index in range(len(SHOWN))]
    for ax, config in zip(axes, SHAPES.values(), strict=True):
        for name, style in zip(SHOWN, styles, strict=True):
            draw(ax, scaling.setup_of(name, config), config, style["color"])
    return canvas.finish(figure, SHOWN, caption, [Line2D([], [], **style) for style in styles])


def _label(figure: Any, x: str, y: str, marks: Sequence[int]) -> None:
    """Names the axes; the y axis is logarithmic, with these marks."""
    for ax in figure.axes:
        ax.set_yscale("log")
        ax.set_yticks(marks, labels=[canvas.number(mark) for mark in marks])
        ax.minorticks_off()
        ax.set_xlabel(x, fontsize=9)
    figure.axes[0].set_ylabel(y, fontsize=9)


def _picture(figure: Any) -> str:
    return f"```{{raw}} html\n{canvas.svg(figure)}\n```"


def prediction_table() -> str:
    """Every device: the memory, and the speed at two batches."""
    rows = []
    for shape, config in SHAPES.items():
        for name in devices.names():
            setup, plan = scaling.setup_of(name, config), speculation(config)
            most = scaling.largest_batch(setup, CONTEXT, plan.draft)
            cells = [_speeds(setup, plan, batch) if batch <= most else "" for batch in (1, 8, 64)]
            weights = scaling.memory(setup, 1, 0).weights / 1e9
            rows.append((shape, name, f"{weights:.1f}", str(most), *cells))
    heads = ("shape", "one chip", "weights, GB", "largest batch", "batch 1", "batch 8", "batch 64")
    return table(heads, rows)


def _speeds(setup: Setup, plan: Speculation, batch: int) -> str:
    plain = scaling.plain(setup, batch, CONTEXT).tokens_per_second
    gain = scaling.speculative(setup, plan, batch, CONTEXT).speedup
    return f"{plain:,.0f}, {gain:.2f}x"


def tensor_table() -> str:
    """Tensor parallelism: what the chips of a group send, and what remains of the gain."""
    rows: list[Sequence[str]] = []
    plan = speculation(LARGE)
    for name in ("TPU v5e", "H100 SXM"):
        for tensor in (1, 2, 4, 8):
            setup = scaling.setup_of(name, LARGE, tensor=tensor)
            if not scaling.memory(setup, 8, CONTEXT, plan.draft).fits:
                rows.append((name, str(tensor), "does not fit", "", "", ""))
                continue
            plain = scaling.plain(setup, 8, CONTEXT)
            gain = scaling.speculative(setup, plan, 8, CONTEXT).speedup
            layer = scaling.collective_time(setup, 8) * 1e6
            share = LARGE.num_layers * layer / 1e6 / plain.step
            speed = f"{plain.tokens_per_second:,.0f}"
            rows.append((name, str(tensor), speed, f"{gain:.2f}x", f"{layer:.2f}", f"{share:.1%}"))
    heads = ("device", "tensor", "tokens/s", "speed-up", "both all-reduces of a layer, us")
    return table((*heads, "of a step"), rows)
