"""Accelerators: what their vendors publish about one chip.

The numbers are peak values of datasheets, not measurements: programs reach less. GB, TB and TFLOPS
are powers of ten. Operations are those of dense matrix products in bfloat16 (T4: float16): half of
the value where a datasheet counts structured sparsity. The interconnect is what a chip sends per
second over all its links to other chips: half of the value where a datasheet counts both
directions. The network between hosts is not in the table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from specjax.errors import UserError
from specjax.theory.roofline import Machine


class Device(NamedTuple):
    """One chip, as its vendor describes it."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second between memory and arithmetic
    flops: float  # dense bfloat16 operations per second
    interconnect: float  # bytes per second that the chip sends to other chips
    source: str
    kinds: tuple[str, ...] = ()  # values of ``jax.Device.device_kind``

    def machine(self, overhead: float = 0.0) -> Machine:
        """The chip in the roofline model; ``overhead`` are seconds of every pass."""
        return Machine(self.bandwidth, self.flops, overhead, self.interconnect)


def _cloud(chip: str) -> str:
    return f"Google Cloud documentation, TPU {chip}: docs.cloud.google.com/tpu/docs/{chip}"


_T4 = "NVIDIA T4 Tensor Core GPU, datasheet; operations in float16; PCIe 3.0"
_L4 = "NVIDIA L4 Tensor Core GPU, datasheet; PCIe 4.0"
_A100 = "NVIDIA A100 Tensor Core GPU, datasheet, column A100 80GB SXM"
_A100_40 = "NVIDIA A100 Tensor Core GPU, datasheet of 2020 (40GB)"
_H100 = "NVIDIA H100 Tensor Core GPU, datasheet, column H100 SXM"
_PCIE = "NVIDIA H100 Tensor Core GPU, datasheet of 2022, column H100 PCIe"
_NVL = "NVIDIA H100 Tensor Core GPU, datasheet, column H100 NVL"
_H200 = "NVIDIA H200 Tensor Core GPU, datasheet, column H200 SXM"
_B200 = (
    "NVIDIA DGX B200, datasheet and user guide, an eighth of the system; operations: "
    "NVIDIA Blackwell architecture technical brief, HGX B200"
)

# name, memory, bandwidth, flops, interconnect, source, kinds
DEVICES = (
    Device("TPU v4", 32e9, 1200e9, 275e12, 6 * 50e9, _cloud("v4"), ("TPU v4",)),
    Device("TPU v5e", 16e9, 819e9, 197e12, 400e9 / 2, _cloud("v5e"), ("TPU v5 lite", "TPU v5e")),
    Device("TPU v5p", 95e9, 2765e9, 459e12, 1200e9 / 2, _cloud("v5p"), ("TPU v5", "TPU v5p")),
    Device("TPU v6e", 32e9, 1638e9, 918e12, 800e9 / 2, _cloud("v6e"), ("TPU v6 lite", "TPU v6e")),
    # Each of the two halves of a chip is a device of JAX.
    Device("TPU7x half", 96e9, 3690e9, 2307e12 / 2, 1200e9 / 2 / 2, _cloud("tpu7x"), ("TPU7x",)),
    Device("T4", 16e9, 320e9, 65e12, 32e9 / 2, _T4, ("Tesla T4",)),
    Device("L4", 24e9, 300e9, 242e12 / 2, 64e9 / 2, _L4, ("NVIDIA L4",)),
    Device("A100 40GB SXM", 40e9, 1555e9, 312e12, 600e9 / 2, _A100_40, ("NVIDIA A100-SXM4-40GB",)),
    Device("A100 80GB SXM", 80e9, 2039e9, 312e12, 600e9 / 2, _A100, ("NVIDIA A100-SXM4-80GB",)),
    Device("H100 SXM", 80e9, 3350e9, 1979e12 / 2, 900e9 / 2, _H100, ("NVIDIA H100 80GB HBM3",)),
    Device("H100 PCIe", 80e9, 2000e9, 1513e12 / 2, 600e9 / 2, _PCIE, ("NVIDIA H100 PCIe",)),
    Device("H100 NVL", 94e9, 3900e9, 1671e12 / 2, 600e9 / 2, _NVL, ("NVIDIA H100 NVL",)),
    Device("H200", 141e9, 4800e9, 1979e12 / 2, 900e9 / 2, _H200, ("NVIDIA H200",)),
    Device("B200", 1440e9 / 8, 64e12 / 8, 4500e12 / 2, 14.4e12 / 8 / 2, _B200, ("NVIDIA B200",)),
)
"""The table, in the order in which pages show it."""


def names() -> tuple[str, ...]:
    """The names of the devices in the table."""
    return tuple(device.name for device in DEVICES)


def named(name: str | Device) -> Device:
    """The device with this name, in any case; a ``Device`` is returned as it is.

    ``named("H100 SXM")._replace(bandwidth=...)`` is a device with a measured value. Raises
    UserError for a name that is not in the table, and for values that are not positive numbers.
    """
    if isinstance(name, Device):
        values = (name.memory, name.bandwidth, name.flops, name.interconnect)
        if not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
            raise UserError(f"{name.name} has the values {values}; all must be positive numbers")
        return name
    for device in DEVICES:
        if isinstance(name, str) and name.casefold() == device.name.casefold():
            return device
    raise UserError(f"there is no device {name!r}; known are {', '.join(names())}")


def of_kind(kind: str) -> Device | None:
    """The device with this ``jax.Device.device_kind``; None if the table does not have it.

    Only exact values are recognised: other variants of a chip, and parts of a GPU, have other
    datasheets.
    """
    return next((device for device in DEVICES if kind in device.kinds), None)
