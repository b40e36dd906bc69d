"""The table of accelerators."""

from __future__ import annotations

import itertools

import pytest

from specjax.errors import UserError
from specjax.theory import devices

pytestmark = pytest.mark.fast


def test_every_device_has_plausible_values_and_a_source():
    assert len(set(devices.names())) == len(devices.DEVICES) == 14
    for device in devices.DEVICES:
        # Operations per byte of memory traffic; a value wrong by a factor of ten is outside.
        assert 100 < device.flops / device.bandwidth < 700
        # Seconds to read the whole memory.
        assert 0.01 < device.memory / device.bandwidth < 0.1
        assert 0.04 < device.interconnect / device.bandwidth < 0.3
        assert device.source and device.kinds
        assert devices.named(device.name.upper()) is device
    kinds = list(itertools.chain.from_iterable(device.kinds for device in devices.DEVICES))
    assert len(kinds) == len(set(kinds))


def test_published_values():
    h100, v5p = devices.named("H100 SXM"), devices.named("TPU v5p")
    assert h100[1:5] == (80e9, 3.35e12, 989.5e12, 450e9)
    assert v5p[1:5] == (95e9, 2.765e12, 459e12, 600e9)
    assert devices.named("b200")[1:5] == (180e9, 8e12, 2.25e15, 900e9)
    machine = h100.machine(overhead=1e-5)
    assert machine == (3.35e12, 989.5e12, 1e-5, 450e9)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_kinds_of_devices(kind, name):
    device = devices.of_kind(kind)
    assert (device and device.name) == name


def test_errors():
    with pytest.raises(UserError, match="there is no device 'v100'; known are TPU v4, TPU v5e, "):
        devices.named("v100")
    with pytest.raises(UserError, match="all must be positive numbers"):
        devices.named(devices.DEVICES[0]._replace(bandwidth=0))
