"""Parts of experiments/accelerator that need no measurement; test_experiments.py runs it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from importlib import metadata
from types import SimpleNamespace

import pytest

from experiments.accelerator import child, models, paper, run, tables
from specjax.errors import UserError
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
    result = {"versions": versions, "runs": [{"command": "c", "date": "d"}], "skipped": []}
    result |= {"contexts": [plain], "controlled": [drafted]}
    paper.add(result, scale.models)
    assert plain["share_of_datasheet"] == pytest.approx(0.5)
    expected = scaling.speculative(setup, plan, 8, 1088)
    assert drafted["paper_speedup"] == pytest.approx(expected.speedup)
    text = tables.tables(result)
    assert "| SGLang | Llama 2 7B | H100 |" in text
    assert "Datasheet of H100 SXM: 3350 GB/s, 989.5 TFLOP/s in bfloat16" in text
    assert f"| 60% | 50% | {predicted:.1f} |" in text
    assert f"| 100.0 | {expected.tokens_per_second:.1f} | 1.50 | 1.60 |" in text
    # Larger than the memory of the datasheet, and measured: a prediction, not an error.
    plain["batch_size"] = 800
    paper.add(result, scale.models)
    versions["device"] = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    paper.add(result, scale.models)
    assert result["datasheet"] is None and "no datasheet" in tables.tables(result)


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


@pytest.fixture
def machine(monkeypatch):
    """A machine with a backend and packages; its processes measure nothing. Lists their tasks."""

    def make(backend, absent=(), failing=()):
        ran, real = [], (importlib.util.find_spec, metadata.version)

        def find(name, *more):
            return None if name in absent else SimpleNamespace() if name in PEER else real[0](name)

        def version(name):
            if name in absent:
                raise metadata.PackageNotFoundError(name)
            return "1" if name in PEER else real[1](name)

        def process(command, **_):
            if "-c" in command:
                return SimpleNamespace(returncode=0, stdout=f"a warning\n{backend}\n", stderr="")
            task, file = command[3:5]
            ran.append(task)
            if task in failing:
                return SimpleNamespace(returncode=1)
            with open(file, "a") as lines:
                row = {"task": task, "bytes_per_second": 1e9}
                part = {"section": f"of {task}", "rows": [row], "device": None}
                lines.write(json.dumps(part) + "\n")
            return SimpleNamespace(returncode=0)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(subprocess, "run", process)
        return ran

    return make


PEER = ("torch", "transformers")
BUFFERS = [f"1b:{name}" for name in run.BUFFERS]


@pytest.mark.parametrize(
    ("backend", "absent", "left_out"),
    [
        ("gpu", (), {}),
        ("gpu", ("torch",), {"peer": "it needs torch; run pip install torch"}),
        (
            "gpu",
            PEER,
            {"peer": "it needs torch and transformers; run pip install torch transformers"},
        ),
        (
            "tpu",
            (),
            {
                "buffers": "it is for gpu, not for tpu: command buffers are CUDA graphs",
                "peer": "it is for gpu and cpu, not for tpu: transformers would run on the CPU of "
                "the host, which is another device",
            },
        ),
        ("cpu", (), {"buffers": "it is for gpu, not for cpu: command buffers are CUDA graphs"}),
    ],
)
def test_sections_run_where_they_have_a_meaning(
    backend, absent, left_out, machine, tmp_path, capsys
):
    ran, out = machine(backend, absent), tmp_path / "results.json"
    run.main([f"--out={out}"])
    every = ["bandwidth", "1b", "peer", *BUFFERS, "8b", "1b:contexts", "8b:contexts"]
    every += ["1b:attention", "8b:attention"]
    gone = {task for name in left_out for task in (BUFFERS if name == "buffers" else [name])}
    assert ran == [task for task in every if task not in gone]
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    assert {row["task"]: row["why"] for row in result["skipped"]} == left_out
    for name, why in left_out.items():
        assert f"{name}: left out; {why}\n" in text
    assert set(PEER) - set(absent) <= set(result["versions"]) and "jax" in result["versions"]
    assert not set(absent) & set(result["versions"])


def test_what_fails_does_not_stop_the_rest(machine, tmp_path, monkeypatch):
    """A process, and the predictions beside what was measured."""
    ran, out = machine("tpu", failing=("1b",)), tmp_path / "results.json"
    monkeypatch.setattr(paper, "add", lambda *_: 1 / 0)
    sections = ["--sections", "bandwidth", "verify", "attention", "--models", "1b"]
    run.main([*sections, f"--out={out}"])
    result = json.loads(out.read_text())
    assert ran == ["bandwidth", "1b", "1b:attention"] and "of 1b:attention" in result
    whys = {row["task"]: row["why"] for row in result["skipped"]}
    assert "status 1" in whys["1b"]
    assert whys["predictions after bandwidth"] == "ZeroDivisionError: division by zero"


def test_a_second_run_keeps_what_it_does_not_measure(machine, tmp_path):
    ran, out = machine("gpu", failing=("1b:contexts",)), tmp_path / "results.json"
    run.main(["--models", "1b", f"--out={out}"])
    first = json.loads(out.read_text())
    first |= {"verify": [{"model": "1b", "ms": 1}, {"model": "8b", "ms": 2}]}
    now = {"runs": [{"tasks": ["1b", "1b:contexts"]}], "verify": [{"model": "1b", "ms": 3}]}
    both = run.merged(first, first | now | {"skipped": []})
    assert both["verify"] == [{"model": "8b", "ms": 2}, {"model": "1b", "ms": 3}]
    assert both["skipped"] == [] and first["skipped"][0]["of"] == "1b:contexts"
    assert both["runs"] == first["runs"] + now["runs"]
    ran.clear()
    run.main(["--models", "1b", "--sections", "bandwidth", f"--out={out}"])
    second = json.loads(out.read_text())
    assert ran == ["bandwidth"] and second["skipped"] == first["skipped"]
    assert [len(part["tasks"]) for part in second["runs"]] == [8, 1]
    other = first | {"versions": {"device": "another"}, "verify": []}
    assert run.merged(first, other) == other


def test_a_section_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("no such kernel\nmore")

    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: 1 GB")

    monkeypatch.setitem(child.PER_SIZE, "autoregressive", lambda *_: [{"a": 1}])
    monkeypatch.setitem(child.PER_SIZE, "verify", broken)
    monkeypatch.setitem(child.PER_SIZE, "controlled", full)
    scale, file = models.scale(tiny=True), tmp_path / "lines.jsonl"
    child.measure("1b", list(child.PER_SIZE), scale, file)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["section"], line["rows"]) for line in lines] == [
        ("autoregressive", [{"model": "1b", "a": 1}]),
        ("skipped", [{"task": "1b verify", "why": "ValueError: no such kernel"}]),
        ("skipped", [{"task": "1b controlled", "why": "the memory of the device was full"}]),
    ]
    assert "Traceback" in capsys.readouterr().err


def test_a_backend_that_cannot_start_is_one_line(monkeypatch):
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no TPU\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(UserError, match=r"cannot start a backend \(RuntimeError: no TPU\)"):
        run.main(["--tiny"])
