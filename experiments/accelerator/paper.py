"""Predictions from the datasheet of the device, beside the measured rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from experiments.accelerator.models import draft_shape
from specjax.models.transformer_config import TransformerConfig
from specjax.theory import devices, scaling
from specjax.theory.scaling import Setup, Speculation


def add(result: dict, models: Mapping[str, TransformerConfig]) -> None:
    """Adds the datasheet of ``result``'s device, and to every row what it predicts.

    Plain rows get ``share_of_datasheet`` (of the bandwidth) and ``paper_tokens_per_second``,
    speculative rows ``paper_tokens_per_second`` and ``paper_speedup`` for the measured tokens per
    round. A device without a datasheet in ``specjax.theory.devices`` adds nothing.
    """
    device = devices.of_kind(result["versions"].get("device", ""))
    result["datasheet"] = None if device is None else device._asdict()
    if device is None:
        return
    # What was measured fits: the devices have a little more memory than their datasheets.
    device = device._replace(memory=sys.float_info.max)
    setups = {name: scaling.setup_of(device, config) for name, config in models.items()}
    for row in result.get("autoregressive", []) + result.get("contexts", []):
        _add_plain(row, setups[row["model"]])
    for row in result.get("controlled", []) + result.get("buffers", []):
        name = row.get("model", "1b")
        _add_speculative(row, setups[name], draft_shape(name, models))


def _add_plain(row: dict, setup: Setup) -> None:
    steps = row["tokens_per_second"] / row["batch_size"]
    row["share_of_datasheet"] = steps * row["bytes_per_step"] / setup.device.bandwidth
    prediction = scaling.plain(setup, row["batch_size"], row["context"])
    row["paper_tokens_per_second"] = prediction.tokens_per_second


def _add_speculative(row: dict, setup: Setup, draft: TransformerConfig) -> None:
    plan = Speculation(row["gamma"], tau=row["block_efficiency"], draft=draft)
    prediction = scaling.speculative(setup, plan, row["batch_size"], row["context"])
    row["paper_tokens_per_second"] = prediction.tokens_per_second
    row["paper_speedup"] = prediction.speedup
