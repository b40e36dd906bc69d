"""The settings along which the speed-up is plotted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.report import _canvas
from specjax.report._rows import number, parameters

PLAIN = "The dashed line is plain decoding"


class Axis(NamedTuple):
    """The x axis of a plot of the speed-up."""

    title: str
    label: str
    value: Callable[[dict], Any]
    # Settings in which the points of one line may differ: the axis determines them.
    ignored: tuple[str, ...]
    spell: Callable[[float], str] = "{:g}".format
    caption: str = f"{PLAIN}."
    steps: bool = False  # whether the values are a few consecutive whole numbers


AXES = {
    "gamma": Axis(
        "Speed-up by the length of the draft",
        "gamma (draft tokens along the longest path)",
        lambda row: number(row, "gamma"),
        ("gamma", "nodes", "draft"),
        steps=True,
    ),
    "temperature": Axis(
        "Speed-up by temperature",
        "temperature",
        lambda row: number(row, "temperature"),
        ("temperature",),
    ),
    "batch_size": Axis(
        "Speed-up by batch size",
        "batch size (rows)",
        lambda row: number(row, "batch_size"),
        ("batch_size",),
        caption=f"{PLAIN} at the same batch size.",
    ),
    "draft_parameters": Axis(
        "Speed-up by the size of the drafter",
        "parameters of the drafter",
        lambda row: parameters(row, "draft"),
        ("draft", "method"),
        _canvas.number,
        f"{PLAIN}. Where several drafters have one size, the line joins the fastest.",
    ),
    "context": Axis(
        "Speed-up by the length of the context",
        "context (mean tokens of the prompts)",
        lambda row: number(row, "context"),
        ("context",),
        _canvas.number,
        f"{PLAIN}. A line is one set of prompts, cut to each length.",
    ),
}
