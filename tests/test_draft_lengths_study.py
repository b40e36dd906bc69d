"""The study of draft lengths: benches collected into one file."""

from __future__ import annotations

import json

import pytest

from experiments.draft_lengths import run

pytestmark = pytest.mark.fast


def bench(folder, speeds):
    """A finished bench with these speed-ups of controllers; returns its folder as text."""
    folder.mkdir()
    row = {
        "drafter": "draft_model",
        "temperature": 0.0,
        "batch_size": 1,
        "speedup_interval": None,
        "block_efficiency": 2.0,
        "lossless": {"passed": True},
        "category": None,
    }
    rows = [row | {"method": f"m{i}", "speedup": speed} for i, speed in enumerate(speeds.values())]
    # Rows of a category are parts of the others.
    rows.append(rows[0] | {"category": "maths", "speedup": 9.0})
    facts = {"target": {"name": "target"}, "command": f"bench {folder.name}", "date": "2026-01-01"}
    results = facts | {"machine": {}, "versions": {}, "rows": rows}
    (folder / "results.json").write_text(json.dumps(results))
    methods = {f"m{i}": {"control": control} for i, control in enumerate(speeds)}
    (folder / "config.json").write_text(json.dumps({"grid": {"methods": methods}}))
    return str(folder)


def test_ratios_to_the_best_choice_in_hindsight(tmp_path):
    gains = bench(tmp_path / "gains", {"fixed:1": 1.2, "fixed:2": 1.5, "goodput": 1.2})
    loses = bench(tmp_path / "loses", {"fixed:1": 0.7, "goodput": 0.9})
    out = tmp_path / "results.json"
    assert run.main([gains, f"tiny={loses}", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    first, second = result["settings"]
    assert (first["target"], first["best"], first["best_speedup"]) == ("target", "fixed:2", 1.5)
    assert first["ratios"] == {"goodput": pytest.approx(0.8)}
    # Plain decoding is a choice too.
    assert (second["target"], second["best"], second["best_speedup"]) == ("tiny", "plain", 1.0)
    assert second["ratios"] == {"goodput": pytest.approx(0.9)}
    assert result["command"].endswith("run.py runs/gains tiny=runs/loses")
    assert result["commands"] == ["bench gains", "bench loses"]


def test_a_speedup_above_tau_is_left_out(tmp_path, capsys):
    speeds = {"fixed:1": 1.2, "fixed:2": 2.2, "goodput": 1.8, "bandit": 2.3}
    out = tmp_path / "results.json"
    assert run.main([bench(tmp_path / "fast", speeds), "--out", str(out)]) == 0
    [setting] = json.loads(out.read_text())["settings"]
    assert setting["fixed"] == {"fixed:1": 1.2} and setting["controllers"] == {"goodput": 1.8}
    assert capsys.readouterr().err.count("above the 2.00 tokens per round") == 2


def test_benches_that_cannot_be_collected(tmp_path, capsys):
    one = bench(tmp_path / "one", {"fixed:1": 1.2, "goodput": 1.2})
    other = bench(tmp_path / "other", {"fixed:1": 1.2, "goodput": 1.2})
    bare = bench(tmp_path / "bare", {"goodput": 1.2})
    cases = {
        "have the same settings; give one": [one, other],
        "has no fixed length; bench some": [f"name={bare}"],
        "is no finished bench": [str(tmp_path / "none")],
    }
    for message, folders in cases.items():
        assert run.main([*folders, "--out", str(tmp_path / "out.json")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out.json").exists()
