"""Parts of experiments/accelerator that need no measurement; test_experiments.py runs it."""

from __future__ import annotations

import json

import pytest

from experiments.accelerator import child, models, paper, tables
from specjax.theory import roofline, scaling

pytestmark = pytest.mark.fast


def test_predictions_are_printed_beside_measurements():
    """At a share of the datasheet's speed, for a device that the table has."""
    scale = models.scale(tiny=False)
    setup = scaling.setup_of("H100 SXM", scale.models["8b"])
    plan = scaling.Speculation(4, tau=3.0, draft=scale.models["1b"])
    predicted = scaling.plain(setup, 8, 1088).tokens_per_second
    read = roofline.model_of(scale.models["8b"]).weight_bytes + 8 * 1088 * 131_072
    plain = {"model": "8b", "batch_size": 8, "context": 1088, "tokens_per_second": predicted / 2}
    plain |= {"bytes_per_step": read, "step_ms": 1.0, "share_of_bandwidth": 0.6}
    drafted = {"model": "8b", "batch_size": 8, "context": 1088, "gamma": 4, "rate": 0.8}
    drafted |= {"block_efficiency": 3.0, "tokens_per_second": 100.0, "speedup": 1.5}
    drafted |= {"predicted_speedup": 1.6, "system_efficiency": 0.94, "round_ms": 1, "gap_ms": 0}
    drafted["costs_ms"] = {"step": 1, "draft": 1, "verify": 1, "accept": 1}
    versions = {"device": "NVIDIA H100 80GB HBM3", "jax": "0"}
    result = {"versions": versions, "date": "", "command": "", "skipped": []}
    result |= {"contexts": [plain], "controlled": [drafted]}
    paper.add(result, scale.models)
    assert plain["share_of_datasheet"] == pytest.approx(0.5)
    expected = scaling.speculative(setup, plan, 8, 1088)
    assert drafted["paper_speedup"] == pytest.approx(expected.speedup)
    text = tables.markdown(result)
    assert "| SGLang | Llama 2 7B | H100 |" in text
    assert "Datasheet of H100 SXM: 3350 GB/s, 989.5 TFLOP/s in bfloat16" in text
    assert f"| 60% | 50% | {predicted:.1f} |" in text
    assert f"| 100.0 | {expected.tokens_per_second:.1f} | 1.50 | 1.60 |" in text
    # Larger than the memory of the datasheet, and measured: a prediction, not an error.
    plain["batch_size"] = 800
    paper.add(result, scale.models)
    versions["device"] = "NVIDIA H100 PCIe"
    paper.add(result, scale.models)
    assert result["datasheet"] is None and "no datasheet" in tables.markdown(result)


def test_the_study_names_the_contexts_that_do_not_fit(tmp_path, monkeypatch):
    scale = models.scale(tiny=False)
    cells = models.cells("8b", scale)
    assert {cell[1:] for cell in cells} == {(b, c) for b in (1, 8, 64) for c in (1024, 8192)}
    assert cells == sorted(cells) and cells[0][0] > 16e9
    monkeypatch.setattr(child, "device_bytes", lambda: cells[0][0] - 1)
    child.measure("8b:contexts", [], scale, tmp_path / "lines.jsonl")
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    assert len(rows) == 6 and rows[-1]["task"] == "8b, batch 64, context 8192"
    assert all("and the device has" in row["why"] for row in rows)
