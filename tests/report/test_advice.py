"""The drafter that is the fastest, in words."""

from __future__ import annotations

from typing import Any

import pytest

from specjax.report import advice

pytestmark = pytest.mark.fast
ROW: dict[str, Any] = {
    "method": "sam",
    "temperature": 0.0,
    "batch_size": 1,
    "prompts": 8,
    "prompt_set": "x",
    "context": 40.5,
    "category": None,
    "speedup": 1.5,
    "speedup_interval": [1.2, 1.9],
    "block_efficiency": 2.0,
    "gamma": 4,
    "lossless": {"passed": True},
    "costs_ms": {"step": 2.0, "draft": 0.1, "verify": 2.5},
}


def test_the_fastest_drafter_and_what_limits_it():
    other = ROW | {"method": "suffix", "speedup": 2.5, "lossless": {"passed": False}}
    categories = [
        ROW | {"category": name, "speedup": speed, "context": size}
        for name, speed, size in (("qa", 0.9, 30.0), ("code", 2.1, 51.0), ("math", 1.0, 40.0))
    ]
    [line] = advice.lines([ROW, other, *categories])
    assert line == (
        "temperature 0, batch 1: sam is the fastest, 1.50x of plain decoding [1.20, 1.90]; by "
        "category from code 2.10x to qa 0.90x. A round gives 2.00 tokens and costs 1.30 plain "
        "rounds (the verification 1.25, the draft 0.05); the acceptance limits it most."
    )


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"speedup": 0.97}, "no drafter is worth its time; the fastest is sam, with 0.97x"),
        ({"class": "L3"}, "sam (lossy by design) is the fastest"),
        ({"block_efficiency": 0}, "1.50x of plain decoding [1.20, 1.90]."),
        ({"costs_ms": {"step": -1.0, "draft": 1.0, "verify": 1.0}}, "[1.20, 1.90]."),
        ({"speedup_interval": [0.9, 1.9]}, "sam may be faster than plain decoding (1.50x"),
        ({"lossless": {"passed": False}}, "no drafter passed its lossless check"),
        ({"costs_ms": {"step": 1.0, "draft": 2.0, "verify": 1.0}}, "the time of the draft limits"),
        ({"block_efficiency": 4.9}, "the time of the verification limits it most"),
        ({"costs_ms": None, "speedup_interval": None}, "1.50x of plain decoding."),
    ],
)
def test_other_outcomes(keys, part):
    [line] = advice.lines([ROW | keys])
    assert part in line and "\n" not in line


def test_settings_have_a_line_each_and_nothing_measured_has_none():
    several = [ROW, ROW | {"batch_size": 8}, ROW | {"prompt_set": "y"}]
    heads = [line.partition(": ")[0] for line in advice.lines(several)]
    ends = [f"temperature 0, batch {size}, {name}" for size, name in ((1, "x"), (8, "x"), (1, "y"))]
    assert heads == ends
    assert advice.lines([ROW | {"speedup": None}]) == []
